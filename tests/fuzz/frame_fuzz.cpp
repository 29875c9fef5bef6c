// The frame parser: the same frames however the stream is cut, bodies whole and in order, and nothing after an error.
#include "fuzz.hpp"

#include "paramwire/wire/frame.hpp"
#include "support/frame_feed.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paramwire::fuzz {
namespace {

// Bodies announced beyond this are dropped by the target, as a server drops what it refuses.
constexpr std::uint64_t kBodyMax = 4096;

struct Seen {
  std::vector<std::byte> bytes;  // of heads, metas and bodies, in order
  std::uint64_t frames = 0;
  bool failed = false;
  bool operator==(const Seen&) const = default;
};

Seen parse(std::span<const std::byte> input, std::size_t step) {
  Seen seen;
  FrameParser parser;
  std::vector<std::byte> body;
  const auto add = [&](std::span<const std::byte> bytes) { seen.bytes.insert(seen.bytes.end(), bytes.begin(), bytes.end()); };
  const auto on_event = [&](FrameParser::Event event) {
    if (event == FrameParser::Event::kHead) {
      ++seen.frames;
      require(verify(parser.header()) == nullptr, "a header that is shown was checked");
      add(std::as_bytes(std::span(&parser.header(), 1)));
      add(parser.meta());
      const std::uint64_t size = parser.header().body_size;
      if (size == 0) return true;
      FrameParser::BodyTarget target;
      body.assign(static_cast<std::size_t>(std::min(size, kBodyMax)), std::byte{0});
      target.parts[0] = std::span(body).first(body.size() / 3);
      target.parts[2] = std::span(body).subspan(body.size() / 3);
      target.discard = size - body.size();
      parser.set_body(target);
    }
    if (event == FrameParser::Event::kBody) {
      const auto part = parser.body_part();
      require(part.data() >= body.data() && part.data() + part.size() <= body.data() + body.size(), "a body lands in its target");
      add(part);
    }
    return true;
  };
  seen.failed = !testing::feed(parser, input, on_event, step);
  return seen;
}

}  // namespace

void run(std::span<const std::byte> input) {
  const Seen whole = parse(input, input.size() + 1);
  require(whole == parse(input, 1), "byte by byte is the same");
  require(whole == parse(input, 7), "in odd pieces it is the same");
}

}  // namespace paramwire::fuzz
