// What devices say of themselves, as tables.
#include "paramwire/net/verbs_ports.hpp"
#include "support/table_verbs.hpp"

#include <algorithm>
#include <cerrno>
#include <gtest/gtest.h>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {
namespace {

Gid gid(std::string_view text) { return parse_gid(text).value(); }

// v0 has number 4; the hardware address of v0 makes fe80::5054:ff:fe12:3456.
const std::vector<NetworkInterface> kInterfaces = {
    {1, "lo", {gid("127.0.0.1"), gid("::1")}, {0, 0, 0, 0, 0, 0}},
    {4, "v0", {gid("10.1.0.1"), gid("fd00::1")}, {0x52, 0x54, 0x00, 0x12, 0x34, 0x56}},
};

void expect_parts(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) EXPECT_NE(text.find(part), std::string::npos) << '"' << part << "\" is not in: " << text;
}

std::vector<PortFacts> read(TableVerbs& api) {
  auto out = read_ports(api, kInterfaces);
  EXPECT_TRUE(out.ok()) << out.error().message();
  EXPECT_EQ(api.open_count, 0) << "a device was left open";
  return out.ok() ? std::move(out).value() : std::vector<PortFacts>{};
}

TEST(VerbsPorts, PortsAndGidsAreReadAsTheDeviceTellsThem) {
  TableVerbs api;
  TableDevice& device = api.add("rx0");
  device.gids = {table_gid(0, "fe80::5054:ff:fe12:3456", IBV_GID_TYPE_ROCE_V2, 4), table_gid(1, "10.1.0.1", IBV_GID_TYPE_ROCE_V1, 4), table_gid(2, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4)};
  const auto ports = read(api);
  ASSERT_EQ(ports.size(), 1U);
  const PortFacts& port = ports.front();
  EXPECT_EQ(port.problem, "");
  EXPECT_TRUE(port.ethernet);
  EXPECT_TRUE(port.software);
  EXPECT_EQ(port.state, "ACTIVE");
  EXPECT_EQ(port.mtu_active, 1024);
  EXPECT_EQ(port.mtu_max, 4096);
  EXPECT_EQ(port.lid, 17);
  EXPECT_EQ(port.message_max, 1U << 31);
  EXPECT_EQ(port.reads_max, 16U) << "the smaller of what it starts and what it answers";
  EXPECT_EQ(to_string(ports), "rx0 port 1 GID 0 (RoCE v2, fe80::5054:ff:fe12:3456, v0), MTU 1024 of at most 4096\n"
                              "rx0 port 1 GID 1 (RoCE v1, 10.1.0.1, v0), MTU 1024 of at most 4096\n"
                              "rx0 port 1 GID 2 (RoCE v2, 10.1.0.1, v0), MTU 1024 of at most 4096\n");
}

TEST(VerbsPorts, InterfaceOfTheSameNumberButWithoutTheAddressIsAnotherNamespaces) {
  TableVerbs api;
  // Number 4 is v0 here; over there it is the interface that has 10.9.0.1.
  api.add("rx0").gids = {table_gid(0, "fe80::5054:ff:fe99:9999", IBV_GID_TYPE_ROCE_V2, 4), table_gid(1, "10.9.0.1", IBV_GID_TYPE_ROCE_V2, 4), table_gid(2, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 9),
                         table_gid(3, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 0)};
  const auto ports = read(api);
  ASSERT_EQ(ports.size(), 1U);
  ASSERT_EQ(ports[0].gids.size(), 4U);
  for (const GidRow& row : ports[0].gids) EXPECT_EQ(row.interface, "") << row.index;
  EXPECT_EQ(rank_choices(ports, {}, {}).error().code(), Code::kUnavailable);
}

TEST(VerbsPorts, EveryPortGetsItsOwnGids) {
  TableVerbs api;
  TableDevice& device = api.add("mlx4_0");
  device.ports = 2;
  device.gid_room = 1;
  device.gids = {table_gid(0, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4, 1), table_gid(0, "fd00::1", IBV_GID_TYPE_ROCE_V2, 4, 2)};
  const auto ports = read(api);
  ASSERT_EQ(ports.size(), 2U);
  ASSERT_EQ(ports[1].gids.size(), 1U);
  EXPECT_EQ(ports[1].port, 2);
  EXPECT_EQ(ports[1].gids[0].gid, gid("fd00::1"));
  // One of them in trouble leaves the other.
  device.port_error = EIO;
  const auto half = read(api);
  ASSERT_EQ(half.size(), 2U);
  EXPECT_EQ(half[0].problem, "ibv_query_port of port 1: Input/output error (errno 5)");
  EXPECT_EQ(half[1].problem, "ibv_query_gid_table: Invalid argument (errno 22)") << "the table has no room for what the first port would say";
  device.gid_room = 2;
  EXPECT_EQ(read(api)[1].problem, "");
}

TEST(VerbsPorts, InfiniBandNeedsNoInterface) {
  TableVerbs api;
  TableDevice& device = api.add("ib0");
  device.link_layer = IBV_LINK_LAYER_INFINIBAND;
  device.gids = {table_gid(0, "fe80::1c34:da03:7c:1", IBV_GID_TYPE_IB, 0)};
  const auto ports = read(api);
  const auto choices = rank_choices(ports, {}, {});
  ASSERT_TRUE(choices.ok()) << choices.error().message();
  EXPECT_EQ(choices->front().to_string(), "ib0 port 1 GID 0 (IB, fe80::1c34:da03:7c:1)");
}

TEST(VerbsPorts, StatesHaveTheirNames) {
  TableVerbs api;
  TableDevice& device = api.add("rx0");
  device.gids = {table_gid(0, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4)};
  device.state = IBV_PORT_DOWN;
  EXPECT_EQ(read(api)[0].state, "DOWN");
  device.state = IBV_PORT_ARMED;
  EXPECT_EQ(to_string(read(api)), "rx0 port 1 GID 0 (RoCE v2, 10.1.0.1, v0), MTU 1024 of at most 4096: the port is ARMED\n");
}

TEST(VerbsPorts, DeviceThatFailsIsARowAndTheOthersStay) {
  TableVerbs api;
  api.add("a0").open_error = ENODEV;
  api.add("b0").open_error = ENOENT;
  api.add("c0").open_error = EACCES;
  api.add("d0").open_error = ENOMEM;
  api.add("e0").query_error = EIO;
  api.add("f0").gids_error = EOPNOTSUPP;
  api.add("g0").ports = 0;
  api.add("h0").device.transport_type = IBV_TRANSPORT_IWARP;
  api.add("i0").gids = {table_gid(0, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4)};
  const auto ports = read(api);
  ASSERT_EQ(ports.size(), 9U);
  expect_parts(ports[0].problem, {"ibv_open_device: No such device (errno 19)", "another network namespace"});
  expect_parts(ports[1].problem, {"errno 2", "--device=/dev/infiniband"});
  expect_parts(ports[2].problem, {"errno 13", "/dev/infiniband"});
  expect_parts(ports[3].problem, {"errno 12", "ulimit -l unlimited", "--ulimit memlock=-1"});
  EXPECT_EQ(ports[4].problem, "ibv_query_device: Input/output error (errno 5)");
  expect_parts(ports[5].problem, {"ibv_query_gid_table", "errno 95"});
  EXPECT_EQ(ports[6].problem, "it has no port");
  expect_parts(ports[7].problem, {"iWARP"});
  EXPECT_EQ(ports[8].problem, "");
  const auto choices = rank_choices(ports, {}, {});
  ASSERT_TRUE(choices.ok());
  EXPECT_EQ(choices->front().device, "i0");
}

TEST(VerbsPorts, ListThatCannotBeHadIsAnError) {
  TableVerbs api;
  api.list_error = ENOSYS;
  EXPECT_EQ(read_ports(api, kInterfaces).error().code(), Code::kUnavailable);
  api.list_error = 0;
  EXPECT_TRUE(read(api).empty());
}

TEST(VerbsPorts, InterfacesOfThisNamespaceAreListedOnceWithTheirAddresses) {
  const auto interfaces = network_interfaces();
  ASSERT_FALSE(interfaces.empty());
  std::map<std::uint32_t, int> seen;
  for (const NetworkInterface& interface : interfaces) {
    EXPECT_NE(interface.index, 0U);
    EXPECT_EQ(++seen[interface.index], 1) << interface.name;
    EXPECT_EQ(interface.name.find(':'), std::string::npos) << interface.name;
  }
  const auto lo = std::find_if(interfaces.begin(), interfaces.end(), [](const NetworkInterface& interface) { return interface.name == "lo"; });
  ASSERT_NE(lo, interfaces.end());
  const bool up = std::find(lo->addresses.begin(), lo->addresses.end(), gid("127.0.0.1")) != lo->addresses.end();
  if (!up) GTEST_SKIP() << "lo has no address here";
  TableVerbs api;
  api.add("rx0").gids = {table_gid(0, "127.0.0.1", IBV_GID_TYPE_ROCE_V2, lo->index)};
  const auto ports = read_ports(api);
  ASSERT_TRUE(ports.ok());
  EXPECT_EQ(ports->at(0).gids.at(0).interface, "lo");
  EXPECT_EQ(route_source(gid("127.0.0.9")), gid("127.0.0.1"));
}

TEST(VerbsPorts, RouteToALinkLocalAddressNeedsAnInterface) { EXPECT_EQ(route_source(gid("fe80::9")), std::nullopt); }

TEST(VerbsPorts, MemoryIsRegisteredForATryAndGivenBack) {
  TableVerbs api;
  TableDevice& device = api.add("rx0");
  EXPECT_TRUE(try_registration(api, "rx0", 1U << 22).ok());
  EXPECT_EQ(api.registered_max, 1U << 22);
  device.register_error = ENOMEM;
  const Status locked = try_registration(api, "rx0", 1U << 22);
  ASSERT_FALSE(locked.ok());
  EXPECT_EQ(locked.error().code(), Code::kUnavailable);
  expect_parts(locked.error().message(), {"registering memory at rx0, 4 MiB (4194304 bytes): Cannot allocate memory (errno 12)", "the limit on locked memory is ", "`ulimit -l unlimited`",
                                          "`--ulimit memlock=-1`"});
  device.register_error = EFAULT;
  const Status fault = try_registration(api, "rx0", 4096);
  EXPECT_EQ(fault.error().message(), "registering memory at rx0, 4 KiB (4096 bytes): Bad address (errno 14)") << "no word of limits";
  device.pd_error = ENOMEM;
  EXPECT_EQ(try_registration(api, "rx0", 4096).error().message(), "ibv_alloc_pd at rx0: Cannot allocate memory (errno 12)");
  device.open_error = ENODEV;
  expect_parts(try_registration(api, "rx0", 4096).error().message(), {"rx0: ibv_open_device: No such device"});
  EXPECT_EQ(api.open_count, 0);
}

}  // namespace
}  // namespace paramwire
