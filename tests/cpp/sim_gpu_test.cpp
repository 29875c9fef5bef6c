// paramwire's kernels and cuBLASLt on the simulated device, through the classes that the backend uses.
#include "support/sim_cublaslt.hpp"
#include "support/sim_cuda_kernels.hpp"
#include "support/sim_cuda_rig.hpp"

#include "paramwire/cuda/kernels/numbers.hpp"
#include "paramwire/cuda/module.hpp"

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>

namespace paramwire::testing {
namespace {

// The library's own device, stream and products on a simulation, with memory to work on.
struct GpuRig {
  GpuRig() : sim({.device_bytes = 64U << 20, .kernels = sim_host_kernels()}), lt(sim) {
    auto opened = cuda::Device::open(sim.driver(), 0);
    EXPECT_TRUE(opened.ok()) << opened.error().message();
    device = *opened;
    current.emplace(*device);
    stream.emplace(cuda::Stream::create(device).value());
    auto made = cuda::BlasLt::create(device, lt.api());
    EXPECT_TRUE(made.ok()) << made.error().message();
    products = std::move(*made);
  }
  cuda::DeviceMemory upload(const void* begin, std::size_t bytes) {
    auto out = cuda::DeviceMemory::allocate(device, bytes, "a test's values").value();
    EXPECT_TRUE(stream->to_device(out.address(), std::as_bytes(std::span(static_cast<const char*>(begin), bytes))).ok());
    return out;
  }
  cuda::DeviceMemory upload(const std::vector<float>& values) { return upload(values.data(), values.size() * sizeof(float)); }
  std::vector<float> floats(CUdeviceptr at, std::size_t count) {
    std::vector<float> out(count);
    EXPECT_TRUE(stream->synchronize().ok());
    const auto bytes = sim.peek(at, count * sizeof(float));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }

  SimCuda sim;
  SimBlasLt lt;
  cuda::DevicePtr device;
  std::optional<cuda::Current> current;
  std::optional<cuda::Stream> stream;
  std::unique_ptr<cuda::BlasLt> products;
};

// Small integers, which every type holds and every order of adding sums exactly.
std::vector<float> integers(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> out(count);
  for (float& value : out) value = static_cast<float>(static_cast<int>(random() % 17) - 8);
  return out;
}

std::vector<std::uint16_t> halves(const std::vector<float>& values, cuda::Half half) {
  std::vector<std::uint16_t> out;
  for (const float value : values) out.push_back(static_cast<std::uint16_t>(cuda::narrow(half, cuda::bits_of(value))));
  return out;
}

cuda::DeviceMemory upload_as(GpuRig& rig, DType dtype, const std::vector<float>& values) {
  if (dtype == DType::kF32) return rig.upload(values);
  const auto narrow = halves(values, dtype == DType::kBF16 ? cuda::Half::kBF16 : cuda::Half::kF16);
  return rig.upload(narrow.data(), narrow.size() * sizeof(std::uint16_t));
}

TEST(SimGpu, ProductsOfEveryTypeAreTheSumsAndAddToWhatIsThere) {
  constexpr std::uint64_t kRows = 13, kColumns = 40, kTokens = 5, kStride = 16;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    GpuRig rig;
    const auto w = integers(kRows * kColumns, 1), x = integers(kTokens * kColumns, 2);
    const auto weight = upload_as(rig, dtype, w), inputs = upload_as(rig, dtype, x);
    // NaN where nothing is to be read: beta is 0.
    const auto y = rig.upload(std::vector<float>(kTokens * kStride, std::numeric_limits<float>::quiet_NaN()));
    cuda::Product product{dtype, weight.at<void>(), inputs.at<void>(), y.at<float>(), kTokens, kRows, kColumns, kStride, false};
    for (int times = 1; times <= 2; ++times, product.accumulate = true) {
      const Status multiplied = rig.products->multiply(product, *rig.stream);
      ASSERT_TRUE(multiplied.ok()) << multiplied.error().message();
      const auto got = rig.floats(y.address(), kTokens * kStride);
      for (std::uint64_t t = 0; t < kTokens; ++t) {
        for (std::uint64_t r = 0; r < kStride; ++r) {
          const float have = got[t * kStride + r];
          if (r >= kRows) {
            EXPECT_TRUE(std::isnan(have)) << "between rows";
            continue;
          }
          float want = 0;
          for (std::uint64_t c = 0; c < kColumns; ++c) want += w[r * kColumns + c] * x[t * kColumns + c];
          EXPECT_EQ(have, want * static_cast<float>(times)) << t << ' ' << r;
        }
      }
    }
    EXPECT_EQ(rig.lt.products(), 2U);
  }
}

TEST(SimGpu, CapturedProductIsReplayedOnNewValues) {
  GpuRig rig;
  const auto weight = rig.upload(std::vector<float>{1, 2, 3, 4}), y = rig.upload(std::vector<float>{0, 0});
  const auto x = rig.upload(std::vector<float>{1, 1});
  const cuda::Product product{DType::kF32, weight.at<void>(), x.at<void>(), y.at<float>(), 1, 2, 2, 2, false};
  auto graph = rig.stream->capture([&] { return rig.products->multiply(product, *rig.stream); });
  ASSERT_TRUE(graph.ok()) << graph.error().message();
  ASSERT_TRUE(rig.stream->launch(*graph).ok());
  EXPECT_EQ(rig.floats(y.address(), 2), (std::vector<float>{3, 7}));
  const std::vector<float> next{2, 0};
  ASSERT_TRUE(rig.stream->to_device(x.address(), std::as_bytes(std::span(next))).ok());
  ASSERT_TRUE(rig.stream->launch(*graph).ok());
  EXPECT_EQ(rig.floats(y.address(), 2), (std::vector<float>{2, 6}));
}

TEST(SimGpu, KernelsOfTheLibraryRunThroughModuleAndStream) {
  GpuRig rig;
  auto module = cuda::Module::load(rig.device);
  ASSERT_TRUE(module.ok()) << module.error().message();
  const auto left = integers(1000, 3), right = integers(1000, 4);
  const auto a = rig.upload(left), b = rig.upload(right);
  cuda::PairArgs args{};
  args.left = a.at<float>();
  args.right = b.at<float>();
  args.out = a.at<float>();
  args.count = left.size();
  const Status launched = (*module)->launch(*rig.stream, cuda::Kernel::k_add, cuda::pair_launch(args), args);
  ASSERT_TRUE(launched.ok()) << launched.error().message();
  const auto got = rig.floats(a.address(), left.size());
  for (std::size_t i = 0; i < left.size(); ++i) ASSERT_EQ(got[i], left[i] + right[i]) << i;
  EXPECT_EQ(rig.sim.ran().back(), "pw_add");
}

TEST(SimGpu, BlasLtThatRefusesIsAnErrorWithItsStatus) {
  GpuRig rig;
  const auto memory = rig.upload(std::vector<float>(16, 1));
  const cuda::Product product{DType::kF32, memory.at<void>(), memory.at<void>(16), memory.at<float>(32), 1, 2, 2, 2, false};
  for (const char* function : {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"}) {
    rig.lt.fail_call(function, 1, 15);
    const Status refused = rig.products->multiply(product, *rig.stream);
    ASSERT_FALSE(refused.ok()) << function;
    EXPECT_NE(refused.error().message().find("status 15"), std::string::npos) << refused.error().message();
  }
  EXPECT_TRUE(rig.products->multiply(product, *rig.stream).ok());
  ASSERT_TRUE(rig.stream->synchronize().ok());
}

// ---------------------------------------------------------------- what a wrong caller gets

struct LtRig {
  LtRig() : lt(rig.sim), api(lt.api()) {
    EXPECT_EQ(api->cublasLtCreate(&handle), 0);
    EXPECT_EQ(api->cublasLtMatmulDescCreate(&operation, cuda::lt::kCompute32F, cuda::lt::kF32), 0);
    EXPECT_EQ(api->cublasLtMatrixLayoutCreate(&layout, cuda::lt::kF32, 4, 4, 4), 0);
    EXPECT_EQ(api->cublasLtMatmulPreferenceCreate(&preference), 0);
    const std::uint64_t workspace = 4096;
    EXPECT_EQ(api->cublasLtMatmulPreferenceSetAttribute(preference, cuda::lt::kPreferWorkspaceBytes, &workspace, sizeof workspace), 0);
    int found = 0;
    EXPECT_EQ(api->cublasLtMatmulAlgoGetHeuristic(handle, operation, layout, layout, layout, layout, preference, 1, &chosen, &found), 0);
    EXPECT_EQ(found, 1);
    memory = rig.alloc(8192);
  }
  ~LtRig() {
    api->cublasLtMatmulPreferenceDestroy(preference);
    api->cublasLtMatrixLayoutDestroy(layout);
    api->cublasLtMatmulDescDestroy(operation);
    api->cublasLtDestroy(handle);
  }
  cuda::lt::Status multiply(CUdeviceptr a, std::size_t workspace_bytes) {
    const float one = 1, zero = 0;
    const auto at = [](CUdeviceptr address) { return reinterpret_cast<void*>(address); };
    return api->cublasLtMatmul(handle, operation, &one, at(a), layout, at(memory + 256), layout, &zero, at(memory + 512), layout, at(memory + 512), layout,
                               &chosen.algorithm, at(memory + 4096), workspace_bytes, rig.a);
  }

  SimRig rig;
  SimBlasLt lt;
  std::shared_ptr<const cuda::BlasLtApi> api;
  cuda::lt::Handle handle = nullptr;
  cuda::lt::Object operation = nullptr, layout = nullptr, preference = nullptr;
  cuda::lt::Heuristic chosen{};
  CUdeviceptr memory = 0;
};

TEST(SimBlasLt, SmallWorkspaceAndBrokenAlignmentAreFound) {
  LtRig lt;
  EXPECT_EQ(lt.multiply(lt.memory, 4096), 0);
  EXPECT_NE(lt.multiply(lt.memory, 4095), 0);
  lt.rig.expect_failure("cublasLtMatmul: a workspace of 4095 B for an algorithm of 4096 B");
  EXPECT_NE(lt.multiply(lt.memory + 128, 4096), 0);
  lt.rig.expect_failure("matrix A is not aligned to the 256 B that its algorithm was chosen for");
  EXPECT_EQ(lt.rig.cu.cuStreamSynchronize(lt.rig.a), CUDA_SUCCESS);
  EXPECT_EQ(lt.rig.byte_at(lt.memory + 4096), 0xCB) << "the workspace is the product's";
}

TEST(SimBlasLt, MatrixOutsideOfItsMemoryIsFoundWhenTheProductRuns) {
  LtRig lt;
  EXPECT_EQ(lt.multiply(lt.memory + 8192, 4096), 0) << "the call does not know";
  EXPECT_EQ(lt.rig.cu.cuStreamSynchronize(lt.rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  lt.rig.expect_failure("matmul: 64 B at ");
}

TEST(SimBlasLt, LayoutsThatDoNotFitAndObjectsThatAreGoneAreFound) {
  LtRig lt;
  cuda::lt::Object other = nullptr;
  ASSERT_EQ(lt.api->cublasLtMatrixLayoutCreate(&other, cuda::lt::kF32, 5, 4, 5), 0);
  cuda::lt::Heuristic chosen{};
  int found = 1;
  EXPECT_NE(lt.api->cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.operation, lt.layout, other, lt.layout, lt.layout, lt.preference, 1, &chosen, &found), 0);
  EXPECT_EQ(found, 0);
  lt.rig.expect_failure("A has 4 and B 5 along the inner axis");
  ASSERT_EQ(lt.api->cublasLtMatrixLayoutDestroy(other), 0);
  EXPECT_NE(lt.api->cublasLtMatrixLayoutDestroy(other), 0);
  lt.rig.expect_failure("cublasLtMatrixLayoutDestroy: object 5 was destroyed");
  EXPECT_NE(lt.api->cublasLtDestroy(lt.layout), 0);
  lt.rig.expect_failure("cublasLtDestroy: object 3 is no object to destroy");
}

TEST(SimBlasLt, WhatIsLeftIsNamed) {
  SimRig rig;
  {
    SimBlasLt lt(rig.sim);
    cuda::lt::Handle handle = nullptr;
    ASSERT_EQ(lt.api()->cublasLtCreate(&handle), 0);
  }
  rig.expect_failure("cublasLtCreate: object 1 is left");
}

}  // namespace
}  // namespace paramwire::testing
