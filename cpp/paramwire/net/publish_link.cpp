#include "paramwire/net/publish_link.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <poll.h>

namespace paramwire {

namespace {

// Frames are gathered up to this size before a send: a send costs a few microseconds whatever it carries, 64 KiB of frames
// around tiny tensors are about 500 of them.
constexpr std::size_t kQueuedMax = 64 * 1024;
// Bodies up to this size are copied beside their frames; larger ones are sent from where they lie.
constexpr std::size_t kCopiedMax = 16 * 1024;
// Sent in pieces that are checksummed just before, so that they are in cache for the send: see FrameParser::kReceiveStep.
constexpr std::size_t kPiece = 256 * 1024;
// Puts whose answer has not come. Bounds what is remembered (32 B each) and how much is in vain after an error; a round trip
// of a millisecond at a million a second needs 1000.
constexpr std::size_t kUnansweredMax = 4096;

}  // namespace

Result<std::unique_ptr<PublishLink>> PublishLink::start(const Endpoint& endpoint, const Caller& caller, bool any_base,
                                                        const std::optional<Version>& base, Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint, caller, deadline));
  std::unique_ptr<PublishLink> link(new PublishLink(std::move(greeted), endpoint, caller));
  PublishStartMessage ask;
  ask.any_base = any_base;
  ask.base = base;
  const std::uint64_t request = ++link->last_request_;
  PARAMWIRE_CHECK(link->ask(ask.encode(request), {request, FrameType::kPublishId, {}, 0}, deadline));
  return link;
}

PublishLink::~PublishLink() {
  const bool clean = !lost_ && queued_.empty();  // else the server's time limit for idle publishes ends it
  if (guard_.in_child() || finished_ || !clean || publish_ == PublishId{}) return;
  PublishIdMessage message;
  message.publish = publish_;
  const Bytes frame = message.encode(FrameType::kAbort, ++last_request_);
  const iovec part{const_cast<std::byte*>(frame.data()), frame.size()};
  static_cast<void>(socket_.try_send({&part, 1}));
}

Status PublishLink::usable() const {
  PARAMWIRE_CHECK(guard_.check(cat("publish to ", socket_.peer())));
  if (failed_) return *failed_;
  if (finished_) return Error(Code::kInvalid, cat("this publish was finished as version ", *finished_, ": start another"));
  return {};
}

void PublishLink::fail(Error error) {
  if (!failed_) failed_ = std::move(error);
}

void PublishLink::lose(Error error) {
  fail(std::move(error));
  lost_ = true;
  if (!guard_.in_child()) socket_.shutdown();  // which is for all who share it
}

// ---------------------------------------------------------------- out

void PublishLink::queue(const Bytes& frame, const Expected& expected) {
  queued_.insert(queued_.end(), frame.begin(), frame.end());
  expected_.push_back(expected);
}

// Sends a part of `bytes`, and takes the answers that are there: a server that can't get rid of them stops reading.
Status PublishLink::send_some(std::span<const std::byte>& bytes, Micros deadline) {
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  PARAMWIRE_TRY(sent, socket_.try_send({&part, 1}));
  if (sent) {
    bytes = bytes.subspan(*sent);
    if (steady_clock().now() < deadline) return {};
    return Error(Code::kTimeout, cat(socket_.peer(), ": the deadline passed while a put was sent"));
  }
  PARAMWIRE_TRY(received, receive_answers());
  if (received) return {};
  return socket_.wait(POLLIN | POLLOUT, deadline);
}

Status PublishLink::send_queued(Micros deadline) {
  std::span<const std::byte> left(queued_);
  while (!left.empty()) PARAMWIRE_CHECK(send_some(left, deadline));
  queued_.clear();
  return {};
}

Status PublishLink::send_body(std::span<const std::byte> bytes, std::uint64_t& crc, Micros deadline) {
  while (!bytes.empty()) {
    auto piece = bytes.first(std::min(kPiece, bytes.size()));
    bytes = bytes.subspan(piece.size());
    crc = crc64(piece, crc);
    while (!piece.empty()) PARAMWIRE_CHECK(send_some(piece, deadline));
  }
  return {};
}

Status PublishLink::put(const PublishBlock& block, std::span<const std::byte> bytes, Micros deadline) {
  PARAMWIRE_CHECK(usable());
  auto size = block_bytes(block.dtype, block.shape, block.shard);
  if (!size.ok()) return Error(Code::kInvalid, cat("tensor \"", block.tensor, "\": ", size.error().message()));
  if (!stored_size_valid(block.codec, *size, bytes.size())) {
    return Error(Code::kInvalid, cat("tensor \"", block.tensor, "\": ", dtype_name(block.dtype), ' ', block.shape, ' ', block.shard, " has ", *size,
                                     " bytes, ", bytes.size(), " were given", block.codec == CodecId::kRaw ? "" : " as their encoded form"));
  }
  if (block.tensor.size() > kMaxNameBytes) {
    return Error(Code::kInvalid, cat("a tensor name has at most ", kMaxNameBytes, " bytes, \"", block.tensor.substr(0, 40), "...\" has ", block.tensor.size()));
  }
  PutMessage message;
  message.publish = publish_;
  message.tensor = block.tensor;
  message.dtype = block.dtype;
  message.shape = block.shape;
  message.shard = block.shard;
  message.codec = block.codec;
  const std::uint64_t request = ++last_request_;
  queue(message.encode(request, bytes.size()), {request, FrameType::kPutDone, block_id(block.tensor, block.shard), 0});
  Status status;
  if (bytes.size() <= kCopiedMax) {
    queued_.insert(queued_.end(), bytes.begin(), bytes.end());
    expected_.back().crc64 = crc64(std::span(queued_).last(bytes.size()));  // of what is sent, whoever changes `bytes`
    if (queued_.size() >= kQueuedMax) status = send_queued(deadline);
  } else {
    status = send_queued(deadline);
    std::uint64_t crc = 0;
    // Its answer can't come before its last byte has left, so this entry is still there when the CRC is known...
    if (status.ok()) status = send_body(bytes, crc, deadline);
    // ...unless the answer is an error, or breaks the protocol; both were noted in `status` or failed_.
    if (!expected_.empty() && expected_.back().request == request) expected_.back().crc64 = crc;
  }
  if (status.ok() && expected_.size() >= kUnansweredMax) {
    status = send_queued(deadline);
    if (status.ok()) status = wait_for_answers(kUnansweredMax / 2, deadline);
  }
  if (!status.ok()) lose(std::move(status).error());
  return failed_ ? Status(*failed_) : Status();
}

// ---------------------------------------------------------------- in

Result<bool> PublishLink::receive_answers() {
  const auto space = parser_.receive_space();
  PARAMWIRE_TRY(n, socket_.try_receive(space));
  if (!n) return false;
  parser_.received(*n);
  fresh_ = true;
  while (fresh_) {
    auto event = parser_.next();
    if (!event.ok()) return Error(event.error().code(), cat(socket_.peer(), ": ", event.error().message()));
    if (*event == FrameParser::Event::kNeedBytes) {
      fresh_ = false;
    } else if (*event == FrameParser::Event::kHead) {
      if (parser_.header().body_size > 0) return Error(Code::kCorrupt, cat(socket_.peer(), ": an answer with a body to a publish"));
      PARAMWIRE_CHECK(on_answer());
    }
  }
  return true;
}

// errors: the connection can't be used any more. What the server refused goes to failed_ or answer_error_.
Status PublishLink::on_answer() {
  const auto type = static_cast<FrameType>(parser_.header().type);
  const std::uint64_t request = parser_.header().request;
  if (type == FrameType::kError && request == 0) return error_of_peer(socket_.peer(), parser_.meta());
  if (expected_.empty() || request != expected_.front().request) {
    return Error(Code::kCorrupt, cat(socket_.peer(), ": an answer to request ", request, " that was not asked next"));
  }
  const Expected expected = expected_.front();
  expected_.pop_front();
  if (type == FrameType::kError) {
    Error error = error_of_peer(socket_.peer(), parser_.meta());
    if (expected.type == FrameType::kPutDone) fail(std::move(error));
    else answer_error_ = std::move(error);
    return {};
  }
  if (type != expected.type) {
    return Error(Code::kCorrupt, cat(socket_.peer(), ": answer ", frame_type_name(type), ", ", frame_type_name(expected.type), " was expected"));
  }
  if (type == FrameType::kPublishId) {
    PARAMWIRE_TRY(message, PublishIdMessage::decode(parser_.meta()));
    publish_ = message.publish;
    version_ = message.version;
  } else if (type == FrameType::kPublished) {
    PARAMWIRE_TRY(message, PublishedMessage::decode(parser_.meta()));
    finished_ = message.version;
  } else if (type == FrameType::kPutDone) {
    PARAMWIRE_TRY(message, PutDoneMessage::decode(parser_.meta()));
    if (message.block != expected.block || message.crc64 != expected.crc64) {
      fail(Error(Code::kCorrupt, cat(socket_.peer(), ": block ", expected.block, " was sent with CRC-64 ", hex64(expected.crc64), " and stored as block ", message.block,
                                     " with ", hex64(message.crc64), ": this publish must not become a version; start another")));
    }
  }
  return {};
}

Status PublishLink::wait_for_answers(std::size_t at_most, Micros deadline) {
  while (expected_.size() > at_most) {
    PARAMWIRE_TRY(received, receive_answers());
    if (!received) PARAMWIRE_CHECK(socket_.wait(POLLIN, deadline));
  }
  return {};
}

// A question that waits for its answer, and with it for all before. errors: the answer's, which leaves the publish alone, or
// failed_.
Status PublishLink::ask(const Bytes& frame, const Expected& expected, Micros deadline) {
  PARAMWIRE_CHECK(usable());
  answer_error_.reset();
  queue(frame, expected);
  Status status = send_queued(deadline);
  if (status.ok()) status = wait_for_answers(0, deadline);
  if (!status.ok()) lose(std::move(status).error());
  if (failed_) return *failed_;
  return answer_error_ ? Status(*answer_error_) : Status();
}

Status PublishLink::remove(std::string_view tensor, Micros deadline) {
  NameMessage message;
  message.publish = publish_;
  message.tensor = tensor;
  const std::uint64_t request = ++last_request_;
  return ask(message.encode(FrameType::kRemove, request), {request, FrameType::kOk, {}, 0}, deadline);
}

Status PublishLink::alias(std::string_view tensor, std::string_view target, Micros deadline) {
  NameMessage message;
  message.publish = publish_;
  message.tensor = tensor;
  message.target = target;
  const std::uint64_t request = ++last_request_;
  return ask(message.encode(FrameType::kAlias, request), {request, FrameType::kOk, {}, 0}, deadline);
}

// ---------------------------------------------------------------- end

Status PublishLink::reconnect(Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint_, caller_, deadline));
  if (greeted.facts.incarnation != incarnation_) {
    return Error(Code::kStale, cat(endpoint_, " restarted while version ", version_, " was being committed: whether it was is not known here; look at the newest version"));
  }
  socket_ = std::move(greeted.socket);
  parser_ = FrameParser();
  fresh_ = false;
  queued_.clear();
  expected_.clear();
  failed_.reset();
  lost_ = false;
  return {};
}

Status PublishLink::ask_to_finish(Micros deadline) {
  PublishIdMessage message;
  message.publish = publish_;
  const std::uint64_t request = ++last_request_;
  return ask(message.encode(FrameType::kFinish, request), {request, FrameType::kPublished, {}, 0}, deadline);
}

Result<Version> PublishLink::finish(Micros deadline) {
  if (finished_) return *finished_;
  Status status;
  if (finish_asked_ && lost_) {
    // An earlier call got no answer to the question, over this connection or the one before: only the server knows.
    PARAMWIRE_CHECK(guard_.check(cat("publish to ", socket_.peer())));
    PARAMWIRE_CHECK(reconnect(deadline));
    status = ask_to_finish(deadline);
  } else {
    PARAMWIRE_CHECK(usable());
    // Every put first: a broken connection before this point means that some may not have arrived.
    status = send_queued(deadline);
    if (status.ok()) status = wait_for_answers(0, deadline);
    if (!status.ok()) lose(std::move(status).error());
    if (failed_) {
      const Error reason = *failed_;
      if (!lost_) static_cast<void>(abort(deadline));
      return reason;
    }
    finish_asked_ = true;
    status = ask_to_finish(deadline);
  }
  if (lost_ && status.error().code() == Code::kUnreachable) {
    status = reconnect(deadline);
    if (status.ok()) status = ask_to_finish(deadline);
  }
  if (!status.ok()) {
    fail(status.error());  // the server has dropped the publish, or cannot be asked any more
    return std::move(status).error();
  }
  return *finished_;
}

Status PublishLink::abort(Micros deadline) {
  PARAMWIRE_CHECK(guard_.check(cat("publish to ", socket_.peer())));
  if (finished_) return Error(Code::kInvalid, cat("this publish was finished as version ", *finished_));
  if (lost_) return *failed_;
  PublishIdMessage message;
  message.publish = publish_;
  const std::uint64_t request = ++last_request_;
  const auto before = std::exchange(failed_, std::nullopt);
  Status status = ask(message.encode(FrameType::kAbort, request), {request, FrameType::kOk, {}, 0}, deadline);
  if (!lost_) failed_ = before ? before : std::optional(Error(Code::kInvalid, "this publish was aborted"));
  return status;
}

}  // namespace paramwire
