#include "paramwire/store/lease.hpp"
#include "paramwire/store/slot_table.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/store/memory_tier.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace paramwire {
namespace {

// ---------------------------------------------------------------- leases

TEST(LeaseTable, HoldsItsVersionUntilTheLastLeaseEnds) {
  LeaseTable table(8);
  const auto a = table.grant({1, 1}, 100, 0);
  const auto b = table.grant({1, 1}, 200, 0);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(*a, *b);
  EXPECT_NE(*a, 0U) << "0 means no lease";
  table.expire(100);
  EXPECT_TRUE(table.holds({1, 1}));
  table.release(*b);
  EXPECT_FALSE(table.holds({1, 1}));
  EXPECT_EQ(table.count(), 0U);
}

TEST(LeaseTable, ARenewalThatWasQueuedBeforeTheExpiryCounts) {
  LeaseTable table(8);
  const auto lease = *table.grant({1, 1}, 100, 0);
  ASSERT_TRUE(table.renew(lease, 100, 500).ok()) << "late, but before expire(): the server was paused";
  table.expire(500);
  EXPECT_TRUE(table.holds({1, 1}));
  table.expire(600);
  EXPECT_FALSE(table.holds({1, 1}));
  EXPECT_EQ(table.renew(lease, 100, 601).error().code(), Code::kStale);
}

TEST(LeaseTable, AShorterRenewalNeverShortensALease) {
  LeaseTable table(8);
  const auto lease = *table.grant({1, 1}, 1000, 0);
  ASSERT_TRUE(table.renew(lease, 10, 0).ok());
  EXPECT_EQ(table.next_deadline(), 1000);
}

TEST(LeaseTable, TheLimitIsABackpressureWithItsNumber) {
  LeaseTable table(2);
  ASSERT_TRUE(table.grant({1, 1}, 1, 0).ok());
  ASSERT_TRUE(table.grant({1, 1}, 1, 0).ok());
  const auto refused = table.grant({1, 1}, 1, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  EXPECT_NE(refused.error().message().find('2'), std::string::npos);
}

TEST(LeaseTable, OnlyOldLeasesOfVersionsThatNothingElseKeepsAreRevoked) {
  LeaseTable table(8);
  ASSERT_TRUE(table.grant({1, 9}, 10'000, 0).ok());  // the oldest, of a retained version
  ASSERT_TRUE(table.grant({1, 2}, 10'000, 10).ok());
  ASSERT_TRUE(table.grant({1, 1}, 10'000, 20).ok());
  EXPECT_FALSE(table.revoke_oldest({1, 7}, 100, 109)) << "too young";
  EXPECT_EQ(table.revoke_oldest({1, 7}, 100, 110), (Version{1, 2}));
  EXPECT_FALSE(table.revoke_oldest({1, 7}, 100, 110));
  EXPECT_EQ(table.revoke_oldest({1, 7}, 100, 120), (Version{1, 1}));
  EXPECT_FALSE(table.revoke_oldest({1, 7}, 100, 9999));
  EXPECT_TRUE(table.holds({1, 9}));
}

TEST(LeaseTable, AChainOfLeasesOnAnOldVersionIsAsOldAsItsFirst) {
  LeaseTable table(10);
  const auto first = table.grant({1, 1}, 50, 0);
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(table.grant({1, 1}, 1000, 40, false).ok());
  table.release(*first);
  EXPECT_EQ(table.revoke_oldest({1, 7}, 100, 100), (Version{1, 1}));
  EXPECT_EQ(table.count(), 0U);
}

// ---------------------------------------------------------------- slots

class SlotTableTest : public testing::Test {
 protected:
  SlotTableTest() {
    TierOptions options;
    options.arena_bytes = std::uint64_t{4} << 20;
    tier_ = *MemoryTier::open(MemoryTier::Backing::kPrivate, options);
    table_ = std::make_unique<SlotTable>(*tier_);
  }
  std::uint32_t seal(SlotIndex slot, std::uint64_t counter) {
    const auto payload = table_->payload(slot);
    std::vector<std::uint32_t> extents;
    for (std::size_t at = 0; at < payload.size(); at += kExtentBytes) {
      extents.push_back(crc32c(payload.subspan(at, std::min<std::size_t>(kExtentBytes, payload.size() - at))));
    }
    return table_->seal(slot, {BlockId{77}, {3, counter}, DType::kF32, CodecId::kRaw, payload.size(), crc64(payload)}, extents);
  }
  std::unique_ptr<Tier> tier_;
  std::unique_ptr<SlotTable> table_;
};

TEST_F(SlotTableTest, SeqIsOddWhileOpenAndTheSealedHeaderVerifies) {
  const SlotIndex slot = *table_->open(100);
  EXPECT_EQ(table_->header(slot).seq % 2, 1U);
  EXPECT_STREQ(verify(table_->header(slot)), "seq odd");
  std::memset(table_->payload(slot).data(), 7, 100);
  EXPECT_EQ(seal(slot, 5), 0U) << "one extent has no table";
  const SlotHeader header = table_->header(slot);
  EXPECT_EQ(verify(header), nullptr);
  EXPECT_EQ(header.block, 77U);
  EXPECT_EQ(header.version_counter, 5U);
  EXPECT_EQ(header.epoch, 3U);
  EXPECT_EQ(header.raw_size, 100U);
  EXPECT_EQ(header.dtype, static_cast<std::uint16_t>(DType::kF32));
  EXPECT_EQ(table_->locator(slot).seq, header.seq);
}

TEST_F(SlotTableTest, WithdrawalIsSeenByTheHeaderAndIsIdempotent) {
  const SlotIndex slot = *table_->open(100);
  seal(slot, 5);
  const std::uint64_t seq = table_->header(slot).seq;
  table_->withdraw(slot);
  table_->withdraw(slot);
  EXPECT_EQ(table_->header(slot).seq, seq + 1);
}

TEST_F(SlotTableTest, AReusedSlotNeverShowsAnOldSeqAgain) {
  std::vector<std::uint64_t> seen;
  for (std::uint64_t round = 1; round <= 20; ++round) {
    const SlotIndex slot = *table_->open(round * 10);
    EXPECT_EQ(slot, 0U) << "the one slot is reused";
    seal(slot, round);
    const std::uint64_t seq = table_->header(slot).seq;
    EXPECT_EQ(seq % 2, 0U);
    if (!seen.empty()) {
      EXPECT_GT(seq, seen.back());
    }
    seen.push_back(seq);
    table_->withdraw(slot);
    table_->close(slot);
    EXPECT_EQ(table_->slots_in_use(), 0U);
  }
}

TEST_F(SlotTableTest, ExtentTableLiesBehindThePayloadWithItsCrc) {
  const std::uint64_t size = 2 * kExtentBytes + 100;
  const SlotIndex slot = *table_->open(size);
  for (std::size_t i = 0; i < size; ++i) table_->payload(slot)[i] = static_cast<std::byte>(i * 7);
  const std::uint32_t crc = seal(slot, 5);
  const auto table = table_->extent_table(slot);
  ASSERT_EQ(table.size(), 3 * sizeof(ExtentRow));
  EXPECT_EQ(crc32c(table), crc);
  EXPECT_EQ(table.data(), table_->payload(slot).data() + table_->header(slot).extent_table * std::uint64_t{64});
  ExtentRow last;
  std::memcpy(&last, table.data() + 2 * sizeof(ExtentRow), sizeof last);
  EXPECT_EQ(last.stored_size, 100U);
  EXPECT_EQ(last.crc32c, crc32c(table_->payload(slot).subspan(2 * kExtentBytes)));
}

TEST_F(SlotTableTest, PinWordsNameOneHeaderLineAndAreNeverFree) {
  const SlotIndex a = *table_->open(1), b = *table_->open(1);
  EXPECT_NE(pin_word(table_->locator(a)), 0U);
  EXPECT_NE(pin_word(table_->locator(a)), pin_word(table_->locator(b)));
  EXPECT_EQ(table_->locator(b).header_offset, table_->locator(a).header_offset + sizeof(SlotHeader));
}

}  // namespace
}  // namespace paramwire
