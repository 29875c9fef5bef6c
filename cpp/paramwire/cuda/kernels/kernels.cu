// Every kernel, made from the one list: nvcc compiles this file alone, into the fatbin that module.cpp loads.
#include "paramwire/cuda/kernels/compute_bodies.hpp"
#include "paramwire/cuda/kernels/integrity_bodies.hpp"
#include "paramwire/cuda/kernels/list.hpp"

namespace paramwire::cuda {

#define PARAMWIRE_KERNEL(name, Args, threads, blocks, ...)                                                          \
  extern "C" __global__ void __launch_bounds__(threads, blocks) pw_##name(const __grid_constant__ Args args) {     \
    __VA_ARGS__(DeviceLane{}, args);                                                                                \
  }
PARAMWIRE_CUDA_KERNELS(PARAMWIRE_KERNEL)
#undef PARAMWIRE_KERNEL

}  // namespace paramwire::cuda
