#include "paramwire/cuda/driver.hpp"

#include "paramwire/base/text.hpp"

#include <dlfcn.h>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

namespace paramwire::cuda {

namespace {

// Of cuMemAlloc the library has the one of 2007 under that name and today's as cuMemAlloc_v2: the name to look up is what <cuda.h> makes of it,
// hence two macros.
#define PARAMWIRE_CUDA_TEXT_OF(name) #name
#define PARAMWIRE_CUDA_TEXT(name) PARAMWIRE_CUDA_TEXT_OF(name)

// Empty, or the first function that is not there.
std::string look_up(void* library, Driver& out) {
  std::string missing;
  const auto find = [&](auto& member, const char* name) {
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(::dlsym(library, name));
    if (member == nullptr && missing.empty()) missing = name;
  };
#define PARAMWIRE_CUDA_FIND(name) find(out.name, PARAMWIRE_CUDA_TEXT(name));
  PARAMWIRE_CUDA_DRIVER_FUNCTIONS(PARAMWIRE_CUDA_FIND)
#undef PARAMWIRE_CUDA_FIND
  return missing;
}

Result<std::shared_ptr<const Driver>> load(const char* name) {
  void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* words = ::dlerror();
    return Error(Code::kUnavailable, cat(words != nullptr ? std::string(words) : cat("dlopen ", name, " failed"),
                                         ": install the NVIDIA driver (580 or newer), or start the container with --gpus all"));
  }
  auto driver = std::make_shared<Driver>();
  if (const std::string missing = look_up(library, *driver); !missing.empty()) {
    return Error(Code::kUnavailable, cat(name, " has no function ", missing, ": install NVIDIA driver 580 (CUDA 13.0) or newer"));
  }
  return std::shared_ptr<const Driver>(std::move(driver));
}

struct Meaning {
  Code code;
  std::string_view next;  // what to do
};

constexpr Meaning kLost{Code::kUnavailable, "the device is lost to this process; start a new one, and see the kernel's log (dmesg) for Xid lines"};
constexpr Meaning kOld{Code::kUnavailable, "install NVIDIA driver 580 (CUDA 13.0) or newer"};
constexpr Meaning kCapturing{Code::kInvalid, "a stream is being captured; end the capture, or give a stream that is not part of one"};

// What the manual's section "Data types used by CUDA driver" (CUresult) says of each code, as a caller's remedy.
Meaning meaning_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return {Code::kBackpressure, "lower the budget of device memory, or end what else uses this device (nvidia-smi)"};
    case CUDA_ERROR_NO_DEVICE:
      return {Code::kUnavailable, "no device that this process may use; see nvidia-smi -L and CUDA_VISIBLE_DEVICES, or compute with backend \"cpu\""};
    case CUDA_ERROR_INVALID_DEVICE:
      return {Code::kUnavailable, "no device of that number; nvidia-smi -L lists them, CUDA_VISIBLE_DEVICES hides and renumbers them"};
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return {Code::kUnavailable, "another process holds the device alone; end it, or nvidia-smi --compute-mode=DEFAULT"};
    case CUDA_ERROR_NOT_INITIALIZED:
      return {Code::kUnavailable, "CUDA does not survive a fork; start this process anew (multiprocessing: \"spawn\")"};
    case CUDA_ERROR_DEINITIALIZED:
      return {Code::kUnavailable, "the process is ending; close what uses the device before"};
    case CUDA_ERROR_STUB_LIBRARY:
      return {Code::kUnavailable, "the toolkit's stub was opened as libcuda.so.1; take its folder out of LD_LIBRARY_PATH"};
    case CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
      return kOld;
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      return {Code::kUnavailable, "the kernels need a device of compute capability 8.0 or newer; compute with backend \"cpu\""};
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
      return {Code::kUnavailable, "the kernels are compiled for this device when they are loaded; unset CUDA_DISABLE_PTX_JIT, and install the driver's JIT library"};
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return {Code::kUnavailable, "the system is not ready; start its services (nvidia-fabricmanager, nvidia-persistenced)"};
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      return {Code::kUnavailable, "libcuda and the kernel module are of different drivers; reboot, or restart the container"};
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
      return {Code::kUnavailable, "the device has no valid licence; ask who runs its licence server"};
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
    case CUDA_ERROR_MPS_MAX_CLIENTS_REACHED:
    case CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
      return {Code::kUnavailable, "see the log of the MPS control daemon, or end it"};
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_UNKNOWN:
      return kLost;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_MERGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
      return kCapturing;
    default:
      return {Code::kInternal, "report this as a bug"};
  }
}

}  // namespace

Result<std::shared_ptr<const Driver>> open_driver(const char* library) {
  // Of the process, not of a caller: the library stays anyway, and there is one of it.
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Driver>> opened;
  const std::scoped_lock lock(mutex);
  if (const auto known = opened.find(library); known != opened.end()) return known->second;
  PARAMWIRE_TRY(driver, load(library));
  opened.emplace(library, driver);
  return driver;
}

Error driver_error(const Driver& driver, CUresult result, std::string_view doing) {
  const Meaning meaning = meaning_of(result);
  const char* name = nullptr;
  const char* words = nullptr;
  // Both leave nullptr for a code that is newer than the driver.
  static_cast<void>(driver.cuGetErrorName(result, &name));
  static_cast<void>(driver.cuGetErrorString(result, &words));
  return Error(meaning.code, cat(doing, ": ", name != nullptr ? name : "CUDA error", " (", static_cast<int>(result), words != nullptr ? ", " : "",
                                 words != nullptr ? words : "", "): ", meaning.next));
}

}  // namespace paramwire::cuda
