// A stream of bytes through a FrameParser, as an edge gives it what it received.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/wire/frame.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

namespace paramwire::testing {

// Gives `parser` the bytes, at most `step` at a time, and `on_event` each event but kNeedBytes. Of a head with a body it sets the target.
// returns: false when the parser refused the stream or on_event returned false, which both end it
template <typename OnEvent>
bool feed(FrameParser& parser, std::span<const std::byte> bytes, OnEvent&& on_event, std::size_t step = SIZE_MAX) {
  while (!bytes.empty()) {
    const auto space = parser.receive_space();
    const std::size_t n = std::min({space.size(), bytes.size(), step});
    if (n == 0) std::abort();  // no space although bytes are wanted: nothing could ever go on
    std::memcpy(space.data(), bytes.data(), n);
    parser.received(n);
    bytes = bytes.subspan(n);
    for (;;) {
      const auto event = parser.next();
      if (!event.ok()) return false;
      if (*event == FrameParser::Event::kNeedBytes) break;
      if (!on_event(*event)) return false;
    }
  }
  return true;
}

// One event of `parser` into a server's handlers (server/handlers.hpp).  returns: false when the connection must close
template <typename Handlers, typename Session>
bool handle(Handlers& handlers, Session& session, FrameParser& parser, FrameParser::Event event, Micros now) {
  if (event == FrameParser::Event::kHead) {
    FrameParser::BodyTarget target;
    if (!handlers.on_head(session, parser.header(), parser.meta(), target, now).ok()) return false;
    if (parser.header().body_size > 0) parser.set_body(target);
  }
  if (event == FrameParser::Event::kBody) handlers.on_body(session, parser.body_part());
  return event != FrameParser::Event::kEnd || handlers.on_end(session, parser.header(), now).ok();
}

}  // namespace paramwire::testing
