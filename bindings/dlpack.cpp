#include "dlpack.hpp"

#include "gil.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace paramwire::bindings::dlpack {

namespace {

constexpr const char* kLegacyName = "dltensor";
constexpr const char* kVersionedName = "dltensor_versioned";
constexpr const char* kLegacyUsed = "used_dltensor";
constexpr const char* kVersionedUsed = "used_dltensor_versioned";

// ---------------------------------------------------------------- types

// Codes of DLDataType that have names of their own, for error texts.
constexpr const char* kCodeNames[] = {"int",         "uint",          "float",          "opaque handle", "bfloat", "complex",
                                      "bool",        "float8_e3m4",   "float8_e4m3",    "float8_e4m3b11fnuz", "float8_e4m3fn",
                                      "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
                                      "float6_e3m2fn", "float4_e2m1fn"};

struct TypeRow {
  std::uint8_t code;
  std::uint8_t bits;
  DType dtype;
};
constexpr TypeRow kTypes[] = {
    {0, 8, DType::kI8},     {0, 16, DType::kI16},   {0, 32, DType::kI32},      {0, 64, DType::kI64},    {0, 4, DType::kI4},
    {1, 8, DType::kU8},     {1, 16, DType::kU16},   {1, 32, DType::kU32},      {1, 64, DType::kU64},    {1, 4, DType::kU4},
    {2, 16, DType::kF16},   {2, 32, DType::kF32},   {2, 64, DType::kF64},      {4, 16, DType::kBF16},   {5, 64, DType::kC64},
    {5, 128, DType::kC128}, {6, 8, DType::kBool},   {10, 8, DType::kF8E4M3},   {12, 8, DType::kF8E5M2}, {14, 8, DType::kF8E8M0},
};

std::optional<DType> label_from(const DataType& type) {
  if (type.lanes != 1) return std::nullopt;
  for (const TypeRow& row : kTypes) {
    if (row.code == type.code && row.bits == type.bits) return row.dtype;
  }
  return std::nullopt;
}

DataType type_from(DType dtype) {
  for (const TypeRow& row : kTypes) {
    if (row.dtype == dtype) return {row.code, row.bits, 1};
  }
  raise(Error(Code::kInternal, cat("no DLPack type for ", dtype_name(dtype))));
}

std::string name_of(const DataType& type) {
  const std::string name = type.code < std::size(kCodeNames) ? kCodeNames[type.code] : "unknown";
  return cat(name, " (code ", unsigned{type.code}, ", ", unsigned{type.bits}, " bits, ", type.lanes, type.lanes == 1 ? " lane)" : " lanes)");
}

// A negative id: the protocol did not tell which.
std::string device_name(const Device& device) {
  const char* name = nullptr;
  switch (device.type) {
    case kCuda: name = "CUDA device"; break;
    case kCudaManaged: name = "CUDA managed memory of device"; break;
    case 4: name = "OpenCL device"; break;
    case 7: name = "Vulkan device"; break;
    case 8: name = "Metal device"; break;
    case 10: name = "ROCm device"; break;
    case 14: name = "oneAPI device"; break;
    default: break;
  }
  if (name != nullptr) return device.id < 0 ? cat("a ", name) : cat(name, ' ', device.id);
  return cat("DLPack device type ", device.type, ", number ", device.id);
}

bool readable(const Device& device) { return device.type == kCpu || device.type == kCudaHost || device.type == kRocmHost; }

// ---------------------------------------------------------------- in

// A managed struct that is ours: calls its deleter once.
class Taken {
 public:
  explicit Taken(Managed* legacy) : legacy_(legacy) {}
  explicit Taken(ManagedVersioned* versioned) : versioned_(versioned) {}
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  ~Taken() {
    const py::error_scope keep;  // a deleter may run Python code, while an exception of ours is on its way
    if (legacy_ != nullptr && legacy_->deleter != nullptr) legacy_->deleter(legacy_);
    if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
  }
  // The capsule keeps it after all.
  void leave() noexcept {
    legacy_ = nullptr;
    versioned_ = nullptr;
  }
  const Tensor& tensor() const noexcept { return legacy_ != nullptr ? legacy_->tensor : versioned_->tensor; }
  std::uint64_t flags() const noexcept { return legacy_ != nullptr ? 0 : versioned_->flags; }
  // Nothing but deleter and flags may be looked at when the major version is another.
  const ManagedVersioned* versioned() const noexcept { return versioned_; }

 private:
  Managed* legacy_ = nullptr;
  ManagedVersioned* versioned_ = nullptr;
};

// Renames first: from then on the deleter is ours to call, whatever happens.
std::unique_ptr<Taken> take_capsule(std::string_view what, py::handle capsule) {
  if (PyCapsule_CheckExact(capsule.ptr()) == 0) throw py::type_error(cat(what, ": its __dlpack__ gave ", type_name(capsule), ", not a capsule"));
  const char* name = PyCapsule_GetName(capsule.ptr());
  if (name == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  const std::string found = name != nullptr ? name : "";
  const bool versioned = found == kVersionedName;
  if (!versioned && found != kLegacyName) {
    if (found == kLegacyUsed || found == kVersionedUsed) {
      raise_invalid(cat(what, ": the DLPack capsule was taken before, and can be taken once: ask the array for another"));
    }
    throw py::type_error(cat(what, " is a capsule named \"", found, "\", not a DLPack one (\"", kLegacyName, "\" or \"", kVersionedName, "\")"));
  }
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), found.c_str());
  if (pointer == nullptr) throw py::error_already_set();
  std::unique_ptr<Taken> taken(versioned ? new Taken(static_cast<ManagedVersioned*>(pointer)) : new Taken(static_cast<Managed*>(pointer)));
  if (PyCapsule_SetName(capsule.ptr(), versioned ? kVersionedUsed : kLegacyUsed) != 0) {
    taken->leave();
    throw py::error_already_set();
  }
  return taken;
}

// The words of a producer that refused, as the cause of ours. Not for what is no Exception (KeyboardInterrupt).
[[noreturn]] void refused(std::string_view what, py::error_already_set& error, const char* call) {
  if (!error.matches(PyExc_Exception)) throw std::move(error);
  const std::string words = cat(std::string(py::str(error.type().attr("__name__"))), ": ", std::string(py::str(error.value())));
  try {
    raise_invalid(cat(what, ": its ", call, " refuses: ", words));
  } catch (py::error_already_set& ours) {
    PyException_SetCause(ours.value().ptr(), error.value().inc_ref().ptr());
    throw;
  }
}

// stream: of the call's argument; none: host memory, which takes none
py::object capsule_of(std::string_view what, py::handle object, std::optional<std::int64_t> stream) {
  const py::object producer = object.attr("__dlpack__");
  py::dict arguments;
  if (stream) arguments["stream"] = *stream;
  try {
    try {
      return producer(py::arg("max_version") = py::make_tuple(kMajor, kMinor), **arguments);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;  // producers of before DLPack 1.0 do not know the argument
    }
    return producer(**arguments);
  } catch (py::error_already_set& error) {
    refused(what, error, "__dlpack__");
  }
}

struct Layout {
  DType dtype = DType::kU8;
  Shape shape;
  std::vector<py::ssize_t> axes;
  std::vector<py::ssize_t> strides;  // bytes
  std::byte* data = nullptr;
  bool compact = true;               // row-major without gaps
};

// Whether every byte of the elements has an address: sums of strides beyond that are refused before anybody adds them up.
bool spans_address_space(const Layout& layout, std::int64_t item) {
  std::int64_t low = 0;
  std::int64_t high = item;
  for (std::size_t axis = 0; axis < layout.axes.size(); ++axis) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(static_cast<std::int64_t>(layout.strides[axis]), static_cast<std::int64_t>(layout.axes[axis] - 1), &reach)) return false;
    std::int64_t& end = reach < 0 ? low : high;
    if (__builtin_add_overflow(end, reach, &end)) return false;
  }
  return low > std::numeric_limits<std::int64_t>::min() / 2 && high < std::numeric_limits<std::int64_t>::max() / 2;
}

Layout layout_of(std::string_view what, const Taken& taken) {
  const Tensor& tensor = taken.tensor();
  Layout out;
  const auto label = label_from(tensor.dtype);
  if (!label) {
    raise_invalid(cat(what, " is of DLPack type ", name_of(tensor.dtype),
                      ", which paramwire has no type for: give its bytes, as a uint8 view, with dtype= and shape="));
  }
  out.dtype = *label;
  if (tensor.ndim < 0 || static_cast<std::size_t>(tensor.ndim) > Shape::kMaxAxes) {
    raise_invalid(cat(what, " has ", tensor.ndim, " axes, not 0 to ", Shape::kMaxAxes));
  }
  const auto rank = static_cast<std::size_t>(tensor.ndim);
  if (rank > 0 && tensor.shape == nullptr) raise_invalid(cat(what, ": its DLPack tensor has ", rank, " axes and no shape"));
  std::vector<std::uint64_t> dims(rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    if (tensor.shape[axis] < 0) raise_invalid(cat(what, ": axis ", axis, " of its DLPack tensor has size ", tensor.shape[axis]));
    dims[axis] = static_cast<std::uint64_t>(tensor.shape[axis]);
  }
  out.shape = bindings::take(Shape::from(dims));
  const bool empty = out.shape.elements() == 0;
  const std::uint32_t bits = dtype_bits(out.dtype);
  const std::int64_t item = bits < 8 ? 1 : static_cast<std::int64_t>(bits / 8);
  // From the innermost axis out. Axes of one element, and empty tensors, may carry any stride: it is never used.
  std::int64_t compact = 1;
  out.axes.resize(rank);
  out.strides.resize(rank);
  for (std::size_t axis = rank; axis-- > 0;) {
    const bool used = !empty && dims[axis] > 1;
    const std::int64_t elements = tensor.strides != nullptr && used ? tensor.strides[axis] : compact;
    out.compact = out.compact && elements == compact;
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(elements, item, &bytes)) raise_invalid(cat(what, ": axis ", axis, " has a stride of ", elements, " elements"));
    out.axes[axis] = static_cast<py::ssize_t>(dims[axis]);
    out.strides[axis] = bytes;
    if (!empty) compact *= static_cast<std::int64_t>(dims[axis]);
  }
  if (!empty && !spans_address_space(out, item)) raise_invalid(cat(what, ": its strides reach beyond the address space"));
  if (bits < 8) {
    if ((taken.flags() & kSubBytePadded) != 0) raise_invalid(cat(what, ": its ", bits, "-bit elements are padded to bytes: pack them, low bits first"));
    if (!out.compact) raise_invalid(cat(what, ": its packed ", bits, "-bit elements are not row-major: make it contiguous first"));
    out.axes = {static_cast<py::ssize_t>(tensor_bytes(out.dtype, out.shape))};
    out.strides = {1};
  }
  static std::byte nothing{};
  out.data = &nothing;  // numpy would make memory of its own for a null pointer
  if (empty) return out;
  if (tensor.data == nullptr) raise_invalid(cat(what, ": its DLPack tensor ", out.shape, " has no data (a null pointer)"));
  out.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  return out;
}

}  // namespace

void refuse_device(std::string_view what, const Device& device, std::string_view details) {
  const std::string_view takes = on_cuda(device) ? "; only fetch, fetch_block, fetch_many, put, put_rows and put_all take arrays there: "
                                                 : ", and arrays are read and filled in host memory and in CUDA's only: ";
  raise(Error(Code::kUnavailable, cat(what, " is in the memory of ", device_name(device), details, takes, "copy it to the host first (tensor.cpu(), cupy.asnumpy(array)), or give a host array")));
}

std::optional<Device> device_of(std::string_view what, py::handle object) {
  if (!py::hasattr(object, "__dlpack_device__")) return std::nullopt;
  try {
    const auto pair = py::reinterpret_borrow<py::object>(object).attr("__dlpack_device__")();
    return Device{py::int_(pair[py::int_(0)]).cast<std::int32_t>(), py::int_(pair[py::int_(1)]).cast<std::int32_t>()};
  } catch (py::error_already_set& error) {
    refused(what, error, "__dlpack_device__");
  } catch (const py::cast_error&) {
    raise_invalid(cat(what, ": its __dlpack_device__ gave a number beyond 32 bits"));
  }
}

namespace {

std::unique_ptr<Taken> take_any(std::string_view what, py::handle capsule) {
  std::unique_ptr<Taken> taken = take_capsule(what, capsule);
  if (const ManagedVersioned* versioned = taken->versioned(); versioned != nullptr && versioned->major != kMajor) {
    raise_invalid(cat(what, " comes as DLPack ", versioned->major, '.', versioned->minor, "; this build reads ", kMajor, ".x and what was before it"));
  }
  return taken;
}

// What calls the deleter when it goes.
py::capsule kept(std::unique_ptr<Taken> taken) {
  py::capsule out(taken.get(), [](void* held) { delete static_cast<Taken*>(held); });
  taken.release();  // the capsule's from here on
  return out;
}

}  // namespace

Given take(std::string_view what, py::handle object) {
  const bool bare = PyCapsule_CheckExact(object.ptr()) != 0;
  if (!bare) {
    // Before the capsule is asked for: making one for a device may wait for its streams.
    const auto device = device_of(what, object);
    if (device && !readable(*device)) refuse_device(what, *device, "");
  }
  std::unique_ptr<Taken> taken = take_any(what, bare ? py::reinterpret_borrow<py::object>(object) : capsule_of(what, object, std::nullopt));
  if (!readable(taken->tensor().device)) {
    refuse_device(what, taken->tensor().device, bare ? " (a capsule does not say when its bytes are there: give the array that made it)" : " (which its __dlpack_device__ did not say)");
  }
  const Layout layout = layout_of(what, *taken);
  const bool read_only = (taken->flags() & kReadOnly) != 0;
  const py::capsule base = kept(std::move(taken));
  Given out{py::array(dtype_object(layout.dtype), layout.axes, layout.strides, layout.data, base), layout.dtype, layout.shape};
  if (read_only) make_read_only(out.array);
  return out;
}

DeviceGiven take_device(std::string_view what, py::handle object, const Device& device, std::int64_t stream) {
  std::unique_ptr<Taken> taken = take_any(what, capsule_of(what, object, stream));
  const Device& said = taken->tensor().device;
  if (said.type != device.type || said.id != device.id) {
    raise_invalid(cat(what, ": its __dlpack_device__ says ", device_name(device), ", its DLPack tensor ", device_name(said)));
  }
  const Layout layout = layout_of(what, *taken);
  DeviceGiven out;
  out.type = dtype_object(layout.dtype);
  out.label = layout.dtype;
  out.shape = layout.shape;
  out.axes = layout.axes;
  out.range = {reinterpret_cast<std::uintptr_t>(layout.data), tensor_bytes(layout.dtype, layout.shape)};
  out.contiguous = layout.compact;
  out.read_only = (taken->flags() & kReadOnly) != 0;
  out.keep = kept(std::move(taken));
  return out;
}

// ---------------------------------------------------------------- out

PythonKeeper::~PythonKeeper() {
  // An interpreter that ends takes all objects with it, and one that has ended has none.
  if (Py_IsInitialized() == 0 || interpreter_ends()) return;
  const GilTaken taken;
  const py::error_scope keep;
  Py_DECREF(object_);
}

namespace {

// What a managed struct of ours hangs on; deleted by its deleter.
template <typename Struct>
struct Context {
  Struct managed{};
  std::vector<std::int64_t> shape, strides;
  std::unique_ptr<std::byte[]> copy;
  std::unique_ptr<Keeper> keeper;

  // GIL or not, any thread.
  static void end(Struct* self) { delete static_cast<Context*>(self->context); }
};

template <typename Struct>
constexpr const char* kName = nullptr;
template <>
constexpr const char* kName<Managed> = kLegacyName;
template <>
constexpr const char* kName<ManagedVersioned> = kVersionedName;

// A capsule that nobody took has its struct still.
template <typename Struct>
void end_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kName<Struct>) == 0) return;
  auto* managed = static_cast<Struct*>(PyCapsule_GetPointer(capsule, kName<Struct>));
  managed->deleter(managed);
}

// The elements of `bytes` in their order, row-major.
std::unique_ptr<std::byte[]> copy_of(const Export& bytes) {
  std::uint64_t count = 1;
  for (const std::int64_t axis : bytes.shape) count *= static_cast<std::uint64_t>(axis);
  const std::uint64_t size = (count * dtype_bits(bytes.dtype) + 7) / 8;
  std::unique_ptr<std::byte[]> out(new (std::nothrow) std::byte[size > 0 ? size : 1]);
  if (!out) throw std::bad_alloc();
  without_gil([&] { std::memcpy(out.get(), bytes.data, size); });
  return out;
}

template <typename Struct>
py::capsule capsule_over(const Export& bytes, bool copy, std::unique_ptr<Keeper> keeper) {
  auto context = std::make_unique<Context<Struct>>();
  context->shape = bytes.shape;
  context->strides = bytes.strides;
  context->keeper = std::move(keeper);
  if (copy) {
    context->copy = copy_of(bytes);
    context->keeper.reset();
  }
  Struct& managed = context->managed;
  managed.context = context.get();
  managed.deleter = &Context<Struct>::end;
  Tensor& tensor = managed.tensor;
  tensor.data = copy ? context->copy.get() : const_cast<std::byte*>(bytes.data);
  tensor.device = {kCpu, 0};
  tensor.dtype = type_from(bytes.dtype);
  tensor.ndim = static_cast<std::int32_t>(context->shape.size());
  tensor.shape = context->shape.data();
  tensor.strides = context->strides.data();
  if constexpr (std::is_same_v<Struct, ManagedVersioned>) {
    managed.major = kMajor;
    managed.minor = kMinor;
    managed.flags = copy || bytes.copied ? kIsCopied : bytes.read_only ? kReadOnly : 0;
  }
  PyObject* made = PyCapsule_New(&managed, kName<Struct>, &end_capsule<Struct>);
  if (made == nullptr) throw py::error_already_set();
  context.release();  // the capsule's, then the consumer's
  return py::reinterpret_steal<py::capsule>(made);
}

}  // namespace

std::vector<std::int64_t> compact_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> out(shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    out[axis] = stride;
    stride *= std::max<std::int64_t>(1, shape[axis]);
  }
  return out;
}

Terms terms_from(py::handle stream, py::handle max_version, py::handle dl_device, py::handle copy, bool read_only) {
  Terms out;
  if (!stream.is_none()) throw py::buffer_error("stream must be None: the bytes are in host memory, and there already");
  if (!dl_device.is_none()) {
    const auto device = dl_device.cast<std::pair<std::int32_t, std::int32_t>>();
    if (device.first != kCpu) throw py::buffer_error(cat("the bytes are in host memory (1, 0), and are not copied to ", device_name({device.first, device.second})));
  }
  if (!max_version.is_none()) out.versioned = max_version.cast<std::pair<std::uint32_t, std::uint32_t>>().first >= kMajor;
  out.copy = !copy.is_none() && copy.cast<bool>();
  if (read_only && !out.versioned && !out.copy) {
    throw py::buffer_error("the bytes are read-only, which DLPack can say from 1.0 on: ask with max_version=(1, 0), or with copy=True");
  }
  return out;
}

py::capsule give(const Export& bytes, const Terms& terms, std::unique_ptr<Keeper> keeper) {
  if (terms.versioned) return capsule_over<ManagedVersioned>(bytes, terms.copy, std::move(keeper));
  return capsule_over<Managed>(bytes, terms.copy, std::move(keeper));
}

}  // namespace paramwire::bindings::dlpack
