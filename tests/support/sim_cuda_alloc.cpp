// Section "Memory Management" (allocation), and cuPointerGetAttributes of "Unified Addressing".
#include "support/sim_cuda_state.hpp"

#include <algorithm>

namespace paramwire::testing::sim {

namespace {

constexpr Needs kAllocates{.safe = false};
constexpr Needs kFrees{.safe = false, .destroys = true};

CUresult sim_cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cuMemGetInfo", {}, [&](Sim& sim, SimEntry&) {
    const Device& device = sim.devices[static_cast<std::size_t>(sim.current_context()->device)];
    *free = sim.options.device_bytes - device.used;
    *total = sim.options.device_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuMemAlloc(CUdeviceptr* out, std::size_t bytes) {
  return call("cuMemAlloc", kAllocates, [&](Sim& sim, SimEntry& entry) {
    entry.bytes = bytes;
    if (bytes == 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "0 bytes");
    const int number = sim.current_context()->device;
    Device& device = sim.devices[static_cast<std::size_t>(number)];
    if (bytes > sim.options.device_bytes - device.used) return CUDA_ERROR_OUT_OF_MEMORY;
    const Allocation* made = sim.memory.allocate(bytes, number);
    if (made == nullptr) return sim.forbid(CUDA_ERROR_OUT_OF_MEMORY, "the simulation's addresses are used up: it never gives one twice; raise device_bytes");
    device.used += bytes;
    SimCuda::Counters& counters = sim.counters;
    ++counters.allocations;
    counters.device_bytes += bytes;
    counters.device_bytes_peak = std::max(counters.device_bytes_peak, counters.device_bytes);
    entry.address = made->begin;
    *out = made->begin;
    return CUDA_SUCCESS;
  });
}

// The live allocation that begins there, or nullptr after a failure.
Allocation* to_free(Sim& sim, AddressMap& map, std::uint64_t begin) {
  Allocation* found = map.starting_at(begin);
  if (found == nullptr) {
    const Allocation* around = map.around(begin);
    sim.fail(around != nullptr ? cat(hex(begin), " is inside of ", *around, ", not its beginning") : cat(hex(begin), " was never allocated"));
    return nullptr;
  }
  if (found->freed) {
    sim.fail(cat(*found, " was freed before"));
    return nullptr;
  }
  // "this API may perform implicit synchronization": or not.
  if (const std::string users = sim.pending_users(begin, found->bytes); !users.empty()) {
    sim.fail(cat(*found, " is used by work that nobody waited for: ", users));
  }
  return found;
}

CUresult sim_cuMemFree(CUdeviceptr begin) {
  return call("cuMemFree", kFrees, [&](Sim& sim, SimEntry& entry) {
    entry.address = begin;
    Allocation* found = to_free(sim, sim.memory.map(), begin);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const Context* context = sim.current_context(); context != nullptr && context->device != found->device) {
      sim.fail(cat(*found, " is of device ", found->device, ", and device ", context->device, " is current"));
    }
    entry.bytes = found->bytes;
    sim.memory.release(*found);
    sim.devices[static_cast<std::size_t>(found->device)].used -= found->bytes;
    --sim.counters.allocations;
    sim.counters.device_bytes -= found->bytes;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuMemHostAlloc(void** out, std::size_t bytes, unsigned flags) {
  return call("cuMemHostAlloc", kAllocates, [&](Sim& sim, SimEntry& entry) {
    entry.bytes = bytes;
    constexpr unsigned kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (bytes == 0 || (flags & ~kKnown) != 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "0 bytes, or flags that do not exist");
    if (bytes > sim.options.pinned_bytes - sim.pinned_used) return CUDA_ERROR_OUT_OF_MEMORY;
    const Allocation* made = sim.pinned.allocate(bytes);
    if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    sim.pinned_used += bytes;
    sim.counters.pinned_bytes = sim.pinned_used;
    sim.counters.pinned_bytes_peak = std::max(sim.counters.pinned_bytes_peak, sim.pinned_used);
    entry.address = made->begin;
    *out = pointer_to(made->begin);
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuMemFreeHost(void* begin) {
  return call("cuMemFreeHost", kFrees, [&](Sim& sim, SimEntry& entry) {
    entry.address = address_of(begin);
    Allocation* found = to_free(sim, sim.pinned.map(), address_of(begin));
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    entry.bytes = found->bytes;
    PinnedMemory::release(*found);
    sim.pinned_used -= found->bytes;
    sim.counters.pinned_bytes = sim.pinned_used;
    return CUDA_SUCCESS;
  });
}

template <typename T>
void put(void* out, T value) {
  *static_cast<T*>(out) = value;
}

// "the attributes are assigned default NULL values" where the address is of no allocation.
CUresult put_attribute(Sim& sim, CUpointer_attribute attribute, void* out, std::uint64_t address, const Allocation* found) {
  const bool device = found != nullptr && !found->pinned;
  const bool host = found != nullptr && found->pinned;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      put<CUcontext>(out, device ? static_cast<CUcontext>(pointer_to(sim.devices[static_cast<std::size_t>(found->device)].context)) : nullptr);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      put<unsigned>(out, device ? unsigned{CU_MEMORYTYPE_DEVICE} : host ? unsigned{CU_MEMORYTYPE_HOST} : 0U);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      put<CUdeviceptr>(out, found != nullptr ? address : 0);
      break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      put<void*>(out, host ? pointer_to(address) : nullptr);
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      put<unsigned>(out, 0);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      // -2 is CU_DEVICE_INVALID.
      put<int>(out, device ? found->device : host ? 0 : CU_DEVICE_INVALID);
      break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      put<unsigned long long>(out, found == nullptr ? 0 : found->number * 2ULL + (host ? 1 : 0));
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      put<CUdeviceptr>(out, found != nullptr ? found->begin : 0);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      put<std::size_t>(out, found != nullptr ? found->bytes : 0);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      put<unsigned>(out, found != nullptr ? 1 : 0);
      break;
    default:
      return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("the simulation has no pointer attribute ", static_cast<int>(attribute)));
  }
  return CUDA_SUCCESS;
}

const Allocation* live_at(const AddressMap& map, std::uint64_t address) {
  const Allocation* found = map.around(address);
  return found != nullptr && !found->freed && address < found->begin + found->bytes ? found : nullptr;
}

CUresult sim_cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** out, CUdeviceptr address) {
  return call("cuPointerGetAttributes", {.context = false, .device = false}, [&](Sim& sim, SimEntry& entry) {
    entry.address = address;
    const Allocation* found = live_at(sim.memory.map(), address);
    if (found == nullptr) found = live_at(sim.pinned.map(), address);
    for (unsigned i = 0; i < count; ++i) {
      const CUresult code = put_attribute(sim, attributes[i], out[i], address, found);
      if (code != CUDA_SUCCESS) return code;
    }
    return CUDA_SUCCESS;
  });
}

}  // namespace

void fill_memory_functions(cuda::Driver& driver) {
  driver.cuMemGetInfo = sim_cuMemGetInfo;
  driver.cuMemAlloc = sim_cuMemAlloc;
  driver.cuMemFree = sim_cuMemFree;
  driver.cuMemHostAlloc = sim_cuMemHostAlloc;
  driver.cuMemFreeHost = sim_cuMemFreeHost;
  driver.cuPointerGetAttributes = sim_cuPointerGetAttributes;
}

}  // namespace paramwire::testing::sim
