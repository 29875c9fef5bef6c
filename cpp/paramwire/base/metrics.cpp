#include "paramwire/base/metrics.hpp"

#include <cmath>

namespace paramwire {

std::uint64_t HistogramSnapshot::quantile(double part) const noexcept {
  const auto rank = static_cast<std::uint64_t>(std::ceil(part * static_cast<double>(count)));
  std::uint64_t seen = 0;
  for (const Bucket& bucket : buckets) {
    seen += bucket.count;
    if (seen >= rank) return bucket.upper;
  }
  return 0;
}

std::uint64_t Histogram::upper_of(std::size_t bucket) noexcept {
  if (bucket < 4) return bucket;
  const std::size_t exponent = bucket / 4 + 1;
  return ((std::uint64_t{5} + bucket % 4) << (exponent - 2)) - 1;
}

HistogramSnapshot Histogram::snapshot() const {
  HistogramSnapshot out;
  out.sum = sum_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < kBuckets; ++i) {
    const std::uint64_t count = counts_[i].load(std::memory_order_relaxed);
    if (count == 0) continue;
    out.count += count;
    out.buckets.push_back({upper_of(i), count});
  }
  return out;
}

}  // namespace paramwire
