#include "convert.hpp"
#include "gil.hpp"
#include "module.hpp"

#include "paramwire/server/server.hpp"

#include <filesystem>
#include <string>

namespace paramwire::bindings {

void bind_key(py::module_& module) {
  // What leaves the core of a key is its id.
  const auto new_key = [](const std::filesystem::path& path) {
    return take(without_gil([name = key_path(path)] { return ClusterKey::create(name); }))->id();
  };
  const auto key_id = [](const std::filesystem::path& path) {
    return take(without_gil([name = key_path(path)] { return ClusterKey::load(name); }))->id();
  };
  module.def("new_key", new_key, py::arg("path"));
  module.def("key_id", key_id, py::arg("path"));
}

}  // namespace paramwire::bindings
