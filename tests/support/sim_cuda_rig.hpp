// For tests on the simulated device: a current context, two streams, shorthand for calls, and a clean-up that leaves nothing.
#pragma once

#include "support/sim_cuda.hpp"

#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::testing {

struct AddArgs {  // of kernel "add": each of `count` bytes at `target` grows by `value`
  CUdeviceptr target = 0;
  std::uint64_t count = 0;
  std::uint64_t value = 0;
};

inline std::map<std::string, SimKernel, std::less<>> sim_test_kernels() {
  const auto add = [](const SimLaunch&, const void* arguments) {
    AddArgs args;
    std::memcpy(&args, arguments, sizeof args);
    auto* at = reinterpret_cast<unsigned char*>(args.target);
    for (std::uint64_t i = 0; i < args.count; ++i) at[i] = static_cast<unsigned char>(at[i] + args.value);
    return std::string();
  };
  return {{"add", {sizeof(AddArgs), add}}};
}

struct SimRig {
  explicit SimRig(SimCudaOptions options = {}) : sim(with_kernels(std::move(options))), driver(sim.driver()), cu(*driver) {
    EXPECT_EQ(cu.cuInit(0), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuCtxPushCurrent(context), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  }
  // What the test made it frees itself, or through keep().
  ~SimRig() {
    cu.cuStreamSynchronize(a);
    cu.cuStreamSynchronize(b);
    for (CUdeviceptr at : device) cu.cuMemFree(at);
    for (void* at : host) cu.cuMemFreeHost(at);
    for (CUevent event : events) cu.cuEventDestroy(event);
    if (library != nullptr) cu.cuLibraryUnload(library);
    cu.cuStreamDestroy(a);
    cu.cuStreamDestroy(b);
    cu.cuCtxPopCurrent(nullptr);
    cu.cuDevicePrimaryCtxRelease(0);
  }
  SimRig(const SimRig&) = delete;
  SimRig& operator=(const SimRig&) = delete;

  CUdeviceptr alloc(std::size_t bytes) {
    CUdeviceptr out = 0;
    EXPECT_EQ(cu.cuMemAlloc(&out, bytes), CUDA_SUCCESS);
    device.push_back(out);
    return out;
  }
  unsigned char* pin(std::size_t bytes) {
    void* out = nullptr;
    EXPECT_EQ(cu.cuMemHostAlloc(&out, bytes, 0), CUDA_SUCCESS);
    host.push_back(out);
    return static_cast<unsigned char*>(out);
  }
  CUevent event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
    CUevent out = nullptr;
    EXPECT_EQ(cu.cuEventCreate(&out, flags), CUDA_SUCCESS);
    events.push_back(out);
    return out;
  }
  CUfunction kernel(const char* name = "add") {
    static const char code[] = "code";
    if (library == nullptr) {
      EXPECT_EQ(cu.cuLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
    }
    CUkernel out = nullptr;
    EXPECT_EQ(cu.cuLibraryGetKernel(&out, library, name), CUDA_SUCCESS);
    return reinterpret_cast<CUfunction>(out);
  }
  CUresult add(CUstream stream, CUdeviceptr target, std::uint64_t count, std::uint64_t value) {
    AddArgs args{target, count, value};
    void* parameters[] = {&args};
    return cu.cuLaunchKernel(kernel(), 1, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr);
  }
  CUresult fill(CUstream stream, CUdeviceptr target, unsigned char value, std::size_t bytes) { return cu.cuMemsetD8Async(target, value, bytes, stream); }
  int byte_at(CUdeviceptr at) const {
    const auto bytes = sim.peek(at, 1);
    return bytes.empty() ? -1 : std::to_integer<int>(bytes[0]);
  }
  // Exactly one failure, which contains `text`.
  void expect_failure(const std::string& text) {
    const auto failures = sim.take_failures();
    ASSERT_EQ(failures.size(), 1U) << text << "\n" << ::testing::PrintToString(failures);
    EXPECT_NE(failures[0].find(text), std::string::npos) << failures[0] << "\nwanted: " << text;
  }
  void expect_no_failure() { EXPECT_EQ(sim.take_failures(), std::vector<std::string>{}); }

  SimCuda sim;
  std::shared_ptr<const cuda::Driver> driver;
  const cuda::Driver& cu;
  CUcontext context = nullptr;
  CUstream a = nullptr, b = nullptr;
  CUlibrary library = nullptr;
  std::vector<CUdeviceptr> device;
  std::vector<void*> host;
  std::vector<CUevent> events;

 private:
  static SimCudaOptions with_kernels(SimCudaOptions options) {
    options.kernels.merge(sim_test_kernels());
    return options;
  }
};

}  // namespace paramwire::testing
