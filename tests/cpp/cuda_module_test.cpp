// The embedded fatbin, and kernels loaded from it and launched through the driver's table: on the simulated device, which runs their bodies.
#include "paramwire/cuda/module.hpp"

#include "support/host_kernels.hpp"
#include "support/sim_cuda.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace paramwire::testing {
namespace {

using cuda::Kernel;

SimCudaOptions options_of(const std::shared_ptr<LaneExecutor>& executor) {
  SimCudaOptions options;
  for (const HostKernelEntry& kernel : host_kernels()) {
    const auto body = [executor, body = kernel.body](const SimLaunch& launch, const void* args) {
      return executor->run(launch.kernel, {.blocks = {launch.grid[0], launch.grid[1], launch.grid[2]}, .threads = launch.block[0], .shared_bytes = launch.shared_bytes},
                           body, args);
    };
    options.kernels.emplace(std::string(kernel.symbol), SimKernel{.argument_bytes = kernel.args_bytes, .body = body, .threads_max = kernel.threads_max});
  }
  return options;
}

class CudaModule : public ::testing::Test {
 protected:
  std::shared_ptr<LaneExecutor> executor_ = std::make_shared<LaneExecutor>();
  SimCuda sim_{options_of(executor_)};
};

TEST_F(CudaModule, ImageIsAFatbinWithEveryKernel) {
  const auto image = cuda::kernel_image();
  ASSERT_GT(image.size(), 1000U);
  std::uint32_t magic = 0;
  std::memcpy(&magic, image.data(), sizeof magic);
  EXPECT_EQ(magic, 0xba55ed50U);  // fatbinary.h, FATBIN_MAGIC
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(image.data()) % 16, 0U);
}

TEST_F(CudaModule, FactsAreThoseOfTheHostsTable) {
  const auto host = host_kernels();
  ASSERT_EQ(host.size(), cuda::kKernels);
  for (std::size_t i = 0; i < host.size(); ++i) {
    const cuda::KernelFacts& facts = cuda::kernel_facts(static_cast<Kernel>(i));
    EXPECT_EQ(facts.name, host[i].name);
    EXPECT_EQ(facts.symbol, host[i].symbol);
    EXPECT_EQ(facts.args_bytes, host[i].args_bytes);
    EXPECT_EQ(facts.threads_max, host[i].threads_max);
  }
  EXPECT_EQ(cuda::kernel_name(Kernel::k_gemv_bf16), "gemv_bf16");
}

TEST_F(CudaModule, KernelsAreLoadedAtOnceAndRunInStreamOrder) {
  auto device = cuda::Device::open(sim_.driver(), 0);
  ASSERT_TRUE(device.ok()) << device.error().to_string();
  auto module = cuda::Module::load(*device);
  ASSERT_TRUE(module.ok()) << module.error().to_string();
  EXPECT_EQ(sim_.calls("cuKernelGetFunction"), cuda::kKernels) << "a first launch inside a capture must load nothing";
  const cuda::Current current(**device);
  auto stream = cuda::Stream::create(*device);
  ASSERT_TRUE(stream.ok());
  const std::uint64_t count = 1000;
  auto memory = cuda::DeviceMemory::allocate(*device, 4 * count, "the test's numbers");
  ASSERT_TRUE(memory.ok());
  std::vector<float> numbers(count, 1.5F), back(count);
  ASSERT_TRUE(stream->to_device(memory->address(), std::as_bytes(std::span(numbers))).ok());
  const cuda::PairArgs args{.left = memory->at<float>(), .right = memory->at<float>(), .out = memory->at<float>(), .out16 = nullptr, .half = cuda::Half::kNone, .count = count};
  for (int i = 0; i < 3; ++i) {
    const Status status = (*module)->launch(*stream, Kernel::k_add, cuda::pair_launch(args), args);
    ASSERT_TRUE(status.ok()) << status.error().to_string();
  }
  ASSERT_TRUE(stream->to_host(std::as_writable_bytes(std::span(back)), memory->address()).ok());
  ASSERT_TRUE(stream->synchronize().ok());
  for (const float value : back) ASSERT_EQ(value, 12.0F);
}

TEST_F(CudaModule, WrongArgumentsAndGeometryAreNamedAndNeverReachTheDriver) {
  auto device = cuda::Device::open(sim_.driver(), 0);
  ASSERT_TRUE(device.ok());
  auto module = cuda::Module::load(*device);
  ASSERT_TRUE(module.ok());
  const cuda::Current current(**device);
  auto stream = cuda::Stream::create(*device);
  ASSERT_TRUE(stream.ok());
  const cuda::PairArgs args{};
  const auto code_of = [&](Kernel kernel, const cuda::Launch& launch) {
    const Status status = (*module)->launch(*stream, kernel, launch, args);
    EXPECT_FALSE(status.ok());
    if (status.ok()) return std::string();
    EXPECT_EQ(status.error().code(), Code::kInternal);
    return status.error().message();
  };
  static_assert(sizeof(cuda::PairArgs) != sizeof(cuda::AttentionArgs));
  EXPECT_NE(code_of(Kernel::k_attention_tile, {}).find("bytes of arguments and was given"), std::string::npos);
  EXPECT_NE(code_of(Kernel::k_add, {.blocks = {1, 1, 1}, .threads = 512, .shared_bytes = 0}).find("kernel add in blocks of 512 threads"), std::string::npos);
  EXPECT_NE(code_of(Kernel::k_add, {.blocks = {1, 1, 1}, .threads = 40, .shared_bytes = 0}).find("whole warps"), std::string::npos);
  EXPECT_EQ(sim_.calls("cuLaunchKernel"), 0U);
}

TEST_F(CudaModule, EachCallOfLoadingThatFailsIsNamedAndNothingIsLeft) {
  auto device = cuda::Device::open(sim_.driver(), 0);
  ASSERT_TRUE(device.ok());
  const struct {
    const char* function;
    CUresult result;
    Code code;
    const char* says;
  } cases[] = {{"cuLibraryLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU, Code::kUnavailable, "loading the kernels on cuda:0"},
               {"cuLibraryGetKernel", CUDA_ERROR_NOT_FOUND, Code::kInternal, "looking for kernel embedding_f32"},
               {"cuKernelGetFunction", CUDA_ERROR_OUT_OF_MEMORY, Code::kBackpressure, "loading kernel embedding_f32 on cuda:0"}};
  for (const auto& it : cases) {
    sim_.fail_call(it.function, 1, it.result);
    const auto module = cuda::Module::load(*device);
    ASSERT_FALSE(module.ok()) << it.function;
    EXPECT_EQ(module.error().code(), it.code) << module.error().to_string();
    EXPECT_NE(module.error().message().find(it.says), std::string::npos) << module.error().to_string();
    EXPECT_EQ(sim_.counters().libraries, 0U);
  }
}

}  // namespace
}  // namespace paramwire::testing
