// Casts against a reference in doubles, which shares nothing with them, and every vector body against the scalar definition.
#include "support/codec_samples.hpp"

#include "paramwire/codec/cast.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace paramwire {
namespace {

using namespace testing;

// One format: bits of fraction, smallest normal exponent, largest finite exponent.
struct Format {
  DType dtype;
  int fraction;
  int least;
  int most;
};
constexpr Format kF16{DType::kF16, 10, -14, 15};
constexpr Format kBf16{DType::kBF16, 7, -126, 127};

// IEEE 754-2019, 4.3.1 by arithmetic: the multiple of the format's step at that size which is nearest, ties to even. Every double below
// is exact: 24 bits of significand, scaled by a power of two.
std::uint16_t reference(const Format& format, std::uint32_t bits, bool& overflowed) {
  overflowed = false;
  const auto value = std::bit_cast<float>(bits);
  const std::uint32_t sign = bits >> 31 << 15;
  const std::uint32_t infinity = (1U << 15) - (1U << format.fraction);
  if (std::isnan(value)) {  // quiet, with the payload's top bits
    const std::uint32_t payload = (bits & 0x7fffff) >> (23 - format.fraction);
    return static_cast<std::uint16_t>(sign | infinity | payload | 1U << (format.fraction - 1));
  }
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  const double size = std::fabs(static_cast<double>(value));
  if (size == 0) return static_cast<std::uint16_t>(sign);
  int exponent = std::max(std::ilogb(size), format.least);
  double steps = std::nearbyint(std::ldexp(size, format.fraction - exponent));  // ties to even: the default rounding mode
  if (steps == std::ldexp(1.0, format.fraction + 1)) {
    ++exponent;
    steps /= 2;
  }
  if (exponent > format.most) {
    overflowed = true;
    return static_cast<std::uint16_t>(sign | infinity);
  }
  const auto whole = static_cast<std::uint32_t>(steps);
  const std::uint32_t implicit = 1U << format.fraction;
  const std::uint32_t biased = whole < implicit ? 0 : static_cast<std::uint32_t>(exponent - format.least + 1);
  return static_cast<std::uint16_t>(sign | biased << format.fraction | (whole & (implicit - 1)));
}

std::uint16_t scalar(const Format& format, std::uint32_t bits) { return format.dtype == DType::kF16 ? f16_from_f32(bits) : bf16_from_f32(bits); }

// Every exponent, each with the fractions around every place where rounding turns, both signs; and all patterns in steps.
const std::vector<std::uint32_t>& patterns() {
  static const std::vector<std::uint32_t> all = [] {
    std::vector<std::uint32_t> out;
    for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
      for (unsigned bit = 0; bit <= 23; ++bit) {
        for (const std::uint32_t high : {0U, 1U, 2U, 3U, 0x7fU, 0x3fU, 0x55U}) {
          for (int near = -2; near <= 2; ++near) {
            const std::uint32_t fraction = ((high << bit) + (bit > 0 ? 1U << (bit - 1) : 0) + static_cast<std::uint32_t>(near)) & 0x7fffff;
            out.push_back(exponent << 23 | fraction);
            out.push_back(0x80000000 | exponent << 23 | fraction);
          }
        }
      }
    }
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4093) out.push_back(static_cast<std::uint32_t>(bits));
    return out;
  }();
  return all;
}

class Cast : public ::testing::TestWithParam<Format> {};

TEST_P(Cast, TheScalarDefinitionRoundsToNearestEven) {
  for (const std::uint32_t bits : patterns()) {
    bool overflowed;
    ASSERT_EQ(scalar(GetParam(), bits), reference(GetParam(), bits, overflowed)) << std::hex << bits;
  }
}

TEST_P(Cast, EveryVectorBodyGivesTheScalarBitsAndCount) {
  const auto& all = patterns();
  std::uint64_t expected = 0;
  std::vector<std::uint16_t> wanted, wanted_saturated;
  const auto largest = static_cast<std::uint16_t>(GetParam().dtype == DType::kF16 ? 0x7bff : 0x7f7f);
  for (const std::uint32_t bits : all) {
    bool overflowed;
    wanted.push_back(reference(GetParam(), bits, overflowed));
    wanted_saturated.push_back(overflowed ? static_cast<std::uint16_t>((wanted.back() & 0x8000) | largest) : wanted.back());
    expected += overflowed ? 1 : 0;
  }
  ASSERT_GT(expected, 20U);
  for_each_target([&](const std::string& target) {
    std::vector<std::uint16_t> out(all.size());
    const auto count = cast_elements(DType::kF32, std::as_bytes(std::span(all)), GetParam().dtype, std::as_writable_bytes(std::span(out)));
    ASSERT_TRUE(count.ok());
    EXPECT_EQ(*count, expected) << target;
    ASSERT_EQ(out, wanted) << target;
    const auto saturated = cast_elements(DType::kF32, std::as_bytes(std::span(all)), GetParam().dtype, std::as_writable_bytes(std::span(out)), Overflow::kSaturate);
    EXPECT_EQ(*saturated, expected) << target;
    ASSERT_EQ(out, wanted_saturated) << target;
  });
}

TEST_P(Cast, WideningIsExactForAllPatterns) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for_each_target([&](const std::string& target) {
    std::vector<std::uint32_t> wide(all.size());
    const auto count = cast_elements(GetParam().dtype, std::as_bytes(std::span(all)), DType::kF32, std::as_writable_bytes(std::span(wide)));
    ASSERT_TRUE(count.ok());
    EXPECT_EQ(*count, 0U);
    const std::uint16_t quiet = static_cast<std::uint16_t>(1U << (GetParam().fraction - 1));
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(wide[i], GetParam().dtype == DType::kF16 ? f32_from_f16(all[i]) : f32_from_bf16(all[i])) << target << std::hex << i;
      // Back it goes to the same bits, a signalling NaN to its quiet one.
      const bool nan = std::isnan(std::bit_cast<float>(wide[i]));
      ASSERT_EQ(scalar(GetParam(), wide[i]), nan ? all[i] | quiet : all[i]) << target << std::hex << i;
    }
  });
}

TEST_P(Cast, AnyCountAndAlignmentTouchesItsTargetOnly) {
  Random random(7);
  for_each_target([&](const std::string& target) {
    for (std::size_t count = 0; count < 70; ++count) {
      std::vector<std::byte> source(count * 4 + 1), out(count * 2 + 2, std::byte{0xee});
      for (std::byte& byte : source) byte = static_cast<std::byte>(random.next());
      const auto from = std::span(source).subspan(1);
      ASSERT_TRUE(cast_elements(DType::kF32, from, GetParam().dtype, std::span(out).subspan(1, count * 2)).ok());
      ASSERT_EQ(out.front(), std::byte{0xee}) << target;
      ASSERT_EQ(out.back(), std::byte{0xee}) << target;
      for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::uint16_t half;
        std::memcpy(&bits, from.data() + 4 * i, 4);
        std::memcpy(&half, out.data() + 1 + 2 * i, 2);
        ASSERT_EQ(half, scalar(GetParam(), bits)) << target << " " << count;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(To, Cast, ::testing::Values(kF16, kBf16), [](const auto& each) { return std::string(dtype_name(each.param.dtype)); });

TEST(CastElements, OtherTypesAndSizesAreRefused) {
  std::vector<std::byte> four(4), two(2), three(3);
  for (const auto& status : {cast_elements(DType::kF32, four, DType::kF32, four), cast_elements(DType::kF16, two, DType::kBF16, two),
                             cast_elements(DType::kI32, four, DType::kF16, two), cast_elements(DType::kF32, four, DType::kF16, four),
                             cast_elements(DType::kF32, three, DType::kF16, two), cast_elements(DType::kF16, two, DType::kF32, two)}) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code(), Code::kInvalid);
  }
}

}  // namespace
}  // namespace paramwire
