// The header of every frame on a TCP or unix stream, and a parser that has no socket in it.
//
// frame := FrameHeader (40 B) | meta (meta_size B, CRC in the header) | body (body_size B, no CRC here: a block's bytes are
// checked against the manifest, a manifest's against its root). Layout: wire/FORMAT.md, "Frame".
#pragma once

#include "paramwire/base/types.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace paramwire {

static_assert(std::endian::native == std::endian::little, "sent structs are little-endian; a big-endian port needs loads");

inline constexpr std::uint32_t kFrameMagic = 0x31525750;  // "PWR1" in memory
inline constexpr std::uint8_t kProtocolVersion = 1;

// Longest meta part. Bounds what a header can make a reader allocate. The largest message is DATA with the extent table of a
// ranged read (kMaxTableBytes in message.hpp: 8 B an extent, blocks up to 8 GiB less 1 MiB); all others are under 20 KiB but
// STATS.
inline constexpr std::uint32_t kMaxMetaBytes = 1 << 20;

enum class FrameType : std::uint8_t;  // wire/message.hpp

struct FrameHeader {
  std::uint32_t magic;
  std::uint8_t protocol;
  std::uint8_t type;
  std::uint16_t flags;       // none defined: zero
  std::uint64_t request;     // chosen by the asker, echoed by every answer
  std::uint32_t meta_size;
  std::uint32_t reserved;    // zero
  std::uint64_t body_size;
  std::uint32_t meta_crc;    // CRC-32C of the meta bytes
  std::uint32_t header_crc;  // CRC-32C of the 36 bytes before it
};
static_assert(sizeof(FrameHeader) == 40);
static_assert(offsetof(FrameHeader, request) == 8);
static_assert(offsetof(FrameHeader, meta_size) == 16);
static_assert(offsetof(FrameHeader, body_size) == 24);
static_assert(offsetof(FrameHeader, header_crc) == 36);
static_assert(std::is_trivially_copyable_v<FrameHeader>);
static_assert(std::has_unique_object_representations_v<FrameHeader>);

std::uint32_t frame_header_crc(const FrameHeader& header) noexcept;
// nullptr, or the reason: "magic", "header CRC", "protocol", "flags or reserved not zero", "meta size over limit".
const char* verify(const FrameHeader& header) noexcept;

// Appends header and meta (at most kMaxMetaBytes, asserted) of one frame; the body_size bytes of body are the caller's to
// send after it.
void append_frame(std::vector<std::byte>& out, FrameType type, std::uint64_t request, std::span<const std::byte> meta,
                  std::uint64_t body_size = 0);

// Takes a byte stream in pieces and gives frames. One thread. After an error the stream is unusable: close it.
//
//   loop: n = recv(parser.receive_space()); parser.received(n);
//         while (event = parser.next(), event != kNeedBytes) ...
//   kHead  header() and meta() are complete and verified. If header().body_size > 0, call set_body() before next().
//   kBody  body_part() was filled with the next bytes of the body, in order (they are hot in cache: check them now).
//   kEnd   the frame is over. meta() stays valid until the next kHead.
//
// Large bodies are received straight into the caller's spans, without a copy.
class FrameParser {
 public:
  enum class Event : std::uint8_t { kNeedBytes, kHead, kBody, kEnd };
  // Where the body goes, in order; the sizes of parts and discard must add up to body_size. Empty parts are skipped.
  struct BodyTarget {
    std::array<std::span<std::byte>, 3> parts{};
    std::uint64_t discard = 0;  // bytes after the parts that are received and dropped
  };

  FrameParser();

  // Where the next received bytes go: at least 1 byte, at most kReceiveStep, if next() said kNeedBytes before. Empty when it
  // was not asked for so long that the buffer is full. received() is told how many came, before anything else is called.
  std::span<std::byte> receive_space() noexcept;
  void received(std::size_t size) noexcept;
  // errors: kCorrupt naming the field of a bad header or meta; kInternal when set_body() was not called or does not fit.
  Result<Event> next();

  const FrameHeader& header() const noexcept { return header_; }
  std::span<const std::byte> meta() const noexcept { return meta_; }
  // After a kHead with a body, once. The spans must live until kEnd.
  void set_body(const BodyTarget& target) noexcept;
  std::span<const std::byte> body_part() const noexcept { return body_part_; }

  // Bytes that one receive may bring at most: bounds the span whose CRC runs right after it arrived. 256 KiB stays in a
  // 2 MiB L2 beside the kernel's own buffers; 64 KiB costs a fifth more system calls, 1 MiB starts to miss L2.
  static constexpr std::size_t kReceiveStep = 256 * 1024;

 private:
  enum class State : std::uint8_t { kHeader, kMeta, kBodyWanted, kBody, kEnd };

  std::size_t buffered() const noexcept { return end_ - begin_; }
  bool take(std::span<std::byte> target, std::size_t& have);
  Result<Event> next_body();
  std::span<std::byte> body_space() noexcept;

  std::vector<std::byte> buffer_;  // fixed size; holds headers, metas and the small bodies between them
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  State state_ = State::kHeader;
  FrameHeader header_{};
  std::size_t have_ = 0;           // bytes of the header or meta so far
  std::vector<std::byte> meta_;
  BodyTarget body_;
  std::size_t body_index_ = 0;     // part being filled; parts.size() means discarding
  std::uint64_t part_at_ = 0;      // bytes of that part filled
  std::uint64_t body_left_ = 0;
  bool direct_ = false;            // the last receive_space() pointed into the body
  std::span<std::byte> body_part_;
};

}  // namespace paramwire
