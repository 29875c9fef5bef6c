#include "gil.hpp"
#include "module.hpp"

#include "paramwire/base/crc.hpp"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace paramwire::bindings {

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

std::uint64_t crc64_of(const py::object& data, std::uint64_t before) {
  const BytesView view(data);
  return without_gil([&] { return crc64(view.bytes(), before); });
}

std::uint32_t crc32c_of(const py::object& data, std::uint32_t before) {
  const BytesView view(data);
  return without_gil([&] { return crc32c(view.bytes(), before); });
}

}  // namespace

void bind_checksums(py::module_& module) {
  module.def("crc64", &crc64_of, py::arg("data"), py::pos_only(), py::kw_only(), py::arg("before") = 0);
  module.def("crc32c", &crc32c_of, py::arg("data"), py::pos_only(), py::kw_only(), py::arg("before") = 0);
  module.def("crc_implementation", [] { return std::string(crc_implementation()); });
}

}  // namespace paramwire::bindings
