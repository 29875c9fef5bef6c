// The 64-byte header of a slot, and what locates a slot in a server's arenas. Layout: wire/FORMAT.md, "Slot header".
//
// One cache line, read by other processes and by NICs while the server may be rewriting it: trust nothing in it before
// verify() says nothing, and nothing about the payload before `seq` equals the locator's (net/slot_reader.hpp).
#pragma once

#include "paramwire/base/types.hpp"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace paramwire {

static_assert(std::endian::native == std::endian::little, "stored structs are little-endian; a big-endian port needs loads");

struct SlotHeader {
  std::uint64_t seq;              // even: sealed; odd: being written or withdrawn; 0: never sealed. Never decreases; grows
                                  // by 2 a rewrite: 2^63 rewrites outlast the machine
  std::uint64_t version_counter;  // with `epoch`, the version that wrote the payload
  std::uint64_t raw_size;         // bytes after decoding
  std::uint64_t stored_size;      // bytes in the slot
  std::uint64_t crc64;            // CRC-64/XZ of the stored bytes
  std::uint64_t block;            // block id; 0 while the slot is free
  std::uint32_t epoch;
  std::uint32_t extent_table;     // from the payload's first byte, in 64-byte units (reach 256 GiB); 0: no table
  std::uint16_t codec;
  std::uint16_t dtype;
  std::uint32_t header_crc;       // CRC-32C of the 60 bytes before it
};

static_assert(sizeof(SlotHeader) == 64);
static_assert(alignof(SlotHeader) == 8);
static_assert(offsetof(SlotHeader, seq) == 0);
static_assert(offsetof(SlotHeader, version_counter) == 8);
static_assert(offsetof(SlotHeader, raw_size) == 16);
static_assert(offsetof(SlotHeader, stored_size) == 24);
static_assert(offsetof(SlotHeader, crc64) == 32);
static_assert(offsetof(SlotHeader, block) == 40);
static_assert(offsetof(SlotHeader, epoch) == 48);
static_assert(offsetof(SlotHeader, extent_table) == 52);
static_assert(offsetof(SlotHeader, codec) == 56);
static_assert(offsetof(SlotHeader, dtype) == 58);
static_assert(offsetof(SlotHeader, header_crc) == 60);
static_assert(std::is_trivially_copyable_v<SlotHeader>);
static_assert(std::has_unique_object_representations_v<SlotHeader>);  // no padding

// CRC-32C of the bytes before header_crc.
std::uint32_t slot_header_crc(const SlotHeader& header) noexcept;
// nullptr when the header is whole and sealed, else the reason: "seq odd", "seq zero", "header CRC", "block zero",
// "version zero", "dtype", "codec", "stored size". Whether it is the block and version wanted is the caller's to compare.
const char* verify(const SlotHeader& header) noexcept;

// One row of an extent table: 8 bytes, little-endian, row i for stored bytes [i * 64 KiB, (i + 1) * 64 KiB).
struct ExtentRow {
  std::uint32_t stored_size;  // of this extent: 64 KiB, or what is left
  std::uint32_t crc32c;       // CRC-32C of those stored bytes
};
static_assert(sizeof(ExtentRow) == 8);
static_assert(std::has_unique_object_representations_v<ExtentRow>);

// Where a block's slot lies, in one server incarnation. A hint: bytes are accepted only against a manifest.
struct Locator {
  std::uint16_t arena = 0;           // of the payload
  std::uint16_t header_arena = 0;
  std::uint64_t header_offset = 0;   // bytes from its arena's start, 64-byte aligned
  std::uint64_t payload_offset = 0;  // bytes from the arena's start, 16-byte aligned
  std::uint64_t seq = 0;             // what the header's seq was when the locator was made
  bool operator==(const Locator&) const noexcept = default;
};

// What a server registers of an arena with an RDMA device at once; regions begin at its multiples, and no one-sided read crosses one. 16 MiB are
// pinned in a few milliseconds, so that a server can do it between two requests; a full-sized arena has 64.
inline constexpr std::uint64_t kRegionBytes = std::uint64_t{16} << 20;

// Word of a pin table: which slot a reader of a view holds; never 0, which is a free word. 16 bits of arena + 1, then the
// header's offset in 64-byte units (reach 2^54 bytes an arena), so that one 8-byte store sets a pin.
inline constexpr std::uint32_t kArenaMax = 0xfffe;
constexpr std::uint64_t pin_word(const Locator& locator) noexcept {
  return (std::uint64_t{locator.header_arena} + 1) << 48 | locator.header_offset / sizeof(SlotHeader);
}

}  // namespace paramwire
