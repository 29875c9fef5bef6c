// The client's half of a block read over a byte stream: GET out, DATA in, checked while it arrives. No socket inside.
//
//   bytes = read.start(request)                        -> send them
//   on kHead:  target = read.on_head(header, meta)     -> parser.set_body(target)
//   on kBody:  read.on_body(part)                         CRC runs over bytes that are hot in cache
//   on kEnd:   item.result = read.finish()
//
// Where no frames are (net/reliable), prepare() takes start()'s place, take_table() and place() on_head()'s; the bytes are then checked
// in order too, as they become whole from the front.
// One thread.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/wire/frame.hpp"
#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <span>
#include <string_view>

namespace paramwire {

class StreamRead {
 public:
  // `item` must stay until finish(); `incarnation` is the one whose manifest promised the block.
  StreamRead(BlockRead& item, const Incarnation& incarnation, const OmittedReadChecks& omitted);

  // errors: kBackpressure when the scratch for the edges of a ranged read can't be had.
  Result<Bytes> start(std::uint64_t request);
  // The answer's header. An ERROR answer is taken as the result (the stream stays usable).
  // errors: kCorrupt for an answer that is not to this question; the stream must be closed.
  Result<FrameParser::BodyTarget> on_head(const FrameHeader& header, std::span<const std::byte> meta);
  void on_body(std::span<const std::byte> part);
  Status finish();

  // As start(), without a question. errors: as start().
  Status prepare();
  // The stored bytes to ask for: the whole block, or whole extents.
  ByteRange stored() const noexcept { return stored_; }
  bool wants_table() const noexcept { return by_table() && stored_.size > 0; }
  // errors: kCorrupt when it is not the table that the manifest promised.
  Status take_table(std::span<const std::byte> table);
  // Where stored() goes, in order.
  FrameParser::BodyTarget place();
  // As copying `part` to `into` (a place for it, of the same size) and on_body(part): in one pass where that is faster.
  void copy_body(std::byte* into, std::span<const std::byte> part);
  std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }

 private:
  bool by_table() const noexcept { return !whole_ && (!omitted_.crc || deferred_.size > 0); }
  Status check_data(const DataMessage& data);
  void end_extent();

  BlockRead& item_;
  Incarnation incarnation_;
  OmittedReadChecks omitted_;
  ByteRange deferred_;           // stored bytes that are not summed here
  bool whole_ = false;           // one CRC-64 over all stored bytes; else a CRC-32C an extent
  ByteRange stored_;             // asked for: whole extents
  Buffer head_, tail_;           // extents of which only a part is wanted
  std::uint64_t head_skip_ = 0;  // bytes of head_ before the range
  std::vector<ExtentRow> rows_;
  Status result_;
  bool answered_ = false;
  std::uint64_t crc64_ = 0;
  std::uint32_t extent_crc_ = 0;
  std::uint64_t arrived_ = 0;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace paramwire
