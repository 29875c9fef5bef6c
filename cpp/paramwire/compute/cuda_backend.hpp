// The CUDA backend: opens a device and its kernels; sessions are in cuda_session.hpp.
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/cuda/blaslt.hpp"
#include "paramwire/cuda/driver.hpp"

#include <memory>
#include <string>

namespace paramwire {

// Opens device `ordinal`. blas: may be null, with the reason in blas_problem.
// errors: those of cuda::Device::open; kUnavailable: the kernels do not load on it
Result<std::unique_ptr<Backend>> open_cuda_backend(std::shared_ptr<const cuda::Driver> driver, std::shared_ptr<const cuda::BlasLtApi> blas, std::string blas_problem, int ordinal);

// With the system's driver and library.
Result<std::unique_ptr<Backend>> open_cuda_backend(int ordinal);

// "cuda:0 NVIDIA H200, ..." or what is missing.
Availability cuda_backend_available();

}  // namespace paramwire
