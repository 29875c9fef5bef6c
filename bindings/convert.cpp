#include "convert.hpp"

#include "paramwire/base/text.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace paramwire::bindings {

// ---------------------------------------------------------------- errors

namespace {

struct ErrorRow {
  Code code;
  const char* name;
  PyObject** also;  // the builtin that people catch already; null: none
  const char* doc;
};

const ErrorRow kErrors[] = {
    {Code::kInvalid, "InvalidError", &PyExc_ValueError, "The call can't be meant: fix it."},
    {Code::kNotFound, "NotFoundError", &PyExc_LookupError, "No such name: ask for another, or elsewhere."},
    {Code::kStale, "StaleError", nullptr, "The version asked for is gone, or not there yet: take a newer snapshot, or wait."},
    {Code::kCorrupt, "CorruptError", nullptr, "Bytes failed their check: read another replica."},
    {Code::kBackpressure, "BackpressureError", nullptr, "A named limit is reached: slow down, or raise it."},
    {Code::kTimeout, "DeadlineError", &PyExc_TimeoutError, "The deadline passed: the peer may be frozen."},
    {Code::kUnreachable, "UnreachableError", &PyExc_ConnectionError, "The peer is gone: reconnect, or go elsewhere."},
    {Code::kUnavailable, "UnavailableError", nullptr, "This implementation can't work here: choose another."},
    {Code::kInternal, "InternalError", nullptr, "A broken invariant: report a bug."},
};

// Classes by code; index 0 is the base class. Never released: errors may be raised while the interpreter ends.
std::array<PyObject*, std::size(kErrors) + 1> classes{};

PyObject* new_class(const char* name, const char* doc, const py::object& bases, std::string_view code) {
  py::dict members;
  members["code"] = text(code);
  PyObject* made = PyErr_NewExceptionWithDoc(cat("paramwire.", name).c_str(), doc, bases.ptr(), members.ptr());
  if (made == nullptr) throw py::error_already_set();
  return made;
}

}  // namespace

void bind_errors(py::module_& module) {
  PyObject* base = new_class("Error", "Base of what paramwire raises; `code` is the word for what to do next.",
                             py::reinterpret_borrow<py::object>(PyExc_Exception), "");
  classes[0] = base;
  module.attr("Error") = py::handle(base);
  for (const ErrorRow& row : kErrors) {
    py::tuple bases = py::make_tuple(py::handle(base));
    if (row.also != nullptr) bases = py::make_tuple(py::handle(base), py::handle(*row.also));
    PyObject* made = new_class(row.name, row.doc, bases, code_name(row.code));
    classes[static_cast<std::size_t>(row.code)] = made;
    module.attr(row.name) = py::handle(made);
  }
}

void raise(const Error& error) {
  auto index = static_cast<std::size_t>(error.code());
  if (index >= classes.size()) index = static_cast<std::size_t>(Code::kInternal);
  // Names come from the wire, and need not be UTF-8.
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(error.message().data(), static_cast<Py_ssize_t>(error.message().size()), "backslashreplace"));
  PyErr_SetObject(classes[index], message.ptr());
  throw py::error_already_set();
}

void raise_invalid(const std::string& message) { raise(Error(Code::kInvalid, message)); }

// ---------------------------------------------------------------- values

py::object python_type(const char* name) {
  // Imported at use: _types.py is pure Python and loads quickly, but _core must not need it while it is itself being imported.
  return py::module_::import("paramwire._types").attr(name);
}

namespace {

// Ten years: what infinity means. Far below where microseconds, added up and turned into nanoseconds, leave 64 bits.
constexpr Micros kLongest = Micros{10} * 365 * 24 * 3600 * kMicrosPerSecond;

}  // namespace

Micros micros_required(double seconds, const char* name) {
  if (std::isnan(seconds)) raise_invalid(cat(name, " is NaN: give seconds"));
  const double scaled = seconds * static_cast<double>(kMicrosPerSecond);
  if (scaled >= static_cast<double>(kLongest)) return kLongest;
  if (scaled <= 0) return 0;
  return std::max<Micros>(1, static_cast<Micros>(scaled));
}

std::optional<Micros> micros(py::handle seconds, const char* name) {
  if (seconds.is_none()) return std::nullopt;
  const double value = PyFloat_AsDouble(seconds.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw py::type_error(cat(name, " must be seconds (a number) or None, not ", std::string(py::str(py::type::handle_of(seconds).attr("__name__")))));
  }
  return micros_required(value, name);
}

py::object version_object(const std::optional<Version>& version) {
  if (!version) return py::none();
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> type;
  const py::object& made = type.call_once_and_store_result([] { return python_type("Version"); }).get_stored();
  return made(version->epoch, version->counter);
}

Version version_from(py::handle version) {
  if (!PyTuple_Check(version.ptr()) || PyTuple_GET_SIZE(version.ptr()) != 2) {
    throw py::type_error(cat("a version is a paramwire.Version or an (epoch, counter) tuple, not ", std::string(py::repr(version))));
  }
  const auto pair = py::reinterpret_borrow<py::tuple>(version);
  Version out;
  try {
    out = {pair[0].cast<std::uint32_t>(), pair[1].cast<std::uint64_t>()};
  } catch (const py::cast_error&) {
    raise_invalid(cat("a version has an epoch below 2**32 and a counter below 2**64, not ", std::string(py::repr(version))));
  }
  if (!out.valid()) raise_invalid(cat("version ", out, " can't be: both parts count from 1; None means unknown"));
  return out;
}

Shape shape_from(py::handle shape) {
  std::vector<std::uint64_t> dims;
  const auto add = [&](py::handle dim) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(dim.ptr()));
    if (!index) throw py::error_already_set();
    const auto value = PyLong_AsUnsignedLongLong(index.ptr());
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      raise_invalid(cat("a shape has axes from 0 to 2**64 - 1, not ", std::string(py::repr(dim))));
    }
    dims.push_back(value);
  };
  if (PyIndex_Check(shape.ptr()) != 0) {
    add(shape);
  } else {
    for (const py::handle dim : shape) add(dim);
  }
  return take(Shape::from(dims));
}

py::tuple shape_tuple(const Shape& shape) {
  py::tuple out(shape.rank());
  for (std::size_t i = 0; i < shape.rank(); ++i) out[i] = py::int_(shape[i]);
  return out;
}

namespace {

template <std::size_t N>
std::array<std::uint64_t, N> numbers(py::handle range, const char* what) {
  std::array<std::uint64_t, N> out{};
  if (!PySequence_Check(range.ptr())) throw py::type_error(cat(what, ", not ", std::string(py::repr(range))));
  const auto sequence = py::reinterpret_borrow<py::sequence>(range);
  bool whole = sequence.size() == N;
  for (std::size_t i = 0; whole && i < N; ++i) {
    const py::object item = sequence[i];
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
    if (!index) throw py::error_already_set();
    out[i] = PyLong_AsUnsignedLongLong(index.ptr());
    whole = PyErr_Occurred() == nullptr;
  }
  if (!whole) {
    PyErr_Clear();
    raise_invalid(cat(what, ", not ", std::string(py::repr(range))));
  }
  return out;
}

}  // namespace

Shard shard_from(py::handle rows, py::handle heads) {
  if (rows.is_none() && heads.is_none()) return Shard::whole();
  if (!rows.is_none() && !heads.is_none()) raise_invalid("rows and heads are two ways to name a part: give one");
  if (!rows.is_none()) {
    const auto range = numbers<2>(rows, "rows are (begin, end)");
    return Shard::rows(range[0], range[1]);
  }
  const auto range = numbers<3>(heads, "heads are (total, begin, end)");
  if (range[0] > std::numeric_limits<std::uint32_t>::max()) raise_invalid(cat(range[0], " heads are more than 2**32 - 1"));
  return Shard::head_range(static_cast<std::uint32_t>(range[0]), range[1], range[2]);
}

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

// The numpy type of arrays that hold `dtype`. Kept once found, never released: 20 entries.
const py::dtype& dtype_object(DType dtype) {
  static std::array<py::dtype*, kDTypeMax + 1> known{};
  py::dtype*& slot = known[static_cast<std::size_t>(dtype)];
  if (slot == nullptr) slot = new py::dtype(find_dtype(dtype));
  return *slot;
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

// ---------------------------------------------------------------- arrays

bool is_ndarray(py::handle object) { return py::isinstance<py::array>(object); }

py::array new_array(DType dtype, const Shape& shape) { return py::array(dtype_object(dtype), array_shape(dtype, shape)); }

py::array array_over(DType dtype, const Shape& shape, const std::byte* data, py::handle base) {
  py::array out(dtype_object(dtype), array_shape(dtype, shape), data, base);
  flags_of(out) &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return out;
}

std::span<std::byte> bytes_of(py::array& array) {
  // Not mutable_data(): that looks at the flag, and a fresh array is writable.
  return {static_cast<std::byte*>(array.mutable_data()), static_cast<std::size_t>(array.nbytes())};
}

bool fits(const py::array& array, DType dtype, const Shape& shape) {
  const py::dtype type = array.dtype();
  const std::uint64_t bytes = tensor_bytes(dtype, shape);
  if (type.kind() == 'u' && type.itemsize() == 1 && array.ndim() == 1) return static_cast<std::uint64_t>(array.nbytes()) == bytes;
  if (sub_byte(dtype)) return false;
  const auto label = label_of(type);
  // Where numpy has no such type, the unsigned integer of its width is how an array says it.
  const bool stands_in = ml_dtypes_name(dtype) != nullptr && type.kind() == 'u' && type.itemsize() * 8 == static_cast<py::ssize_t>(dtype_bits(dtype));
  if (label != dtype && !stands_in) return false;
  if (static_cast<std::size_t>(array.ndim()) != shape.rank()) return false;
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (static_cast<std::uint64_t>(array.shape(axis)) != shape[static_cast<std::size_t>(axis)]) return false;
  }
  return true;
}

std::string describe(const py::array& array) {
  return cat(name_of(array.dtype()), ' ', std::string(py::str(py::object(array.attr("shape")))));
}

Target::Target(py::handle object) {
  if (is_ndarray(object)) {
    auto array = py::reinterpret_borrow<py::array>(object);
    if (!c_contiguous(array)) raise_invalid(cat("out is not C-contiguous (", describe(array), "): fetch without out, then assign"));
    if (!array.writeable()) raise_invalid("out is read-only");
    if (big_endian(array.dtype())) raise_invalid("out is big-endian: blocks are little-endian");
    if (array.dtype().kind() == 'O') raise_invalid("out holds Python objects, not bytes");
    bytes_ = bytes_of(array);
    return;
  }
  if (PyObject_CheckBuffer(object.ptr()) == 0) {
    throw py::type_error(cat("out must be a writable buffer, not ", std::string(py::str(py::type::handle_of(object).attr("__name__")))));
  }
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    raise_invalid("out must be writable and C-contiguous");
  }
  held_ = true;
  bytes_ = {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
}

Target::~Target() {
  if (held_) PyBuffer_Release(&view_);
}

py::array as_array(std::string_view tensor, py::handle object) {
  if (is_ndarray(object)) return py::reinterpret_borrow<py::array>(object);
  const py::object numpy = py::module_::import("numpy");
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
    if (!view) throw py::error_already_set();
    return numpy.attr("asarray")(view);
  }
  if (py::hasattr(object, "__array__") || py::hasattr(object, "__array_interface__")) return numpy.attr("asarray")(object);
  throw py::type_error(cat("tensor \"", tensor, "\" must be an array or a buffer, not ",
                           std::string(py::str(py::type::handle_of(object).attr("__name__")))));
}

namespace {

// Whether the elements of an array of `type` may be taken for `label` as they are, though numpy calls them something else.
bool relabels(const py::dtype& type, DType label) {
  const char kind = type.kind();
  const auto bits = static_cast<std::uint64_t>(type.itemsize()) * 8;
  if (kind == 'V' || (kind == 'u' && bits == 8)) return true;  // bytes are anything
  return ml_dtypes_name(label) != nullptr && (kind == 'u' || kind == 'i') && bits == dtype_bits(label);
}

DType choose_label(std::string_view tensor, const py::array& array, py::handle dtype) {
  const py::dtype type = array.dtype();
  if (dtype.is_none()) {
    if (const auto label = label_of(type)) return *label;
    raise_invalid(cat("tensor \"", tensor, "\": paramwire has no type for ", name_of(type),
                      "; give its bytes and a label, as put(name, array.view(\"u1\"), dtype=..., shape=...)"));
  }
  DType label = DType::kU8;
  if (py::isinstance<py::str>(dtype)) {
    label = take(dtype_from_name(dtype.cast<std::string>()));
  } else {
    const auto known = label_of(py::dtype::from_args(py::reinterpret_borrow<py::object>(dtype)));
    if (!known) raise_invalid(cat("tensor \"", tensor, "\": paramwire has no type for ", std::string(py::str(dtype))));
    label = *known;
  }
  if (label_of(type) != label && !relabels(type, label)) {
    raise_invalid(cat("tensor \"", tensor, "\": the array is ", name_of(type), ", dtype says ", dtype_name(label),
                      ", and nothing is ever cast: convert it, or give its bytes (array.view(\"u1\"))"));
  }
  return label;
}

}  // namespace

Source source_from(std::string_view tensor, py::handle object, py::handle dtype, py::handle shape, py::handle rows, py::handle heads,
                   std::atomic<std::uint64_t>& copies) {
  Source out;
  out.array = as_array(tensor, object);
  out.part = shard_from(rows, heads);
  out.dtype = choose_label(tensor, out.array, dtype);
  const py::dtype type = out.array.dtype();
  const bool same_width = static_cast<std::uint64_t>(type.itemsize()) * 8 == dtype_bits(out.dtype);
  Shape given;
  if (same_width || shape.is_none()) given = shape_from(out.array.attr("shape"));
  if (!shape.is_none()) {
    out.shape = shape_from(shape);
    // A flat array may fill any shape of its size; one with axes must have the part's.
    if (same_width && given.rank() > 1 && given != take(shard_shape(out.shape, out.part))) {
      raise_invalid(cat("tensor \"", tensor, "\": the array has shape ", given, ", ", out.part, " of ", out.shape, " has ",
                        take(shard_shape(out.shape, out.part)), ": reshape or transpose it first"));
    }
  } else if (out.part != Shard::whole()) {
    raise_invalid(cat("tensor \"", tensor, "\": a part needs shape=, the shape of the whole tensor"));
  } else if (!same_width) {
    raise_invalid(cat("tensor \"", tensor, "\": bytes with the label ", dtype_name(out.dtype), " need shape=, the shape in elements"));
  } else {
    out.shape = given;
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
