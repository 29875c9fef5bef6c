#include "dlpack.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "view.hpp"

#include "paramwire/base/text.hpp"

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

// ---------------------------------------------------------------- bytes

bool ViewBytes::hold() {
  const std::lock_guard lock(mutex_);
  if (released_ || ending_) return false;
  ++exports_;
  return true;
}

std::optional<BlockView> ViewBytes::drop() {
  const std::lock_guard lock(mutex_);
  return --exports_ == 0 && ending_ ? end() : std::nullopt;
}

std::optional<BlockView> ViewBytes::leave() {
  const std::lock_guard lock(mutex_);
  ending_ = true;
  return exports_ == 0 ? end() : std::nullopt;
}

std::optional<BlockView> ViewBytes::release(std::size_t& exports) {
  const std::lock_guard lock(mutex_);
  exports = exports_;
  return exports_ == 0 ? end() : std::nullopt;
}

bool ViewBytes::released() const {
  const std::lock_guard lock(mutex_);
  return released_;
}

const std::byte* ViewBytes::data() const noexcept {
  static constexpr std::byte kNothing{};
  return bytes_.empty() ? &kNothing : bytes_.data();
}

std::optional<BlockView> ViewBytes::end() {
  if (std::exchange(released_, true)) return std::nullopt;
  return std::move(view_);
}

namespace {

// Gives a block's bytes back without the GIL, which the caller has.
void free_bytes(std::optional<BlockView> view) {
  if (view) without_gil([&] { view->release(); });
}

// What a DLPack consumer holds. Needs no Python, so that it may end in any thread and at any time.
class ViewKeeper final : public dlpack::Keeper {
 public:
  explicit ViewKeeper(std::shared_ptr<ViewBytes> bytes) : bytes_(std::move(bytes)) {}
  ViewKeeper(const ViewKeeper&) = delete;
  ViewKeeper& operator=(const ViewKeeper&) = delete;
  ~ViewKeeper() override { const auto ended = bytes_->drop(); }

 private:
  std::shared_ptr<ViewBytes> bytes_;
};

}  // namespace

// ---------------------------------------------------------------- view

PyView::PyView(BlockView view, Snapshot::Layout layout)
    : bytes_(std::make_shared<ViewBytes>(std::move(view))), layout_(layout) {
  fill_buffer_shape();
}

PyView::~PyView() { leave(); }

void PyView::release() {
  std::size_t exports = 0;
  free_bytes(bytes_->release(exports));
  if (exports > 0) {
    throw py::buffer_error(cat("the view has ", exports, " exported buffers (arrays, memoryviews or DLPack tensors): delete them first"));
  }
}

void PyView::leave() { free_bytes(bytes_->leave()); }

py::object PyView::array(py::handle self) const {
  // The memoryview is the export that this array holds.
  const auto base = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(self.ptr()));
  if (!base) throw py::error_already_set();
  return array_over(layout_.dtype, layout_.shape, bytes_->data(), base);
}

py::capsule PyView::dlpack(py::handle stream, py::handle max_version, py::handle dl_device, py::handle copy) const {
  const dlpack::Terms terms = dlpack::terms_from(stream, max_version, dl_device, copy, true);
  if (!bytes_->hold()) throw py::buffer_error("the view is released");
  auto keeper = std::make_unique<ViewKeeper>(bytes_);
  dlpack::Export out{.data = bytes_->data(), .dtype = layout_.dtype, .shape = {}, .strides = {}, .read_only = true, .copied = false};
  out.shape.assign(layout_.shape.dims().begin(), layout_.shape.dims().end());
  out.strides = dlpack::compact_strides(out.shape);
  return dlpack::give(out, terms, std::move(keeper));
}

int PyView::get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  if ((flags & PyBUF_WRITABLE) == PyBUF_WRITABLE) return buffer_error("a view is read-only: fetch a copy to write to");
  if (!bytes_->hold()) return buffer_error("the view is released");
  buffer->buf = const_cast<std::byte*>(bytes_->data());
  buffer->len = static_cast<Py_ssize_t>(bytes_->size());
  buffer->readonly = 1;
  buffer->itemsize = item_bytes_;
  buffer->format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? const_cast<char*>(format_) : nullptr;
  buffer->ndim = (flags & PyBUF_ND) == PyBUF_ND ? static_cast<int>(shape_.size()) : 1;
  buffer->shape = (flags & PyBUF_ND) == PyBUF_ND ? shape_.data() : nullptr;
  buffer->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? strides_.data() : nullptr;
  buffer->suboffsets = nullptr;
  buffer->internal = nullptr;
  buffer->obj = py::handle(self).inc_ref().ptr();
  return 0;
}

void PyView::drop_buffer() { free_bytes(bytes_->drop()); }

void bind_view(py::module_& module) {
  const auto none = py::none();
  py::class_<PyView>(module, "View", py::is_final(), py::custom_type_setup(&install_buffer))
      .def_property_readonly("array", [](py::handle self) { return self.cast<PyView&>().array(self); })
      .def_property_readonly("verified_now", &PyView::verified_now)
      .def_property_readonly("dtype", [](const PyView& self) { return text(dtype_name(self.layout().dtype)); })
      .def_property_readonly("shape", [](const PyView& self) { return shape_tuple(self.layout().shape); })
      .def_property_readonly("nbytes", [](const PyView& self) { return self.layout().bytes; })
      .def_property_readonly("released", &PyView::released)
      .def("release", &PyView::release)
      .def("__dlpack__", &PyView::dlpack, py::kw_only(), py::arg("stream") = none, py::arg("max_version") = none, py::arg("dl_device") = none,
           py::arg("copy") = none)
      .def("__dlpack_device__", [](const PyView& /*self*/) { return dlpack::host_device(); })
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyView& self, const py::object&, const py::object&, const py::object&) { self.leave(); }, py::arg("type"),
           py::arg("value"), py::arg("traceback"));
}

}  // namespace paramwire::bindings
