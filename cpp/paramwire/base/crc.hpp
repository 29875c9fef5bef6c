// CRC-64/XZ and CRC-32C, alone and fused with a copy.
//
// CRC-64/XZ: polynomial 0x42F0E1EBA9EA3693 reflected, initial value and final xor all ones; crc64("123456789") =
// 0x995DC9BBDF1939FA. CRC-32C (Castagnoli): RFC 3720 appendix B.4; crc32c("123456789") = 0xE3069283.
// Both chain: crc(a + b) = crc(b, crc(a)); the CRC of no bytes is 0. Any thread. Source of the catalogue values:
// reveng.sourceforge.io/crc-catalogue.
#pragma once

#include "paramwire/base/types.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace paramwire {

std::uint64_t crc64(std::span<const std::byte> bytes, std::uint64_t before = 0) noexcept;
// CRC-64 of a + b from the CRC-64 of each and the size of b: for parts that two threads checked. About 5 us.
std::uint64_t crc64_join(std::uint64_t first, std::uint64_t second, std::uint64_t second_size) noexcept;
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;
// As crc64_join. About 1 us. By x ^ crc32c_join(first, 0, n) the CRC of the last n bytes follows from that of all, x, and that of those before them.
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_size) noexcept;

// Where a copy leaves its target. kBySize streams from kStreamFromBytes up. Name a policy only where the size of one
// call says little about the whole: a long range fetched extent by extent streams, although each extent is small.
enum class Stores : std::uint8_t {
  kBySize,
  kCached,     // in cache: it fits, and its reader comes at once
  kStreaming,  // in memory, by non-temporal stores where those are fast: no line is read first, none evicted
  kStreamingOpen,  // the same without the fence at the end: for many small copies in a row, then one end_streaming()
};

// Orders copies that stream before all later stores. After 1,448 bytes it costs as much as their copy, waiting for memory.
void end_streaming() noexcept;

// Bytes of one copy from which kBySize streams: source and target together are then half of a second-level cache of 1
// MiB, the smallest beside these bodies, and are unlikely to be in it. Measured on Sapphire Rapids (2 MiB), GB/s
// cached and streaming: from memory 5 and 10 at every size from 32 KiB to 2 MiB; from cache 24 and 14 at 256 KiB, 17
// and 14 at 1 MiB, 11 and 13 at 2 MiB. Too small, and copies that their reader takes from cache at once halve their
// speed; too large, and blocks from memory do.
inline constexpr std::size_t kStreamFromBytes = 256 * 1024;

// Copies `source` to `target` (same size, not overlapping, any alignment) and returns the CRC-64 of the bytes as they
// were copied, chained after `before`: every byte of the source is loaded once, so what is checked is what was
// stored, even while another process changes the source. kStreaming ends with a store fence; no other order
// against other stores is implied.
std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before = 0,
                         Stores stores = Stores::kBySize) noexcept;

// As copy_crc64 from the start, and also writes the CRC-32C of each 64 KiB extent (the last may be short) to
// `extents`, which must hold extent_count(size) values. The publish path: one pass gives copy, block CRC and extent
// table.
std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size,
                                 std::span<std::uint32_t> extents, Stores stores = Stores::kBySize) noexcept;

// As copy_crc64 with CRC-32C. For ranged reads, extent by extent.
std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before = 0,
                          Stores stores = Stores::kBySize) noexcept;

// As copy_crc64 without a CRC: for bytes that somebody else checks.
void copy_bytes(std::byte* target, const std::byte* source, std::size_t size, Stores stores = Stores::kBySize) noexcept;

// The body that runs in this process: "vpclmulqdq", "isa-l", or "atomic-words" in ThreadSanitizer builds. For
// `doctor` and bench records.
std::string_view crc_implementation() noexcept;

}  // namespace paramwire
