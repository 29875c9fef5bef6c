#include "paramwire/store/memory_tier.hpp"

#include "paramwire/base/probe.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/store/memory_limit.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

namespace paramwire {

namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
// The least step in which pages are taken from the system: one fallocate call zeroes 1 MiB in about 100 us, and a server of tiny models
// keeps no more than this unused.
constexpr std::uint64_t kCommitStep = std::uint64_t{1} << 20;
// Left to the rest of the machine or cgroup when memory is taken: an arena that takes the last page gets the process
// killed instead of an error.
constexpr std::uint64_t kHeadroom = std::uint64_t{32} << 20;

// Locators number arenas with 16 bits, and a pin word needs 0 for "free".
constexpr std::size_t kMaxArenas = 65535;

std::uint64_t round_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

std::uint64_t span_alignment(std::uint64_t size) noexcept {
  if (size <= kSlabSpanMax) return kSlabGranule;
  if (size < (std::uint64_t{1} << 20)) return 64;
  if (size < (std::uint64_t{64} << 20)) return 64 * 1024;
  return kHugePage;
}

Result<std::unique_ptr<Tier>> MemoryTier::open(Backing backing, const TierOptions& options) {
  if (options.commit_bytes == 0 || options.commit_bytes % kCommitStep != 0) {
    return Error(Code::kInvalid, cat("commit_bytes ", options.commit_bytes, " is not a positive multiple of ", kCommitStep));
  }
  if (options.arena_bytes == 0 || options.arena_bytes % kHugePage != 0) {
    return Error(Code::kInvalid, cat("arena_bytes ", options.arena_bytes, " is not a positive multiple of ", kHugePage));
  }
  std::unique_ptr<MemoryTier> tier(new MemoryTier(backing, options));
  if (options.huge_pages == TierOptions::HugePages::kRequire) PARAMWIRE_CHECK(tier->add_arena(options.arena_bytes));
  return std::unique_ptr<Tier>(std::move(tier));
}

MemoryTier::~MemoryTier() {
  for (Arena& arena : arenas_) {
    munmap(arena.info.base, arena.info.size);
    if (arena.info.fd >= 0) close(arena.info.fd);
  }
}

Result<ArenaInfo> MemoryTier::map_arena(std::uint64_t size, bool huge) const {
  ArenaInfo info;
  info.size = size;
  if (backing_ == Backing::kPrivate) {
    // Huge pages are reserved by mmap itself: with MAP_NORESERVE it would succeed without any, and the first touch would
    // be a SIGBUS (mmap(2)).
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (huge ? MAP_HUGETLB : MAP_NORESERVE);
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED) return errno_error(Code::kUnavailable, cat("map an arena of ", human_bytes(size)), errno);
    info.base = static_cast<std::byte*>(base);
    return info;
  }
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0U);
  info.fd = memfd_create("paramwire-arena", flags);
  if (info.fd < 0) return errno_error(Code::kUnavailable, cat("memfd_create for an arena of ", human_bytes(size)), errno);
  void* base = MAP_FAILED;
  const char* step = "ftruncate";
  if (ftruncate(info.fd, static_cast<off_t>(size)) == 0) {
    step = "mmap";
    base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, info.fd, 0);
  }
  // The writable mapping comes first: after F_SEAL_FUTURE_WRITE nobody, this process included, can make another.
  if (base == MAP_FAILED || fcntl(info.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    const int error = errno;
    if (base != MAP_FAILED) {
      step = "F_ADD_SEALS";
      munmap(base, size);
    }
    close(info.fd);
    return errno_error(Code::kUnavailable, cat(step, " of an arena of ", human_bytes(size)), error);
  }
  info.base = static_cast<std::byte*>(base);
  return info;
}

Status MemoryTier::add_arena(std::uint64_t at_least) {
  const std::uint64_t size = std::max(options_.arena_bytes, round_up(at_least, kHugePage));
  if (arenas_.size() == kMaxArenas) {
    return Error(Code::kBackpressure, cat("the ", name(), " tier has ", kMaxArenas, " arenas, its limit: raise arena_bytes"));
  }
  if (options_.huge_pages != TierOptions::HugePages::kNo) {
    // The whole arena at once: hugetlb pages are few and reserved by hand, so find out now.
    auto info = within_limit(size) ? map_arena(size, true)
                                   : Error(Code::kBackpressure, cat("an arena of ", size, " bytes is over the limit of ", options_.limit_bytes,
                                                                    ", of which ", committed_, " are held"));
    if (info.ok() && info->fd >= 0 && fallocate(info->fd, 0, 0, static_cast<off_t>(size)) != 0) {
      const int error = errno;
      munmap(info->base, size);
      close(info->fd);
      info = errno_error(Code::kUnavailable, cat("allocate ", size / kHugePage, " huge pages"), error);
    }
    if (info.ok()) {
      arenas_.push_back(Arena{*info, ArenaAllocator(size), size, true});
      committed_ += size;
      return {};
    }
    const std::string reason = cat("huge pages refused: ", info.error().message(), "; ", size / kHugePage,
                                   " pages of 2 MiB are wanted: sysctl vm.nr_hugepages, or huge_pages=\"no\"");
    if (options_.huge_pages == TierOptions::HugePages::kRequire) return Error(Code::kUnavailable, reason);
    note_ = reason;
  }
  PARAMWIRE_TRY(info, map_arena(size, false));
  arenas_.push_back(Arena{info, ArenaAllocator(size), 0, false});
  return {};
}

Status MemoryTier::commit(Arena& arena, std::uint64_t end) {
  if (end <= arena.committed) return {};
  const std::uint64_t least = std::min(arena.info.size, round_up(end, kCommitStep));
  const std::uint64_t wanted = std::min(arena.info.size, round_up(end, options_.commit_bytes));
  if (wanted > least && commit_to(arena, wanted).ok()) return {};
  return commit_to(arena, least);
}

Status MemoryTier::commit_to(Arena& arena, std::uint64_t target) {
  const std::uint64_t more = target - arena.committed;
  if (!within_limit(more)) {
    return Error(Code::kBackpressure, cat("the ", name(), " tier may hold ", human_bytes(options_.limit_bytes), " (", options_.limit_bytes,
                                          " bytes), holds ", committed_, " and needs ", more,
                                          " more: raise memory_limit, or release old snapshots"));
  }
  const MemoryLimit limit = memory_limit();
  if (more + kHeadroom > limit.available_bytes) {
    return Error(Code::kBackpressure, cat("no memory for ", human_bytes(more), " more of arena: ", limit.available_bytes, " bytes available of ",
                                          limit.limit_bytes, " (", limit.source, "), ", kHeadroom,
                                          " are left alone: raise that limit or serve a smaller model"));
  }
  if (arena.info.fd >= 0) {
    if (fallocate(arena.info.fd, 0, static_cast<off_t>(arena.committed), static_cast<off_t>(more)) != 0) {
      return errno_error(Code::kUnavailable, cat("allocate ", human_bytes(more), " of arena"), errno);
    }
  }
  arena.committed = target;
  committed_ += more;
  return {};
}

Result<TierSpan> MemoryTier::allocate(std::uint64_t size) {
  const std::uint64_t alignment = span_alignment(size);
  // Pages that are here come first, in whatever arena: a best fit over all free ranges would take new pages, or be refused
  // at the limit, while released ones lie idle.
  for (std::uint32_t i = 0; i < arenas_.size(); ++i) {
    if (const auto offset = arenas_[i].allocator.allocate(size, alignment, arenas_[i].committed)) return TierSpan{i, *offset, size};
  }
  for (std::uint32_t i = 0;; ++i) {
    if (i == arenas_.size()) PARAMWIRE_CHECK(add_arena(size));
    Arena& arena = arenas_[i];
    const auto offset = arena.allocator.allocate(size, alignment);
    if (!offset) continue;
    if (Status status = commit(arena, *offset + ArenaAllocator::rounded(size)); !status.ok()) {
      arena.allocator.release(*offset, size);
      return std::move(status).error();
    }
    return TierSpan{i, *offset, size};
  }
}

ArenaInfo MemoryTier::arena(std::uint32_t index) const noexcept {
  ArenaInfo info = arenas_[index].info;
  info.committed = arenas_[index].committed;
  return info;
}

void MemoryTier::release(const TierSpan& span) {
  arenas_[span.arena].allocator.release(span.offset, span.size);
}

std::uint64_t MemoryTier::used_bytes() const noexcept {
  std::uint64_t used = 0;
  for (const Arena& arena : arenas_) used += arena.allocator.used_bytes();
  return used;
}

Result<std::unique_ptr<Tier>> open_tier(std::string_view spec, const TierOptions& options) {
  if (spec == "memory") return MemoryTier::open(MemoryTier::Backing::kMemfd, options);
  if (spec == "heap") return MemoryTier::open(MemoryTier::Backing::kPrivate, options);
  return Error(Code::kInvalid, cat("unknown tier \"", spec, "\"; known: memory, heap"));
}

namespace {

// Opens the tier and takes one span of it.
Status try_tier(std::string_view spec, TierOptions options) {
  options.arena_bytes = kHugePage;
  PARAMWIRE_TRY(tier, open_tier(spec, options));
  PARAMWIRE_CHECK(tier->allocate(16));
  return {};
}

Availability huge_pages_availability() {
  const std::string folder = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const std::string pages = first_line(folder + "nr_hugepages");
  if (pages.empty()) return {"hugetlb", false, "this kernel has no pages of 2 MiB"};
  TierOptions options;
  options.huge_pages = TierOptions::HugePages::kRequire;
  if (try_tier("memory", options).ok()) return {"hugetlb", true, cat(first_line(folder + "free_hugepages"), " of ", pages, " pages of 2 MiB free; huge_pages=\"try\"")};
  return {"hugetlb", false, cat("no free page of 2 MiB: vm.nr_hugepages is ", pages, ", ", first_line(folder + "free_hugepages"), " free"),
          "sysctl -w vm.nr_hugepages=512  # 1 GiB"};
}

}  // namespace

std::vector<Availability> available_tiers() {
  std::vector<Availability> out;
  for (const auto& [spec, use] : {std::pair("memory", "memfd arenas, which readers on this host can map"), std::pair("heap", "private: read over sockets only")}) {
    const Status status = try_tier(spec, {});
    out.push_back({spec, status.ok(), status.ok() ? use : status.error().to_string()});
  }
  out.push_back(huge_pages_availability());
  out.push_back({"disk", false, "not in this build", "serve from memory: paramwire serve MODEL"});
  return out;
}

}  // namespace paramwire
