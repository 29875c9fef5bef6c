// How much a OneSidedReader has under way at once, what becomes of a batch that is given up, and batches of every kind in every order of events.
#include "support/one_sided_world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace paramwire {
namespace {

using testing::PlainBlock;
using testing::PlainWorld;
using testing::ReadPump;

Bytes bytes_of(const PlainBlock& block, ByteRange range) {
  const auto part = block.payload.subspan(static_cast<std::size_t>(range.offset), static_cast<std::size_t>(range.size));
  return {part.begin(), part.end()};
}

TEST(OneSidedLimits, NoMoreReadsAreUnderWayThanMayBe) {
  PlainWorld world;
  std::vector<BlockRead> batch;
  std::vector<Bytes> targets(300, Bytes(64));
  for (std::size_t i = 0; i < targets.size(); ++i) batch.push_back(world.put(64, i * 64).read(targets[i]));
  for (const std::uint32_t reads_max : {1U, 2U, 64U}) {
    OneSidedOptions options;
    options.reads_max = reads_max;
    ReadPump pump(world, options);
    pump.begin(batch);
    while (pump.give(1000) > 0) {
    }
    EXPECT_EQ(pump.outstanding(), reads_max);
    pump.arrive(1);
    EXPECT_EQ(pump.give(1000), 1U) << "one came, one goes";
    pump.finish();
    for (const BlockRead& item : batch) EXPECT_TRUE(item.result.ok());
    EXPECT_EQ(pump.early_headers(), 0U);
  }
}

TEST(OneSidedLimits, BytesUnderWayStayBelowTheLimitAndOneReadOverItMayAlwaysGo) {
  PlainWorld world;
  const PlainBlock& block = world.put(8 << 20, 0);
  Bytes target(8 << 20);
  world.add_registered(target);
  BlockRead item = block.read(target);
  for (const std::uint64_t bytes_max : {std::uint64_t{1}, std::uint64_t{1} << 20, std::uint64_t{3} << 20}) {
    OneSidedOptions options;
    options.bytes_max = bytes_max;
    ReadPump pump(world, options);
    pump.begin({&item, 1});
    while (pump.give() > 0) {
    }
    EXPECT_EQ(pump.outstanding(), std::max<std::uint64_t>(1, bytes_max >> 20));
    pump.finish();
    EXPECT_TRUE(item.result.ok());
  }
}

TEST(OneSidedLimits, WhatGoesTogetherIsASliceAtMostBesideTheReadThatFillsIt) {
  PlainWorld world;
  Bytes target(1 << 20);
  world.add_registered(target);
  BlockRead item = world.put(1 << 20, 0).read(target);
  OneSidedOptions options;
  options.slice = 65536;
  ReadPump pump(world, options, 4 * 65536);
  pump.begin({&item, 1});
  EXPECT_EQ(pump.give(), 1U) << "a slice is one of them";
  pump.finish();

  std::vector<Bytes> targets(40, Bytes(4096));
  std::vector<BlockRead> small;
  for (std::size_t i = 0; i < targets.size(); ++i) small.push_back(world.put(4096, (2 << 20) + i * 4096).read(targets[i]));
  pump.begin(small);
  EXPECT_EQ(pump.give(), 16U);
  EXPECT_EQ(pump.give(5), 5U) << "no more than there is room for";
  pump.finish();
  for (const BlockRead& each : small) EXPECT_TRUE(each.result.ok());
}

TEST(OneSidedLimits, AFullStagingBufferWaitsForWhatItHolds) {
  PlainWorld world;
  Bytes target(1 << 20);
  BlockRead item = world.put(1 << 20, 0).read(target);
  OneSidedOptions options;
  options.slice = 65536;
  ReadPump pump(world, options, 3 * 65536);
  pump.begin({&item, 1});
  while (pump.give() > 0) {
  }
  EXPECT_EQ(pump.outstanding(), 3U);
  pump.arrive(3);
  EXPECT_EQ(pump.give(), 0U) << "here, and not looked at yet";
  EXPECT_TRUE(pump.consume());
  EXPECT_EQ(pump.give(), 1U);
  pump.finish();
  EXPECT_TRUE(item.result.ok());
}

TEST(OneSidedLimits, ABatchMuchLargerThanWhatIsOpenAtOnceIsReadToItsEnd) {
  PlainWorld world;
  std::vector<Bytes> targets(3000);
  std::vector<BlockRead> batch;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    targets[i].resize(i % 97);
    batch.push_back(world.put(i % 97, i * 128).read(targets[i]));
    if (i % 10 == 3) batch.back().range.size += 1;  // fails without a read
  }
  ReadPump pump(world, {});
  pump.run(batch);
  for (std::size_t i = 0; i < batch.size(); ++i) EXPECT_EQ(batch[i].result.ok(), i % 10 != 3) << i;
}

TEST(OneSidedLimits, ABatchCanBeGivenUpAtAnyPointAndTheReaderGoesOn) {
  PlainWorld world(12 << 20);
  std::vector<const PlainBlock*> blocks;
  for (std::uint64_t i = 0; i < 12; ++i) blocks.push_back(&world.put(i * 12'000, i << 20));
  const Status given_up = Error(Code::kTimeout, "given up");
  OneSidedOptions options;
  options.slice = 4096;
  ReadPump pump(world, options, 32768);
  for (std::uint64_t steps = 0;; ++steps) {
    SCOPED_TRACE(cat("after ", steps, " steps"));
    std::vector<Bytes> targets;
    std::vector<BlockRead> batch;
    for (const PlainBlock* block : blocks) targets.emplace_back(static_cast<std::size_t>(block->entry.raw_size) / 2);
    for (std::size_t i = 0; i < blocks.size(); ++i) batch.push_back(blocks[i]->read({blocks[i]->entry.raw_size / 4, targets[i].size()}, targets[i]));
    Random random(5);  // the same way each time, a step further
    pump.begin(batch);
    for (std::uint64_t step = 0; step < steps && !pump.reader().done(); ++step) pump.step(random);
    const bool whole = pump.reader().done();
    const std::size_t unfinished = pump.reader().unfinished();
    pump.abandon(given_up);
    EXPECT_TRUE(pump.reader().done());
    std::size_t gave_up = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].result.ok()) {
        EXPECT_EQ(targets[i], bytes_of(*blocks[i], batch[i].range));
      } else {
        EXPECT_EQ(batch[i].result.error().message(), "given up");
        ++gave_up;
      }
    }
    EXPECT_EQ(gave_up, unfinished);
    pump.run(batch);
    for (std::size_t i = 0; i < batch.size(); ++i) ASSERT_TRUE(batch[i].result.ok() && targets[i] == bytes_of(*blocks[i], batch[i].range)) << i;
    if (whole || HasFailure()) break;
    ASSERT_LT(steps, 5000U);
  }
}

// Blocks of all kinds, spoiled or not, in batches of any size, with limits of any kind, and events in any order. Each item must come out as the state
// of its slot says.
TEST(OneSidedRandom, EveryItemOfEveryBatchComesOutAsItsSlotSays) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  Random random(seed);
  PlainWorld world(kRegionBytes + (8 << 20));
  std::vector<PlainBlock*> blocks;
  const std::uint64_t sizes[] = {0, 1, 64, 100, 4096, 65535, 65536, 65537, 131072, 200'000, 300'000};
  std::uint64_t at = kRegionBytes - 1'500'000;  // so that some lie across a region's end
  at -= at % 64;
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t size = sizes[random.below(std::size(sizes))] + random.below(3);
    blocks.push_back(&world.put(size, at, 0));
    at += (size + 63) / 64 * 64 + 64 * (1 + random.below(9));
  }
  Bytes registered(2 << 20);
  world.add_registered(registered);
  enum class State { kGood, kRewritten, kBadByte, kBadTable };
  std::uint64_t read = 0, refused = 0;
  for (int round = 0; round < 2000; ++round) {
    OneSidedOptions options;
    options.slice = static_cast<std::uint32_t>((random.chance(3) ? 64 : 1024) << random.below(8));
    options.reads_max = static_cast<std::uint32_t>(1 + random.below(64));
    options.bytes_max = std::uint64_t{1} << random.below(24);
    ReadPump pump(world, options, 2 * options.slice + 64 * static_cast<std::size_t>(random.below(2000)));
    pump.tables_wrong = true;
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(random.next()));
    const std::size_t count = 1 + static_cast<std::size_t>(random.below(random.chance(5) ? blocks.size() : 6));
    std::vector<Bytes> targets(count);
    std::vector<BlockRead> batch;
    std::vector<State> states;
    std::size_t direct_at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      PlainBlock& block = *blocks[i];
      const std::uint64_t size = block.entry.raw_size;
      ByteRange range{0, size};
      if (random.chance(60)) {
        range.offset = random.below(size + 1);
        range.size = random.below(size - range.offset + 1);
      }
      std::span<std::byte> target;
      if (random.chance(50) && direct_at + range.size <= registered.size()) {
        target = std::span(registered).subspan(direct_at, static_cast<std::size_t>(range.size));
        direct_at += target.size();
      } else {
        targets[i].resize(static_cast<std::size_t>(range.size));
        target = targets[i];
      }
      batch.push_back(block.read(range, target));
      State state = random.chance(85) ? State::kGood : static_cast<State>(1 + random.below(3));
      const bool by_table = extent_count(size) > 1 && range.size > 0 && range != ByteRange{0, size};
      if (state == State::kBadByte && range.size == 0) state = State::kGood;
      if (state == State::kBadTable && !by_table) state = State::kGood;
      states.push_back(state);
      if (state == State::kRewritten) block.header->seq += 2;
      if (state == State::kBadByte) block.payload[static_cast<std::size_t>(range.offset)] ^= std::byte{0x40};
      if (state == State::kBadTable) world.table_of(block)[3] ^= std::byte{0x40};
      block.seal();
    }
    pump.begin(batch);
    for (int steps = 0; !pump.reader().done() && steps < 400; ++steps) pump.step(random);
    pump.finish();
    EXPECT_EQ(pump.early_headers(), 0U);
    for (std::size_t i = 0; i < count; ++i) {
      PlainBlock& block = *blocks[i];
      const Status& result = batch[i].result;
      switch (states[i]) {
        case State::kGood:
          ASSERT_TRUE(result.ok()) << result.error().to_string();
          ASSERT_TRUE(std::ranges::equal(batch[i].target, bytes_of(block, batch[i].range)));
          ++read;
          break;
        case State::kRewritten:
          ASSERT_FALSE(result.ok());
          ASSERT_EQ(result.error().code(), Code::kStale);
          block.header->seq -= 2;
          break;
        default:
          ASSERT_FALSE(result.ok());
          ASSERT_EQ(result.error().code(), Code::kCorrupt);
          if (states[i] == State::kBadByte) block.payload[static_cast<std::size_t>(batch[i].range.offset)] ^= std::byte{0x40};
          else world.table_of(block)[3] ^= std::byte{0x40};
      }
      refused += result.ok() ? 0U : 1U;
      block.seal();
    }
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(read, 3000U);
  EXPECT_GT(refused, 300U);
}

}  // namespace
}  // namespace paramwire
