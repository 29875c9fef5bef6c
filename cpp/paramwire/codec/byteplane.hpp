// The codec kPlanes: byte planes, each raw, constant or Huffman-coded, whichever is smallest.
//
// Trained weights have exponents of about 2.6 bits of entropy and mantissas of nearly all of theirs, so a float's bytes are
// separated by place. Its sign is random too: the element is turned left by one bit first, so that the exponent has a byte of its
// own (bfloat16, float32) and the sign goes to the mantissa's lowest. A plane that would lose less than 1/64 by coding is stored raw:
// decoding it would take longer than sending what it saves.
//
// Code tables stay from one chunk to the next where that costs less than 0.3 %; a decoder builds its table (10 us, as long as
// decoding a chunk) only when the description changes.
#pragma once

#include "paramwire/codec/codec.hpp"

namespace paramwire {

const Codec& byteplane_codec() noexcept;

// How the elements of a dtype are cut. Both parts of a complex number are elements of their own.
struct PlaneShape {
  std::size_t width;  // bytes of an element, and planes
  bool rotate;        // floats with a sign in their highest bit, of 2 bytes and more
};
PlaneShape plane_shape(DType dtype) noexcept;

}  // namespace paramwire
