// Publishing from another process: PublishLink against a real server, and against peers that break.
#include "support/rig.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/net/publish_link.hpp"
#include "paramwire/net/shm_link.hpp"
#include "paramwire/wire/frame.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

constexpr ClientId kClient{5, 6};

std::unique_ptr<PublishLink> start(const Endpoint& endpoint) { return must(PublishLink::start(endpoint, kClient, true, std::nullopt, in_seconds(10))); }

PublishBlock vector_of(std::string_view tensor, const Bytes& bytes) { return {tensor, DType::kU8, Shape{bytes.size()}, {}}; }

Bytes fetch(Rig& rig, const Snapshot& snapshot, std::string_view tensor) {
  const auto link = must(ShmLink::connect(rig.unix_endpoint(), kClient, rig.server->incarnation(), {}, in_seconds(10)));
  Bytes target(static_cast<std::size_t>(snapshot.entry(tensor).raw_size));
  BlockRead item = snapshot.read_of(tensor, {0, target.size()}, target);
  link->read({&item, 1}, in_seconds(30));
  must(item.result);
  return target;
}

TEST(PublishLink, WhatIsPutIsReadBackOverBothKindsOfSocket) {
  Rig rig;
  const std::vector<std::pair<std::string, Bytes>> model = {
      {"empty", {}}, {"one", random_bytes(1, 1)}, {"copied", random_bytes(16 * 1024, 2)}, {"sent", random_bytes(16 * 1024 + 1, 3)}, {"large", random_bytes((std::size_t{5} << 20) + 3, 4)}};
  for (const Endpoint& endpoint : rig.server->endpoints()) {
    const auto link = start(endpoint);
    for (const auto& [name, bytes] : model) must(link->put(vector_of(name, bytes), bytes, in_seconds(30)));
    must(link->put({"shard", DType::kBF16, Shape{10, 2}, Shard::rows(4, 10)}, random_bytes(24, 5), in_seconds(30)));
    must(link->alias("tied", "large", in_seconds(30)));
    const Version version = must(link->finish(in_seconds(30)));
    EXPECT_EQ(version, link->version());
    EXPECT_EQ(must(link->finish(in_seconds(1))), version);
    EXPECT_EQ(rig.server->newest(), version);
    const Snapshot snapshot = rig.snapshot();
    for (const auto& [name, bytes] : model) EXPECT_EQ(fetch(rig, snapshot, name), bytes) << name;
    EXPECT_EQ(snapshot.manifest.tensor_blocks("tied").front().entry.tensor, "large");
  }
}

TEST(PublishLink, RemoveDropsATensorAndSaysWhenThereIsNone) {
  Rig rig;
  rig.publish({{"a", random_bytes(10, 1)}, {"b", random_bytes(10, 2)}});
  const auto link = start(rig.tcp_endpoint());
  EXPECT_EQ(link->remove("nope", in_seconds(10)).error().code(), Code::kNotFound);
  must(link->remove("a", in_seconds(10)));
  must(link->finish(in_seconds(10)));
  EXPECT_EQ(rig.snapshot().manifest.entry_count(), 1U);
}

TEST(PublishLink, ASpecThatDoesNotFitIsRefusedBeforeAnythingIsSentAndThePublishGoesOn) {
  Rig rig;
  const auto link = start(rig.tcp_endpoint());
  const Bytes bytes = random_bytes(12, 1);
  EXPECT_EQ(link->put({"w", DType::kF32, Shape{4}, {}}, bytes, in_seconds(10)).error().code(), Code::kInvalid);
  EXPECT_EQ(link->put({"w", DType::kF32, Shape{3}, Shard::rows(2, 9)}, bytes, in_seconds(10)).error().code(), Code::kInvalid);
  EXPECT_EQ(link->put({std::string(5000, 'n'), DType::kF32, Shape{3}, {}}, bytes, in_seconds(10)).error().code(), Code::kInvalid);
  must(link->put({"w", DType::kF32, Shape{3}, {}}, bytes, in_seconds(10)));
  must(link->finish(in_seconds(10)));
}

TEST(PublishLink, APutThatTheServerRefusesMakesFinishFail) {
  ServerOptions options;
  options.put_bytes_max = 1000;
  Rig rig(options);
  const auto link = start(rig.tcp_endpoint());
  const Bytes bytes = random_bytes(100'000, 1);
  must(link->put(vector_of("fits", random_bytes(1000, 2)), random_bytes(1000, 2), in_seconds(10)));
  static_cast<void>(link->put(vector_of("w", bytes), bytes, in_seconds(10)));  // may or may not know yet
  const auto version = link->finish(in_seconds(10));
  ASSERT_FALSE(version.ok());
  EXPECT_EQ(version.error().code(), Code::kInvalid);
  EXPECT_NE(version.error().message().find(rig.tcp_endpoint().to_string()), std::string::npos);
  EXPECT_NE(version.error().message().find("\"w\""), std::string::npos);
  EXPECT_FALSE(rig.server->newest().has_value());
  EXPECT_EQ(must(rig.server->stats()).store.publishes_open, 0U);  // it was aborted
}

TEST(PublishLink, TheSlowerOfTwoPublishersIsStale) {
  Rig rig;
  const auto slow = start(rig.tcp_endpoint());
  rig.publish({{"w", random_bytes(10, 1)}});
  must(slow->put(vector_of("w", random_bytes(9, 2)), random_bytes(9, 2), in_seconds(10)));
  EXPECT_EQ(slow->finish(in_seconds(10)).error().code(), Code::kStale);
  EXPECT_EQ(PublishLink::start(rig.tcp_endpoint(), kClient, false, std::nullopt, in_seconds(10)).error().code(), Code::kStale);
}

TEST(PublishLink, AbortAndDestructionLeaveNothing) {
  Rig rig;
  {
    const auto link = start(rig.tcp_endpoint());
    must(link->put(vector_of("w", random_bytes(10, 1)), random_bytes(10, 1), in_seconds(10)));
    must(link->abort(in_seconds(10)));
    EXPECT_FALSE(link->finish(in_seconds(10)).ok());
  }
  const StoreStats stats = must(rig.server->stats()).store;
  EXPECT_EQ(stats.publishes_open, 0U);
  EXPECT_EQ(stats.slots_in_use, 0U);
  EXPECT_FALSE(rig.server->newest().has_value());
}

TEST(PublishLink, ManyTinyPutsArePipelined) {
  Rig rig;
  constexpr std::size_t kCount = 20'000;
  const auto link = start(rig.unix_endpoint());
  const Bytes bytes = random_bytes(kCount + 64, 1);
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::span<const std::byte> part = std::span(bytes).subspan(i, i % 64);
    ASSERT_TRUE(link->put({cat("t", i), DType::kU8, Shape{i % 64}, {}}, part, in_seconds(60)).ok());
  }
  must(link->finish(in_seconds(60)));
  EXPECT_EQ(rig.snapshot().manifest.entry_count(), kCount);
}

// ---------------------------------------------------------------- peers that break

// Relays one connection at a time to a real server, and can be told to cut it after the n-th frame of the server, or to
// flip a bit of a PUT's body on the way.
class Relay {
 public:
  Relay(const Endpoint& server, std::string path) : server_(server), listener_(must(Listener::open(Endpoint::unix_socket(std::move(path))))) {}
  ~Relay() { join(); }
  const Endpoint& endpoint() const { return listener_.endpoint(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  // Serves `connections` of them, one after the other; in the first, closes instead of relaying the answer to FINISH.
  void run(int connections, bool lose_answer_to_finish, bool flip_body) {
    thread_ = std::thread([=, this] {
      for (int i = 0; i < connections; ++i) relay_one(lose_answer_to_finish && i == 0, flip_body);
    });
  }

 private:
  static bool read_frame(Socket& from, Bytes& out, FrameHeader& header) {
    if (!from.receive_all(std::as_writable_bytes(std::span(&header, 1)), in_seconds(20)).ok()) return false;
    out.resize(sizeof header + header.meta_size + header.body_size);
    std::memcpy(out.data(), &header, sizeof header);
    return from.receive_all(std::span(out).subspan(sizeof header), in_seconds(20)).ok();
  }
  void relay_one(bool lose_answer, bool flip) {
    std::optional<Socket> client;
    while (!client) {
      auto accepted = listener_.try_accept();
      if (accepted.ok() && *accepted) client = std::move(**accepted);
      else std::this_thread::yield();
    }
    Socket server = must(Socket::connect(server_, in_seconds(10)));
    Bytes frame;
    FrameHeader header{};
    while (read_frame(*client, frame, header)) {
      if (flip && header.body_size > 0) frame.back() ^= std::byte{1};
      if (!server.send_all(frame, in_seconds(20)).ok() || !read_frame(server, frame, header)) return;
      if (lose_answer && static_cast<FrameType>(header.type) == FrameType::kPublished) return;
      if (!client->send_all(frame, in_seconds(20)).ok()) return;
    }
  }

  Endpoint server_;
  Listener listener_;
  std::thread thread_;
};

TEST(PublishLink, FinishAsksOnceMoreWhenItsAnswerWasLost) {
  Rig rig;
  TemporaryDirectory directory;
  Relay relay(rig.unix_endpoint(), directory.path() + "/s");
  relay.run(2, true, false);
  {
    const auto link = start(relay.endpoint());
    must(link->put(vector_of("w", random_bytes(100, 1)), random_bytes(100, 1), in_seconds(10)));
    EXPECT_EQ(must(link->finish(in_seconds(20))), link->version());
  }
  relay.join();
  EXPECT_EQ(must(rig.server->stats()).store.publishes, 1U);  // committed once, told twice
}

TEST(PublishLink, BytesThatChangedOnTheWayNeverBecomeAVersion) {
  Rig rig;
  TemporaryDirectory directory;
  Relay relay(rig.unix_endpoint(), directory.path() + "/s");
  relay.run(1, false, true);
  {
    const auto link = start(relay.endpoint());
    must(link->put(vector_of("w", random_bytes(100, 1)), random_bytes(100, 1), in_seconds(10)));
    const auto version = link->finish(in_seconds(20));
    ASSERT_FALSE(version.ok());
    EXPECT_EQ(version.error().code(), Code::kCorrupt);
  }
  relay.join();
  EXPECT_FALSE(rig.server->newest().has_value());
  EXPECT_EQ(must(rig.server->stats()).store.publishes_open, 0U);
}

TEST(PublishLink, AServerThatIsGoneIsUnreachableAndOneThatIsSilentATimeout) {
  {
    Rig rig;
    const auto link = start(rig.tcp_endpoint());
    rig.server->close(0);
    const Bytes bytes = random_bytes(std::size_t{64} << 20, 1);
    EXPECT_EQ(link->put(vector_of("w", bytes), bytes, in_seconds(10)).error().code(), Code::kUnreachable);
    EXPECT_EQ(link->finish(in_seconds(10)).error().code(), Code::kUnreachable);
  }
  TemporaryDirectory directory;
  const auto listener = must(Listener::open(Endpoint::unix_socket(directory.path() + "/s")));
  EXPECT_EQ(PublishLink::start(listener.endpoint(), kClient, true, std::nullopt, steady_clock().now() + 20'000).error().code(), Code::kTimeout);
}

TEST(LocalPublish, PutsAreCheckedAndTheDestructorAborts) {
  Rig rig;
  {
    auto publish = must(rig.server->publish());
    EXPECT_EQ(publish.put(BlockSpec{"w", DType::kF32, Shape{3}, {}}, random_bytes(11, 1)).error().code(), Code::kInvalid);
    must(publish.put(BlockSpec{"w", DType::kF32, Shape{3}, {}}, random_bytes(12, 1)));
  }
  EXPECT_EQ(must(rig.server->stats()).store.publishes_open, 0U);
  EXPECT_EQ(must(rig.server->stats()).store.slots_in_use, 0U);
  EXPECT_FALSE(rig.server->newest().has_value());
}

TEST(LocalPublish, OutlivesItsServerAndSaysSo) {
  Rig rig;
  auto publish = must(rig.server->publish());
  rig.server->close(0);
  EXPECT_EQ(publish.put(BlockSpec{"w", DType::kU8, Shape{1}, {}}, random_bytes(1, 1)).error().code(), Code::kUnreachable);
  EXPECT_EQ(publish.finish().error().code(), Code::kUnreachable);
  EXPECT_EQ(rig.server->publish().error().code(), Code::kUnreachable);
  rig.server.reset();
  publish.abort();
}

}  // namespace
}  // namespace paramwire
