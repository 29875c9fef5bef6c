// How much one client may have on its way to it: the credit that its links share, and the window of one server.
//
// Units are bytes of receive buffer as Linux charges them (datagram_cost), not payload: what overflows a socket is its buffer.
#pragma once

#include "paramwire/base/env.hpp"

#include <atomic>
#include <cstdint>

namespace paramwire {

// What a datagram of `size` bytes costs of SO_RCVBUF: its bytes, and the kernel's own 768 to 1,280 around them ("truesize", include/linux/
// skbuff.h). Too small and loopback overflows its own buffer, too large and small blocks share less of it.
constexpr std::uint64_t datagram_cost(std::uint64_t size) noexcept { return size + 1280; }

// One for a client, shared by its links: bytes that may be on their way to it. Eight servers that answer at once then find room for what
// they send (incast). Any thread.
class InboundCredit {
 public:
  explicit InboundCredit(std::uint64_t capacity) : capacity_(capacity) {}
  // The smallest receive buffer that any link really got.
  void limit(std::uint64_t capacity) noexcept;
  std::uint64_t capacity() const noexcept { return capacity_.load(std::memory_order_relaxed); }

  // A link that reads has a share; with none of its own under way it always gets one ask, so nobody waits for another's bytes.
  void join() noexcept { active_.fetch_add(1, std::memory_order_relaxed); }
  void leave() noexcept { active_.fetch_sub(1, std::memory_order_relaxed); }
  // How much a link that holds `own` may take now; 0: none.
  std::uint64_t room(std::uint64_t own) const noexcept;
  void take(std::uint64_t bytes) noexcept { used_.fetch_add(bytes, std::memory_order_relaxed); }
  void give_back(std::uint64_t bytes) noexcept { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  std::uint64_t used() const noexcept { return used_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> capacity_;
  std::atomic<std::uint64_t> used_{0};
  std::atomic<std::uint32_t> active_{0};
};

// The window of one server, by delay: what a GET waits for its first DATA beyond the least ever seen is queue, on the path or in the server.
// A round is from its first GET to the first answer of one sent after it began; its delay is the least in it, so that a reader that was put
// aside by the scheduler for a moment does not read its own absence as congestion.
//   below the target: grows by one step a round (doubles until it met the target or a timeout first), up to what a fast path of that least
//     round trip holds;
//   above in two rounds running: shrinks in proportion to the excess, at most by half.
// Source: G. Kumar et al., "Swift: Delay is Simple and Effective for Congestion Control in the Datacenter" (SIGCOMM 2020), section 3.1, and
// RFC 6817 (LEDBAT) for the base delay. Loss counts only where more than half of a window is lost: a few per cent say nothing about a queue.
// Where that goes on, the queue is shorter than the least window, which then gives way as well, until half of a window arrives again. A window
// is counted in what was asked for, not by the clock: behind a short queue its losses lie many of the least round trips apart.
// Retransmission timer: RFC 6298. One thread.
class PullWindow {
 public:
  // `datagram`: one's cost; the window never falls below four (a lost one is then overtaken, and need not be waited for), nor, but for
  // losses, kLeastWindow.
  PullWindow(std::uint64_t datagram, std::uint64_t most) : most_(most), window_(kFirstWindow < most ? kFirstWindow : most) { set_datagram(datagram); }

  std::uint64_t bytes() const noexcept { return window_; }
  Micros rto() const noexcept;
  Micros rtt() const noexcept { return smoothed_; }
  Micros least_rtt() const noexcept { return base_ == kNever ? 0 : base_; }
  void set_datagram(std::uint64_t cost) noexcept {
    fewest_ = 4 * cost;
    floor_ = fewest_ > kLeastWindow ? fewest_ : kLeastWindow;
  }

  // A GET sent at `sent` got its first DATA now. `limited`: the window was what held more back.
  void on_answer(Micros now, Micros sent, bool limited) noexcept;
  // Of what was asked for at `sent`, `cost` came, or is taken for lost.
  void on_settled(Micros now, Micros sent, std::uint64_t cost, bool lost) noexcept;
  // Nothing came for a whole timeout; `repeated` times before this one.
  void on_silence(std::uint32_t repeated) noexcept;

  // 256 KiB fit the smallest default buffer (212,992 doubled) of a host that was never tuned.
  static constexpr std::uint64_t kFirstWindow = 256 * 1024;
  // A burst that any path takes that carries blocks at all: 23 datagrams of 1,448 B. Below it, round trips would decide, not queues.
  static constexpr std::uint64_t kLeastWindow = 64 * 1024;

 private:
  std::uint64_t fewest_ = kLeastWindow;  // four datagrams
  std::uint64_t floor_ = kLeastWindow;   // least window now
  std::uint64_t most_;
  std::uint64_t window_;
  bool doubling_ = true;
  Micros base_ = kNever;
  Micros smoothed_ = 0;
  Micros variation_ = 0;
  Micros cut_at_ = 0;           // by loss: what was asked for before is not held against the window after
  Micros round_began_ = 0;
  Micros round_least_ = kNever; // least round trip in it
  bool round_limited_ = false;
  bool high_before_ = false;    // the round before this one was above the target
  std::uint64_t settled_ = 0;   // of the window that is judged now
  std::uint64_t lost_ = 0;      // of that
};

}  // namespace paramwire
