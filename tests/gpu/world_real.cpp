#include "gpu/world.hpp"

#include "paramwire/cuda/device.hpp"

namespace paramwire::gpu {

namespace {

class RealWorld final : public World {
 public:
  std::vector<std::string> findings() override { return {}; }
  // Keeps the primary context from one test to the next: making it takes longer than most of them.
  cuda::DevicePtr device;
};

}  // namespace

Result<std::unique_ptr<World>> open_world() {
  static cuda::DevicePtr kept;
  auto world = std::make_unique<RealWorld>();
  PARAMWIRE_TRY(driver, cuda::open_driver());
  world->driver = driver;
  if (kept == nullptr) {
    PARAMWIRE_TRY(device, cuda::Device::open(driver, 0));
    kept = device;
  }
  world->device = kept;
  auto blas = cuda::open_blaslt();
  if (blas.ok()) world->blas = std::move(*blas);
  else world->blas_problem = blas.error().message();
  world->scale = kFullScale;
  return std::unique_ptr<World>(std::move(world));
}

}  // namespace paramwire::gpu
