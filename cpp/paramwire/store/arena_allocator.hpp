// Offsets inside one arena: slabs of equal slots for small spans, best fit for the rest. Pure: no memory is touched.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace paramwire {

// Spans up to this size come from slabs, rounded up to 16 bytes: a million tiny tensors waste under 16 bytes each. Larger
// spans are rounded to 64 bytes, at most 1.6 % of them.
inline constexpr std::uint64_t kSlabSpanMax = 4096;
inline constexpr std::uint64_t kSlabGranule = 16;
inline constexpr std::uint64_t kSlabBytes = 64 * 1024;
inline constexpr std::uint64_t kExtentGranule = 64;

class ArenaAllocator {
 public:
  explicit ArenaAllocator(std::uint64_t size);

  // Offset of `size` bytes at a multiple of `alignment`, or nothing when no free range is large enough. Spans that come from
  // slabs (kSlabSpanMax and below) are aligned to kSlabGranule, whatever `alignment` says.
  // Only ranges that end at or before `within` count: the tier asks first for what lies in pages that it already has.
  std::optional<std::uint64_t> allocate(std::uint64_t size, std::uint64_t alignment, std::uint64_t within = ~std::uint64_t{0});
  void release(std::uint64_t offset, std::uint64_t size);

  std::uint64_t used_bytes() const noexcept { return used_; }
  // Bytes that spans of this size and alignment occupy.
  static std::uint64_t rounded(std::uint64_t size) noexcept;

 private:
  struct SlabClass {
    std::vector<std::uint64_t> free;   // offsets, last released first
    std::uint64_t bump = 0;            // next never-used offset of the current slab
    std::uint64_t bump_end = 0;
  };
  std::optional<std::uint64_t> allocate_small(std::uint64_t size, std::uint64_t within);
  void release_small(std::uint64_t offset, std::uint64_t size);
  std::optional<std::uint64_t> take(std::uint64_t size, std::uint64_t alignment, std::uint64_t within);
  void give(std::uint64_t offset, std::uint64_t size);

  std::map<std::uint64_t, std::uint64_t> free_by_offset_;              // offset -> size, never adjacent
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;     // (size, offset)
  std::array<SlabClass, kSlabSpanMax / kSlabGranule + 1> classes_;
  std::unordered_map<std::uint64_t, std::uint32_t> slab_live_;         // slab offset -> spans in use
  std::uint64_t used_ = 0;
};

}  // namespace paramwire
