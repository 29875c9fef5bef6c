// One wire message, named by FUZZ_MESSAGE: whatever decodes is what its encoder writes. So decode() refuses every other form, and
// nothing that it reads is lost.
#include "fuzz.hpp"

#include "paramwire/wire/delta_message.hpp"
#include "paramwire/wire/message.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace paramwire::fuzz {
namespace {

constexpr std::uint64_t kRequest = 7;
constexpr std::size_t kHeaderBytes = sizeof(FrameHeader);

template <typename Message>
Bytes encode(const Message& message) {
  // Types that share a layout: any of them will do, the meta is the same.
  if constexpr (requires { message.encode(kRequest); }) return message.encode(kRequest);
  else if constexpr (requires { message.encode(kRequest, std::uint64_t{0}); }) return message.encode(kRequest, 0);
  else if constexpr (std::is_same_v<Message, LeaseMessage>) return message.encode(FrameType::kRenew, kRequest);
  else if constexpr (std::is_same_v<Message, ArenaMessage>) return message.encode(FrameType::kArenaFd, kRequest);
  else if constexpr (std::is_same_v<Message, PublishIdMessage>) return message.encode(FrameType::kPublishId, kRequest);
  else return message.encode(FrameType::kAlias, kRequest);
}

}  // namespace

void run(std::span<const std::byte> input) {
  const auto message = FUZZ_MESSAGE::decode(input);
  if (!message.ok()) {
    require(message.error().code() == Code::kCorrupt, "a refusal says corrupt");
    require(!message.error().message().empty(), "a refusal names a reason");
    return;
  }
  const Bytes frame = encode(*message);
  require(frame.size() == kHeaderBytes + input.size(), "an encoding has one length");
  require(std::equal(input.begin(), input.end(), frame.begin() + kHeaderBytes), "an encoding has one form");
}

}  // namespace paramwire::fuzz
