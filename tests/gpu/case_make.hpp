// Buffers for cases: random numbers from seeds, in each format, and bounds of rounding.
#pragma once

#include "gpu/case.hpp"

#include "paramwire/codec/cast.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::gpu {

inline constexpr double kUnit = 0x1p-24;  // of rounding in float32
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Relative error of a sum of `terms` numbers in any order, and of products in it: N. Higham, "Accuracy and Stability of Numerical
// Algorithms", 2nd edition, section 4.2 (gamma_n). Fused multiply-adds round less often.
inline double gamma_of(double terms) { return terms * kUnit / (1 - terms * kUnit); }

// Formats of weights by number, in the order of kernels/list.hpp.
inline constexpr const char* kFormats[] = {"f32", "bf16", "f16"};
inline constexpr Type kWeightTypes[] = {Type::kF32, Type::kBF16, Type::kF16};
inline constexpr DType kWeightDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

using Dims = std::vector<std::uint64_t>;
inline std::size_t product_of(const Dims& shape) {
  std::uint64_t out = 1;
  for (const std::uint64_t size : shape) out *= size;
  return static_cast<std::size_t>(out);
}

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> out(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

template <typename T>
CaseBuffer buffer_of(std::string name, Type type, Dims shape, const std::vector<T>& values) {
  return {.name = std::move(name), .type = type, .shape = std::move(shape), .bytes = bytes_of(values)};
}

inline std::vector<float> random_floats(std::size_t count, std::uint64_t seed, float low = -1, float high = 1) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> numbers(low, high);
  std::vector<float> out(count);
  for (float& value : out) value = numbers(random);
  return out;
}
inline std::vector<std::uint8_t> random_octets(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint8_t> out(count);
  for (std::uint8_t& value : out) value = static_cast<std::uint8_t>(random());
  return out;
}

// Values in a format of weights.
inline CaseBuffer weights_of(std::string name, int format, Dims shape, const std::vector<float>& values) {
  if (format == 0) return buffer_of(std::move(name), Type::kF32, std::move(shape), values);
  std::vector<std::uint16_t> halves(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    halves[i] = format == 1 ? bf16_from_f32(bits) : f16_from_f32(bits);
  }
  return buffer_of(std::move(name), kWeightTypes[format], std::move(shape), halves);
}
inline CaseBuffer floats_of(std::string name, Dims shape, std::uint64_t seed, float low = -1, float high = 1) {
  const std::size_t count = product_of(shape);
  return buffer_of(std::move(name), Type::kF32, std::move(shape), random_floats(count, seed, low, high));
}
inline CaseBuffer random_weights(std::string name, int format, Dims shape, std::uint64_t seed) {
  const std::size_t count = product_of(shape);
  return weights_of(std::move(name), format, std::move(shape), random_floats(count, seed));
}
inline std::vector<double> values_of(const CaseBuffer& buffer) {
  std::vector<double> out(buffer.count());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = element(buffer.type, buffer.bytes, i);
  return out;
}

// Where a step's kernels look for their place.
inline CaseBuffer state_of(std::uint32_t position, std::uint32_t tokens, std::uint32_t generation = 0) {
  return buffer_of<std::uint32_t>("state", Type::kU32, {sizeof(cuda::StepState) / 4}, {position, tokens, generation, cuda::kNoGeneration});
}

// What a kernel is to write; what it leaves stays 0xcb.
inline CaseBuffer output_of(std::string name, Type type, Dims shape, double absolute = 0, double relative = 0) {
  CaseBuffer out{.name = std::move(name), .type = type, .shape = std::move(shape)};
  out.bytes.assign(product_of(out.shape) * type_bytes(type), std::byte{0xcb});
  out.role = Role::kOutput;
  out.absolute = absolute;
  out.relative = relative;
  return out;
}

// Half a unit in the last place of each format, relative: two float32 values so near to each other may be rounded to neighbours.
inline double half_relative(cuda::Half half) { return half == cuda::Half::kBF16 ? 0x1p-7 : 0x1p-10; }
inline Type half_type(cuda::Half half) { return half == cuda::Half::kF16 ? Type::kF16 : Type::kBF16; }
// The second output of 16 bits beside a float32 one.
inline CaseBuffer half_output_of(cuda::Half half, Dims shape, double absolute) {
  // Subnormal halves of f16 are 2^-24 apart.
  return output_of("out16", half_type(half), std::move(shape), absolute + 0x1p-24, half_relative(half));
}

}  // namespace paramwire::gpu
