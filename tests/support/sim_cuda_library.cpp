// The simulated device as a libcuda.so.1, for programs that open the driver by themselves: the Python package. Whoever loads it before (the loader goes by the
// library's own name) decides that the simulation is the driver of that process.
//
// Beside the driver's functions it exports a few of the simulation's, for ctypes; they are declared here alone.
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_kernels.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

namespace paramwire::testing {
namespace {

// Never destroyed: what the program keeps until its end would be a finding.
SimCuda* simulation = nullptr;
const cuda::Driver* driver = nullptr;

// What a driver says that has no device, until a simulation was begun.
template <typename Function, typename... Arguments>
CUresult forward(Function cuda::Driver::* function, Arguments... arguments) {
  return driver == nullptr ? CUDA_ERROR_NO_DEVICE : (driver->*function)(arguments...);
}

}  // namespace
}  // namespace paramwire::testing

using paramwire::testing::driver;
using paramwire::testing::forward;
using paramwire::testing::simulation;
using Driver = paramwire::cuda::Driver;

// clang-format off
#define SIM(name, parameters, ...) CUresult CUDAAPI name parameters { return forward(&Driver::name __VA_OPT__(,) __VA_ARGS__); }
extern "C" {
#pragma GCC visibility push(default)

SIM(cuInit, (unsigned a), a)
SIM(cuDriverGetVersion, (int* a), a)
SIM(cuGetErrorName, (CUresult a, const char** b), a, b)
SIM(cuGetErrorString, (CUresult a, const char** b), a, b)
SIM(cuDeviceGetCount, (int* a), a)
SIM(cuDeviceGet, (CUdevice* a, int b), a, b)
SIM(cuDeviceGetName, (char* a, int b, CUdevice c), a, b, c)
SIM(cuDeviceGetAttribute, (int* a, CUdevice_attribute b, CUdevice c), a, b, c)
SIM(cuDeviceTotalMem, (size_t* a, CUdevice b), a, b)
SIM(cuDevicePrimaryCtxRetain, (CUcontext* a, CUdevice b), a, b)
SIM(cuDevicePrimaryCtxRelease, (CUdevice a), a)
SIM(cuCtxPushCurrent, (CUcontext a), a)
SIM(cuCtxPopCurrent, (CUcontext* a), a)
SIM(cuMemGetInfo, (size_t* a, size_t* b), a, b)
SIM(cuMemAlloc, (CUdeviceptr* a, size_t b), a, b)
SIM(cuMemFree, (CUdeviceptr a), a)
SIM(cuMemHostAlloc, (void** a, size_t b, unsigned c), a, b, c)
SIM(cuMemFreeHost, (void* a), a)
SIM(cuPointerGetAttributes, (unsigned a, CUpointer_attribute* b, void** c, CUdeviceptr d), a, b, c, d)
SIM(cuMemcpyHtoDAsync, (CUdeviceptr a, const void* b, size_t c, CUstream d), a, b, c, d)
SIM(cuMemcpyDtoHAsync, (void* a, CUdeviceptr b, size_t c, CUstream d), a, b, c, d)
SIM(cuMemcpyDtoDAsync, (CUdeviceptr a, CUdeviceptr b, size_t c, CUstream d), a, b, c, d)
SIM(cuMemsetD8Async, (CUdeviceptr a, unsigned char b, size_t c, CUstream d), a, b, c, d)
SIM(cuStreamCreate, (CUstream* a, unsigned b), a, b)
SIM(cuStreamDestroy, (CUstream a), a)
SIM(cuStreamSynchronize, (CUstream a), a)
SIM(cuStreamQuery, (CUstream a), a)
SIM(cuStreamWaitEvent, (CUstream a, CUevent b, unsigned c), a, b, c)
SIM(cuStreamIsCapturing, (CUstream a, CUstreamCaptureStatus* b), a, b)
SIM(cuStreamBeginCapture, (CUstream a, CUstreamCaptureMode b), a, b)
SIM(cuStreamEndCapture, (CUstream a, CUgraph* b), a, b)
SIM(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode* a), a)
SIM(cuEventCreate, (CUevent* a, unsigned b), a, b)
SIM(cuEventDestroy, (CUevent a), a)
SIM(cuEventRecord, (CUevent a, CUstream b), a, b)
SIM(cuEventQuery, (CUevent a), a)
SIM(cuEventSynchronize, (CUevent a), a)
SIM(cuEventElapsedTime, (float* a, CUevent b, CUevent c), a, b, c)
SIM(cuGraphInstantiate, (CUgraphExec* a, CUgraph b, unsigned long long c), a, b, c)
SIM(cuGraphLaunch, (CUgraphExec a, CUstream b), a, b)
SIM(cuGraphExecDestroy, (CUgraphExec a), a)
SIM(cuGraphDestroy, (CUgraph a), a)
SIM(cuGraphUpload, (CUgraphExec a, CUstream b), a, b)
SIM(cuLibraryLoadData, (CUlibrary* a, const void* b, CUjit_option* c, void** d, unsigned e, CUlibraryOption* f, void** g, unsigned h), a, b, c, d, e, f, g, h)
SIM(cuLibraryUnload, (CUlibrary a), a)
SIM(cuLibraryGetKernel, (CUkernel* a, CUlibrary b, const char* c), a, b, c)
SIM(cuKernelGetFunction, (CUfunction* a, CUkernel b), a, b)
SIM(cuLaunchKernel, (CUfunction a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g, unsigned h, CUstream i, void** j, void** k), a, b, c, d, e, f, g, h, i, j, k)

// order: a SimOrder
void sim_begin(int devices, int order, unsigned long long pinned_bytes, unsigned polls_not_ready) {
  paramwire::testing::SimCudaOptions options;
  options.devices = devices;
  options.order = static_cast<paramwire::testing::SimOrder>(order);
  options.pinned_bytes = pinned_bytes;
  options.polls_not_ready = polls_not_ready;
  options.default_stream = true;
  options.kernels = paramwire::testing::sim_host_kernels();
  simulation = new paramwire::testing::SimCuda(std::move(options));
  driver = new Driver(*simulation->driver());
}
// The findings since the last call, a line each, cut where the room ends.
void sim_failures(char* out, unsigned long long room) {
  std::string text;
  for (const std::string& failure : simulation->take_failures()) text += failure + "\n";
  const std::size_t bytes = std::min<std::size_t>(text.size(), room - 1);
  std::memcpy(out, text.data(), bytes);
  out[bytes] = '\0';
}
unsigned long long sim_calls(const char* function) { return simulation->calls(function); }
void sim_fail_call(const char* function, unsigned nth, int code) { simulation->fail_call(function, nth, static_cast<CUresult>(code)); }
void sim_skip_call(const char* function, unsigned nth) { simulation->skip_call(function, nth); }
void sim_lose_device(int device) { simulation->lose_device(CUDA_ERROR_ECC_UNCORRECTABLE, device); }
void sim_run_all() { simulation->run_all(); }
// The kernel "pw_crc32c_extents" has checked so much: launches that ran.
unsigned long long sim_kernels() { return simulation->counters().kernels; }

#pragma GCC visibility pop
}
// clang-format on
