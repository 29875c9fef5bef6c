// The kernels as they are launched: the library's own fatbin, loaded by the driver once for a device.
#pragma once

#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/kernels/lane.hpp"
#include "paramwire/cuda/kernels/list.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

namespace paramwire::cuda {

// One of kernels/list.hpp: k_gemv_bf16, ...
enum class Kernel : std::uint32_t {
#define PARAMWIRE_CUDA_ENUM(name, ...) k_##name,
  PARAMWIRE_CUDA_KERNELS(PARAMWIRE_CUDA_ENUM)
#undef PARAMWIRE_CUDA_ENUM
};
#define PARAMWIRE_CUDA_COUNT(...) +1
inline constexpr std::size_t kKernels = 0 PARAMWIRE_CUDA_KERNELS(PARAMWIRE_CUDA_COUNT);
#undef PARAMWIRE_CUDA_COUNT

struct KernelFacts {
  std::string_view name;          // "gemv_bf16"
  const char* symbol;             // in the fatbin: "pw_gemv_bf16"
  std::size_t args_bytes;         // of its one parameter
  std::uint32_t threads_max;      // of a block
};
// errors: none; every Kernel is one. threads: any.
const KernelFacts& kernel_facts(Kernel kernel) noexcept;
inline std::string_view kernel_name(Kernel kernel) noexcept { return kernel_facts(kernel).name; }

// The fatbin that was linked in: sm_80, sm_90, sm_100, and PTX of compute_100 for what comes after. Aligned to 16 bytes.
std::span<const std::byte> kernel_image() noexcept;

class Module {
 public:
  // Loads every kernel for the device at once, so that the first launch of one, which may be in a stream capture, loads nothing.
  // errors: kUnavailable: the driver takes none of the image's architectures, or is too old for its PTX; kInternal: a kernel that the list
  //         has is not in the image
  static Result<std::shared_ptr<const Module>> load(DevicePtr device);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Enqueues a launch. `args` are copied before it returns. Needs the device Current.
  //
  // errors: kInternal: arguments of another size than the kernel's, a geometry that it does not take; those of the driver, naming the kernel
  // threads: any    stream: ordered in `stream`
  Status launch(CUstream stream, Kernel kernel, const Launch& launch, const void* args, std::size_t args_bytes) const;
  template <typename Args>
  Status launch(const Stream& stream, Kernel kernel, const Launch& geometry, const Args& args) const {
    static_assert(std::is_trivially_copyable_v<Args>);
    Args bytes = args;
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&bytes);  // what was on the stack before is nothing that a device should be given
#endif
    return launch(stream.handle(), kernel, geometry, &bytes, sizeof(Args));
  }

 private:
  explicit Module(DevicePtr device) : device_(std::move(device)) {}

  const DevicePtr device_;
  CUlibrary library_ = nullptr;
  std::array<CUfunction, kKernels> functions_ = {};
};

}  // namespace paramwire::cuda
