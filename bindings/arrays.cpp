#include "arrays.hpp"

#include "device_array.hpp"
#include "dlpack.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>
#include <vector>

namespace paramwire::bindings {

// ---------------------------------------------------------------- element types

namespace {

bool sub_byte(DType dtype) { return dtype_bits(dtype) < 8; }

// What numpy itself calls each type; null: numpy has no such type.
const char* numpy_name(DType dtype) {
  switch (dtype) {
    case DType::kU8: return "u1";
    case DType::kI8: return "i1";
    case DType::kU16: return "<u2";
    case DType::kI16: return "<i2";
    case DType::kU32: return "<u4";
    case DType::kI32: return "<i4";
    case DType::kU64: return "<u8";
    case DType::kI64: return "<i8";
    case DType::kF16: return "<f2";
    case DType::kF32: return "<f4";
    case DType::kF64: return "<f8";
    case DType::kBool: return "?";
    case DType::kC64: return "<c8";
    case DType::kC128: return "<c16";
    default: return nullptr;
  }
}

const char* ml_dtypes_name(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return "bfloat16";
    case DType::kF8E4M3: return "float8_e4m3fn";
    case DType::kF8E5M2: return "float8_e5m2";
    case DType::kF8E8M0: return "float8_e8m0fnu";
    default: return nullptr;
  }
}

py::dtype find_dtype(DType dtype) {
  if (const char* name = numpy_name(dtype)) return py::dtype(std::string(name));
  if (const char* name = ml_dtypes_name(dtype)) {
    try {
      return py::dtype::from_args(py::module_::import("ml_dtypes").attr(name));
    } catch (py::error_already_set& error) {
      // Not installed, or older than this type: the labelled integer is always there.
      if (!error.matches(PyExc_ImportError) && !error.matches(PyExc_AttributeError)) throw;
    }
  }
  return py::dtype(dtype_bits(dtype) == 16 ? "<u2" : "u1");
}

std::vector<py::ssize_t> array_shape(DType dtype, const Shape& shape) {
  if (sub_byte(dtype)) return {static_cast<py::ssize_t>(tensor_bytes(dtype, shape))};
  return {shape.dims().begin(), shape.dims().end()};
}

bool big_endian(const py::dtype& dtype) { return dtype.byteorder() == (std::endian::native == std::endian::little ? '>' : '='); }

// The label of arrays of this type; nullopt when paramwire has none.
std::optional<DType> label_of(const py::dtype& dtype) {
  const auto size = dtype.itemsize();
  const auto by_size = [size](DType one, DType two, DType four, DType eight) -> std::optional<DType> {
    return size == 1 ? one : size == 2 ? two : size == 4 ? four : size == 8 ? std::optional(eight) : std::nullopt;
  };
  switch (dtype.kind()) {
    case 'b': return DType::kBool;
    case 'u': return by_size(DType::kU8, DType::kU16, DType::kU32, DType::kU64);
    case 'i': return by_size(DType::kI8, DType::kI16, DType::kI32, DType::kI64);
    case 'f':
      if (size == 2) return DType::kF16;
      if (size == 4) return DType::kF32;
      if (size == 8) return DType::kF64;
      break;
    case 'c':
      if (size == 8) return DType::kC64;
      if (size == 16) return DType::kC128;
      break;
    default: break;
  }
  const std::string name = py::str(dtype.attr("name"));
  for (const DType known : {DType::kBF16, DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0}) {
    if (name == ml_dtypes_name(known)) return known;
  }
  return std::nullopt;
}

std::string name_of(const py::dtype& dtype) { return py::str(static_cast<const py::object&>(dtype)); }

int& flags_of(const py::array& array) { return py::detail::array_proxy(array.ptr())->flags; }
bool c_contiguous(const py::array& array) { return (flags_of(array) & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0; }

}  // namespace

const py::dtype& dtype_object(DType dtype) {
  // Kept once found, never released: 20 entries.
  static std::array<py::dtype*, kDTypeMax + 1> known{};
  py::dtype*& slot = known[static_cast<std::size_t>(dtype)];
  if (slot == nullptr) slot = new py::dtype(find_dtype(dtype));
  return *slot;
}

// ---------------------------------------------------------------- arrays

bool is_ndarray(py::handle object) { return py::isinstance<py::array>(object); }

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

py::array new_array(DType dtype, const Shape& shape) { return py::array(dtype_object(dtype), array_shape(dtype, shape)); }

void make_read_only(py::array& array) { flags_of(array) &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_; }

py::array array_over(DType dtype, const Shape& shape, const std::byte* data, py::handle base) {
  py::array out(dtype_object(dtype), array_shape(dtype, shape), data, base);
  make_read_only(out);
  return out;
}

std::span<std::byte> bytes_of(py::array& array) {
  // Not mutable_data(): that looks at the flag, and a fresh array is writable.
  return {static_cast<std::byte*>(array.mutable_data()), static_cast<std::size_t>(array.nbytes())};
}

std::string describe(const py::array& array) {
  return cat(name_of(array.dtype()), ' ', std::string(py::str(py::object(array.attr("shape")))));
}

namespace {

Given from_numpy(py::handle object) { return {py::module_::import("numpy").attr("asarray")(object), std::nullopt, std::nullopt}; }

}  // namespace

Given given_from(std::string_view what, py::handle object) {
  if (is_ndarray(object)) return {py::reinterpret_borrow<py::array>(object), std::nullopt, std::nullopt};
  if (PyCapsule_CheckExact(object.ptr()) != 0 || py::hasattr(object, "__dlpack__")) return dlpack::take(what, object);
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
    if (!view) throw py::error_already_set();
    return from_numpy(view);
  }
  if (py::hasattr(object, "__array_interface__")) return from_numpy(object);
  if (py::hasattr(object, "__cuda_array_interface__")) return take_cuda_array(what, object);
  if (py::hasattr(object, "__array__")) return from_numpy(object);
  throw py::type_error(cat(what, " must be an array or a buffer, not ", type_name(object)));
}

namespace {

bool holds_as(const py::dtype& type, std::optional<DType> label, std::span<const py::ssize_t> axes, DType dtype, const Shape& shape) {
  if (!label) label = label_of(type);
  const bool flat_bytes = type.kind() == 'u' && type.itemsize() == 1 && axes.size() == 1;
  if (flat_bytes && (label == dtype || label == DType::kU8)) return static_cast<std::uint64_t>(axes[0]) == tensor_bytes(dtype, shape);
  if (sub_byte(dtype)) return false;
  // Where numpy has no such type, the unsigned integer of its width is how an array says it.
  const bool stands_in = ml_dtypes_name(dtype) != nullptr && (label == DType::kU8 || label == DType::kU16) && dtype_bits(*label) == dtype_bits(dtype);
  if (label != dtype && !stands_in) return false;
  return std::equal(axes.begin(), axes.end(), shape.dims().begin(), shape.dims().end(), [](py::ssize_t a, std::uint64_t b) { return static_cast<std::uint64_t>(a) == b; });
}

}  // namespace

bool fits(const Given& given, DType dtype, const Shape& shape) {
  return holds_as(given.array.dtype(), given.label, {given.array.shape(), static_cast<std::size_t>(given.array.ndim())}, dtype, shape);
}

bool fits(const DeviceGiven& given, DType dtype, const Shape& shape) { return holds_as(given.type, given.label, given.axes, dtype, shape); }

std::string describe(const DeviceGiven& given) {
  py::tuple axes(given.axes.size());
  for (std::size_t i = 0; i < given.axes.size(); ++i) axes[i] = given.axes[i];
  return cat(name_of(given.type), ' ', std::string(py::str(axes)), " of cuda:", given.ordinal);
}

// ---------------------------------------------------------------- targets

Target::Target(py::handle object) {
  if (is_ndarray(object)) {
    take_array({py::reinterpret_borrow<py::array>(object), std::nullopt, std::nullopt});
    return;
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) == 0) {
      held_ = true;
      bytes_ = {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
      return;
    }
    PyErr_Clear();  // read-only, or not one run of bytes: as an array it says which
  }
  // Not what only has __array__: that may give a copy, which nobody would see filled. Nor a bare capsule: a fetch that is tried
  // again would take it twice.
  const bool shares = PyObject_CheckBuffer(object.ptr()) != 0 || py::hasattr(object, "__dlpack__") || py::hasattr(object, "__array_interface__") ||
                      py::hasattr(object, "__cuda_array_interface__");
  if (!shares) throw py::type_error(cat("out must be a writable buffer or array, not ", type_name(object)));
  take_array(given_from("out", object));
}

void Target::take_array(Given given) {
  given_.emplace(std::move(given));
  py::array& array = given_->array;
  if (!array.writeable()) raise_invalid("out must be writable, and is read-only");
  if (big_endian(array.dtype())) raise_invalid("out is big-endian: blocks are little-endian");
  if (array.dtype().kind() == 'O') raise_invalid("out holds Python objects, not bytes");
  scattered_ = !c_contiguous(array);
  if (!scattered_) bytes_ = bytes_of(array);
}

void Target::stage(DType dtype, const Shape& shape) {
  if (!fits(dtype, shape)) {
    raise_invalid(cat("out is ", describe(), ", and what is fetched ", dtype_name(dtype), ' ', shape, ": an out that is not C-contiguous must have its type and shape"));
  }
  const py::array& array = given_->array;
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (array.strides(axis) == 0 && array.shape(axis) > 1) raise_invalid(cat("out is ", describe(), " whose elements share memory (axis ", axis, " has stride 0)"));
  }
  staged_.emplace(array.dtype(), std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()));
  bytes_ = bytes_of(*staged_);
}

void Target::finish() {
  if (!staged_) return;
  const py::array staged = *staged_;  // another thread may be doing the same
  py::module_::import("numpy").attr("copyto")(given_->array, staged);
  staged_.reset();
  bytes_ = {};
}

bool Target::fits(DType dtype, const Shape& shape) const {
  return given_ ? bindings::fits(*given_, dtype, shape) : bytes_.size() == tensor_bytes(dtype, shape);
}

std::string Target::describe() const { return given_ ? bindings::describe(given_->array) : cat(bytes_.size(), " bytes"); }

Target::~Target() {
  if (held_) PyBuffer_Release(&view_);
}

// ---------------------------------------------------------------- sources

namespace {

// Whether the elements of an array of `type` may be taken for `label` as they are, though numpy calls them something else.
bool relabels(const py::dtype& type, DType label) {
  const char kind = type.kind();
  const auto bits = static_cast<std::uint64_t>(type.itemsize()) * 8;
  if (kind == 'V' || (kind == 'u' && bits == 8)) return true;  // bytes are anything
  return ml_dtypes_name(label) != nullptr && (kind == 'u' || kind == 'i') && bits == dtype_bits(label);
}

// What DLPack called a float of 8 bits is not another kind of float, though numpy may show both as bytes.
bool is_integer(DType dtype) { return dtype <= DType::kI64; }

}  // namespace

DType choose_label(std::string_view what, const Given& given, py::handle dtype) {
  const py::dtype type = given.array.dtype();
  const auto own = given.label ? given.label : label_of(type);
  if (dtype.is_none()) {
    if (own) return *own;
    raise_invalid(cat(what, ": paramwire has no type for ", name_of(type),
                      "; give its bytes and a label, as put(name, array.view(\"u1\"), dtype=..., shape=...)"));
  }
  DType label = DType::kU8;
  if (py::isinstance<py::str>(dtype)) {
    label = take(dtype_from_name(dtype.cast<std::string>()));
  } else {
    const auto known = label_of(py::dtype::from_args(py::reinterpret_borrow<py::object>(dtype)));
    if (!known) raise_invalid(cat(what, ": paramwire has no type for ", std::string(py::str(dtype))));
    label = *known;
  }
  if (own != label && (!relabels(type, label) || (given.label && !is_integer(*given.label)))) {
    raise_invalid(cat(what, ": the array is ", given.label ? std::string(dtype_name(*given.label)) : name_of(type), ", dtype says ", dtype_name(label),
                      ", and nothing is ever cast: convert it, or give its bytes (array.view(\"u1\"))"));
  }
  return label;
}

Source source_from(std::string_view tensor, Given given, py::handle dtype, py::handle shape, py::handle rows, py::handle heads,
                   std::atomic<std::uint64_t>& copies) {
  const std::string what = cat("tensor \"", tensor, '"');
  Source out;
  out.part = shard_from(rows, heads);
  out.dtype = choose_label(what, given, dtype);
  out.array = std::move(given.array);
  const py::dtype type = out.array.dtype();
  const bool same_width = static_cast<std::uint64_t>(type.itemsize()) * 8 == dtype_bits(out.dtype);
  // Whether the array says how many elements there are, and not only how many bytes.
  const bool counts = same_width || given.shape;
  Shape own;
  if (given.shape) {
    own = *given.shape;
  } else if (counts || shape.is_none()) {
    own = shape_from(out.array.attr("shape"));
  }
  if (!shape.is_none()) {
    out.shape = shape_from(shape);
    // A flat array may fill any shape of its size; one with axes must have the part's.
    if (counts && own.rank() > 1 && own != take(shard_shape(out.shape, out.part))) {
      raise_invalid(cat(what, ": the array has shape ", own, ", ", out.part, " of ", out.shape, " has ", take(shard_shape(out.shape, out.part)),
                        ": reshape or transpose it first"));
    }
  } else if (out.part != Shard::whole()) {
    raise_invalid(cat(what, ": a part needs shape=, the shape of the whole tensor"));
  } else if (!counts) {
    raise_invalid(cat(what, ": bytes with the label ", dtype_name(out.dtype), " need shape=, the shape in elements"));
  } else {
    out.shape = own;
  }
  if (big_endian(type)) {
    out.array = out.array.attr("astype")(type.attr("newbyteorder")("<"), "C");
    copies.fetch_add(1, std::memory_order_relaxed);
  } else if (!c_contiguous(out.array)) {
    out.array = out.array.attr("copy")("C");
    copies.fetch_add(1, std::memory_order_relaxed);
  }
  out.bytes = {static_cast<const std::byte*>(out.array.data()), static_cast<std::size_t>(out.array.nbytes())};
  return out;
}

}  // namespace paramwire::bindings
