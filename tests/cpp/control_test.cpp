#include "paramwire/control/coordinator.hpp"
#include "paramwire/control/version_clock.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include <filesystem>
#include <fstream>
#include <sys/stat.h>

namespace paramwire {
namespace {

TEST(VersionClock, MovesOnlyFromTheNewestAndOnlyUp) {
  VersionClock clock;
  EXPECT_FALSE(clock.newest());
  VersionClock::Root root{};
  root[0] = std::byte{1};
  EXPECT_EQ(clock.commit(Version{1, 1}, {1, 2}, root).error().code(), Code::kStale) << "nothing is published, not (0, 0)";
  ASSERT_TRUE(clock.commit(std::nullopt, {1, 1}, root).ok());
  EXPECT_EQ(clock.root(), root);
  const Status stale = clock.commit(std::nullopt, {1, 2}, root);
  EXPECT_EQ(stale.error().code(), Code::kStale);
  EXPECT_NE(stale.error().message().find("1.1"), std::string::npos) << stale.error().message();
  EXPECT_EQ(clock.commit(Version{1, 1}, {1, 1}, root).error().code(), Code::kInvalid);
  EXPECT_EQ(clock.commit(Version{1, 1}, {2, 0}, root).error().code(), Code::kInvalid) << "half a version";
  ASSERT_TRUE(clock.commit(Version{1, 1}, {2, 1}, root).ok());
  EXPECT_EQ(clock.newest(), (Version{2, 1}));
}

class StateFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "paramwire-state-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string path() const { return (directory_ / "state").string(); }
  std::string spec() const { return "memory:" + path(); }
  void write(const std::string& text) { std::ofstream(path()) << text; }
  std::string read() const {
    std::ifstream file(path());
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::filesystem::path directory_;
};

TEST_F(StateFile, EveryOpenGivesAHigherEpochAndNoPublishedVersion) {
  for (std::uint32_t epoch = 1; epoch <= 3; ++epoch) {
    const auto coordinator = open_coordinator(spec());
    ASSERT_TRUE(coordinator.ok()) << coordinator.error().to_string();
    EXPECT_EQ((*coordinator)->epoch(), epoch);
    EXPECT_FALSE((*coordinator)->newest());
  }
  EXPECT_EQ(read(), "paramwire-state 1\nepoch 3\n");
}

TEST_F(StateFile, TheEpochIsAboveThatOfTheCheckpointTheServerIsRestoredFrom) {
  EXPECT_EQ((*open_coordinator(spec(), 40))->epoch(), 41U);
  EXPECT_EQ(read(), "paramwire-state 1\nepoch 41\n");
  EXPECT_EQ((*open_coordinator(spec(), 7))->epoch(), 42U) << "never below its own";
  const auto plain = open_coordinator("memory", 4000000000U);
  EXPECT_EQ((*plain)->epoch(), 4000000001U);
  EXPECT_EQ(open_coordinator("memory", 4294967295U).error().code(), Code::kInvalid);
}

TEST_F(StateFile, NothingButTheFileAndItsLockIsLeftBehind) {
  ASSERT_TRUE(open_coordinator(spec()).ok());
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  EXPECT_EQ(files, (std::vector<std::string>{path(), path() + ".lock"}));
}

TEST_F(StateFile, ASecondServerOnItIsRefusedWhileTheFirstRuns) {
  auto first = open_coordinator(spec());
  ASSERT_TRUE(first.ok());
  const auto second = open_coordinator(spec());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), Code::kUnavailable);
  EXPECT_NE(second.error().message().find(path()), std::string::npos);
  first->reset();
  EXPECT_TRUE(open_coordinator(spec()).ok());
}

TEST_F(StateFile, MalformedFilesAreNamedAndLeftAlone) {
  for (const std::string text : {"", "epoch 7\n", "paramwire-state 1\nepoch 0\n", "paramwire-state 1\nepoch 7", "paramwire-state 1\nepoch 7\n\n",
                                 "paramwire-state 1\nepoch 99999999999\n", "paramwire-state 1\nepoch -1\n", "paramwire-state 2\nepoch 7\n"}) {
    write(text);
    const auto coordinator = open_coordinator(spec());
    ASSERT_FALSE(coordinator.ok()) << text;
    EXPECT_EQ(coordinator.error().code(), Code::kInvalid);
    EXPECT_NE(coordinator.error().message().find(path()), std::string::npos);
    EXPECT_EQ(read(), text);
  }
  write("paramwire-state 1\nepoch 7\n" + std::string(1000, ' '));
  EXPECT_FALSE(open_coordinator(spec()).ok());
}

TEST_F(StateFile, AWriteThatFailsGivesNoEpochAndKeepsTheOldFile) {
  const auto missing = open_coordinator("memory:" + (directory_ / "no" / "state").string());
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), Code::kUnavailable);
  write("paramwire-state 1\nepoch 4294967295\n");
  const auto used_up = open_coordinator(spec());
  ASSERT_FALSE(used_up.ok());
  EXPECT_EQ(used_up.error().code(), Code::kInvalid);
  EXPECT_EQ(read(), "paramwire-state 1\nepoch 4294967295\n");
}

TEST(Coordinator, WithoutAFileTheEpochComesFromTheClockAndUnknownSpecsAreRefused) {
  const auto coordinator = open_coordinator("memory");
  ASSERT_TRUE(coordinator.ok());
  EXPECT_GT((*coordinator)->epoch(), 0U);
  for (const char* spec : {"", "memory:", "etcd", "disk"}) {
    const auto refused = open_coordinator(spec);
    ASSERT_FALSE(refused.ok()) << spec;
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
  }
}

}  // namespace
}  // namespace paramwire
