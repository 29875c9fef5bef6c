// Slots: where one version of one block lies. Gives out slots, writes their headers by the slot protocol, takes them back.
//
// A slot is a 64-byte header line (all headers of a chunk side by side, so that a tiny block costs no padding) and a payload
// span with its extent table behind it. 8 bytes of private state a slot. One thread (the store's lock), except that the
// payload of a slot being written belongs to its writer.
#pragma once

#include "paramwire/store/tier.hpp"
#include "paramwire/wire/block_header.hpp"
#include "paramwire/wire/manifest.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace paramwire {

using SlotIndex = std::uint32_t;

class SlotTable {
 public:
  explicit SlotTable(Tier& tier) : tier_(tier) {}

  // A slot for a block of `stored_size` bytes; its seq is odd and fenced: the payload may be written.
  // errors: as Tier::allocate; kBackpressure when slot numbers run out (2^32).
  Result<SlotIndex> open(std::uint64_t stored_size);
  // What the header says of a payload, beside its stored size.
  struct Sealed {
    BlockId block;
    Version version;
    DType dtype = DType::kU8;
    CodecId codec = CodecId::kRaw;
    std::uint64_t raw_size = 0;
    std::uint64_t crc64 = 0;
  };
  // Writes the header of an open slot, fenced after the payload, and makes seq even. `extents` (not read for one extent or
  // less) are the CRC-32C of each extent; returns the CRC of the table, which the manifest holds.
  std::uint32_t seal(SlotIndex slot, const Sealed& what, std::span<const std::uint32_t> extents);
  // seq becomes odd: no new reader accepts the slot, its bytes stay. Idempotent. Fence before looking at pins.
  void withdraw(SlotIndex slot);
  // Takes the slot back; it must be withdrawn or open.
  void close(SlotIndex slot);

  std::span<std::byte> payload(SlotIndex slot) noexcept;
  // The extent table's bytes; empty when the block has one extent or less.
  std::span<const std::byte> extent_table(SlotIndex slot) noexcept;
  Locator locator(SlotIndex slot) const noexcept;
  SlotHeader header(SlotIndex slot) const noexcept;
  std::uint64_t slots_in_use() const noexcept { return next_ - free_.size(); }

 private:
  static constexpr std::uint64_t kHeadersPerChunk = 1024;  // 64 KiB of headers at a time
  SlotHeader* line(SlotIndex slot) const noexcept;
  TierSpan payload_span(SlotIndex slot) const noexcept;
  void store_seq(SlotIndex slot, std::uint64_t seq);

  Tier& tier_;
  struct Chunk {
    TierSpan headers;
    std::unique_ptr<std::array<std::uint64_t, kHeadersPerChunk>> payloads;  // of each slot: arena << 48 | offset / 16
  };
  std::vector<Chunk> chunks_;
  std::vector<SlotIndex> free_;
  std::uint64_t next_ = 0;
};

}  // namespace paramwire
