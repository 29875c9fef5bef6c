#include "paramwire/cuda/module.hpp"

#include "paramwire/base/text.hpp"

// From kernels/image.S: nvcc's output, byte for byte.
extern "C" {
extern const unsigned char paramwire_cuda_fatbin[];
extern const unsigned char paramwire_cuda_fatbin_end[];
}

namespace paramwire::cuda {

namespace {

constexpr KernelFacts kFacts[kKernels] = {
#define PARAMWIRE_CUDA_FACTS(name, Args, threads, ...) {#name, "pw_" #name, sizeof(Args), threads},
    PARAMWIRE_CUDA_KERNELS(PARAMWIRE_CUDA_FACTS)
#undef PARAMWIRE_CUDA_FACTS
};

// Kernel parameters are one struct by value of at most 4 KiB: CUDA C++ Programming Guide, "__global__ Function Parameters".
#define PARAMWIRE_CUDA_CHECK(name, Args, ...) static_assert(sizeof(Args) <= 4096 && std::is_trivially_copyable_v<Args>);
PARAMWIRE_CUDA_KERNELS(PARAMWIRE_CUDA_CHECK)
#undef PARAMWIRE_CUDA_CHECK

}  // namespace

const KernelFacts& kernel_facts(Kernel kernel) noexcept { return kFacts[static_cast<std::size_t>(kernel)]; }

std::span<const std::byte> kernel_image() noexcept {
  return std::as_bytes(std::span(paramwire_cuda_fatbin, static_cast<std::size_t>(paramwire_cuda_fatbin_end - paramwire_cuda_fatbin)));
}

Result<std::shared_ptr<const Module>> Module::load(DevicePtr device) {
  const std::shared_ptr<Module> module(new Module(std::move(device)));
  const Device& on = *module->device_;
  const Driver& driver = on.driver();
  const Current current(on);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(on.check(driver.cuLibraryLoadData(&module->library_, kernel_image().data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                           cat("loading the kernels on ", on.label())));
  for (std::size_t i = 0; i < kKernels; ++i) {
    CUkernel kernel = nullptr;
    PARAMWIRE_CHECK(on.check(driver.cuLibraryGetKernel(&kernel, module->library_, kFacts[i].symbol), cat("looking for kernel ", kFacts[i].name)));
    PARAMWIRE_CHECK(on.check(driver.cuKernelGetFunction(&module->functions_[i], kernel), cat("loading kernel ", kFacts[i].name, " on ", on.label())));
  }
  return std::shared_ptr<const Module>(module);
}

Module::~Module() {
  if (library_ == nullptr || device_->in_child()) return;
  const Current current(*device_);
  device_->driver().cuLibraryUnload(library_);
}

Status Module::launch(CUstream stream, Kernel kernel, const Launch& launch, const void* args, std::size_t args_bytes) const {
  const KernelFacts& facts = kernel_facts(kernel);
  if (args_bytes != facts.args_bytes) {
    return Error(Code::kInternal, cat("kernel ", facts.name, " takes ", facts.args_bytes, " bytes of arguments and was given ", args_bytes));
  }
  if (launch.threads == 0 || launch.threads > facts.threads_max || launch.threads % kWarp != 0) {
    return Error(Code::kInternal, cat("kernel ", facts.name, " in blocks of ", launch.threads, " threads; it takes whole warps, up to ", facts.threads_max));
  }
  void* parameters[] = {const_cast<void*>(args)};  // read by the driver, and taken as void** for historical reasons
  const CUresult result = device_->driver().cuLaunchKernel(functions_[static_cast<std::size_t>(kernel)], launch.blocks[0], launch.blocks[1], launch.blocks[2],
                                                           launch.threads, 1, 1, launch.shared_bytes, stream, parameters, nullptr);
  if (result == CUDA_SUCCESS) [[likely]] return {};
  return device_->error(result, cat("launching kernel ", facts.name, " with ", launch.blocks[0], " x ", launch.blocks[1], " x ", launch.blocks[2], " blocks of ",
                                    launch.threads, " threads on ", device_->label()));
}

}  // namespace paramwire::cuda
