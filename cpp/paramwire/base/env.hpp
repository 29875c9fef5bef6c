// The two sources of non-determinism that pure code must be handed: time and randomness.
#pragma once

#include "paramwire/base/error.hpp"

#include <chrono>
#include <cstdint>
#include <limits>
#include <span>

namespace paramwire {

// Microseconds. Points in time are on CLOCK_MONOTONIC (steady, not comparable between hosts or boots).
using Micros = std::int64_t;
inline constexpr Micros kMicrosPerSecond = 1'000'000;
inline constexpr Micros kNever = std::numeric_limits<Micros>::max();

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Micros now() const = 0;
};

// CLOCK_MONOTONIC. Any thread.
Clock& steady_clock();

// A point on steady_clock() for condition variables. kNever, and what else does not fit nanoseconds, is 292 years from boot.
inline std::chrono::steady_clock::time_point time_point(Micros at) noexcept {
  constexpr Micros kLast = std::numeric_limits<std::int64_t>::max() / 1000;
  return std::chrono::steady_clock::time_point(std::chrono::microseconds(at < kLast ? at : kLast));
}

// A clock that tests move by hand. One thread.
class ManualClock final : public Clock {
 public:
  Micros now() const override { return now_; }
  void advance(Micros by) { now_ += by; }

 private:
  Micros now_ = 1;
};

// xoshiro256** 1.0 (Blackman and Vigna, public domain), seeded by splitmix64: reproducible from one 64-bit seed, not for
// secrets. One thread.
class Random {
 public:
  explicit Random(std::uint64_t seed);
  std::uint64_t next();
  // Uniform in [0, bound), bound > 0.
  std::uint64_t below(std::uint64_t bound);
  // True with probability `percent` of 100.
  bool chance(std::uint32_t percent) { return below(100) < percent; }

 private:
  std::uint64_t state_[4];
};

// 64 bits from getrandom(2), for incarnations, client ids and publish ids. Any thread.
// errors: kUnavailable when the kernel gives none.
Result<std::uint64_t> system_random();
// The same for each of `values` (32 at most: what one call always gives whole), at the price of one.
Status system_random_fill(std::span<std::uint64_t> values);

}  // namespace paramwire
