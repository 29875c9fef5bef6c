// The Tier seam: where slots get their bytes. Implementations: `memory` (arenas that other processes can map) and `heap`
// (private memory: tests, the simulation, servers that only speak TCP).
//
// A tier hands out spans inside few, large arenas; arenas are never moved, shrunk or unmapped while the tier lives, so a
// pointer from at() is good as long as its span is. One thread at a time (the store's lock); the bytes may be written by
// whoever owns the span.
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/base/error.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

struct TierSpan {
  std::uint32_t arena = 0;
  std::uint64_t offset = 0;  // bytes from the arena's start
  std::uint64_t size = 0;    // bytes, as asked for
};

struct ArenaInfo {
  int fd = -1;               // memfd that readers map read-only; -1 when the arena is private
  std::uint64_t size = 0;
  std::byte* base = nullptr;
  std::uint64_t committed = 0;  // bytes from the start whose pages are there; spans lie in them
};

struct TierOptions {
  // Most bytes that may be in use or kept for reuse, headers included. 0: what the machine or cgroup has.
  std::uint64_t limit_bytes = 0;
  // Address space of one arena. Virtual: pages are taken as spans need them. Fewer, larger arenas mean fewer mappings and
  // registrations at every reader; a block larger than this gets an arena of its own size.
  std::uint64_t arena_bytes = std::uint64_t{1} << 30;
  // Pages are taken in steps of so many bytes, where the limit leaves room for them: a multiple of 1 MiB. Few steps are few registrations.
  std::uint64_t commit_bytes = std::uint64_t{1} << 20;
  enum class HugePages : std::uint8_t { kNo, kTry, kRequire };
  HugePages huge_pages = HugePages::kNo;  // 2 MiB pages from hugetlbfs; kTry falls back and says so in note()
};

// 16 bytes up to 4 KiB (slabs), 64 below 1 MiB, 64 KiB from 1 MiB up (the rounding is at most 6 %, and whole extents start
// on pages), 2 MiB from 64 MiB up (huge pages, where the kernel has them).
std::uint64_t span_alignment(std::uint64_t size) noexcept;

class Tier {
 public:
  virtual ~Tier() = default;

  // A span of `size` bytes at a multiple of span_alignment(size). Contents undefined, pages present: touching the span
  // can't fail later.
  // errors: kBackpressure naming the limit and what is used; kUnavailable with errno when the system gives no memory.
  virtual Result<TierSpan> allocate(std::uint64_t size) = 0;
  // Gives back a span exactly as it was allocated.
  virtual void release(const TierSpan& span) = 0;

  virtual std::byte* at(std::uint32_t arena, std::uint64_t offset) noexcept = 0;
  virtual std::uint32_t arena_count() const noexcept = 0;
  virtual ArenaInfo arena(std::uint32_t index) const noexcept = 0;

  virtual std::uint64_t used_bytes() const noexcept = 0;       // in spans handed out, rounding included
  virtual std::uint64_t committed_bytes() const noexcept = 0;  // taken from the system
  virtual std::uint64_t limit_bytes() const noexcept = 0;
  virtual std::string_view name() const noexcept = 0;
  virtual bool mappable() const noexcept = 0;                  // by other processes: its arenas have descriptors
  virtual std::string note() const = 0;                        // "huge pages refused: ..." or empty
};

// `spec`: "memory" or "heap".  errors: kInvalid naming the known specs; kUnavailable with the reason.
Result<std::unique_ptr<Tier>> open_tier(std::string_view spec, const TierOptions& options);
// One line for each, and for the forms of "memory" and the tiers that this machine or build lacks: each is tried with one arena.
std::vector<Availability> available_tiers();

}  // namespace paramwire
