#include "paramwire/compute/kernels.hpp"

#include "paramwire/compute/kernels_x86.hpp"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace paramwire::kernels {

namespace {

struct F32 {
  static constexpr std::size_t kBytes = 4;
  static float get(const std::byte* source) noexcept {
    float value;
    std::memcpy(&value, source, sizeof value);
    return value;
  }
};

struct Bf16 {
  static constexpr std::size_t kBytes = 2;
  static float get(const std::byte* source) noexcept {
    std::uint16_t bits;
    std::memcpy(&bits, source, sizeof bits);
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
};

struct F16 {
  static constexpr std::size_t kBytes = 2;
  static float get(const std::byte* source) noexcept {
    std::uint16_t bits;
    std::memcpy(&bits, source, sizeof bits);
    const std::uint32_t sign = (bits & 0x8000U) << 16, exponent = (bits >> 10) & 0x1fU, fraction = bits & 0x3ffU;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | (fraction << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
    // Zero and subnormals: fraction * 2^-24, exact in float32.
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
};

template <typename Format>
void dot_rows(const Rows& rows, const float* x, std::size_t x_stride, std::size_t tokens, float* y, std::size_t y_stride,
              bool accumulate) {
  for (std::size_t row = 0; row < rows.count; ++row) {
    const std::byte* weights = rows.data + row * rows.stride_bytes;
    for (std::size_t token = 0; token < tokens; ++token) {
      // Eight sums, so that the additions don't wait for each other and rounding grows with columns / 8.
      float sums[8] = {};
      const float* values = x + token * x_stride;
      std::size_t column = 0;
      for (; column + 8 <= rows.columns; column += 8) {
        for (std::size_t lane = 0; lane < 8; ++lane) {
          sums[lane] += Format::get(weights + (column + lane) * Format::kBytes) * values[column + lane];
        }
      }
      for (; column < rows.columns; ++column) sums[column % 8] += Format::get(weights + column * Format::kBytes) * values[column];
      const float sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
      float& out = y[token * y_stride + row];
      out = accumulate ? out + sum : sum;
    }
  }
}

template <typename Format>
void widen(const std::byte* source, float* target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = Format::get(source + i * Format::kBytes);
}

void mix_rows(const float* weights, const float* rows, std::size_t count, std::size_t columns, float* y) {
  for (std::size_t column = 0; column < columns; ++column) y[column] = 0;
  for (std::size_t row = 0; row < count; ++row) {
    for (std::size_t column = 0; column < columns; ++column) y[column] += weights[row] * rows[row * columns + column];
  }
}

constexpr Set kPortable = {"portable",
                           {dot_rows<F32>, dot_rows<Bf16>, dot_rows<F16>},
                           {widen<F32>, widen<Bf16>, widen<F16>},
                           mix_rows};

}  // namespace

std::span<const Set* const> usable_sets() noexcept {
#if defined(__x86_64__)
  static const std::array<const Set*, 3> kAll = {&kAvx512, &kAvx2, &kPortable};
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return kAll;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return std::span(kAll).subspan(1);
  }
  return std::span(kAll).subspan(2);
#else
  static const std::array<const Set*, 1> kAll = {&kPortable};
  return kAll;
#endif
}

}  // namespace paramwire::kernels
