// Conformance of the memory tiers (one suite, both backings), and what bounds them.
#include "paramwire/store/memory_tier.hpp"

#include "paramwire/store/memory_limit.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fcntl.h>
#include <fstream>
#include <sys/mman.h>
#include <unistd.h>

namespace paramwire {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

std::uint64_t free_huge_pages() {
  std::ifstream file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  std::uint64_t pages = 0;
  file >> pages;
  return pages;
}

class TierConformance : public testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Tier> open(const TierOptions& options) {
    auto tier = open_tier(GetParam(), options);
    EXPECT_TRUE(tier.ok()) << tier.error().to_string();
    return std::move(tier).value();
  }
  static TierOptions small() {
    TierOptions options;
    options.arena_bytes = 4 * kMiB;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, TierConformance, testing::Values("memory", "heap"), [](const auto& p) { return std::string(p.param); });

TEST_P(TierConformance, SpansAreAlignedWritableAndCounted) {
  const auto tier = open(small());
  EXPECT_EQ(tier->name(), GetParam());
  std::uint64_t used = 0;
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{4096}, std::uint64_t{4097}, kMiB, kMiB + 1}) {
    const auto span = tier->allocate(size);
    ASSERT_TRUE(span.ok()) << span.error().to_string();
    EXPECT_EQ(span->size, size);
    EXPECT_EQ(span->offset % span_alignment(size), 0U) << size;
    std::memset(tier->at(span->arena, span->offset), 0x5a, size);
    used += ArenaAllocator::rounded(size);
    EXPECT_EQ(tier->used_bytes(), used);
    EXPECT_GE(tier->committed_bytes(), used);
  }
}

TEST_P(TierConformance, PointersStayGoodWhenArenasAreAdded) {
  const auto tier = open(small());
  const auto first = tier->allocate(3 * kMiB);
  ASSERT_TRUE(first.ok());
  std::byte* at = tier->at(first->arena, first->offset);
  *at = std::byte{42};
  while (tier->arena_count() < 3) ASSERT_TRUE(tier->allocate(3 * kMiB).ok());
  EXPECT_EQ(tier->at(first->arena, first->offset), at);
  EXPECT_EQ(*at, std::byte{42});
}

TEST_P(TierConformance, ABlockLargerThanAnArenaGetsOneOfItsOwn) {
  const auto tier = open(small());
  const auto span = tier->allocate(9 * kMiB + 5);
  ASSERT_TRUE(span.ok()) << span.error().to_string();
  EXPECT_EQ(tier->arena(span->arena).size, 10 * kMiB);
}

TEST_P(TierConformance, TheLimitRefusesWithNumbersAndReleasedBytesServeAgain) {
  TierOptions options = small();
  options.limit_bytes = 8 * kMiB;
  const auto tier = open(options);
  std::vector<TierSpan> spans;
  for (;;) {
    const auto span = tier->allocate(kMiB);
    if (!span.ok()) {
      EXPECT_EQ(span.error().code(), Code::kBackpressure);
      EXPECT_NE(span.error().message().find("8388608"), std::string::npos) << span.error().message();
      break;
    }
    spans.push_back(*span);
    ASSERT_LE(spans.size(), 8U);
  }
  EXPECT_EQ(spans.size(), 8U);
  EXPECT_LE(tier->committed_bytes(), options.limit_bytes);
  tier->release(spans[3]);
  EXPECT_TRUE(tier->allocate(kMiB).ok());
}

TEST_P(TierConformance, AtTheLimitIdlePagesAreFoundThoughATighterUntouchedRangeFits) {
  TierOptions options = small();
  options.limit_bytes = 3 * kMiB;
  const auto tier = open(options);
  const auto large = tier->allocate(2 * kMiB);
  ASSERT_TRUE(large.ok() && tier->allocate(64 * 1024).ok());
  ASSERT_EQ(tier->committed_bytes(), 3 * kMiB);
  tier->release(*large);
  const auto again = tier->allocate(kMiB);  // 2 MiB idle at the front; 1.9 MiB behind, which would need new pages
  ASSERT_TRUE(again.ok()) << again.error().to_string();
  EXPECT_EQ(tier->committed_bytes(), 3 * kMiB);
}

TEST_P(TierConformance, ARefusedSmallSpanIsNotHandedOutLater) {
  TierOptions options = small();
  options.limit_bytes = kMiB;
  const auto tier = open(options);
  ASSERT_TRUE(tier->allocate(kMiB).ok());
  for (int i = 0; i < 3; ++i) {
    const auto span = tier->allocate(64);
    ASSERT_FALSE(span.ok());
    EXPECT_EQ(span.error().code(), Code::kBackpressure);
  }
}

TEST_P(TierConformance, HugePagesRequiredButAbsentAreNamed) {
  if (free_huge_pages() > 0) GTEST_SKIP() << "this machine has huge pages";
  TierOptions options = small();
  options.huge_pages = TierOptions::HugePages::kRequire;
  const auto tier = open_tier(GetParam(), options);
  ASSERT_FALSE(tier.ok());
  EXPECT_EQ(tier.error().code(), Code::kUnavailable);
  EXPECT_NE(tier.error().message().find("nr_hugepages"), std::string::npos) << tier.error().message();
}

TEST_P(TierConformance, HugePagesTriedFallBackAndSaySo) {
  TierOptions options = small();
  options.huge_pages = TierOptions::HugePages::kTry;
  const auto tier = open(options);
  const auto span = tier->allocate(kMiB);
  ASSERT_TRUE(span.ok()) << span.error().to_string();
  std::memset(tier->at(span->arena, span->offset), 1, kMiB);
  EXPECT_EQ(tier->note().empty(), free_huge_pages() >= 2) << tier->note();
}

TEST_P(TierConformance, ArenaBytesMustBeWholeHugePages) {
  TierOptions options;
  options.arena_bytes = 12345;
  const auto tier = open_tier(GetParam(), options);
  ASSERT_FALSE(tier.ok());
  EXPECT_EQ(tier.error().code(), Code::kInvalid);
}

TEST(MemoryTier, ReadersCanNeitherTruncateNorWriteTheDescriptor) {
  TierOptions options;
  options.arena_bytes = 4 * kMiB;
  const auto tier = *MemoryTier::open(MemoryTier::Backing::kMemfd, options);
  ASSERT_TRUE(tier->allocate(64).ok());
  const int fd = tier->arena(0).fd;
  ASSERT_GE(fd, 0);
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, static_cast<off_t>(64 * kMiB)), 0);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  void* readable = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(readable, MAP_FAILED);
  munmap(readable, 4096);
}

TEST(MemoryTier, UnknownSpecsAreRefusedWithTheKnownOnes) {
  const auto tier = open_tier("floppy", {});
  ASSERT_FALSE(tier.ok());
  EXPECT_NE(tier.error().message().find("memory, heap"), std::string::npos);
  for (const Availability& row : available_tiers()) {
    if (row.name == "memory" || row.name == "heap") {
      EXPECT_TRUE(row.usable) << row.name << ": " << row.reason;
    } else {
      EXPECT_TRUE(row.usable || (!row.reason.empty() && !row.next.empty())) << row.name;
    }
  }
}

// ---------------------------------------------------------------- what the machine has left

class MemoryLimitTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "paramwire-limit-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name + "/";
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void machine() { write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"); }
  std::string root_;
};

TEST_F(MemoryLimitTest, WithoutCgroupTheMachineDecides) {
  machine();
  const MemoryLimit limit = memory_limit(root_);
  EXPECT_EQ(limit.available_bytes, 600U * 1024);
  EXPECT_EQ(limit.limit_bytes, 1000U * 1024);
  EXPECT_EQ(limit.source, "MemAvailable");
}

TEST_F(MemoryLimitTest, ALimitOfAParentCgroupBindsAndIsNamed) {
  machine();
  write("proc/self/cgroup", "0::/pod/inner\n");
  write("sys/fs/cgroup/pod/inner/memory.max", "max\n");
  write("sys/fs/cgroup/pod/inner/memory.current", "1000\n");
  write("sys/fs/cgroup/pod/memory.max", "100000\n");
  write("sys/fs/cgroup/pod/memory.current", "40000\n");
  const MemoryLimit limit = memory_limit(root_);
  EXPECT_EQ(limit.available_bytes, 60000U);
  EXPECT_EQ(limit.limit_bytes, 100000U);
  EXPECT_EQ(limit.source, root_ + "sys/fs/cgroup/pod/memory.max");
}

TEST_F(MemoryLimitTest, VersionOneControllersAreRead) {
  machine();
  write("proc/self/cgroup", "5:cpu,cpuacct:/x\n7:memory:/job\nnonsense\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "7000\n");
  EXPECT_EQ(memory_limit(root_).available_bytes, 0U);
}

TEST_F(MemoryLimitTest, PageCacheOfFilesReadBeforeIsAvailable) {
  machine();
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "100000\n");
  write("sys/fs/cgroup/job/memory.current", "90000\n");
  write("sys/fs/cgroup/job/memory.stat", "anon 20000\nfile 70000\ninactive_file 60000\nactive_file 10000\n");
  EXPECT_EQ(memory_limit(root_).available_bytes, 70000U);
}

TEST_F(MemoryLimitTest, NothingReadableIsNoLimit) {
  EXPECT_EQ(memory_limit(root_).available_bytes, ~std::uint64_t{0});
  EXPECT_GT(memory_limit().available_bytes, 0U);
}

}  // namespace
}  // namespace paramwire
