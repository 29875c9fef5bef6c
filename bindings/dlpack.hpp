// DLPack 1.1, both ways: the memory of one array library handed to another without a copy.
//
// The structs are the ABI (source: dmlc/dlpack, include/dlpack/dlpack.h, version 1.1; the Python protocol is the "DLPack" page of
// the array API standard). A producer wraps one of the two managed structs in a capsule; the consumer renames the capsule, which
// is how everybody sees that it was taken, and calls the deleter once when it is done, from any thread.
#pragma once

#include "arrays.hpp"
#include "device_array.hpp"

#include "paramwire/base/types.hpp"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace paramwire::bindings::dlpack {

struct Device {
  std::int32_t type = 0;
  std::int32_t id = 0;
};
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaHost = 3;      // pinned host memory: the processor reads it
inline constexpr std::int32_t kRocmHost = 11;     // the same
inline constexpr std::int32_t kCudaManaged = 13;  // both see it, but reading needs a synchronisation that only CUDA can do
constexpr bool on_cuda(const Device& device) noexcept { return device.type == kCuda || device.type == kCudaManaged; }

struct DataType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 1;
};

struct Tensor {
  void* data = nullptr;
  Device device;
  std::int32_t ndim = 0;
  DataType dtype;
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;  // in elements; null (before 1.2): row-major and compact
  std::uint64_t byte_offset = 0;
};

struct Managed {  // legacy: capsule "dltensor"
  Tensor tensor;
  void* context = nullptr;
  void (*deleter)(Managed*) = nullptr;  // may be null: nothing to delete
};

struct ManagedVersioned {  // capsule "dltensor_versioned"
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
  void* context = nullptr;
  void (*deleter)(ManagedVersioned*) = nullptr;
  std::uint64_t flags = 0;  // up to here the layout never changes, so that any consumer can call the deleter
  Tensor tensor;
};
static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, ndim) == 16 && offsetof(Tensor, shape) == 24);
static_assert(sizeof(Managed) == 64 && sizeof(ManagedVersioned) == 80 && offsetof(ManagedVersioned, tensor) == 32);

inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::uint32_t kMinor = 1;  // the first with codes for the 8-bit floats
inline constexpr std::uint64_t kReadOnly = 1;
inline constexpr std::uint64_t kIsCopied = 2;
inline constexpr std::uint64_t kSubBytePadded = 4;

// ---------------------------------------------------------------- in

// Takes what `object` (with __dlpack__, or a capsule) hands over; its deleter runs when the array and everything made of it is
// gone, or at once on an error. `what` begins error texts: "tensor \"w\"".
// errors: UnavailableError for memory that the processor can't read; InvalidError for a capsule that was taken before, a version,
//         type, shape or stride that can't be read, and for a producer that refuses, with its words.
Given take(std::string_view what, py::handle object);

// Where `object` says that it is; nullopt: it does not say.  errors: InvalidError for a producer that refuses, with its words.
std::optional<Device> device_of(std::string_view what, py::handle object);
// The same from `object`, which said that it is on `device` (on_cuda). `stream`: the protocol's, that the producer's work is ordered before; -1: none.
// errors: as take(); InvalidError when the tensor is on another device, naming both
DeviceGiven take_device(std::string_view what, py::handle object, const Device& device, std::int64_t stream);

// Raises UnavailableError: `what` is in the memory of `device`, and what to do instead.
[[noreturn]] void refuse_device(std::string_view what, const Device& device, std::string_view details);

// ---------------------------------------------------------------- out

// What keeps exported bytes. Destroyed by the consumer's call of the deleter: in any thread, with or without the GIL, also while
// the interpreter ends. So it must not need Python, or must know how to do without (PythonKeeper).
class Keeper {
 public:
  virtual ~Keeper() = default;
};

// Keeps a Python object; leaves it alone once the interpreter ends.
class PythonKeeper final : public Keeper {
 public:
  explicit PythonKeeper(py::object object) : object_(object.release().ptr()) {}
  PythonKeeper(const PythonKeeper&) = delete;
  PythonKeeper& operator=(const PythonKeeper&) = delete;
  ~PythonKeeper() override;

 private:
  PyObject* object_;
};

// Bytes to hand out.
struct Export {
  const std::byte* data = nullptr;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;    // in elements
  std::vector<std::int64_t> strides;  // in elements; row-major and compact where a copy is asked for
  bool read_only = true;
  bool copied = false;  // made for this consumer alone
};
std::vector<std::int64_t> compact_strides(const std::vector<std::int64_t>& shape);

// The arguments of __dlpack__.
struct Terms {
  bool versioned = false;
  bool copy = false;
};
// errors: BufferError for what can't be met: a stream, another device, and, without a copy, read-only memory for a consumer that
//         is too old to be told so.
Terms terms_from(py::handle stream, py::handle max_version, py::handle dl_device, py::handle copy, bool read_only);

// A capsule over `bytes`, kept by `keeper`; over a copy of them when the terms say so.
py::capsule give(const Export& bytes, const Terms& terms, std::unique_ptr<Keeper> keeper);

inline py::tuple host_device() { return py::make_tuple(kCpu, 0); }

}  // namespace paramwire::bindings::dlpack
