#include "cpp/store_fixture.hpp"

namespace paramwire {
namespace {

using BlockStoreTest = StoreFixture;

// ---------------------------------------------------------------- publish

TEST_F(BlockStoreTest, NothingPublishedIsNotFoundNotVersionZero) {
  EXPECT_FALSE(store_->newest());
  EXPECT_EQ(store_->open(std::nullopt, 0, 0).error().code(), Code::kNotFound);
  EXPECT_EQ(store_->hold(BlockId{1}, {1, 1}).error().code(), Code::kNotFound);
}

TEST_F(BlockStoreTest, APublishIsInvisibleUntilFinishAndThenWhole) {
  const Version v1 = publish("a", 100, 1);
  const PublishId id = start();
  ASSERT_TRUE(put(id, "a", 100, 2).ok());
  ASSERT_TRUE(put(id, "b", 100, 3).ok());
  EXPECT_EQ(store_->newest(), v1);
  EXPECT_EQ(byte_of(v1, "a"), 1);
  const auto v2 = finish(id);
  ASSERT_TRUE(v2.ok());
  EXPECT_EQ(*v2, (Version{1, 2}));
  EXPECT_EQ(byte_of(*v2, "a"), 2);
  EXPECT_EQ(byte_of(*v2, "b"), 3);
  EXPECT_EQ(byte_of(v1, "a"), 1) << "the older snapshot is untouched";
  EXPECT_EQ(byte_of(v1, "b"), -1);
  EXPECT_EQ(clock_.root(), store_->manifest(*v2)->root());
}

TEST_F(BlockStoreTest, ABaseThatIsNotTheNewestIsRefused) {
  const Version v1 = publish("a", 10, 1);
  EXPECT_TRUE(store_->publish_start({9, 1}, false, v1, 0).ok());
  EXPECT_EQ(store_->publish_start({9, 2}, false, std::nullopt, 0).error().code(), Code::kStale) << "none means: nothing published yet";
  publish("a", 10, 2);
  const auto refused = store_->publish_start({9, 3}, false, v1, 0);
  EXPECT_EQ(refused.error().code(), Code::kStale);
  EXPECT_NE(refused.error().message().find("1.2"), std::string::npos) << "names the newest: " << refused.error().message();
}

TEST_F(BlockStoreTest, OfTwoPublishersTheSecondToFinishIsRefusedAndItsSlotsComeBack) {
  publish("a", 10, 1);
  const std::uint64_t slots = store_->stats().slots_in_use;
  const PublishId slow = start(), fast = start();
  ASSERT_TRUE(put(slow, "a", 10, 2).ok());
  ASSERT_TRUE(put(fast, "b", 10, 3).ok());
  ASSERT_TRUE(finish(fast).ok());
  EXPECT_EQ(finish(slow).error().code(), Code::kStale);
  EXPECT_EQ(finish(slow).error().code(), Code::kStale) << "and it stays refused";
  EXPECT_EQ(byte_of(*store_->newest(), "a"), 1);
  EXPECT_EQ(store_->stats().slots_in_use, slots + 1);
  EXPECT_EQ(store_->stats().publishes_open, 0U);
}

TEST_F(BlockStoreTest, FinishRepeatedAfterALostReplyGivesTheSameVersion) {
  const PublishId id = start();
  ASSERT_TRUE(put(id, "a", 10, 1).ok());
  const Version v1 = *finish(id);
  publish("a", 10, 2);
  EXPECT_EQ(*finish(id), v1);
  EXPECT_EQ(store_->newest(), (Version{1, 2}));
  EXPECT_EQ(store_->publish_start(id, true, std::nullopt, 0).error().code(), Code::kInvalid) << "the id is used up";
}

TEST_F(BlockStoreTest, AClockThatRefusesLeavesNothingBehind) {
  const Version v1 = publish("a", 10, 1);
  const std::uint64_t used = store_->stats().used_bytes;
  const PublishId id = start();
  ASSERT_TRUE(put(id, "a", 5000, 2).ok());
  const auto refused = store_->finish(id, [](auto&, Version, const Digest&) { return Status(Error(Code::kUnavailable, "no quorum")); }, 0);
  EXPECT_EQ(refused.error().code(), Code::kUnavailable);
  EXPECT_EQ(store_->newest(), v1);
  EXPECT_EQ(store_->stats().used_bytes, used);
}

TEST_F(BlockStoreTest, AbortGivesBackEverySlot) {
  publish("a", 10, 1);
  const std::uint64_t used = store_->stats().used_bytes, slots = store_->stats().slots_in_use;
  const PublishId id = start();
  ASSERT_TRUE(put(id, "a", 5000, 2).ok());
  ASSERT_TRUE(put(id, "b", 200'000, 2).ok());
  store_->abort(id);
  store_->abort(id);
  EXPECT_EQ(store_->stats().used_bytes, used);
  EXPECT_EQ(store_->stats().slots_in_use, slots);
  EXPECT_EQ(put(id, "a", 10, 2).error().code(), Code::kStale);
}

TEST_F(BlockStoreTest, APutWhosePublishWasAbortedIsStaleAndItsSlotIsNotLeaked) {
  publish("a", 10, 1);
  const std::uint64_t slots = store_->stats().slots_in_use;
  for (const bool cancel : {false, true}) {
    const PublishId id = start();
    const auto slot = store_->put_begin(id, bytes_spec("b", 3000), 0);
    ASSERT_TRUE(slot.ok());
    store_->abort(id);
    EXPECT_EQ(store_->stats().slots_in_use, slots + 1) << "its writer still writes into it";
    if (cancel) {
      store_->put_cancel(id, *slot);
    } else {
      EXPECT_EQ(seal(id, *slot, 9).error().code(), Code::kStale);
    }
    EXPECT_EQ(store_->stats().slots_in_use, slots);
  }
}

TEST_F(BlockStoreTest, AnIdlePublishIsAbortedAndProgressKeepsItAlive) {
  BlockStoreOptions options;
  options.publish_idle_max = 100;
  reset(options);
  const PublishId idle = start(0), busy = start(0);
  ASSERT_TRUE(put(idle, "a", 10, 1, 0).ok());
  const auto slot = store_->put_begin(busy, bytes_spec("b", 3000), 0);
  ASSERT_TRUE(slot.ok());
  store_->put_progress(busy, 99);
  store_->tick(99);
  EXPECT_EQ(store_->stats().publishes_open, 2U);
  store_->tick(100);
  EXPECT_EQ(store_->stats().publishes_open, 1U) << "only the idle one ended";
  EXPECT_EQ(finish(idle, 100).error().code(), Code::kStale);
  ASSERT_TRUE(seal(busy, *slot, 2, 150).ok());
  EXPECT_TRUE(finish(busy, 240).ok());
}

TEST_F(BlockStoreTest, FinishWithAnUnsealedPutIsRefusedAndCanBeRepeated) {
  const PublishId id = start();
  const auto slot = store_->put_begin(id, bytes_spec("a", 30), 0);
  ASSERT_TRUE(slot.ok());
  EXPECT_EQ(finish(id).error().code(), Code::kInvalid);
  ASSERT_TRUE(seal(id, *slot, 1).ok());
  EXPECT_TRUE(finish(id).ok());
}

TEST_F(BlockStoreTest, APutIsSealedOnlyInThePublishThatBeganIt) {
  const PublishId mine = start(), other = start();
  const auto slot = store_->put_begin(mine, bytes_spec("a", 30), 0);
  ASSERT_TRUE(slot.ok());
  EXPECT_EQ(seal(other, *slot, 1).error().code(), Code::kInternal);
  EXPECT_TRUE(seal(mine, *slot, 1).ok());
}

TEST_F(BlockStoreTest, TheSecondPutOfABlockReplacesTheFirst) {
  const PublishId id = start();
  ASSERT_TRUE(put(id, "a", 10, 1).ok());
  ASSERT_TRUE(put(id, "a", 20, 2).ok());
  const Version v = *finish(id);
  EXPECT_EQ(byte_of(v, "a"), 2);
  EXPECT_EQ(store_->stats().slots_in_use, 1U);
  EXPECT_EQ(store_->stats().raw_bytes, 20U);
}

TEST_F(BlockStoreTest, OpenPublishesAreBoundedWithTheNumber) {
  BlockStoreOptions options;
  options.publishes_max = 2;
  reset(options);
  start();
  start();
  const auto refused = store_->publish_start({8, 8}, true, std::nullopt, 0);
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  EXPECT_NE(refused.error().message().find('2'), std::string::npos);
}

TEST_F(BlockStoreTest, NamesAreRefusedWhenTooLongNeverCut) {
  const PublishId id = start();
  EXPECT_EQ(put(id, std::string(kMaxNameBytes + 1, 'x'), 10, 1).error().code(), Code::kInvalid);
  EXPECT_TRUE(put(id, std::string(kMaxNameBytes, 'x'), 10, 1).ok());
  EXPECT_TRUE(finish(id).ok());
}

TEST_F(BlockStoreTest, EmptyTensorsAndScalarsAreBlocks) {
  const PublishId id = start();
  ASSERT_TRUE(put(id, {"empty", DType::kF32, Shape{0, 7}, Shard::whole()}, 1).ok());
  ASSERT_TRUE(put(id, {"scalar", DType::kF32, Shape{}, Shard::whole()}, 5).ok());
  const Version v = *finish(id);
  EXPECT_EQ(byte_of(v, "scalar"), 5);
  const auto hit = store_->manifest(v)->find(block_id("empty", Shard::whole()));
  ASSERT_TRUE(hit);
  EXPECT_EQ(hit->entry.raw_size, 0U);
}

// ---------------------------------------------------------------- names: remove, alias, untie

TEST_F(BlockStoreTest, RemovalIsExplicitAndExactInTheName) {
  PublishId id = start();
  ASSERT_TRUE(put(id, "b", 10, 1).ok());
  ASSERT_TRUE(put(id, "x.b", 10, 2).ok());
  ASSERT_TRUE(put(id, "bb", 10, 3).ok());
  ASSERT_TRUE(finish(id).ok());
  id = start();
  ASSERT_TRUE(store_->remove(id, "b", 0).ok());
  EXPECT_EQ(store_->remove(id, "c", 0).error().code(), Code::kNotFound);
  const Version v2 = *finish(id);
  EXPECT_EQ(byte_of(v2, "b"), -1);
  EXPECT_EQ(byte_of(v2, "x.b"), 2);
  EXPECT_EQ(byte_of(v2, "bb"), 3);
}

TEST_F(BlockStoreTest, RemoveTakesAllShardsAndWhatThisPublishPut) {
  PublishId id = start();
  const Shape shape{4, 8};
  ASSERT_TRUE(put(id, {"t", DType::kU8, shape, Shard::rows(0, 2)}, 1).ok());
  ASSERT_TRUE(put(id, {"t", DType::kU8, shape, Shard::rows(2, 4)}, 2).ok());
  ASSERT_TRUE(finish(id).ok());
  id = start();
  ASSERT_TRUE(put(id, "fresh", 10, 1).ok());
  ASSERT_TRUE(store_->remove(id, "fresh", 0).ok());
  ASSERT_TRUE(store_->remove(id, "t", 0).ok());
  const Version v2 = *finish(id);
  EXPECT_EQ(store_->manifest(v2)->entry_count(), 0U);
}

TEST_F(BlockStoreTest, TiedWeightsAreStoredOnceFollowTheTargetAndCanBeUntied) {
  PublishId id = start();
  ASSERT_TRUE(put(id, "a", 100, 1).ok());
  ASSERT_TRUE(store_->alias(id, "b", "a", 0).ok());
  ASSERT_TRUE(put(id, "x.b", 100, 9).ok());
  const Version v1 = *finish(id);
  EXPECT_EQ(store_->stats().slots_in_use, 2U);
  EXPECT_EQ(byte_of(v1, "b"), 1);
  const Version v2 = publish("a", 100, 2);
  EXPECT_EQ(byte_of(v2, "b"), 2) << "updating a updates b";
  EXPECT_EQ(byte_of(v2, "x.b"), 9);
  const Version v3 = publish("b", 100, 3);
  EXPECT_EQ(byte_of(v3, "a"), 2);
  EXPECT_EQ(byte_of(v3, "b"), 3) << "untied";
  const Version v4 = publish("a", 100, 4);
  EXPECT_EQ(byte_of(v4, "b"), 3);
}

TEST_F(BlockStoreTest, AnAliasIsUntiedByShardsOfItsOwnEvenWithinOnePublish) {
  PublishId id = start();
  ASSERT_TRUE(put(id, "a", 16, 1).ok());
  ASSERT_TRUE(store_->alias(id, "b", "a", 0).ok());
  ASSERT_TRUE(store_->alias(id, "c", "a", 0).ok());
  ASSERT_TRUE(put(id, {"c", DType::kU8, Shape{2, 4}, Shard::rows(0, 2)}, 5).ok());
  const auto v1 = finish(id);
  ASSERT_TRUE(v1.ok()) << v1.error().to_string();
  EXPECT_EQ(byte_of(*v1, "c"), 5);
  id = start();
  ASSERT_TRUE(put(id, {"b", DType::kU8, Shape{2, 4}, Shard::rows(0, 1)}, 6).ok());
  ASSERT_TRUE(put(id, {"b", DType::kU8, Shape{2, 4}, Shard::rows(1, 2)}, 7).ok());
  const auto v2 = finish(id);
  ASSERT_TRUE(v2.ok()) << v2.error().to_string();
  EXPECT_EQ(byte_of(*v2, "b"), 6);
}

TEST_F(BlockStoreTest, AliasesWithoutTargetOrOfThemselvesAreRefused) {
  PublishId id = start();
  EXPECT_EQ(store_->alias(id, "a", "a", 0).error().code(), Code::kInvalid);
  ASSERT_TRUE(store_->alias(id, "b", "nowhere", 0).ok()) << "the target may still come";
  const auto refused = finish(id);
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find("nowhere"), std::string::npos);
  id = start();
  ASSERT_TRUE(put(id, "a", 10, 1).ok());
  ASSERT_TRUE(store_->alias(id, "b", "a", 0).ok());
  ASSERT_TRUE(finish(id).ok());
  id = start();
  ASSERT_TRUE(store_->remove(id, "a", 0).ok());
  EXPECT_EQ(finish(id).error().code(), Code::kInvalid) << "b would hang in the air";
}

TEST_F(BlockStoreTest, MixedOverlappingAndDisagreeingShardsAreRefused) {
  const Shape shape{8, 4};
  const auto refused = [&](const BlockSpec& first, const BlockSpec& second) {
    const PublishId id = start();
    EXPECT_TRUE(put(id, first, 1).ok());
    EXPECT_TRUE(put(id, second, 2).ok());
    const auto result = finish(id);
    return !result.ok() && result.error().code() == Code::kInvalid;
  };
  EXPECT_TRUE(refused({"t", DType::kU8, shape, Shard::whole()}, {"t", DType::kU8, shape, Shard::rows(0, 2)}));
  EXPECT_TRUE(refused({"t", DType::kU8, shape, Shard::rows(0, 3)}, {"t", DType::kU8, shape, Shard::rows(2, 4)}));
  EXPECT_TRUE(refused({"t", DType::kU8, shape, Shard::head_range(4, 1, 2)}, {"t", DType::kU8, shape, Shard::rows(3, 4)}));
  EXPECT_TRUE(refused({"t", DType::kU8, shape, Shard::rows(0, 2)}, {"t", DType::kI8, shape, Shard::rows(2, 4)}));
  EXPECT_TRUE(refused({"t", DType::kU8, shape, Shard::rows(0, 2)}, {"t", DType::kU8, Shape{8, 5}, Shard::rows(2, 4)}));
  EXPECT_EQ(store_->stats().slots_in_use, 0U);
  const PublishId id = start();
  ASSERT_TRUE(put(id, {"t", DType::kU8, shape, Shard::head_range(4, 0, 2)}, 1).ok());
  ASSERT_TRUE(put(id, {"t", DType::kU8, shape, Shard::rows(4, 8)}, 2).ok());
  EXPECT_TRUE(finish(id).ok()) << "heads beside rows, without overlap, are fine";
  EXPECT_EQ(put(start(), {"t", DType::kU8, shape, Shard::rows(7, 9)}, 1).error().code(), Code::kInvalid);
}

// ---------------------------------------------------------------- versions, leases, room

TEST_F(BlockStoreTest, AtMostThreeVersionsAreReadableAndOlderOnesSaySo) {
  for (std::uint8_t i = 1; i <= 5; ++i) publish("a", 100, i);
  EXPECT_EQ(store_->stats().versions_readable, 3U);
  EXPECT_EQ(store_->stats().slots_in_use, 3U);
  EXPECT_EQ(byte_of({1, 3}, "a"), 3);
  const auto gone = store_->open(Version{1, 2}, 0, 0);
  EXPECT_EQ(gone.error().code(), Code::kStale);
  EXPECT_NE(gone.error().message().find("gone"), std::string::npos);
  const auto early = store_->open(Version{1, 6}, 0, 0);
  EXPECT_EQ(early.error().code(), Code::kStale);
  EXPECT_NE(early.error().message().find("not there yet"), std::string::npos);
  const auto held = store_->hold(block_id("a", Shard::whole()), {1, 2});
  EXPECT_EQ(held.error().code(), Code::kStale);
}

TEST_F(BlockStoreTest, ALeasedVersionStaysWithItsBytesUntilTheLeaseEnds) {
  const Version v1 = publish("a", 100, 1);
  const auto opened = store_->open(v1, 1000, 0);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->lease_ttl, 1000);
  for (std::uint8_t i = 2; i <= 9; ++i) publish("a", 100, i);
  EXPECT_EQ(byte_of(v1, "a"), 1);
  EXPECT_EQ(store_->stats().slots_in_use, 4U) << "three retained and the leased one; nothing between";
  ASSERT_TRUE(store_->renew(opened->lease, 1000, 900).ok());
  store_->tick(1000);
  EXPECT_EQ(byte_of(v1, "a"), 1);
  store_->tick(1900);
  EXPECT_EQ(byte_of(v1, "a"), -1);
  EXPECT_EQ(store_->stats().slots_in_use, 3U);
  EXPECT_EQ(store_->renew(opened->lease, 1000, 1900).error().code(), Code::kStale);
}

TEST_F(BlockStoreTest, ALeaseIdOfAFormerIncarnationHitsNobodysLease) {
  publish("a", 10, 1);
  const auto former = store_->open(std::nullopt, 1000, 0);
  ASSERT_TRUE(former.ok());
  incarnation_ = {8, 0x8877665544332211};
  reset({});
  publish("a", 10, 1);
  const auto lease = store_->open(std::nullopt, 1000, 0);
  ASSERT_TRUE(lease.ok());
  store_->release(former->lease, 0);
  EXPECT_EQ(store_->renew(former->lease, 1000, 0).error().code(), Code::kStale);
  EXPECT_TRUE(store_->renew(lease->lease, 1000, 0).ok());
}

TEST_F(BlockStoreTest, ALeaseIsNoLongerThanTheLongestGrant) {
  BlockStoreOptions options;
  options.lease_ttl_max = 50;
  reset(options);
  publish("a", 10, 1);
  const auto opened = store_->open(std::nullopt, 1'000'000, 0);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->lease_ttl, 50);
  EXPECT_EQ(*store_->renew(opened->lease, 1'000'000, 10), 50);
}

TEST_F(BlockStoreTest, MemoryGrowsWithChangedBlocksOnly) {
  PublishId id = start();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(put(id, "t" + std::to_string(i), 4000, 1).ok());
  ASSERT_TRUE(finish(id).ok());
  const StoreStats before = store_->stats();
  const Version v2 = publish("t7", 4000, 2);
  EXPECT_EQ(store_->stats().slots_in_use, before.slots_in_use + 1);
  EXPECT_LE(store_->stats().used_bytes, before.used_bytes + 4096);
  EXPECT_EQ(slot_of(v2, "t8"), slot_of({1, 1}, "t8")) << "an unchanged block keeps its slot";
  for (std::uint8_t i = 3; i < 20; ++i) publish("t7", 4000, i);
  EXPECT_LE(store_->stats().used_bytes, before.used_bytes + 2 * 4096);
}

TEST_F(BlockStoreTest, WhenRoomIsNeededTheOldestLeaseBeyondTheMaximumAgeIsRevoked) {
  BlockStoreOptions options;
  options.retained_versions = 1;
  options.lease_age_max = 100;
  reset(options, 4 * kTestMiB);
  const Version v1 = publish("a", kTestMiB, 1);
  const auto lease = store_->open(v1, 10'000, 0);
  ASSERT_TRUE(lease.ok());
  publish("a", kTestMiB, 2);
  // 1.1 leased, 1.2 retained: one more MiB fits beside the chunk of headers, the next does not.
  PublishId id = start(99);
  ASSERT_TRUE(put(id, "b", kTestMiB, 3, 99).ok());
  const auto refused = put(id, "c", kTestMiB, 3, 99);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  EXPECT_EQ(byte_of(v1, "a"), 1) << "the lease is younger than the maximum age";
  ASSERT_TRUE(put(id, "c", kTestMiB, 3, 100).ok());
  EXPECT_EQ(store_->stats().leases_revoked, 1U);
  EXPECT_EQ(store_->renew(lease->lease, 100, 100).error().code(), Code::kStale);
  EXPECT_EQ(byte_of(v1, "a"), -1);
}

TEST_F(BlockStoreTest, LeasesOfRetainedVersionsAreNotRevokedInVain) {
  BlockStoreOptions options;
  options.lease_age_max = 100;
  reset(options, 2 * kTestMiB);
  publish("a", kTestMiB / 2, 1);
  const auto lease = store_->open(std::nullopt, 10'000, 0);
  ASSERT_TRUE(lease.ok());
  const PublishId id = start(5000);
  EXPECT_EQ(put(id, "b", 3 * kTestMiB, 2, 5000).error().code(), Code::kBackpressure);
  EXPECT_TRUE(store_->renew(lease->lease, 100, 5000).ok());
}

TEST_F(BlockStoreTest, AHeldSlotOutlivesItsVersion) {
  const Version v1 = publish("a", 100, 1);
  const auto held = store_->hold(block_id("a", Shard::whole()), v1);
  ASSERT_TRUE(held.ok());
  for (std::uint8_t i = 2; i <= 9; ++i) publish("a", 100, i);
  EXPECT_EQ(held->payload[0], std::byte{1});
  EXPECT_EQ(store_->stats().slots_in_use, 4U);
  store_->unhold(held->slot, 0);
  store_->tick(1);
  EXPECT_EQ(store_->stats().slots_in_use, 3U);
}

// ---------------------------------------------------------------- pins and quarantine

TEST_F(BlockStoreTest, APinnedSlotIsWithdrawnButKeepsItsBytesUntilThePinEnds) {
  const Version v1 = publish("a", 100, 1);
  const SlotIndex slot = slot_of(v1, "a");
  const Locator locator = store_->locator(slot);
  pins_.words.push_back({pin_word(locator), 4242});
  for (std::uint8_t i = 2; i <= 9; ++i) publish("a", 100, i);
  EXPECT_EQ(store_->stats().quarantined_slots, 1U);
  EXPECT_EQ(store_->stats().quarantined_bytes, 100U);
  EXPECT_EQ(*tier_->at(locator.arena, locator.payload_offset), std::byte{1});
  EXPECT_EQ(store_->locator(slot).seq % 2, 1U) << "nobody new may take a view";
  pins_.words.clear();
  store_->tick(1);
  EXPECT_EQ(store_->stats().quarantined_slots, 0U);
  EXPECT_EQ(store_->stats().quarantined_bytes, 0U);
  EXPECT_EQ(store_->stats().slots_in_use, 3U);
}

TEST_F(BlockStoreTest, PastTheQuarantineCapPublishesAreRefusedNamingTheProcess) {
  BlockStoreOptions options;
  options.quarantine_bytes_max = 150;
  reset(options);
  for (std::uint8_t i = 1; i <= 2; ++i) {
    const Version v = publish("a", 100, i);
    pins_.words.push_back({pin_word(store_->locator(slot_of(v, "a"))), 4242});
  }
  for (std::uint8_t i = 3; i <= 5; ++i) publish("a", 100, i);
  const auto refused = store_->publish_start({8, 8}, true, std::nullopt, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  EXPECT_NE(refused.error().message().find("4242"), std::string::npos) << refused.error().message();
  EXPECT_NE(refused.error().message().find("150"), std::string::npos);
  pins_.words.clear();
  EXPECT_TRUE(store_->publish_start({8, 9}, true, std::nullopt, 0).ok()) << "looked at again at once";
}

TEST_F(BlockStoreTest, HostilePinWordsOnlyEverCostTheirOwnComparison) {
  for (const std::uint64_t word : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{1} << 48}) pins_.words.push_back({word, 1});
  for (std::uint8_t i = 1; i <= 6; ++i) publish("a", 100, i);
  EXPECT_LE(store_->stats().slots_in_use, 4U);
}

// ---------------------------------------------------------------- restart

TEST_F(BlockStoreTest, AfterARestartVersionsAreOfTheHigherEpochAndOldOnesAreGone) {
  const Version old = publish("a", 100, 1);
  const PublishId before = start();
  BlockStoreOptions options;
  options.epoch = 2;
  reset(options);
  EXPECT_FALSE(store_->newest());
  EXPECT_EQ(finish(before).error().code(), Code::kStale) << "a publish of the former incarnation";
  const Version v = publish("a", 100, 2);
  EXPECT_EQ(v, (Version{2, 1}));
  EXPECT_GT(v, old);
  const auto stale = store_->hold(block_id("a", Shard::whole()), old);
  EXPECT_EQ(stale.error().code(), Code::kStale);
}

}  // namespace
}  // namespace paramwire
