#include "paramwire/wire/frame.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire {

namespace {
// Holds many small frames per receive; bodies larger than what is left of it go straight to their target.
constexpr std::size_t kBufferBytes = 64 * 1024;
}  // namespace

std::uint32_t frame_header_crc(const FrameHeader& header) noexcept {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(FrameHeader, header_crc)));
}

const char* verify(const FrameHeader& header) noexcept {
  if (header.magic != kFrameMagic) return "magic";
  if (header.header_crc != frame_header_crc(header)) return "header CRC";
  if (header.protocol != kProtocolVersion) return "protocol";
  if (header.flags != 0 || header.reserved != 0) return "flags or reserved not zero";
  if (header.meta_size > kMaxMetaBytes) return "meta size over limit";
  return nullptr;
}

void append_frame(std::vector<std::byte>& out, FrameType type, std::uint64_t request, std::span<const std::byte> meta,
                  std::uint64_t body_size) {
  assert(meta.size() <= kMaxMetaBytes);
  FrameHeader header{};
  header.magic = kFrameMagic;
  header.protocol = kProtocolVersion;
  header.type = static_cast<std::uint8_t>(type);
  header.request = request;
  header.meta_size = static_cast<std::uint32_t>(meta.size());
  header.body_size = body_size;
  header.meta_crc = crc32c(meta);
  header.header_crc = frame_header_crc(header);
  const auto bytes = std::as_bytes(std::span(&header, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
  out.insert(out.end(), meta.begin(), meta.end());
}

FrameParser::FrameParser() : buffer_(kBufferBytes) {}

std::span<std::byte> FrameParser::body_space() noexcept {
  while (body_index_ < body_.parts.size() && part_at_ == body_.parts[body_index_].size()) {
    ++body_index_;
    part_at_ = 0;
  }
  if (body_index_ == body_.parts.size()) return {};
  return body_.parts[body_index_].subspan(static_cast<std::size_t>(part_at_));
}

std::span<std::byte> FrameParser::receive_space() noexcept {
  direct_ = false;
  if (state_ == State::kBody && buffered() == 0) {
    const auto space = body_space();
    if (!space.empty()) {
      direct_ = true;
      body_part_ = {};  // told already; if nothing comes, next() must not tell it again
      return space.first(std::min(space.size(), kReceiveStep));
    }
  }
  if (begin_ == end_) begin_ = end_ = 0;
  if (end_ == buffer_.size()) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  return std::span(buffer_).subspan(end_);
}

void FrameParser::received(std::size_t size) noexcept {
  if (!direct_) {
    end_ += size;
    return;
  }
  body_part_ = body_.parts[body_index_].subspan(static_cast<std::size_t>(part_at_), size);
  part_at_ += size;
  body_left_ -= size;
}

bool FrameParser::take(std::span<std::byte> target, std::size_t& have) {
  const std::size_t n = std::min(target.size() - have, buffered());
  if (n > 0) std::memcpy(target.data() + have, buffer_.data() + begin_, n);
  begin_ += n;
  have += n;
  return have == target.size();
}

Result<FrameParser::Event> FrameParser::next() {
  switch (state_) {
    case State::kEnd:
      state_ = State::kHeader;
      have_ = 0;
      [[fallthrough]];
    case State::kHeader: {
      if (!take(std::as_writable_bytes(std::span(&header_, 1)), have_)) return Event::kNeedBytes;
      if (const char* reason = verify(header_)) {
        return Error(Code::kCorrupt, cat("frame refused: ", reason, " (type ", header_.type, ", protocol ", header_.protocol,
                                         ", this side speaks ", kProtocolVersion, ")"));
      }
      meta_.resize(header_.meta_size);
      have_ = 0;
      state_ = State::kMeta;
      [[fallthrough]];
    }
    case State::kMeta:
      if (!take(meta_, have_)) return Event::kNeedBytes;
      if (crc32c(meta_) != header_.meta_crc) {
        return Error(Code::kCorrupt, cat("frame refused: meta CRC (type ", header_.type, ", ", header_.meta_size, " bytes)"));
      }
      state_ = header_.body_size > 0 ? State::kBodyWanted : State::kBody;
      body_ = {};
      body_index_ = 0;
      part_at_ = 0;
      body_left_ = 0;
      body_part_ = {};
      return Event::kHead;
    case State::kBodyWanted:
      return Error(Code::kInternal, cat("no target, or one of another size, set for a body of ", header_.body_size, " bytes (frame type ", header_.type, ")"));
    case State::kBody: return next_body();
  }
  return Error(Code::kInternal, "frame parser state");
}

void FrameParser::set_body(const BodyTarget& target) noexcept {
  if (state_ != State::kBodyWanted) return;  // no body, or its target is set
  std::uint64_t left = header_.body_size;
  for (const auto& part : target.parts) {  // subtracting: a sum could wrap to the right value
    if (part.size() > left) return;        // next() reports it: still kBodyWanted
    left -= part.size();
  }
  if (target.discard != left) return;
  body_ = target;
  body_index_ = 0;
  part_at_ = 0;
  body_left_ = header_.body_size;
  state_ = State::kBody;
}

Result<FrameParser::Event> FrameParser::next_body() {
  if (!body_part_.empty() && direct_) {  // received straight into place
    direct_ = false;
    return Event::kBody;
  }
  if (body_left_ == 0) {
    state_ = State::kEnd;
    return Event::kEnd;
  }
  if (buffered() == 0) return Event::kNeedBytes;
  const auto space = body_space();
  if (space.empty()) {  // discarding
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(body_left_, buffered()));
    begin_ += n;
    body_left_ -= n;
    if (body_left_ > 0) return Event::kNeedBytes;
    state_ = State::kEnd;
    return Event::kEnd;
  }
  const std::size_t n = std::min(space.size(), buffered());
  std::memcpy(space.data(), buffer_.data() + begin_, n);
  body_part_ = space.first(n);
  begin_ += n;
  part_at_ += n;
  body_left_ -= n;
  return Event::kBody;
}

}  // namespace paramwire
