// What codec tests share: contents that are hard in different ways, all dtypes, and every vector target of this machine.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/types.hpp"

#include <hwy/targets.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace paramwire::testing {

inline std::vector<DType> all_dtypes() {
  std::vector<DType> all;
  for (std::uint16_t code = 1; code <= kDTypeMax; ++code) all.push_back(static_cast<DType>(code));
  return all;
}

inline std::size_t element_bytes(DType dtype) { return dtype_bits(dtype) < 8 ? 1 : dtype_bits(dtype) / 8; }

enum class Content { kRandom, kWeights, kEqual, kNan, kSparse, kRamp, kTwoValues };
inline std::vector<Content> all_contents() {
  return {Content::kRandom, Content::kWeights, Content::kEqual, Content::kNan, Content::kSparse, Content::kRamp, Content::kTwoValues};
}
inline std::string content_name(Content content) {
  constexpr const char* kNames[] = {"random", "weights", "equal", "NaN", "sparse", "ramp", "two values"};
  return kNames[static_cast<std::size_t>(content)];
}

// A normal deviate, near enough (Irwin and Hall: the sum of twelve uniform ones less six).
inline float deviate(Random& random) {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += static_cast<double>(random.next() >> 11) * 0x1p-53;
  return static_cast<float>(sum * 0.04);
}

// `bytes` bytes of elements of `dtype`. Weights of types that are no floats get the top bytes of float32 ones.
inline std::vector<std::byte> sample(DType dtype, Content content, std::size_t bytes, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> out(bytes);
  const std::size_t width = element_bytes(dtype);
  for (std::size_t at = 0; at < bytes; at += width) {
    std::uint64_t element[2] = {};
    switch (content) {
      case Content::kRandom: element[0] = random.next(), element[1] = random.next(); break;
      case Content::kWeights: {
        const auto bits = std::bit_cast<std::uint32_t>(deviate(random));
        if (dtype == DType::kF64) element[0] = std::bit_cast<std::uint64_t>(static_cast<double>(deviate(random)));
        else if (width >= 4) element[0] = bits | std::uint64_t{bits} << 32, element[1] = element[0];
        else element[0] = bits >> (32 - 8 * width);
        break;
      }
      case Content::kEqual: element[0] = 0x3f803f803f803f80, element[1] = element[0]; break;
      case Content::kNan: element[0] = 0x7fff7fff7fff7fff, element[1] = element[0]; break;
      case Content::kSparse: element[0] = random.next() % 50 == 0 ? random.next() : 0; break;
      case Content::kRamp: element[0] = at / width; break;
      case Content::kTwoValues: element[0] = random.next() % 2 == 0 ? 0x3c003c003c003c00 : 0xbc00bc00bc00bc00, element[1] = element[0]; break;
    }
    std::memcpy(out.data() + at, element, std::min(width, bytes - at));
  }
  return out;
}

// Runs body() once for each vector target that was compiled and that this machine has, the one without vectors last.
template <typename Body>
void for_each_target(const Body& body) {
  const std::int64_t all = hwy::SupportedTargets();
  for (std::int64_t left = all; left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body(std::string(hwy::TargetName(target)));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace paramwire::testing
