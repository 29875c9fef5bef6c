#include "paramwire/wire/datagram.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"

#include <cstring>

namespace paramwire {

namespace {

constexpr std::size_t kPrefixBytes = 6;  // magic, protocol, kind
constexpr std::uint64_t kDataPrefix = kDatagramMagic | std::uint64_t{kDatagramProtocol} << 32 | std::uint64_t{static_cast<std::uint8_t>(DatagramKind::kData)} << 40;

void store_prefix(std::byte* out, DatagramKind kind) noexcept {
  store_le<std::uint32_t>(out, kDatagramMagic);
  store_le<std::uint8_t>(out + 4, kDatagramProtocol);
  store_le<std::uint8_t>(out + 5, static_cast<std::uint8_t>(kind));
}
void store_tag(std::byte* out, const SipTag& tag) noexcept {
  store_le<std::uint64_t>(out, tag.low);
  store_le<std::uint64_t>(out + 8, tag.high);
}
SipTag load_tag(const std::byte* in) noexcept { return {load_le<std::uint64_t>(in), load_le<std::uint64_t>(in + 8)}; }

// All bits are looked at, so that the time says nothing about how many were right.
bool same(const SipTag& a, const SipTag& b) noexcept { return ((a.low ^ b.low) | (a.high ^ b.high)) == 0; }

}  // namespace

std::optional<DatagramKind> datagram_kind(std::span<const std::byte> datagram) noexcept {
  if (datagram.size() < kPrefixBytes || load_le<std::uint32_t>(datagram.data()) != kDatagramMagic) return std::nullopt;
  if (load_le<std::uint8_t>(datagram.data() + 4) != kDatagramProtocol) return std::nullopt;
  const auto kind = load_le<std::uint8_t>(datagram.data() + 5);
  if (kind < 1 || kind > 3) return std::nullopt;
  return static_cast<DatagramKind>(kind);
}

// ---------------------------------------------------------------- GET

void DatagramGet::encode(std::vector<std::byte>& out, const SipKey& key) const {
  const std::size_t at = out.size();
  out.resize(at + size());
  std::byte* const p = out.data() + at;
  store_prefix(p, DatagramKind::kGet);
  store_le<std::uint16_t>(p + 6, static_cast<std::uint16_t>(size()));
  store_le<std::uint64_t>(p + 8, session);
  store_le<std::uint64_t>(p + 16, sequence);
  store_le<std::uint64_t>(p + 24, request);
  store_le<std::uint64_t>(p + 32, asked.incarnation.high);
  store_le<std::uint64_t>(p + 40, asked.incarnation.low);
  store_le<std::uint64_t>(p + 48, asked.block.value);
  store_le<std::uint32_t>(p + 56, asked.version.epoch);
  store_le<std::uint8_t>(p + 60, static_cast<std::uint8_t>(asked.part));
  store_le<std::uint8_t>(p + 61, 0);
  store_le<std::uint16_t>(p + 62, segment_size);
  store_le<std::uint64_t>(p + 64, asked.version.counter);
  store_tag(p + 72, token);
  store_le<std::uint32_t>(p + 88, first_segment);
  store_le<std::uint16_t>(p + 92, segment_count);
  store_le<std::uint16_t>(p + 94, 0);
  std::memcpy(p + kGetFixedBytes, bitmap.data(), (segment_count + 7U) / 8U);
  store_tag(p + size() - kMacBytes, siphash128(key, {p, size() - kMacBytes}));
}

std::optional<std::uint64_t> get_session(std::span<const std::byte> datagram) noexcept {
  if (datagram.size() <= kGetFixedBytes + kMacBytes || datagram.size() > kGetBytesMax) return std::nullopt;
  if (datagram_kind(datagram) != DatagramKind::kGet) return std::nullopt;
  return load_le<std::uint64_t>(datagram.data() + 8);
}

bool get_authentic(std::span<const std::byte> datagram, const SipKey& key) noexcept {
  const std::size_t body = datagram.size() - kMacBytes;
  return same(siphash128(key, datagram.first(body)), load_tag(datagram.data() + body));
}

const char* decode_get(std::span<const std::byte> datagram, DatagramGet& out) noexcept {
  if (!get_session(datagram)) return "size";
  const std::byte* const p = datagram.data();
  out.segment_count = load_le<std::uint16_t>(p + 92);
  if (out.segment_count == 0 || out.segment_count > kSegmentsMax) return "segments";
  if (load_le<std::uint16_t>(p + 6) != datagram.size() || out.size() != datagram.size()) return "size";
  if (load_le<std::uint8_t>(p + 61) != 0 || load_le<std::uint16_t>(p + 94) != 0) return "reserved";
  const auto part = load_le<std::uint8_t>(p + 60);
  if (part > 1) return "part";
  out.session = load_le<std::uint64_t>(p + 8);
  out.sequence = load_le<std::uint64_t>(p + 16);
  out.request = load_le<std::uint64_t>(p + 24);
  out.asked.incarnation = {load_le<std::uint64_t>(p + 32), load_le<std::uint64_t>(p + 40)};
  out.asked.block.value = load_le<std::uint64_t>(p + 48);
  out.asked.version = {load_le<std::uint32_t>(p + 56), load_le<std::uint64_t>(p + 64)};
  out.asked.part = static_cast<BlockPart>(part);
  out.segment_size = load_le<std::uint16_t>(p + 62);
  out.token = load_tag(p + 72);
  out.first_segment = load_le<std::uint32_t>(p + 88);
  if (out.segment_size < kSegmentBytesMin || out.segment_size > kSegmentBytesMax) return "segment size";
  if (out.first_segment > ~std::uint32_t{0} - out.segment_count) return "segments";
  if (!out.asked.version.valid()) return "version";
  const std::size_t bytes = (out.segment_count + 7U) / 8U;
  std::memcpy(out.bitmap.data(), p + kGetFixedBytes, bytes);
  const unsigned spare = static_cast<unsigned>(bytes * 8 - out.segment_count);
  if (!out.wanted(0) || !out.wanted(out.segment_count - 1U)) return "bitmap";
  if (spare > 0 && unsigned{out.bitmap[bytes - 1]} >> (8 - spare) != 0) return "bitmap";
  return nullptr;
}

// ---------------------------------------------------------------- DATA

AskedCrc::AskedCrc(const Asked& asked) noexcept {
  std::byte* const p = pseudo_.data();
  store_le<std::uint64_t>(p, asked.incarnation.high);
  store_le<std::uint64_t>(p + 8, asked.incarnation.low);
  store_le<std::uint64_t>(p + 16, asked.block.value);
  store_le<std::uint32_t>(p + 24, asked.version.epoch);
  store_le<std::uint64_t>(p + 28, asked.version.counter);
  store_le<std::uint8_t>(p + 36, static_cast<std::uint8_t>(asked.part));
}

std::uint32_t AskedCrc::over(std::span<const std::byte> first20) const noexcept {
  return crc32c(pseudo_, crc32c(first20));  // where they lie: a copy of both in one place would be read before it is stored
}

void encode_data_header(std::byte* out, const DatagramData& data, const AskedCrc& asked) noexcept {
  // Prefix and size in one store: the checksum loads them together, at once.
  store_le<std::uint64_t>(out, kDataPrefix | std::uint64_t{data.payload_size} << 48);
  store_le<std::uint64_t>(out + 8, data.request);
  store_le<std::uint32_t>(out + 16, data.segment);
  store_le<std::uint32_t>(out + 20, asked.over({out, 20}));
}

std::optional<DatagramData> read_data_header(std::span<const std::byte> header, std::size_t size) noexcept {
  if (size <= kDataHeaderBytes || header.size() < kDataHeaderBytes) return std::nullopt;
  const auto first = load_le<std::uint64_t>(header.data());
  if ((first & ~std::uint64_t{0} >> 16) != kDataPrefix) return std::nullopt;
  DatagramData data;
  data.payload_size = static_cast<std::uint16_t>(first >> 48);
  if (size != kDataHeaderBytes + data.payload_size) return std::nullopt;
  data.request = load_le<std::uint64_t>(header.data() + 8);
  data.segment = load_le<std::uint32_t>(header.data() + 16);
  return data;
}

std::optional<DatagramData> read_data(std::span<const std::byte> datagram) noexcept { return read_data_header(datagram, datagram.size()); }

bool data_header_intact(std::span<const std::byte> header, const AskedCrc& asked) noexcept {
  return load_le<std::uint32_t>(header.data() + 20) == asked.over(header.first(20));
}

// ---------------------------------------------------------------- STATUS

std::array<std::byte, kStatusBytes> DatagramStatus::encode(const SipKey& key) const noexcept {
  std::array<std::byte, kStatusBytes> out{};
  std::byte* const p = out.data();
  store_prefix(p, DatagramKind::kStatus);
  store_le<std::uint16_t>(p + 6, static_cast<std::uint16_t>(code));
  store_le<std::uint64_t>(p + 8, request);
  store_le<std::uint32_t>(p + 16, retry_us);
  store_tag(p + 24, token);
  store_tag(p + 40, siphash128(key, {p, 40}));
  return out;
}

std::optional<DatagramStatus> read_status(std::span<const std::byte> datagram, const SipKey& key, bool& forged) noexcept {
  forged = false;
  if (datagram.size() != kStatusBytes || datagram_kind(datagram) != DatagramKind::kStatus) return std::nullopt;
  const std::byte* const p = datagram.data();
  forged = !same(siphash128(key, {p, 40}), load_tag(p + 40));
  if (forged) return std::nullopt;
  const auto code = load_le<std::uint16_t>(p + 6);
  if ((code != 0 && code != 1 && code != 3 && code != 5) || load_le<std::uint32_t>(p + 20) != 0) return std::nullopt;
  DatagramStatus status;
  status.code = static_cast<StatusCode>(code);
  status.request = load_le<std::uint64_t>(p + 8);
  status.retry_us = load_le<std::uint32_t>(p + 16);
  status.token = load_tag(p + 24);
  return status;
}

}  // namespace paramwire
