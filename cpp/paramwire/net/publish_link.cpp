#include "paramwire/net/publish_link.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <poll.h>

namespace paramwire {

namespace {

// Puts that wait for their acknowledgement. Large enough that the round trip (50 us on a sleeping peer) does not bound the
// rate of tiny tensors, small enough that an error is noticed early and memory stays bounded.
constexpr std::size_t kWindowPuts = 4096;
constexpr std::uint64_t kWindowBytes = std::uint64_t{64} << 20;
// Small frames are gathered up to this; larger blocks are sent from where they lie.
constexpr std::size_t kGatherBytes = 64 * 1024;
// A block is checked and sent in pieces of this size, so that the CRC reads what the copy into the socket reads again.
constexpr std::size_t kSendStep = 256 * 1024;
// abort() waits no longer than this for the server to take notice.
constexpr Micros kGoodbye = kMicrosPerSecond / 5;

}  // namespace

PublishLink::PublishLink(const Endpoint& endpoint, const ClientId& client, GreetedSocket greeted)
    : endpoint_(endpoint), client_(client), socket_(std::move(greeted.socket)), incarnation_(greeted.facts.incarnation) {}

Result<std::unique_ptr<PublishLink>> PublishLink::open(const Endpoint& endpoint, const ClientId& client, bool any_base,
                                                       const std::optional<Version>& base, Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint, client, deadline));
  std::unique_ptr<PublishLink> link(new PublishLink(endpoint, client, std::move(greeted)));
  PublishStartMessage start;
  start.any_base = any_base;
  start.base = base;
  const std::uint64_t request = ++link->last_request_;
  PARAMWIRE_TRY(type, link->ask(start.encode(request), request, deadline));
  if (type != FrameType::kPublishId) return Error(Code::kCorrupt, cat(endpoint.to_string(), " answered ", frame_type_name(type), " to PUBLISH_START"));
  PARAMWIRE_TRY(id, PublishIdMessage::decode(link->answer_meta_));
  link->publish_ = id.publish;
  link->version_ = id.version;
  return link;
}

Status PublishLink::check_open() const {
  PARAMWIRE_CHECK(guard_.check("publish"));
  if (over_) return Error(over_->code(), cat("the publish ended earlier: ", over_->message()));
  if (finished_) return Error(Code::kInvalid, cat("the publish was finished as version ", *finished_));
  return {};
}

// Every error ends the publish: what the server holds of it is not known any more.
Status PublishLink::over(Error error) {
  if (!over_) {
    over_ = error;
    abort();
  }
  return error;
}

Status PublishLink::send(std::span<const std::byte> bytes, Micros deadline) {
  // Answers must be read while we send, or two full socket buffers face each other for ever.
  while (!bytes.empty()) {
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    PARAMWIRE_TRY(sent, socket_.try_send(std::span(&part, 1)));
    if (sent) {
      bytes = bytes.subspan(*sent);
      continue;
    }
    PARAMWIRE_CHECK(socket_.wait(POLLIN | POLLOUT, deadline));
    PARAMWIRE_TRY(received, socket_.try_receive(parser_.receive_space()));
    if (received) {
      parser_.received(*received);
      PARAMWIRE_CHECK(take_answers());
    }
  }
  return {};
}

Status PublishLink::flush(Micros deadline) {
  const Bytes frames = std::move(pending_);
  pending_.clear();
  return send(frames, deadline);
}

Status PublishLink::receive_some(Micros deadline) {
  PARAMWIRE_TRY(received, socket_.receive(parser_.receive_space(), deadline));
  parser_.received(received);
  return take_answers();
}

Status PublishLink::take_answers() {
  for (;;) {
    PARAMWIRE_TRY(event, parser_.next());
    if (event == FrameParser::Event::kNeedBytes) return {};
    if (event != FrameParser::Event::kHead) continue;
    const FrameHeader& header = parser_.header();
    if (header.body_size > 0) return Error(Code::kCorrupt, cat(socket_.peer(), " sent a body where none belongs"));
    const auto type = static_cast<FrameType>(header.type);
    if (header.request == asked_) {
      answer_ = type;
      answer_meta_.assign(parser_.meta().begin(), parser_.meta().end());
      asked_ = 0;
      continue;
    }
    if (puts_.empty() || puts_.front().request != header.request) {
      return Error(Code::kCorrupt, cat(socket_.peer(), " answered request ", header.request, ", which was not asked"));
    }
    if (type == FrameType::kError) {
      const Error said = error_of_peer(socket_.peer(), parser_.meta());
      return Error(said.code(), cat("put of \"", puts_.front().tensor, "\": ", said.message()));
    }
    if (type != FrameType::kPutDone) return Error(Code::kCorrupt, cat(socket_.peer(), " answered ", frame_type_name(type), " to a PUT"));
    PARAMWIRE_CHECK(on_put_done(parser_.meta()));
  }
}

Status PublishLink::on_put_done(std::span<const std::byte> meta) {
  PARAMWIRE_TRY(done, PutDoneMessage::decode(meta));
  const Unacknowledged put = std::move(puts_.front());
  puts_.pop_front();
  puts_bytes_ -= put.bytes;
  if (done.block == put.block && done.crc64 == put.crc64) return {};
  return Error(Code::kCorrupt, cat("put of \"", put.tensor, "\": ", socket_.peer(), " stored block ", done.block, " with CRC-64 ", hex64(done.crc64),
                                   ", sent were block ", put.block, " and ", hex64(put.crc64)));
}

Status PublishLink::drain(std::size_t puts_left, std::uint64_t bytes_left, Micros deadline) {
  if (puts_.size() <= puts_left && puts_bytes_ <= bytes_left) return {};
  PARAMWIRE_CHECK(flush(deadline));
  while (puts_.size() > puts_left || puts_bytes_ > bytes_left) PARAMWIRE_CHECK(receive_some(deadline));
  return {};
}

Status PublishLink::put(std::string_view tensor, DType dtype, const Shape& shape, const Shard& part, std::span<const std::byte> bytes, Micros deadline) {
  PARAMWIRE_CHECK(check_open());
  if (tensor.size() > kMaxNameBytes) return Error(Code::kInvalid, cat("a tensor name has at most ", kMaxNameBytes, " bytes, this one ", tensor.size()));
  auto size = block_bytes(dtype, shape, part);
  if (!size.ok()) return Error(Code::kInvalid, cat("tensor \"", tensor, "\": ", size.error().message()));
  if (*size != bytes.size()) {
    return Error(Code::kInvalid, cat("tensor \"", tensor, "\": ", dtype_name(dtype), ' ', shape, ' ', part, " has ", *size, " bytes, ", bytes.size(), " were given"));
  }
  PutMessage message;
  message.publish = publish_;
  message.tensor = tensor;
  message.dtype = dtype;
  message.shape = shape;
  message.shard = part;
  Unacknowledged put;
  put.request = ++last_request_;
  put.block = block_id(tensor, part);
  put.bytes = bytes.size();
  put.tensor = tensor;
  const Bytes head = message.encode(put.request, bytes.size());
  pending_.insert(pending_.end(), head.begin(), head.end());
  if (bytes.size() <= kGatherBytes / 2) {
    put.crc64 = crc64(bytes);
    pending_.insert(pending_.end(), bytes.begin(), bytes.end());
    puts_bytes_ += put.bytes;
    puts_.push_back(std::move(put));
    if (pending_.size() >= kGatherBytes) {
      if (Status status = flush(deadline); !status.ok()) return over(status.error());
    }
  } else {
    puts_bytes_ += put.bytes;
    puts_.push_back(std::move(put));  // before its bytes leave: a refusal may come while they do
    const std::uint64_t request = puts_.back().request;
    if (Status status = flush(deadline); !status.ok()) return over(status.error());
    std::uint64_t crc = 0;
    for (std::size_t at = 0; at < bytes.size(); at += kSendStep) {
      const auto piece = bytes.subspan(at, std::min(kSendStep, bytes.size() - at));
      crc = crc64(piece, crc);
      // The sum must be known before the last byte leaves, when the answer may come.
      if (at + piece.size() == bytes.size() && !puts_.empty() && puts_.back().request == request) puts_.back().crc64 = crc;
      if (Status status = send(piece, deadline); !status.ok()) return over(status.error());
    }
  }
  if (Status status = drain(kWindowPuts, kWindowBytes, deadline); !status.ok()) return over(status.error());
  return {};
}

Result<FrameType> PublishLink::ask(std::span<const std::byte> frame, std::uint64_t request, Micros deadline) {
  pending_.insert(pending_.end(), frame.begin(), frame.end());
  asked_ = request;
  answer_.reset();
  PARAMWIRE_CHECK(flush(deadline));
  while (!answer_) PARAMWIRE_CHECK(receive_some(deadline));
  if (*answer_ == FrameType::kError) return error_of_peer(socket_.peer(), answer_meta_);
  return *answer_;
}

Status PublishLink::remove(std::string_view tensor, Micros deadline) {
  PARAMWIRE_CHECK(check_open());
  const std::uint64_t request = ++last_request_;
  NameMessage message;
  message.publish = publish_;
  message.tensor = tensor;
  auto answer = ask(message.encode(FrameType::kRemove, request), request, deadline);
  // Names that are not there leave the publish as it was.
  if (!answer.ok() && answer.error().code() == Code::kNotFound) return std::move(answer).error();
  return answer.ok() ? Status() : over(std::move(answer).error());
}

Status PublishLink::alias(std::string_view tensor, std::string_view target, Micros deadline) {
  PARAMWIRE_CHECK(check_open());
  const std::uint64_t request = ++last_request_;
  NameMessage message;
  message.publish = publish_;
  message.tensor = tensor;
  message.target = target;
  auto answer = ask(message.encode(FrameType::kAlias, request), request, deadline);
  if (!answer.ok() && answer.error().code() == Code::kInvalid) return std::move(answer).error();
  return answer.ok() ? Status() : over(std::move(answer).error());
}

Result<Version> PublishLink::ask_finish(Micros deadline) {
  PublishIdMessage message;
  message.publish = publish_;
  const std::uint64_t request = ++last_request_;
  PARAMWIRE_TRY(type, ask(message.encode(FrameType::kFinish, request), request, deadline));
  if (type != FrameType::kPublished) return Error(Code::kCorrupt, cat(socket_.peer(), " answered ", frame_type_name(type), " to FINISH"));
  PARAMWIRE_TRY(published, PublishedMessage::decode(answer_meta_));
  return published.version;
}

Result<Version> PublishLink::finish(Micros deadline) {
  PARAMWIRE_CHECK(guard_.check("publish"));
  if (finished_) return *finished_;
  PARAMWIRE_CHECK(check_open());
  if (Status drained = drain(0, 0, deadline); !drained.ok()) return over(drained.error()).error();
  auto version = ask_finish(deadline);
  if (!version.ok() && version.error().code() == Code::kUnreachable) {
    // Every put was acknowledged, only the verdict is missing: the same server still knows it, by the publish id.
    auto again = connect_and_greet(endpoint_, client_, deadline);
    if (!again.ok()) return over(cat_lost(version.error(), again.error())).error();
    if (again->facts.incarnation != incarnation_) {
      return over(Error(Code::kUnreachable, cat("the server restarted while the publish of version ", version_, " was finished: whether it was committed "
                                                "before is not known; look at the newest version"))).error();
    }
    socket_ = std::move(again->socket);
    parser_ = FrameParser();
    pending_.clear();
    version = ask_finish(deadline);
  }
  if (!version.ok()) return over(version.error()).error();
  finished_ = *version;
  return *version;
}

Error PublishLink::cat_lost(const Error& lost, const Error& again) {
  return Error(lost.code(), cat(lost.message(), "; connecting again: ", again.message(), "; whether the publish was committed is not known"));
}

void PublishLink::abort() noexcept {
  if (finished_ || guard_.in_child() || !socket_.valid()) return;
  if (!over_) over_ = Error(Code::kInvalid, "aborted by its owner");
  // Half a frame may be on the wire, so a polite ABORT needs a connection of its own; its answer need not be waited for long.
  socket_.close();
  const Micros until = steady_clock().now() + kGoodbye;
  auto again = connect_and_greet(endpoint_, client_, until);
  if (!again.ok() || again->facts.incarnation != incarnation_) return;
  socket_ = std::move(again->socket);
  parser_ = FrameParser();
  pending_.clear();
  puts_.clear();
  PublishIdMessage message;
  message.publish = publish_;
  const std::uint64_t request = ++last_request_;
  static_cast<void>(ask(message.encode(FrameType::kAbort, request), request, until).ok());
  socket_.close();
}

}  // namespace paramwire
