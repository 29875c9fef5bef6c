// What is there for CUDA, found by looking: no CUDA header is needed and no driver is initialised.
#pragma once

#include "paramwire/base/availability.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

struct CudaFacts {
  bool gpu = false;                // an NVIDIA device on the PCI bus, or the paravirtual one of WSL
  std::vector<std::string> nodes;  // /dev/nvidia*, or /dev/dxg
  std::string kernel_module;       // its version line; empty: not loaded
  std::string library_problem;     // of libcuda.so.1; empty: it opens
  std::string distribution;
};
// `root`: as in base/probe.hpp.
CudaFacts look_for_cuda(const std::string& root);
// The line of "cuda" where it can't be used: what this build and the machine lack, and what to do about it.
// problem: what else is wrong, such as the driver's words; empty: nothing known
Availability cuda_unavailable(const CudaFacts& facts, bool in_this_build, std::string_view problem = {});

}  // namespace paramwire
