// Blocks by datagrams ("udp"): the socket edge around net/reliable.
//
// A link has a control connection of its own, which is what its session at the server lives by, and a UDP socket connected to the server.
// While it reads it watches both: a server that closed the connection is gone; one that is only silent is waited for until the deadline.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/reliable.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/net/udp_socket.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace paramwire {

// What a link's receive buffer is asked to be, bytes. Four windows of 2 MiB: with the clamp of an untuned host (212,992) the credit adapts.
inline constexpr int kLinkReceiveBuffer = 8 << 20;

struct UdpOptions {
  OmittedReadChecks omitted;
  // Spin on the socket instead of sleeping: several times lower latency for a whole core while a read waits (DatagramStats::busy_poll_us).
  bool busy_poll = false;
  // Payload of a datagram; 0: what the route takes (65,000 at most). For measurements, and paths whose MTU is a lie.
  std::uint32_t segment_size = 0;
  // For tests: datagrams that arrived and for which this returns true are dropped before anything looks at them.
  std::function<bool(std::span<const std::byte>)> lose = nullptr;
  int fail_gso = 0;  // for tests: the first segmented send fails with this errno
};

class UdpLink final : public Link {
 public:
  // `credit` is the client's, shared by its links. The path is tried: one small question and its answer.
  // errors: as connect_and_greet; kStale when another incarnation answers; kUnavailable when the server has no UDP port; kTimeout when nothing
  //         comes back from it (blocked on the way) by half of the time to `deadline`, 3 s at most.
  static Result<std::unique_ptr<Link>> connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation,
                                               const UdpOptions& options, std::shared_ptr<InboundCredit> credit, Micros deadline);

  std::string_view transport() const noexcept override { return "udp"; }
  bool one_sided() const noexcept override { return false; }
  void read(std::span<BlockRead> batch, Micros deadline) override;
  bool broken() const noexcept override { return broken_.load(std::memory_order_acquire); }
  Result<BlockView> view(const ManifestEntry& entry, const Locator& locator, ByteRange range) override;
  LinkStats stats() const override;

 private:
  UdpLink(GreetedSocket greeted, DatagramSocket socket, std::shared_ptr<InboundCredit> credit, ReliableOptions machine, const UdpOptions& options);
  Status introduce(Micros deadline);
  Status run(std::size_t count, Micros deadline);
  void send_questions();
  void send_single(std::size_t from);
  Result<bool> receive_some(DatagramSocket::Wait wait);
  Result<bool> wait(Micros until);
  Status check_control();
  Error interrupted() const;

  ForkGuard guard_;
  Socket control_;
  DatagramSocket socket_;
  std::shared_ptr<InboundCredit> credit_;
  ReliableReader reader_;
  UdpOptions options_;
  std::atomic<bool> broken_{false};
  std::string broken_by_;
  Outbox out_;
  std::vector<iovec> parts_;       // of what is in out_, and which of it each message begins with
  std::vector<DatagramSocket::Message> messages_;
  std::vector<std::size_t> firsts_;
  Buffer scratch_;                 // one receive
  bool gso_ = true;
  std::uint64_t send_failures_ = 0;
  std::uint64_t busy_poll_us_ = 0;
  Micros now_ = 0;                 // since the last system call that may have slept
  Micros looked_ = 0;              // while spinning: whether somebody asks for the end of it
  LinkStats stats_;
};

}  // namespace paramwire
