// One-bit deltas: the best scale for their signs, what comes out bit by bit, and refusals.
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/codec/cast.hpp"
#include "paramwire/codec/onebit.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace paramwire {
namespace {

using Bytes = std::vector<std::byte>;
constexpr Version kBase{2, 9};
constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

Bytes stored(DType dtype, const std::vector<float>& values) {
  const std::size_t size = dtype_bits(dtype) / 8;
  Bytes out(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    if (dtype == DType::kF32) store_le(out.data() + 4 * i, bits);
    else store_le(out.data() + 2 * i, dtype == DType::kF16 ? f16_from_f32(bits) : bf16_from_f32(bits));
  }
  return out;
}
std::vector<float> loaded(DType dtype, const Bytes& bytes) {
  std::vector<float> out;
  for (std::size_t at = 0; at < bytes.size(); at += dtype_bits(dtype) / 8) {
    if (dtype == DType::kF32) {
      out.push_back(std::bit_cast<float>(load_le<std::uint32_t>(bytes.data() + at)));
    } else {
      const auto half = load_le<std::uint16_t>(bytes.data() + at);
      out.push_back(std::bit_cast<float>(dtype == DType::kF16 ? f32_from_f16(half) : f32_from_bf16(half)));
    }
  }
  return out;
}

std::vector<float> weights(std::size_t count, double deviation, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, deviation);
  std::vector<float> out(count);
  for (float& value : out) value = static_cast<float>(normal(random));
  return out;
}
std::vector<float> sum(std::vector<float> a, const std::vector<float>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

Bytes encoded(DType dtype, const Shape& shape, const Bytes& base, const Bytes& tuned, OnebitScale scale) {
  auto delta = encode_onebit(dtype, shape, base, kBase, tuned, scale);
  EXPECT_TRUE(delta.ok()) << delta.error().message();
  return delta.ok() ? std::move(delta).value() : Bytes();
}
Bytes applied(const Bytes& delta, DType dtype, const Bytes& base) {
  Bytes out(base.size(), std::byte{0xa5});
  const auto beside = apply_onebit(delta, dtype, base, kBase, out, 1);
  EXPECT_TRUE(beside.ok()) << beside.error().message();
  Bytes block = base;
  EXPECT_TRUE(apply_onebit(delta, dtype, block, std::nullopt, block, 1).ok());
  EXPECT_TRUE(block == out) << "in place is not what comes out beside";
  return out;
}
float scale_at(const Bytes& delta, std::size_t row) { return std::bit_cast<float>(load_le<std::uint32_t>(delta.data() + kOnebitHeaderBytes + 4 * row)); }

TEST(Onebit, TheScaleIsTheOneOfLeastSquares) {
  // Against every scale of a fine grid, and scales next to it: none has a smaller sum of squares.
  const Shape shape{7, 33};
  const auto before = weights(7 * 33, 0.04, 1), change = weights(7 * 33, 0.003, 2);
  const Bytes base = stored(DType::kF32, before), tuned = stored(DType::kF32, sum(before, change));
  const auto from = loaded(DType::kF32, base), to = loaded(DType::kF32, tuned);
  for (const auto kind : {OnebitScale::kMatrix, OnebitScale::kRow}) {
    const Bytes delta = encoded(DType::kF32, shape, base, tuned, kind);
    const std::size_t rows = kind == OnebitScale::kRow ? 7 : 1, columns = 7 * 33 / rows;
    for (std::size_t row = 0; row < rows; ++row) {
      const auto error = [&](double scale) {
        double squares = 0;
        for (std::size_t i = row * columns; i < (row + 1) * columns; ++i) {
          const double d = static_cast<double>(to[i]) - static_cast<double>(from[i]);
          const double r = d - (d > 0 ? scale : -scale);
          squares += r * r;
        }
        return squares;
      };
      const auto scale = static_cast<double>(scale_at(delta, row));
      for (int i = 0; i <= 4000; ++i) EXPECT_LE(error(scale), error(0.01 * i / 4000) * (1 + 1e-12));
      EXPECT_LT(error(scale), error(scale * 1.001));
      EXPECT_LT(error(scale), error(scale * 0.999));
    }
  }
}

TEST(Onebit, AnyNumberOfThreadsMakesTheSame) {
  // Long rows in parts, short rows several at once, and ends of both.
  for (const auto& [rows, columns] : {std::pair(1U, 700001U), std::pair(3U, 262145U), std::pair(5U, 262144U), std::pair(70001U, 9U)}) {
    const std::size_t count = std::size_t{rows} * columns;
    const auto before = weights(count, 0.04, rows);
    const Bytes base = stored(DType::kBF16, before), tuned = stored(DType::kBF16, sum(before, weights(count, 0.01, columns)));
    for (const auto kind : {OnebitScale::kMatrix, OnebitScale::kRow}) {
      const Bytes delta = encoded(DType::kBF16, Shape{rows, columns}, base, tuned, kind);
      const Bytes want = applied(delta, DType::kBF16, base);
      for (const unsigned threads : {0U, 2U, 3U, 9U}) {
        Bytes out(base.size()), block = base;
        ASSERT_TRUE(apply_onebit(delta, DType::kBF16, base, kBase, out, threads).ok());
        ASSERT_TRUE(apply_onebit(delta, DType::kBF16, block, kBase, block, threads).ok());
        EXPECT_TRUE(out == want && block == want) << rows << " x " << columns << ", " << threads << " threads";
      }
      // A part that was not the row's or the sign's would have another result than element by element.
      const auto from = loaded(DType::kBF16, base), to = loaded(DType::kBF16, tuned);
      std::vector<float> each;
      for (std::size_t i = 0; i < count; ++i) {
        const float scale = scale_at(delta, kind == OnebitScale::kRow && rows > 1 ? i / columns : 0);
        each.push_back(from[i] + (to[i] > from[i] ? scale : -scale));
      }
      EXPECT_TRUE(stored(DType::kBF16, each) == want);
    }
  }
}

TEST(Onebit, ResultsAreBasePlusOrMinusScaleRoundedToNearestEven) {
  for (const DType dtype : kTypes) {
    for (const auto kind : {OnebitScale::kMatrix, OnebitScale::kRow}) {
      for (const std::size_t columns : {1U, 7U, 8U, 9U, 2047U, 2048U, 2049U, 4100U}) {
        const auto before = weights(3 * columns, 0.04, columns);
        const Bytes base = stored(dtype, before), tuned = stored(dtype, sum(before, weights(3 * columns, 0.01, columns + 1)));
        const Bytes delta = encoded(dtype, Shape{3, columns}, base, tuned, kind);
        const auto from = loaded(dtype, base), to = loaded(dtype, tuned);
        std::vector<float> want;
        for (std::size_t i = 0; i < from.size(); ++i) {
          const float scale = scale_at(delta, kind == OnebitScale::kRow ? i / columns : 0);
          want.push_back(to[i] > from[i] ? from[i] + scale : from[i] - scale);
        }
        EXPECT_TRUE(applied(delta, dtype, base) == stored(dtype, want)) << dtype_name(dtype) << ' ' << columns;
      }
    }
  }
}

TEST(Onebit, IsFifteenTimesSmallerThanF16) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const auto before = weights(1024 * 1024, 0.04, 1);
    const Bytes base = stored(dtype, before), tuned = stored(dtype, sum(before, weights(1024 * 1024, 0.002, 2)));
    EXPECT_LT(encoded(dtype, Shape{1024, 1024}, base, tuned, OnebitScale::kMatrix).size() * 159, base.size() * 10);
    EXPECT_LT(encoded(dtype, Shape{1024, 1024}, base, tuned, OnebitScale::kRow).size() * 15, base.size());
  }
}

TEST(Onebit, SaysThatItIsLossyAndWhatItsBaseIs) {
  const Bytes base = stored(DType::kBF16, weights(12, 1, 1)), tuned = stored(DType::kBF16, weights(12, 1, 2));
  const Bytes delta = encoded(DType::kBF16, Shape{3, 4}, base, tuned, OnebitScale::kRow);
  const auto info = read_onebit(delta);
  ASSERT_TRUE(info.ok()) << info.error().message();
  EXPECT_TRUE(info->kLossy);
  EXPECT_EQ(load_le<std::uint32_t>(delta.data() + 8), 1U) << "the flag in the header";
  EXPECT_EQ(info->dtype, DType::kBF16);
  EXPECT_EQ(info->scale, OnebitScale::kRow);
  EXPECT_EQ(info->rows, 3U);
  EXPECT_EQ(info->columns, 4U);
  EXPECT_EQ(info->base_version, kBase);
  EXPECT_EQ(info->base_crc64, crc64(base));
  EXPECT_EQ(info->delta_size, delta.size());
  // Without the flag it is refused.
  Bytes unflagged = delta;
  store_le(unflagged.data() + 8, std::uint32_t{0});
  store_le(unflagged.data() + 60, crc32c(std::span(unflagged).first(60)));
  EXPECT_EQ(read_onebit(unflagged).error().code(), Code::kCorrupt);
}

TEST(Onebit, AZeroScaleLeavesEveryBitOfItsRow) {
  // Row 0 has both zeros, subnormals and no change; row 1 changes.
  for (const DType dtype : kTypes) {
    const std::vector<float> before = {0.0F, -0.0F, 1e-40F, -3.0F, 1, 2, 3, 4};
    std::vector<float> after = before;
    for (std::size_t i = 4; i < 8; ++i) after[i] += 0.5F;
    const Bytes base = stored(dtype, before), tuned = stored(dtype, after);
    EXPECT_TRUE(applied(encoded(dtype, Shape{2, 4}, base, tuned, OnebitScale::kRow), dtype, base) == tuned);
    EXPECT_TRUE(applied(encoded(dtype, Shape{2, 4}, base, base, OnebitScale::kMatrix), dtype, base) == base);
  }
}

TEST(Onebit, ScalarsVectorsAndEmptyTensorsHaveOneScale) {
  const Bytes one = stored(DType::kF32, {1.5F}), other = stored(DType::kF32, {-2.25F});
  for (const auto kind : {OnebitScale::kMatrix, OnebitScale::kRow}) {
    // One change is its own mean: a scalar is exact where the sum is.
    EXPECT_TRUE(applied(encoded(DType::kF32, Shape{}, one, other, kind), DType::kF32, one) == other);
    const Bytes vector = stored(DType::kF32, {1, 2, 3}), moved = stored(DType::kF32, {2, 1, 4});
    const Bytes delta = encoded(DType::kF32, Shape{3}, vector, moved, kind);
    EXPECT_EQ(read_onebit(delta)->scale, OnebitScale::kMatrix);
    EXPECT_TRUE(applied(delta, DType::kF32, vector) == moved);
    for (const Shape& shape : {Shape{0}, Shape{0, 5}, Shape{5, 0}, Shape{std::uint64_t{1} << 47, 0}}) {
      const Bytes empty = encoded(DType::kF32, shape, {}, {}, kind);
      EXPECT_EQ(read_onebit(empty)->rows, 1U);
      EXPECT_EQ(read_onebit(empty)->columns, 0U);
      EXPECT_EQ(scale_at(empty, 0), 0.0F);
      EXPECT_TRUE(applied(empty, DType::kF32, {}).empty());
    }
  }
}

TEST(Onebit, ValuesThatAreNotFiniteAreRefusedByIndex) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : kTypes) {
    for (const float bad : {kInf, -kInf, kNaN}) {
      for (const bool in_base : {false, true}) {
        std::vector<float> broken = weights(5000, 1, 1);
        const Bytes whole = stored(dtype, broken);
        broken[4321] = bad;
        const Bytes other = stored(dtype, broken);
        const auto refused = encode_onebit(dtype, Shape{5, 1000}, in_base ? other : whole, kBase, in_base ? whole : other, OnebitScale::kRow);
        ASSERT_FALSE(refused.ok());
        EXPECT_EQ(refused.error().code(), Code::kInvalid);
        EXPECT_NE(refused.error().message().find("4321"), std::string::npos) << refused.error().message();
      }
    }
  }
  // Finite values whose changes are beyond f32.
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(encode_onebit(DType::kF32, Shape{2}, stored(DType::kF32, {kMax, kMax}), kBase, stored(DType::kF32, {-kMax, -kMax}), OnebitScale::kMatrix).error().code(),
            Code::kInvalid);
}

TEST(Onebit, WhatOverflowsIsInfinite) {
  // f16 reaches 65504: 65504 and 0 that grow by 0 and 64 have a scale of 32, and 65504 + 32 rounds to infinity only above 65519.
  const Bytes base = stored(DType::kF16, {65504, 0}), tuned = stored(DType::kF16, {65504, 64});
  EXPECT_TRUE(applied(encoded(DType::kF16, Shape{2}, base, tuned, OnebitScale::kMatrix), DType::kF16, base) == stored(DType::kF16, {65472, 32}));
  const Bytes high = stored(DType::kF16, {65472, 0}), higher = stored(DType::kF16, {65504, 128});
  EXPECT_TRUE(applied(encoded(DType::kF16, Shape{2}, high, higher, OnebitScale::kMatrix), DType::kF16, high) ==
              stored(DType::kF16, {std::numeric_limits<float>::infinity(), 80}));
}

TEST(Onebit, IsRefusedOnAnotherBaseAndWritesNothing) {
  const Bytes base = stored(DType::kF32, weights(100, 1, 1)), tuned = stored(DType::kF32, weights(100, 1, 2));
  const Bytes delta = encoded(DType::kF32, Shape{100}, base, tuned, OnebitScale::kMatrix);
  Bytes other = base;
  other[50] ^= std::byte{1};
  Bytes out(400, std::byte{0x5a});
  const Bytes untouched = out;
  EXPECT_EQ(apply_onebit(delta, DType::kF32, other, kBase, out, 1).error().code(), Code::kStale);
  EXPECT_EQ(apply_onebit(delta, DType::kF32, base, Version{2, 8}, out, 1).error().code(), Code::kStale);
  EXPECT_EQ(apply_onebit(delta, DType::kBF16, base, kBase, out, 1).error().code(), Code::kInvalid);
  EXPECT_EQ(apply_onebit(delta, DType::kF32, std::span(base).first(396), kBase, std::span(out).first(396), 1).error().code(), Code::kInvalid);
  EXPECT_EQ(apply_onebit(delta, DType::kF32, base, kBase, std::span(out).first(396), 1).error().code(), Code::kInvalid);
  EXPECT_TRUE(out == untouched);
  Bytes block = base;
  ASSERT_TRUE(apply_onebit(delta, DType::kF32, block, kBase, block, 1).ok());
  EXPECT_EQ(apply_onebit(delta, DType::kF32, block, std::nullopt, block, 1).error().code(), Code::kStale) << "twice would go twice as far";
  // What can't be encoded.
  EXPECT_EQ(encode_onebit(DType::kF64, Shape{1}, Bytes(8), kBase, Bytes(8), OnebitScale::kMatrix).error().code(), Code::kInvalid);
  EXPECT_EQ(encode_onebit(DType::kF32, Shape{2}, Bytes(8), kBase, Bytes(4), OnebitScale::kMatrix).error().code(), Code::kInvalid);
  EXPECT_EQ(encode_onebit(DType::kF32, Shape{2}, Bytes(8), Version{}, Bytes(8), OnebitScale::kMatrix).error().code(), Code::kInvalid);
}

TEST(Onebit, EveryFlippedBitAndEveryCutIsFound) {
  for (const auto& [dtype, shape] : {std::pair(DType::kF16, Shape{5, 11}), std::pair(DType::kF32, Shape{3}), std::pair(DType::kBF16, Shape{0})}) {
    const std::size_t elements = shape.elements();
    const Bytes base = stored(dtype, weights(elements, 1, 1)), tuned = stored(dtype, weights(elements, 1, 2));
    const Bytes delta = encoded(dtype, shape, base, tuned, OnebitScale::kRow);
    for (std::size_t bit = 0; bit < 8 * delta.size(); ++bit) {
      Bytes damaged = delta;
      damaged[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      Bytes block = base;
      const auto done = apply_onebit(damaged, dtype, block, kBase, block, 1);
      ASSERT_FALSE(done.ok()) << "bit " << bit;
      ASSERT_EQ(done.error().code(), Code::kCorrupt) << "bit " << bit << ": " << done.error().message();
      ASSERT_TRUE(block == base);
    }
    for (std::size_t size = 0; size < delta.size(); ++size) ASSERT_EQ(read_onebit(std::span(delta).first(size)).error().code(), Code::kCorrupt);
    Bytes longer = delta;
    longer.push_back({});
    EXPECT_EQ(read_onebit(longer).error().code(), Code::kCorrupt);
  }
}

TEST(Onebit, WhatNoEncoderWritesIsRefusedUnderRightChecksums) {
  const Bytes base = stored(DType::kF32, weights(9, 1, 1)), tuned = stored(DType::kF32, weights(9, 1, 2));
  const Bytes delta = encoded(DType::kF32, Shape{9}, base, tuned, OnebitScale::kMatrix);
  const auto forged = [&](std::size_t at, auto value) {
    Bytes bytes = delta;
    store_le(bytes.data() + at, value);
    store_le(bytes.data() + 48, crc64(std::span(bytes).subspan(kOnebitHeaderBytes)));
    store_le(bytes.data() + 60, crc32c(std::span(bytes).first(60)));
    const auto read = read_onebit(bytes);
    return read.ok() ? Code::kInternal : read.error().code();
  };
  EXPECT_EQ(forged(kOnebitHeaderBytes + 4, std::uint8_t{0}), Code::kInternal) << "other signs are other signs";
  EXPECT_EQ(forged(kOnebitHeaderBytes + 5, std::uint8_t{2}), Code::kCorrupt) << "a bit in the tail";
  for (const std::uint32_t scale : {0x7f800000U, 0x7fc00000U, 0xbf800000U, 0x80000000U}) EXPECT_EQ(forged(kOnebitHeaderBytes, scale), Code::kCorrupt);
  for (const std::uint64_t rows : {std::uint64_t{0}, std::uint64_t{2}, UINT64_MAX, std::uint64_t{1} << 62}) EXPECT_EQ(forged(24, rows), Code::kCorrupt);
  for (const std::uint64_t columns : {std::uint64_t{0}, std::uint64_t{17}, UINT64_MAX, std::uint64_t{1} << 48, (std::uint64_t{1} << 48) + 1}) {
    EXPECT_EQ(forged(32, columns), Code::kCorrupt);
  }
  EXPECT_EQ(forged(6, std::uint16_t{12}), Code::kCorrupt) << "f64";
  EXPECT_EQ(forged(5, std::uint8_t{2}), Code::kCorrupt);
  EXPECT_EQ(forged(56, std::uint32_t{1}), Code::kCorrupt);
  EXPECT_EQ(forged(16, std::uint64_t{0}), Code::kCorrupt);
}

}  // namespace
}  // namespace paramwire
