// The kernels of kernels/list.hpp as host functions: what a simulated device and tests run in place of the fatbin.
#pragma once

#include "support/lane_executor.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace paramwire::testing {

struct HostKernelEntry {
  std::string_view name;      // "gemv_bf16"
  std::string_view symbol;    // "pw_gemv_bf16", as cuLibraryGetKernel is asked
  HostKernel body;            // for LaneExecutor::run
  std::size_t args_bytes;
  std::uint32_t threads_max;  // of a block: __launch_bounds__
};

// In the order of the list, which is that of cuda::Kernel.
std::span<const HostKernelEntry> host_kernels();
// By name or symbol; null when there is none.
const HostKernelEntry* host_kernel(std::string_view name);

// Runs kernel `name` on the host, more threads than its __launch_bounds__ being a fault too. returns: as LaneExecutor::run
template <typename Args>
std::string run_kernel(LaneExecutor& executor, std::string_view name, const cuda::Launch& launch, const Args& args, std::uint64_t seed = 0);

std::string run_host_kernel(LaneExecutor& executor, std::string_view name, const cuda::Launch& launch, const void* args, std::size_t args_bytes,
                            std::uint64_t seed);

template <typename Args>
std::string run_kernel(LaneExecutor& executor, std::string_view name, const cuda::Launch& launch, const Args& args, std::uint64_t seed) {
  return run_host_kernel(executor, name, launch, &args, sizeof(Args), seed);
}

}  // namespace paramwire::testing
