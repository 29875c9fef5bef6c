// Between Python objects and the core's values. Everything here needs the GIL and leaves errors as Python exceptions.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace paramwire::bindings {

namespace py = pybind11;

// ---------------------------------------------------------------- errors

// The exception classes of `module`, one for each Code.
void bind_errors(py::module_& module);
// Raises the exception of the error's code, with its message.
[[noreturn]] void raise(const Error& error);
[[noreturn]] void raise_invalid(const std::string& message);

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
// "tcp" or any other word that the core gave.
inline py::str text(std::string_view word) { return py::str(word.data(), word.size()); }

// ---------------------------------------------------------------- arrays

bool is_ndarray(py::handle object);

// An uninitialised array for `shape` elements of `dtype`, as numpy can say it: bf16 and 8-bit floats as the type of ml_dtypes
// if that can be imported, else as uint16 and uint8; 4-bit types as packed uint8, one axis.
py::array new_array(DType dtype, const Shape& shape);
// The same over bytes that live elsewhere, read-only, kept by `base`.
py::array array_over(DType dtype, const Shape& shape, const std::byte* data, py::handle base);
// Whether an array of `array`'s type and shape holds `dtype` `shape` as it is; bytes of the right number (uint8, one axis) do.
bool fits(const py::array& array, DType dtype, const Shape& shape);
// "float32 (2, 3)", for error texts.
std::string describe(const py::array& array);
std::span<std::byte> bytes_of(py::array& array);

// A writable C-contiguous buffer that a fetch fills. Keeps the object's memory where it is.
class Target {
 public:
  // errors: TypeError when `object` is no buffer; InvalidError when it is read-only, not C-contiguous or big-endian.
  explicit Target(py::handle object);
  ~Target();
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
  Py_buffer view_{};
  bool held_ = false;
};

// What a put stores: the bytes of an array, row-major and little-endian, with their label.
struct Source {
  py::array array;  // keeps the bytes
  DType dtype = DType::kU8;
  Shape shape;      // of the whole tensor
  Shard part;
  std::span<const std::byte> bytes;
};
// `array`: an array or buffer of any layout and byte order; other layouts than C-contiguous little-endian are copied, counted
// in `copies`. `dtype`, `shape`, `rows`, `heads`: as Publish.put.  errors: TypeError, InvalidError naming `tensor`.
Source source_from(std::string_view tensor, py::handle array, py::handle dtype, py::handle shape, py::handle rows, py::handle heads,
                   std::atomic<std::uint64_t>& copies);
// An array over the bytes of any array or buffer.  errors: TypeError naming `tensor`.
py::array as_array(std::string_view tensor, py::handle object);

}  // namespace paramwire::bindings
