// paramwire._bench, private: what `paramwire bench` measures paramwire against, and a reader of what was fetched. A module of its
// own, so that nothing of it is loaded with paramwire itself.
#include "baseline_tcp.h"

#include <pybind11/pybind11.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

namespace py = pybind11;

namespace {

// Contiguous bytes of any object for as long as this lives.
class Bytes {
 public:
  Bytes(const py::object& source, bool writable) {
    if (PyObject_GetBuffer(source.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

void raise_os_error(int error_number) {
  errno = error_number;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

// glibc's memcpy, once.
void copy(const py::object& target, const py::object& source) {
  const Bytes to(target, true);
  const Bytes from(source, false);
  if (to.size() != from.size()) {
    throw py::value_error("target has " + std::to_string(to.size()) + " bytes, source " + std::to_string(from.size()));
  }
  const py::gil_scoped_release release;
  std::memcpy(to.data(), from.data(), from.size());
}

// Reads every byte, as a consumer of fetched weights would; the sum keeps the reading from being optimised away.
std::uint64_t read_all(const py::object& source) {
  const Bytes from(source, false);
  const py::gil_scoped_release release;
  const auto* at = static_cast<const unsigned char*>(from.data());
  std::uint64_t sums[4] = {};
  std::size_t done = 0;
  for (; done + 32 <= from.size(); done += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word;
      std::memcpy(&word, at + done + 8 * lane, sizeof word);
      sums[lane] += word;
    }
  }
  for (; done < from.size(); ++done) sums[0] += at[done];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

void tcp_options(int fd) {
  if (const int error = baseline_tcp_options(fd); error != 0) raise_os_error(error);
}

void tcp_serve(int fd, const py::object& region) {
  const Bytes from(region, false);
  int error = 0;
  {
    const py::gil_scoped_release release;
    error = baseline_tcp_serve(fd, from.data(), from.size());
  }
  if (error != 0) raise_os_error(error);
}

void tcp_fetch(int fd, std::uint64_t offset, const py::object& target) {
  const Bytes to(target, true);
  int error = 0;
  {
    const py::gil_scoped_release release;
    error = baseline_tcp_fetch(fd, offset, to.data(), to.size());
  }
  if (error != 0) raise_os_error(error);
}

}  // namespace

PYBIND11_MODULE(_bench, module) {
  module.def("copy", &copy, py::arg("target"), py::arg("source"));
  module.def("read", &read_all, py::arg("source"));
  module.def("tcp_options", &tcp_options, py::arg("fd"));
  module.def("tcp_serve", &tcp_serve, py::arg("fd"), py::arg("region"));
  module.def("tcp_fetch", &tcp_fetch, py::arg("fd"), py::arg("offset"), py::arg("target"));
}
