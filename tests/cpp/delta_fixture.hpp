// Blocks that deltas are tested with.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/codec/delta.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <random>
#include <vector>

namespace paramwire {

using Bytes = std::vector<std::byte>;
inline constexpr Version kBase{3, 17};
inline constexpr std::uint64_t kPiece = kDeltaPieceBytes;

inline Bytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

// bf16 weights, normally distributed, and what an update of about `rate` makes of their f32 originals.
struct Trained {
  Bytes base, next;
};
inline Trained trained(DType dtype, std::size_t elements, double rate, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> weight(0, 0.04), update(0, 1);
  const std::size_t bytes = dtype_bits(dtype) / 8;
  Trained out{Bytes(elements * bytes), Bytes(elements * bytes)};
  const auto put = [&](Bytes& target, std::size_t i, double value) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    if (bytes == 4) return store_le(target.data() + 4 * i, bits);
    store_le(target.data() + 2 * i, static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
  };
  for (std::size_t i = 0; i < elements; ++i) {
    const double before = weight(random);
    put(out.base, i, before);
    put(out.next, i, before + rate * update(random));
  }
  return out;
}

inline Bytes encoded(DType dtype, const Bytes& base, const Bytes& next, const DeltaTuning& tuning = {}, unsigned threads = 1) {
  auto delta = encode_delta(dtype, base, {kBase}, next, threads, tuning);
  EXPECT_TRUE(delta.ok()) << delta.error().message();
  return delta.ok() ? std::move(delta).value() : Bytes();
}

}  // namespace paramwire
