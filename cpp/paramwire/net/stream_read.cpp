#include "paramwire/net/stream_read.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"
#include "paramwire/net/slot_rules.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire {

StreamRead::StreamRead(BlockRead& item, const Incarnation& incarnation, const OmittedReadChecks& omitted)
    : item_(item), incarnation_(incarnation), omitted_(omitted), deferred_(deferred_bytes(item)) {
  const std::uint64_t size = item.entry.stored_size;
  whole_ = (item.range == ByteRange{0, size} && item.checks.empty()) || extent_count(size) <= 1;
  stored_ = {0, size};
  if (!whole_) {
    const std::uint64_t begin = item.range.offset / kExtentBytes * kExtentBytes;
    const std::uint64_t end = std::min(size, extent_count(item.range.offset + item.range.size) * kExtentBytes);
    stored_ = {begin, item.range.size == 0 ? 0 : end - begin};
  }
  head_skip_ = item.range.offset - stored_.offset;
}

Status StreamRead::prepare() {
  const auto edge = [](std::uint64_t size) { return Buffer::allocate(static_cast<std::size_t>(size)); };
  if (item_.range != stored_) {
    PARAMWIRE_TRY(head, edge(std::min(kExtentBytes, stored_.size)));
    PARAMWIRE_TRY(tail, edge(std::min(kExtentBytes, stored_.size)));
    head_ = std::move(head);
    tail_ = std::move(tail);
  }
  return {};
}

Result<Bytes> StreamRead::start(std::uint64_t request) {
  PARAMWIRE_CHECK(prepare());
  GetMessage get;
  get.block = item_.entry.id;
  get.version = item_.entry.version;
  get.incarnation = incarnation_;
  get.range = stored_;
  get.extent_table = by_table();
  return get.encode(request);
}

Status StreamRead::check_data(const DataMessage& data) {
  const auto stale = [&](std::string_view what) {
    return Error(Code::kStale, cat("block ", item_.entry.to_string(), " at version ", item_.entry.version, ": the server sent ", what));
  };
  if (!omitted_.epoch && (data.incarnation != incarnation_ || data.version.epoch != item_.entry.version.epoch)) return stale("another incarnation's bytes");
  if (!omitted_.version && (data.block != item_.entry.id || data.version.counter != item_.entry.version.counter)) {
    return stale(cat("version ", data.version));
  }
  if (data.stored_size != item_.entry.stored_size || data.range != stored_) return stale("another size or range");
  if (!by_table()) return {};
  return take_table(data.extent_table);
}

Status StreamRead::take_table(std::span<const std::byte> table) {
  auto rows = parse_extent_table(table, item_.entry.stored_size, item_.entry.extent_table_crc);
  if (!rows.ok()) return Error(Code::kCorrupt, cat("block ", item_.entry.to_string(), ": ", rows.error().message()));
  rows_ = std::move(*rows);
  fill_checks(item_, rows_);
  return {};
}

// Whole extents inside the range go straight into the target, the two at its edges into scratch.
FrameParser::BodyTarget StreamRead::place() {
  FrameParser::BodyTarget target;
  if (item_.range == stored_) {
    target.parts[0] = item_.target;
    return target;
  }
  const std::uint64_t first = std::min(kExtentBytes, stored_.size);
  const std::uint64_t last = stored_.size > first ? (stored_.size - 1) % kExtentBytes + 1 : 0;
  const std::uint64_t middle = stored_.size - first - last;
  target.parts[0] = head_.span().first(static_cast<std::size_t>(first));
  target.parts[1] = middle == 0 ? std::span<std::byte>() : item_.target.subspan(static_cast<std::size_t>(first - head_skip_), static_cast<std::size_t>(middle));
  target.parts[2] = tail_.span().first(static_cast<std::size_t>(last));
  return target;
}

Result<FrameParser::BodyTarget> StreamRead::on_head(const FrameHeader& header, std::span<const std::byte> meta) {
  FrameParser::BodyTarget discard;
  discard.discard = header.body_size;
  answered_ = true;
  const auto type = static_cast<FrameType>(header.type);
  if (type == FrameType::kError) {
    PARAMWIRE_TRY(message, ErrorMessage::decode(meta));
    result_ = Error(message.code, std::string(message.text));
    return discard;
  }
  if (type != FrameType::kData) return Error(Code::kCorrupt, cat("answer ", frame_type_name(type), " to a GET"));
  PARAMWIRE_TRY(data, DataMessage::decode(meta));
  if (data.range.size != header.body_size) return Error(Code::kCorrupt, cat("DATA announces ", data.range.size, " bytes and brings ", header.body_size));
  result_ = check_data(data);
  if (!result_.ok()) return discard;
  return place();
}

void StreamRead::end_extent() {
  const std::uint64_t extent = (stored_.offset + arrived_ - 1) / kExtentBytes;
  if (extent_crc_ != rows_[extent].crc32c && result_.ok()) {
    result_ = Error(Code::kCorrupt, cat("block ", item_.entry.to_string(), " at version ", item_.entry.version, ": CRC of extent ", extent, " does not match"));
  }
  extent_crc_ = 0;
}

void StreamRead::on_body(std::span<const std::byte> part) {
  wire_bytes_ += part.size();
  if (omitted_.crc || !result_.ok()) {
    arrived_ += part.size();
    return;
  }
  if (whole_) {
    crc64_ = crc64(part, crc64_);
    arrived_ += part.size();
    return;
  }
  while (!part.empty()) {
    const std::uint64_t at = stored_.offset + arrived_;
    if (holds(deferred_, at)) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(part.size(), deferred_.offset + deferred_.size - at));
      arrived_ += n;
      part = part.subspan(n);
      continue;
    }
    const std::uint64_t in_extent = at % kExtentBytes;
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(part.size(), kExtentBytes - in_extent));
    extent_crc_ = crc32c(part.first(n), extent_crc_);
    arrived_ += n;
    part = part.subspan(n);
    if (in_extent + n == kExtentBytes || arrived_ == stored_.size) end_extent();
  }
}

void StreamRead::copy_body(std::byte* into, std::span<const std::byte> part) {
  // A segment says little about the block that it is of: large blocks stream past the cache, whatever their segments' size.
  const Stores stores = item_.range.size >= kStreamFromBytes ? Stores::kStreamingOpen : Stores::kCached;
  const std::uint64_t at = stored_.offset + arrived_;
  if (!part.empty() && holds(deferred_, at) && holds(deferred_, at + part.size() - 1)) {
    copy_bytes(into, part.data(), part.size(), stores);
    return on_body({into, part.size()});
  }
  if (omitted_.crc || !whole_ || !result_.ok()) {
    std::memcpy(into, part.data(), part.size());
    return on_body({into, part.size()});
  }
  crc64_ = copy_crc64(into, part.data(), part.size(), crc64_, stores);
  wire_bytes_ += part.size();
  arrived_ += part.size();
}

Status StreamRead::finish() {
  end_streaming();  // of copy_body()
  if (!result_.ok()) return result_;
  if (whole_ && !omitted_.crc && crc64_ != item_.entry.crc64) {
    return Error(Code::kCorrupt, cat("block ", item_.entry.to_string(), " at version ", item_.entry.version, ": CRC-64 of the bytes received does not match the manifest"));
  }
  if (item_.range == stored_ || item_.target.empty()) return {};
  const auto parts = place().parts;
  const std::size_t first = std::min<std::size_t>(parts[0].size() - static_cast<std::size_t>(head_skip_), item_.target.size());
  std::memcpy(item_.target.data(), parts[0].data() + head_skip_, first);
  const std::size_t rest = item_.target.size() - first - std::min(parts[1].size(), item_.target.size() - first);
  if (rest > 0) std::memcpy(item_.target.data() + item_.target.size() - rest, parts[2].data(), rest);
  return {};
}

}  // namespace paramwire
