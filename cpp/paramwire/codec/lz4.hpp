// The codec kLz4: an LZ4 block (lz4 1.9, doc/lz4_Block_format.md) a chunk, for sparse and delta streams. On weights it saves
// nothing.
#pragma once

#include "paramwire/codec/codec.hpp"

namespace paramwire {

const Codec& lz4_codec() noexcept;
// Of the library that is linked: "1.9.4".
std::string_view lz4_version() noexcept;

}  // namespace paramwire
