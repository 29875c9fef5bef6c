// How a verbs link comes to be: which way is taken, what both ends agree on, how much goes at once. Over the fake fabric.
#include "support/verbs_rig.hpp"

#include "paramwire/base/text.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <set>

namespace paramwire {
namespace {

using namespace testing;

class VerbsLinkTest : public VerbsRig {
 protected:
  // RTR of a device, newest last: what the queue pairs were set to.
  std::vector<FakeModify> to_rtr(const std::string& device) const {
    std::vector<FakeModify> out;
    for (const FakeModify& modify : fabric_->modifies()) {
      if (modify.device == device && (modify.mask & IBV_QP_PATH_MTU) != 0) out.push_back(modify);
    }
    return out;
  }
  static FakeGid gid(std::uint32_t index, GidType type) { return {index, ipv4_gid("127.0.0.1"), type, 1}; }
  const Bytes bytes_ = random_bytes(3'000'000, 1);
};

TEST_F(VerbsLinkTest, BlocksAndRangesComeAndTheStatsSayHow) {
  serve();
  rig_->publish({{"w", bytes_}, {"small", random_bytes(64, 2)}, {"empty", {}}});
  const Snapshot snapshot = rig_->snapshot();
  const auto link = connect();
  EXPECT_EQ(link->transport(), "verbs");
  EXPECT_TRUE(link->one_sided());
  EXPECT_EQ(must(read(*link, snapshot, "w")), bytes_);
  EXPECT_EQ(must(read(*link, snapshot, "small")), random_bytes(64, 2));
  EXPECT_EQ(must(read(*link, snapshot, "empty")), Bytes{});
  const LinkStats stats = link->stats();
  EXPECT_EQ(stats.reads, 3U);
  EXPECT_EQ(stats.blocks_verified, 3U);
  EXPECT_EQ(stats.wire_bytes, 3'000'064U);
  EXPECT_EQ(stats.verbs.headers, 3U);
  EXPECT_EQ(stats.verbs.reads, 1U + 3U + 1U + 3U) << "the probe, three slices, a small one, and their headers";
  EXPECT_EQ(stats.verbs.direct_bytes, 0U);
  EXPECT_EQ(stats.verbs.mtu_bytes, 4096U);
  EXPECT_EQ(stats.verbs.slice_bytes, 1U << 20);
  EXPECT_EQ(stats.verbs.reads_on_wire, 16U);
  EXPECT_EQ(stats.verbs.gid_index, 1U);
  EXPECT_EQ(stats.verbs.staging_bytes, 4U << 20);
  EXPECT_EQ(stats.verbs.failures, 0U);
  EXPECT_GE(stats.verbs.regions, 1U);
  EXPECT_EQ(stats.verbs.control_calls, 2U) << "queue pairs and regions";
  expect_words(stats.path, {"fake1 port 1 GID 1", "RoCE v2", "127.0.0.1", "MTU 4096"});
  EXPECT_EQ(fabric_->totals().work_requests, stats.verbs.reads);
  EXPECT_EQ(fabric_->totals().doorbells, stats.verbs.doorbells);
}

TEST_F(VerbsLinkTest, AViewIsRefusedWithWhatToDoInstead) {
  serve();
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  const auto link = connect();
  const auto view = link->view(snapshot.entry("w"), snapshot.locator("w"), {0, 10});
  EXPECT_EQ(view.error().code(), Code::kUnavailable);
  expect_words(view.error().message(), {"verbs has no views", "use shm"});
}

// The server's process does nothing for a read.
TEST_F(VerbsLinkTest, TheServerHandlesNoMessageForReads) {
  serve();
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  const auto link = connect();
  const auto requests = [this] {
    const NamedHistograms all = must(rig_->server->durations());
    return std::find_if(all.begin(), all.end(), [](const auto& each) { return each.first == "request"; })->second.count;
  };
  rig_->snapshot();  // whatever it was asked before is counted now
  const std::uint64_t before = requests();
  EXPECT_GT(before, 0U);
  for (int i = 0; i < 50; ++i) ASSERT_EQ(must(read(*link, snapshot, "w")), bytes_);
  EXPECT_EQ(requests(), before);
}

// ---------------------------------------------------------------- MTU (CASES UP-04)

TEST_F(VerbsLinkTest, BothEndsAreSetToTheSmallerMtu) {
  for (const auto& [server, client] : {std::pair(4096U, 1024U), std::pair(1024U, 4096U), std::pair(256U, 2048U)}) {
    SCOPED_TRACE(cat("server ", server, " client ", client));
    FakeFabric fabric = server_and_client();
    fabric.devices[0].ports[0].mtu_active = server;
    fabric.devices[1].ports[0].mtu_active = client;
    serve(fabric);
    rig_->publish({{"w", bytes_}});
    const Snapshot snapshot = rig_->snapshot();
    const auto link = connect();
    const ibv_mtu wanted = std::min(server, client) == 1024 ? IBV_MTU_1024 : IBV_MTU_256;
    for (const char* device : {"fake0", "fake1"}) {
      ASSERT_EQ(to_rtr(device).size(), 1U);
      EXPECT_EQ(to_rtr(device)[0].attributes.path_mtu, wanted) << device;
    }
    EXPECT_EQ(link->stats().verbs.mtu_bytes, std::min(server, client));
    expect_words(link->stats().path, {cat("MTU ", std::min(server, client))});
    EXPECT_EQ(must(read(*link, snapshot, "w")), bytes_);
  }
}

TEST_F(VerbsLinkTest, APathThatCarriesOnlySmallPacketsFailsTheProbeWithTheReason) {
  refusals_expected_ = true;  // of the MTU by the client's own port, when it tries the server's next way
  serve();
  // Tables and queue pairs say 4096, the client's port has less by now: only what is longer than a packet notices.
  fabric_->before_read([this](const FakeRead& read) {
    if (read.number == 1) fabric_->change("fake1", [](FakeDevice& device) { device.ports[0].mtu_active = 1024; });
  });
  const auto link = try_connect();
  ASSERT_FALSE(link.ok());
  EXPECT_EQ(link.error().code(), Code::kUnreachable);
  expect_words(link.error().message(), {"no RDMA way to", rig_->tcp_endpoint().to_string(), "fake1 port 1 GID 1", "transport retry counter exceeded (status 12)", "drops packets of this MTU"});
  // By the tables as they are now it works.
  rig_->publish({{"w", bytes_}});
  const auto again = connect();
  EXPECT_EQ(again->stats().verbs.mtu_bytes, 1024U);
  EXPECT_EQ(must(read(*again, rig_->snapshot(), "w")), bytes_);
}

TEST_F(VerbsLinkTest, AnMtuThatChangedAtTheServerIsNoticedByTheProbeAndTakenAtOnce) {
  serve();
  rig_->publish({{"w", bytes_}});
  fabric_->before_read([this](const FakeRead& read) {
    if (read.number == 1) fabric_->change("fake0", [](FakeDevice& device) { device.ports[0].mtu_active = 1024; });
  });
  const auto link = connect();
  EXPECT_EQ(link->stats().verbs.mtu_bytes, 1024U);
  EXPECT_EQ(link->stats().verbs.control_calls, 3U);
  EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
}

TEST_F(VerbsLinkTest, TheProbeIsLargerThanAnyPacketAndTheNextWayIsTriedWhenItFails) {
  FakeFabric fabric = server_and_client();
  for (FakeDevice& device : fabric.devices) device.ports[0].gids.push_back(gid(2, GidType::kRoceV1));
  serve(fabric);
  std::uint64_t probe = 0;
  fabric_->before_read([&](const FakeRead& read) { probe = std::max(probe, read.size); });
  fabric_->fail_read(1, {IBV_WC_RETRY_EXC_ERR});  // of the best way, at both sides
  fabric_->fail_read(2, {IBV_WC_RETRY_EXC_ERR});
  const auto link = connect();
  EXPECT_GT(probe, 2 * 4096U);
  EXPECT_EQ(link->stats().verbs.gid_index, 2U);
  EXPECT_EQ(link->stats().verbs.control_calls, 4U) << "three queue pairs, and regions";
  expect_words(link->stats().path, {"RoCE v1"});
  EXPECT_EQ(fabric_->live("fake0").qps, 1) << "those of the failed tries are gone";
  EXPECT_EQ(fabric_->live("fake1").qps, 1);
}

TEST_F(VerbsLinkTest, AProbeThatBringsOtherBytesIsAnotherMachinesAddress) {
  serve();
  FakeReadFault flipped;
  flipped.flip_at = 9000;
  fabric_->fail_read(1, flipped);
  const auto link = try_connect();
  ASSERT_FALSE(link.ok());
  EXPECT_EQ(link.error().code(), Code::kUnreachable);
  expect_words(link.error().message(), {"other bytes than the server's probe", "127.0.0.1"});
}

// ---------------------------------------------------------------- devices and GIDs (CASES UP-03)

TEST_F(VerbsLinkTest, AGidThatTheServerCanNotBeReachedFromIsFollowedByTheNext) {
  FakeFabric fabric = server_and_client();
  fabric.devices[0].ports[0].gids = {gid(5, GidType::kRoceV1)};                                   // an old server
  fabric.devices[1].ports[0].gids = {gid(0, GidType::kRoceV2), gid(3, GidType::kRoceV1)};
  serve(fabric);
  rig_->publish({{"w", bytes_}});
  const auto link = connect();
  EXPECT_EQ(link->stats().verbs.gid_index, 3U);
  EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
}

TEST_F(VerbsLinkTest, TheServersSecondWayIsTakenWhenItsFirstFailsTheProbeOrCanNotBeMade) {
  FakeFabric fabric = server_and_client();
  fabric.devices.push_back(FakeDevice::roce("fake2", "127.0.0.1"));
  fabric.devices[1].name = "fake2";
  fabric.devices[2].name = "fake1";  // the client's comes last: the server, which takes any, would choose it first
  enum class Why { kProbe, kOpen, kQueuePair, kRoute };
  for (const Why why : {Why::kProbe, Why::kOpen, Why::kQueuePair, Why::kRoute}) {
    SCOPED_TRACE(static_cast<int>(why));
    ServerOptions options;
    options.verbs = "";  // any device
    serve(fabric, options);
    rig_->publish({{"w", bytes_}});
    const auto with = node();
    ASSERT_TRUE(with->choices({}).ok());
    // What fails with tables that were read before is tried once more with fresh ones.
    if (why == Why::kProbe) fabric_->fail_read(1, {IBV_WC_RETRY_EXC_ERR});
    if (why == Why::kOpen) fabric_->change("fake0", [](FakeDevice& device) { device.pds_max = 0; });
    if (why == Why::kQueuePair) fabric_->fail(FakeCall::kCreateQp, EIO, 1, 2, "fake0");
    if (why == Why::kRoute) fabric_->fail(FakeCall::kModifyToRtr, EINVAL, 1, 2, "fake0");
    auto link = try_connect({}, with);
    if (why == Why::kOpen) {  // a limit, which every way would meet as far as anybody knows
      ASSERT_FALSE(link.ok());
      EXPECT_EQ(link.error().code(), Code::kBackpressure);
      continue;
    }
    ASSERT_TRUE(link.ok()) << link.error().to_string();
    EXPECT_EQ((*link)->stats().verbs.control_calls, 3U);
    EXPECT_EQ(must(read(**link, rig_->snapshot(), "w")), bytes_);
    EXPECT_EQ(fabric_->live("fake2").qps, 1);
    EXPECT_EQ(fabric_->live("fake0").qps, 0);
  }
}

TEST_F(VerbsLinkTest, ATableInAnotherOrderIsReadAnewByTheNextLink) {
  refusals_expected_ = true;  // the server's first try is by a table that it read a moment ago
  serve();
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  const auto with = node();
  const auto before = connect({}, with);
  EXPECT_EQ(before->stats().verbs.gid_index, 1U);
  for (const char* device : {"fake0", "fake1"}) {
    fabric_->change(device, [](FakeDevice& each) {
      each.ports[0].gids[1].index = 7;
      std::swap(each.ports[0].gids[0], each.ports[0].gids[1]);
    });
  }
  const auto after = connect({}, with);
  EXPECT_EQ(after->stats().verbs.gid_index, 7U);
  EXPECT_EQ(must(read(*after, snapshot, "w")), bytes_);
  EXPECT_EQ(must(read(*before, snapshot, "w")), bytes_) << "the address is what it was";
  EXPECT_EQ(to_rtr("fake0").back().attributes.ah_attr.grh.sgid_index, 7);
}

// Not refused by anybody: the old index names another address now, which leads nowhere.
TEST_F(VerbsLinkTest, AnIndexThatNamesAnotherAddressNowIsNoticedByTheProbe) {
  serve();
  rig_->publish({{"w", bytes_}});
  const auto before = connect();  // the server has read its table
  fabric_->change("fake0", [](FakeDevice& device) {
    device.ports[0].gids[0].index = 1;
    device.ports[0].gids[1].index = 0;
  });
  const auto link = connect();
  EXPECT_EQ(link->stats().verbs.control_calls, 3U) << "the server was asked twice for a queue pair";
  EXPECT_EQ(to_rtr("fake0").back().attributes.ah_attr.grh.sgid_index, 0);
  EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
}

TEST_F(VerbsLinkTest, AnAddressTakenAwayEndsTheLinkAndItsReturnIsNoticed) {
  serve();
  rig_->publish({{"w", bytes_}});
  const Snapshot snapshot = rig_->snapshot();
  const auto with = node();
  const auto link = connect({}, with);
  std::vector<FakeGid> gids;
  fabric_->change("fake1", [&](FakeDevice& device) { std::swap(gids, device.ports[0].gids); });
  const auto gone = read(*link, snapshot, "w");
  ASSERT_FALSE(gone.ok());
  EXPECT_EQ(gone.error().code(), Code::kUnreachable);
  const auto none = try_connect({}, with);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Code::kUnavailable);
  expect_words(none.error().message(), {"the port has no GID"});
  gids.back().index = 2;
  fabric_->change("fake1", [&](FakeDevice& device) { device.ports[0].gids = gids; });
  EXPECT_EQ(must(read(*connect({}, with), snapshot, "w")), bytes_);
}

TEST_F(VerbsLinkTest, WithoutADeviceOrWithAWrongWishTheTableIsPrinted) {
  serve();
  const auto unknown = try_connect({}, node({"mlx5_0", {}}));
  EXPECT_EQ(unknown.error().code(), Code::kInvalid);
  expect_words(unknown.error().message(), {"no RDMA device mlx5_0", "fake0 port 1 GID 1", "fake1 port 1 GID 1"});
  const auto absent = try_connect({}, node({"fake1", 7}));
  EXPECT_EQ(absent.error().code(), Code::kInvalid);
  expect_words(absent.error().message(), {"no GID of index 7", "fake1 port 1 GID 1"});
  fabric_->change("fake1", [](FakeDevice& device) { device.ports[0].state = IBV_PORT_DOWN; });
  const auto down = try_connect();
  EXPECT_EQ(down.error().code(), Code::kUnavailable);
  expect_words(down.error().message(), {"the port is DOWN"});
  const auto none = try_connect({}, std::make_shared<VerbsNode>(VerbsWish{}, [] { return Result<std::shared_ptr<VerbsApi>>(Error(Code::kUnavailable, "no libibverbs here")); }));
  EXPECT_EQ(none.error().code(), Code::kUnavailable);
  expect_words(none.error().message(), {"no libibverbs here"});
}

TEST_F(VerbsLinkTest, APinnedGidIsUsed) {
  FakeFabric fabric = server_and_client();
  for (FakeDevice& device : fabric.devices) device.ports[0].gids.push_back(gid(4, GidType::kRoceV1));
  serve(fabric);
  EXPECT_EQ(connect({}, node({"fake1", {}}))->stats().verbs.gid_index, 1U);
  EXPECT_EQ(connect({}, node({"fake1", 4}))->stats().verbs.gid_index, 4U);
}

TEST_F(VerbsLinkTest, InfiniBandGoesByLid) {
  FakeFabric fabric = server_and_client();
  std::uint16_t lid = 17;
  for (FakeDevice& device : fabric.devices) {
    FakePort& port = device.ports[0];
    port.ethernet = false;
    port.lid = lid++;
    Gid guid{};
    guid[0] = 0xfe;
    guid[1] = 0x80;
    guid[15] = static_cast<std::uint8_t>(lid);
    port.gids = {{0, guid, GidType::kInfiniBand, 0}};
  }
  serve(fabric);
  rig_->publish({{"w", bytes_}});
  const auto link = connect();
  EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
  EXPECT_EQ(to_rtr("fake1").back().attributes.ah_attr.is_global, 0);
  EXPECT_EQ(to_rtr("fake1").back().attributes.ah_attr.dlid, 17);
  EXPECT_EQ(to_rtr("fake0").back().attributes.ah_attr.dlid, 18);
}

// ---------------------------------------------------------------- how much at once

TEST_F(VerbsLinkTest, NoReadIsLongerThanTheDeviceTakes) {
  for (const std::uint32_t message_max : {16384U, 65536U, 100'000U}) {
    FakeFabric fabric = server_and_client();
    fabric.devices[1].ports[0].message_max = message_max;
    serve(fabric);
    rig_->publish({{"w", bytes_}});
    std::uint64_t longest = 0;
    fabric_->before_read([&](const FakeRead& read) { longest = std::max(longest, read.size); });
    const auto link = connect();
    EXPECT_EQ(link->stats().verbs.slice_bytes, message_max / 4096 * 4096);
    EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
    EXPECT_EQ(longest, message_max / 4096 * 4096);
  }
}

TEST_F(VerbsLinkTest, ADeviceWithOneReadAtATimeIsEnough) {
  for (const std::size_t device : {std::size_t{0}, std::size_t{1}}) {
    FakeFabric fabric = server_and_client();
    fabric.devices[device].reads_max = 1;
    serve(fabric);
    rig_->publish({{"w", bytes_}});
    const auto link = connect({.slice = 8192, .staging = 65536});
    EXPECT_EQ(link->stats().verbs.reads_on_wire, 1U);
    EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
    for (const FakeModify& modify : fabric_->modifies()) {
      EXPECT_TRUE((modify.mask & IBV_QP_MAX_QP_RD_ATOMIC) == 0 || modify.attributes.max_rd_atomic == 1);
      EXPECT_TRUE((modify.mask & IBV_QP_MAX_DEST_RD_ATOMIC) == 0 || modify.attributes.max_dest_rd_atomic == 1);
    }
  }
}

TEST_F(VerbsLinkTest, OfADoorbellTheLastIsSignalledAlone) {
  serve();
  std::vector<std::pair<std::string, Bytes>> model;
  for (std::size_t i = 0; i < 200; ++i) model.emplace_back(cat("t", i), random_bytes(100, i));
  rig_->publish(model);
  const Snapshot snapshot = rig_->snapshot();
  const auto link = connect();
  std::vector<Bytes> targets(model.size(), Bytes(100));
  std::vector<BlockRead> batch;
  for (std::size_t i = 0; i < model.size(); ++i) batch.push_back(snapshot.read_of(model[i].first, {0, 100}, targets[i]));
  link->read(batch, in_seconds(30));
  for (std::size_t i = 0; i < model.size(); ++i) ASSERT_EQ(targets[i], model[i].second);
  const FakeTotals totals = fabric_->totals();
  EXPECT_EQ(totals.work_requests, 401U) << "the probe, 200 payloads and 200 headers";
  EXPECT_EQ(totals.completions, totals.doorbells) << "one completion a doorbell";
  EXPECT_EQ(totals.doorbell_largest, 64U);
  EXPECT_LE(totals.doorbells, 12U) << "not a doorbell a read";
}

TEST_F(VerbsLinkTest, ASliceThatDoesNotFitItsBufferTwiceIsCutToIt) {
  serve();
  rig_->publish({{"w", bytes_}});
  const auto link = connect({.slice = 1 << 20, .staging = 65536});
  EXPECT_EQ(link->stats().verbs.slice_bytes, 32768U);
  EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
  for (const VerbsOptions& wrong : {VerbsOptions{.slice = 100}, VerbsOptions{.staging = 4096}}) {
    const auto refused = try_connect(wrong);
    ASSERT_FALSE(refused.ok());
    expect_words(refused.error().message(), {"both are whole pages, and two slices fit the buffer"});
  }
}

TEST_F(VerbsLinkTest, TheLeastBufferThatIsTakenIsEnough) {
  serve();
  rig_->publish({{"w", bytes_}});
  const auto link = connect({.slice = 4096, .staging = 8192});
  EXPECT_EQ(must(read(*link, rig_->snapshot(), "w")), bytes_);
  fabric_->change("fake1", [](FakeDevice& device) { device.ports[0].message_max = 8192; });
  EXPECT_EQ(must(read(*connect(), rig_->snapshot(), "w")), bytes_) << "nor is the probe longer than the device takes";
}

}  // namespace
}  // namespace paramwire
