// The three datagrams of the UDP path: GET, DATA and STATUS. Layout and rules: wire/FORMAT.md, "Datagrams".
//
// A GET is authenticated by its MAC; so is a STATUS. A DATA carries a header CRC over what it says *and* over what was asked, so that a
// segment of another incarnation, version, block or part never passes; its payload is checked by the block's CRC.
// Encoders write what decoders accept, and decoders accept nothing else (one value, one encoding). All values: any thread.
#pragma once

#include "paramwire/base/siphash.hpp"
#include "paramwire/base/types.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace paramwire {

inline constexpr std::uint32_t kDatagramMagic = 0x31555750;  // "PWU1" in memory
inline constexpr std::uint8_t kDatagramProtocol = 1;
enum class DatagramKind : std::uint8_t { kGet = 1, kData = 2, kStatus = 3 };

inline constexpr std::size_t kGetFixedBytes = 96;     // before the bitmap
inline constexpr std::size_t kMacBytes = 16;
inline constexpr std::size_t kDataHeaderBytes = 24;
inline constexpr std::size_t kStatusBytes = 56;
// Segments that one GET spans. A window of 1024 costs 128 bytes of bitmap; 64 KiB segments make 64 MiB of it, small ones 1.4 MiB.
inline constexpr std::uint32_t kSegmentsMax = 1024;
inline constexpr std::size_t kGetBytesMax = kGetFixedBytes + kSegmentsMax / 8 + kMacBytes;
// Payload of one DATA. Below 64 B the header would be most of it; 65,000 and the header fit the 65,507 B that UDP over IPv4 carries.
inline constexpr std::uint32_t kSegmentBytesMin = 64;
inline constexpr std::uint32_t kSegmentBytesMax = 65'000;

enum class BlockPart : std::uint8_t { kStored = 0, kExtentTable = 1 };

// What is asked: both sides put it under the header CRC of every DATA, and neither sends it there.
struct Asked {
  Incarnation incarnation;
  BlockId block;
  Version version;
  BlockPart part = BlockPart::kStored;
  bool operator==(const Asked&) const noexcept = default;
};

struct DatagramGet {
  std::uint64_t session = 0;
  std::uint64_t sequence = 0;      // of the session, from 1, never twice
  std::uint64_t request = 0;       // random, one for each stream of segments: the cookie that DATA echoes
  Asked asked;
  std::uint16_t segment_size = 0;  // bytes of payload a segment
  SipTag token;                    // zeros: none yet
  std::uint32_t first_segment = 0;
  std::uint16_t segment_count = 0;
  std::array<std::uint8_t, kSegmentsMax / 8> bitmap{};  // bit i of byte i/8: segment first + i is wanted

  bool wanted(std::uint32_t i) const noexcept { return (static_cast<std::uint32_t>(bitmap[i / 8]) >> i % 8U) % 2U != 0U; }
  void want(std::uint32_t i) noexcept { bitmap[i / 8] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(bitmap[i / 8]) | std::uint32_t{1} << i % 8U); }
  std::size_t size() const noexcept { return kGetFixedBytes + (segment_count + 7U) / 8U + kMacBytes; }
  // Appends the datagram, MAC included. The caller keeps first and last bit of the span set.
  void encode(std::vector<std::byte>& out, const SipKey& key) const;
};

// The session of a GET, to find the key by; nullopt when it is no GET at all (length, magic, kind).
std::optional<std::uint64_t> get_session(std::span<const std::byte> datagram) noexcept;
// The MAC at the end is right. For a datagram of which get_session() said something.
bool get_authentic(std::span<const std::byte> datagram, const SipKey& key) noexcept;
// nullptr and `out` filled; or the reason: "size", "reserved", "part", "segment size", "segments", "bitmap", "version". Looks at everything
// but the MAC.
const char* decode_get(std::span<const std::byte> datagram, DatagramGet& out) noexcept;

struct DatagramData {
  std::uint16_t payload_size = 0;
  std::uint64_t request = 0;
  std::uint32_t segment = 0;
};
// CRC-32C state of what was asked, which a stream computes once: chained behind the 20 bytes of a DATA header.
class AskedCrc {
 public:
  explicit AskedCrc(const Asked& asked) noexcept;
  std::uint32_t over(std::span<const std::byte> first20) const noexcept;

 private:
  std::array<std::byte, 37> pseudo_{};
};
void encode_data_header(std::byte* out, const DatagramData& data, const AskedCrc& asked) noexcept;
// Fields without the CRC, to find the stream; nullopt when it is no DATA or its size is not what it says.
std::optional<DatagramData> read_data(std::span<const std::byte> datagram) noexcept;
// As read_data of the first 24 bytes of a datagram of `size` bytes.
std::optional<DatagramData> read_data_header(std::span<const std::byte> header, std::size_t size) noexcept;
bool data_header_intact(std::span<const std::byte> header, const AskedCrc& asked) noexcept;

enum class StatusCode : std::uint16_t { kToken = 0, kInvalid = 1, kStale = 3, kBackpressure = 5 };
struct DatagramStatus {
  StatusCode code = StatusCode::kToken;
  std::uint64_t request = 0;
  std::uint32_t retry_us = 0;  // kBackpressure: ask again no sooner
  SipTag token;                // valid for the address that asked, whatever the code
  std::array<std::byte, kStatusBytes> encode(const SipKey& key) const noexcept;
};
// nullopt: not a STATUS of this form, or a wrong MAC (`forged` is then true).
std::optional<DatagramStatus> read_status(std::span<const std::byte> datagram, const SipKey& key, bool& forged) noexcept;

// The kind by magic, protocol and kind alone; nullopt for anything else.
std::optional<DatagramKind> datagram_kind(std::span<const std::byte> datagram) noexcept;

}  // namespace paramwire
