#include "support/sim_cuda_memory.hpp"

#include "support/sim_cuda.hpp"

#include "paramwire/base/text.hpp"

#include <charconv>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define PARAMWIRE_FORBID(begin, bytes) ASAN_POISON_MEMORY_REGION(pointer_to(begin), bytes)
#define PARAMWIRE_ALLOW(begin, bytes) ASAN_UNPOISON_MEMORY_REGION(pointer_to(begin), bytes)
#else
#define PARAMWIRE_FORBID(begin, bytes) static_cast<void>(begin)
#define PARAMWIRE_ALLOW(begin, bytes) static_cast<void>(begin)
#endif

namespace paramwire::testing::sim {

namespace {

constexpr std::uint64_t kAlignment = 256;
constexpr std::uint64_t kHugePage = 2U << 20;  // of x86-64, and of AArch64 with pages of 4 KiB; a wrong value costs speed
// Bytes before and after each allocation that kernels must leave alone. As large as the alignment: an overrun by one row of a warp (32 floats) is
// inside. A farther one lands in another allocation, or past everything.
constexpr std::uint64_t kGuardBytes = 256;
constexpr std::uint64_t kGuardWord = 0xA5A5A5A5A5A5A5A5U;

// Guards are poisoned for AddressSanitizer, so these may not be instrumented (nor call memset, which is).
__attribute__((no_sanitize("address"), noinline)) void write_guard(std::uint64_t begin) {
  auto* bytes = static_cast<volatile unsigned char*>(pointer_to(begin));
  for (std::uint64_t i = 0; i < kGuardBytes; ++i) bytes[i] = static_cast<unsigned char>(kGuardWord);
}

// kGuardBytes, or the first byte that is not as it was.
__attribute__((no_sanitize("address"), noinline)) std::uint64_t first_damage(std::uint64_t begin) {
  const auto* bytes = static_cast<const volatile unsigned char*>(pointer_to(begin));
  for (std::uint64_t i = 0; i < kGuardBytes; ++i) {
    if (bytes[i] != static_cast<unsigned char>(kGuardWord)) return i;
  }
  return kGuardBytes;
}

std::uint64_t page_bytes() { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }
std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

std::string hex(std::uint64_t address) {
  char text[20] = "0x";
  return {text, std::to_chars(text + 2, text + sizeof text, address, 16).ptr};
}

std::string Allocation::to_string() const { return cat(pinned ? "pinned allocation " : "allocation ", number, " (", bytes, " B at ", hex(begin), ')'); }

Allocation* AddressMap::starting_at(std::uint64_t begin) {
  const auto found = by_begin_.find(begin);
  return found == by_begin_.end() ? nullptr : &found->second;
}

const Allocation* AddressMap::around(std::uint64_t begin) const {
  auto after = by_begin_.upper_bound(begin);
  if (after == by_begin_.begin()) return nullptr;
  const Allocation& found = std::prev(after)->second;
  return begin <= found.begin + found.bytes ? &found : nullptr;
}

std::string AddressMap::problem(std::uint64_t begin, std::uint64_t bytes, int device) const {
  const std::string what = cat(bytes, " B at ", hex(begin), ": ");
  const Allocation* found = around(begin);
  if (found == nullptr) return cat(what, "outside of every allocation");
  if (found->freed) return cat(what, "in ", *found, ", which was freed");
  const std::uint64_t room = found->begin + found->bytes - begin;
  if (bytes > room) return cat(what, bytes - room, " B past the end of ", *found);
  if (!found->pinned && found->device != device) return cat(what, "in ", *found, " of device ", found->device, ", used by device ", device);
  return "";
}

DeviceMemory::DeviceMemory(std::uint64_t reserved_bytes) : reserved_bytes_(round_up(reserved_bytes + kHugePage, kHugePage)) {
  void* begin = ::mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    reserved_bytes_ = 0;  // every allocation then says so
    return;
  }
  base_ = address_of(begin);
  top_ = round_up(base_, kHugePage);
  ::madvise(begin, reserved_bytes_, MADV_HUGEPAGE);
#if defined(PKEY_DISABLE_ACCESS)
  key_ = ::pkey_alloc(0, PKEY_DISABLE_ACCESS);
  if (key_ >= 0 && ::pkey_mprotect(begin, reserved_bytes_, PROT_READ | PROT_WRITE, key_) != 0) {
    ::pkey_free(key_);
    key_ = -1;
  }
#endif
}

DeviceMemory::~DeviceMemory() {
  if (reserved_bytes_ == 0) return;
  PARAMWIRE_ALLOW(base_, top_ - base_);
  ::munmap(pointer_to(base_), reserved_bytes_);
#if defined(PKEY_DISABLE_ACCESS)
  if (key_ >= 0) ::pkey_free(key_);
#endif
}

const Allocation* DeviceMemory::allocate(std::uint64_t bytes, int device) {
  // At an odd multiple of the alignment, so that code which counts on more does not get it by luck.
  const std::uint64_t begin = round_up(top_ + kGuardBytes, 2 * kAlignment) + kAlignment;
  const std::uint64_t end = begin + bytes;
  if (end < begin || end + kGuardBytes > base_ + reserved_bytes_) return nullptr;
  const std::uint64_t before = top_;
  top_ = end + kGuardBytes;
  const Open open(*this);
  PARAMWIRE_ALLOW(before, top_ - before);
  std::memset(pointer_to(begin), std::to_integer<int>(kSimPoison), bytes);
  write_guard(begin - kGuardBytes);
  write_guard(end);
  PARAMWIRE_FORBID(before, begin - before);
  PARAMWIRE_FORBID(end, kGuardBytes);
  return &map_.add({.begin = begin, .bytes = bytes, .device = device, .number = ++allocations_});
}

void DeviceMemory::release(Allocation& allocation) {
  const Open open(*this);
  std::memset(pointer_to(allocation.begin), std::to_integer<int>(kSimPoison), allocation.bytes);
  PARAMWIRE_FORBID(allocation.begin, allocation.bytes);
  allocation.freed = true;
}

std::string DeviceMemory::broken_guard() {
  std::string out;
  map_.each_live([&](const Allocation& allocation) {
    const std::uint64_t end = allocation.begin + allocation.bytes;
    const std::uint64_t before = first_damage(allocation.begin - kGuardBytes);
    const std::uint64_t after = first_damage(end);
    if (before < kGuardBytes) out = cat("wrote ", kGuardBytes - before, " B before the beginning of ", allocation);
    if (after < kGuardBytes) out = cat("wrote ", after, " B past the end of ", allocation);
    if (before < kGuardBytes) write_guard(allocation.begin - kGuardBytes);
    if (after < kGuardBytes) write_guard(end);
  });
  return out;
}

void DeviceMemory::protect(bool accessible) const {
#if defined(PKEY_DISABLE_ACCESS)
  if (key_ >= 0) {
    ::pkey_set(key_, accessible ? 0 : PKEY_DISABLE_ACCESS);
    return;
  }
#endif
  const std::uint64_t used = round_up(top_ - base_, page_bytes());
  if (used != 0) ::mprotect(pointer_to(base_), used, accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

DeviceMemory::Open::Open(DeviceMemory& memory) : memory_(memory) {
  if (memory_.opened_++ == 0) memory_.protect(true);
}

DeviceMemory::Open::~Open() {
  if (--memory_.opened_ == 0) memory_.protect(false);
}

PinnedMemory::~PinnedMemory() {
  for (const auto& [begin, mapping] : mappings_) ::munmap(mapping.begin, mapping.bytes);
}

const Allocation* PinnedMemory::allocate(std::uint64_t bytes) {
  const std::uint64_t page = page_bytes();
  const std::uint64_t inside = round_up(bytes, page);
  void* mapped = ::mmap(nullptr, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const std::uint64_t begin = address_of(mapped) + page;
  mappings_[begin] = {mapped, inside + 2 * page};
  ::mprotect(pointer_to(begin), inside, PROT_READ | PROT_WRITE);
  std::memset(pointer_to(begin), std::to_integer<int>(kSimPoison), inside);
  return &map_.add({.begin = begin, .bytes = bytes, .number = ++allocations_, .pinned = true});
}

void PinnedMemory::release(Allocation& allocation) {
  const std::uint64_t inside = round_up(allocation.bytes, page_bytes());
  ::madvise(pointer_to(allocation.begin), inside, MADV_DONTNEED);
  ::mprotect(pointer_to(allocation.begin), inside, PROT_NONE);
  allocation.freed = true;
}

}  // namespace paramwire::testing::sim
