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
    {Code::kDenied, "DeniedError", &PyExc_PermissionError, "The right key is missing: bring it, or mend its file."},
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

std::string key_path(const std::filesystem::path& path) {
  if (path.empty()) raise_invalid("the path of the key file is empty: name a file, or give no key at all");
  return path.string();
}

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

py::object items_of(py::handle mapping, std::string_view name) {
  if (!py::hasattr(mapping, "items")) {
    throw py::type_error(cat(name, " must be a mapping of names, not ", std::string(py::str(py::type::handle_of(mapping).attr("__name__")))));
  }
  return mapping.attr("items")();
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

}  // namespace paramwire::bindings
