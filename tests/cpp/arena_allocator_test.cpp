#include "paramwire/store/arena_allocator.hpp"

#include "paramwire/base/env.hpp"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace paramwire {
namespace {

// What is allocated now: offset -> rounded size. Overlap is looked for at every step.
class Model {
 public:
  explicit Model(std::uint64_t size) : size_(size) {}
  void add(std::uint64_t offset, std::uint64_t size) {
    const std::uint64_t bytes = ArenaAllocator::rounded(size);
    ASSERT_LE(offset + bytes, size_);
    const auto after = spans_.lower_bound(offset);
    if (after != spans_.end()) {
      ASSERT_LE(offset + bytes, after->first) << "overlaps the span behind it";
    }
    if (after != spans_.begin()) {
      const auto before = std::prev(after);
      ASSERT_LE(before->first + before->second, offset) << "overlaps the span before it";
    }
    spans_.emplace(offset, bytes);
    used_ += bytes;
  }
  void drop(std::uint64_t offset) {
    used_ -= spans_.at(offset);
    spans_.erase(offset);
  }
  std::uint64_t used() const { return used_; }

 private:
  std::uint64_t size_;
  std::uint64_t used_ = 0;
  std::map<std::uint64_t, std::uint64_t> spans_;
};

TEST(ArenaAllocator, RandomSpansNeverOverlapAndKeepTheirAlignment) {
  constexpr std::uint64_t kSize = std::uint64_t{8} << 20;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    ArenaAllocator arena(kSize);
    Model model(kSize);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> live;
    for (int step = 0; step < 3000; ++step) {
      if (live.empty() || random.chance(55)) {
        const std::uint64_t size = random.chance(70) ? random.below(kSlabSpanMax + 1) : random.below(300'000);
        const std::uint64_t alignment = std::uint64_t{16} << random.below(13);
        const auto offset = arena.allocate(size, alignment);
        if (!offset) continue;
        ASSERT_EQ(*offset % (size <= kSlabSpanMax ? kSlabGranule : alignment), 0U);
        model.add(*offset, size);
        if (HasFatalFailure()) return;
        live.emplace_back(*offset, size);
      } else {
        const std::size_t at = static_cast<std::size_t>(random.below(live.size()));
        arena.release(live[at].first, live[at].second);
        model.drop(live[at].first);
        live[at] = live.back();
        live.pop_back();
      }
      ASSERT_EQ(arena.used_bytes(), model.used());
    }
    for (const auto& [offset, size] : live) arena.release(offset, size);
    EXPECT_EQ(arena.used_bytes(), 0U);
  }
}

TEST(ArenaAllocator, ReleasedNeighboursBecomeOneRangeAgain) {
  constexpr std::uint64_t kSize = std::uint64_t{1} << 20;
  ArenaAllocator arena(kSize);
  std::vector<std::uint64_t> offsets;
  while (const auto offset = arena.allocate(100'000, 64)) offsets.push_back(*offset);
  ASSERT_EQ(offsets.size(), 10U);
  EXPECT_FALSE(arena.allocate(200'000, 64));
  for (const std::size_t i : {1U, 3U, 2U}) arena.release(offsets[i], 100'000);  // the one between joins both sides
  const auto joined = arena.allocate(300'000, 64);
  ASSERT_TRUE(joined);
  EXPECT_EQ(*joined, offsets[1]);
  arena.release(*joined, 300'000);
  for (const std::size_t i : {0U, 4U, 5U, 6U, 7U, 8U, 9U}) arena.release(offsets[i], 100'000);
  EXPECT_EQ(arena.allocate(kSize, 64), 0U);
}

TEST(ArenaAllocator, EmptySlabsGoBackToTheArena) {
  constexpr std::uint64_t kSize = 8 * kSlabBytes;
  ArenaAllocator arena(kSize);
  std::vector<std::uint64_t> spans;
  while (const auto offset = arena.allocate(64, 16)) spans.push_back(*offset);
  EXPECT_EQ(spans.size(), kSize / 64);
  EXPECT_FALSE(arena.allocate(kSlabBytes, 64));
  for (const std::uint64_t offset : spans) arena.release(offset, 64);
  EXPECT_EQ(arena.used_bytes(), 0U);
  // All but the slab that the class still cuts spans from.
  for (int i = 0; i < 7; ++i) EXPECT_TRUE(arena.allocate(kSlabBytes, 64)) << i;
}

TEST(ArenaAllocator, WithinKeepsToTheFrontOfTheArena) {
  ArenaAllocator arena(std::uint64_t{1} << 20);
  EXPECT_FALSE(arena.allocate(70'000, 64, 65'536));
  EXPECT_FALSE(arena.allocate(64, 16, 1024)) << "the slab would end behind the limit";
  EXPECT_EQ(arena.allocate(70'000, 64, 131'072), 0U);
  const auto behind = arena.allocate(64, 16);
  ASSERT_TRUE(behind);
  arena.release(*behind, 64);
  EXPECT_FALSE(arena.allocate(64, 16, *behind)) << "a released small span behind the limit";
}

TEST(ArenaAllocator, AnEmptySpanStillHasAPlaceOfItsOwn) {
  ArenaAllocator arena(std::uint64_t{1} << 20);
  const auto a = arena.allocate(0, 16);
  const auto b = arena.allocate(0, 16);
  ASSERT_TRUE(a && b);
  EXPECT_NE(*a, *b);
}

}  // namespace
}  // namespace paramwire
