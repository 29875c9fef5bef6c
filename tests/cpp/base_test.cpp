#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/types.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace paramwire {
namespace {

TEST(Text, HumanBytesUsesTheLargestBinaryUnit) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(std::uint64_t{16} << 20), "16 MiB");
}

TEST(Types, DTypeNamesRoundTripAndForeignSpellingsAreKnown) {
  for (std::uint16_t code = 1; code <= kDTypeMax; ++code) {
    const auto dtype = static_cast<DType>(code);
    EXPECT_EQ(*dtype_from_name(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(*dtype_from_name("float32"), DType::kF32);
  EXPECT_EQ(*dtype_from_name("BF16"), DType::kBF16);
  EXPECT_EQ(dtype_from_name("f99").error().code(), Code::kInvalid);
  EXPECT_EQ(dtype_from_code(0).error().code(), Code::kInvalid);
  EXPECT_EQ(dtype_from_code(kDTypeMax + 1).error().code(), Code::kInvalid);
}

TEST(Types, PackedNibblesRoundUpToABytes) {
  EXPECT_EQ(tensor_bytes(DType::kI4, Shape{5}), 3U);
  EXPECT_EQ(tensor_bytes(DType::kF32, Shape{}), 4U);
  EXPECT_EQ(tensor_bytes(DType::kF32, Shape{3, 0, 2}), 0U);
}

TEST(Types, ShapesThatOverflowAreRefusedEvenBesideAZeroAxis) {
  const std::vector<std::uint64_t> big = {0, std::uint64_t{1} << 40, std::uint64_t{1} << 40};
  EXPECT_EQ(Shape::from(big).error().code(), Code::kInvalid);
  const std::vector<std::uint64_t> nine(9, 1);
  EXPECT_EQ(Shape::from(nine).error().code(), Code::kInvalid);
}

TEST(Types, ShardShapeCutsRowsAndHeads) {
  const Shape shape{576, 64};
  EXPECT_EQ(*shard_shape(shape, Shard::rows(16, 32)), (Shape{16, 64}));
  EXPECT_EQ(*shard_shape(shape, Shard::head_range(9, 3, 6)), (Shape{192, 64}));
  EXPECT_FALSE(shard_shape(shape, Shard::rows(570, 577)).ok());
  EXPECT_FALSE(shard_shape(shape, Shard::rows(5, 5)).ok());
  EXPECT_FALSE(shard_shape(shape, Shard::head_range(7, 0, 1)).ok());
  EXPECT_FALSE(shard_shape(shape, Shard::head_range(9, 8, 10)).ok());
  EXPECT_FALSE(shard_shape(Shape{}, Shard::rows(0, 1)).ok());
  EXPECT_FALSE(shard_shape(Shape{0, 4}, Shard::rows(0, 1)).ok());
  EXPECT_FALSE(shard_shape(Shape{0, 4}, Shard::head_range(2, 0, 1)).ok());  // 2 divides 0, but there is no head
}

TEST(Types, VersionsCompareByEpochThenCounter) {
  EXPECT_LT((Version{1, 99}), (Version{2, 1}));
  EXPECT_LT((Version{2, 1}), (Version{2, 2}));
  EXPECT_FALSE((Version{1, 0}).valid());
  EXPECT_EQ(to_text(std::nullopt), "none");
}

TEST(Bytes, ReaderFailsStickyOnShortInputAndOverlongVarints) {
  std::vector<std::byte> bytes;
  ByteWriter writer(bytes);
  writer.put<std::uint32_t>(0x01020304);
  writer.varint(300);
  writer.text("abc");
  ByteReader reader(bytes);
  EXPECT_EQ(reader.get<std::uint32_t>(), 0x01020304U);
  EXPECT_EQ(reader.varint(), 300U);
  EXPECT_EQ(reader.text(3), "abc");
  EXPECT_TRUE(reader.finished());
  EXPECT_EQ(reader.get<std::uint8_t>(), 0);
  EXPECT_FALSE(reader.ok());

  const std::vector<std::byte> overlong = {std::byte{0x80}, std::byte{0x00}};
  ByteReader second(overlong);
  EXPECT_EQ(second.varint(), 0U);
  EXPECT_FALSE(second.ok());
}

TEST(Bytes, TextLongerThanItsLimitIsRefusedBeforeReading) {
  std::vector<std::byte> bytes;
  ByteWriter(bytes).varint(std::uint64_t{1} << 60);
  ByteReader reader(bytes);
  EXPECT_EQ(reader.text(1024), "");
  EXPECT_FALSE(reader.ok());
}

TEST(Env, RandomIsReproducibleFromItsSeed) {
  Random a(7), b(7), c(8);
  const auto first = a.next();
  EXPECT_EQ(first, b.next());
  EXPECT_NE(first, c.next());
  for (int i = 0; i < 1000; ++i) EXPECT_LT(a.below(3), 3U);
}

}  // namespace
}  // namespace paramwire
