// Arrays of any library as bytes with a label, and blocks as arrays. Everything here needs the GIL and leaves errors as Python
// exceptions.
//
// Asked in this order: numpy array, DLPack (which knows bf16 and 8-bit floats), buffer protocol, __array_interface__,
// __cuda_array_interface__, __array__. No library is imported for it. Memory of CUDA devices is refused here, before a pointer is looked at: those who take it
// ask device_array.hpp first.
#pragma once

#include "convert.hpp"

#include "paramwire/base/types.hpp"

#include <pybind11/numpy.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace paramwire::bindings {

struct DeviceGiven;  // device_array.hpp

bool is_ndarray(py::handle object);
// The name of its type, for error texts.
std::string type_name(py::handle object);

// The numpy type of arrays that hold `dtype`: bf16 and 8-bit floats as the type of ml_dtypes if that can be imported, else as
// uint16 and uint8; 4-bit types as uint8.
const py::dtype& dtype_object(DType dtype);
// An uninitialised array for `shape` elements of `dtype`, as numpy can say it; 4-bit types packed, one axis.
py::array new_array(DType dtype, const Shape& shape);
// The same over bytes that live elsewhere, read-only, kept by `base`.
py::array array_over(DType dtype, const Shape& shape, const std::byte* data, py::handle base);
std::span<std::byte> bytes_of(py::array& array);
void make_read_only(py::array& array);
// "float32 (2, 3)", for error texts.
std::string describe(const py::array& array);
std::string describe(const DeviceGiven& given);

// What an object handed over: its memory, not a copy, of any layout.
struct Given {
  py::array array;
  std::optional<DType> label;  // where the protocol told more than numpy can say
  std::optional<Shape> shape;  // in elements, where the array counts bytes (4-bit types)
};
// errors: TypeError for what is no array, as `what` ("tensor \"w\"") names it; those of the protocol.
Given given_from(std::string_view what, py::handle object);
// What has __cuda_array_interface__ where host memory is wanted: an empty array is one here, too.
// errors: InvalidError naming what is wrong with the description; UnavailableError with the pointer, which is never read.
Given take_cuda_array(std::string_view what, py::handle object);
// Whether it holds `dtype` `shape` as it is; bytes of the right number (uint8, one axis) do.
bool fits(const Given& given, DType dtype, const Shape& shape);
bool fits(const DeviceGiven& given, DType dtype, const Shape& shape);

// A writable array or buffer that a fetch fills. Keeps the object's memory where it is.
class Target {
 public:
  // errors: TypeError when `object` is no writable buffer; InvalidError when it is read-only, big-endian or holds objects;
  //         UnavailableError for device memory.
  explicit Target(py::handle object);
  ~Target();
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  // Its memory is not one row-major run: the fetch fills a copy first.
  bool scattered() const noexcept { return scattered_; }
  // Makes that copy, of an array that must have exactly this type and shape.
  // errors: InvalidError naming both; also when elements share memory.
  void stage(DType dtype, const Shape& shape);
  // Moves the copy to where it belongs, after success. Again is fine.
  void finish();
  bool fits(DType dtype, const Shape& shape) const;
  bool is_array() const noexcept { return given_.has_value(); }
  std::string describe() const;
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  void take_array(Given given);

  std::span<std::byte> bytes_;
  std::optional<Given> given_;  // none: a buffer, view_
  bool scattered_ = false;
  std::optional<py::array> staged_;
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
// `dtype`, `shape`, `rows`, `heads`: as Publish.put. Other layouts than C-contiguous little-endian are copied, counted in `copies`.
// errors: TypeError, InvalidError naming `tensor`.
Source source_from(std::string_view tensor, Given given, py::handle dtype, py::handle shape, py::handle rows, py::handle heads,
                   std::atomic<std::uint64_t>& copies);
// The label of what was given, or `dtype` where that may name the same bytes.  errors: InvalidError naming `what`.
DType choose_label(std::string_view what, const Given& given, py::handle dtype);

}  // namespace paramwire::bindings
