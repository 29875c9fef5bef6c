// The slot protocol for memory that answers late, against slots in plain memory.
#include "support/one_sided_world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace paramwire {
namespace {

using testing::PlainBlock;
using testing::PlainWorld;
using testing::ReadPump;

constexpr std::uint64_t kExtent = kExtentBytes;

Bytes part_of(const PlainBlock& block, ByteRange range) {
  const auto part = block.payload.subspan(static_cast<std::size_t>(range.offset), static_cast<std::size_t>(range.size));
  return {part.begin(), part.end()};
}

// Sizes that end a class: nothing, an alignment, an extent, a slice, more than the staging buffer.
const std::vector<std::uint64_t> kSizes = {0, 1, 63, 64, 65, 4096, kExtent - 1, kExtent, kExtent + 1, 2 * kExtent, 5 * kExtent + 7, 1 << 20, (1 << 20) + 1, (5 << 20) + 3};

class OneSidedReaderTest : public ::testing::Test {
 protected:
  // All of kSizes, one after another, each at a multiple of 64.
  void put_sizes() {
    std::uint64_t at = 0;
    for (const std::uint64_t size : kSizes) {
      world_.put(size, at);
      at += (size + 63) / 64 * 64 + (extent_count(size) * sizeof(ExtentRow) + 63) / 64 * 64 + 64;
    }
  }
  const PlainBlock& last() const { return world_.blocks().back(); }
  // One read to its end.
  Status read(ReadPump& pump, const PlainBlock& block, ByteRange range, std::span<std::byte> target) {
    BlockRead item = block.read(range, target);
    pump.run({&item, 1});
    return item.result;
  }
  Status read(const PlainBlock& block, const OneSidedOptions& options = {}) {
    ReadPump pump(world_, options);
    pump.tables_wrong = true;
    Bytes target(static_cast<std::size_t>(block.entry.raw_size));
    return read(pump, block, {0, block.entry.raw_size}, target);
  }

  PlainWorld world_;
};

TEST_F(OneSidedReaderTest, EverySizeIsReadWholeStagedAndDirect) {
  put_sizes();
  for (const std::uint32_t slice : {4096U, 65536U, 1U << 20}) {
    for (const bool registered : {false, true}) {
      SCOPED_TRACE(cat("slice ", slice, registered ? " registered" : " staged"));
      OneSidedOptions options;
      options.slice = slice;
      ReadPump pump(world_, options, 2 * slice);
      std::vector<Bytes> targets;
      std::vector<BlockRead> batch;
      for (const std::uint64_t size : kSizes) targets.emplace_back(size, std::byte{0xee});
      std::uint64_t bytes = 0;
      std::size_t i = 0;
      for (const PlainBlock& block : world_.blocks()) {
        if (registered) world_.add_registered(targets[i]);
        batch.push_back(block.read(targets[i++]));
        bytes += block.entry.raw_size;
      }
      pump.run(batch);
      i = 0;
      for (const PlainBlock& block : world_.blocks()) {
        EXPECT_TRUE(batch[i].result.ok()) << batch[i].result.error().to_string();
        EXPECT_EQ(targets[i], part_of(block, {0, block.entry.raw_size})) << block.entry.raw_size;
        ++i;
      }
      EXPECT_EQ(pump.early_headers(), 0U);
      EXPECT_EQ(pump.reader().wire_bytes(), bytes) << "whole blocks need no table";
      EXPECT_EQ(pump.reader().direct_bytes(), registered ? bytes : 0U);
      EXPECT_EQ(pump.reader().headers(), kSizes.size());
      world_.forget_registered();
    }
  }
}

TEST_F(OneSidedReaderTest, EveryRangeIsReadStagedAndDirectWithAndWithoutItsTable) {
  put_sizes();
  Random random(7);
  for (const bool registered : {false, true}) {
    OneSidedOptions options;
    options.slice = 8192;
    ReadPump pump(world_, options, 65536);
    for (const PlainBlock& block : world_.blocks()) {
      const std::uint64_t size = block.entry.raw_size;
      std::vector<ByteRange> ranges = {{0, 0}, {size, 0}, {0, size / 2}, {size / 2, size - size / 2}};
      for (const std::uint64_t edge : {kExtent, 2 * kExtent}) {
        for (const std::uint64_t begin : {edge - 1, edge, edge + 1}) {
          for (const std::uint64_t count : {std::uint64_t{1}, std::uint64_t{2}, kExtent - 1, kExtent, kExtent + 1, 2 * kExtent + 3}) {
            if (begin + count <= size) ranges.push_back({begin, count});
          }
        }
      }
      for (int i = 0; i < 12 && size > 0; ++i) {
        const std::uint64_t begin = random.below(size);
        ranges.push_back({begin, random.below(size - begin + 1)});
      }
      for (const ByteRange& range : ranges) {
        Bytes target(static_cast<std::size_t>(range.size), std::byte{0xee});
        if (registered) world_.add_registered(target);
        const Status status = read(pump, block, range, target);
        ASSERT_TRUE(status.ok()) << status.error().to_string();
        ASSERT_EQ(target, part_of(block, range)) << size << " [" << range.offset << ", +" << range.size << ']';
        world_.forget_registered();
      }
    }
    EXPECT_EQ(pump.early_headers(), 0U);
  }
}

TEST_F(OneSidedReaderTest, OfARangeIntoRegisteredMemoryOnlyTheEdgesAreStaged) {
  const PlainBlock& block = world_.put(5 * kExtent, 0);
  ReadPump pump(world_, {});
  const ByteRange range{kExtent + 100, 2 * kExtent};  // 100 bytes before it in its first extent, all but 100 behind it in its last
  Bytes target(static_cast<std::size_t>(range.size));
  world_.add_registered(target);
  ASSERT_TRUE(read(pump, block, range, target).ok());
  EXPECT_EQ(target, part_of(block, range));
  EXPECT_EQ(pump.reader().direct_bytes(), range.size);
  std::uint64_t staged = 0, table = 0;
  for (const RemoteRead& each : pump.given()) {
    if (each.arena == PlainWorld::kHeaders || !each.staged) continue;
    (each.offset >= block.entry.stored_size ? table : staged) += each.size;
  }
  EXPECT_EQ(staged, kExtent) << "100 before, the rest behind";
  EXPECT_EQ(table, 5 * sizeof(ExtentRow));
}

TEST_F(OneSidedReaderTest, ATargetThatIsRegisteredInPartIsStaged) {
  const PlainBlock& block = world_.put(3 * kExtent, 0);
  ReadPump pump(world_, {});
  Bytes target(3 * kExtent);
  world_.add_registered(std::span(target).first(target.size() - 1));
  ASSERT_TRUE(read(pump, block, {0, 3 * kExtent}, target).ok());
  EXPECT_EQ(target, part_of(block, {0, 3 * kExtent}));
  EXPECT_EQ(pump.reader().direct_bytes(), 0U);
}

TEST_F(OneSidedReaderTest, ABlockWithoutATableIsStagedForARangeOfIt) {
  const PlainBlock& block = world_.put(1000, 0);
  ReadPump pump(world_, {});
  Bytes target(10);
  world_.add_registered(target);
  ASSERT_TRUE(read(pump, block, {500, 10}, target).ok());
  EXPECT_EQ(target, part_of(block, {500, 10}));
  EXPECT_EQ(pump.reader().direct_bytes(), 0U) << "the CRC is of all of it";
  EXPECT_EQ(pump.reader().wire_bytes(), 1000U);
}

TEST_F(OneSidedReaderTest, NoReadCrossesARegion) {
  // The boundary falls on an extent, into one, and into the table.
  const std::uint64_t boundary = kRegionBytes;
  const PlainBlock& on = world_.put(4 * kExtent, boundary - 2 * kExtent);
  const PlainBlock& inside = world_.put(8 * kExtent, 2 * boundary - 3 * kExtent - 64);
  PlainWorld other;
  const PlainBlock& in_table = other.put(200 * kExtent, boundary - 200 * kExtent - 64);  // a table of 1,600 bytes
  const PlainBlock& later = other.put(200 * kExtent, 2 * boundary - 200 * kExtent - 1024 - 64);
  for (const bool registered : {false, true}) {
    for (const auto& [block, where] : {std::pair(&on, &world_), std::pair(&inside, &world_), std::pair(&in_table, &other), std::pair(&later, &other)}) {
      ReadPump pump(*where, {});
      for (const ByteRange& range : {ByteRange{0, block->entry.raw_size}, ByteRange{1, block->entry.raw_size - 2}, ByteRange{kExtent + 5, 2 * kExtent}}) {
        Bytes target(static_cast<std::size_t>(range.size));
        if (registered) where->add_registered(target);
        const Status status = read(pump, *block, range, target);
        ASSERT_TRUE(status.ok()) << status.error().to_string();
        ASSERT_EQ(target, part_of(*block, range));
        where->forget_registered();
      }
    }
  }
}

TEST_F(OneSidedReaderTest, ATableIsAskedForOnceAndKept) {
  const PlainBlock& block = world_.put(100 * kExtent, 0);
  ReadPump pump(world_, {});
  Bytes target(10);
  ASSERT_TRUE(read(pump, block, {5 * kExtent, 10}, target).ok());
  EXPECT_EQ(pump.reader().wire_bytes(), kExtent + 100 * sizeof(ExtentRow));
  ASSERT_TRUE(read(pump, block, {7 * kExtent, 10}, target).ok());
  EXPECT_EQ(pump.reader().wire_bytes(), 2 * kExtent + 100 * sizeof(ExtentRow));
  EXPECT_EQ(pump.given().size(), 2U) << "an extent and the header";
}

TEST_F(OneSidedReaderTest, TablesThatWereUsedLastAreKeptAndOthersAreAskedForAgain) {
  std::vector<const PlainBlock*> blocks;
  for (std::uint64_t i = 0; i < 70; ++i) blocks.push_back(&world_.put(2 * kExtent, i * 3 * kExtent));
  ReadPump pump(world_, {});
  Bytes target(10);
  for (const PlainBlock* block : blocks) ASSERT_TRUE(read(pump, *block, {0, 10}, target).ok());
  ASSERT_TRUE(read(pump, *blocks[69], {0, 10}, target).ok());
  EXPECT_EQ(pump.given().size(), 2U);
  ASSERT_TRUE(read(pump, *blocks[0], {0, 10}, target).ok());
  EXPECT_EQ(pump.given().size(), 3U) << "64 are kept";
  EXPECT_EQ(target, part_of(*blocks[0], {0, 10}));
}

TEST_F(OneSidedReaderTest, DeferredExtentsAreMovedUnsummedAndTheirChecksComeFromTheTable) {
  const PlainBlock& block = world_.put(7 * kExtent + 100, 0);
  block.payload[3 * kExtent + 5] ^= std::byte{1};  // not what the table says, in an extent that is whole in every range here
  for (const bool registered : {false, true}) {
    for (const std::uint32_t slice : {4096U, 3U * 65536U / 2U, 1U << 20}) {
      for (const ByteRange& range : {ByteRange{0, block.entry.raw_size}, ByteRange{kExtent, 5 * kExtent}, ByteRange{kExtent + 1, 5 * kExtent}, ByteRange{1, block.entry.raw_size - 1}}) {
        SCOPED_TRACE(cat(registered ? "registered" : "staged", " slice ", slice, " [", range.offset, ", +", range.size, ']'));
        OneSidedOptions options;
        options.slice = slice;
        ReadPump pump(world_, options, std::size_t{2} << 20);
        Bytes target(static_cast<std::size_t>(range.size), std::byte{0xee});
        if (registered) world_.add_registered(target);
        const std::uint64_t first = (range.offset + kExtent - 1) / kExtent;
        const std::uint64_t end = range.offset + range.size == block.entry.raw_size ? 8 : (range.offset + range.size) / kExtent;
        for (int turn = 0; turn < 2; ++turn) {  // the second time the table is known
          std::vector<ExtentCheck> checks(static_cast<std::size_t>(end - first));
          BlockRead item = block.read(range, target);
          item.checks = checks;
          pump.run({&item, 1});
          ASSERT_TRUE(item.result.ok()) << item.result.error().to_string();
          ASSERT_EQ(target, part_of(block, range));
          for (std::uint64_t i = first; i < end; ++i) {
            const ExtentCheck& check = checks[static_cast<std::size_t>(i - first)];
            EXPECT_EQ(check.offset, i * kExtent - range.offset);
            EXPECT_EQ(check.size, i == 7 ? 100U : kExtent);
            const bool right = verify_extents(target, {&check, 1}).ok();
            EXPECT_EQ(right, i != 3) << i;
          }
        }
        EXPECT_EQ(pump.early_headers(), 0U);
        world_.forget_registered();
      }
    }
  }
}

TEST_F(OneSidedReaderTest, ADeferredBlockThatChangesWhileItIsReadIsStale) {
  PlainBlock& block = world_.put(3 * kExtent, 0);
  for (const bool registered : {false, true}) {
    ReadPump pump(world_, {});
    Bytes target(3 * kExtent);
    if (registered) world_.add_registered(target);
    std::vector<ExtentCheck> checks(3);
    BlockRead item = block.read(target);
    item.checks = checks;
    block.header->seq -= block.header->seq == block.locator.seq ? 0 : 2;
    block.seal();
    pump.begin({&item, 1});
    pump.give();  // the table
    pump.arrive(1);
    while (pump.consume()) {}
    pump.give(1);  // the payload, before the writer comes
    pump.arrive(pump.outstanding());
    block.header->seq += 2;
    block.seal();
    block.payload[0] ^= std::byte{1};
    pump.finish();
    ASSERT_FALSE(item.result.ok());
    EXPECT_EQ(item.result.error().code(), Code::kStale) << item.result.error().to_string();
    world_.forget_registered();
  }
}

// ---------------------------------------------------------------- the order

TEST_F(OneSidedReaderTest, AHeaderIsAskedForWhenTheLastOfItsPayloadIsHereAndNotBefore) {
  const PlainBlock& block = world_.put(40 * 4096, 0);
  OneSidedOptions options;
  options.slice = 4096;
  ReadPump pump(world_, options, 1 << 20);
  Bytes target(40 * 4096);
  BlockRead item = block.read(target);
  pump.begin({&item, 1});
  while (pump.give(1) > 0) {
  }
  ASSERT_EQ(pump.outstanding(), 40U) << "all of the payload";
  for (int left = 40; left > 1; --left) {
    pump.arrive(1);
    EXPECT_EQ(pump.give(), 0U) << left - 1 << " to come";
    EXPECT_TRUE(pump.consume());
    EXPECT_EQ(pump.give(), 0U) << "checking what came changes nothing";
  }
  pump.arrive(1);
  ASSERT_EQ(pump.give(), 1U);
  EXPECT_EQ(pump.given().back().arena, PlainWorld::kHeaders);
  EXPECT_FALSE(pump.reader().done());
  pump.arrive(1);
  while (pump.consume()) {
  }
  EXPECT_TRUE(pump.reader().done());
  EXPECT_TRUE(item.result.ok());
}

TEST_F(OneSidedReaderTest, TheKnownWrongOrderAsksForTheHeaderWithThePayload) {
  const PlainBlock& block = world_.put(3 * kExtent, 0);
  OneSidedOptions options;
  options.header_with_payload = true;
  ReadPump pump(world_, options);
  Bytes target(3 * kExtent), part(10);
  EXPECT_TRUE(read(pump, block, {0, 3 * kExtent}, target).ok());
  EXPECT_EQ(pump.given().size(), 2U);
  EXPECT_EQ(pump.early_headers(), 1U) << "and the pump sees it, or its other tests prove nothing";
  EXPECT_TRUE(read(pump, block, {kExtent, 10}, part).ok());
  EXPECT_EQ(part, part_of(block, {kExtent, 10}));
  EXPECT_EQ(pump.early_headers(), 2U);
  const PlainBlock& empty = world_.put(0, 8 * kExtent);
  EXPECT_TRUE(read(pump, empty, {0, 0}, {}).ok());
}

TEST_F(OneSidedReaderTest, AnEmptyBlockAndAnEmptyRangeAreTheirHeadersWord) {
  const PlainBlock& empty = world_.put(0, 0);
  const PlainBlock& large = world_.put(3 * kExtent, 64);
  ReadPump pump(world_, {});
  for (const auto& [block, range] : {std::pair(&empty, ByteRange{0, 0}), std::pair(&large, ByteRange{kExtent, 0})}) {
    EXPECT_TRUE(read(pump, *block, range, {}).ok());
    ASSERT_EQ(pump.given().size(), 1U);
    EXPECT_EQ(pump.given()[0].arena, PlainWorld::kHeaders);
    block->header->seq += 2;
    EXPECT_EQ(read(pump, *block, range, {}).error().code(), Code::kStale);
  }
}

// ---------------------------------------------------------------- what is refused

TEST_F(OneSidedReaderTest, AHeaderThatDoesNotVouchIsStaleWithTheReason) {
  const PlainBlock& good = world_.put(1000, 0);
  const SlotHeader kept = *good.header;
  const auto why = [&](const std::function<void(SlotHeader&)>& spoil) {
    *good.header = kept;
    spoil(*good.header);
    const Status status = read(good);
    EXPECT_FALSE(status.ok());
    if (status.ok()) return std::string();
    EXPECT_EQ(status.error().code(), Code::kStale);
    return status.error().message();
  };
  const auto sealed = [](auto change) {
    return [change](SlotHeader& header) {
      change(header);
      header.header_crc = slot_header_crc(header);
    };
  };
  EXPECT_NE(why(sealed([](SlotHeader& h) { h.seq += 1; })).find("slot withdrawn"), std::string::npos);
  EXPECT_NE(why(sealed([](SlotHeader& h) { h.seq += 2; })).find("slot rewritten"), std::string::npos);
  EXPECT_NE(why(sealed([](SlotHeader& h) { h.version_counter += 1; })).find("other block or version"), std::string::npos);
  EXPECT_NE(why(sealed([](SlotHeader& h) { h.block ^= 1; })).find("other block or version"), std::string::npos);
  EXPECT_NE(why(sealed([](SlotHeader& h) { h.epoch += 1; })).find("other epoch"), std::string::npos);
  EXPECT_NE(why([](SlotHeader& h) { h.stored_size ^= 1; }).find("header CRC"), std::string::npos);
  *good.header = kept;
  EXPECT_TRUE(read(good).ok());
}

TEST_F(OneSidedReaderTest, AHeaderThatDidNotComeThoughItsReadCompletedVouchesForNothing) {
  const PlainBlock& block = world_.put(1000, 0);
  OneSidedOptions options;
  options.slice = 512;
  ReadPump pump(world_, options, 1024 + 64);  // so that it lands where the one before landed
  Bytes target(1000);
  for (const bool lost : {true, false, true, false}) {
    pump.headers_lost = lost;
    const Status status = read(pump, block, {0, 1000}, target);
    ASSERT_EQ(status.ok(), !lost);
    if (!lost) continue;
    EXPECT_EQ(status.error().code(), Code::kCorrupt) << "nothing changed: the next try may do";
    EXPECT_NE(status.error().message().find("without any bytes"), std::string::npos);
  }
}

TEST_F(OneSidedReaderTest, OtherBytesUnderAGoodHeaderAreCorrupt) {
  for (const std::uint64_t size : {std::uint64_t{1000}, kExtent, 3 * kExtent + 9}) {
    const PlainBlock& block = world_.put(size, size * 16);
    for (const std::uint64_t at : {std::uint64_t{0}, size / 2, size - 1}) {
      block.payload[static_cast<std::size_t>(at)] ^= std::byte{1};
      for (const bool registered : {false, true}) {
        ReadPump pump(world_, {});
        Bytes target(static_cast<std::size_t>(size)), part(1);
        if (registered) {
          world_.add_registered(target);
          world_.add_registered(part);
        }
        EXPECT_EQ(read(pump, block, {0, size}, target).error().code(), Code::kCorrupt);
        EXPECT_EQ(read(pump, block, {at, 1}, part).error().code(), Code::kCorrupt);
        if (size > 2 * kExtent) {
          EXPECT_TRUE(read(pump, block, {at < kExtent ? 2 * kExtent : 0, 1}, part).ok()) << "another extent is whole";
        }
        world_.forget_registered();
      }
      block.payload[static_cast<std::size_t>(at)] ^= std::byte{1};
    }
  }
}

TEST_F(OneSidedReaderTest, AWrongTableIsCorruptOrStaleAsTheHeaderSays) {
  const PlainBlock& block = world_.put(3 * kExtent, 0);
  std::byte* table = world_.table_of(block);
  table[5] ^= std::byte{1};
  ReadPump pump(world_, {});
  pump.tables_wrong = true;
  Bytes target(10);
  const Status same = read(pump, block, {0, 10}, target);
  ASSERT_FALSE(same.ok());
  EXPECT_EQ(same.error().code(), Code::kCorrupt);
  EXPECT_NE(same.error().message().find("extent table CRC"), std::string::npos);
  ASSERT_EQ(pump.given().size(), 2U) << "table, then header, and no payload that nothing could check";
  EXPECT_EQ(pump.given()[1].arena, PlainWorld::kHeaders);
  block.header->seq += 2;
  block.header->header_crc = slot_header_crc(*block.header);
  EXPECT_EQ(read(pump, block, {0, 10}, target).error().code(), Code::kStale);
  block.header->seq -= 2;
  block.header->header_crc = slot_header_crc(*block.header);
  table[5] ^= std::byte{1};
  EXPECT_TRUE(read(pump, block, {0, 10}, target).ok()) << "no wrong table is kept";
}

TEST_F(OneSidedReaderTest, WithoutTheCrcCheckBytesAreHandedOutAsTheyAre) {
  const PlainBlock& block = world_.put(3 * kExtent, 0);
  block.payload[100] ^= std::byte{1};
  OneSidedOptions options;
  options.omitted.crc = true;
  EXPECT_TRUE(read(block, options).ok());
  block.header->seq += 2;
  EXPECT_EQ(read(block, options).error().code(), Code::kStale) << "the second look stays";
}

TEST_F(OneSidedReaderTest, ItemsThatCanNotBeReadFailAtOnceBesideGoodOnes) {
  const PlainBlock& block = world_.put(1000, 0);
  const PlainBlock& other = world_.put(2000, 2048);
  Bytes a(1000), b(2000), wrong(999);
  std::vector<BlockRead> batch = {other.read(b), block.read({1, 1000}, a), block.read({0, 1000}, wrong), block.read(a), block.read(a), block.read(a), block.read(a)};
  batch[3].locator.header_offset += 8;
  batch[4].locator.header_arena = 7;
  batch[5].locator.payload_offset = ~std::uint64_t{0} - 999;
  ReadPump pump(world_, {});
  pump.run(batch);
  EXPECT_TRUE(batch[0].result.ok());
  EXPECT_EQ(batch[1].result.error().code(), Code::kInvalid);
  EXPECT_EQ(batch[2].result.error().code(), Code::kInvalid);
  for (std::size_t i = 3; i < 6; ++i) EXPECT_EQ(batch[i].result.error().code(), Code::kStale) << i;
  EXPECT_TRUE(batch[6].result.ok());
  EXPECT_EQ(a, part_of(block, {0, 1000}));
  EXPECT_EQ(b, part_of(other, {0, 2000}));
  std::vector<BlockRead> none;
  pump.run(none);
  EXPECT_TRUE(pump.reader().done());
}

}  // namespace
}  // namespace paramwire
