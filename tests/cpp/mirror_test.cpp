// Mirrors against servers that answer oddly: what they hold stays whole, and what a delta does not bring is fetched.
#include "support/frame_proxy.hpp"
#include "support/rig.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/client/mirror.hpp"
#include "paramwire/wire/delta_message.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>

namespace paramwire {
namespace {

using namespace testing;

class MirrorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    bytes_ = random_bytes(300'000, 1);
    rig_.publish({{"w", bytes_}, {"still", random_bytes(1000, 2)}});
  }
  // A few bytes of "w" move.
  void step() {
    for (std::size_t i = 0; i < bytes_.size(); i += 1009) bytes_[i] ^= std::byte{1};
    auto publish = must(rig_.server->publish());
    must(publish.put(BlockSpec{"w", DType::kU8, Shape{bytes_.size()}, {}}, bytes_));
    must(publish.finish());
  }
  std::unique_ptr<Mirror> follow(const Endpoint& endpoint, Micros delta_wait = 20 * kMicrosPerSecond) {
    ClientOptions options;
    options.transport = "tcp";
    client_ = must(Client::connect(endpoint.to_string(), options));
    MirrorOptions mirror;
    mirror.delta_wait = delta_wait;
    return must(Mirror::open(client_, mirror));
  }
  bool holds(const Mirror& mirror) const {
    const auto state = mirror.state();
    const auto held = state->tensors.at("w")->bytes.span();
    return std::equal(held.begin(), held.end(), bytes_.begin(), bytes_.end());
  }

  static ServerOptions on_demand() {
    ServerOptions options;
    options.deltas.interest = -1;  // none is made before it is asked for, so that the first answer is always "being made"
    return options;
  }

  Rig rig_{on_demand()};
  Bytes bytes_;
  std::shared_ptr<Client> client_;
};

TEST_F(MirrorTest, DeltasBringWhatChangedAndSaveTheRest) {
  const auto mirror = follow(rig_.tcp_endpoint());
  for (int i = 0; i < 3; ++i) {
    step();
    must(mirror->update());
    EXPECT_TRUE(holds(*mirror));
  }
  const MirrorStats stats = mirror->stats();
  EXPECT_EQ(stats.deltas, 3U);
  EXPECT_EQ(stats.fetched, 2U) << "the first version";
  EXPECT_EQ(stats.refused, 0U);
  EXPECT_GT(stats.saved_bytes(), 3U * 250'000);
  EXPECT_EQ(must(rig_.server->stats()).deltas.sent, 3U);
}

TEST_F(MirrorTest, AListThatDoesNotAnswerWhatWasAskedIsCorruptAndChangesNothing) {
  const auto encoded = [](const DeltaListMessage& list) {
    const Bytes frame = list.encode(1);
    return Bytes(frame.begin() + sizeof(FrameHeader), frame.end());
  };
  const std::vector<std::function<void(DeltaListMessage&)>> odd = {
      [](DeltaListMessage& list) { list.sizes.clear(); },
      [](DeltaListMessage& list) { list.sizes.assign(9, 0); },
      [](DeltaListMessage& list) { list.sizes.assign(1, 77); },
  };
  for (const auto& change : odd) {
    FrameProxy proxy(rig_.tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
      if (!from_server || type != FrameType::kDeltaList) return true;
      DeltaListMessage list = *DeltaListMessage::decode(meta);
      if (list.sizes != std::vector<std::uint64_t>{kDeltaPending}) return true;  // the first answer has no body to fit
      change(list);
      meta = encoded(list);
      return true;
    });
    const auto mirror = follow(proxy.endpoint());
    const auto before = mirror->state();
    step();
    const auto updated = mirror->update();
    ASSERT_FALSE(updated.ok());
    EXPECT_EQ(updated.error().code(), Code::kCorrupt) << updated.error().to_string();
    EXPECT_EQ(mirror->state(), before);
  }
}

TEST_F(MirrorTest, AServerRemembersNothingOfVersionsThatItDoesNotHave) {
  step();
  const testing::Snapshot snapshot = rig_.snapshot();
  DeltasMessage ask;
  ask.incarnation = rig_.server->incarnation();
  for (std::uint64_t counter = 100; counter < 1100; ++counter) ask.asks.push_back({block_id("w", Shard::whole()), snapshot.entry("w").version, Version{1, counter}});
  const auto control = must(ControlLink::connect(rig_.tcp_endpoint(), Caller(ClientId{1, 2}), in_seconds(30)));
  const auto answer = must(control->call(ask.encode(control->next_request()), 1, FrameType::kDeltaList, in_seconds(30)));
  EXPECT_EQ(must(DeltaListMessage::decode(answer.meta)).sizes, std::vector<std::uint64_t>(1000, 0));
  const DeltaStats deltas = must(rig_.server->stats()).deltas;
  EXPECT_EQ(deltas.waiting + deltas.kept + deltas.made, 0U);
}

TEST_F(MirrorTest, DeltasThatAreNeverReadyAreNotWaitedForLongerThanAsked) {
  std::atomic<int> asked{0};
  FrameProxy proxy(rig_.tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
    if (!from_server && type == FrameType::kDeltas) {
      // Of a version that is not the newest: never made.
      ++asked;
      DeltasMessage ask = *DeltasMessage::decode(meta);
      for (auto& each : ask.asks) each.version.counter += 1000;
      const Bytes frame = ask.encode(1);
      meta.assign(frame.begin() + sizeof(FrameHeader), frame.end());
    }
    return true;
  });
  const auto mirror = follow(proxy.endpoint(), 50'000);
  step();
  must(mirror->update());
  EXPECT_TRUE(holds(*mirror));
  EXPECT_EQ(mirror->stats().deltas, 0U);
  EXPECT_EQ(mirror->stats().fetched, 3U);
  EXPECT_GE(asked, 1);
}

TEST_F(MirrorTest, ADeltaOfAnotherBlockIsRefusedAndTheBlockFetched) {
  rig_.publish({{"x", random_bytes(300'000, 7)}});
  std::atomic<bool> swap{false};
  FrameProxy proxy(rig_.tcp_endpoint(), [&](bool from_server, FrameType type, Bytes& meta) {
    if (!from_server && type == FrameType::kDeltas && swap) {
      DeltasMessage ask = *DeltasMessage::decode(meta);
      if (ask.asks.size() == 2) std::swap(ask.asks[0], ask.asks[1]);
      const Bytes frame = ask.encode(1);
      meta.assign(frame.begin() + sizeof(FrameHeader), frame.end());
    }
    return true;
  });
  const auto mirror = follow(proxy.endpoint());
  swap = true;
  Bytes other = random_bytes(300'000, 7);
  for (std::size_t i = 0; i < other.size(); i += 1009) other[i] ^= std::byte{1};
  for (std::size_t i = 0; i < bytes_.size(); i += 1009) bytes_[i] ^= std::byte{1};
  rig_.publish({{"w", bytes_}, {"x", other}});
  must(mirror->update());
  EXPECT_TRUE(holds(*mirror));
  // The second is asked for alone, and so by its own name, if only one was ready.
  EXPECT_GE(mirror->stats().refused, 1U);
  EXPECT_EQ(mirror->stats().refused + mirror->stats().deltas, 2U);
}

}  // namespace
}  // namespace paramwire
