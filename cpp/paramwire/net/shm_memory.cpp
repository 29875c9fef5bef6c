#include "paramwire/net/shm_memory.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

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
  void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor.get(), 0);
  if (base == MAP_FAILED) return errno_error(Code::kUnavailable, cat("map an arena of ", human_bytes(size)), errno);
  return std::shared_ptr<const MappedArena>(new MappedArena(static_cast<const std::byte*>(base), size));
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
