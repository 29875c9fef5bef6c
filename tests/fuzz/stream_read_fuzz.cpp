// The client's half of a block read, with a server that sends anything: what is taken as a block is the block.
#include "fuzz.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/net/stream_read.hpp"
#include "support/frame_feed.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace paramwire::fuzz {
namespace {

constexpr Incarnation kIncarnation{5, 6};
constexpr std::uint64_t kRequest = 9;
// Two extents, the second short, so that ranges have edges.
constexpr std::size_t kSize = kExtentBytes + 1000;

const std::vector<std::byte>& block() {
  static const std::vector<std::byte> bytes = [] {
    std::vector<std::byte> out(kSize);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i * 7 >> 3);
    return out;
  }();
  return bytes;
}

ManifestEntry entry() {
  ManifestEntry out;
  out.tensor = "w";
  out.dtype = DType::kU8;
  out.shape = Shape{kSize};
  out.id = block_id("w", Shard::whole());
  out.version = {3, 17};
  out.raw_size = out.stored_size = kSize;
  out.crc64 = crc64(block());
  std::array<ExtentRow, 2> rows{};
  rows[0] = {kExtentBytes, crc32c(std::span(block()).first(kExtentBytes))};
  rows[1] = {1000, crc32c(std::span(block()).subspan(kExtentBytes))};
  out.extent_table_crc = crc32c(std::as_bytes(std::span(rows)));
  return out;
}

// An answer of the fuzzer's making, around the true bytes: a correct frame has to be reachable.
Bytes answer(std::span<const std::byte> input, const ByteRange& stored, bool table) {
  DataMessage data;
  data.block = entry().id;
  data.version = entry().version;
  data.incarnation = kIncarnation;
  data.stored_size = kSize;
  data.range = stored;
  std::array<ExtentRow, 2> rows{};
  rows[0] = {kExtentBytes, crc32c(std::span(block()).first(kExtentBytes))};
  rows[1] = {1000, crc32c(std::span(block()).subspan(kExtentBytes))};
  if (table) data.extent_table = std::as_bytes(std::span(rows));
  Bytes frame = data.encode(kRequest);
  const auto body = std::span(block()).subspan(static_cast<std::size_t>(stored.offset), static_cast<std::size_t>(stored.size));
  frame.insert(frame.end(), body.begin(), body.end());
  // Each 4 bytes of the input change one: 24 bits of place, 8 of exclusive or.
  for (std::size_t i = 0; i + 4 <= input.size(); i += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, input.data() + i, 4);
    frame[(word >> 8) % frame.size()] ^= static_cast<std::byte>(word & 0xff);
  }
  return frame;
}

void read(std::span<const std::byte> input, const ByteRange& range, bool own_frame) {
  BlockRead item;
  item.entry = entry();
  item.range = range;
  std::vector<std::byte> target(static_cast<std::size_t>(range.size));
  item.target = target;
  StreamRead stream(item, kIncarnation, {});
  const auto question = stream.start(kRequest);
  require(question.ok(), "a small read starts");
  const bool whole = range.size == kSize;
  const ByteRange stored = whole ? ByteRange{0, kSize} : ByteRange{range.offset / kExtentBytes * kExtentBytes, 0};
  const std::uint64_t end = std::min<std::uint64_t>(kSize, (range.offset + range.size + kExtentBytes - 1) / kExtentBytes * kExtentBytes);
  const Bytes made = own_frame ? answer(input, {stored.offset, end - stored.offset}, !whole) : Bytes(input.begin(), input.end());
  FrameParser parser;
  testing::feed(parser, made, [&](FrameParser::Event event) {
    if (event == FrameParser::Event::kHead) {
      const auto placed = stream.on_head(parser.header(), parser.meta());
      if (!placed.ok()) return false;
      if (parser.header().body_size > 0) parser.set_body(*placed);
    }
    if (event == FrameParser::Event::kBody) stream.on_body(parser.body_part());
    if (event != FrameParser::Event::kEnd) return true;
    if (stream.finish().ok()) {
      require(std::equal(target.begin(), target.end(), block().begin() + static_cast<std::ptrdiff_t>(range.offset)), "what is taken is the block");
    }
    return false;
  });
}

}  // namespace

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const bool own_frame = (static_cast<unsigned>(input[0]) & 1U) != 0;
  read(input.subspan(1), {0, kSize}, own_frame);
  read(input.subspan(1), {100, 50}, own_frame);
  read(input.subspan(1), {kExtentBytes - 10, 500}, own_frame);
}

}  // namespace paramwire::fuzz
