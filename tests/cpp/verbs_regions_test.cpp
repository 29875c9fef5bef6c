// The server's memory as a verbs link knows it: regions that come later, grow, are missing or wrong, and the connection over which they are asked for.
#include "support/frame_proxy.hpp"
#include "support/verbs_rig.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class VerbsRegionsLinkTest : public VerbsRig {
 protected:
  void serve_model(const std::vector<std::size_t>& sizes, ServerOptions options = {}) {
    serve(server_and_client(), std::move(options));
    publish(sizes);
  }
  void publish(const std::vector<std::size_t>& sizes) {
    std::vector<std::pair<std::string, Bytes>> tensors;
    for (const std::size_t size : sizes) {
      tensors.emplace_back(cat("t", model_.size()), random_bytes(size, model_.size()));
      model_.push_back(tensors.back());
    }
    rig_->publish(tensors);
    snapshot_ = rig_->snapshot();
  }
  void read_all(Link& link) {
    for (const auto& [name, bytes] : model_) {
      const auto got = read(link, snapshot_, name);
      ASSERT_TRUE(got.ok()) << got.error().to_string();
      ASSERT_TRUE(*got == bytes) << name;
    }
  }
  // A link through a proxy that edits the server's answers.
  Result<std::unique_ptr<Link>> through(FrameProxy& proxy, Micros deadline = in_seconds(20)) {
    return VerbsLink::connect(proxy.endpoint(), kVerbsClient, rig_->server->incarnation(), {}, node(), deadline);
  }
  static Bytes encoded(const VerbsRegionListMessage& list) { return meta_of(list.encode(1)); }

  std::vector<std::pair<std::string, Bytes>> model_;
  Snapshot snapshot_;
};

TEST_F(VerbsRegionsLinkTest, AModelOverSeveralArenasAndRegionsIsReadAllOver) {
  ServerOptions options;
  options.tier_options.arena_bytes = 32 * kMiB;
  serve_model({9 * kMiB, 9 * kMiB + 7, 12 * kMiB, 3, 31 * kMiB + 5, 70'000, 40 * kMiB}, options);
  const auto link = connect();
  read_all(*link);
  std::set<std::uint16_t> arenas;
  for (const auto& [name, bytes] : model_) arenas.insert(snapshot_.locator(name).arena);
  EXPECT_GT(arenas.size(), 2U);
  EXPECT_EQ(link->stats().verbs.regions, must(rig_->server->stats()).verbs.regions);
  EXPECT_GE(link->stats().verbs.regions, 7U);
  const std::uint64_t asked = link->stats().verbs.control_calls;
  read_all(*link);
  EXPECT_EQ(link->stats().verbs.control_calls, asked) << "what is known is not asked for";
  for (std::uint64_t at = 16 * kMiB - 5; at < 16 * kMiB + 5; ++at) {  // wherever the blocks lie, ranges near all boundaries
    EXPECT_EQ(must(read(*link, snapshot_, "t6", {at, 70'000})), Bytes(model_[6].second.begin() + static_cast<std::ptrdiff_t>(at), model_[6].second.begin() + static_cast<std::ptrdiff_t>(at + 70'000)));
  }
}

TEST_F(VerbsRegionsLinkTest, WhatWasPublishedAfterConnectingIsAskedForWhenItIsRead) {
  serve_model({1000});
  const auto link = connect(), other = connect();
  const std::uint64_t regions = link->stats().verbs.regions, asked = link->stats().verbs.control_calls;
  publish({20 * kMiB, 20 * kMiB});
  read_all(*link);
  EXPECT_GT(link->stats().verbs.regions, regions);
  EXPECT_GT(link->stats().verbs.control_calls, asked);
  const std::uint64_t registered = must(rig_->server->stats()).verbs.regions;
  read_all(*other);
  EXPECT_EQ(must(rig_->server->stats()).verbs.regions, registered) << "registered once for all";
}

TEST_F(VerbsRegionsLinkTest, UnderALimitRegionsGrowWithTheMemoryThatIsThere) {
  ServerOptions options;
  options.tier_options.limit_bytes = 6 * kMiB;
  serve_model({500'000}, options);
  const auto link = connect();
  read_all(*link);
  EXPECT_LT(must(rig_->server->stats()).verbs.region_bytes, 16 * kMiB);
  for (int i = 0; i < 4; ++i) {
    publish({900'000});
    read_all(*link);
  }
  EXPECT_GT(link->stats().verbs.regions, 2U) << "the same region, longer each time";
  EXPECT_FALSE(link->broken());
}

TEST_F(VerbsRegionsLinkTest, ANewRegionThatCanNotBeRegisteredIsTheBlocksErrorAndTheOthersAreRead) {
  serve_model({1000});
  const auto link = connect();
  publish({20 * kMiB});
  fabric_->fail(FakeCall::kRegMr, ENOMEM, 1, 1, "fake0");
  Bytes small(1000), large(20 * kMiB);
  std::vector<BlockRead> batch = {snapshot_.read_of("t1", {0, 20 * kMiB}, large), snapshot_.read_of("t0", {0, 1000}, small)};
  link->read(batch, in_seconds(30));
  ASSERT_FALSE(batch[0].result.ok());
  EXPECT_EQ(batch[0].result.error().code(), Code::kBackpressure);
  expect_words(batch[0].result.error().message(), {rig_->tcp_endpoint().to_string(), "fake0", "ulimit -l"});
  EXPECT_TRUE(batch[1].result.ok());
  EXPECT_FALSE(link->broken());
  read_all(*link);
}

// ---------------------------------------------------------------- the connection under it

TEST_F(VerbsRegionsLinkTest, AConnectionThatEndsWhileARegionIsAskedForBreaksTheLink) {
  serve_model({1000});
  FrameProxy proxy(rig_->tcp_endpoint(), [](bool, FrameType, Bytes&) { return true; });
  const auto link = must(through(proxy));
  publish({20 * kMiB});
  proxy.cut();
  const auto lost = read(*link, snapshot_, "t1");
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnreachable);
  EXPECT_TRUE(link->broken()) << "else it would be lent out again, and fail again";
}

TEST_F(VerbsRegionsLinkTest, AQuestionForARegionThatIsNeverAnsweredEndsAtTheDeadlineAndBreaksTheLink) {
  serve_model({1000});
  std::atomic<bool> swallow{false};
  FrameProxy proxy(rig_->tcp_endpoint(), [&](bool from_server, FrameType, Bytes&) { return !from_server || !swallow; });
  const auto link = must(through(proxy));
  publish({20 * kMiB});
  swallow = true;
  Bytes target(20 * kMiB);
  const Status late = read_into(*link, snapshot_, "t1", {0, target.size()}, target, steady_clock().now() + 50'000);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Code::kTimeout);
  EXPECT_TRUE(link->broken()) << "the answer may still come, and would be taken for another one's";
}

TEST_F(VerbsRegionsLinkTest, AServerThatSpeaksUnaskedIsNotListenedTo) {
  for (const bool busy : {false, true}) {
    serve(server_and_client(Delivery::kThread));
    model_.clear();
    publish({1000});
    FrameProxy proxy(rig_->tcp_endpoint(), [](bool, FrameType, Bytes&) { return true; });
    const auto link = must(VerbsLink::connect(proxy.endpoint(), kVerbsClient, rig_->server->incarnation(), {.busy_poll = busy}, node(), in_seconds(20)));
    fabric_->freeze(true);
    proxy.send_to_clients(encode_empty(FrameType::kOk, 77));
    const auto odd = read(*link, snapshot_, "t0");
    ASSERT_FALSE(odd.ok());
    EXPECT_EQ(odd.error().code(), Code::kUnreachable);
    expect_words(odd.error().message(), {"unasked", "connect again"});
    fabric_->freeze(false);
  }
}

TEST_F(VerbsRegionsLinkTest, TheLastWordOfAServerThatEndsALinkIsPassedOn) {
  serve(server_and_client(Delivery::kThread));
  publish({1000});
  FrameProxy proxy(rig_->tcp_endpoint(), [](bool, FrameType, Bytes&) { return true; });
  const auto link = must(through(proxy));
  fabric_->freeze(true);
  proxy.send_to_clients(ErrorMessage{Code::kBackpressure, "no room for one more"}.encode(0));
  const auto ended = read(*link, snapshot_, "t0");
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().code(), Code::kUnreachable);
  expect_words(ended.error().message(), {"no room for one more", "connect again"});
  fabric_->freeze(false);
}

TEST_F(VerbsRegionsLinkTest, AFarRegionCostsAClientNoMoreThanANearOne) {
  serve(server_and_client());
  publish({1000});
  FrameProxy proxy(rig_->tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
    if (from_server && type == FrameType::kVerbsRegionList) {
      VerbsRegionListMessage list = *VerbsRegionListMessage::decode(meta);
      // The last one that each of eight arenas can have: in a table by offset these take 2 GiB.
      for (std::uint16_t arena = 1000; arena < 1008; ++arena) list.regions.push_back({arena, (std::uint64_t{1} << 48) - kRegionBytes, 4096, 1, 1});
      meta = encoded(list);
    }
    return true;
  });
  const auto resident_pages = [] {
    std::ifstream statm("/proc/self/statm");
    std::uint64_t size = 0, resident = 0;
    statm >> size >> resident;
    return resident;
  };
  const std::uint64_t before = resident_pages();
  const auto link = must(through(proxy));
  EXPECT_LT(resident_pages(), before + 256 * kMiB / 4096);
  read_all(*link);
}

// ---------------------------------------------------------------- servers that say what is wrong

TEST_F(VerbsRegionsLinkTest, AListThatLacksWhatWasAskedForIsCorrupt) {
  serve_model({1000});
  FrameProxy proxy(rig_->tcp_endpoint(), [](bool from_server, FrameType type, Bytes& meta) {
    if (from_server && type == FrameType::kVerbsRegionList) meta = encoded({true, {}});
    return true;
  });
  const auto link = must(through(proxy));
  const auto lacking = read(*link, snapshot_, "t0");
  ASSERT_FALSE(lacking.ok());
  EXPECT_EQ(lacking.error().code(), Code::kCorrupt);
  expect_words(lacking.error().message(), {proxy.endpoint().to_string(), "its list of regions lacks arena 0"});
}

TEST_F(VerbsRegionsLinkTest, RegionsThatNoServerCanHaveAreCorrupt) {
  serve_model({1000});
  const VerbsRegion good{0, 0, 4096, 1, 1};
  for (const VerbsRegion& wrong : {VerbsRegion{65535, 0, 4096, 1, 1}, VerbsRegion{0, std::uint64_t{1} << 48, 4096, 1, 1}}) {
    FrameProxy proxy(rig_->tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
      if (from_server && type == FrameType::kVerbsRegionList) meta = encoded({true, {good, wrong}});
      return true;
    });
    const auto link = through(proxy);
    ASSERT_FALSE(link.ok());
    EXPECT_EQ(link.error().code(), Code::kCorrupt);
    expect_words(link.error().message(), {proxy.endpoint().to_string(), "a region at offset"});
  }
}

TEST_F(VerbsRegionsLinkTest, AnAgreementOnMoreThanWasOfferedIsCorrupt) {
  FakeFabric fabric = server_and_client();
  fabric.devices[1].ports[0].mtu_active = 1024;
  serve(fabric);
  enum class Lie { kMtu, kReads, kGarbage };
  for (const Lie lie : {Lie::kMtu, Lie::kReads, Lie::kGarbage}) {
    FrameProxy proxy(rig_->tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
      if (!from_server || type != FrameType::kVerbsReady) return true;
      VerbsReadyMessage ready = *VerbsReadyMessage::decode(meta);
      if (lie == Lie::kMtu) ready.end.mtu = 4096;
      if (lie == Lie::kReads) ready.end.reads = 200;
      meta = meta_of(ready.encode(1));
      if (lie == Lie::kGarbage) meta.pop_back();
      return true;
    });
    const auto link = through(proxy);
    ASSERT_FALSE(link.ok());
    EXPECT_EQ(link.error().code(), Code::kCorrupt) << link.error().to_string();
    EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
  }
}

TEST_F(VerbsRegionsLinkTest, AKeyThatIsNoneIsATypedErrorAndEndsBothQueuePairs) {
  serve_model({1000});
  FrameProxy proxy(rig_->tcp_endpoint(), [](bool from_server, FrameType type, Bytes& meta) {
    if (!from_server || type != FrameType::kVerbsRegionList) return true;
    VerbsRegionListMessage list = *VerbsRegionListMessage::decode(meta);
    for (VerbsRegion& region : list.regions) region.key += 2;
    meta = encoded(list);
    return true;
  });
  const auto link = must(through(proxy));
  const auto expired = read(*link, snapshot_, "t0");
  ASSERT_FALSE(expired.ok());
  EXPECT_EQ(expired.error().code(), Code::kUnreachable);
  expect_words(expired.error().message(), {"remote access error (status 10)", "not registered any more"});
  EXPECT_EQ(link->stats().verbs.failed_status, 10U);
  EXPECT_EQ(server_queue_pairs(0), 0U);
  EXPECT_EQ(must(read(*connect(), snapshot_, "t0")), model_[0].second);
}

TEST_F(VerbsRegionsLinkTest, AListLongerThanOneAnswerIsAskedForInPieces) {
  serve_model({1000, 20 * kMiB});
  // 5,000 regions of arenas that this model does not use stand before the server's own.
  constexpr std::size_t kOthers = 5000;
  std::size_t known = 0;
  std::size_t questions = 0;
  FrameProxy proxy(rig_->tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
    if (type == FrameType::kVerbsRegions) {
      VerbsRegionsMessage ask = *VerbsRegionsMessage::decode(meta);
      known = ask.known;
      ask.known = 0;
      meta = meta_of(ask.encode(1));
      ++questions;
    }
    if (from_server && type == FrameType::kVerbsRegionList) {
      VerbsRegionListMessage list = *VerbsRegionListMessage::decode(meta);
      std::vector<VerbsRegion> all;
      for (std::size_t i = 0; i < kOthers; ++i) all.push_back({static_cast<std::uint16_t>(10 + i % 100), i / 100 * kRegionBytes, 4096, 1, 1});
      all.insert(all.end(), list.regions.begin(), list.regions.end());
      const std::size_t end = std::min(all.size(), known + kVerbsRegionsMax);
      list.regions.assign(all.begin() + static_cast<std::ptrdiff_t>(known), all.begin() + static_cast<std::ptrdiff_t>(end));
      list.complete = list.complete && end == all.size();
      meta = encoded(list);
    }
    return true;
  });
  const auto link = must(through(proxy));
  EXPECT_GE(questions, 2U);
  EXPECT_EQ(link->stats().verbs.regions, kOthers + must(rig_->server->stats()).verbs.regions);
  read_all(*link);
}

}  // namespace
}  // namespace paramwire
