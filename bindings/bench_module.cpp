// paramwire._bench, private: what `paramwire bench` measures paramwire against, and a reader of what was fetched. A module of its
// own, so that nothing of it is loaded with paramwire itself.
#include "baseline_tcp.h"
#include "baseline_udp.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
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

// Milliseconds for the C side; at least one, because 0 means no limit there.
std::uint32_t in_ms(double seconds) {
  if (!(seconds > 0 && seconds <= 86400)) throw py::value_error("a time-out is above 0 and at most a day");
  return std::max(1U, static_cast<std::uint32_t>(seconds * 1000));
}

void tcp_options(int fd, const std::optional<double>& timeout) {
  if (const int error = baseline_tcp_options(fd, timeout ? in_ms(*timeout) : 0); error != 0) raise_os_error(error);
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

// Calls of one client take turns by their caller's care.
class UdpClient {
 public:
  UdpClient(int fd, bool segmented, bool spin, double timeout) : timeout_ms_(in_ms(timeout)) {
    if (const int error = baseline_udp_open(&client_, fd, segmented, spin); error != 0) raise_os_error(error);
  }

  void fetch(std::uint64_t offset, const py::object& target) {
    const Bytes to(target, true);
    int error = 0;
    {
      const py::gil_scoped_release release;
      error = baseline_udp_fetch(&client_, offset, to.data(), to.size(), timeout_ms_);
    }
    if (error != 0) raise_os_error(error);
  }

  py::dict stats() const {
    using namespace py::literals;
    return py::dict("retries"_a = client_.retries, "lost_datagrams"_a = client_.lost_datagrams, "late_datagrams"_a = client_.late_datagrams,
                    "window_chunks"_a = client_.window, "receive_buffer_bytes"_a = client_.receive_buffer_bytes, "segment_bytes"_a = client_.segment);
  }

 private:
  baseline_udp_client client_{};
  std::uint32_t timeout_ms_;
};

void udp_serve(int fd, const py::object& region) {
  const Bytes from(region, false);
  int error = 0;
  {
    const py::gil_scoped_release release;
    error = baseline_udp_serve(fd, from.data(), from.size());
  }
  if (error != 0) raise_os_error(error);
}

}  // namespace

PYBIND11_MODULE(_bench, module) {
  module.def("copy", &copy, py::arg("target"), py::arg("source"));
  module.def("read", &read_all, py::arg("source"));
  module.def("tcp_options", &tcp_options, py::arg("fd"), py::arg("timeout") = std::nullopt);
  module.def("tcp_serve", &tcp_serve, py::arg("fd"), py::arg("region"));
  module.def("tcp_fetch", &tcp_fetch, py::arg("fd"), py::arg("offset"), py::arg("target"));
  py::class_<UdpClient>(module, "UdpClient")
      .def(py::init<int, bool, bool, double>(), py::arg("fd"), py::kw_only(), py::arg("segmented"), py::arg("spin"), py::arg("timeout"))
      .def("fetch", &UdpClient::fetch, py::arg("offset"), py::arg("target"))
      .def("stats", &UdpClient::stats);
  module.def("udp_serve", &udp_serve, py::arg("fd"), py::arg("region"));
}
