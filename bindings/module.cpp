// paramwire._core: the table of contents of the bindings. Each bind_*.cpp registers one layer; python/paramwire/_core.pyi types it.
#include "paramwire/base/crc.hpp"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace py = pybind11;

namespace {

// Read access to any object's contiguous bytes for as long as this lives.
class BytesView {
 public:
  explicit BytesView(const py::object& source) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    if (PyErr_ExceptionMatches(PyExc_BufferError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw py::value_error("the buffer is not contiguous: pass a contiguous copy of it");
  }
  ~BytesView() { PyBuffer_Release(&view_); }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

std::uint64_t crc64(const py::object& data, std::uint64_t before) {
  const BytesView view(data);
  const py::gil_scoped_release release;
  return paramwire::crc64(view.bytes(), before);
}

std::uint32_t crc32c(const py::object& data, std::uint32_t before) {
  const BytesView view(data);
  const py::gil_scoped_release release;
  return paramwire::crc32c(view.bytes(), before);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = PARAMWIRE_VERSION;
  module.def("crc64", &crc64, py::arg("data"), py::pos_only(), py::kw_only(), py::arg("before") = 0);
  module.def("crc32c", &crc32c, py::arg("data"), py::pos_only(), py::kw_only(), py::arg("before") = 0);
  module.def("crc_implementation", [] { return std::string(paramwire::crc_implementation()); });
}
