#include "paramwire/net/pull_window.hpp"

#include <algorithm>
#include <utility>

namespace paramwire {

namespace {

// Queue that is aimed for, above the least round trip: 1 ms keeps a 10 Gb/s path busy through a scheduler's delay (1.25 MB), and is far below
// what a person or a step of a model notices. Too small, and a virtual machine's wake-ups read as congestion; too large, and queues grow.
constexpr Micros kTargetDelay = 1000;
// More than the fastest path takes in its least round trip only waits in a queue, and there falls out of the caches that sender and receiver
// share. Bytes of cost a microsecond, 10 GB/s; and what wake-ups need on a path without a round trip to speak of. Measured on loopback, two
// cores of Sapphire Rapids, 16 MiB blocks, medians of paired rounds: a window of 1 MiB moved 0.9 of what a plain program did, one of 4 MiB 0.7.
constexpr std::uint64_t kFastestPath = 10'000;
constexpr std::uint64_t kShortPathWindow = std::uint64_t{1} << 20;
constexpr std::uint64_t kStep = 64 * 1024;  // growth a round trip once a target was met: one large datagram
// Shortest timeout. A server that sleeps needs 50 us to wake, and up to a scheduler's slice (4 ms) when its core is busy: below that,
// timeouts would be false. Source of the estimator: RFC 6298 (whose floor of 1 s is for the open internet).
constexpr Micros kTimeoutMin = 5'000;
constexpr Micros kTimeoutFirst = 50'000;    // before any round trip was seen
constexpr Micros kTimeoutMax = 1'000'000;

}  // namespace

void InboundCredit::limit(std::uint64_t capacity) noexcept {
  std::uint64_t now = capacity_.load(std::memory_order_relaxed);
  while (capacity < now && !capacity_.compare_exchange_weak(now, capacity, std::memory_order_relaxed)) {
  }
}

std::uint64_t InboundCredit::room(std::uint64_t own) const noexcept {
  const std::uint64_t capacity = this->capacity();
  const std::uint64_t used = this->used();
  const std::uint64_t share = capacity / std::max<std::uint32_t>(1, active_.load(std::memory_order_relaxed));
  if (own >= share || used >= capacity) return 0;
  return std::min(share - own, capacity - used);
}

Micros PullWindow::rto() const noexcept {
  if (smoothed_ == 0) return kTimeoutFirst;
  return std::clamp(smoothed_ + std::max<Micros>(4 * variation_, 1000), kTimeoutMin, kTimeoutMax);
}

void PullWindow::on_answer(Micros now, Micros sent, bool limited) noexcept {
  const Micros sample = std::max<Micros>(1, now - sent);
  base_ = std::min(base_, sample);
  if (smoothed_ == 0) {
    smoothed_ = sample;
    variation_ = sample / 2;
  } else {
    variation_ += ((sample > smoothed_ ? sample - smoothed_ : smoothed_ - sample) - variation_) / 4;
    smoothed_ += (sample - smoothed_) / 8;
    smoothed_ = std::max<Micros>(smoothed_, 1);
  }
  round_least_ = std::min(round_least_, sample);
  round_limited_ = round_limited_ || limited;
  if (sent < round_began_) return;
  const Micros delay = round_least_ - base_;
  const bool full = round_limited_;
  round_began_ = now;
  round_least_ = kNever;
  round_limited_ = false;
  if (delay > kTargetDelay) {
    doubling_ = false;
    if (!std::exchange(high_before_, true)) return;
    // Swift's max(1 - beta * (delay - target) / delay, 1 - max_mdf) with beta 0.8, max_mdf 0.5, in integers.
    const auto excess = static_cast<std::uint64_t>(delay - kTargetDelay);
    const std::uint64_t cut = std::min(window_ / 2, window_ / 10 * 8 * excess / static_cast<std::uint64_t>(delay));
    window_ = std::max(floor_, window_ - cut);
    return;
  }
  high_before_ = false;
  // A window that nobody filled proves nothing: it does not grow.
  if (!full) return;
  const std::uint64_t useful = std::min(most_, std::max(kShortPathWindow, static_cast<std::uint64_t>(base_) * kFastestPath));
  window_ = std::max(window_, std::min(useful, window_ + (doubling_ ? window_ : std::min(window_, kStep))));
}

void PullWindow::on_settled(Micros now, Micros sent, std::uint64_t cost, bool lost) noexcept {
  if (sent < cut_at_) return;
  settled_ += cost;
  if (lost) lost_ += cost;
  // More than half is a queue that overflowed; a third may be a bad path that loses a fifth each way, which slowing down does not mend.
  const bool overflowed = lost_ > window_ / 2;
  if (!overflowed && settled_ < window_) return;
  settled_ = lost_ = 0;
  if (!overflowed) {
    floor_ = std::max(floor_, std::min(2 * floor_, kLeastWindow));
    return;
  }
  cut_at_ = now;
  doubling_ = false;
  if (window_ <= floor_) floor_ = std::max(fewest_, floor_ / 2);
  window_ = std::max(floor_, window_ / 10 * 7);
}

void PullWindow::on_silence(std::uint32_t repeated) noexcept {
  // The first silence may be a lost tail, or a scheduler; a second one is a path that is full, or a server that is not there.
  if (repeated == 0) return;
  window_ = floor_;
  doubling_ = true;  // up again by doubling, as after RFC 5681's timeout
}

}  // namespace paramwire
