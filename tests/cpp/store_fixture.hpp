// A block store over private memory with pins that tests set by hand.
#pragma once

#include "paramwire/base/crc.hpp"
#include "paramwire/control/version_clock.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/store/memory_tier.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace paramwire {

struct TestPins final : PinSource {
  void collect(std::vector<PinnedWord>& out) override { out.insert(out.end(), words.begin(), words.end()); }
  std::vector<PinnedWord> words;
};

inline constexpr std::uint64_t kTestMiB = std::uint64_t{1} << 20;

class StoreFixture : public testing::Test {
 protected:
  StoreFixture() { reset({}); }

  void reset(BlockStoreOptions options, std::uint64_t limit = 0) {
    store_.reset();
    TierOptions tier;
    tier.arena_bytes = 8 * kTestMiB;
    tier.limit_bytes = limit;
    tier_ = *MemoryTier::open(MemoryTier::Backing::kPrivate, tier);
    if (options.epoch == 0) options.epoch = 1;
    options.incarnation = incarnation_;
    store_ = std::make_unique<BlockStore>(*tier_, &pins_, options);
    clock_ = {};
  }
  BlockStore::CommitClock clock() {
    return [this](const std::optional<Version>& base, Version next, const Digest& root) { return clock_.commit(base, next, root); };
  }
  PublishId start(Micros now = 0) {
    const PublishId id{1, ++last_publish_};
    const auto version = store_->publish_start(id, true, std::nullopt, now);
    EXPECT_TRUE(version.ok()) << version.error().to_string();
    return id;
  }
  static BlockSpec bytes_spec(std::string_view tensor, std::uint64_t size) { return {tensor, DType::kU8, Shape{size}, Shard::whole()}; }

  Status put(PublishId id, const BlockSpec& spec, std::uint8_t fill, Micros now = 0) {
    PARAMWIRE_TRY(slot, store_->put_begin(id, spec, now));
    return seal(id, slot, fill, now);
  }
  Status put(PublishId id, std::string_view tensor, std::uint64_t size, std::uint8_t fill, Micros now = 0) {
    return put(id, bytes_spec(tensor, size), fill, now);
  }
  Status seal(PublishId id, const PutSlot& slot, std::uint8_t fill, Micros now = 0) {
    std::ranges::fill(slot.payload, std::byte{fill});
    std::vector<std::uint32_t> extents;
    for (std::size_t at = 0; at < slot.payload.size(); at += kExtentBytes) {
      extents.push_back(crc32c(slot.payload.subspan(at, std::min<std::size_t>(kExtentBytes, slot.payload.size() - at))));
    }
    return store_->put_seal(id, slot, crc64(slot.payload), extents, now);
  }
  Result<Version> finish(PublishId id, Micros now = 0) { return store_->finish(id, clock(), now); }
  // A whole publish of one block.
  Version publish(std::string_view tensor, std::uint64_t size, std::uint8_t fill, Micros now = 0) {
    const PublishId id = start(now);
    const Status status = put(id, tensor, size, fill, now);
    EXPECT_TRUE(status.ok()) << status.error().to_string();
    const auto version = finish(id, now);
    EXPECT_TRUE(version.ok()) << version.error().to_string();
    return *version;
  }
  // First byte of what snapshot `version` holds as `tensor` (aliases followed); -1 when it is not there.
  int byte_of(Version version, std::string_view tensor) {
    const auto manifest = store_->manifest(version);
    if (!manifest) return -1;
    const auto hits = manifest->tensor_blocks(tensor);
    if (hits.empty()) return -1;
    const auto held = store_->hold(hits[0].entry.id, hits[0].entry.version);
    if (!held.ok()) return -1;
    const int value = static_cast<int>(held->payload[0]);
    EXPECT_EQ(crc64(held->payload), hits[0].entry.crc64);
    store_->unhold(held->slot, 0);
    return value;
  }
  SlotIndex slot_of(Version version, std::string_view tensor) { return store_->manifest(version)->tensor_blocks(tensor).at(0).tag; }

  TestPins pins_;
  std::unique_ptr<Tier> tier_;
  std::unique_ptr<BlockStore> store_;
  VersionClock clock_;
  Incarnation incarnation_{7, 0x1122334455667788};
  std::uint64_t last_publish_ = 0;
};

}  // namespace paramwire
