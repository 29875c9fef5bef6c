// What the sources of the messages share. Not for others.
#pragma once

#include "paramwire/base/text.hpp"
#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <string_view>

namespace paramwire {

inline Bytes message_frame(FrameType type, std::uint64_t request, const Bytes& meta, std::uint64_t body_size = 0) {
  Bytes out;
  out.reserve(sizeof(FrameHeader) + meta.size());
  append_frame(out, type, request, meta, body_size);
  return out;
}

inline Error bad_message(std::string_view message, std::string_view field) {
  return Error(Code::kCorrupt, cat("message ", message, " refused: bad ", field));
}

}  // namespace paramwire
