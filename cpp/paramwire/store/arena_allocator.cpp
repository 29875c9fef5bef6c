#include "paramwire/store/arena_allocator.hpp"

#include <algorithm>

namespace paramwire {

ArenaAllocator::ArenaAllocator(std::uint64_t size) { give(0, size / kExtentGranule * kExtentGranule); }

std::uint64_t ArenaAllocator::rounded(std::uint64_t size) noexcept {
  const std::uint64_t granule = size <= kSlabSpanMax ? kSlabGranule : kExtentGranule;
  return std::max(granule, (size + granule - 1) / granule * granule);
}

std::optional<std::uint64_t> ArenaAllocator::allocate(std::uint64_t size, std::uint64_t alignment, std::uint64_t within) {
  if (size <= kSlabSpanMax) return allocate_small(rounded(size), within);
  const std::uint64_t bytes = rounded(size);
  const auto offset = take(bytes, std::max(alignment, kExtentGranule), within);
  if (offset) used_ += bytes;
  return offset;
}

void ArenaAllocator::release(std::uint64_t offset, std::uint64_t size) {
  if (size <= kSlabSpanMax) {
    release_small(offset, rounded(size));
    return;
  }
  const std::uint64_t bytes = rounded(size);
  used_ -= bytes;
  give(offset, bytes);
}

std::optional<std::uint64_t> ArenaAllocator::allocate_small(std::uint64_t size, std::uint64_t within) {
  SlabClass& slabs = classes_[size / kSlabGranule];
  std::uint64_t offset = 0;
  if (!slabs.free.empty()) {
    offset = slabs.free.back();
    if (offset + size > within) return std::nullopt;
    slabs.free.pop_back();
  } else {
    if (slabs.bump + size > slabs.bump_end) {
      const auto slab = take(kSlabBytes, kSlabBytes, within);
      if (!slab) return std::nullopt;
      slabs.bump = *slab;
      slabs.bump_end = *slab + kSlabBytes;
    }
    offset = slabs.bump;
    if (offset + size > within) return std::nullopt;
    slabs.bump += size;
  }
  ++slab_live_[offset / kSlabBytes];
  used_ += size;
  return offset;
}

void ArenaAllocator::release_small(std::uint64_t offset, std::uint64_t size) {
  SlabClass& slabs = classes_[size / kSlabGranule];
  const std::uint64_t slab = offset / kSlabBytes;
  used_ -= size;
  slabs.free.push_back(offset);
  if (--slab_live_[slab] > 0) return;
  // The slab is empty: give it back whole, unless the class is still cutting spans from it.
  if (slabs.bump_end == (slab + 1) * kSlabBytes) return;
  slab_live_.erase(slab);
  std::erase_if(slabs.free, [slab](std::uint64_t free) { return free / kSlabBytes == slab; });
  give(slab * kSlabBytes, kSlabBytes);
}

std::optional<std::uint64_t> ArenaAllocator::take(std::uint64_t size, std::uint64_t alignment, std::uint64_t within) {
  for (auto it = free_by_size_.lower_bound({size, 0}); it != free_by_size_.end(); ++it) {
    const auto [free_size, free_offset] = *it;
    const std::uint64_t offset = (free_offset + alignment - 1) / alignment * alignment;
    if (offset + size > std::min(free_offset + free_size, within)) continue;  // too little is left behind the aligned start
    free_by_size_.erase(it);
    free_by_offset_.erase(free_offset);
    if (offset > free_offset) give(free_offset, offset - free_offset);
    if (offset + size < free_offset + free_size) give(offset + size, free_offset + free_size - offset - size);
    return offset;
  }
  return std::nullopt;
}

void ArenaAllocator::give(std::uint64_t offset, std::uint64_t size) {
  if (size == 0) return;
  auto after = free_by_offset_.lower_bound(offset);
  if (after != free_by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      free_by_size_.erase({before->second, before->first});
      free_by_offset_.erase(before);
    }
  }
  if (after != free_by_offset_.end() && offset + size == after->first) {
    size += after->second;
    free_by_size_.erase({after->second, after->first});
    free_by_offset_.erase(after);
  }
  free_by_offset_.emplace(offset, size);
  free_by_size_.emplace(size, offset);
}

}  // namespace paramwire
