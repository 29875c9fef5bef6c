// How libcuda is found and opened, and what its errors become.
#include "paramwire/cuda/driver.hpp"

#include <gtest/gtest.h>
#include <string>

namespace paramwire::cuda {
namespace {

Error refused(const char* library) {
  auto opened = open_driver(library);
  EXPECT_FALSE(opened.ok()) << library;
  return opened.ok() ? Error(Code::kInternal, "") : std::move(opened).error();
}

TEST(CudaDriver, LibraryThatIsNotThereGivesTheLoadersWordsAndTheNextStep) {
  const Error error = refused("libnot-there.so.1");
  EXPECT_EQ(error.code(), Code::kUnavailable);
  EXPECT_EQ(error.message(),
            "libnot-there.so.1: cannot open shared object file: No such file or directory: install the NVIDIA driver (580 or newer), or start the "
            "container with --gpus all");
}

TEST(CudaDriver, LibraryWithoutAFunctionIsRefusedNamingIt) {
  const Error error = refused(PARAMWIRE_CUDA_STUB_WITHOUT_GRAPH_UPLOAD);
  EXPECT_EQ(error.code(), Code::kUnavailable);
  EXPECT_EQ(error.message(),
            std::string(PARAMWIRE_CUDA_STUB_WITHOUT_GRAPH_UPLOAD) + " has no function cuGraphUpload: install NVIDIA driver 580 (CUDA 13.0) or newer");
}

// The stub exports cuMemAlloc_v2 and not cuMemAlloc, which takes 32-bit addresses: looking up the old names fails here.
TEST(CudaDriver, WholeLibraryGivesOneTableForTheProcess) {
  const auto first = open_driver(PARAMWIRE_CUDA_STUB);
  ASSERT_TRUE(first.ok()) << first.error().message();
  EXPECT_EQ((*first)->cuInit(0), CUDA_ERROR_STUB_LIBRARY);
  CUdeviceptr at = 0;
  EXPECT_EQ((*first)->cuMemAlloc(&at, 1), CUDA_ERROR_STUB_LIBRARY);
  const auto second = open_driver(PARAMWIRE_CUDA_STUB);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->get(), second->get());
}

TEST(CudaDriver, MachinesOwnLibraryOpensOrSaysWhyNot) {
  const auto opened = open_driver();
  if (!opened.ok()) {
    EXPECT_EQ(opened.error().code(), Code::kUnavailable);
    EXPECT_NE(opened.error().message().find("libcuda.so.1"), std::string::npos) << opened.error().message();
    GTEST_SKIP() << "no CUDA driver here: " << opened.error().message();
  }
  int version = 0;
  EXPECT_EQ((*opened)->cuDriverGetVersion(&version), CUDA_SUCCESS);
  EXPECT_GT(version, 0);
}

// Names as the driver has them, but for one that it does not know.
Driver names() {
  Driver out;
  out.cuGetErrorName = [](CUresult result, const char** text) {
    *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  out.cuGetErrorString = [](CUresult result, const char** text) {
    *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : nullptr;
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  return out;
}

TEST(CudaDriver, ErrorSaysWhatWasDoneTheDriversNameAndTheNextStep) {
  const Error error = driver_error(names(), CUDA_ERROR_OUT_OF_MEMORY, "allocating 64 MiB on cuda:0");
  EXPECT_EQ(error.message(),
            "allocating 64 MiB on cuda:0: CUDA_ERROR_OUT_OF_MEMORY (2, out of memory): lower the budget of device memory, or end what else uses this "
            "device (nvidia-smi)");
  EXPECT_EQ(driver_error(names(), CUDA_ERROR_INVALID_PTX, "loading the kernels").message(),
            "loading the kernels: CUDA error (218): report this as a bug");
}

TEST(CudaDriver, ErrorCodesSayWhatTheCallerCanDo) {
  struct Case {
    CUresult result;
    Code code;
    const char* next;
  };
  const Case cases[] = {
      {CUDA_ERROR_OUT_OF_MEMORY, Code::kBackpressure, "budget of device memory"},
      {CUDA_ERROR_NO_DEVICE, Code::kUnavailable, "nvidia-smi -L and CUDA_VISIBLE_DEVICES"},
      {CUDA_ERROR_INVALID_DEVICE, Code::kUnavailable, "no device of that number"},
      {CUDA_ERROR_DEVICE_UNAVAILABLE, Code::kUnavailable, "compute-mode"},
      {CUDA_ERROR_NOT_INITIALIZED, Code::kUnavailable, "fork"},
      {CUDA_ERROR_DEINITIALIZED, Code::kUnavailable, "ending"},
      {CUDA_ERROR_STUB_LIBRARY, Code::kUnavailable, "LD_LIBRARY_PATH"},
      {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, Code::kUnavailable, "driver 580"},
      {CUDA_ERROR_NO_BINARY_FOR_GPU, Code::kUnavailable, "8.0"},
      {CUDA_ERROR_JIT_COMPILATION_DISABLED, Code::kUnavailable, "CUDA_DISABLE_PTX_JIT"},
      {CUDA_ERROR_SYSTEM_NOT_READY, Code::kUnavailable, "fabricmanager"},
      {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, Code::kUnavailable, "reboot"},
      {CUDA_ERROR_MPS_CONNECTION_FAILED, Code::kUnavailable, "MPS"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, Code::kUnavailable, "start a new one"},
      {CUDA_ERROR_LAUNCH_FAILED, Code::kUnavailable, "start a new one"},
      {CUDA_ERROR_ECC_UNCORRECTABLE, Code::kUnavailable, "start a new one"},
      {CUDA_ERROR_UNKNOWN, Code::kUnavailable, "start a new one"},
      {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Code::kInvalid, "end the capture"},
      {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, Code::kInvalid, "end the capture"},
      {CUDA_ERROR_CAPTURED_EVENT, Code::kInvalid, "end the capture"},
      {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, Code::kInvalid, "end the capture"},
      {CUDA_ERROR_INVALID_VALUE, Code::kInternal, "bug"},
      {CUDA_ERROR_INVALID_HANDLE, Code::kInternal, "bug"},
      {CUDA_ERROR_NOT_FOUND, Code::kInternal, "bug"},
  };
  for (const Case& one : cases) {
    const Error error = driver_error(names(), one.result, "doing");
    EXPECT_EQ(error.code(), one.code) << static_cast<int>(one.result);
    EXPECT_NE(error.message().find(one.next), std::string::npos) << error.message();
  }
}

}  // namespace
}  // namespace paramwire::cuda
