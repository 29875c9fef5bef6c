// A case: buffers and launches of kernels over them, to be run on a device and, by the lane executor, on the host, with the same bytes at the same
// alignment. Tests compare the two and the CPU twin's result; gpu_cases writes them for Python.
#pragma once

#include "gpu/bed.hpp"
#include "support/lane_executor.hpp"

#include "paramwire/cuda/kernels/list.hpp"
#include "paramwire/cuda/module.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire::gpu {

enum class Type : std::uint8_t { kU8, kU16, kU32, kU64, kF32, kF64, kBF16, kF16 };
std::size_t type_bytes(Type type) noexcept;
std::string_view type_name(Type type) noexcept;  // "u8", "bf16", ...
// Element `index` of packed elements; integers too.
double element(Type type, std::span<const std::byte> bytes, std::size_t index);

enum class Role : std::uint8_t { kInput, kOutput, kScratch };

struct CaseBuffer {
  std::string name;
  Type type = Type::kU8;
  std::vector<std::uint64_t> shape;
  std::vector<std::byte> bytes{};   // what is there before the launches
  Role role = Role::kInput;
  std::size_t offset = 0;           // bytes behind a boundary of 256
  // Of outputs. Integers, and floats whose bits are promised (`bits`), must be equal. Other floats: neither is a number, or they are equal, or within
  // absolute + relative * the larger, or, where there are any, within bounds[i]. Any two right computations are: derived where the case is made.
  bool bits = false;
  double absolute = 0, relative = 0;
  std::vector<double> bounds{};
  std::vector<std::byte> expected{};  // by the CPU twin, where there is one; within the same bounds

  std::size_t count() const noexcept { return bytes.size() / type_bytes(type); }
};

// Where buffers lie in one run.
class Places {
 public:
  Places(std::span<const CaseBuffer> buffers, std::vector<std::uint64_t> addresses) : buffers_(buffers), addresses_(std::move(addresses)) {}
  // nullptr for "".
  template <typename T>
  T* at(std::string_view name, std::size_t index = 0) const {
    return name.empty() ? nullptr : reinterpret_cast<T*>(address(name)) + index;  // NOLINT: a device's, which the host never follows
  }

 private:
  std::uint64_t address(std::string_view name) const;
  std::span<const CaseBuffer> buffers_;
  std::vector<std::uint64_t> addresses_;
};

struct BoundLaunch {
  cuda::Kernel kernel;
  cuda::Launch launch;
  std::vector<std::byte> args;
};
template <typename Args>
BoundLaunch bound(cuda::Kernel kernel, const cuda::Launch& launch, const Args& args) {
  Args copy = args;
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&copy);  // as Module::launch does
#endif
  const auto bytes = std::as_bytes(std::span(&copy, 1));
  return {kernel, launch, {bytes.begin(), bytes.end()}};
}

struct Case {
  std::string operation;  // what it computes, as test_torch_parity.py knows it
  std::string name;       // of this case, new
  std::vector<CaseBuffer> buffers{};
  std::vector<std::function<BoundLaunch(const Places&)>> steps{};
  std::vector<std::pair<std::string, double>> numbers{};  // for the reference: "epsilon"
  // Writes addresses into a buffer of structures: before the launches of a run.
  std::function<void(const Places&, std::span<std::byte>)> patch{};
  std::string patched{};  // the buffer's name

  const CaseBuffer& buffer(std::string_view wanted) const;
};

// Every buffer of a case after its launches, in order.
using Outcome = std::vector<std::vector<std::byte>>;

// errors: those of the device; kInternal: a byte before or behind a buffer was written
Result<Outcome> run_on_device(const Bed& bed, const Case& it);
// errors: kInternal: what the executor found wrong, or such a byte
Result<Outcome> run_on_host(testing::LaneExecutor& executor, const Case& it, std::uint64_t seed = 0);
// The kernels that its steps launch.
std::vector<cuda::Kernel> kernels_of(const Case& it);
// returns: "", or the first element of `buffer` in which two results differ by more than they may
std::string difference(const CaseBuffer& buffer, std::span<const std::byte> actual, std::span<const std::byte> wanted);

}  // namespace paramwire::gpu
