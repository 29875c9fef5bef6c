// A publish to a server in another process: start / put / finish / abort over a connection of its own.
//
// Puts are pipelined: they go out while earlier ones are acknowledged, within a window. Each piece of a block is checked on
// its way out (CRC-64, hot in cache), and what the server says it stored must be the same: so a publish that finishes is
// one whose bytes arrived as they were given. One thread.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace paramwire {

class PublishLink {
 public:
  // errors: as connect_and_greet; kStale when `base` is not the newest version (any_base false); kBackpressure.
  static Result<std::unique_ptr<PublishLink>> open(const Endpoint& endpoint, const ClientId& client, bool any_base,
                                                   const std::optional<Version>& base, Micros deadline);

  Version version() const noexcept { return version_; }  // that finish will commit, if nobody is faster

  // Stages a block. `bytes` may be reused when this returns. The answer may come with a later call: an error then names the
  // tensor it is about. After an error the publish is over (aborted).
  // errors: kInvalid when `bytes` has another size than the part; kBackpressure when the server is full; kCorrupt when the
  //         server stored something else; kTimeout, kUnreachable.
  Status put(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, std::span<const std::byte> bytes, Micros deadline);
  Status remove(std::string_view tensor, Micros deadline);
  Status alias(std::string_view tensor, std::string_view target, Micros deadline);
  // Waits for every acknowledgement, then commits. When the reply is lost it connects once more and asks again for the same
  // publish id, which the server answers with the same version. Repeated after success it returns that version.
  // errors: kStale when somebody else published since start; kInvalid for parts that overlap or disagree.
  Result<Version> finish(Micros deadline);
  // Tells the server, if it can be told; else its idle time ends the publish. Idempotent.
  void abort() noexcept;

 private:
  struct Unacknowledged {
    std::uint64_t request = 0;
    BlockId block;
    std::uint64_t crc64 = 0;
    std::uint64_t bytes = 0;
    std::string tensor;
  };
  PublishLink(const Endpoint& endpoint, const ClientId& client, GreetedSocket greeted);
  Status check_open() const;
  Status over(Error error);
  Status send(std::span<const std::byte> bytes, Micros deadline);
  Status flush(Micros deadline);
  Status receive_some(Micros deadline);
  Status take_answers();
  Status on_put_done(std::span<const std::byte> meta);
  Status drain(std::size_t puts_left, std::uint64_t bytes_left, Micros deadline);
  Result<FrameType> ask(std::span<const std::byte> frame, std::uint64_t request, Micros deadline);
  Result<Version> ask_finish(Micros deadline);
  static Error cat_lost(const Error& lost, const Error& again);

  ForkGuard guard_;
  Endpoint endpoint_;
  ClientId client_;
  Socket socket_;
  Incarnation incarnation_;
  FrameParser parser_;
  Bytes pending_;                       // frames not sent yet: many small puts are one system call
  std::deque<Unacknowledged> puts_;     // in the order of their answers
  std::uint64_t puts_bytes_ = 0;
  std::uint64_t last_request_ = 0;
  std::uint64_t asked_ = 0;             // request of the question under way; 0: none
  std::optional<FrameType> answer_;
  Bytes answer_meta_;
  PublishId publish_;
  Version version_;
  std::optional<Version> finished_;
  std::optional<Error> over_;
};

}  // namespace paramwire
