// paramwire._core: the table of contents of the bindings. Each bind_*.cpp registers one layer; python/paramwire/_core.pyi types
// and documents it.
#include "module.hpp"

#include "convert.hpp"

#include <pybind11/pybind11.h>

PYBIND11_MODULE(_core, module) {
  using namespace paramwire::bindings;
  module.attr("__version__") = PARAMWIRE_VERSION;
  bind_errors(module);
  bind_checksums(module);
  bind_trace(module);
  bind_available(module);
  bind_publish(module);
  bind_server(module);
  bind_view(module);
  bind_dlpack(module);
  bind_client(module);
  bind_snapshot(module);
  bind_graph(module);
  bind_engine(module);
}
