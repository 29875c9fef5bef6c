#include "paramwire/net/udp_socket.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <netinet/ip.h>
#include <netinet/udp.h>

namespace paramwire {

namespace {

// Since Linux 4.18 and 5.0; older headers lack the names.
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

constexpr std::size_t kBatchMax = 64;  // messages of one sendmmsg

// In: UDP_GRO, SO_RXQ_OVFL and one of the PKTINFOs. Out: UDP_SEGMENT and a PKTINFO.
union ControlBuffer {
  cmsghdr align;
  std::array<char, CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(std::uint32_t)) + CMSG_SPACE(sizeof(in6_pktinfo))> bytes;
};

// Appends one; there is room for all that are ever put.
template <typename Value>
void put_control(msghdr& message, ControlBuffer& control, int level, int type, const Value& value) {
  const std::size_t at = message.msg_controllen;
  message.msg_control = control.bytes.data();
  message.msg_controllen = at + CMSG_SPACE(sizeof value);
  auto* const c = reinterpret_cast<cmsghdr*>(control.bytes.data() + at);
  c->cmsg_level = level;
  c->cmsg_type = type;
  c->cmsg_len = CMSG_LEN(sizeof value);
  std::memcpy(CMSG_DATA(c), &value, sizeof value);
}

bool unspecified(const in6_addr& address) { return IN6_IS_ADDR_UNSPECIFIED(&address); }

void put_source(msghdr& message, ControlBuffer& control, const DatagramAddress& to) {
  if (unspecified(to.via.ipi6_addr)) return;
  if (to.v6()) return put_control(message, control, IPPROTO_IPV6, IPV6_PKTINFO, to.via);
  in_pktinfo source{};  // no interface: the route's, which may be another than it came by
  std::memcpy(&source.ipi_spec_dst, to.via.ipi6_addr.s6_addr + 12, sizeof source.ipi_spec_dst);
  put_control(message, control, IPPROTO_IP, IP_PKTINFO, source);
}

bool nothing(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == ENOMEM; }
bool transient(int error) { return error == EINTR || error == ECONNREFUSED || error == EHOSTUNREACH || error == ENETUNREACH || error == EMSGSIZE; }

}  // namespace

// ---------------------------------------------------------------- addresses

std::uint16_t DatagramAddress::port() const noexcept {
  return ntohs(v6() ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

void DatagramAddress::set_port(std::uint16_t port) noexcept {
  if (v6()) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

bool DatagramAddress::any() const noexcept {
  if (v6()) return unspecified(reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  return reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr == htonl(INADDR_ANY);
}

std::string DatagramAddress::to_string() const {
  char text[INET6_ADDRSTRLEN] = {};
  if (v6()) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr, text, sizeof text);
    return cat('[', std::string_view(text), "]:", port());
  }
  inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, text, sizeof text);
  return cat(std::string_view(text), ':', port());
}

DatagramAddress DatagramAddress::loopback(std::uint16_t port) noexcept {
  DatagramAddress out;
  auto& v4 = reinterpret_cast<sockaddr_in&>(out.storage);
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  v4.sin_port = htons(port);
  out.size = sizeof v4;
  return out;
}

std::optional<DatagramAddress> DatagramAddress::peer_of(int fd) noexcept {
  DatagramAddress out;
  out.size = sizeof out.storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&out.storage), &out.size) != 0) return std::nullopt;
  if (out.storage.ss_family != AF_INET && out.storage.ss_family != AF_INET6) return std::nullopt;
  return out;
}

std::optional<DatagramAddress> DatagramAddress::local_of(int fd) noexcept {
  DatagramAddress out;
  out.size = sizeof out.storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&out.storage), &out.size) != 0) return std::nullopt;
  if (out.storage.ss_family != AF_INET && out.storage.ss_family != AF_INET6) return std::nullopt;
  return out;
}

std::array<std::byte, 18> DatagramAddress::bytes() const noexcept {
  std::array<std::byte, 18> out{};
  if (v6()) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(storage);
    std::memcpy(out.data(), &address.sin6_addr, 16);
    std::memcpy(out.data() + 16, &address.sin6_port, 2);
  } else {
    const auto& address = reinterpret_cast<const sockaddr_in&>(storage);
    out[10] = out[11] = std::byte{0xff};
    std::memcpy(out.data() + 12, &address.sin_addr, 4);
    std::memcpy(out.data() + 16, &address.sin_port, 2);
  }
  return out;
}

// ---------------------------------------------------------------- open

Result<DatagramSocket> DatagramSocket::open(int family, const DatagramSocketOptions& options) {
  DatagramSocket out;
  out.fd_ = Fd(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!out.fd_.valid()) return errno_error(Code::kUnavailable, "udp socket", errno);
  const int fd = out.fd_.get();
  const int on = 1;
  // Past net.core.rmem_max only with CAP_NET_ADMIN; both are clamped without a word, so what counts is what is read back.
  if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &options.receive_buffer, sizeof(int)) != 0) {
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &options.receive_buffer, sizeof(int));
  }
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &options.send_buffer, sizeof(int)) != 0) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &options.send_buffer, sizeof(int));
  }
  int got = 0;
  socklen_t size = sizeof got;
  if (getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &got, &size) != 0) return errno_error(Code::kUnavailable, "udp socket: SO_RCVBUF", errno);
  out.receive_buffer_ = static_cast<std::uint64_t>(got);
  out.receive_buffer_asked_ = 2 * static_cast<std::uint64_t>(options.receive_buffer);
  setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);  // without it drops stay uncounted, no more
  // Fragments would turn one loss into the loss of all: a datagram that is too long is refused here instead.
  const int discover = family == AF_INET6 ? IPV6_PMTUDISC_DO : IP_PMTUDISC_DO;
  const int set = family == AF_INET6 ? setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &discover, sizeof discover)
                                     : setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof discover);
  if (set != 0) return errno_error(Code::kUnavailable, "udp socket: MTU_DISCOVER", errno);
  if (family == AF_INET6) {  // also for IPv4 peers of one that takes both; a socket that can't have any refuses, and needs it not
    const int also = IP_PMTUDISC_DO;
    setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &also, sizeof also);
  }
  if (options.sleep != kNever) {
    const timeval sleep{static_cast<time_t>(options.sleep / kMicrosPerSecond), static_cast<suseconds_t>(options.sleep % kMicrosPerSecond)};
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &sleep, sizeof sleep) != 0) return errno_error(Code::kUnavailable, "udp socket: SO_RCVTIMEO", errno);
  }
  if (options.gro) out.gro_ = setsockopt(fd, SOL_UDP, UDP_GRO, &on, sizeof on) == 0;
  return out;
}

Result<DatagramSocket> DatagramSocket::bind(const DatagramAddress& local, const DatagramSocketOptions& options) {
  PARAMWIRE_TRY(out, open(local.storage.ss_family, options));
  if (local.any()) {
    const int on = 1;
    const int set = local.v6() ? setsockopt(out.fd(), IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof on) : setsockopt(out.fd(), IPPROTO_IP, IP_PKTINFO, &on, sizeof on);
    if (set != 0) return errno_error(Code::kUnavailable, cat("udp socket for ", local, ": PKTINFO"), errno);
  }
  if (::bind(out.fd(), local.get(), local.size) != 0) return errno_error(Code::kUnavailable, cat("udp bind ", local), errno);
  out.local_ = DatagramAddress::local_of(out.fd()).value_or(local);
  return out;
}

Result<DatagramSocket> DatagramSocket::connect(const DatagramAddress& peer, const DatagramSocketOptions& options) {
  PARAMWIRE_TRY(out, open(peer.storage.ss_family, options));
  if (::connect(out.fd(), peer.get(), peer.size) != 0) return errno_error(Code::kUnreachable, cat("udp connect ", peer), errno);
  out.local_ = DatagramAddress::local_of(out.fd()).value_or(peer);
  return out;
}

std::uint32_t DatagramSocket::route_payload() const noexcept {
  const bool v6 = local_.v6();
  int mtu = 0;
  socklen_t size = sizeof mtu;
  const int got = v6 ? getsockopt(fd(), IPPROTO_IPV6, IPV6_MTU, &mtu, &size) : getsockopt(fd(), IPPROTO_IP, IP_MTU, &mtu, &size);
  const int headers = v6 ? 48 : 28;
  if (got != 0 || mtu <= headers) return v6 ? 1280 - 48 : 576 - 28;
  return static_cast<std::uint32_t>(std::min<int>(mtu - headers, static_cast<int>(kUdpPayloadMax)));
}

// ---------------------------------------------------------------- in

void DatagramSocket::note_control(msghdr& message, Received& received, DatagramAddress* from) noexcept {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO) {
      int segment = 0;
      std::memcpy(&segment, CMSG_DATA(c), sizeof segment);
      if (segment > 0) received.segment = static_cast<std::size_t>(segment);
    } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
      std::uint32_t drops = 0;
      std::memcpy(&drops, CMSG_DATA(c), sizeof drops);
      drops_ = drops;
    } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO && from != nullptr) {
      std::memcpy(&from->via, CMSG_DATA(c), sizeof from->via);
      // The interface matters for link-local addresses, which are one's own only there; else the route's will do.
      if (!IN6_IS_ADDR_LINKLOCAL(&from->via.ipi6_addr)) from->via.ipi6_ifindex = 0;
    } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO && from != nullptr) {
      in_pktinfo to{};
      std::memcpy(&to, CMSG_DATA(c), sizeof to);
      from->via.ipi6_addr.s6_addr[10] = from->via.ipi6_addr.s6_addr[11] = 0xff;
      std::memcpy(from->via.ipi6_addr.s6_addr + 12, &to.ipi_spec_dst, sizeof to.ipi_spec_dst);
    }
  }
}

Result<std::optional<Received>> DatagramSocket::receive(std::span<const iovec> parts, Wait wait) {
  // An asynchronous error (ICMP) is told once by the next call, whatever that call was for: the one after it goes on.
  for (int tries = 0; tries < 16; ++tries) {
    ControlBuffer control;
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    message.msg_control = control.bytes.data();
    message.msg_controllen = control.bytes.size();
    const ssize_t n = ::recvmsg(fd(), &message, wait == Wait::kNo ? MSG_DONTWAIT : 0);
    if (n >= 0) {
      Received out;
      out.size = out.segment = static_cast<std::size_t>(n);
      out.truncated = (message.msg_flags & MSG_TRUNC) != 0;
      note_control(message, out, nullptr);
      return std::optional(out);
    }
    if (nothing(errno) || (errno == EINTR && wait == Wait::kYes)) return std::optional<Received>();
    if (!transient(errno)) return errno_error(Code::kUnavailable, "udp receive", errno);
    if (errno == ECONNREFUSED) ++refusals_;
  }
  return std::optional<Received>();
}

static_assert(sizeof(ControlBuffer) <= 96, "DatagramBatch::Control has room for the same");

DatagramBatch::DatagramBatch(std::size_t slots, std::size_t slot_size)
    : slot_size_(slot_size), space_(slots * slot_size), sizes_(slots), from_(slots), parts_(slots), controls_(slots), messages_(slots) {
  for (std::size_t i = 0; i < slots; ++i) {
    parts_[i] = {space_.data() + i * slot_size, slot_size};
    msghdr& message = messages_[i].msg_hdr;
    message.msg_iov = &parts_[i];
    message.msg_iovlen = 1;
    message.msg_name = &from_[i].storage;
    message.msg_control = controls_[i].bytes.data();
    make_ready(i);
  }
}

void DatagramBatch::make_ready(std::size_t i) noexcept {
  messages_[i].msg_hdr.msg_namelen = sizeof from_[i].storage;
  messages_[i].msg_hdr.msg_controllen = controls_[i].bytes.size();
}

Result<std::size_t> DatagramSocket::receive_many(DatagramBatch& batch, Wait wait) {
  for (int tries = 0; tries < 16; ++tries) {
    const int n = ::recvmmsg(fd(), batch.messages_.data(), static_cast<unsigned>(batch.slots()), wait == Wait::kNo ? MSG_DONTWAIT : MSG_WAITFORONE, nullptr);
    if (n >= 0) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        msghdr& message = batch.messages_[i].msg_hdr;
        Received one;
        batch.from_[i].via = {};
        note_control(message, one, &batch.from_[i]);
        batch.from_[i].size = message.msg_namelen;
        batch.sizes_[i] = (message.msg_flags & MSG_TRUNC) != 0 ? 0 : batch.messages_[i].msg_len;
        batch.make_ready(i);
      }
      return static_cast<std::size_t>(n);
    }
    if (nothing(errno)) return std::size_t{0};
    if (!transient(errno)) return errno_error(Code::kUnavailable, "udp receive", errno);
  }
  return std::size_t{0};
}

// On a socket that is not connected Linux says ENOTCONN, and wakes its sleepers all the same (net/ipv4/af_inet.c, inet_shutdown).
void DatagramSocket::shutdown() noexcept { static_cast<void>(::shutdown(fd(), SHUT_RDWR)); }

// ---------------------------------------------------------------- out

DatagramSocket::Sent DatagramSocket::send(std::span<const Message> messages, const DatagramAddress* to, std::size_t& done) {
  done = 0;
  bool refused = false;
  std::array<mmsghdr, kBatchMax> headers;
  std::array<ControlBuffer, kBatchMax> controls;
  while (done < messages.size()) {
    const std::size_t count = std::min(messages.size() - done, kBatchMax);
    bool gso = false;
    for (std::size_t i = 0; i < count; ++i) {
      const Message& message = messages[done + i];
      msghdr& m = headers[i].msg_hdr;
      m = {};
      m.msg_iov = const_cast<iovec*>(message.parts.data());
      m.msg_iovlen = message.parts.size();
      if (to != nullptr) {
        m.msg_name = const_cast<sockaddr_storage*>(&to->storage);
        m.msg_namelen = to->size;
      }
      if (message.segment != 0) {
        put_control(m, controls[i], SOL_UDP, UDP_SEGMENT, message.segment);
        gso = true;
      }
      if (to != nullptr) put_source(m, controls[i], *to);
    }
    int n = -1;
    if (gso && gso_failures_ > 0) {
      --gso_failures_;
      errno = gso_error_;
    } else if (count == 1) {
      n = ::sendmsg(fd(), &headers[0].msg_hdr, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0 ? 1 : -1;
    } else {
      n = ::sendmmsg(fd(), headers.data(), static_cast<unsigned>(count), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (n > 0) {
      done += static_cast<std::size_t>(n);
      continue;
    }
    const bool segmented = messages[done].segment != 0;
    switch (errno) {
      case EINTR: continue;
      case ECONNREFUSED:  // of an earlier datagram; this one was not sent
        ++refusals_;
        if (refused) return Sent::kFailed;
        refused = true;
        continue;
      case EAGAIN:
      case ENOBUFS:
      case ENOMEM: return Sent::kBusy;
      case EIO:
      case EINVAL:
      case EOPNOTSUPP: return segmented ? Sent::kNoGso : Sent::kFailed;
      case EMSGSIZE: return segmented ? Sent::kNoGso : Sent::kTooLong;
      default: return Sent::kFailed;
    }
  }
  return Sent::kAll;
}

}  // namespace paramwire
