#pragma once

#include "paramwire/compute/graph.hpp"

namespace paramwire::bindings {

struct PyGraph {
  Graph graph;
};

}  // namespace paramwire::bindings
