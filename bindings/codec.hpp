// A block that is encoded, with the shape of its tensor.
#pragma once

#include "paramwire/codec/block.hpp"

namespace paramwire::bindings {

// What encode() gave back is never written again: arrays over its vectors keep it alive.
struct PyEncoded {
  EncodedBlock block;
  Shape shape;
};

}  // namespace paramwire::bindings
