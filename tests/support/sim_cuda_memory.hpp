// Device memory and pinned memory of the simulation: address ranges, poison, guards. The caller locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace paramwire::testing::sim {

struct Allocation {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  int device = 0;            // device memory only
  std::uint32_t number = 0;  // from 1, in the order of allocation
  bool pinned = false;
  bool freed = false;
  std::string to_string() const;  // "allocation 3 (1024 B at 0x7f...)"
};

// Allocations by address, those that were freed too: no address is given twice.
class AddressMap {
 public:
  Allocation& add(const Allocation& allocation) { return by_begin_[allocation.begin] = allocation; }
  Allocation* starting_at(std::uint64_t begin);
  // The one that [begin, begin + bytes) begins in, or at the end of, freed or not; nullptr when there is none.
  const Allocation* around(std::uint64_t begin) const;
  template <typename Visit>
  void each_live(const Visit& visit) const {
    for (const auto& [begin, allocation] : by_begin_) {
      if (!allocation.freed) visit(allocation);
    }
  }
  // Empty, or what is wrong with the bytes: "12 B at 0x...: 4 B past the end of allocation 3 (...)".
  std::string problem(std::uint64_t begin, std::uint64_t bytes, int device) const;

 private:
  std::map<std::uint64_t, Allocation> by_begin_;
};

// One mapping, reserved at first and given out upwards; never twice. Huge pages where the system gives them on request: changing the access of 540 MiB of
// small pages took 0.2 s at each wait (Linux 6.18, virtual machine), of huge ones 26 us. Where the processor has protection keys (pkeys(7)) access is
// the thread's that runs device work and costs 0.04 us.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::uint64_t reserved_bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Poisoned, 256-byte aligned as the manual promises ("suitably aligned for any kind of variable"; 256 by the programming guide, "Size and Alignment
  // Requirement") and never more; nullptr when the reserved addresses are used up.
  const Allocation* allocate(std::uint64_t bytes, int device);
  void release(Allocation& allocation);
  AddressMap& map() noexcept { return map_; }
  const AddressMap& map() const noexcept { return map_; }
  bool reserved(std::uint64_t address) const noexcept { return address >= base_ && address < base_ + reserved_bytes_; }
  // Mends guards that were overwritten. Empty, or which one.
  std::string broken_guard();
  bool per_thread() const noexcept { return key_ >= 0; }

  // While one lives, this process (with protection keys: this thread, and those that it starts) may touch the memory.
  class Open {
   public:
    explicit Open(DeviceMemory& memory);
    ~Open();
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    DeviceMemory& memory_;
  };

 private:
  void protect(bool accessible) const;

  std::uint64_t base_ = 0;
  std::uint64_t reserved_bytes_ = 0;
  int key_ = -1;  // of pkey_alloc(2)
  std::uint64_t top_ = 0;  // first byte that was never given out, nor a guard
  std::uint32_t opened_ = 0;
  std::uint32_t allocations_ = 0;
  AddressMap map_;
};

// Each allocation a mapping with pages of no access on both sides; freed ones stay as pages of no access, so that a late touch is a crash.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  const Allocation* allocate(std::uint64_t bytes);
  static void release(Allocation& allocation);
  AddressMap& map() noexcept { return map_; }
  const AddressMap& map() const noexcept { return map_; }

 private:
  struct Mapping {
    void* begin = nullptr;
    std::size_t bytes = 0;
  };
  std::map<std::uint64_t, Mapping> mappings_;
  std::uint32_t allocations_ = 0;
  AddressMap map_;
};

// Pointers and addresses are one thing in a simulated address space.
inline std::uint64_t address_of(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer); }
inline void* pointer_to(std::uint64_t address) noexcept { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)
std::string hex(std::uint64_t address);  // "0x7f..."

}  // namespace paramwire::testing::sim
