#include "convert.hpp"
#include "gil.hpp"
#include "module.hpp"

#include "paramwire/server/server.hpp"

#include <string>

namespace paramwire::bindings {

void bind_key(py::module_& module) {
  // What leaves the core of a key is its id.
  const auto new_key = [](const std::string& path) {
    key_path(path);
    return take(without_gil([&] { return ClusterKey::create(path); }))->id();
  };
  const auto key_id = [](const std::string& path) {
    key_path(path);
    return take(without_gil([&] { return ClusterKey::load(path); }))->id();
  };
  module.def("new_key", new_key, py::arg("path"));
  module.def("key_id", key_id, py::arg("path"));
}

}  // namespace paramwire::bindings
