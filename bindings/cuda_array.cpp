// __cuda_array_interface__, version 3 (source: Numba's manual, "CUDA Array Interface (Version 3)"): a dict that describes memory of
// a CUDA device. No CUDA is needed to read the description, and its pointer is never followed here.
#include "arrays.hpp"
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

}  // namespace

Given take_cuda_array(std::string_view what, py::handle object) {
  const py::object description = object.attr("__cuda_array_interface__");
  if (!py::isinstance<py::dict>(description)) throw py::type_error(cat(what, ": its __cuda_array_interface__ is no dict but ", type_name(description)));
  const auto fields = py::reinterpret_borrow<py::dict>(description);
  const auto version = value_of<int>(what, field(what, fields, "version"), "version", "a number");
  if (version < 2) raise_invalid(cat(what, ": its __cuda_array_interface__ has version ", version, ", not 2 or 3"));
  if (fields.contains("mask") && !fields["mask"].is_none()) raise_invalid(cat(what, " has a mask: fill the masked elements first"));
  const auto typestr = value_of<std::string>(what, field(what, fields, "typestr"), "typestr", "a type string such as \"<f4\"");
  const py::object axes = field(what, fields, "shape");
  if (!py::isinstance<py::tuple>(axes)) raise_invalid(cat(what, ": \"shape\" of its __cuda_array_interface__ is ", std::string(py::repr(axes)), ", not a tuple"));
  const Shape shape = shape_from(axes);
  const auto data = value_of<std::pair<std::uint64_t, bool>>(what, field(what, fields, "data"), "data", "(pointer, read-only)");
  const auto type = [&] {
    try {
      return py::dtype(typestr);
    } catch (const py::error_already_set&) {
      raise_invalid(cat(what, ": \"typestr\" of its __cuda_array_interface__ is \"", typestr, "\", which numpy can't read"));
    }
  }();
  if (shape.elements() == 0) {
    return {py::array(type, std::vector<py::ssize_t>(shape.dims().begin(), shape.dims().end())), std::nullopt, std::nullopt};
  }
  dlpack::refuse_device(what, {dlpack::kCuda, -1}, cat(" (", typestr, ' ', shape, " at 0x", hex64(data.first), ", from __cuda_array_interface__)"));
}

}  // namespace paramwire::bindings
