// paramwire's own kernels for the simulated device: the bodies of kernels/list.hpp, run by a LaneExecutor, under their names in the fatbin.
#pragma once

#include "support/sim_cuda.hpp"

#include <cstdint>
#include <map>
#include <string>

namespace paramwire::testing {

// For SimCudaOptions::kernels.
// seed: the order of threads, as LaneExecutor::run; 0 is the fastest
std::map<std::string, SimKernel, std::less<>> sim_host_kernels(std::uint64_t seed = 0);

}  // namespace paramwire::testing
