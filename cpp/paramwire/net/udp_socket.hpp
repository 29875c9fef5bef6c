// Datagram sockets: the only file with system calls of the UDP path, for clients and servers.
//
// Close-on-exec, "don't fragment" set; nothing blocks but a receive that is told to. UDP_SEGMENT (GSO) and UDP_GRO are used where the kernel has them; where a send with
// GSO fails the caller is told and sends the pieces one by one (CASES UP-38). Sources: ip(7), ipv6(7), udp(7), and the kernel's
// Documentation/networking/segmentation-offloads. One thread, but for shutdown().
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/socket.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <netinet/in.h>
#include <optional>
#include <span>
#include <string>
#include <sys/socket.h>
#include <vector>

namespace paramwire {

// An IPv4 or IPv6 address with its port, as the kernel writes it.
struct DatagramAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
  // Of a sender to a socket that is bound to all addresses: which of them it wrote to, as mapped IPv6 where it is IPv4, and over which
  // interface. send() answers from there: a client drops what comes from elsewhere. Unspecified: the route decides.
  in6_pktinfo via{};
  bool v6() const noexcept { return storage.ss_family == AF_INET6; }
  bool any() const noexcept;  // the wildcard
  std::uint16_t port() const noexcept;
  void set_port(std::uint16_t port) noexcept;
  std::array<std::byte, 18> bytes() const noexcept;  // address (IPv4 as mapped IPv6) and port, network order: what a token binds
  std::string to_string() const;  // "127.0.0.1:7411", "[::1]:7411"
  static DatagramAddress loopback(std::uint16_t port) noexcept;  // 127.0.0.1
  // Address of the other end, or of this one, of a connected or bound socket; nullopt for a unix one.
  static std::optional<DatagramAddress> peer_of(int fd) noexcept;
  static std::optional<DatagramAddress> local_of(int fd) noexcept;
};

// What one receive brought: `size` bytes that are datagrams of `segment` bytes each, the last one maybe shorter.
struct Received {
  std::size_t size = 0;
  std::size_t segment = 0;
  bool truncated = false;
};

// Room for the datagrams of one receive_many, made ready once: filling in 64 headers for each would cost more than a small datagram.
class DatagramBatch {
 public:
  // `slots` datagrams of at most `slot_size` bytes.
  DatagramBatch(std::size_t slots, std::size_t slot_size);
  DatagramBatch(const DatagramBatch&) = delete;
  DatagramBatch& operator=(const DatagramBatch&) = delete;

  std::size_t slots() const noexcept { return messages_.size(); }
  // Of the last receive. Empty: nothing came, or more than a slot holds, which is nothing of ours either.
  std::span<const std::byte> bytes(std::size_t i) const noexcept { return std::span<const std::byte>(space_).subspan(i * slot_size_, sizes_[i]); }
  const DatagramAddress& from(std::size_t i) const noexcept { return from_[i]; }

 private:
  friend class DatagramSocket;
  struct alignas(cmsghdr) Control {
    std::array<char, 96> bytes;
  };
  void make_ready(std::size_t i) noexcept;  // again, after a receive

  std::size_t slot_size_;
  std::vector<std::byte> space_;
  std::vector<std::size_t> sizes_;
  std::vector<DatagramAddress> from_;
  std::vector<iovec> parts_;
  std::vector<Control> controls_;
  std::vector<mmsghdr> messages_;
};

struct DatagramSocketOptions {
  int receive_buffer = 8 << 20;   // asked of the kernel, bytes (it doubles them for its own part)
  int send_buffer = 4 << 20;
  bool gro = false;               // take several datagrams of one sender in one receive
  Micros sleep = kNever;          // of one receive that waits, at most; the kernel counts it in ticks (4 ms at 250 Hz), rounded up
};

class DatagramSocket {
 public:
  // Bound to `local` (port 0: any; the wildcard: all addresses, see `via`). errors: kUnavailable with errno.
  static Result<DatagramSocket> bind(const DatagramAddress& local, const DatagramSocketOptions& options);
  // Connected to `peer`: takes datagrams from there only. errors: kUnavailable, kUnreachable with errno.
  static Result<DatagramSocket> connect(const DatagramAddress& peer, const DatagramSocketOptions& options);

  int fd() const noexcept { return fd_.get(); }
  const DatagramAddress& local() const noexcept { return local_; }
  // SO_RCVBUF as read back, in the kernel's count (see datagram_cost); and what was asked for, in the same count.
  std::uint64_t receive_buffer() const noexcept { return receive_buffer_; }
  std::uint64_t receive_buffer_asked() const noexcept { return receive_buffer_asked_; }
  bool gro() const noexcept { return gro_; }
  // Datagrams that the kernel dropped at this socket's full buffer, as of the last receive (SO_RXQ_OVFL).
  std::uint64_t drops() const noexcept { return drops_; }
  std::uint64_t refusals() const noexcept { return refusals_; }  // ECONNREFUSED seen: a hint, no more
  // Payload of the largest datagram that the route takes now (IP_MTU, IPV6_MTU less headers). For connected sockets.
  std::uint32_t route_payload() const noexcept;

  // A receive that finds nothing returns at once, or sleeps in the call until something comes: one system call less than poll(2) and a receive.
  enum class Wait : std::uint8_t { kNo, kYes };
  // One receive into `parts`; nullopt: nothing there, or with kYes nothing came in the socket's `sleep`, or a signal did.
  // errors: kUnavailable for what no retry mends, with errno.
  Result<std::optional<Received>> receive(std::span<const iovec> parts, Wait wait = Wait::kNo);
  // One datagram into each slot of `batch`; the count that came. kYes waits for the first. errors: as receive.
  Result<std::size_t> receive_many(DatagramBatch& batch, Wait wait);
  // Ends a receive that sleeps, and all later ones: they bring one empty datagram, or none. Any thread.
  void shutdown() noexcept;

  enum class Sent : std::uint8_t {
    kAll,
    kBusy,        // EAGAIN, ENOBUFS, ENOMEM: nothing or only some went; wait for POLLOUT or give up
    kNoGso,       // the kernel or device refused the segmented send: send the pieces
    kTooLong,     // EMSGSIZE: longer than the path takes
    kFailed,      // another errno: counted, and the peer will ask again
  };
  struct Message {
    std::span<const iovec> parts;
    std::uint16_t segment = 0;   // not 0: cut in datagrams of so many bytes (UDP_SEGMENT)
  };
  // Sends all messages to `to` (nullptr: connected). `done`: how many went.
  Sent send(std::span<const Message> messages, const DatagramAddress* to, std::size_t& done);

  // For tests (CASES UP-38): the next sends with GSO fail with this errno, `times` times.
  void fail_gso(int error_number, std::uint32_t times) noexcept { gso_error_ = error_number; gso_failures_ = times; }

 private:
  static Result<DatagramSocket> open(int family, const DatagramSocketOptions& options);
  void note_control(msghdr& message, Received& received, DatagramAddress* from) noexcept;

  Fd fd_;
  DatagramAddress local_;
  std::uint64_t receive_buffer_ = 0, receive_buffer_asked_ = 0;
  bool gro_ = false;
  std::uint64_t drops_ = 0, refusals_ = 0;
  int gso_error_ = 0;
  std::uint32_t gso_failures_ = 0;
};

// Most datagrams that one GSO send or GRO receive holds: UDP_MAX_SEGMENTS of the oldest kernels that have it.
inline constexpr std::size_t kGsoSegments = 64;
inline constexpr std::size_t kUdpPayloadMax = 65'507;  // of UDP over IPv4
// Payload of ours in the smallest packet that every path carries: IPv6's 1,280 (RFC 8200), IPv4's 576 (RFC 791), less IP, UDP and DATA headers.
inline constexpr std::uint32_t kSegmentFloorV6 = 1280 - 48 - 24;
inline constexpr std::uint32_t kSegmentFloorV4 = 576 - 28 - 24;

}  // namespace paramwire
