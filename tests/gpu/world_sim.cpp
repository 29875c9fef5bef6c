#include "gpu/world.hpp"

#include "support/sim_cublaslt.hpp"
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_kernels.hpp"

namespace paramwire::gpu {

namespace {

testing::SimCudaOptions options() {
  testing::SimCudaOptions out;
  out.device_bytes = std::uint64_t{512} << 20;
  out.pinned_bytes = std::uint64_t{128} << 20;
  // Odd: some threads run ahead as far as barriers let them, while a case's host side runs them by number.
  out.kernels = testing::sim_host_kernels(1);
  return out;
}

class SimWorld final : public World {
 public:
  SimWorld() : sim_(options()), blas_(sim_) {
    driver = sim_.driver();
    blas = blas_.api();
    simulated = true;
    scale = kSmallScale;
  }
  std::vector<std::string> findings() override { return sim_.take_failures(); }

 private:
  testing::SimCuda sim_;
  testing::SimBlasLt blas_;
};

}  // namespace

Result<std::unique_ptr<World>> open_world() { return std::unique_ptr<World>(std::make_unique<SimWorld>()); }

}  // namespace paramwire::gpu
