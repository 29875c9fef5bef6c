// The bytes of any object with a buffer.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>

namespace paramwire::bindings {

// Read access to any object's contiguous bytes for as long as this lives. Needs the GIL to come and to go.
// errors: TypeError when there is no buffer, ValueError when it is not contiguous
class BytesView {
 public:
  explicit BytesView(const pybind11::object& source) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    if (PyErr_ExceptionMatches(PyExc_BufferError) == 0) throw pybind11::error_already_set();
    PyErr_Clear();
    throw pybind11::value_error("the buffer is not contiguous: pass a contiguous copy of it");
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

}  // namespace paramwire::bindings
