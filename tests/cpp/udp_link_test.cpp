// The UDP link and the server's UDP thread over real sockets: what only they can show.
#include "support/rig.hpp"

#include "paramwire/net/udp_link.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

namespace paramwire {
namespace {

using namespace testing;

constexpr ClientId kClient{3, 4};

std::shared_ptr<InboundCredit> credit(std::uint64_t bytes = 2 * kLinkReceiveBuffer) { return std::make_shared<InboundCredit>(bytes); }

std::unique_ptr<Link> connect(const Rig& rig, const UdpOptions& options = {}, std::shared_ptr<InboundCredit> share = credit()) {
  return must(UdpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), options, std::move(share), in_seconds(10)));
}

Bytes read(Link& link, const Snapshot& snapshot, std::string_view tensor, std::size_t size) {
  Bytes target(size);
  BlockRead item = snapshot.read_of(tensor, {0, size}, target);
  link.read({&item, 1}, in_seconds(30));
  EXPECT_TRUE(item.result.ok()) << item.result.error().to_string();
  return target;
}

// CASES UP-38.
TEST(UdpLink, ASegmentedSendThatIsRefusedGoesInPiecesAndIsNotTriedAgainOnThatPath) {
  Rig rig;
  std::vector<std::pair<std::string, Bytes>> model;
  for (std::size_t i = 0; i < 200; ++i) model.emplace_back(cat("t", i), random_bytes(100, i));
  rig.publish(model);
  const Snapshot snapshot = rig.snapshot();
  for (const int error : {EIO, EINVAL, ENOBUFS}) {
    UdpOptions options;
    options.fail_gso = error;
    const auto link = connect(rig, options);
    const auto other = connect(rig);
    for (Link* each : {link.get(), other.get()}) {
      std::vector<Bytes> targets(model.size(), Bytes(100));
      std::vector<BlockRead> batch;
      for (std::size_t i = 0; i < model.size(); ++i) batch.push_back(snapshot.read_of(model[i].first, {0, 100}, targets[i]));
      each->read(batch, in_seconds(30));
      for (std::size_t i = 0; i < model.size(); ++i) ASSERT_EQ(targets[i], model[i].second) << error;
    }
    EXPECT_EQ(link->stats().datagram.gso_disabled, error == ENOBUFS ? 0U : 1U) << error;  // back-pressure is no reason
    EXPECT_EQ(other->stats().datagram.gso_disabled, 0U);
  }
}

// CASES UP-38, the other way.
TEST(UdpLink, AServersSegmentedSendThatIsRefusedGoesInPiecesAndIsNotTriedAgainForThatClient) {
  for (const int error : {EIO, EINVAL, EOPNOTSUPP, ENOBUFS}) {
    SCOPED_TRACE(error);
    ServerOptions options;
    options.udp_fail_gso = error;
    Rig rig(options);
    const Bytes bytes = random_bytes(3'000'000, 1);
    rig.publish({{"w", bytes}});
    const Snapshot snapshot = rig.snapshot();
    UdpOptions narrow;
    narrow.segment_size = 1408;  // on loopback a datagram is as long as a segmented send otherwise
    const auto link = connect(rig, narrow);
    const auto other = connect(rig, narrow);
    EXPECT_EQ(read(*link, snapshot, "w", bytes.size()), bytes);
    EXPECT_EQ(read(*other, snapshot, "w", bytes.size()), bytes);
    const UdpServerStats sent = must(rig.server->stats()).udp;
    EXPECT_EQ(sent.gso_disabled, error == ENOBUFS ? 0U : 1U);  // of two failures and two clients; back-pressure is no reason
    EXPECT_EQ(sent.failed, 0U);
    for (const Link* each : {link.get(), other.get()}) {
      const DatagramStats d = each->stats().datagram;
      EXPECT_EQ(d.bytes_needed, bytes.size());  // nothing counts twice
      EXPECT_EQ(d.refused, 0U);
    }
  }
}

TEST(UdpLink, AFrozenPathIsATimeoutThatSaysWhatWasSeen) {
  Rig rig;
  rig.publish({{"w", random_bytes(1000, 1)}});
  const Snapshot snapshot = rig.snapshot();
  UdpOptions options;
  bool cut = false;
  options.lose = [&](std::span<const std::byte>) { return cut; };
  const auto link = connect(rig, options);
  cut = true;
  Bytes target(1000);
  BlockRead item = snapshot.read_of("w", {0, 1000}, target);
  link->read({&item, 1}, steady_clock().now() + 50'000);
  ASSERT_FALSE(item.result.ok());
  EXPECT_EQ(item.result.error().code(), Code::kTimeout);
  EXPECT_NE(item.result.error().message().find(rig.tcp_endpoint().to_string()), std::string::npos);
  EXPECT_EQ(target, Bytes(1000));
}

TEST(UdpLink, APathThatIsBlockedFromTheStartIsATimeoutThatNamesTheFirewall) {
  Rig rig;
  UdpOptions options;
  options.lose = [](std::span<const std::byte>) { return true; };
  const auto link = UdpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), options, credit(), steady_clock().now() + 100'000);
  ASSERT_FALSE(link.ok());
  EXPECT_EQ(link.error().code(), Code::kTimeout);
  EXPECT_NE(link.error().message().find("firewall"), std::string::npos);
}

TEST(UdpLink, AServerWithoutUdpSaysSo) {
  ServerOptions options;
  options.udp = false;
  Rig rig(options);  // as by default: a unix socket and a tcp address
  const auto link = UdpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), {}, credit(), in_seconds(10));
  ASSERT_FALSE(link.ok());
  EXPECT_EQ(link.error().code(), Code::kUnavailable);
}

TEST(UdpLink, ReadsOverIpv6) {
  TemporaryDirectory directory;
  ServerOptions options;
  options.listen = {"tcp://[::1]:0"};
  if (const auto probe = Server::open(options); !probe.ok()) GTEST_SKIP() << probe.error().to_string();  // no IPv6 on this host's loopback
  options.listen = {"unix:" + directory.path() + "/s", "tcp://[::1]:0"};
  Rig rig(options);
  const Bytes bytes = random_bytes(300'000, 1);
  rig.publish({{"w", bytes}});
  const Snapshot snapshot = rig.snapshot();
  const auto link = connect(rig);
  EXPECT_EQ(read(*link, snapshot, "w", bytes.size()), bytes);
}

// CASES UP-41, small: one client, eight servers, one credit.
TEST(UdpLink, EightServersAtOnceOverflowNothing) {
  std::vector<std::unique_ptr<Rig>> rigs;
  std::vector<Snapshot> snapshots;
  const Bytes bytes = random_bytes(2 << 20, 1);
  for (int i = 0; i < 8; ++i) {
    rigs.push_back(std::make_unique<Rig>());
    rigs.back()->publish({{"w", bytes}});
    snapshots.push_back(rigs.back()->snapshot());
  }
  const auto shared = credit(std::uint64_t{1} << 20);
  std::vector<std::unique_ptr<Link>> links;
  for (const auto& rig : rigs) links.push_back(connect(*rig, {}, shared));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < links.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 3; ++round) EXPECT_EQ(read(*links[i], snapshots[i], "w", bytes.size()), bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& link : links) EXPECT_EQ(link->stats().datagram.socket_drops, 0U);
  EXPECT_EQ(shared->used(), 0U);
}

TEST(UdpLink, SessionsEndWithTheirLinks) {
  Rig rig;
  rig.publish({{"w", random_bytes(10, 1)}});
  const Snapshot snapshot = rig.snapshot();
  {
    const auto link = connect(rig);
    read(*link, snapshot, "w", 10);
    EXPECT_EQ(must(rig.server->stats()).udp.sessions, 1U);
  }
  for (int i = 0; i < 1000 && must(rig.server->stats()).udp.sessions > 0; ++i) rig.snapshot();  // a round trip through the server's loop each
  EXPECT_EQ(must(rig.server->stats()).udp.sessions, 0U);
}

}  // namespace
}  // namespace paramwire
