#include "support/host_kernels.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/cuda/kernels/compute_bodies.hpp"
#include "paramwire/cuda/kernels/integrity_bodies.hpp"
#include "paramwire/cuda/kernels/list.hpp"

namespace paramwire::testing {

namespace {

using namespace cuda;  // the names of the list

#define PARAMWIRE_HOST_KERNEL(name, Args, threads, blocks, ...) \
  void run_##name(const HostLane& lane, const void* args) { __VA_ARGS__(lane, *static_cast<const Args*>(args)); }
PARAMWIRE_CUDA_KERNELS(PARAMWIRE_HOST_KERNEL)
#undef PARAMWIRE_HOST_KERNEL

constexpr HostKernelEntry kEntries[] = {
#define PARAMWIRE_HOST_ENTRY(name, Args, threads, ...) {#name, "pw_" #name, run_##name, sizeof(Args), threads},
    PARAMWIRE_CUDA_KERNELS(PARAMWIRE_HOST_ENTRY)
#undef PARAMWIRE_HOST_ENTRY
};

}  // namespace

std::span<const HostKernelEntry> host_kernels() { return kEntries; }

const HostKernelEntry* host_kernel(std::string_view name) {
  for (const HostKernelEntry& entry : kEntries) {
    if (entry.name == name || entry.symbol == name) return &entry;
  }
  return nullptr;
}

std::string run_host_kernel(LaneExecutor& executor, std::string_view name, const cuda::Launch& launch, const void* args, std::size_t args_bytes,
                            std::uint64_t seed) {
  const HostKernelEntry* kernel = host_kernel(name);
  if (kernel == nullptr) return cat(name, ": no such kernel");
  if (kernel->args_bytes != args_bytes) return cat(name, ": takes ", kernel->args_bytes, " bytes of arguments, not ", args_bytes);
  if (launch.threads > kernel->threads_max) return cat(name, ": blocks of ", launch.threads, " threads; at most ", kernel->threads_max);
  return executor.run(name, launch, kernel->body, args, seed);
}

}  // namespace paramwire::testing
