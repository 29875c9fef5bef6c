// Histograms that the data path may write: relaxed atomics, no lock, no allocation. Counters are plain fields of the stats.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

// Nanoseconds on CLOCK_MONOTONIC, the clock of steady_clock() (base/env.hpp) at its own resolution. For measuring only.
inline std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What a histogram held at one moment. Buckets without a value are left out.
struct HistogramSnapshot {
  struct Bucket {
    std::uint64_t upper = 0;  // values of the bucket are at most this
    std::uint64_t count = 0;
  };
  std::uint64_t count = 0;
  std::uint64_t sum = 0;
  std::vector<Bucket> buckets;  // ascending

  // The upper end of the bucket that holds the value of rank `part` (0 to 1): at most a quarter above the true one. 0 when empty.
  std::uint64_t quantile(double part) const noexcept;
};

// Values up to 2^40 - 1 (18 minutes in ns) in buckets of a quarter of a power of two; larger ones count in the last. Any thread.
class Histogram {
 public:
  void record(std::uint64_t value) noexcept {
    counts_[bucket_of(value)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }
  // Values recorded meanwhile may be in the counts and not in the sum.
  HistogramSnapshot snapshot() const;

 private:
  // 0 to 3 have a bucket each; from there on the top three bits decide.
  static constexpr std::size_t kBuckets = 4 * 39;
  static constexpr std::size_t bucket_of(std::uint64_t value) noexcept {
    if (value < 4) return static_cast<std::size_t>(value);
    const auto exponent = static_cast<std::size_t>(std::bit_width(value)) - 1;  // 2 and up
    const std::size_t bucket = 4 * (exponent - 1) + static_cast<std::size_t>((value >> (exponent - 2)) & 3);
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }
  static std::uint64_t upper_of(std::size_t bucket) noexcept;

  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
  std::atomic<std::uint64_t> sum_{0};
};

// Records from its making to its end, in ns.
class Stopwatch {
 public:
  explicit Stopwatch(Histogram& histogram) noexcept : histogram_(histogram), begin_(monotonic_ns()) {}
  ~Stopwatch() { histogram_.record(static_cast<std::uint64_t>(monotonic_ns() - begin_)); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Histogram& histogram_;
  std::int64_t begin_;
};

using NamedHistograms = std::vector<std::pair<std::string, HistogramSnapshot>>;

}  // namespace paramwire
