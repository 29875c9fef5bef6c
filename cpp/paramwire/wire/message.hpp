// The messages of the control and data links: what each frame's meta part holds. Layout: wire/FORMAT.md, "Messages".
//
// Every struct has encode(request) giving header and meta (the body, if any, follows on the stream) and decode(meta), which
// refuses short, long or out-of-range fields with kCorrupt naming message and field. String views of decoded messages point
// into the meta bytes. All values: any thread.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/siphash.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/wire/block_header.hpp"
#include "paramwire/wire/frame.hpp"
#include "paramwire/wire/manifest.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire {

enum class FrameType : std::uint8_t {
  kHello = 1, kWelcome = 2, kError = 3, kOk = 4,
  kSnapshot = 10, kManifest = 11, kRenew = 12, kRelease = 13,
  kGet = 20, kData = 21, kDeltas = 22, kDeltaList = 23,  // wire/delta_message.hpp
  kArena = 30, kArenaFd = 31, kPins = 32, kPinsFd = 33,
  kPublishStart = 40, kPublishId = 41, kPut = 42, kPutDone = 43, kRemove = 44, kAlias = 45, kFinish = 46, kPublished = 47,
  kAbort = 48,
  kStat = 50, kStats = 51,
  kUdpOpen = 60, kUdpKey = 61,
  kVerbsOpen = 70, kVerbsReady = 71, kVerbsRegions = 72, kVerbsRegionList = 73,  // wire/verbs_message.hpp
};
std::string_view frame_type_name(FrameType type) noexcept;

using Bytes = std::vector<std::byte>;

// 128 random bits each; compared by equality.
struct ClientId {
  std::uint64_t high = 0, low = 0;
  bool operator==(const ClientId&) const noexcept = default;
};
struct PublishId {
  std::uint64_t high = 0, low = 0;
  auto operator<=>(const PublishId&) const noexcept = default;
  std::string to_string() const;
};
using LeaseId = std::uint64_t;  // 0: no lease

// First frame of every connection, client to server.
struct HelloMessage {
  ClientId client;
  std::uint32_t pid = 0;  // of the client, for error texts only: pins are watched through the socket's credentials
  Bytes encode(std::uint64_t request) const;
  static Result<HelloMessage> decode(std::span<const std::byte> meta);
};

struct WelcomeMessage {
  Incarnation incarnation;
  std::uint32_t epoch = 0;
  std::optional<Version> newest;     // none: nothing published yet
  std::uint32_t lease_ttl_ms_max = 0;
  std::string_view host_id;          // same text on the same booted host: boot id and network namespace
  std::string_view unix_path;        // of the server's unix socket; empty: none
  Bytes encode(std::uint64_t request) const;
  static Result<WelcomeMessage> decode(std::span<const std::byte> meta);
};

// Answer to any request that failed. The connection stays usable unless the server closes it.
struct ErrorMessage {
  Code code = Code::kInternal;
  std::string_view text;
  Bytes encode(std::uint64_t request) const;
  static Result<ErrorMessage> decode(std::span<const std::byte> meta);
};

// Ask for a snapshot's manifest, as a delta from `held` if the server can.
struct SnapshotMessage {
  std::optional<Version> want;       // none: the newest
  std::optional<Version> held;       // a manifest that the client has whole
  Digest held_root{};                // its root; zero without `held`
  std::uint32_t lease_ttl_ms = 0;    // 0: no lease
  std::uint32_t wait_ms = 0;         // how long the answer may wait for `want` (or, without it, for the first version)
  bool locators = false;
  Bytes encode(std::uint64_t request) const;
  static Result<SnapshotMessage> decode(std::span<const std::byte> meta);
};

// Body: a manifest delta stream of `stream_size` bytes, then `locator_count` locators (28 B each) of the entries added, in
// stream order, or none at all. The one in an alias's place is not used.
struct ManifestMessage {
  Incarnation incarnation;
  LeaseId lease = 0;
  std::uint32_t lease_ttl_ms = 0;    // granted; may be less than asked
  std::uint64_t stream_size = 0;
  std::uint64_t locator_count = 0;
  // Bytes of body; the receiver refuses a frame whose body_size differs. Never wraps in a decoded message.
  std::uint64_t body_size() const noexcept;
  Bytes encode(std::uint64_t request) const;
  static Result<ManifestMessage> decode(std::span<const std::byte> meta);
};
inline constexpr std::uint64_t kLocatorBytes = 28;
void append_locator(Bytes& out, const Locator& locator);
Locator read_locator(std::span<const std::byte, kLocatorBytes> bytes) noexcept;

// Renew for another `ttl_ms`, or release. Answer: OK; kStale when the lease is gone.
struct LeaseMessage {
  LeaseId lease = 0;
  std::uint32_t ttl_ms = 0;          // RENEW only; 0 in RELEASE
  Bytes encode(FrameType type, std::uint64_t request) const;
  static Result<LeaseMessage> decode(std::span<const std::byte> meta);
};

// Ask for stored bytes [offset, offset + size) of a block, at exactly `version` of the block's entry, from this incarnation.
struct GetMessage {
  BlockId block;
  Version version;
  Incarnation incarnation;
  ByteRange range;                   // of the stored bytes
  bool extent_table = false;         // send the whole table before the bytes, in DATA's meta
  Bytes encode(std::uint64_t request) const;
  static Result<GetMessage> decode(std::span<const std::byte> meta);
};

// Longest extent table that one DATA carries: what kMaxMetaBytes leaves beside the other fields (at most 80 B), rounded down
// to 16 extents (1 MiB of block). Larger blocks can be had whole, which needs no table.
inline constexpr std::uint64_t kMaxTableBytes = kMaxMetaBytes - 128;

// Body: the bytes asked for; range.size of them, the receiver refuses a frame whose body_size differs.
struct DataMessage {
  BlockId block;
  Version version;
  Incarnation incarnation;
  std::uint64_t stored_size = 0;     // of the whole block
  ByteRange range;
  std::span<const std::byte> extent_table;  // empty unless asked for; 8 B a row, at most kMaxTableBytes
  Bytes encode(std::uint64_t request) const;
  static Result<DataMessage> decode(std::span<const std::byte> meta);
};

// ARENA asks for the descriptor of arena `arena` (unix sockets only); ARENA_FD brings it beside the frame (SCM_RIGHTS).
struct ArenaMessage {
  std::uint32_t arena = 0;
  std::uint64_t size = 0;            // bytes; 0 in ARENA
  Bytes encode(FrameType type, std::uint64_t request) const;
  static Result<ArenaMessage> decode(std::span<const std::byte> meta);
};
// PINS asks for a pin table of this client (empty meta); PINS_FD brings it: `capacity` words of 8 B.
struct PinsMessage {
  std::uint32_t capacity = 0;
  Bytes encode(std::uint64_t request) const;
  static Result<PinsMessage> decode(std::span<const std::byte> meta);
};

struct PublishStartMessage {
  bool any_base = true;              // true: on whatever is newest (`base` is not sent); false: only if `base` is the newest
  std::optional<Version> base;       // with any_base false; none: only if nothing is published yet
  Bytes encode(std::uint64_t request) const;
  static Result<PublishStartMessage> decode(std::span<const std::byte> meta);
};
struct PublishIdMessage {
  PublishId publish;
  Version version;                   // that finish will commit, if nobody is faster
  Bytes encode(FrameType type, std::uint64_t request) const;  // PUBLISH_ID; FINISH and ABORT with version (0, 0)
  static Result<PublishIdMessage> decode(std::span<const std::byte> meta);
};
// Body: the block's bytes. Answer: PUT_DONE with the CRC-64 of what was stored, which the sender compares with its own.
struct PutMessage {
  PublishId publish;
  std::string_view tensor;
  DType dtype = DType::kU8;
  Shape shape;                       // of the whole tensor
  Shard shard;
  CodecId codec = CodecId::kRaw;
  // Body: the stored bytes, body_size of them.
  Bytes encode(std::uint64_t request, std::uint64_t body_size) const;
  static Result<PutMessage> decode(std::span<const std::byte> meta);
};
struct PutDoneMessage {
  BlockId block;
  std::uint64_t crc64 = 0;
  Bytes encode(std::uint64_t request) const;
  static Result<PutDoneMessage> decode(std::span<const std::byte> meta);
};
// REMOVE drops every block (and alias) named `tensor`; ALIAS makes `tensor` another name of `target`.
struct NameMessage {
  PublishId publish;
  std::string_view tensor;
  std::string_view target;           // ALIAS only; empty in REMOVE
  Bytes encode(FrameType type, std::uint64_t request) const;
  static Result<NameMessage> decode(std::span<const std::byte> meta);
};
struct PublishedMessage {
  Version version;
  Bytes encode(std::uint64_t request) const;
  static Result<PublishedMessage> decode(std::span<const std::byte> meta);
};

// Answer to UDP_OPEN (empty meta): where this server takes datagrams and how they are authenticated. The session lives as long as the
// connection that asked; a second UDP_OPEN on it replaces the first.
struct UdpKeyMessage {
  std::uint16_t port = 0;          // at the address that the connection reached; 127.0.0.1 over a unix socket
  std::uint64_t session = 0;       // random, not 0
  SipKey key;                      // zeros when the link is TLS: both sides derive it from the connection instead
  std::uint16_t segment_max = 0;   // largest segment that this server sends, bytes of payload
  Bytes encode(std::uint64_t request) const;
  static Result<UdpKeyMessage> decode(std::span<const std::byte> meta);
};

// Facts of a server as name and value, in a fixed order; names end in their unit.
struct StatsMessage {
  std::vector<std::pair<std::string, std::uint64_t>> values;
  Bytes encode(std::uint64_t request) const;
  static Result<StatsMessage> decode(std::span<const std::byte> meta);
};

// A frame of `type` with empty meta: OK, PINS, STAT, UDP_OPEN.
Bytes encode_empty(FrameType type, std::uint64_t request);

}  // namespace paramwire
