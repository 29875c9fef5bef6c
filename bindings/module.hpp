// What each bind_*.cpp registers, in the order in which module.cpp calls them: types before the signatures that name them.
#pragma once

#include <pybind11/pybind11.h>

namespace paramwire::bindings {

void bind_checksums(pybind11::module_& module);
void bind_delta(pybind11::module_& module);
void bind_trace(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_available(pybind11::module_& module);
void bind_key(pybind11::module_& module);
void bind_publish(pybind11::module_& module);
void bind_server(pybind11::module_& module);
void bind_view(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_client(pybind11::module_& module);
void bind_snapshot(pybind11::module_& module);
void bind_mirror(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_graph(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_timing(pybind11::module_& module);
void bind_codec_timing(pybind11::module_& module);

}  // namespace paramwire::bindings
