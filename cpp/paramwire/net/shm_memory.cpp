#include "paramwire/net/shm_memory.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/net/transport.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

namespace paramwire {

namespace {

// Pages that one read fault maps around the touched one: /sys/kernel/debug/fault_around_bytes, 64 KiB unless changed.
constexpr std::uintptr_t kFaultAround = 64 * 1024;

#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;  // asm-generic/mman-common.h since Linux 5.14
#endif

// A mapping of memory that another process owns is only as safe as its seals: without F_SEAL_SHRINK that process could cut it
// and our next read would kill us.
Status check_seals(const Fd& descriptor, std::uint64_t size, std::string_view what) {
  if (!descriptor.valid()) return Error(Code::kCorrupt, cat("the server's answer brought no descriptor of its ", what));
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0) return errno_error(Code::kCorrupt, cat("the server's ", what, " is no memory file that could be sealed"), errno);
  if ((seals & F_SEAL_SHRINK) == 0) return Error(Code::kCorrupt, cat("the server's ", what, " is not sealed against shrinking: not mapped"));
  struct stat found{};
  if (fstat(descriptor.get(), &found) != 0) return errno_error(Code::kUnavailable, cat("fstat of the server's ", what), errno);
  if (size == 0 || static_cast<std::uint64_t>(found.st_size) < size) {
    return Error(Code::kCorrupt, cat("the server says its ", what, " has ", size, " bytes, the file has ", found.st_size));
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<const MappedArena>> MappedArena::map(const Fd& descriptor, std::uint64_t size) {
  PARAMWIRE_CHECK(check_seals(descriptor, size, "arena"));
  Fd own(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
  if (!own.valid()) return errno_error(Code::kUnavailable, "keep the descriptor of an arena (ulimit -n)", errno);
  void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor.get(), 0);
  if (base == MAP_FAILED) return errno_error(Code::kUnavailable, cat("map an arena of ", human_bytes(size)), errno);
  return std::shared_ptr<const MappedArena>(new MappedArena(std::move(own), static_cast<const std::byte*>(base), size));
}

Status MappedArena::read(std::uint64_t offset, std::span<std::byte> target) const {
  while (!target.empty()) {
    const ssize_t n = ::pread(descriptor_.get(), target.data(), target.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return errno_error(Code::kUnavailable, cat("read ", target.size(), " bytes at ", offset, " of an arena"), n < 0 ? errno : EIO);
    target = target.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return {};
}

MappedArena::~MappedArena() { munmap(const_cast<std::byte*>(base_), size_); }

std::span<const std::byte> MappedArena::around(const std::byte* begin, std::size_t size) const noexcept {
  const auto from = (reinterpret_cast<std::uintptr_t>(begin)) / kFaultAround * kFaultAround;
  const auto to = (reinterpret_cast<std::uintptr_t>(begin + size) + kFaultAround - 1) / kFaultAround * kFaultAround;
  const auto first = std::max(from, reinterpret_cast<std::uintptr_t>(base_));
  const auto last = std::min(to, reinterpret_cast<std::uintptr_t>(base_) + size_);
  return {base_ + (first - reinterpret_cast<std::uintptr_t>(base_)), last - first};
}

void MappedArena::drop_pages(const std::byte* begin, std::size_t size) const noexcept {
  if (size == 0) return;
  const auto pages = around(begin, size);
  madvise(const_cast<std::byte*>(pages.data()), pages.size(), MADV_DONTNEED);
}

void MappedArena::populate(const std::byte* begin, std::size_t size) const noexcept {
  if (size == 0) return;
  constexpr std::uintptr_t kPage = 4096;
  const std::size_t lead = reinterpret_cast<std::uintptr_t>(begin) % kPage;
  madvise(const_cast<std::byte*>(begin - lead), size + lead, MADV_POPULATE_READ);
}

// One process_madvise(2) of this process for all ranges: one flush. MADV_DONTNEED is allowed there since Linux 6.13, the flush
// is one for the call since 6.16; before that, a call a range.
void release_views(std::span<BlockView> views) noexcept {
  std::vector<iovec> ranges;
  for (BlockView& view : views) {
    if (const auto pages = view.take_pages(); !pages.empty()) ranges.push_back({const_cast<std::byte*>(pages.data()), pages.size()});
  }
  std::sort(ranges.begin(), ranges.end(), [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
  std::size_t kept = 0;
  for (const iovec& range : ranges) {
    auto* const begin = static_cast<std::byte*>(range.iov_base);
    iovec* const last = kept > 0 ? &ranges[kept - 1] : nullptr;
    std::byte* const end = last != nullptr ? static_cast<std::byte*>(last->iov_base) + last->iov_len : nullptr;
    if (last != nullptr && begin <= end) {  // neighbours in the arena
      last->iov_len = std::max(last->iov_len, static_cast<std::size_t>(begin + range.iov_len - static_cast<std::byte*>(last->iov_base)));
    } else {
      ranges[kept++] = range;
    }
  }
  ranges.resize(kept);
  constexpr int kSelf = -10000;  // PIDFD_SELF, linux/pidfd.h since 6.14
  const bool together = ranges.size() > 1 && ranges.size() <= IOV_MAX && syscall(SYS_process_madvise, kSelf, ranges.data(), ranges.size(), MADV_DONTNEED, 0U) >= 0;
  if (!together) {
    for (const iovec& range : ranges) madvise(range.iov_base, range.iov_len, MADV_DONTNEED);
  }
  for (BlockView& view : views) view.release();
}

// ---------------------------------------------------------------- pins

Result<std::shared_ptr<PinTable>> PinTable::map(const Fd& descriptor, std::uint32_t capacity) {
  const std::size_t size = std::size_t{capacity} * sizeof(std::uint64_t);
  PARAMWIRE_CHECK(check_seals(descriptor, size, "pin table"));
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (base == MAP_FAILED) return errno_error(Code::kUnavailable, "map the pin table", errno);
  madvise(base, size, MADV_DONTFORK);  // a child must not release its parent's pins
  return std::shared_ptr<PinTable>(new PinTable(static_cast<std::uint64_t*>(base), capacity));
}

PinTable::~PinTable() {
  if (!guard_.in_child()) munmap(words_, std::size_t{capacity_} * sizeof(std::uint64_t));
}

bool PinTable::take(std::uint32_t index, std::uint64_t word) noexcept {
  std::uint64_t free = 0;
  return std::atomic_ref(words_[index]).compare_exchange_strong(free, word, std::memory_order_seq_cst);
}

Result<std::uint32_t> PinTable::claim(std::uint64_t word) {
  const std::lock_guard lock(mutex_);
  std::optional<std::uint32_t> claimed;
  while (!claimed && !free_.empty()) {
    if (take(free_.back(), word)) claimed = free_.back();
    free_.pop_back();
  }
  for (std::uint32_t tried = 0; !claimed && tried < capacity_; ++tried) {
    const std::uint32_t index = next_;
    next_ = (next_ + 1) % capacity_;
    if (take(index, word)) claimed = index;
  }
  if (!claimed) {
    return Error(Code::kBackpressure, cat("this process holds ", capacity_, " views of this server, the limit: release some, or fetch into buffers"));
  }
  // Pairs with the store's fence between withdrawal and scan: one of the two sides sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return *claimed;
}

void PinTable::release(std::uint32_t index) noexcept {
  if (guard_.in_child()) return;
  std::atomic_ref(words_[index]).store(0, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  free_.push_back(index);
}

}  // namespace paramwire
