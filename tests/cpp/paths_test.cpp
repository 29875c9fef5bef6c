// Which way a client's fetches go, and what it says of the ways that they don't. RDMA devices that this machine may have are not looked at;
// verbs_paths_test.cpp has its own.
#include "paramwire/client/client.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "support/rig.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace paramwire {
namespace {

using testing::must;
using testing::Rig;

constexpr std::size_t kSmall = 4096;
constexpr std::size_t kLarge = 300'000;

class Paths : public ::testing::Test {
 protected:
  void serve(ServerOptions options = {}) {
    options.verbs = "off";
    rig_ = std::make_unique<Rig>(std::move(options));
    rig_->publish({{"small", small_}, {"other", small_}, {"large", large_}});
  }
  // A server that clients on its host can't share memory with.
  void serve_tcp_alone(bool udp) {
    ServerOptions options;
    options.listen = {"tcp://127.0.0.1:0"};
    options.udp = udp;
    serve(options);
  }
  Result<std::shared_ptr<Client>> try_connect(std::string transport, std::string small_transport, bool strict = false) {
    ClientOptions options;
    options.transport = std::move(transport);
    options.small_transport = std::move(small_transport);
    options.strict = strict;
    options.verbs_library = [] { return Result<std::shared_ptr<VerbsApi>>(Error(Code::kUnavailable, "no RDMA here")); };
    return Client::connect(rig_->server->endpoints().front().to_string(), options);
  }
  std::shared_ptr<Client> connect(std::string transport, std::string small_transport = "") { return must(try_connect(std::move(transport), std::move(small_transport))); }

  void fetch(Client& client, const std::vector<std::string>& tensors) {
    std::vector<Bytes> targets;
    std::vector<FetchRequest> requests;
    for (const std::string& tensor : tensors) targets.emplace_back(tensor == "large" ? kLarge : kSmall);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      requests.emplace_back();
      requests.back().tensor = tensors[i];
      requests.back().target = targets[i];
    }
    must(client.fetch(requests));
    for (std::size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(targets[i] == (tensors[i] == "large" ? large_ : small_)) << tensors[i];
  }
  static std::uint64_t reads(const Client& client, std::string_view transport) {
    for (const auto& [name, link] : client.stats().by_transport) {
      if (name == transport) return link.reads;
    }
    return 0;
  }

  const Bytes small_ = testing::random_bytes(kSmall, 1), large_ = testing::random_bytes(kLarge, 2);
  std::unique_ptr<Rig> rig_;
};

TEST_F(Paths, SmallFetchesGoByUdpBesideLargeOnesByAnother) {
  serve();
  for (const std::string bulk : {"tcp", "shm"}) {
    const auto client = connect(bulk, "udp");
    EXPECT_EQ(client->stats().transport, bulk);
    EXPECT_EQ(client->stats().small_transport, "udp");
    fetch(*client, {"small"});
    EXPECT_EQ(reads(*client, "udp"), 1U);
    EXPECT_EQ(reads(*client, bulk), 0U);
    fetch(*client, {"large"});
    EXPECT_EQ(reads(*client, bulk), 1U);
    EXPECT_EQ(reads(*client, "udp"), 1U);
    EXPECT_EQ(client->stats().link.reads, 2U);
  }
}

TEST_F(Paths, AFetchGoesOneWayWholeByItsBytesTogether) {
  serve();
  const auto client = connect("tcp", "udp");
  fetch(*client, {"small", "large", "other"});
  EXPECT_EQ(reads(*client, "tcp"), 3U);
  EXPECT_EQ(reads(*client, "udp"), 0U);
  fetch(*client, {"small", "other"});
  EXPECT_EQ(reads(*client, "udp"), 2U);
}

TEST_F(Paths, APinnedTransportIsForAllFetches) {
  serve();
  for (const std::string transport : {"shm", "udp", "tcp"}) {
    const auto client = connect(transport);
    fetch(*client, {"small"});
    fetch(*client, {"large"});
    EXPECT_EQ(reads(*client, transport), 2U) << transport;
    EXPECT_EQ(client->stats().by_transport.size(), 1U) << transport;
  }
}

TEST_F(Paths, AutoSharesMemoryOnTheServersHost) {
  serve();
  const auto client = connect("auto");
  EXPECT_EQ(client->stats().transport, "shm");
  EXPECT_EQ(client->stats().small_transport, "shm");
  EXPECT_TRUE(client->stats().rejected.empty());
  fetch(*client, {"small"});
}

TEST_F(Paths, AutoTakesUdpWhereMemoryCanNotBeSharedAndSaysWhy) {
  serve_tcp_alone(true);
  const auto client = connect("auto");
  fetch(*client, {"small"});
  fetch(*client, {"large"});
  const ClientStats stats = client->stats();
  // For large fetches udp needs a receive buffer that this host may not give: small ones go by udp all the same.
  EXPECT_EQ(stats.transport, stats.link.datagram.receive_buffer_bytes >= (std::uint64_t{8} << 20) ? "udp" : "tcp");
  EXPECT_EQ(stats.small_transport, "udp");
  ASSERT_FALSE(stats.rejected.empty());
  EXPECT_EQ(stats.rejected[0].transport, "shm");
  EXPECT_NE(stats.rejected[0].reason.find("no unix socket"), std::string::npos) << stats.rejected[0].reason;
  EXPECT_TRUE(stats.rejected[0].failed);
}

TEST_F(Paths, AServerWithoutUdpLeavesTcpWhichIsNoFallback) {
  serve_tcp_alone(false);
  const auto client = connect("auto");
  fetch(*client, {"small"});
  const ClientStats stats = client->stats();
  EXPECT_EQ(stats.transport, "tcp");
  EXPECT_EQ(stats.small_transport, "tcp");
  ASSERT_EQ(stats.rejected.size(), 3U);
  EXPECT_EQ(stats.rejected[1].transport, "verbs");
  EXPECT_EQ(stats.rejected[1].reason, "no RDMA here");
  EXPECT_EQ(stats.rejected[2].transport, "udp");
  for (const std::size_t i : {1U, 2U}) EXPECT_FALSE(stats.rejected[i].failed) << stats.rejected[i].reason;
}

TEST_F(Paths, StrictRefusesAFallbackAndNamesIt) {
  serve_tcp_alone(true);
  const auto client = try_connect("auto", "", true);
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.error().code(), Code::kUnavailable);
  for (const char* word : {"strict: shm", "no unix socket", "transport=\""}) EXPECT_NE(client.error().message().find(word), std::string::npos) << client.error().message();
  must(try_connect("tcp", "", true));  // pinned: meant
}

TEST_F(Paths, StrictTakesWhatIsBest) {
  serve();
  EXPECT_EQ(must(try_connect("auto", "", true))->stats().transport, "shm");
}

TEST_F(Paths, APinnedSmallTransportThatIsNotThereIsRefusedWithItsReason) {
  serve_tcp_alone(false);
  const auto client = try_connect("tcp", "udp");
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.error().code(), Code::kUnavailable);
  for (const char* word : {"small_transport \"udp\"", "takes no datagrams"}) EXPECT_NE(client.error().message().find(word), std::string::npos) << client.error().message();
}

TEST_F(Paths, UnknownNamesAreRefusedWithTheKnownOnes) {
  serve();
  EXPECT_EQ(try_connect("rdma", "").error().code(), Code::kInvalid);
  const auto client = try_connect("tcp", "auto");
  EXPECT_EQ(client.error().code(), Code::kInvalid);
  EXPECT_NE(client.error().message().find("same, shm, verbs, udp, tcp"), std::string::npos);
}

}  // namespace
}  // namespace paramwire
