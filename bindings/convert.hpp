// Between Python objects and the core's values. Everything here needs the GIL and leaves errors as Python exceptions.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace paramwire::bindings {

namespace py = pybind11;

// ---------------------------------------------------------------- errors

// The exception classes of `module`, one for each Code.
void bind_errors(py::module_& module);
// Raises the exception of the error's code, with its message.
[[noreturn]] void raise(const Error& error);
[[noreturn]] void raise_invalid(const std::string& message);
// The path of a key file, as it was given.  errors: InvalidError for an empty one, which the core would take for "no key".
std::string key_path(const std::filesystem::path& path);

inline void check(const Status& status) {
  if (!status.ok()) raise(status.error());
}
template <typename T>
T take(Result<T> result) {
  if (!result.ok()) raise(result.error());
  return std::move(result).value();
}

// ---------------------------------------------------------------- values

// An attribute of python/paramwire/_types.py.
py::object python_type(const char* name);

// Seconds: None is nullopt, infinity is ten years.  errors: TypeError; InvalidError for NaN.
std::optional<Micros> micros(py::handle seconds, const char* name);
// The same where None is not allowed.
Micros micros_required(double seconds, const char* name);

py::object version_object(const std::optional<Version>& version);
Version version_from(py::handle version);
Shape shape_from(py::handle shape);
py::tuple shape_tuple(const Shape& shape);
// The part of a tensor that `rows` (begin, end) or `heads` (total, begin, end) name; both None: all of it.
Shard shard_from(py::handle rows, py::handle heads);
// `given` as a T.  errors: TypeError saying what `name` must be; InvalidError for an integer that T can't hold.
template <typename T>
T value_from(py::handle given, std::string_view name, std::string_view expected) {
  try {
    return given.cast<T>();
  } catch (const py::cast_error&) {
    const std::string text = std::string(name) + " must be " + std::string(expected) + ", not " + std::string(py::repr(given));
    if (std::is_integral_v<T> && PyLong_Check(given.ptr())) raise_invalid(text);
    throw py::type_error(text);
  }
}
inline std::string name_from(py::handle given) { return value_from<std::string>(given, "a tensor's name", "a str of Unicode characters"); }
// (name, array) pairs of a mapping.  errors: TypeError.
py::object items_of(py::handle mapping, std::string_view name);
// "tcp" or any other word that the core gave.
inline py::str text(std::string_view word) { return py::str(word.data(), word.size()); }

}  // namespace paramwire::bindings
