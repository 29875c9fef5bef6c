#include "paramwire/net/slot_reader.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/net/block_read.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire {

void SlotReader::read(BlockRead& item) {
  const bool whole = item.range == ByteRange{0, item.entry.stored_size} && item.checks.empty();
  item.result = whole ? read_whole(item) : read_range(item);
}

// The second look, after every byte was copied.
Status SlotReader::settle(const BlockRead& item, bool bytes_match) {
  PARAMWIRE_TRY(header, memory_.header(item.locator.header_arena, item.locator.header_offset));
  PARAMWIRE_CHECK(rules_.check_header(header, item.entry, item.locator));
  if (bytes_match || rules_.omitted().crc) return {};
  return SlotRules::corrupt(item.entry, "payload CRC does not match the manifest, though the slot did not change");
}

Status SlotReader::read_whole(BlockRead& item) {
  wire_bytes_ += item.entry.stored_size;
  if (rules_.omitted().crc) {
    PARAMWIRE_CHECK(memory_.copy(item.locator.arena, item.locator.payload_offset, item.target));
    return settle(item, true);
  }
  PARAMWIRE_TRY(crc, memory_.copy_crc64(item.locator.arena, item.locator.payload_offset, item.target, 0));
  return settle(item, crc == item.entry.crc64);
}

Result<std::span<std::byte>> SlotReader::scratch() {
  if (scratch_.size() == 0) {
    PARAMWIRE_TRY(buffer, Buffer::allocate(kExtentBytes));
    scratch_ = std::move(buffer);
  }
  return scratch_.span();
}

Status SlotReader::read_range(BlockRead& item) {
  if (extent_count(item.entry.stored_size) <= 1) {  // one extent: the block's own CRC covers it
    PARAMWIRE_TRY(space, scratch());
    const auto bytes = space.first(static_cast<std::size_t>(item.entry.stored_size));
    wire_bytes_ += bytes.size();
    PARAMWIRE_TRY(crc, memory_.copy_crc64(item.locator.arena, item.locator.payload_offset, bytes, 0));
    if (!item.target.empty()) std::memcpy(item.target.data(), bytes.data() + item.range.offset, item.target.size());
    return settle(item, crc == item.entry.crc64);
  }
  auto rows = extent_table(item.entry, item.locator);
  if (!rows.ok()) {
    // A table that does not check may be a slot that changed: the header tells which.
    if (rows.error().code() != Code::kCorrupt) return std::move(rows).error();
    PARAMWIRE_CHECK(settle(item, true));
    return SlotRules::corrupt(item.entry, rows.error().message());
  }
  fill_checks(item, **rows);
  return read_extents(item, **rows);
}

Status SlotReader::read_extents(BlockRead& item, const ExtentRows& rows) {
  const ByteRange deferred = deferred_bytes(item);
  bool match = true;
  std::size_t done = 0;
  while (done < item.target.size()) {
    const std::uint64_t at = item.range.offset + done;
    if (holds(deferred, at)) {  // all of them in one copy
      const auto size = static_cast<std::size_t>(deferred.size);
      wire_bytes_ += size;
      PARAMWIRE_CHECK(memory_.copy(item.locator.arena, item.locator.payload_offset + at, item.target.subspan(done, size)));
      done += size;
      continue;
    }
    const std::uint64_t extent = at / kExtentBytes;
    const std::uint64_t begin = extent * kExtentBytes;
    const std::uint64_t size = rows[extent].stored_size;
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(begin + size - at, item.target.size() - done));
    wire_bytes_ += size;
    const bool direct = wanted == size;  // a whole extent goes straight into the target
    PARAMWIRE_TRY(space, scratch());
    const auto into = direct ? item.target.subspan(done, wanted) : space.first(size);
    PARAMWIRE_TRY(crc, memory_.copy_crc32c(item.locator.arena, item.locator.payload_offset + begin, into));
    match = match && crc == rows[extent].crc32c;
    if (!direct) std::memcpy(item.target.data() + done, space.data() + (at - begin), wanted);
    done += wanted;
  }
  return settle(item, match);
}

Result<std::shared_ptr<const ExtentRows>> SlotReader::extent_table(const ManifestEntry& entry, const Locator& locator) {
  if (auto known = rules_.find_table(entry)) return known;
  std::vector<std::byte> bytes(static_cast<std::size_t>(extent_count(entry.stored_size) * sizeof(ExtentRow)));
  wire_bytes_ += bytes.size();
  PARAMWIRE_CHECK(memory_.copy(locator.arena, extent_table_offset(entry, locator), bytes));
  PARAMWIRE_TRY(rows, parse_extent_table(bytes, entry.stored_size, entry.extent_table_crc));
  return rules_.keep_table(entry, std::move(rows));
}

}  // namespace paramwire
