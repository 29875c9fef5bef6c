#include "arrays.hpp"
#include "dlpack.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"

#include <memory>
#include <utility>

namespace paramwire::bindings {

namespace {

// A numpy array with its label, for consumers of DLPack: numpy itself refuses bf16 and 8-bit floats.
class Labelled {
 public:
  Labelled(py::handle object, py::handle dtype, py::handle shape) : given_(given_from("array", object)) {
    dtype_ = choose_label("array", given_, dtype);
    const py::dtype type = given_.array.dtype();
    if (dtype_bits(dtype_) < 8 || static_cast<std::uint64_t>(type.itemsize()) * 8 != dtype_bits(dtype_)) {
      relabel_bytes(shape);
    } else if (!shape.is_none()) {
      raise_invalid("shape belongs to bytes that are labelled as another type: reshape the array instead");
    } else {
      set_layout(type);
    }
  }

  py::capsule dlpack(py::handle stream, py::handle max_version, py::handle dl_device, py::handle copy) const {
    dlpack::Export out{.data = nullptr, .dtype = dtype_, .shape = shape_, .strides = strides_, .read_only = !given_.array.writeable(), .copied = false};
    dlpack::Terms terms = dlpack::terms_from(stream, max_version, dl_device, copy, out.read_only);
    py::array array = given_.array;
    if (std::exchange(terms.copy, false)) {
      array = array.attr("copy")("C");
      out.strides = dlpack::compact_strides(shape_);
      out.copied = true;
    }
    out.data = static_cast<const std::byte*>(array.data());
    return dlpack::give(out, terms, std::make_unique<dlpack::PythonKeeper>(array));
  }

 private:
  void set_layout(const py::dtype& type) {
    const py::array& array = given_.array;
    if (type.byteorder() == '>') raise_invalid("array is big-endian, which DLPack can't say: convert it first");
    for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
      if (array.strides(axis) % type.itemsize() != 0) raise_invalid(cat("axis ", axis, " of the array has a stride that is no multiple of its elements"));
      shape_.push_back(array.shape(axis));
      strides_.push_back(array.strides(axis) / type.itemsize());
    }
  }

  void relabel_bytes(py::handle shape) {
    if (!shape.is_none()) given_.shape = shape_from(shape);
    if (!given_.shape) raise_invalid(cat("array: bytes with the label ", dtype_name(dtype_), " need shape=, the shape in elements"));
    const std::uint64_t bytes = tensor_bytes(dtype_, *given_.shape);
    if (static_cast<std::uint64_t>(given_.array.nbytes()) != bytes) {
      raise_invalid(cat("array has ", given_.array.nbytes(), " bytes, ", dtype_name(dtype_), ' ', *given_.shape, " has ", bytes));
    }
    if (!given_.array.attr("flags").attr("c_contiguous").cast<bool>()) raise_invalid("array: bytes with a label must be C-contiguous");
    shape_.assign(given_.shape->dims().begin(), given_.shape->dims().end());
    strides_ = dlpack::compact_strides(shape_);
  }

  Given given_;
  DType dtype_ = DType::kU8;
  std::vector<std::int64_t> shape_, strides_;  // in elements
};

}  // namespace

void bind_dlpack(py::module_& module) {
  const auto none = py::none();
  py::class_<Labelled>(module, "Labelled", py::is_final())
      .def(py::init<py::handle, py::handle, py::handle>(), py::arg("array"), py::kw_only(), py::arg("dtype") = none, py::arg("shape") = none)
      .def("__dlpack__", &Labelled::dlpack, py::kw_only(), py::arg("stream") = none, py::arg("max_version") = none, py::arg("dl_device") = none,
           py::arg("copy") = none)
      .def("__dlpack_device__", [](const Labelled&) { return dlpack::host_device(); });
}

}  // namespace paramwire::bindings
