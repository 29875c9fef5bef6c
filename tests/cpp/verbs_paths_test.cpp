// When a client reads by RDMA, and what it says when it does not. Over the fake fabric.
#include "support/verbs_rig.hpp"

#include "paramwire/base/text.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace paramwire {
namespace {

using namespace testing;

class VerbsPathsTest : public VerbsRig {
 protected:
  void SetUp() override { fabric_ = std::make_shared<FakeVerbs>(server_and_client()); }

  // `listen`: "tcp" alone, so that nobody shares memory with it, or "unix" beside it.
  void serve_at(std::string_view listen, ServerOptions options = {}) {
    if (listen == "tcp") options.listen = {"tcp://127.0.0.1:0"};
    if (options.verbs == "auto") options.verbs = "fake0";
    options.verbs_library = library();
    rig_ = std::make_unique<Rig>(std::move(options));
    rig_->publish({{"w", bytes_}, {"small", small_}});
  }
  Result<std::shared_ptr<Client>> try_client(std::string transport, ClientOptions options = {}) const {
    options.transport = std::move(transport);
    if (options.verbs_device.empty()) options.verbs_device = "fake1";
    options.verbs_library = library();
    return Client::connect(rig_->server->endpoints().back().to_string(), options);
  }
  void expect_fetches(Client& client) const {
    for (const auto& [name, bytes] : {std::pair("w", &bytes_), std::pair("small", &small_)}) {
      Bytes target(bytes->size());
      FetchRequest request;
      request.tensor = name;
      request.target = target;
      const auto version = client.fetch({&request, 1});
      ASSERT_TRUE(version.ok()) << version.error().to_string();
      EXPECT_EQ(target, *bytes);
    }
  }
  // What was said of RDMA; empty: nothing.
  static RejectedTransport rejected(const Client& client) {
    for (const RejectedTransport& one : client.stats().rejected) {
      if (one.transport == "verbs") return one;
    }
    return {};
  }
  static std::uint64_t reads(const Client& client, std::string_view transport) {
    for (const auto& [name, link] : client.stats().by_transport) {
      if (name == transport) return link.reads;
    }
    return 0;
  }

  const Bytes bytes_ = random_bytes(300'000, 1), small_ = random_bytes(100, 2);
};

TEST_F(VerbsPathsTest, AutoTakesSharedMemoryBeforeRdma) {
  serve_at("unix");
  const auto client = must(try_client("auto"));
  EXPECT_EQ(client->stats().transport, "shm");
  EXPECT_TRUE(client->stats().rejected.empty());
  EXPECT_EQ(fabric_->totals().qps_made, 0U) << "nothing was tried";
  expect_fetches(*client);
}

TEST_F(VerbsPathsTest, AutoTakesRdmaBeforeUdpForLargeAndSmallFetches) {
  serve_at("tcp");
  const auto client = must(try_client("auto"));
  expect_fetches(*client);
  const ClientStats stats = client->stats();
  EXPECT_EQ(stats.transport, "verbs");
  EXPECT_EQ(stats.small_transport, "verbs");
  EXPECT_EQ(reads(*client, "verbs"), 2U);
  ASSERT_EQ(stats.rejected.size(), 1U);
  EXPECT_EQ(stats.rejected[0].transport, "shm");
  expect_words(stats.link.path, {"fake1 port 1 GID 1", "MTU 4096"});
}

TEST_F(VerbsPathsTest, RdmaCanBePinnedForOneKindOfFetchAlone) {
  serve_at("unix");
  ClientOptions options;
  options.small_transport = "verbs";
  const auto small = must(try_client("tcp", options));
  expect_fetches(*small);
  EXPECT_EQ(reads(*small, "verbs"), 1U);
  EXPECT_EQ(reads(*small, "tcp"), 1U);
  options.small_transport = "udp";
  const auto large = must(try_client("verbs", options));
  expect_fetches(*large);
  EXPECT_EQ(reads(*large, "verbs"), 1U);
  EXPECT_EQ(reads(*large, "udp"), 1U);
}

TEST_F(VerbsPathsTest, AServerWithoutRdmaIsNoFailureAndSaysWhatItIs) {
  ServerOptions options;
  options.verbs = "off";
  serve_at("tcp", options);
  const auto client = must(try_client("auto"));
  expect_fetches(*client);
  EXPECT_NE(client->stats().transport, "verbs");
  EXPECT_FALSE(rejected(*client).failed);
  expect_words(rejected(*client).reason, {"this server can't be read by RDMA", "it was started without"});
}

TEST_F(VerbsPathsTest, AHostWithoutADeviceIsNoFailureAndSaysWhatItHas) {
  serve_at("tcp");
  fabric_->change("fake1", [](FakeDevice& device) { device.ports[0].state = IBV_PORT_DOWN; });
  const auto client = must(try_client("auto"));
  expect_fetches(*client);
  EXPECT_FALSE(rejected(*client).failed);
  expect_words(rejected(*client).reason, {"fake1", "the port is DOWN"});
}

// CASES UP-16.
TEST_F(VerbsPathsTest, PinnedWithoutADeviceEveryCandidateIsListedWithItsReason) {
  serve_at("unix");
  fabric_->change("fake1", [](FakeDevice& device) { device.ports[0].state = IBV_PORT_DOWN; });
  const auto client = try_client("verbs");
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.error().code(), Code::kUnavailable);
  expect_words(client.error().message(), {"transport \"verbs\" to", rig_->server->endpoints().back().to_string(), "fake1 port 1 GID 0", "fake1 port 1 GID 1", "the port is DOWN", "fake0 port 1 GID 1",
                                          "transport=\"tcp\" or \"auto\""});
  ServerOptions off;
  off.verbs = "off";
  rig_.reset();
  fabric_->change("fake1", [](FakeDevice& device) { device.ports[0].state = IBV_PORT_ACTIVE; });
  serve_at("unix", off);
  const auto refused = try_client("verbs");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kUnavailable);
  expect_words(refused.error().message(), {"verbs: ", "this server can't be read by RDMA"});
}

TEST_F(VerbsPathsTest, LockedMemoryThatIsTooLittleIsAFailureAndNotPassedOver) {
  serve_at("tcp");
  fabric_->change("fake1", [](FakeDevice& device) { device.locked_bytes_max = 1 << 20; });
  const auto client = must(try_client("auto"));
  expect_fetches(*client);
  EXPECT_NE(client->stats().transport, "verbs");
  EXPECT_TRUE(rejected(*client).failed);
  expect_words(rejected(*client).reason, {"4194304 bytes", "the limit on locked memory", "ulimit -l"});
  ClientOptions strict;
  strict.strict = true;
  const auto refused = try_client("auto", strict);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kUnavailable);
  expect_words(refused.error().message(), {"strict: ", "verbs to ", "should work and does not", "ulimit -l"});
  const auto pinned = try_client("verbs");
  ASSERT_FALSE(pinned.ok());
  EXPECT_EQ(pinned.error().code(), Code::kBackpressure);
  expect_words(pinned.error().message(), {"ulimit -l"});
}

TEST_F(VerbsPathsTest, MemoryThatTheServerCanNotRegisterIsAFailureAndOthersGoOn) {
  for (const int error : {ENOMEM, EFAULT}) {
    serve_at("tcp");
    fabric_->fail(FakeCall::kRegMr, error, 2, 1, "fake0");  // after the probe
    const auto client = must(try_client("auto"));
    expect_fetches(*client);
    EXPECT_NE(client->stats().transport, "verbs");
    EXPECT_TRUE(rejected(*client).failed) << rejected(*client).reason;
    expect_words(rejected(*client).reason, {rig_->server->endpoints().back().to_string(), "fake0", "ibv_reg_mr"});
  }
}

TEST_F(VerbsPathsTest, APathThatFailsItsProbeIsAFailure) {
  serve_at("tcp");
  fabric_->fail_read(1, {IBV_WC_RETRY_EXC_ERR});
  const auto client = must(try_client("auto"));
  expect_fetches(*client);
  EXPECT_NE(client->stats().transport, "verbs");
  EXPECT_TRUE(rejected(*client).failed);
  expect_words(rejected(*client).reason, {"no RDMA way to", "status 12"});
  fabric_->fail_read(1, {IBV_WC_RETRY_EXC_ERR});
  EXPECT_EQ(try_client("verbs").error().code(), Code::kUnreachable) << "pinned, the caller gets it as it is";
}

// Named by the user, so somebody counts on it.
TEST_F(VerbsPathsTest, ADeviceThatWasNamedAndIsNotThereIsAFailure) {
  serve_at("tcp");
  ClientOptions options;
  options.verbs_device = "mlx5_0";
  const auto client = must(try_client("auto", options));
  expect_fetches(*client);
  EXPECT_TRUE(rejected(*client).failed);
  expect_words(rejected(*client).reason, {"no RDMA device mlx5_0", "fake1 port 1 GID 1"});
  const auto pinned = try_client("verbs", options);
  ASSERT_FALSE(pinned.ok());
  EXPECT_EQ(pinned.error().code(), Code::kInvalid);
}

TEST_F(VerbsPathsTest, AServerWhoseDeviceWasNamedAndIsNotThereDoesNotStart) {
  ServerOptions options;
  options.udp = false;
  options.listen = {"tcp://127.0.0.1:0"};
  options.verbs_library = library();
  for (const auto& [device, code] : {std::pair("mlx5_0", Code::kInvalid), std::pair("fake0", Code::kUnavailable)}) {
    fabric_->change("fake0", [](FakeDevice& each) { each.ports[0].state = IBV_PORT_DOWN; });
    options.verbs = device;
    const auto server = Server::open(options);
    ASSERT_FALSE(server.ok());
    EXPECT_EQ(server.error().code(), code);
  }
  options.verbs = "auto";
  fabric_->change("fake1", [](FakeDevice& each) { each.ports[0].state = IBV_PORT_DOWN; });
  const auto server = must(Server::open(options));
  expect_words(must(server->stats()).no_verbs, {"the port is DOWN"});
}

TEST_F(VerbsPathsTest, ALostServerIsNoReasonToGoOnByAnotherTransport) {
  serve_at("tcp");
  ClientOptions options;
  options.timeout = 5 * kMicrosPerSecond;
  const auto client = must(try_client("auto", options));
  expect_fetches(*client);
  for (std::uint64_t nth = 1; nth <= 40; ++nth) fabric_->fail_read(nth, {IBV_WC_RETRY_EXC_ERR});
  Bytes target(bytes_.size());
  FetchRequest request;
  request.tensor = "w";
  request.target = target;
  EXPECT_EQ(client->fetch({&request, 1}).error().code(), Code::kUnreachable);
  EXPECT_EQ(client->stats().transport, "verbs");
  EXPECT_EQ(reads(*client, "tcp"), 0U);
}

}  // namespace
}  // namespace paramwire
