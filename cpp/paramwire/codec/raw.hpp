// The codec kRaw: stored bytes are the raw bytes, without a frame. It checks sizes only.
#pragma once

#include "paramwire/codec/codec.hpp"

namespace paramwire {

const Codec& raw_codec() noexcept;

}  // namespace paramwire
