// A publish from another process: puts stream to the server, checksummed on both sides, and become a version all at once.
//
// Its own connection. Puts are pipelined: an error of one may be told by a later call, and always by finish(), which succeeds
// only when every put was stored with the CRC-64 that it was sent with. One thread.
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

// What is put: a whole tensor or a shard of it.
struct PublishBlock {
  std::string_view tensor;
  DType dtype = DType::kU8;
  Shape shape;  // of the whole tensor
  Shard shard;
  CodecId codec = CodecId::kRaw;
};

class PublishLink {
 public:
  // On top of the newest version, whatever it is; or (any_base false) only if `base` is the newest (none: nothing yet).
  // errors: as connect_and_greet; kStale when `base` is not the newest; kBackpressure as the server has it.
  static Result<std::unique_ptr<PublishLink>> start(const Endpoint& endpoint, const Caller& caller, bool any_base,
                                                    const std::optional<Version>& base, Micros deadline);
  // Aborts what was not finished, without waiting for an answer.
  ~PublishLink();
  PublishLink(const PublishLink&) = delete;
  PublishLink& operator=(const PublishLink&) = delete;

  Version version() const noexcept { return version_; }  // that finish will commit

  // Sends the stored bytes of the block; they may change once this returns. errors: kInvalid when bytes and spec do not fit (nothing is sent, the
  // publish goes on); of this or an earlier put, final for the publish: the server's, kCorrupt when what was stored is not
  // what was sent, kTimeout, kUnreachable.
  Status put(const PublishBlock& block, std::span<const std::byte> bytes, Micros deadline);
  // Wait for the server's answer. errors: kNotFound when there is no such tensor (the publish goes on); as put.
  Status remove(std::string_view tensor, Micros deadline);
  Status alias(std::string_view tensor, std::string_view target, Micros deadline);
  // Waits until every put is stored, then commits. Repeated after success it gives the same version. When the connection breaks
  // after the question was sent, it is asked once more over a new one: the server knows the id. When that is lost too, or the
  // deadline passes, nobody here knows whether it was committed: call again, and the same question is asked again.
  // errors: kStale when another publish was faster, or the server restarted; kInvalid as the server has it; as put.
  Result<Version> finish(Micros deadline);
  // Drops what was put. errors: when the server could not be told; it drops an idle publish by itself.
  Status abort(Micros deadline);

 private:
  struct Expected {  // answers come in the order of the questions
    std::uint64_t request = 0;
    FrameType type = FrameType::kOk;
    BlockId block;
    std::uint64_t crc64 = 0;
  };
  PublishLink(GreetedSocket greeted, const Endpoint& endpoint, const Caller& caller)
      : socket_(std::move(greeted.socket)), incarnation_(greeted.facts.incarnation), endpoint_(endpoint), caller_(caller) {}
  Status usable() const;
  void fail(Error error);
  // The connection can't be used any more: part of a frame may be on its way.
  void lose(Error error);
  void queue(const Bytes& frame, const Expected& expected);
  Status send_queued(Micros deadline);
  Status send_body(std::span<const std::byte> bytes, std::uint64_t& crc, Micros deadline);
  Status send_some(std::span<const std::byte>& bytes, Micros deadline);
  Status wait_for_answers(std::size_t at_most, Micros deadline);
  Result<bool> receive_answers();
  Status on_answer();
  Status ask(const Bytes& frame, const Expected& expected, Micros deadline);
  Status reconnect(Micros deadline);
  Status ask_to_finish(Micros deadline);

  ForkGuard guard_;
  Socket socket_;
  Incarnation incarnation_;
  Endpoint endpoint_;
  Caller caller_;
  PublishId publish_;
  Version version_;
  std::uint64_t last_request_ = 0;
  Bytes queued_;                      // small frames that share a send
  std::deque<Expected> expected_;
  FrameParser parser_;
  bool fresh_ = false;                // the parser got bytes that it has not used up
  std::optional<Error> answer_error_; // to the remove, alias or finish under way
  std::optional<Version> finished_;
  std::optional<Error> failed_;       // final
  bool lost_ = false;                 // failed_ is of the connection, see lose()
  bool finish_asked_ = false;         // every put was stored, and the question may have reached the server
};

}  // namespace paramwire
