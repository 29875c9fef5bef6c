#include "paramwire/base/metrics.hpp"
#include "paramwire/base/trace.hpp"
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/types.hpp"

#include <gtest/gtest.h>

#include <string>

#include <pthread.h>

#include <thread>

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

// ---------------------------------------------------------------- metrics and traces

TEST(Histogram, ABucketsEndIsAtMostAQuarterAboveItsValues) {
  for (std::uint64_t value = 0; value < (std::uint64_t{1} << 39); value = value < 64 ? value + 1 : value + value / 7) {
    Histogram histogram;
    histogram.record(value);
    const HistogramSnapshot seen = histogram.snapshot();
    ASSERT_EQ(seen.count, 1U);
    ASSERT_EQ(seen.sum, value);
    ASSERT_EQ(seen.buckets.size(), 1U);
    const std::uint64_t upper = seen.buckets[0].upper;
    ASSERT_GE(upper, value);
    ASSERT_LE(upper, value + value / 4);
    // The end belongs to the bucket, and the next value does not.
    histogram.record(upper);
    ASSERT_EQ(histogram.snapshot().buckets.size(), 1U) << value;
    histogram.record(upper + 1);
    ASSERT_EQ(histogram.snapshot().buckets.size(), 2U) << value;
  }
}

TEST(Histogram, ValuesBeyondTheLastBucketAreCountedInIt) {
  Histogram histogram;
  histogram.record(std::uint64_t{1} << 40);
  histogram.record(~std::uint64_t{0});
  const HistogramSnapshot seen = histogram.snapshot();
  ASSERT_EQ(seen.buckets.size(), 1U);
  EXPECT_EQ(seen.buckets[0].count, 2U);
}

TEST(Histogram, QuantilesFollowTheRanks) {
  Histogram histogram;
  EXPECT_EQ(histogram.snapshot().quantile(0.5), 0U);
  for (int i = 0; i < 90; ++i) histogram.record(1);
  for (int i = 0; i < 10; ++i) histogram.record(3);
  const HistogramSnapshot seen = histogram.snapshot();
  EXPECT_EQ(seen.quantile(0.5), 1U);
  EXPECT_EQ(seen.quantile(0.9), 1U);
  EXPECT_EQ(seen.quantile(0.91), 3U);
  EXPECT_EQ(seen.quantile(1.0), 3U);
}

TEST(Histogram, ManyThreadsLoseNothing) {
  Histogram histogram;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) threads.emplace_back([&, t] { for (int i = 0; i < 10'000; ++i) histogram.record(t); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.snapshot().count, 40'000U);
  EXPECT_EQ(histogram.snapshot().sum, 60'000U);
}

TEST(Trace, SpansCarryNameTimesBytesAndThread) {
  const auto trace = Trace::create(16);
  ASSERT_TRUE(trace.ok());
  (*trace)->add("read", 1'234'567, 2'234'570, 99);
  { const TraceSpan span(trace->get(), "step"); }
  const std::string json = (*trace)->json();
  EXPECT_NE(json.find("\"name\": \"read\", \"cat\": \"paramwire\", \"ph\": \"X\", \"ts\": 1234.567, \"dur\": 1000.003"), std::string::npos) << json;
  EXPECT_NE(json.find("\"bytes\": 99"), std::string::npos);
  EXPECT_NE(json.find("\"name\": \"step\""), std::string::npos);
  EXPECT_NE(json.find("\"thread_name\""), std::string::npos);
}

TEST(Trace, WhatDoesNotFitIsCountedAndNotWritten) {
  const auto trace = Trace::create(2);
  ASSERT_TRUE(trace.ok());
  for (int i = 0; i < 5; ++i) (*trace)->add("read", i, i + 1, 0);
  EXPECT_EQ((*trace)->recorded(), 2U);
  EXPECT_EQ((*trace)->dropped(), 3U);
  EXPECT_NE((*trace)->json().find("\"dropped\": 3"), std::string::npos);
  EXPECT_EQ(Trace::create(0).error().code(), Code::kInvalid);
}

TEST(Trace, ANameOfAThreadIsKnownInEveryTraceThatItWritesTo) {
  for (int round = 0; round < 3; ++round) {
    const auto trace = Trace::create(4);
    ASSERT_TRUE(trace.ok());
    std::thread([&] {
      pthread_setname_np(pthread_self(), "pw-\"odd\"");
      (*trace)->add("read", 0, 1, 0);
    }).join();
    (*trace)->add("read", 0, 1, 0);
    const std::string json = (*trace)->json();
    EXPECT_NE(json.find("pw-\\\"odd\\\""), std::string::npos) << json;
    EXPECT_NE(json.find("base_test"), std::string::npos) << json;
  }
}

TEST(Trace, ReadingWhileThreadsWriteShowsWholeSpansOnly) {
  const auto trace = Trace::create(20'000);
  ASSERT_TRUE(trace.ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) threads.emplace_back([&] { for (int i = 0; i < 5'000; ++i) (*trace)->add("read", 7'000, 8'000, 5); });
  std::size_t whole = 0, torn = 0;
  const auto look = [&] {
    const std::string json = (*trace)->json();
    for (std::size_t at = json.find("\"ph\": \"X\""); at != std::string::npos; at = json.find("\"ph\": \"X\"", at + 1)) {
      ++(json.compare(at, 38, "\"ph\": \"X\", \"ts\": 7.000, \"dur\": 1.000, ") == 0 ? whole : torn);
    }
  };
  while ((*trace)->recorded() < 10'000U) look();
  look();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ((*trace)->recorded(), 10'000U);
  EXPECT_EQ(torn, 0U);
  EXPECT_GT(whole, 0U);
}

}  // namespace
}  // namespace paramwire
