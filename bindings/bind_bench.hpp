#pragma once

#include <pybind11/pybind11.h>

// Adds the submodule `_bench` to `module`.
void bind_bench(pybind11::module_& module);
