// Stream sockets with deadlines: TCP and unix. The only file with socket calls of clients and server alike.
//
// Every socket is non-blocking and close-on-exec, never raises SIGPIPE, restarts after EINTR, and has Nagle's delay off.
// Deadlines are points on steady_clock(). Errors name the peer and errno.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/stream_filter.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <sys/types.h>
#include <sys/uio.h>
#include <utility>

namespace paramwire {

// Owns a descriptor. Move-only.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  int get() const noexcept { return fd_; }
  bool valid() const noexcept { return fd_ >= 0; }
  void reset(int fd = -1) noexcept;

 private:
  int fd_ = -1;
};

// A connected stream. Reading and writing may happen in two threads, each in one at a time.
class Socket {
 public:
  Socket() = default;
  // Takes a connected stream socket and makes it non-blocking. `peer` is what errors call the other side.
  Socket(Fd fd, std::string peer);

  // errors: kInvalid for port 0 or a path too long; kTimeout; kUnreachable with errno (nobody listens, no such name or path);
  //         kUnavailable naming the loopback interface when that is down (a fresh network namespace).
  static Result<Socket> connect(const Endpoint& endpoint, Micros deadline);

  int fd() const noexcept { return fd_.get(); }
  bool valid() const noexcept { return fd_.valid(); }
  const std::string& peer() const noexcept { return peer_; }
  // Of the process at the other end of a unix socket, when it connected (SO_PEERCRED); 0 for TCP.
  std::uint32_t peer_pid() const noexcept;

  // One call's worth, at least 1 byte; nullopt: nothing to read, or no room, right now.
  // errors: kUnreachable when the peer closed or reset the connection; with a filter also its own, see net/tls.hpp.
  Result<std::optional<std::size_t>> try_receive(std::span<std::byte> into);
  // As try_receive, and takes the descriptor that came along (SCM_RIGHTS). More than one at a time: the first; others are closed.
  // None comes through a filter.
  Result<std::optional<std::size_t>> try_receive(std::span<std::byte> into, Fd& descriptor);
  // `descriptor` >= 0 travels with the first byte; it stays the caller's. Not through a filter: kInvalid.
  // After nullopt the next call's bytes must begin with the same ones: a filter has them half on their way.
  Result<std::optional<std::size_t>> try_send(std::span<const iovec> parts, int descriptor = -1);

  // Until some bytes came. errors: as try_receive, kTimeout.
  Result<std::size_t> receive(std::span<std::byte> into, Micros deadline);
  // All of it, however short the counts are. errors: as receive; after one, part of the bytes may have moved.
  Status receive_all(std::span<std::byte> into, Micros deadline);
  Status send_all(std::span<const std::byte> bytes, Micros deadline);
  // Until one of poll(2)'s `events` is there (POLLIN: or the filter holds bytes), or the peer hung up. errors: kTimeout.
  Status wait(short events, Micros deadline) const;
  // Ends the connection in both directions, which wakes a thread that waits on it. The descriptor stays until destruction.
  void shutdown() noexcept;
  void shutdown_send() noexcept;
  void close() noexcept {
    fd_.reset();
    filter_.reset();
  }

  // From here on all bytes go through `filter`, which was made for this descriptor; nullptr: as they are. No other thread may be
  // in a call.
  void set_filter(std::unique_ptr<StreamFilter> filter) noexcept { filter_ = std::move(filter); }
  StreamFilter* filter() const noexcept { return filter_.get(); }
  // See StreamFilter: nullopt without one.
  std::optional<ExportedKey> export_key(std::string_view label, std::span<const std::byte> context) const {
    return filter_ ? filter_->export_key(label, context) : std::nullopt;
  }

 private:
  Error lost(std::string_view what, int error_number) const;

  Fd fd_;
  std::string peer_;
  std::unique_ptr<StreamFilter> filter_;
};

// Whom a TCP listener may serve.
enum class Reach : std::uint8_t {
  kThisHost,   // loopback addresses only: anybody who can connect is served
  kAnywhere,   // every connection must prove the cluster key
};

// A listening socket, and the address really bound.
class Listener {
 public:
  // unix: the socket file gets mode 0600; a stale one (nobody answers) is replaced; it is removed by close() if it is still this
  // listener's. errors: kInvalid for an address out of `reach`; kUnavailable with errno, naming who is in the way.
  static Result<Listener> open(const Endpoint& endpoint, Reach reach = Reach::kThisHost);
  Listener(Listener&& other) noexcept = default;
  Listener& operator=(Listener&& other) noexcept = default;
  ~Listener() { close(); }

  const Endpoint& endpoint() const noexcept { return endpoint_; }
  int fd() const noexcept { return fd_.get(); }
  // nullopt: nobody waits. errors: kBackpressure when descriptors run out (wait before the next call), kUnavailable otherwise.
  Result<std::optional<Socket>> try_accept();
  void close() noexcept;
  // Forgets the socket file: for the child of a fork, where it is the parent's.
  void disown() noexcept { inode_ = 0; }

 private:
  Listener(Fd fd, Endpoint endpoint) : fd_(std::move(fd)), endpoint_(std::move(endpoint)) {}
  static Result<Listener> open_tcp(const Endpoint& endpoint, Reach reach);
  static Result<Listener> open_unix(const Endpoint& endpoint);

  Fd fd_;
  Endpoint endpoint_;
  ino_t inode_ = 0;  // of the socket file
  std::uint64_t accepted_ = 0;
};

// Two connected unix stream sockets. errors: kUnavailable with errno.
Result<std::pair<Socket, Socket>> socket_pair();

// Name of a loopback interface that is down in this network namespace; empty when it is up.
std::string loopback_down();

}  // namespace paramwire
