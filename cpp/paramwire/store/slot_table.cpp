#include "paramwire/store/slot_table.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace paramwire {

namespace {

// Orders non-temporal and plain stores before it against all stores after it. Release stores alone do not order
// non-temporal ones on x86 (Intel SDM vol. 1, 10.4.6.2): without this, readers saw "even, old payload".
void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::uint64_t table_bytes(std::uint64_t stored_size) {
  const std::uint64_t extents = extent_count(stored_size);
  return extents > 1 ? extents * sizeof(ExtentRow) : 0;
}
std::uint64_t table_offset(std::uint64_t stored_size) { return (stored_size + 63) / 64 * 64; }
std::uint64_t span_bytes(std::uint64_t stored_size) {
  const std::uint64_t table = table_bytes(stored_size);
  return table == 0 ? stored_size : table_offset(stored_size) + table;
}

constexpr std::size_t kWords = sizeof(SlotHeader) / 8;

}  // namespace

SlotHeader* SlotTable::line(SlotIndex slot) const noexcept {
  const TierSpan& chunk = chunks_[slot / kHeadersPerChunk].headers;
  return reinterpret_cast<SlotHeader*>(tier_.at(chunk.arena, chunk.offset)) + slot % kHeadersPerChunk;
}

TierSpan SlotTable::payload_span(SlotIndex slot) const noexcept {
  const std::uint64_t packed = (*chunks_[slot / kHeadersPerChunk].payloads)[slot % kHeadersPerChunk];
  return {static_cast<std::uint32_t>(packed >> 48), (packed & ((std::uint64_t{1} << 48) - 1)) * 16, span_bytes(line(slot)->stored_size)};
}

void SlotTable::store_seq(SlotIndex slot, std::uint64_t seq) {
  std::atomic_ref(line(slot)->seq).store(seq, std::memory_order_release);  // pairs with the reader's acquire of the header
}

Result<SlotIndex> SlotTable::open(std::uint64_t stored_size) {
  if (free_.empty() && next_ == chunks_.size() * kHeadersPerChunk) {
    if (next_ + kHeadersPerChunk > 0xffffffffU) return Error(Code::kBackpressure, "the store has 2^32 slots in use, its limit");
    PARAMWIRE_TRY(chunk, tier_.allocate(kHeadersPerChunk * sizeof(SlotHeader)));
    std::memset(tier_.at(chunk.arena, chunk.offset), 0, chunk.size);
    chunks_.push_back(Chunk{chunk, std::make_unique<std::array<std::uint64_t, kHeadersPerChunk>>()});
  }
  PARAMWIRE_TRY(span, tier_.allocate(span_bytes(stored_size)));
  SlotIndex slot = 0;
  if (free_.empty()) {
    slot = static_cast<SlotIndex>(next_++);
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  (*chunks_[slot / kHeadersPerChunk].payloads)[slot % kHeadersPerChunk] = static_cast<std::uint64_t>(span.arena) << 48 | span.offset / 16;
  SlotHeader* header = line(slot);
  store_seq(slot, header->seq | 1);
  store_fence();  // seq odd is seen before any byte of the payload changes
  std::atomic_ref(header->stored_size).store(stored_size, std::memory_order_relaxed);
  return slot;
}

std::uint32_t SlotTable::seal(SlotIndex slot, const Sealed& what, std::span<const std::uint32_t> extents) {
  SlotHeader* target = line(slot);
  SlotHeader header{};
  header.seq = target->seq + 1;
  header.version_counter = what.version.counter;
  header.epoch = what.version.epoch;
  header.raw_size = what.raw_size;
  header.stored_size = target->stored_size;
  header.crc64 = what.crc64;
  header.block = what.block.value;
  header.codec = static_cast<std::uint16_t>(what.codec);
  header.dtype = static_cast<std::uint16_t>(what.dtype);

  std::uint32_t table_crc = 0;
  if (table_bytes(header.stored_size) > 0) {
    const std::uint64_t offset = table_offset(header.stored_size);
    header.extent_table = static_cast<std::uint32_t>(offset / 64);
    std::byte* table = tier_.at(payload_span(slot).arena, payload_span(slot).offset) + offset;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      const std::uint64_t left = header.stored_size - i * kExtentBytes;
      const auto size = static_cast<std::uint32_t>(left < kExtentBytes ? left : kExtentBytes);
      // One atomic word a row: another process may be copying the table of the slot's former block.
      const std::uint64_t row = static_cast<std::uint64_t>(extents[i]) << 32 | size;
      std::atomic_ref(*reinterpret_cast<std::uint64_t*>(table + i * sizeof(ExtentRow))).store(row, std::memory_order_relaxed);
    }
    table_crc = crc32c({table, extents.size() * sizeof(ExtentRow)});
  }
  header.header_crc = slot_header_crc(header);

  store_fence();  // the payload is seen before the header that vouches for it
  const auto words = std::bit_cast<std::array<std::uint64_t, kWords>>(header);
  auto* out = reinterpret_cast<std::uint64_t*>(target);
  for (std::size_t i = 1; i < kWords; ++i) std::atomic_ref(out[i]).store(words[i], std::memory_order_relaxed);
  store_seq(slot, header.seq);
  return table_crc;
}

void SlotTable::withdraw(SlotIndex slot) { store_seq(slot, line(slot)->seq | 1); }

void SlotTable::close(SlotIndex slot) {
  tier_.release(payload_span(slot));
  std::atomic_ref(line(slot)->block).store(0, std::memory_order_relaxed);
  free_.push_back(slot);
}

std::span<std::byte> SlotTable::payload(SlotIndex slot) noexcept {
  const TierSpan span = payload_span(slot);
  return {tier_.at(span.arena, span.offset), line(slot)->stored_size};
}

std::span<const std::byte> SlotTable::extent_table(SlotIndex slot) noexcept {
  const TierSpan span = payload_span(slot);
  const std::uint64_t size = line(slot)->stored_size;
  return {tier_.at(span.arena, span.offset) + table_offset(size), table_bytes(size)};
}

Locator SlotTable::locator(SlotIndex slot) const noexcept {
  const TierSpan& chunk = chunks_[slot / kHeadersPerChunk].headers;
  const TierSpan span = payload_span(slot);
  Locator out;
  out.arena = static_cast<std::uint16_t>(span.arena);
  out.header_arena = static_cast<std::uint16_t>(chunk.arena);
  out.header_offset = chunk.offset + slot % kHeadersPerChunk * sizeof(SlotHeader);
  out.payload_offset = span.offset;
  out.seq = line(slot)->seq;
  return out;
}

SlotHeader SlotTable::header(SlotIndex slot) const noexcept { return *line(slot); }

}  // namespace paramwire
