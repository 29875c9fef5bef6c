// Histograms of the core as Python values.
#pragma once

#include "paramwire/base/metrics.hpp"

#include <pybind11/pybind11.h>

namespace paramwire::bindings {

// By name, a Durations of python/paramwire/_types.py, in seconds.
pybind11::dict durations_dict(const NamedHistograms& histograms);

}  // namespace paramwire::bindings
