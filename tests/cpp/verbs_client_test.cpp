// Whole clients over RDMA: fetches that go on after a failure, readers that vanish, servers that restart, many threads and a publisher at once.
#include "support/verbs_rig.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/payload.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace paramwire {
namespace {

using namespace testing;

class VerbsClientTest : public VerbsRig {
 protected:
  static Result<Bytes> fetch(Client& client, std::string_view tensor, std::size_t size, CallOptions options = {}) {
    Bytes target(size);
    FetchRequest request;
    request.tensor = tensor;
    request.target = target;
    auto version = client.fetch({&request, 1}, options);
    if (!version.ok()) return std::move(version).error();
    return target;
  }
  static Status fetch_of(paramwire::Snapshot& snapshot, std::string_view tensor, Bytes& target) {
    FetchRequest request;
    request.tensor = tensor;
    request.target = target;
    return snapshot.fetch({&request, 1});
  }
  const Bytes bytes_ = random_bytes(3'000'000, 1);
};

TEST_F(VerbsClientTest, EncodedBlocksAreReadAsTheyAreStoredAndDecodedHere) {
  serve(server_and_client(Delivery::kThread));
  Bytes raw(6'000'000);  // bytes of few values: what a codec is for
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = bytes_[i % bytes_.size()] & std::byte{7};
  PayloadEncoder encoder;
  const auto payload = must(encoder.encode({{}, CodecId::kPlanes}, DType::kU8, raw, 1));
  ASSERT_EQ(payload.codec, CodecId::kPlanes);
  auto publish = must(rig_->server->publish());
  must(publish.put(BlockSpec{"w", DType::kU8, Shape{raw.size()}, {}, payload.codec, payload.bytes.size()}, payload.bytes));
  must(publish.finish());
  const auto one = client();
  EXPECT_EQ(must(fetch(*one, "w", raw.size())), raw);
  const ClientStats stats = one->stats();
  EXPECT_EQ(stats.transport, "verbs");
  EXPECT_EQ(stats.decoded_bytes, raw.size());
  EXPECT_LT(stats.link.wire_bytes, raw.size() / 2);
  // One bit of a frame that the server has stored wrongly, under right CRCs.
  Bytes wrong(payload.bytes.begin(), payload.bytes.end());
  wrong[wrong.size() / 2] ^= std::byte{1};
  publish = must(rig_->server->publish());
  must(publish.put(BlockSpec{"w", DType::kU8, Shape{raw.size()}, {}, payload.codec, wrong.size()}, wrong));
  must(publish.finish());
  const auto refused = fetch(*one, "w", raw.size());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kCorrupt);
  expect_words(refused.error().message(), {"block w", "chunk"});
}

// ---------------------------------------------------------------- failures (CASES UP-09)

TEST_F(VerbsClientTest, AFetchGoesOnOverANewConnectionWhenAReadFails) {
  for (const Delivery delivery : {Delivery::kAtPost, Delivery::kThread}) {
    for (const ibv_wc_status status : {IBV_WC_RETRY_EXC_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR}) {
      SCOPED_TRACE(static_cast<int>(status));
      serve(server_and_client(delivery));
      rig_->publish({{"w", bytes_}});
      const auto one = client();
      const auto snapshot = must(one->snapshot({}));
      fabric_->fail_read(2, {status});
      EXPECT_EQ(must(fetch(*one, "w", bytes_.size())), bytes_);
      fabric_->fail_read(4, {status});  // of a held snapshot, at the header
      Bytes target(bytes_.size());
      must(fetch_of(*snapshot, "w", target));
      EXPECT_EQ(target, bytes_);
      const ClientStats stats = one->stats();
      EXPECT_EQ(stats.transport, "verbs");
      EXPECT_EQ(stats.link.verbs.failures, 2U);
      EXPECT_EQ(stats.link.verbs.failed_status, static_cast<std::uint64_t>(status));
      EXPECT_GE(stats.retries, 2U);
      EXPECT_EQ(stats.restarts_seen, 0U);
      EXPECT_EQ(fabric_->live("fake1").qps, 1) << "one link, the third";
      EXPECT_EQ(server_queue_pairs(1), 1U);
    }
  }
}

TEST_F(VerbsClientTest, AFetchWhoseEveryReadFailsSaysWhyInTime) {
  serve();
  rig_->publish({{"w", bytes_}});
  const auto one = client();
  for (std::uint64_t nth = 1; nth <= 40; ++nth) fabric_->fail_read(nth, {IBV_WC_RETRY_EXC_ERR});
  const auto lost = fetch(*one, "w", bytes_.size());
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnreachable);
  expect_words(lost.error().message(), {rig_->tcp_endpoint().to_string(), "fake1 port 1 GID 1", "status 12", "the server is gone, its port is down, or the path drops packets of this MTU"});
  EXPECT_EQ(server_queue_pairs(0), 0U);
}

TEST_F(VerbsClientTest, AFetchOverAFrozenFabricEndsAtItsDeadlineAndTheNextOneWorks) {
  serve(server_and_client(Delivery::kThread));
  rig_->publish({{"w", bytes_}});
  const auto one = client();
  fabric_->freeze(true);
  const auto late = fetch(*one, "w", bytes_.size(), {.timeout = 50'000});
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Code::kTimeout);
  fabric_->freeze(false);
  EXPECT_EQ(must(fetch(*one, "w", bytes_.size())), bytes_);
}

// ---------------------------------------------------------------- readers (CASES UP-11)

TEST_F(VerbsClientTest, FiveThousandFetchesNeedOneQueuePair) {
  serve();
  rig_->publish({{"w", random_bytes(5000, 1)}});
  const auto one = client();
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(fetch(*one, "w", 5000).ok());
  EXPECT_EQ(fabric_->totals().qps_made, 2U) << "one here and one at the server";
  EXPECT_EQ(must(rig_->server->stats()).verbs.opened, 1U);
}

TEST_F(VerbsClientTest, ReadersThatVanishLeaveNothingAndTheNextOneWorksAtOnce) {
  serve(server_and_client(Delivery::kThread));
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  must(read(*connect(), snapshot, "w"));
  EXPECT_EQ(server_queue_pairs(0), 0U);
  const FakeLive baseline = fabric_->live("fake0");
  const std::uint64_t registered = fabric_->totals().registrations;
  std::vector<std::unique_ptr<Link>> links;
  for (int i = 0; i < 20; ++i) {
    links.push_back(connect());
    must(read(*links.back(), snapshot, "w"));
  }
  EXPECT_EQ(server_queue_pairs(20), 20U);
  EXPECT_EQ(fabric_->totals().registrations, registered + 20) << "a staging buffer for each; the server's regions are there";
  fabric_->kill_owner("fake1");  // in the middle of whatever they did; their connections close
  links.clear();
  EXPECT_EQ(must(read(*connect(), snapshot, "w")), bytes_);
  EXPECT_EQ(server_queue_pairs(0), 0U);
  EXPECT_EQ(fabric_->live("fake0"), baseline);
}

TEST_F(VerbsClientTest, ManyClientsShareTheServersRegions) {
  serve();
  rig_->publish({{"w", bytes_}});
  std::vector<std::shared_ptr<Client>> clients;
  for (int i = 0; i < 30; ++i) {
    clients.push_back(client());
    ASSERT_EQ(must(fetch(*clients.back(), "w", bytes_.size())), bytes_);
  }
  const VerbsServerStats stats = must(rig_->server->stats()).verbs;
  EXPECT_EQ(stats.queue_pairs, 30U);
  EXPECT_EQ(stats.devices, 1U);
  EXPECT_EQ(fabric_->live("fake0").regions, static_cast<int>(stats.regions) + 1) << "and the probe";
  EXPECT_LE(stats.regions, 4U);
  clients.clear();
  EXPECT_EQ(server_queue_pairs(0), 0U);
}

// CASES UP-07.
TEST_F(VerbsClientTest, TheChildOfAForkIsRefusedAndTheParentGoesOn) {
  serve();
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  auto link = connect();
  const pid_t child = fork();
  if (child == 0) {
    Bytes target(bytes_.size());
    BlockRead item = snapshot.read_of("w", {0, target.size()}, target);
    link->read({&item, 1}, in_seconds(30));
    const bool refused = !item.result.ok() && item.result.error().code() == Code::kInvalid && !link->broken();
    link.reset();  // undoes nothing of the parent's
    _exit(refused && fabric_->live("fake1").qps == 1 ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(must(read(*link, snapshot, "w")), bytes_);
}

// ---------------------------------------------------------------- restarts (CASES UP-12)

class VerbsRestartTest : public VerbsClientTest {
 protected:
  void SetUp() override {
    serve(server_and_client(), listening(0));
    port_ = rig_->tcp_endpoint().port;
  }
  ServerOptions listening(std::uint16_t port) {
    ServerOptions options;
    options.listen = {cat("unix:", directory_.path(), "/s", starts_++), cat("tcp://127.0.0.1:", port)};
    return options;
  }
  // Another server on the port of the first.
  void restart() {
    rig_.reset();
    start_server(listening(port_));
    ASSERT_EQ(rig_->tcp_endpoint().port, port_);
  }

 private:
  TemporaryDirectory directory_;
  int starts_ = 0;
  std::uint16_t port_ = 0;
};

TEST_F(VerbsRestartTest, ALinkForTheOldServerIsStaleAndItsOldOneIsLost) {
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  const Incarnation before = rig_->server->incarnation();
  const auto link = connect();
  restart();
  rig_->publish({{"w", random_bytes(bytes_.size(), 2)}});
  const auto stale = VerbsLink::connect(rig_->tcp_endpoint(), kVerbsClient, before, {}, node(), in_seconds(20));
  ASSERT_FALSE(stale.ok());
  EXPECT_EQ(stale.error().code(), Code::kStale);
  expect_words(stale.error().message(), {"the server restarted"});
  const auto lost = read(*link, snapshot, "w");
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnreachable);
}

TEST_F(VerbsRestartTest, AClientGetsTheNewServersBytesByItsOwnKeysAlone) {
  rig_->publish({{"x", bytes_}, {"y", random_bytes(bytes_.size(), 2)}});
  rig_->publish({{"x", random_bytes(bytes_.size(), 3)}});
  const auto one = client();
  const auto held = must(one->snapshot({}));
  ASSERT_TRUE(fetch(*one, "x", bytes_.size()).ok());
  restart();
  // Lower versions, the blocks in each other's place.
  const Bytes x = random_bytes(bytes_.size(), 4), y = random_bytes(bytes_.size(), 5);
  rig_->publish({{"y", y}, {"x", x}});
  EXPECT_EQ(must(fetch(*one, "x", x.size())), x);
  EXPECT_EQ(must(fetch(*one, "y", y.size())), y);
  Bytes target(bytes_.size());
  const Status gone = fetch_of(*held, "x", target);
  ASSERT_FALSE(gone.ok());
  EXPECT_EQ(gone.error().code(), Code::kStale);
  const ClientStats stats = one->stats();
  EXPECT_EQ(stats.restarts_seen, 1U);
  EXPECT_NE(stats.link.verbs.failed_status, static_cast<std::uint64_t>(IBV_WC_REM_ACCESS_ERR)) << "no old key was ever used";
  EXPECT_EQ(stats.link.corrupt, 0U);
}

// ---------------------------------------------------------------- threads

TEST_F(VerbsClientTest, EightThreadsFetchWhileAPublisherRewrites) {
  serve(server_and_client(Delivery::kThread));
  constexpr std::size_t kFirst = 300'000, kSecond = 4000;
  const auto publish = [this](std::uint64_t version) { rig_->publish({{"first", random_bytes(kFirst, version)}, {"second", random_bytes(kSecond, version)}}); };
  publish(1);
  const auto one = client();
  std::atomic<int> running{8};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Bytes first(kFirst), second(kSecond);
      BufferRegistration registration;
      if (t % 2 == 0) registration = must(one->register_buffer(first));
      for (int i = 0; i < 12; ++i) {
        std::vector<FetchRequest> requests(2);
        requests[0].tensor = "first";
        requests[0].target = first;
        requests[1].tensor = "second";
        requests[1].target = second;
        const auto version = one->fetch(requests);
        ASSERT_TRUE(version.ok()) << version.error().to_string();
        ASSERT_EQ(first, random_bytes(kFirst, version->counter));
        ASSERT_EQ(second, random_bytes(kSecond, version->counter));
      }
      --running;
    });
  }
  for (std::uint64_t version = 2; version < 400 && running.load() > 0; ++version) publish(version);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(one->stats().link.corrupt, 0U);
  EXPECT_EQ(one->stats().link.verbs.failures, 0U);
  EXPECT_LE(fabric_->totals().qps_made, 2U * 8U);
}

}  // namespace
}  // namespace paramwire
