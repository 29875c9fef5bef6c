#include "paramwire/base/socket.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace paramwire {

namespace {

// Most descriptors that one message is searched for; the protocol sends one. Others must be received to be closed.
constexpr std::size_t kDescriptorsTaken = 8;
// Most parts of one sendmsg: Linux's UIO_MAXIOV.
constexpr std::size_t kPartsMax = 1024;

union RightsBuffer {
  cmsghdr align;
  std::array<char, CMSG_SPACE(sizeof(int) * kDescriptorsTaken)> bytes;
};

void take_descriptors(msghdr& message, Fd& descriptor) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      Fd owned(fd);
      if (!descriptor.valid()) descriptor = std::move(owned);
    }
  }
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

void Fd::reset(int fd) noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Socket::Socket(Fd fd, std::string peer) : fd_(std::move(fd)), peer_(std::move(peer)) {
  fcntl(fd_.get(), F_SETFL, fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  fcntl(fd_.get(), F_SETFD, FD_CLOEXEC);
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails on unix sockets, which have no such delay
}

Error Socket::lost(std::string_view what, int error_number) const {
  return errno_error(Code::kUnreachable, cat(peer_, ": ", what), error_number);
}

std::uint32_t Socket::peer_pid() const noexcept {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 || credentials.pid <= 0) return 0;
  return static_cast<std::uint32_t>(credentials.pid);
}

Result<std::optional<std::size_t>> Socket::try_receive(std::span<std::byte> into) {
  if (filter_) return filter_->try_receive(into);
  for (;;) {
    const ssize_t n = ::recv(fd_.get(), into.data(), into.size(), MSG_DONTWAIT);
    if (n > 0) return std::optional(static_cast<std::size_t>(n));
    if (n == 0) return Error(Code::kUnreachable, cat(peer_, " closed the connection"));
    if (would_block(errno)) return std::optional<std::size_t>();
    if (errno != EINTR) return lost("receive", errno);
  }
}

Result<std::optional<std::size_t>> Socket::try_receive(std::span<std::byte> into, Fd& descriptor) {
  if (filter_) return filter_->try_receive(into);
  for (;;) {
    iovec part{into.data(), into.size()};
    RightsBuffer rights{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = rights.bytes.data();
    message.msg_controllen = rights.bytes.size();
    const ssize_t n = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n > 0) {
      take_descriptors(message, descriptor);
      // The kernel closed what it could not install here (unix(7)); the bytes are taken, so the stream can't go on without it.
      if ((message.msg_flags & MSG_CTRUNC) != 0 && !descriptor.valid()) {
        return Error(Code::kUnavailable, cat(peer_, ": a descriptor came along and this process has none free: raise its limit (ulimit -n)"));
      }
      return std::optional(static_cast<std::size_t>(n));
    }
    if (n == 0) return Error(Code::kUnreachable, cat(peer_, " closed the connection"));
    if (would_block(errno)) return std::optional<std::size_t>();
    if (errno != EINTR) return lost("receive", errno);
  }
}

Result<std::optional<std::size_t>> Socket::try_send(std::span<const iovec> parts, int descriptor) {
  if (filter_ && descriptor >= 0) return Error(Code::kInvalid, cat(peer_, ": descriptors travel over unix sockets only"));
  if (filter_) return filter_->try_send(parts);
  for (;;) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());  // sendmsg only reads it
    message.msg_iovlen = std::min(parts.size(), kPartsMax);
    RightsBuffer rights{};
    if (descriptor >= 0) {
      message.msg_control = rights.bytes.data();
      message.msg_controllen = CMSG_SPACE(sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
    }
    const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return std::optional(static_cast<std::size_t>(n));
    if (would_block(errno)) return std::optional<std::size_t>();
    if (errno != EINTR) return lost("send", errno);
  }
}

Status Socket::wait(short events, Micros deadline) const {
  if (filter_ && (events & POLLIN) != 0) {
    if (filter_->holds_input()) return {};
    if (filter_->input_needs_room()) events = static_cast<short>(events | POLLOUT);
  }
  for (;;) {
    const Micros left = wait_slice(deadline == kNever ? kNever : deadline - steady_clock().now());
    if (left <= 0) return Error(Code::kTimeout, cat(peer_, ": the deadline passed while waiting for it to ", (events & POLLIN) != 0 ? "answer" : "take bytes"));
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(left / kMicrosPerSecond);
    timeout.tv_nsec = static_cast<long>(left % kMicrosPerSecond * 1000);
    pollfd entry{fd_.get(), events, 0};
    const int n = ppoll(&entry, 1, left == kNever ? nullptr : &timeout, nullptr);
    if (n > 0) return {};
    if (n < 0 && errno != EINTR) return lost("poll", errno);
    if (wait_interrupted()) return Error(Code::kTimeout, cat(peer_, ": the wait for it was interrupted"));
  }
}

Result<std::size_t> Socket::receive(std::span<std::byte> into, Micros deadline) {
  for (;;) {
    PARAMWIRE_TRY(n, try_receive(into));
    if (n) return *n;
    PARAMWIRE_CHECK(wait(POLLIN, deadline));
  }
}

Status Socket::receive_all(std::span<std::byte> into, Micros deadline) {
  while (!into.empty()) {
    PARAMWIRE_TRY(n, receive(into, deadline));
    into = into.subspan(n);
  }
  return {};
}

Status Socket::send_all(std::span<const std::byte> bytes, Micros deadline) {
  while (!bytes.empty()) {
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    PARAMWIRE_TRY(n, try_send({&part, 1}));
    if (n) {
      bytes = bytes.subspan(*n);
    } else {
      PARAMWIRE_CHECK(wait(POLLOUT, deadline));
    }
  }
  return {};
}

void Socket::shutdown() noexcept {
  if (filter_) filter_->finish();
  ::shutdown(fd_.get(), SHUT_RDWR);
}
void Socket::shutdown_send() noexcept {
  if (filter_) filter_->finish();
  ::shutdown(fd_.get(), SHUT_WR);
}

Result<std::pair<Socket, Socket>> socket_pair() {
  int fds[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return errno_error(Code::kUnavailable, "socketpair", errno);
  return std::pair(Socket(Fd(fds[0]), "socket pair"), Socket(Fd(fds[1]), "socket pair"));
}

std::string loopback_down() {
  const Fd probe(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  std::string name;
  if (auto* interfaces = if_nameindex()) {
    for (auto* i = interfaces; i->if_index != 0; ++i) {
      ifreq request{};
      std::strncpy(request.ifr_name, i->if_name, sizeof request.ifr_name - 1);
      if (ioctl(probe.get(), SIOCGIFFLAGS, &request) != 0) continue;
      if ((request.ifr_flags & IFF_LOOPBACK) != 0 && (request.ifr_flags & IFF_UP) == 0) name = i->if_name;
    }
    if_freenameindex(interfaces);
  }
  return name;
}

}  // namespace paramwire
