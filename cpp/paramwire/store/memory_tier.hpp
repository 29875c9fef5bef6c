// The `memory` and `heap` tiers: arenas of mapped memory over ArenaAllocator.
//
// `memory` arenas are memfds sealed against shrinking, growing and new writable mappings (F_SEAL_SHRINK, F_SEAL_GROW,
// F_SEAL_FUTURE_WRITE: memfd_create(2), fcntl(2)), so that a reader who holds the descriptor can neither truncate the
// memory under others nor reopen it for writing. Pages are allocated with fallocate(2) before a span is handed out: what
// can't be had is an error here, not a SIGBUS later. Source for the sealing and allocation rules: DESIGN section 4.
#pragma once

#include "paramwire/store/arena_allocator.hpp"
#include "paramwire/store/tier.hpp"

namespace paramwire {

class MemoryTier final : public Tier {
 public:
  enum class Backing : std::uint8_t { kMemfd, kPrivate };
  // errors: kUnavailable when the kernel has no memfd sealing, or huge pages were required and none are there.
  static Result<std::unique_ptr<Tier>> open(Backing backing, const TierOptions& options);
  ~MemoryTier() override;
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  Result<TierSpan> allocate(std::uint64_t size) override;
  void release(const TierSpan& span) override;
  std::byte* at(std::uint32_t arena, std::uint64_t offset) noexcept override { return arenas_[arena].info.base + offset; }
  std::uint32_t arena_count() const noexcept override { return static_cast<std::uint32_t>(arenas_.size()); }
  ArenaInfo arena(std::uint32_t index) const noexcept override;
  std::uint64_t used_bytes() const noexcept override;
  std::uint64_t committed_bytes() const noexcept override { return committed_; }
  std::uint64_t limit_bytes() const noexcept override { return options_.limit_bytes; }
  std::string_view name() const noexcept override { return backing_ == Backing::kMemfd ? "memory" : "heap"; }
  bool mappable() const noexcept override { return backing_ == Backing::kMemfd; }
  std::string note() const override { return note_; }

 private:
  struct Arena {
    ArenaInfo info;
    ArenaAllocator allocator;
    std::uint64_t committed = 0;  // bytes from the start whose pages are there
    bool huge = false;
  };
  MemoryTier(Backing backing, const TierOptions& options) : backing_(backing), options_(options) {}
  Status add_arena(std::uint64_t at_least);
  Result<ArenaInfo> map_arena(std::uint64_t size, bool huge) const;
  Status commit(Arena& arena, std::uint64_t end);
  Status commit_to(Arena& arena, std::uint64_t target);
  bool within_limit(std::uint64_t more) const noexcept {
    return options_.limit_bytes == 0 || (committed_ <= options_.limit_bytes && more <= options_.limit_bytes - committed_);
  }

  Backing backing_;
  TierOptions options_;
  std::vector<Arena> arenas_;
  std::uint64_t committed_ = 0;
  std::string note_;
};

}  // namespace paramwire
