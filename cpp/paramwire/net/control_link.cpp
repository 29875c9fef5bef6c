#include "paramwire/net/control_link.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <poll.h>
#include <unistd.h>

namespace paramwire {

namespace {

// Longest body of an answer. Only manifests have one: 1 GiB is about eight million entries with their locators.
constexpr std::uint64_t kAnswerBytesMax = std::uint64_t{1} << 30;
// A body's memory grows with what has arrived, starting from this: a header alone makes nobody allocate a gigabyte.
constexpr std::size_t kFirstStep = std::size_t{1} << 20;

// One answer, received with no byte to spare: nothing else may be on its way.
class AnswerReader {
 public:
  AnswerReader(Socket& socket, Micros deadline) : socket_(socket), deadline_(deadline) {}

  Result<ControlLink::Answer> read(std::uint64_t request) {
    FrameHeader header{};
    PARAMWIRE_CHECK(fill(std::as_writable_bytes(std::span(&header, 1))));
    if (const char* reason = verify(header)) return bad(cat("frame refused: ", reason));
    if (header.body_size > kAnswerBytesMax) return bad(cat("an answer of ", header.body_size, " bytes, over the limit of ", kAnswerBytesMax));
    answer_.type = static_cast<FrameType>(header.type);
    answer_.meta.resize(header.meta_size);
    PARAMWIRE_CHECK(fill(answer_.meta));
    if (crc32c(answer_.meta) != header.meta_crc) return bad("meta CRC of an answer");
    // Request 0: the server could not tell which question was wrong.
    const bool about_the_stream = answer_.type == FrameType::kError && header.request == 0;
    if (header.request != request && !about_the_stream) return bad(cat("an answer to request ", header.request, ", ", request, " was asked"));
    if (about_the_stream) return error_of_peer(socket_.peer(), answer_.meta);
    PARAMWIRE_CHECK(read_body(header.body_size));
    return std::move(answer_);
  }

 private:
  Error bad(std::string_view what) const { return Error(Code::kCorrupt, cat(socket_.peer(), ": ", what)); }

  Status fill(std::span<std::byte> into) {
    while (!into.empty()) {
      PARAMWIRE_TRY(n, socket_.try_receive(into, answer_.descriptor));
      if (n) {
        into = into.subspan(*n);
      } else {
        PARAMWIRE_CHECK(socket_.wait(POLLIN, deadline_));
      }
    }
    return {};
  }

  Status read_body(std::uint64_t size) {
    while (answer_.body.size() < size) {
      const std::size_t have = answer_.body.size();
      const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(size - have, std::max(have, kFirstStep)));
      answer_.body.resize(have + step);
      PARAMWIRE_CHECK(fill(std::span(answer_.body).subspan(have)));
    }
    return {};
  }

  Socket& socket_;
  Micros deadline_;
  ControlLink::Answer answer_;
};

}  // namespace

Error error_of_peer(const std::string& peer, std::span<const std::byte> error_meta) {
  const auto message = ErrorMessage::decode(error_meta);
  if (!message.ok()) return Error(Code::kCorrupt, cat(peer, ": ", message.error().message()));
  return Error(message->code, cat(peer, ": ", message->text));
}

Status check_quiet(Socket& socket, std::string_view whose) {
  std::array<std::byte, 4096> bytes;
  PARAMWIRE_TRY(n, socket.try_receive(bytes));
  if (!n) return {};
  FrameHeader header{};
  if (*n >= sizeof(header)) {
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto rest = std::span<const std::byte>(bytes).subspan(sizeof(header), *n - sizeof(header));
    if (verify(header) == nullptr && static_cast<FrameType>(header.type) == FrameType::kError && header.meta_size <= rest.size()) {
      const auto meta = rest.first(header.meta_size);
      if (crc32c(meta) == header.meta_crc) return Error(Code::kUnreachable, cat(error_of_peer(socket.peer(), meta).to_string(), "; connect again"));
    }
  }
  return Error(Code::kUnreachable, cat(socket.peer(), ": sent ", *n, " bytes over the connection of ", whose, ", unasked; connect again"));
}

Result<GreetedSocket> connect_and_greet(const Endpoint& endpoint, const Caller& caller, Micros deadline) {
  PARAMWIRE_TRY(socket, Socket::connect(endpoint, deadline));
  if (caller.tls && endpoint.kind == Endpoint::Kind::kTcp) PARAMWIRE_CHECK(caller.tls->connect(socket, deadline));
  GreetedSocket out{std::move(socket), {}};
  HelloMessage hello;
  hello.client = caller.id;
  hello.pid = static_cast<std::uint32_t>(getpid());
  // A server that refuses at once (too many connections) may have closed before HELLO is sent: its reason is still there.
  const Status sent = out.socket.send_all(hello.encode(0), deadline);
  auto answer = AnswerReader(out.socket, deadline).read(0);
  if (!answer.ok()) return !sent.ok() && answer.error().code() == Code::kUnreachable ? sent.error() : std::move(answer).error();
  if (answer->type != FrameType::kWelcome) {
    return Error(Code::kCorrupt, cat(endpoint, ": answer ", frame_type_name(answer->type), " to HELLO: is that a paramwire server?"));
  }
  PARAMWIRE_TRY(welcome, WelcomeMessage::decode(answer->meta));
  out.facts = {welcome.incarnation, welcome.epoch, welcome.newest, static_cast<Micros>(welcome.lease_ttl_ms_max) * 1000,
               std::string(welcome.host_id), std::string(welcome.unix_path)};
  return out;
}

Result<std::unique_ptr<ControlLink>> ControlLink::connect(const Endpoint& endpoint, const Caller& caller, Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint, caller, deadline));
  return std::unique_ptr<ControlLink>(new ControlLink(std::move(greeted)));
}

Result<ControlLink::Answer> ControlLink::ask(Socket& socket, std::span<const std::byte> frame, std::uint64_t request, FrameType want, Micros deadline) {
  PARAMWIRE_CHECK(socket.send_all(frame, deadline));
  PARAMWIRE_TRY(answer, AnswerReader(socket, deadline).read(request));
  if (answer.type == FrameType::kError) return error_of_peer(socket.peer(), answer.meta);
  if (answer.type == want) return answer;
  return Error(Code::kCorrupt, cat(socket.peer(), ": answer ", frame_type_name(answer.type), ", ", frame_type_name(want), " was expected"));
}

Result<ControlLink::Answer> ControlLink::exchange(std::span<const std::byte> frame, std::uint64_t request, Micros deadline) {
  PARAMWIRE_CHECK(socket_.send_all(frame, deadline));
  return AnswerReader(socket_, deadline).read(request);
}

Result<ControlLink::Answer> ControlLink::call(std::span<const std::byte> frame, std::uint64_t request, Micros deadline, bool* sent) {
  PARAMWIRE_CHECK(guard_.check(cat("control link to ", peer())));
  {
    std::unique_lock lock(mutex_);
    if (busy_ && turn_of_ == std::this_thread::get_id()) {
      return Error(Code::kInvalid, cat(peer(), ": this thread is inside another call over this connection (a signal handler?): use a client of its own here"));
    }
    if (!wait_on(turn_, lock, deadline, [this] { return !busy_; })) {
      return Error(Code::kTimeout, cat(peer(), " had not answered the call before this one by the deadline"));
    }
    if (broken()) return Error(Code::kUnreachable, cat(peer(), ": this link was broken before: ", broken_by_, "; connect again"));
    busy_ = true;
    turn_of_ = std::this_thread::get_id();
  }
  if (sent != nullptr) *sent = true;
  auto answer = exchange(frame, request, deadline);
  {
    const std::lock_guard lock(mutex_);
    busy_ = false;
    if (!answer.ok()) {
      broken_by_ = answer.error().to_string();
      broken_.store(true, std::memory_order_release);
      if (!guard_.in_child()) socket_.shutdown();  // which is for all who share it
    }
  }
  if (!answer.ok()) {
    turn_.notify_all();  // nobody gets a turn any more, and each must hear of it now, not at its deadline
    return answer;
  }
  turn_.notify_one();
  if (answer->type == FrameType::kError) return error_of_peer(peer(), answer->meta);
  return answer;
}

Result<ControlLink::Answer> ControlLink::call(std::span<const std::byte> frame, std::uint64_t request, FrameType want, Micros deadline, bool* sent) {
  PARAMWIRE_TRY(answer, call(frame, request, deadline, sent));
  if (answer.type == want) return answer;
  return Error(Code::kCorrupt, cat(peer(), ": answer ", frame_type_name(answer.type), ", ", frame_type_name(want), " was expected"));
}

void ControlLink::close() noexcept {
  if (!guard_.in_child()) socket_.shutdown();
}

}  // namespace paramwire
