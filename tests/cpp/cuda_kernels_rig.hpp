// What the tests of kernel bodies share: arrays with guards at any alignment, weights in each format, and bounds of rounding.
#pragma once

#include "paramwire/codec/cast.hpp"
#include "support/host_kernels.hpp"

#include <gtest/gtest.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace paramwire::testing {

inline constexpr double kUnit = 0x1p-24;  // of rounding in float32
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
// One of each kind of order (lane_executor.hpp).
inline constexpr std::uint64_t kSeeds[] = {0, 1, 2};

// Relative error of a sum of `terms` numbers in any order, and of products in it: N. Higham, "Accuracy and Stability of Numerical
// Algorithms", 2nd edition, section 4.2 (gamma_n).
inline double gamma_of(double terms) { return terms * kUnit / (1 - terms * kUnit); }

// `count` elements, `offset` elements behind a 64-byte boundary, with guards on both sides that must be whole in the end; under
// AddressSanitizer they must not be read either.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t count, std::size_t offset = 0, T value = T{}) : count_(count), at_(kGuard + offset), storage_(at_ + count + kGuard + 64, T{}) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(storage_.data() + kGuard) % 64;
    at_ += misaligned == 0 ? 0 : (64 - misaligned) / sizeof(T);
    std::memset(static_cast<void*>(storage_.data()), 0x5a, storage_.size() * sizeof(T));
    std::fill_n(data(), count_, value);
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(storage_.data(), at_ * sizeof(T));
    ASAN_POISON_MEMORY_REGION(data() + count_, (storage_.size() - at_ - count_) * sizeof(T));
#endif
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(storage_.data(), storage_.size() * sizeof(T));
#endif
    const auto* bytes = reinterpret_cast<const unsigned char*>(storage_.data());
    for (std::size_t i = 0; i < storage_.size() * sizeof(T); ++i) {
      if (i >= at_ * sizeof(T) && i < (at_ + count_) * sizeof(T)) continue;
      if (bytes[i] == 0x5a) continue;
      ADD_FAILURE() << "byte " << static_cast<std::ptrdiff_t>(i) - static_cast<std::ptrdiff_t>(at_ * sizeof(T)) << " of an array of " << count_ << " elements of "
                    << sizeof(T) << " was written";
      return;
    }
  }
  T* data() { return storage_.data() + at_; }
  const T* data() const { return storage_.data() + at_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t count_, at_;
  std::vector<T> storage_;
};

inline void fill_random(Array<float>& values, std::uint64_t seed, float low = -1, float high = 1) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> numbers(low, high);
  for (float& value : values) value = numbers(random);
}

// Formats of weights by number: how a kernel's name ends.
inline constexpr const char* kFormats[] = {"_f32", "_bf16", "_f16"};

// Random weights in [-1, 1), and exactly what they are.
class Weights {
 public:
  Weights(int format, std::size_t count, std::uint64_t seed, std::size_t offset = 0)
      : format_(format), floats_(format == 0 ? count : 0, offset), halves_(format == 0 ? 0 : count, offset) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> numbers(-1, 1);
    for (std::size_t i = 0; i < count; ++i) set(i, numbers(random));
  }
  const void* data() const { return format_ == 0 ? static_cast<const void*>(floats_.data()) : halves_.data(); }
  void set(std::size_t i, float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (format_ == 0) floats_[i] = value;
    else halves_[i] = format_ == 1 ? bf16_from_f32(bits) : f16_from_f32(bits);
  }
  float get(std::size_t i) const {
    if (format_ == 0) return floats_[i];
    return std::bit_cast<float>(format_ == 1 ? f32_from_bf16(halves_[i]) : f32_from_f16(halves_[i]));
  }

 private:
  int format_;
  Array<float> floats_;
  Array<std::uint16_t> halves_;
};

inline std::uint16_t narrowed(cuda::Half half, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return half == cuda::Half::kF16 ? f16_from_f32(bits) : bf16_from_f32(bits);
}

// `actual` is within `bound` of `expected`, or both are the same infinity, or neither is a number.
inline ::testing::AssertionResult near(float actual, double expected, double bound) {
  if (std::isnan(expected)) return std::isnan(actual) ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << actual << " instead of NaN";
  if (static_cast<double>(actual) == expected || std::abs(static_cast<double>(actual) - expected) <= bound) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << actual << " is " << std::abs(static_cast<double>(actual) - expected) << " from " << expected << ", more than " << bound;
}

// A product and what rounding may do to it: a lane adds every 32nd element, or every 32nd eight, then five levels of the warp's tree, bias and
// what was there; each product is rounded once.
struct Product {
  double value = 0, size = 0;
  void add(double a, double b) {
    value += a * b;
    size += std::abs(a * b);
  }
  double bound(std::uint32_t columns) const { return gamma_of(std::ceil(columns / 256.0) * 8 + 5 + 3) * size + kUnit * std::abs(value); }
};

class CudaKernels : public ::testing::Test {
 protected:
  template <typename Args>
  void run(std::string_view name, const cuda::Launch& launch, const Args& args, std::uint64_t seed = 0) {
    ASSERT_EQ(run_kernel(executor_, name, launch, args, seed), "") << "seed " << seed;
  }
  LaneExecutor executor_;
};

}  // namespace paramwire::testing
