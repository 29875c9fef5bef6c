// Sections "Error Handling", "Initialization", "Version Management", "Device Management", "Primary Context Management" and "Context Management".
#include "support/sim_cuda_state.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::testing::sim {

namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

// Those that the simulation gives and those that its tests ask it to give.
#define PARAMWIRE_ERROR(name, text) ErrorText{name, #name, text}
constexpr ErrorText kErrors[] = {
    PARAMWIRE_ERROR(CUDA_SUCCESS, "no error"),
    PARAMWIRE_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    PARAMWIRE_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    PARAMWIRE_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    PARAMWIRE_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    PARAMWIRE_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    PARAMWIRE_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    PARAMWIRE_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    PARAMWIRE_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    PARAMWIRE_ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    PARAMWIRE_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    PARAMWIRE_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    PARAMWIRE_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    PARAMWIRE_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    PARAMWIRE_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    PARAMWIRE_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    PARAMWIRE_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    PARAMWIRE_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    PARAMWIRE_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    PARAMWIRE_ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    PARAMWIRE_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"),
    PARAMWIRE_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef PARAMWIRE_ERROR

constexpr Needs kNothing{.initialised = false, .context = false, .device = false};
constexpr Needs kInitialised{.context = false, .device = false};

const ErrorText* text_of(CUresult code) {
  const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors), [&](const ErrorText& entry) { return entry.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

CUresult sim_cuGetErrorName(CUresult code, const char** out) {
  const ErrorText* entry = text_of(code);
  *out = entry != nullptr ? entry->name : nullptr;
  return entry != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuGetErrorString(CUresult code, const char** out) {
  const ErrorText* entry = text_of(code);
  *out = entry != nullptr ? entry->text : nullptr;
  return entry != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuInit(unsigned flags) {
  return call("cuInit", kNothing, [&](Sim& sim, SimEntry&) -> CUresult {
    if (flags != 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "flags must be 0");
    if (sim.devices.empty()) return CUDA_ERROR_NO_DEVICE;
    sim.initialised = true;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuDriverGetVersion(int* out) {
  return call("cuDriverGetVersion", kNothing, [&](Sim& sim, SimEntry&) {
    *out = sim.options.driver_version;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuDeviceGetCount(int* out) {
  return call("cuDeviceGetCount", kInitialised, [&](Sim& sim, SimEntry&) {
    *out = sim.options.devices;
    return CUDA_SUCCESS;
  });
}

bool is_device(const Sim& sim, int device) { return device >= 0 && device < sim.options.devices; }

CUresult sim_cuDeviceGet(CUdevice* out, int ordinal) {
  return call("cuDeviceGet", kInitialised, [&](Sim& sim, SimEntry&) {
    if (!is_device(sim, ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *out = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuDeviceGetName(char* out, int size, CUdevice device) {
  return call("cuDeviceGetName", kInitialised, [&](Sim& sim, SimEntry&) {
    if (!is_device(sim, device)) return sim.forbid(CUDA_ERROR_INVALID_DEVICE, "no such device");
    if (size < 1) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "no room for the name");
    const std::string name = cat("Simulated device ", device);
    const std::size_t copied = std::min(name.size(), static_cast<std::size_t>(size) - 1);
    std::memcpy(out, name.data(), copied);
    out[copied] = '\0';
    return CUDA_SUCCESS;
  });
}

// As of an H100; only what paramwire may ask for.
const std::map<CUdevice_attribute, int>& attributes() {
  static const std::map<CUdevice_attribute, int> values{
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 * 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 * 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 * 1024},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
      {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
      {CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1},
      {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
      {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
  };
  return values;
}

CUresult sim_cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice device) {
  return call("cuDeviceGetAttribute", kInitialised, [&](Sim& sim, SimEntry&) {
    if (!is_device(sim, device)) return sim.forbid(CUDA_ERROR_INVALID_DEVICE, "no such device");
    if (const auto own = sim.options.attributes.find(attribute); own != sim.options.attributes.end()) {
      *out = own->second;
    } else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
      *out = sim.options.capability_major;
    } else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
      *out = sim.options.capability_minor;
    } else if (const auto known = attributes().find(attribute); known != attributes().end()) {
      *out = known->second;
    } else {
      return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("the simulation has no attribute ", static_cast<int>(attribute)));
    }
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuDeviceTotalMem(std::size_t* out, CUdevice device) {
  return call("cuDeviceTotalMem", kInitialised, [&](Sim& sim, SimEntry&) {
    if (!is_device(sim, device)) return sim.forbid(CUDA_ERROR_INVALID_DEVICE, "no such device");
    *out = sim.options.device_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice number) {
  return call("cuDevicePrimaryCtxRetain", kInitialised, [&](Sim& sim, SimEntry&) {
    if (!is_device(sim, number)) return sim.forbid(CUDA_ERROR_INVALID_DEVICE, "no such device");
    Device& device = sim.devices[static_cast<std::size_t>(number)];
    if (device.lost != CUDA_SUCCESS) return device.lost;
    if (device.retains++ == 0) device.context = sim.give(sim.contexts, Context{.device = number});
    *out = static_cast<CUcontext>(pointer_to(device.context));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuDevicePrimaryCtxRelease(CUdevice number) {
  return call("cuDevicePrimaryCtxRelease", {.context = false, .device = false, .destroys = true}, [&](Sim& sim, SimEntry&) {
    if (!is_device(sim, number)) return sim.forbid(CUDA_ERROR_INVALID_DEVICE, "no such device");
    Device& device = sim.devices[static_cast<std::size_t>(number)];
    if (device.retains == 0) return sim.forbid(CUDA_ERROR_INVALID_CONTEXT, "it is not retained");
    if (--device.retains == 0) {
      if (const std::string users = sim.pending_on(number); !users.empty()) {
        sim.fail(cat("the last release of device ", number, " during work that nobody waited for: ", users));
      }
      sim.contexts.live.erase(device.context);
      device.context = 0;
    }
    return device.lost;
  });
}

CUresult sim_cuCtxPushCurrent(CUcontext context) {
  return call("cuCtxPushCurrent", kInitialised, [&](Sim& sim, SimEntry&) {
    if (sim.look_up(sim.contexts, context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    sim.thread().contexts.push_back(address_of(context));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuCtxPopCurrent(CUcontext* out) {
  return call("cuCtxPopCurrent", {.context = false, .device = false, .destroys = true}, [&](Sim& sim, SimEntry&) {
    std::vector<Id>& contexts = sim.thread().contexts;
    if (contexts.empty()) return sim.forbid(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
    if (out != nullptr) *out = static_cast<CUcontext>(pointer_to(contexts.back()));
    contexts.pop_back();
    return CUDA_SUCCESS;
  });
}

}  // namespace

void fill_device_functions(cuda::Driver& driver) {
  driver.cuGetErrorName = sim_cuGetErrorName;
  driver.cuGetErrorString = sim_cuGetErrorString;
  driver.cuInit = sim_cuInit;
  driver.cuDriverGetVersion = sim_cuDriverGetVersion;
  driver.cuDeviceGetCount = sim_cuDeviceGetCount;
  driver.cuDeviceGet = sim_cuDeviceGet;
  driver.cuDeviceGetName = sim_cuDeviceGetName;
  driver.cuDeviceGetAttribute = sim_cuDeviceGetAttribute;
  driver.cuDeviceTotalMem = sim_cuDeviceTotalMem;
  driver.cuDevicePrimaryCtxRetain = sim_cuDevicePrimaryCtxRetain;
  driver.cuDevicePrimaryCtxRelease = sim_cuDevicePrimaryCtxRelease;
  driver.cuCtxPushCurrent = sim_cuCtxPushCurrent;
  driver.cuCtxPopCurrent = sim_cuCtxPopCurrent;
}

}  // namespace paramwire::testing::sim
