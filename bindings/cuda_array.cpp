// __cuda_array_interface__, version 3 (source: Numba's manual, "CUDA Array Interface (Version 3)"): a dict that describes memory of
// a CUDA device. No CUDA is needed to read the description, and its pointer is never followed here.
#include "device_array.hpp"
#include "dlpack.hpp"

#include "paramwire/base/text.hpp"

#include <string>

namespace paramwire::bindings {

namespace {

py::object field(std::string_view what, const py::dict& fields, const char* key) {
  if (!fields.contains(key)) raise_invalid(cat(what, ": its __cuda_array_interface__ has no \"", key, '"'));
  return fields[key];
}

template <typename Value>
Value value_of(std::string_view what, const py::object& value, const char* key, const char* meaning) {
  try {
    return value.cast<Value>();
  } catch (const py::cast_error&) {
    raise_invalid(cat(what, ": \"", key, "\" of its __cuda_array_interface__ is ", std::string(py::repr(value)), ", not ", meaning));
  }
}

// Strides in bytes; None, or none: row-major without gaps.
bool contiguous(std::string_view what, const py::dict& fields, const Shape& shape, py::ssize_t item) {
  if (!fields.contains("strides") || fields["strides"].is_none() || shape.elements() == 0) return true;
  const auto strides = value_of<std::vector<std::int64_t>>(what, fields["strides"], "strides", "a tuple of numbers of bytes, or None");
  if (strides.size() != shape.rank()) {
    raise_invalid(cat(what, ": its __cuda_array_interface__ has ", shape.rank(), " axes and ", strides.size(), " strides"));
  }
  auto compact = static_cast<std::uint64_t>(item);
  for (std::size_t axis = shape.rank(); axis-- > 0;) {
    if (shape[axis] > 1 && (strides[axis] < 0 || static_cast<std::uint64_t>(strides[axis]) != compact)) return false;
    compact *= shape[axis];
  }
  return true;
}

}  // namespace

CudaArray describe_cuda_array(std::string_view what, py::handle object) {
  const py::object description = object.attr("__cuda_array_interface__");
  if (!py::isinstance<py::dict>(description)) throw py::type_error(cat(what, ": its __cuda_array_interface__ is no dict but ", type_name(description)));
  const auto fields = py::reinterpret_borrow<py::dict>(description);
  const auto version = value_of<int>(what, field(what, fields, "version"), "version", "a number");
  if (version < 2) raise_invalid(cat(what, ": its __cuda_array_interface__ has version ", version, ", not 2 or 3"));
  if (fields.contains("mask") && !fields["mask"].is_none()) raise_invalid(cat(what, " has a mask: fill the masked elements first"));
  CudaArray out;
  out.typestr = value_of<std::string>(what, field(what, fields, "typestr"), "typestr", "a type string such as \"<f4\"");
  const py::object axes = field(what, fields, "shape");
  if (!py::isinstance<py::tuple>(axes)) raise_invalid(cat(what, ": \"shape\" of its __cuda_array_interface__ is ", std::string(py::repr(axes)), ", not a tuple"));
  const Shape shape = shape_from(axes);
  const auto data = value_of<std::pair<std::uint64_t, bool>>(what, field(what, fields, "data"), "data", "(pointer, read-only)");
  out.given.type = [&] {
    try {
      return py::dtype(out.typestr);
    } catch (const py::error_already_set&) {
      raise_invalid(cat(what, ": \"typestr\" of its __cuda_array_interface__ is \"", out.typestr, "\", which numpy can't read"));
    }
  }();
  out.given.axes.assign(shape.dims().begin(), shape.dims().end());
  out.given.range = {data.first, shape.elements() * static_cast<std::uint64_t>(out.given.type.itemsize())};
  out.given.read_only = data.second;
  out.given.contiguous = contiguous(what, fields, shape, out.given.type.itemsize());
  out.given.keep = py::reinterpret_borrow<py::object>(object);
  if (fields.contains("stream") && !fields["stream"].is_none()) {
    out.stream = value_of<std::uint64_t>(what, fields["stream"], "stream", "None, 1, 2 or a stream's handle");
    if (out.stream == 0) raise_invalid(cat(what, ": \"stream\" of its __cuda_array_interface__ is 0, which the protocol forbids: 1 is the legacy default stream, 2 the per-thread one"));
  }
  return out;
}

Given take_cuda_array(std::string_view what, py::handle object) {
  const CudaArray array = describe_cuda_array(what, object);
  if (array.given.range.bytes == 0) return {py::array(array.given.type, array.given.axes), std::nullopt, std::nullopt};
  const Shape shape = shape_from(object.attr("__cuda_array_interface__")["shape"]);
  dlpack::refuse_device(what, {dlpack::kCuda, -1}, cat(" (", array.typestr, ' ', shape, " at 0x", hex64(array.given.range.address), ", from __cuda_array_interface__)"));
}

}  // namespace paramwire::bindings
