// DeviceArrays over the CUDA driver. Of each device that was used: its context, the kernel of the checks, and one transfer that the next call takes.
#pragma once

#include "paramwire/cuda/device_transfer.hpp"
#include "paramwire/interop/device_arrays.hpp"

#include <cstdint>
#include <memory>

namespace paramwire {

// half_bytes: for tests.  errors: none but of memory
std::shared_ptr<DeviceArrays> open_cuda_arrays(std::shared_ptr<const cuda::Driver> driver, std::uint64_t half_bytes = cuda::kTransferHalfBytes);

}  // namespace paramwire
