#include "paramwire/server/connection.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>
#include <sys/ioctl.h>

namespace paramwire {

namespace {

// Queued for one client before its requests have to wait. Slots are sent from where they lie, so this bounds what a client
// can keep from being reclaimed, not memory; too small, and a pipelined batch of large blocks stalls.
constexpr std::uint64_t kQueuedBytesMax = std::uint64_t{64} << 20;
constexpr std::size_t kQueuedFramesMax = 4096;

// Bytes that one visit sends before others get their turn. On loopback, a reader that keeps up would otherwise hold the loop
// for a whole block; 4 MiB last about a millisecond.
constexpr std::uint64_t kSendBudget = std::uint64_t{4} << 20;

// Parts of one sendmsg: 128 small frames, so that the call costs a few ns a frame.
constexpr std::size_t kSendParts = 256;

// Body parts from this size are checked outside the lock. Taking the mutex costs about as much as the CRC of 1 KiB.
constexpr std::size_t kUnlockFrom = 8 * 1024;

// How often a put that is arriving says so to the store: far below the idle time that ends a publish, and rare beside the parts.
constexpr Micros kProgressEvery = kMicrosPerSecond / 2;

// How long the peer may take to read the last ERROR and hang up. Closing at once would reset the connection while its bytes
// are unread, and the reset could overtake the reason.
constexpr Micros kLinger = kMicrosPerSecond;

// Most that a filter holds of what it received: net/tls's read buffer.
constexpr std::uint64_t kFilterHolds = 64 * 1024;

}  // namespace

Connection::Connection(std::uint64_t id, Socket socket, bool local, Micros now)
    : id_(id), socket_(std::move(socket)), local_(local), session_(id, local), opened_(now), sent_at_(now), received_at_(now) {
  session_.exporter = [this](std::string_view label, std::span<const std::byte> context) { return socket_.export_key(label, context); };
}

bool Connection::queue_full() const noexcept { return queued_bytes_ >= kQueuedBytesMax || session_.outgoing.size() >= kQueuedFramesMax; }

void Connection::account() noexcept {
  for (; accounted_ < session_.outgoing.size(); ++accounted_) {
    const Outgoing& out = session_.outgoing[accounted_];
    queued_bytes_ += out.head.size() + out.body.size();
  }
}

std::uint64_t Connection::bytes_waiting() const noexcept {
  const std::uint64_t held = socket_.filter() != nullptr && socket_.filter()->holds_input() ? kFilterHolds : 0;
  int waiting = 0;
  return ioctl(socket_.fd(), FIONREAD, &waiting) == 0 && waiting > 0 ? held + static_cast<std::uint64_t>(waiting) : held;
}

bool Connection::stalled(Micros now, Micros send_timeout, Micros receive_timeout) const noexcept {
  if (wants_output()) return now - sent_at_ > send_timeout;
  if (!session_.greeted() && now - opened_ > send_timeout) return true;
  return in_frame_ && now - received_at_ > receive_timeout;
}

void Connection::refuse(const Error& error) {
  if (shaking_hands()) {  // no frame can be said yet
    socket_.filter()->turn_away();
    ending_ = true;
    return;
  }
  ErrorMessage message;
  message.code = error.code();
  message.text = error.message();
  Outgoing out;
  out.head = message.encode(0);
  session_.outgoing.push_back(std::move(out));
  ending_ = true;
}

void Connection::dismiss(ServerCore& core, Micros now) {
  const std::lock_guard lock(core.mutex);
  core.handlers->on_closed(session_, now);
  if (local_) core.pins.drop_connection(id_);
  if (socket_.filter() != nullptr) socket_.filter()->finish();  // if the peer is still there, it sees an end and not a cut
}

// ---------------------------------------------------------------- in

Status Connection::on_event(FrameParser::Event event, ServerCore& core, std::unique_lock<std::mutex>& lock, Micros now) {
  if (event == FrameParser::Event::kBody) {
    // Only this connection's session and slot are touched, so large parts are checked while others work.
    if (lock.owns_lock() && parser_.body_part().size() >= kUnlockFrom) lock.unlock();
    core.handlers->on_body(session_, parser_.body_part());
    if (now - progress_at_ < kProgressEvery) return {};
    if (!lock.owns_lock()) lock.lock();
    core.handlers->on_progress(session_, now);
    progress_at_ = now;
    return {};
  }
  if (!lock.owns_lock()) lock.lock();
  if (event == FrameParser::Event::kEnd) {
    in_frame_ = false;
    return core.handlers->on_end(session_, parser_.header(), now);
  }
  in_frame_ = true;
  const bool finish = parser_.header().type == static_cast<std::uint8_t>(FrameType::kFinish);
  const Stopwatch watch(finish ? core.durations.finish : core.durations.request);
  const TraceSpan span(core.trace.get(), finish ? "finish" : "request", parser_.header().body_size);
  FrameParser::BodyTarget target;
  PARAMWIRE_CHECK(core.handlers->on_head(session_, parser_.header(), parser_.meta(), target, now));
  progress_at_ = now;
  if (parser_.header().body_size > 0) parser_.set_body(target);
  return {};
}

// Errors of the protocol end the connection, in order, after what was answered before; they are not the caller's.
Status Connection::parse(ServerCore& core, Micros now) {
  std::unique_lock lock(core.mutex, std::defer_lock);
  while (fresh_ && !ending_ && !queue_full()) {
    const auto event = parser_.next();
    if (!event.ok()) {
      refuse(event.error());
      ++core.counters.closed_for_protocol;
      break;
    }
    if (*event == FrameParser::Event::kNeedBytes) {
      fresh_ = false;
    } else if (!on_event(*event, core, lock, now).ok()) {  // the handlers have queued the reason
      ending_ = true;
      ++core.counters.closed_for_protocol;
    }
    account();
  }
  account();
  return {};
}

Status Connection::serve(ServerCore& core, std::uint64_t budget, Micros now) {
  for (;;) {
    PARAMWIRE_CHECK(parse(core, now));
    PARAMWIRE_CHECK(flush(core, now));
    if (ending_) return discard(now);
    if (queue_full() || fresh_) {
      if (queue_full()) return {};  // goes on when the peer has taken some
      continue;
    }
    if (budget == 0) return {};
    const auto space = parser_.receive_space();
    const auto received = socket_.try_receive(space);
    if (!received.ok()) return on_lost(received.error(), core, now);
    const auto& n = *received;
    if (!n) return {};
    parser_.received(*n);
    fresh_ = true;
    received_at_ = now;
    budget -= std::min<std::uint64_t>(budget, *n);
  }
}

// The connection gave an error. Who failed to prove the key gets to read why: the alert is on its way, and a client that speaks no
// TLS is told in a frame; then as after any last word.
Status Connection::on_lost(Error error, ServerCore& core, Micros now) {
  if (!shaking_hands()) {
    if (error.code() == Code::kCorrupt) ++core.counters.closed_for_protocol;  // a record that was changed on its way
    return error;
  }
  ++core.counters.closed_for_key;
  const bool speaks_frames = error.code() == Code::kDenied && socket_.filter()->peer_is_plain();
  socket_.set_filter(nullptr);
  ending_ = true;
  if (speaks_frames) refuse(error);
  PARAMWIRE_CHECK(flush(core, now));
  return discard(now);
}

// After the last word: what the peer still sends is dropped, so that closing does not reset the connection.
Status Connection::discard(Micros now) {
  if (wants_output()) return {};
  if (!shut_) {
    socket_.shutdown_send();
    shut_ = true;
    linger_until_ = now + kLinger;
  }
  std::array<std::byte, 4096> dropped;
  for (int i = 0; i < 64; ++i) {
    const auto n = socket_.try_receive(dropped);
    if (!n.ok()) hung_up_ = true;
    if (!n.ok() || !*n) break;
  }
  return {};
}

// ---------------------------------------------------------------- out

// The number of bytes that went, 0 when the socket is full. A frame with a descriptor goes alone: the descriptor belongs to
// its first byte.
Result<std::size_t> Connection::send_some(int descriptor) {
  std::array<iovec, kSendParts> parts;
  std::size_t count = 0;
  std::uint64_t skip = front_sent_;
  const auto add = [&](std::span<const std::byte> bytes) {
    const auto skipped = static_cast<std::size_t>(std::min<std::uint64_t>(skip, bytes.size()));
    skip -= skipped;
    bytes = bytes.subspan(skipped);
    if (!bytes.empty()) parts[count++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  };
  for (const Outgoing& out : session_.outgoing) {
    const bool front = &out == &session_.outgoing.front();
    if (count + 2 > parts.size() || (out.fd >= 0 && !front)) break;
    add(out.head);
    add(out.body);
    if (out.fd >= 0) break;
  }
  PARAMWIRE_TRY(sent, socket_.try_send({parts.data(), count}, descriptor));
  return sent.value_or(0);
}

void Connection::consume(std::size_t sent, ServerCore& core, Micros now) {
  front_sent_ += sent;
  std::unique_lock lock(core.mutex, std::defer_lock);
  while (wants_output()) {
    const Outgoing& front = session_.outgoing.front();
    const std::uint64_t size = front.head.size() + front.body.size();
    if (front_sent_ < size) break;
    if (front.held) {
      if (!lock.owns_lock()) lock.lock();
      core.handlers->sent(front, now);
    }
    front_sent_ -= size;
    queued_bytes_ -= size;
    --accounted_;
    session_.outgoing.pop_front();
  }
}

Status Connection::flush(ServerCore& core, Micros now) {
  account();
  if (!wants_output()) {
    sent_at_ = now;
    return {};
  }
  for (std::uint64_t budget = kSendBudget; wants_output() && budget > 0;) {
    const int descriptor = front_sent_ == 0 ? session_.outgoing.front().fd : -1;
    PARAMWIRE_TRY(sent, send_some(descriptor));
    if (sent == 0) break;
    sent_at_ = now;
    consume(sent, core, now);
    budget -= std::min<std::uint64_t>(budget, sent);
  }
  return {};
}

}  // namespace paramwire
