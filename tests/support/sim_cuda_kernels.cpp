#include "support/sim_cuda_kernels.hpp"

#include "support/host_kernels.hpp"

#include <memory>

namespace paramwire::testing {

std::map<std::string, SimKernel, std::less<>> sim_host_kernels(std::uint64_t seed) {
  // One for all: the simulation runs one kernel at a time.
  const auto executor = std::make_shared<LaneExecutor>();
  std::map<std::string, SimKernel, std::less<>> out;
  for (const HostKernelEntry& entry : host_kernels()) {
    SimKernel kernel;
    kernel.argument_bytes = entry.args_bytes;
    kernel.threads_max = entry.threads_max;
    kernel.body = [executor, entry, seed](const SimLaunch& launch, const void* arguments) -> std::string {
      if (launch.block[1] != 1 || launch.block[2] != 1) return "blocks of more than one dimension";
      cuda::Launch geometry;
      for (std::size_t i = 0; i < 3; ++i) geometry.blocks[i] = launch.grid[i];
      geometry.threads = launch.block[0];
      geometry.shared_bytes = launch.shared_bytes;
      return executor->run(launch.kernel, geometry, entry.body, arguments, seed);
    };
    out.emplace(entry.symbol, std::move(kernel));
  }
  return out;
}

}  // namespace paramwire::testing
