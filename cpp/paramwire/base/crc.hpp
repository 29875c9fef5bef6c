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
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

// Copies `source` to `target` (same size, not overlapping) and returns the CRC-64 of the bytes as they were copied, chained
// after `before`: every byte is loaded once, so what is checked is what was stored, even while another process changes the
// source. Large copies use non-temporal stores (the target is not in cache afterwards) and end with a store fence.
std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before = 0) noexcept;

// As copy_crc64, and also writes the CRC-32C of each 64 KiB extent (the last may be short) to `extents`, which must hold
// extent_count(size) values. The publish path: one pass gives copy, block CRC and extent table.
std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size,
                                 std::span<std::uint32_t> extents) noexcept;

// Copies and returns the CRC-32C of the copied bytes. For ranged reads, extent by extent.
std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before = 0) noexcept;

// Which bodies run on this machine: "vpclmulqdq", "isa-l", ... for `doctor` and bench records.
std::string_view crc_implementation() noexcept;

}  // namespace paramwire
