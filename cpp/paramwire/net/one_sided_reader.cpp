#include "paramwire/net/one_sided_reader.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace paramwire {

namespace {

constexpr std::uint32_t kHeaderBytes = sizeof(SlotHeader);
// What stands where a header is to land: no header is all of this. A device may complete a READ without writing anything (rxe of Linux 6.1 does
// when its packets are dropped on this host), and what is left from an earlier read of that slot would vouch for bytes that it says nothing about.
constexpr std::byte kNotHere{0xff};

// The stored bytes that a range needs: whole extents, or the whole of a block that has no table.
ByteRange needed(const BlockRead& read) {
  if (read.range.size == 0) return {0, 0};
  if (extent_count(read.entry.stored_size) <= 1 || read.range == ByteRange{0, read.entry.stored_size}) return {0, read.entry.stored_size};
  const std::uint64_t begin = read.range.offset / kExtentBytes * kExtentBytes;
  const std::uint64_t end = (read.range.offset + read.range.size + kExtentBytes - 1) / kExtentBytes * kExtentBytes;
  return {begin, std::min(end, read.entry.stored_size) - begin};
}

// Bytes [at, at + source.size()) of the block have come to `source`; those that the caller wants go to their place.
void copy_wanted(BlockRead& read, std::uint64_t at, std::span<const std::byte> source) {
  const std::uint64_t begin = std::max(at, read.range.offset);
  const std::uint64_t end = std::min(at + source.size(), read.range.offset + read.range.size);
  if (begin < end) std::memcpy(read.target.data() + (begin - read.range.offset), source.data() + (begin - at), static_cast<std::size_t>(end - begin));
}

bool all_wanted(const BlockRead& read, std::uint64_t at, std::uint64_t size) {
  return at >= read.range.offset && at + size <= read.range.offset + read.range.size;
}

}  // namespace

// ---------------------------------------------------------------- items

void OneSidedReader::begin(std::span<BlockRead> batch, OneSidedMemory& memory) {
  assert(done() && pieces_.empty());
  batch_ = batch;
  memory_ = &memory;
  cursor_ = 0;
  unfinished_ = batch.size();
}

// False: there is no more, or no place for it.
bool OneSidedReader::open_next() {
  if (cursor_ == batch_.size()) return false;
  if (free_.empty()) {
    if (items_.size() == kOpenMax) return false;
    free_.push_back(static_cast<std::uint16_t>(items_.size()));
    items_.emplace_back();
  }
  const std::uint16_t index = free_.back();
  free_.pop_back();
  Item& item = items_[index];
  item = Item();
  item.read = &batch_[cursor_++];
  if (Status status = open(item); !status.ok()) {
    finish(index, std::move(status));
  } else if (item.next < item.end) {
    asking_.push_back(index);
  } else {
    everything_asked(index);  // an empty block, or an empty range: the header alone
    if (!options_.header_with_payload) headers_due_.push_back(index);
  }
  return true;
}

Status OneSidedReader::open(Item& item) {
  const BlockRead& read = *item.read;
  const Locator& locator = read.locator;
  PARAMWIRE_CHECK(check_read(read));
  if (locator.header_offset % kHeaderBytes != 0) return Error(Code::kStale, cat("the locator names a slot header at ", locator.header_offset, ": take a new snapshot"));
  PARAMWIRE_CHECK(memory_->reach(locator.header_arena, locator.header_offset, kHeaderBytes));
  const ByteRange range = needed(read);
  PARAMWIRE_CHECK(memory_->reach(locator.arena, locator.payload_offset, range.offset + range.size));
  const bool whole = read.range == ByteRange{0, read.entry.stored_size};
  const bool by_extents = (!whole || !read.checks.empty()) && range.size > 0 && extent_count(read.entry.stored_size) > 1;
  if (range.size > 0 && (whole || by_extents)) item.direct = memory_->registered(read.target);
  if (by_extents) item.rows = rules_.find_table(read.entry);
  if (item.rows != nullptr) fill_checks(*item.read, *item.rows);
  if (by_extents && item.rows == nullptr) {
    const std::uint64_t size = extent_count(read.entry.stored_size) * sizeof(ExtentRow);
    PARAMWIRE_CHECK(memory_->reach(locator.arena, extent_table_offset(read.entry, locator), size));
    item.asking = Kind::kTable;
    item.end = item.left = size;
    item.table.resize(static_cast<std::size_t>(size));
    return {};
  }
  ask_payload(item);
  return {};
}

void OneSidedReader::ask_payload(Item& item) {
  const ByteRange range = needed(*item.read);
  item.asking = Kind::kPayload;
  item.next = range.offset;
  item.end = range.offset + range.size;
  item.left = range.size;
}

void OneSidedReader::everything_asked(std::uint16_t index) {
  if (options_.header_with_payload && items_[index].asking == Kind::kPayload) headers_due_.push_back(index);
}

void OneSidedReader::finish(std::uint16_t index, Status status) {
  items_[index].read->result = std::move(status);
  items_[index] = Item();
  free_.push_back(index);
  --unfinished_;
}

// ---------------------------------------------------------------- out

std::size_t OneSidedReader::next(std::span<RemoteRead> out) {
  std::size_t count = 0;
  std::uint64_t bytes = 0;
  while (count < out.size() && pieces_.size() - arrived_ < options_.reads_max && bytes < options_.slice) {
    if (bytes_out_ > 0 && bytes_out_ >= options_.bytes_max) break;
    if (!headers_due_.empty()) {
      if (!give(headers_due_.front(), Kind::kHeader, out[count])) break;
      headers_due_.pop_front();
    } else if (!asking_.empty()) {
      const std::uint16_t index = asking_.front();
      Item& item = items_[index];
      if (!give(index, item.asking, out[count])) break;
      if (item.next == item.end) {
        asking_.pop_front();
        everything_asked(index);
      }
    } else {
      if (!open_next()) break;
      continue;
    }
    bytes += out[count].size;
    ++count;
  }
  return count;
}

// Room for `size` bytes in one piece, or nullptr until older ones are consumed. Places are whole cache lines.
std::byte* OneSidedReader::stage(std::uint32_t size) noexcept {
  const std::uint64_t room = (std::uint64_t{size} + 63) / 64 * 64;
  const std::uint64_t capacity = staging_.size();
  assert(room <= capacity);
  std::uint64_t head = ring_head_;
  if (head % capacity + room > capacity) head += capacity - head % capacity;  // what is left before the end is too short
  if (head + room - ring_tail_ > capacity) return nullptr;
  ring_head_ = head + room;
  return staging_.data() + head % capacity;
}

// The next piece of that kind of the item. False: the staging buffer is full.
bool OneSidedReader::give(std::uint16_t index, Kind kind, RemoteRead& out) {
  Item& item = items_[index];
  const Locator& locator = item.read->locator;
  Piece piece;
  piece.item = index;
  piece.kind = kind;
  piece.at = item.next;
  piece.size = kHeaderBytes;
  out.arena = locator.arena;
  if (kind == Kind::kHeader) {
    out.arena = locator.header_arena;
    out.offset = locator.header_offset;
  } else {
    out.offset = (kind == Kind::kTable ? extent_table_offset(item.read->entry, locator) : locator.payload_offset) + item.next;
    std::uint64_t size = std::min<std::uint64_t>({item.end - item.next, options_.slice, kRegionBytes - out.offset % kRegionBytes});
    piece.staged = kind == Kind::kTable || !item.direct;
    // Straight into a registered target: only what is wanted whole. What lies around it in its first and last extent is staged.
    if (!piece.staged) {
      const ByteRange wanted = item.read->range;
      if (item.next < wanted.offset) {
        size = std::min(size, wanted.offset - item.next);
        piece.staged = true;
      } else if (item.next >= wanted.offset + wanted.size) {
        piece.staged = true;
      } else {
        size = std::min(size, wanted.offset + wanted.size - item.next);
      }
    }
    piece.size = static_cast<std::uint32_t>(size);
  }
  if (kind == Kind::kHeader) piece.staged = true;
  if (piece.staged) {
    piece.into = stage(piece.size);
    if (piece.into == nullptr) return false;
    if (kind == Kind::kHeader) std::memset(piece.into, std::to_integer<int>(kNotHere), kHeaderBytes);
  } else {
    piece.into = item.read->target.data() + (item.next - item.read->range.offset);
    direct_bytes_ += piece.size;
  }
  piece.ring_end = ring_head_;
  out.into = piece.into;
  out.size = piece.size;
  out.staged = piece.staged;
  bytes_out_ += piece.size;
  if (kind == Kind::kHeader) {
    ++headers_;
  } else {
    item.next += piece.size;
    wire_bytes_ += piece.size;
  }
  pieces_.push_back(piece);
  return true;
}

// ---------------------------------------------------------------- in

void OneSidedReader::completed(std::size_t count) {
  for (; count > 0; --count) {
    assert(arrived_ < pieces_.size());
    const Piece& piece = pieces_[arrived_++];
    bytes_out_ -= piece.size;
    if (piece.kind != Kind::kPayload) continue;
    Item& item = items_[piece.item];
    item.left -= piece.size;
    // The last of the payload: what the header says from now on, it says of these bytes.
    if (item.left == 0 && !options_.header_with_payload) headers_due_.push_back(piece.item);
  }
}

std::uint32_t OneSidedReader::consume() {
  if (arrived_ == 0) return 0;
  const Piece piece = pieces_.front();
  pieces_.pop_front();
  --arrived_;
  switch (piece.kind) {
    case Kind::kTable: take_table(piece.item, piece); break;
    case Kind::kPayload: take_payload(items_[piece.item], piece); break;
    case Kind::kHeader: take_header(piece.item, piece); break;
  }
  ring_tail_ = piece.ring_end;
  return piece.size;
}

void OneSidedReader::take_table(std::uint16_t index, const Piece& piece) {
  Item& item = items_[index];
  std::memcpy(item.table.data() + piece.at, piece.into, piece.size);
  if (piece.at + piece.size < item.end) return;
  auto rows = parse_extent_table(item.table, item.read->entry.stored_size, item.read->entry.extent_table_crc);
  if (rows.ok()) {
    item.rows = rules_.keep_table(item.read->entry, std::move(*rows));
    fill_checks(*item.read, *item.rows);
    ask_payload(item);
    asking_.push_back(index);
  } else {  // may be a slot that changed: the header tells which
    item.table_problem = rows.error().message();
    headers_due_.push_back(index);
  }
  item.table = {};
}

void OneSidedReader::take_payload(Item& item, const Piece& piece) {
  BlockRead& read = *item.read;
  std::span<const std::byte> bytes(piece.into, piece.size);
  if (item.rows == nullptr) {
    if (options_.omitted.crc) {
      if (piece.staged) copy_wanted(read, piece.at, bytes);
    } else if (piece.staged && all_wanted(read, piece.at, piece.size)) {
      item.crc = copy_crc64(read.target.data() + (piece.at - read.range.offset), piece.into, piece.size, item.crc);
    } else {
      item.crc = crc64(bytes, item.crc);
      if (piece.staged) copy_wanted(read, piece.at, bytes);
    }
    if (piece.at + piece.size == item.end) item.match = options_.omitted.crc || item.crc == read.entry.crc64;
    return;
  }
  const ByteRange deferred = deferred_bytes(read);
  for (std::uint64_t at = piece.at; !bytes.empty();) {
    if (holds(deferred, at)) {
      const auto part = bytes.first(static_cast<std::size_t>(std::min<std::uint64_t>(bytes.size(), deferred.offset + deferred.size - at)));
      if (piece.staged) copy_bytes(read.target.data() + (at - read.range.offset), part.data(), part.size());
      at += part.size();
      bytes = bytes.subspan(part.size());
      continue;
    }
    const std::uint64_t extent = at / kExtentBytes;
    const std::uint64_t end = extent * kExtentBytes + (*item.rows)[extent].stored_size;
    const auto part = bytes.first(static_cast<std::size_t>(std::min<std::uint64_t>(bytes.size(), end - at)));
    auto crc = static_cast<std::uint32_t>(item.crc);
    if (piece.staged && all_wanted(read, at, part.size())) {
      crc = copy_crc32c(read.target.data() + (at - read.range.offset), part.data(), part.size(), crc);
    } else {
      crc = crc32c(part, crc);
      if (piece.staged) copy_wanted(read, at, part);
    }
    at += part.size();
    bytes = bytes.subspan(part.size());
    item.crc = at == end ? 0 : crc;
    if (at == end) item.match = item.match && crc == (*item.rows)[extent].crc32c;
  }
}

void OneSidedReader::take_header(std::uint16_t index, const Piece& piece) {
  Item& item = items_[index];
  SlotHeader header;
  std::memcpy(&header, piece.into, sizeof header);
  const ManifestEntry& entry = item.read->entry;
  if (std::all_of(piece.into, piece.into + kHeaderBytes, [](std::byte byte) { return byte == kNotHere; })) {
    finish(index, SlotRules::corrupt(entry, "the READ of its slot header completed without any bytes"));
    return;
  }
  Status status = rules_.check_header(header, entry, item.read->locator);
  if (status.ok() && !item.table_problem.empty()) status = SlotRules::corrupt(entry, item.table_problem);
  if (status.ok() && !item.match && !options_.omitted.crc) status = SlotRules::corrupt(entry, "payload CRC does not match the manifest, though the slot did not change");
  finish(index, std::move(status));
}

void OneSidedReader::abandon(const Status& status) {
  for (std::uint16_t i = 0; i < items_.size(); ++i) {
    if (items_[i].read != nullptr) finish(i, status);
  }
  for (; cursor_ < batch_.size(); ++cursor_, --unfinished_) batch_[cursor_].result = status;
  asking_.clear();
  headers_due_.clear();
  pieces_.clear();
  arrived_ = 0;
  bytes_out_ = 0;
  ring_head_ = ring_tail_ = 0;
}

}  // namespace paramwire
