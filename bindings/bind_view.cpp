#include "client.hpp"
#include "gil.hpp"
#include "module.hpp"

#include <utility>

namespace paramwire::bindings {

namespace {

// struct-module letters of PEP 3118, standard sizes being native ones here. bf16 and 8-bit floats have none: they are shown as
// the unsigned integer of their width, as arrays are without ml_dtypes.
const char* buffer_format(DType dtype) {
  switch (dtype) {
    case DType::kI8: return "b";
    case DType::kU16: case DType::kBF16: return "H";
    case DType::kI16: return "h";
    case DType::kU32: return "I";
    case DType::kI32: return "i";
    case DType::kU64: return "Q";
    case DType::kI64: return "q";
    case DType::kF16: return "e";
    case DType::kF32: return "f";
    case DType::kF64: return "d";
    case DType::kBool: return "?";
    case DType::kC64: return "Zf";
    case DType::kC128: return "Zd";
    default: return "B";
  }
}

int buffer_error(const char* message) {
  PyErr_SetString(PyExc_BufferError, message);
  return -1;
}

extern "C" int view_get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  buffer->obj = nullptr;
  try {
    return py::handle(self).cast<PyView&>().get_buffer(self, buffer, flags);
  } catch (const std::exception& error) {
    return buffer_error(error.what());
  }
}

extern "C" void view_drop_buffer(PyObject* self, Py_buffer*) {
  // An object that exported a buffer casts: it did so then.
  py::handle(self).cast<PyView&>().drop_buffer();
}

void install_buffer(PyHeapTypeObject* type) {
  type->as_buffer.bf_getbuffer = view_get_buffer;
  type->as_buffer.bf_releasebuffer = view_drop_buffer;
  type->ht_type.tp_as_buffer = &type->as_buffer;
}

}  // namespace

void PyView::fill_buffer_shape() {
  format_ = buffer_format(layout_.dtype);
  if (dtype_bits(layout_.dtype) < 8) {
    shape_ = {static_cast<Py_ssize_t>(layout_.bytes)};
  } else {
    item_bytes_ = static_cast<Py_ssize_t>(dtype_bits(layout_.dtype) / 8);
    shape_.assign(layout_.shape.dims().begin(), layout_.shape.dims().end());
  }
  strides_.resize(shape_.size());
  Py_ssize_t stride = item_bytes_;
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    strides_[axis] = stride;
    stride *= shape_[axis];
  }
}

PyView::~PyView() {
  if (!released_) free_bytes();  // exports hold a reference, so there are none
}

void PyView::free_bytes() {
  released_ = true;
  without_gil([this] { view_.release(); });
}

void PyView::release() {
  if (released_) return;
  if (exports_ > 0) {
    throw py::buffer_error("the view has " + std::to_string(exports_) + " exported buffers (arrays or memoryviews): delete them first");
  }
  free_bytes();
}

void PyView::leave() {
  if (released_) return;
  ending_ = true;
  if (exports_ == 0) free_bytes();
}

py::object PyView::array(py::handle self) const {
  // The memoryview is the export that this array holds.
  const auto base = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(self.ptr()));
  if (!base) throw py::error_already_set();
  static constexpr std::byte kNothing{};
  const std::byte* data = view_.bytes().empty() ? &kNothing : view_.bytes().data();
  return array_over(layout_.dtype, layout_.shape, data, base);
}

int PyView::get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  if (released_ || ending_) return buffer_error("the view is released");
  if ((flags & PyBUF_WRITABLE) == PyBUF_WRITABLE) return buffer_error("a view is read-only: fetch a copy to write to");
  static constexpr std::byte kNothing{};
  const std::byte* data = view_.bytes().empty() ? &kNothing : view_.bytes().data();
  buffer->buf = const_cast<std::byte*>(data);
  buffer->len = static_cast<Py_ssize_t>(view_.bytes().size());
  buffer->readonly = 1;
  buffer->itemsize = item_bytes_;
  buffer->format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? const_cast<char*>(format_) : nullptr;
  buffer->ndim = (flags & PyBUF_ND) == PyBUF_ND ? static_cast<int>(shape_.size()) : 1;
  buffer->shape = (flags & PyBUF_ND) == PyBUF_ND ? shape_.data() : nullptr;
  buffer->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? strides_.data() : nullptr;
  buffer->suboffsets = nullptr;
  buffer->internal = nullptr;
  buffer->obj = py::handle(self).inc_ref().ptr();
  ++exports_;
  return 0;
}

void PyView::drop_buffer() {
  if (--exports_ == 0 && ending_ && !released_) free_bytes();
}

void bind_view(py::module_& module) {
  py::class_<PyView>(module, "View", py::is_final(), py::custom_type_setup(&install_buffer))
      .def_property_readonly("array", [](py::handle self) { return self.cast<PyView&>().array(self); })
      .def_property_readonly("verified_now", &PyView::verified_now)
      .def_property_readonly("dtype", [](const PyView& self) { return text(dtype_name(self.layout().dtype)); })
      .def_property_readonly("shape", [](const PyView& self) { return shape_tuple(self.layout().shape); })
      .def_property_readonly("nbytes", [](const PyView& self) { return self.layout().bytes; })
      .def_property_readonly("released", &PyView::released)
      .def("release", &PyView::release)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyView& self, const py::object&, const py::object&, const py::object&) { self.leave(); }, py::arg("type"),
           py::arg("value"), py::arg("traceback"));
}

}  // namespace paramwire::bindings
