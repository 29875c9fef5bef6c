// The control link: one connection that asks a server and waits for the answer. Every client has one, whatever moves its
// bytes; shm links and publishes are built on their own.
//
// Any thread; calls take turns. One question is under way at a time, so every byte that arrives belongs to its answer. After a
// timeout that is no longer so: the link is broken for good, since a late answer must not be taken for another's.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/net/tls.hpp"
#include "paramwire/wire/message.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <string_view>
#include <utility>

namespace paramwire {

// What a server said of itself when the connection was made.
struct ServerFacts {
  Incarnation incarnation;
  std::uint32_t epoch = 0;
  std::optional<Version> newest;
  Micros lease_ttl_max = 0;
  std::string host_id;
  std::string unix_path;
};

// Who connects, and what it proves.
struct Caller {
  Caller(const ClientId& client, std::shared_ptr<const TlsContext> key = nullptr) : id(client), tls(std::move(key)) {}  // NOLINT: implicit on purpose
  ClientId id;
  std::shared_ptr<const TlsContext> tls;  // nullptr: no key. Unix sockets go without either way: their file's mode says who may connect
};

// A connection that has said HELLO, with what the server answered.
struct GreetedSocket {
  Socket socket;
  ServerFacts facts;
};
// errors: as Socket::connect and TlsContext::connect; an ERROR answer as its code, with the peer before its text (kDenied: the server has
// a key and this caller none); kCorrupt for an answer that is none.
Result<GreetedSocket> connect_and_greet(const Endpoint& endpoint, const Caller& caller, Micros deadline);

// `error` as an answer of `peer`: the text says who said it.
Error error_of_peer(const std::string& peer, std::span<const std::byte> error_meta);

// For a connection over which nothing is asked meanwhile: what comes is the end, or a last word before it.
// returns: ok while nothing came.  errors: kUnreachable with the server's own reason, where it gave one.
Status check_quiet(Socket& socket, std::string_view whose);

class ControlLink {
 public:
  struct Answer {
    FrameType type = FrameType::kOk;
    Bytes meta;
    Bytes body;
    Fd descriptor;  // that came along; usually none
  };

  // One question on a greeted connection that is nobody else's. errors: as connect_and_greet; the answer's own if it is an ERROR.
  static Result<Answer> ask(Socket& socket, std::span<const std::byte> frame, std::uint64_t request, FrameType want, Micros deadline);

  // errors: as connect_and_greet.
  static Result<std::unique_ptr<ControlLink>> connect(const Endpoint& endpoint, const Caller& caller, Micros deadline);

  const ServerFacts& facts() const noexcept { return facts_; }
  const std::string& peer() const noexcept { return socket_.peer(); }
  std::uint64_t next_request() noexcept { return ++last_request_; }

  // Sends `frame` (encoded for `request`) and waits for its answer, which is never an ERROR: that is returned as its code.
  // errors: kTimeout, kUnreachable, kCorrupt break the link; on a broken one, kUnreachable saying what broke it; kInvalid in
  // the child of a fork, and from inside a call of this thread (a signal handler's).
  // `sent` (may be nullptr) is set when the question may have gone out: without it, asking again is asking once.
  Result<Answer> call(std::span<const std::byte> frame, std::uint64_t request, Micros deadline, bool* sent = nullptr);
  // As call, and the answer must be of type `want`.
  Result<Answer> call(std::span<const std::byte> frame, std::uint64_t request, FrameType want, Micros deadline, bool* sent = nullptr);
  bool broken() const noexcept { return broken_.load(std::memory_order_acquire); }
  // A key that this client and the server alone can derive (RFC 8446 7.5), other ones for each label and context; nullopt without TLS.
  // The server's side: ServerSession::export_key. Any thread.
  std::optional<ExportedKey> export_key(std::string_view label, std::span<const std::byte> context) const { return socket_.export_key(label, context); }
  // Wakes a call that waits, which gets kUnreachable. Any thread.
  void close() noexcept;

 private:
  explicit ControlLink(GreetedSocket greeted) : socket_(std::move(greeted.socket)), facts_(std::move(greeted.facts)) {}
  Result<Answer> exchange(std::span<const std::byte> frame, std::uint64_t request, Micros deadline);

  ForkGuard guard_;
  std::mutex mutex_;              // held for moments; who has the turn holds `busy_`, so that others can wait with a deadline
  std::condition_variable turn_;
  bool busy_ = false;
  std::thread::id turn_of_;       // while busy
  Socket socket_;
  ServerFacts facts_;
  std::atomic<std::uint64_t> last_request_{0};
  std::atomic<bool> broken_{false};
  std::string broken_by_;  // under the mutex
};

}  // namespace paramwire
