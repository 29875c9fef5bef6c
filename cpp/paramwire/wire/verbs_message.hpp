// The messages that set up RDMA reads over a control connection. Layout: wire/FORMAT.md, "Messages" and "RDMA reads". As wire/message.hpp.
#pragma once

#include "paramwire/wire/message.hpp"

#include <array>
#include <cstdint>
#include <vector>

namespace paramwire {

// One end of an RC connection.
struct VerbsEnd {
  std::array<std::uint8_t, 16> gid{};  // of the port, as on the wire
  std::uint32_t queue_pair = 0;        // number, 24 bits, not 0
  std::uint32_t packet = 0;            // first packet sequence number, 24 bits
  std::uint16_t mtu = 0;               // bytes: 256, 512, 1024, 2048 or 4096
  std::uint16_t lid = 0;               // InfiniBand; 0 with Ethernet
  std::uint8_t reads = 0;              // READs outstanding, 1 to 255
  std::uint8_t type = 2;               // of the GID: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2; the last two never meet
  bool operator==(const VerbsEnd&) const noexcept = default;
};

// A client's end is made: the server makes the other one, ready to be read from. It lives as long as the connection that asked; another
// VERBS_OPEN on it replaces the first.
struct VerbsOpenMessage {
  VerbsEnd end;
  std::uint8_t choice = 0;             // of the ways that the server has to reach that end, best first; past the last: ERROR not found
  Bytes encode(std::uint64_t request) const;
  static Result<VerbsOpenMessage> decode(std::span<const std::byte> meta);
};

// The server's end; mtu and reads are what both can. Reading the probe's bytes shows that the path carries packets of that MTU.
struct VerbsReadyMessage {
  VerbsEnd end;
  std::uint64_t probe_address = 0;
  std::uint32_t probe_key = 0;         // rkey
  std::uint32_t probe_size = 0;        // bytes, over twice the largest MTU; byte i is i * 7 + (i >> 8), modulo 256
  Bytes encode(std::uint64_t request) const;
  static Result<VerbsReadyMessage> decode(std::span<const std::byte> meta);
};
constexpr std::byte verbs_probe_byte(std::uint32_t i) noexcept { return static_cast<std::byte>((i * 7 + (i >> 8)) & 0xff); }
inline constexpr std::uint32_t kVerbsProbeBytes = 16 * 1024;

// Registered memory of an arena: [offset, offset + size) lies at `address` under `key`, for the queue pair of this connection.
struct VerbsRegion {
  std::uint16_t arena = 0;
  std::uint64_t offset = 0;            // bytes from the arena's start, a multiple of kRegionBytes
  std::uint32_t size = 0;              // bytes, at most kRegionBytes
  std::uint64_t address = 0;
  std::uint32_t key = 0;               // rkey
  bool operator==(const VerbsRegion&) const noexcept = default;
};

// What else is registered, after the first `known` of this server's list (which only grows). With `wanted`, the region that holds byte
// `offset` of `arena` is registered first: ERROR not found when the arena has no such bytes.
struct VerbsRegionsMessage {
  std::uint32_t known = 0;
  bool wanted = false;
  std::uint16_t arena = 0;             // these two are 0 without `wanted`
  std::uint64_t offset = 0;
  Bytes encode(std::uint64_t request) const;
  static Result<VerbsRegionsMessage> decode(std::span<const std::byte> meta);
};
struct VerbsRegionListMessage {
  bool complete = false;               // everything that can be read is in the list now; else ask again for more
  std::vector<VerbsRegion> regions;    // at most kVerbsRegionsMax
  Bytes encode(std::uint64_t request) const;
  static Result<VerbsRegionListMessage> decode(std::span<const std::byte> meta);
};
inline constexpr std::size_t kVerbsRegionsMax = 4096;  // of one answer: 104 KiB

}  // namespace paramwire
