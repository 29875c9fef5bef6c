#include "bytes_view.hpp"
#include "gil.hpp"
#include "module.hpp"

#include "paramwire/base/crc.hpp"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace paramwire::bindings {

namespace py = pybind11;

namespace {

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
