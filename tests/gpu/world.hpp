// What the programs for a GPU run on: a machine's own driver, or the simulated device. The same sources are linked with world_real.cpp and with
// world_sim.cpp, so that what runs the hour a GPU is there has run before.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/cuda/blaslt.hpp"
#include "paramwire/cuda/driver.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace paramwire::gpu {

// Sizes. Odd on purpose, so that every kernel has a tail.
struct Scale {
  std::uint32_t width;      // of rows: norms, embeddings, soft-max
  std::uint32_t rows;       // of matrices
  std::uint32_t context;    // positions of attention
  std::uint64_t elements;   // of element-wise kernels
  std::uint64_t payload;    // bytes of what is checked and decoded
};

// Of simulations, which take about a microsecond for what a lane does in a nanosecond, and of what Python checks.
inline constexpr Scale kSmallScale{.width = 71, .rows = 37, .context = 70, .elements = 5003, .payload = 200'001};
inline constexpr Scale kFullScale{.width = 4099, .rows = 8209, .context = 2011, .elements = (std::uint64_t{1} << 22) + 4099, .payload = (std::uint64_t{4} << 20) + 12'345};

class World {
 public:
  virtual ~World() = default;

  std::shared_ptr<const cuda::Driver> driver;
  std::shared_ptr<const cuda::BlasLtApi> blas;  // null: blas_problem says why
  std::string blas_problem;
  bool simulated = false;
  Scale scale{};

  // What a simulation found wrong and nobody took yet; a GPU's own driver has none.
  virtual std::vector<std::string> findings() = 0;
};

// Each call opens one anew; a simulation allows one at a time.
// errors: kUnavailable: no driver, or an old one, or no device; the text says what to do
Result<std::unique_ptr<World>> open_world();

// The status of a program that had nothing to run on (automake's and ctest's "skipped").
inline constexpr int kSkipped = 77;

}  // namespace paramwire::gpu
