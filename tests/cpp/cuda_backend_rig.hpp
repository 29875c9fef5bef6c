// What tests of the CUDA backend share: a small model, a simulated device with its backend, and how near results must be.
#pragma once

#include "support/rig.hpp"
#include "support/sim_cublaslt.hpp"
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_kernels.hpp"

#include "cpp/compute_oracle.hpp"
#include "paramwire/compute/cuda_backend.hpp"
#include "paramwire/compute/llama.hpp"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace paramwire::testing {

inline std::vector<float> copy(std::span<const float> values) { return {values.begin(), values.end()}; }

inline SimCudaOptions sim_options(SimOrder order, std::uint64_t seed = 1) {
  SimCudaOptions options;
  options.order = order;
  options.seed = seed;
  options.kernels = sim_host_kernels();
  return options;
}

// A device and its backend. Whatever the simulation finds wrong fails the test when it ends.
struct Gpu {
  explicit Gpu(SimCudaOptions options, bool with_blas = true) : sim(std::move(options)), blas(sim) {
    auto opened = open_cuda_backend(sim.driver(), with_blas ? blas.api() : nullptr, with_blas ? "" : "not here", 0);
    if (opened.ok()) backend = std::move(*opened);
    else error = opened.error();
  }
  SimCuda sim;
  SimBlasLt blas;
  std::shared_ptr<Backend> backend;
  std::optional<Error> error;
};

inline std::vector<std::vector<Token>> one_by_one(std::span<const Token> tokens) {
  std::vector<std::vector<Token>> out;
  for (const Token token : tokens) out.push_back({token});
  return out;
}

// float32 sums in other orders over a few layers: far above rounding, far below what a wrong element makes.
inline constexpr float kTolerance = 2e-4F;

inline float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  float most = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float difference = std::fabs(a[i] - b[i]) / std::max(1.0F, std::fabs(b[i]));
    most = std::isnan(difference) ? INFINITY : std::max(most, difference);
  }
  return most;
}

}  // namespace paramwire::testing
