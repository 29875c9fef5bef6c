#include "paramwire/net/slot_reader.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire {

namespace {
// Extent tables kept by a reader, so that row after row of one large block costs one table read. 64 tables of a 256 MiB
// block are 2 MiB.
constexpr std::size_t kTablesKept = 64;
}  // namespace

Result<std::vector<ExtentRow>> parse_extent_table(std::span<const std::byte> table, std::uint64_t raw_size, std::uint32_t expected) {
  const std::uint64_t extents = extent_count(raw_size);
  if (table.size() != extents * sizeof(ExtentRow)) {
    return Error(Code::kCorrupt, cat("extent table of ", table.size(), " bytes for ", extents, " extents"));
  }
  if (crc32c(table) != expected) return Error(Code::kCorrupt, "extent table CRC");
  std::vector<ExtentRow> rows(static_cast<std::size_t>(extents));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].stored_size = load_le<std::uint32_t>(table.data() + i * sizeof(ExtentRow));
    rows[i].crc32c = load_le<std::uint32_t>(table.data() + i * sizeof(ExtentRow) + 4);
    if (rows[i].stored_size != std::min(kExtentBytes, raw_size - i * kExtentBytes)) {
      return Error(Code::kCorrupt, cat("extent ", i, " of the table says ", rows[i].stored_size, " bytes"));
    }
  }
  return rows;
}

void SlotReader::read(BlockRead& item) {
  const bool whole = item.range == ByteRange{0, item.entry.raw_size};
  item.result = whole ? read_whole(item) : read_range(item);
}

Status SlotReader::check_header(const SlotHeader& header, const ManifestEntry& entry, const Locator& locator) const {
  const auto changed = [&](std::string_view what) {
    return Error(Code::kStale, cat("block ", entry.to_string(), " at version ", entry.version, " changed while it was read (", what, ')'));
  };
  if (!omitted_.seq) {
    if (header.seq != locator.seq) return changed(header.seq % 2 != 0 ? "slot withdrawn" : "slot rewritten");
    if (!omitted_.crc) {
      if (const char* reason = verify(header)) return changed(reason);
    }
  }
  if (!omitted_.version && (header.block != entry.id.value || header.version_counter != entry.version.counter)) return changed("other block or version");
  if (!omitted_.epoch && header.epoch != entry.version.epoch) return changed("other epoch");
  return {};
}

// The second look, after every byte was copied.
Status SlotReader::settle(const BlockRead& item, bool bytes_match) {
  PARAMWIRE_TRY(header, memory_.header(item.locator.header_arena, item.locator.header_offset));
  PARAMWIRE_CHECK(check_header(header, item.entry, item.locator));
  if (bytes_match || omitted_.crc) return {};
  return Error(Code::kCorrupt, cat("block ", item.entry.to_string(), " at version ", item.entry.version, ": payload CRC does not match the manifest, though the slot did not change"));
}

Status SlotReader::read_whole(BlockRead& item) {
  wire_bytes_ += item.entry.stored_size;
  if (omitted_.crc) {
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
  if (extent_count(item.entry.raw_size) <= 1) {  // one extent: the block's own CRC covers it
    PARAMWIRE_TRY(space, scratch());
    const auto bytes = space.first(static_cast<std::size_t>(item.entry.raw_size));
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
    return Error(Code::kCorrupt, cat("block ", item.entry.to_string(), " at version ", item.entry.version, ": ", rows.error().message()));
  }
  return read_extents(item, *rows);
}

Status SlotReader::read_extents(BlockRead& item, std::span<const ExtentRow> rows) {
  bool match = true;
  std::size_t done = 0;
  while (done < item.target.size()) {
    const std::uint64_t at = item.range.offset + done;
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

Result<std::span<const ExtentRow>> SlotReader::extent_table(const ManifestEntry& entry, const Locator& locator) {
  const std::uint64_t key = entry.crc64 * 0x9e3779b97f4a7c15U ^ entry.id.value;  // bytes and block: content never differs
  for (auto it = tables_.begin(); it != tables_.end(); ++it) {
    if (it->key != key) continue;
    tables_.splice(tables_.begin(), tables_, it);
    return std::span<const ExtentRow>(tables_.front().rows);
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(extent_count(entry.raw_size) * sizeof(ExtentRow)));
  const std::uint64_t offset = locator.payload_offset + (entry.stored_size + 63) / 64 * 64;
  wire_bytes_ += bytes.size();
  PARAMWIRE_CHECK(memory_.copy(locator.arena, offset, bytes));
  PARAMWIRE_TRY(rows, parse_extent_table(bytes, entry.raw_size, entry.extent_table_crc));
  if (tables_.size() == kTablesKept) tables_.pop_back();
  tables_.push_front(Table{key, std::move(rows)});
  return std::span<const ExtentRow>(tables_.front().rows);
}

}  // namespace paramwire
