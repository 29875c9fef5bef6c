// What is there for CUDA, found by looking: no CUDA header is needed and no driver is initialised.
#pragma once

#include "paramwire/base/availability.hpp"

#include <string>
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
// The line of "cuda", which this build does not have; what the machine lacks, too.
Availability cuda_availability(const CudaFacts& facts);

}  // namespace paramwire
