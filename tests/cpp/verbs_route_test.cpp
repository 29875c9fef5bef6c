// The choice of device, port and GID over tables written by hand.
#include "paramwire/net/verbs_route.hpp"

#include <gtest/gtest.h>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire {
namespace {

constexpr GidType kV1 = GidType::kRoceV1;
constexpr GidType kV2 = GidType::kRoceV2;

Gid gid(std::string_view text) {
  const auto out = parse_gid(text);
  EXPECT_TRUE(out.has_value()) << text;
  return out.value_or(Gid{});
}

GidRow row(std::uint32_t index, std::string_view address, GidType type, std::string interface = "v0") { return {index, gid(address), type, std::move(interface)}; }

PortFacts port(std::string device, std::vector<GidRow> gids, std::uint8_t number = 1) {
  PortFacts out;
  out.device = std::move(device);
  out.port = number;
  out.mtu_active = out.mtu_max = 4096;
  out.message_max = 1U << 23;
  out.reads_max = 128;
  out.gids = std::move(gids);
  return out;
}

// Mooncake's table of CASES UP-03, with the link-local forms first.
std::vector<PortFacts> usual() {
  return {port("rx0", {row(0, "fe80::1", kV1), row(1, "fe80::1", kV2), row(2, "10.0.0.5", kV1), row(3, "10.0.0.5", kV2)})};
}

VerbsPeer at(std::string_view address, std::string_view source = "") {
  VerbsPeer out;
  out.address = gid(address);
  if (!source.empty()) out.source = gid(source);
  return out;
}

VerbsWish wish(std::string device, std::optional<std::uint32_t> index = std::nullopt) { return {std::move(device), index}; }

// "rx0:3 rx1:1" of the ranked rows.
std::string ranked(const std::vector<PortFacts>& ports, const VerbsPeer& peer = {}, const VerbsWish& wanted = {}) {
  const auto choices = rank_choices(ports, peer, wanted);
  if (!choices.ok()) return choices.error().to_string();
  std::string out;
  for (const VerbsChoice& choice : *choices) out += (out.empty() ? "" : " ") + choice.device + ":" + std::to_string(choice.gid_index);
  return out;
}

Error refused(const std::vector<PortFacts>& ports, const VerbsPeer& peer, const VerbsWish& wanted) {
  auto choices = rank_choices(ports, peer, wanted);
  EXPECT_FALSE(choices.ok());
  return choices.ok() ? Error(Code::kInternal, "") : std::move(choices).error();
}

void expect_parts(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) EXPECT_NE(text.find(part), std::string::npos) << '"' << part << "\" is not in: " << text;
}

TEST(VerbsRoute, Ipv4PeerGetsTheIpv4RowOfVersion2) { EXPECT_EQ(ranked(usual(), at("10.0.0.9")), "rx0:3 rx0:2 rx0:1 rx0:0"); }

TEST(VerbsRoute, LinkLocalPeerGetsTheLinkLocalRowOfVersion2) { EXPECT_EQ(ranked(usual(), at("fe80::9")), "rx0:1 rx0:0 rx0:3 rx0:2"); }

TEST(VerbsRoute, IndexThatIsNotThereIsRefusedWithTheTable) {
  const Error error = refused(usual(), at("10.0.0.9"), wish("rx0", 7));
  EXPECT_EQ(error.code(), Code::kInvalid);
  expect_parts(error.message(), {"RDMA device rx0 has no GID of index 7", "\nrx0 port 1 GID 0 (RoCE v1, fe80::1, v0), MTU 4096\n",
                                 "\nrx0 port 1 GID 3 (RoCE v2, 10.0.0.5, v0), MTU 4096"});
  EXPECT_FALSE(error.message().ends_with("\n"));
}

TEST(VerbsRoute, IndexThatIsThereIsTheOnlyChoice) {
  EXPECT_EQ(ranked(usual(), at("10.0.0.9"), wish("rx0", 0)), "rx0:0");
  EXPECT_EQ(ranked(usual(), at("10.0.0.9"), wish("", 2)), "rx0:2");
}

TEST(VerbsRoute, ChoiceCarriesAllThatAQueuePairNeeds) {
  const auto choices = rank_choices(usual(), at("10.0.0.9"), {});
  ASSERT_TRUE(choices.ok());
  const VerbsChoice& best = choices->front();
  EXPECT_EQ(best.to_string(), "rx0 port 1 GID 3 (RoCE v2, 10.0.0.5, v0)");
  EXPECT_EQ(best.gid, gid("10.0.0.5"));
  EXPECT_EQ(best.type, kV2);
  EXPECT_TRUE(best.ethernet);
  EXPECT_EQ(best.mtu, 4096);
  EXPECT_EQ(best.message_max, 1U << 23);
  EXPECT_EQ(best.reads_max, 128U);
  EXPECT_EQ(best.interface, "v0");
}

TEST(VerbsRoute, RowThatTheKernelRoutesByGoesFirst) {
  const std::vector<PortFacts> ports = {port("rx0", {row(1, "10.1.0.1", kV2)}), port("rx1", {row(1, "10.2.0.1", kV2, "v1")})};
  EXPECT_EQ(ranked(ports, at("192.168.7.7", "10.2.0.1")), "rx1:1 rx0:1");
  EXPECT_EQ(ranked(ports, at("192.168.7.7", "10.1.0.1")), "rx0:1 rx1:1");
  EXPECT_EQ(ranked(ports, at("10.2.0.9", "10.1.0.1")), "rx0:1 rx1:1") << "the route goes before the guess by network";
}

TEST(VerbsRoute, RowInThePeersNetworkGoesBeforeOthers) {
  const std::vector<PortFacts> ports = {port("rx0", {row(1, "10.1.0.1", kV2), row(2, "fd00:1::1", kV2)}),
                                        port("rx1", {row(1, "10.2.0.1", kV2, "v1"), row(2, "fd00:2::1", kV2, "v1")})};
  EXPECT_EQ(ranked(ports, at("10.2.0.9")), "rx1:1 rx0:1 rx0:2 rx1:2");
  EXPECT_EQ(ranked(ports, at("fd00:2::9")), "rx1:2 rx0:2 rx0:1 rx1:1");
}

TEST(VerbsRoute, GidOfThePeerGoesBeforeItsControlAddress) {
  // The control connection goes over one network, RDMA over another: what routes the first is nothing to the second.
  const std::vector<PortFacts> ports = {port("rx0", {row(1, "10.1.0.1", kV2)}), port("rx1", {row(1, "10.2.0.1", kV2, "v1")})};
  VerbsPeer peer = at("10.1.0.9", "10.1.0.1");
  peer.gid = gid("10.2.0.9");
  EXPECT_EQ(ranked(ports, peer), "rx1:1 rx0:1");
  peer.gid = gid("10.1.0.8");
  EXPECT_EQ(ranked(ports, peer), "rx0:1 rx1:1");
  // The route of the GID itself.
  peer = {};
  peer.gid = gid("192.168.7.7");
  peer.source = gid("10.2.0.1");
  EXPECT_EQ(ranked(ports, peer), "rx1:1 rx0:1");
}

TEST(VerbsRoute, TypeOfThePeersGidIsMatchedFirst) {
  VerbsPeer peer;
  peer.gid = gid("10.0.0.9");
  peer.type = kV1;
  EXPECT_EQ(ranked(usual(), peer), "rx0:2 rx0:3 rx0:1 rx0:0") << "v1 and v2 never meet";
}

TEST(VerbsRoute, LoopbackControlConnectionTakesAnyGlobalRowOfVersion2) {
  EXPECT_EQ(ranked(usual(), at("127.0.0.1", "127.0.0.1")), "rx0:3 rx0:2 rx0:1 rx0:0");
  EXPECT_EQ(ranked(usual(), at("::1", "::1")), "rx0:3 rx0:2 rx0:1 rx0:0");
  EXPECT_EQ(ranked(usual()), "rx0:3 rx0:2 rx0:1 rx0:0") << "as over a unix socket";
  const std::vector<PortFacts> ipv6 = {port("rx0", {row(0, "fe80::1", kV2), row(1, "fd00::1", kV2)})};
  EXPECT_EQ(ranked(ipv6, at("127.0.0.1", "127.0.0.1")), "rx0:1 rx0:0");
}

TEST(VerbsRoute, Ipv6PeerGetsTheGlobalIpv6Row) {
  const std::vector<PortFacts> ports = {port("rx0", {row(0, "fe80::1", kV2), row(1, "10.0.0.5", kV2), row(2, "2001:db8::5", kV1), row(3, "2001:db8::5", kV2)})};
  EXPECT_EQ(ranked(ports, at("2001:db8:0:1::9")), "rx0:3 rx0:2 rx0:1 rx0:0");
}

TEST(VerbsRoute, LinkLocalPeerIsReachedFromItsOwnInterface) {
  const std::vector<PortFacts> ports = {port("rx0", {row(0, "fe80::1", kV2)}), port("rx1", {row(0, "fe80::2", kV2, "v1"), row(1, "10.0.0.5", kV2, "v1")})};
  VerbsPeer peer = at("fe80::9");
  EXPECT_EQ(ranked(ports, peer), "rx0:0 rx1:0 rx1:1");
  peer.interface = "v1";
  EXPECT_EQ(ranked(ports, peer), "rx1:0 rx0:0 rx1:1");
}

TEST(VerbsRoute, LargerMtuGoesFirstAmongEqualRows) {
  std::vector<PortFacts> ports = {port("rx0", {row(1, "10.1.0.1", kV2)}), port("rx1", {row(1, "10.1.0.2", kV2, "v1")})};
  ports[0].mtu_active = 1024;
  EXPECT_EQ(ranked(ports, at("10.1.0.9")), "rx1:1 rx0:1");
  ports[0].mtu_active = 4096;
  EXPECT_EQ(ranked(ports, at("10.1.0.9")), "rx0:1 rx1:1") << "then the table's order";
}

TEST(VerbsRoute, InfiniBandPeerGetsAnInfiniBandPort) {
  std::vector<PortFacts> ports = {port("rx0", {row(0, "fe80::5054:ff:fe12:3456", kV2)}), port("ib0", {row(0, "fe80::1c34:da03:7c:1", GidType::kInfiniBand, "")})};
  ports[1].ethernet = false;
  ports[1].lid = 17;
  VerbsPeer peer;
  peer.gid = gid("fe80::1c34:da03:7c:2");
  peer.type = GidType::kInfiniBand;
  const auto choices = rank_choices(ports, peer, {});
  ASSERT_TRUE(choices.ok());
  EXPECT_EQ(choices->front().to_string(), "ib0 port 1 GID 0 (IB, fe80::1c34:da03:7c:1)");
  EXPECT_FALSE(choices->front().ethernet);
  EXPECT_EQ(choices->front().lid, 17);
  peer = at("10.0.0.9");
  EXPECT_EQ(ranked({ports[1]}, peer), "ib0:0") << "an address of IP over InfiniBand: the only way there is";
}

TEST(VerbsRoute, PortThatIsDownIsPassedOver) {
  std::vector<PortFacts> ports = {port("rx0", {row(1, "10.1.0.1", kV2)}), port("rx1", {row(1, "10.2.0.1", kV2, "v1")})};
  ports[0].state = "DOWN";
  EXPECT_EQ(ranked(ports, at("10.1.0.9", "10.1.0.1")), "rx1:1");
  const Error error = refused(ports, at("10.1.0.9"), wish("rx0"));
  EXPECT_EQ(error.code(), Code::kUnavailable);
  expect_parts(error.message(), {"no GID of rx0 can be used", "rx0 port 1 GID 1 (RoCE v2, 10.1.0.1, v0), MTU 4096: the port is DOWN"});
}

TEST(VerbsRoute, RowOfAnotherNetworkNamespaceIsPassedOverWithItsReason) {
  std::vector<PortFacts> ports = {port("rx0", {row(0, "fe80::1", kV2, ""), row(1, "10.0.0.5", kV2, "")}), port("rx1", {row(1, "10.2.0.1", kV2, "v1")})};
  EXPECT_EQ(ranked(ports, at("10.0.0.9")), "rx1:1");
  ports.pop_back();
  const Error error = refused(ports, at("10.0.0.9"), {});
  EXPECT_EQ(error.code(), Code::kUnavailable);
  expect_parts(error.message(), {"no GID can be used", "GID 0 (RoCE v2, fe80::1), MTU 4096: no interface of this network namespace has that address\n",
                                 "GID 1 (RoCE v2, 10.0.0.5), MTU 4096: no interface of this network namespace has that address"});
  // Pinned, too: the kernel would take the queue pair and nothing would arrive.
  EXPECT_EQ(refused(ports, {}, wish("rx0", 1)).code(), Code::kUnavailable);
}

TEST(VerbsRoute, DeviceThatCannotBeOpenedIsARowWithItsReason) {
  PortFacts broken;
  broken.device = "mlx5_0";
  broken.problem = "ibv_open_device: No such device (errno 19)";
  EXPECT_EQ(ranked({broken, usual()[0]}, at("10.0.0.9")), "rx0:3 rx0:2 rx0:1 rx0:0");
  for (const VerbsWish& wanted : {wish(""), wish("mlx5_0"), wish("mlx5_0:1"), wish("mlx5_0", 3)}) {
    const Error error = refused({broken}, at("10.0.0.9"), wanted);
    EXPECT_EQ(error.code(), Code::kUnavailable) << error.message();
    expect_parts(error.message(), {"\nmlx5_0: ibv_open_device: No such device (errno 19)"});
  }
}

TEST(VerbsRoute, NoDeviceAtAllIsSaid) {
  EXPECT_EQ(refused({}, at("10.0.0.9"), {}).to_string(), "unavailable: no GID can be used: there is no RDMA device");
  EXPECT_EQ(refused({}, at("10.0.0.9"), wish("rx0")).to_string(), "invalid: no RDMA device rx0: there is no RDMA device");
  EXPECT_EQ(refused({port("rx0", {})}, {}, {}).code(), Code::kUnavailable);
  expect_parts(refused({port("rx0", {})}, {}, {}).message(), {"\nrx0 port 1: the port has no GID"});
}

TEST(VerbsRoute, WishNamesDeviceAndPort) {
  const std::vector<PortFacts> ports = {port("rx0", {row(1, "10.1.0.1", kV2)}), port("mlx4_0", {row(0, "10.2.0.1", kV2, "v1")}), port("mlx4_0", {row(0, "10.3.0.1", kV2, "v2")}, 2)};
  EXPECT_EQ(ranked(ports, at("10.1.0.9"), wish("mlx4_0")), "mlx4_0:0 mlx4_0:0");
  const auto second = rank_choices(ports, at("10.1.0.9"), wish("mlx4_0:2"));
  ASSERT_TRUE(second.ok());
  ASSERT_EQ(second->size(), 1U);
  EXPECT_EQ(second->front().port, 2);
  EXPECT_EQ(ranked(ports, {}, wish("rx0:1", 1)), "rx0:1");
  expect_parts(refused(ports, {}, wish("mlx4_0:3")).to_string(), {"invalid: RDMA device mlx4_0 has no port 3; the table:\n", "mlx4_0 port 2 GID 0"});
  expect_parts(refused(ports, {}, wish("rx7")).to_string(), {"invalid: no RDMA device rx7; the table:\n", "rx0 port 1 GID 1"});
  expect_parts(refused(ports, {}, wish("rx7:1")).to_string(), {"invalid: no RDMA device rx7; the table:\n"});
  expect_parts(refused(ports, {}, wish("rx0:999")).to_string(), {"invalid: no RDMA device rx0:999;"});
}

TEST(VerbsRoute, IndexWithoutDeviceNeedsThatThereIsOne) {
  const std::vector<PortFacts> two = {port("rx0", {row(1, "10.1.0.1", kV2)}), port("rx1", {row(1, "10.2.0.1", kV2, "v1")})};
  expect_parts(refused(two, {}, wish("", 1)).to_string(), {"invalid: GID index 1 needs its device, of which there are several", "rx1 port 1 GID 1"});
  EXPECT_EQ(ranked({port("rx0", {row(1, "10.1.0.1", kV2)}), port("rx0", {row(1, "10.2.0.1", kV2)}, 2)}, {}, wish("", 1)), "rx0:1 rx0:1");
}

TEST(VerbsRoute, TableTellsTheMtuThatTheNetworkCutsDown) {
  std::vector<PortFacts> ports = usual();
  ports[0].gids.resize(1);
  ports[0].mtu_active = 1024;
  EXPECT_EQ(to_string(ports), "rx0 port 1 GID 0 (RoCE v1, fe80::1, v0), MTU 1024 of at most 4096\n");
  EXPECT_EQ(to_string(std::vector<PortFacts>{}), "");
}

TEST(VerbsRoute, AddressesAreReadAndWritten) {
  for (const char* text : {"10.0.0.5", "fe80::1", "2001:db8::5:1", "::", "::1", "ff02::1"}) {
    EXPECT_EQ(to_string(gid(text)), text);
  }
  EXPECT_EQ(to_string(gid("::ffff:10.0.0.5")), "10.0.0.5");
  EXPECT_EQ(gid("10.0.0.5"), (Gid{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 5}));
  for (const char* text : {"", "10.0.0", "10.0.0.256", "fe80::1%v0", "host", "10.0.0.5:7000", "[::1]"}) EXPECT_FALSE(parse_gid(text).has_value()) << text;
  EXPECT_FALSE(parse_gid(std::string_view("10.0.0.5\0", 9)).has_value()) << "a NUL ends no address";
  EXPECT_TRUE(is_link_local(gid("febf::1")));
  EXPECT_FALSE(is_link_local(gid("fec0::1")));
  EXPECT_TRUE(is_loopback(gid("127.8.9.1")));
  EXPECT_FALSE(is_loopback(gid("::2")));
  EXPECT_EQ(gid_type_name(kV2), "RoCE v2");
  EXPECT_EQ(gid_type_name(static_cast<GidType>(9)), "unknown");
}

}  // namespace
}  // namespace paramwire
