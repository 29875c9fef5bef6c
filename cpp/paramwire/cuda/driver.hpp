// The CUDA driver (libcuda) as a table of functions: the real one is opened at run time, so that one build runs with and without it; tests
// bring a simulated device. The only header that includes <cuda.h>.
//
// paramwire calls the driver and nothing else: kernels come as a fatbin inside the library (module.hpp), so no CUDA runtime is linked that
// could differ from the one of a framework in the same process, and every call that the backend makes is in this table.
//
// Names, arguments and returns are those of the CUDA Driver API manual. <cuda.h> renames functions to their newest versions
// (cuMemAlloc is cuMemAlloc_v2); the members below are renamed with them, and so is every call `driver.cuMemAlloc(...)`.
//
// threads: as libcuda: any, with the device's context current (device.hpp).
#pragma once

#include "paramwire/base/error.hpp"

#include <cuda.h>

#include <memory>
#include <string>
#include <string_view>

// clang-format off
#define PARAMWIRE_CUDA_DRIVER_FUNCTIONS(X)                                                                              \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString)                                                 \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceTotalMem)                     \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxPushCurrent) X(cuCtxPopCurrent)                       \
  X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuPointerGetAttributes)               \
  X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemsetD8Async)                                     \
  X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery) X(cuStreamWaitEvent)                     \
  X(cuStreamIsCapturing) X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuThreadExchangeStreamCaptureMode)             \
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime)       \
  X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy) X(cuGraphUpload)                       \
  X(cuLibraryLoadData) X(cuLibraryUnload) X(cuLibraryGetKernel) X(cuKernelGetFunction) X(cuLaunchKernel)
// clang-format on

namespace paramwire::cuda {

// The oldest driver that loads these kernels: CUDA 13.0, as cuDriverGetVersion counts.
inline constexpr int kDriverVersionMin = 13000;

struct Driver {
#define PARAMWIRE_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  PARAMWIRE_CUDA_DRIVER_FUNCTIONS(PARAMWIRE_CUDA_MEMBER)
#undef PARAMWIRE_CUDA_MEMBER
};

// The system's library. It stays in the process once it is opened (it leaves threads and atfork handlers behind); every call gives the same
// table. Nothing is initialised: cuInit is Device::open's.
//
// library: for tests
// errors:  kUnavailable with the loader's words, or naming the function that the library lacks, and what to install
// threads: any
Result<std::shared_ptr<const Driver>> open_driver(const char* library = "libcuda.so.1");

// What a driver call that failed means to the caller. `doing`: "allocating 64 MiB on cuda:0".
// kBackpressure: out of memory. kUnavailable: no device, no driver, an old one, or the device is lost, which only a new process mends.
// kInvalid: a stream of the caller that is being captured. kInternal: anything else.
Error driver_error(const Driver& driver, CUresult result, std::string_view doing);

}  // namespace paramwire::cuda
