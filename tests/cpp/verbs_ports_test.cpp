// What devices say of themselves, as tables; by a table of functions that stands for devices as they are, broken ones among them.
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_ports.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <gtest/gtest.h>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {
namespace {

Gid gid(std::string_view text) { return parse_gid(text).value(); }

// One device. `*_error`: errno of the call, 0 for none.
struct Machine {
  int open_error = 0;
  int query_error = 0;
  int port_error = 0;
  int gids_error = 0;
  int pd_error = 0;
  int register_error = 0;
  std::uint8_t ports = 1;
  std::uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  ibv_port_state state = IBV_PORT_ACTIVE;
  int gid_room = 8;
  ibv_device device{};
  std::vector<ibv_gid_entry> gids;
  ibv_context context{};
};

// Only what reads tables. Everything that it opens is counted, so that a test sees what was left open.
class TableVerbs final : public VerbsApi {
 public:
  std::map<std::string, Machine> machines;
  int list_error = 0;
  int open_count = 0;
  std::size_t registered_max = 0;

  Machine& add(const std::string& name) {
    Machine& out = machines[name];
    out.device.transport_type = IBV_TRANSPORT_IB;
    out.context.device = &out.device;
    return out;
  }

  Result<std::vector<std::string>> device_names() override {
    if (list_error != 0) return errno_error(Code::kUnavailable, "ibv_get_device_list", list_error);
    std::vector<std::string> out;
    for (const auto& [name, machine] : machines) out.push_back(name);
    return out;
  }
  ibv_context* open_device(const std::string& name) override {
    Machine& machine = machines.at(name);
    if (machine.open_error != 0) {
      errno = machine.open_error;
      return nullptr;
    }
    ++open_count;
    return &machine.context;
  }
  int close_device(ibv_context*) override {
    --open_count;
    return 0;
  }
  int query_device(ibv_context* context, ibv_device_attr* out) override {
    const Machine& machine = of(context);
    out->phys_port_cnt = machine.ports;
    out->max_qp_rd_atom = 128;
    out->max_qp_init_rd_atom = 16;
    out->vendor_id = 0xffffff;
    return machine.query_error;
  }
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* out) override {
    const Machine& machine = of(context);
    if (machine.port_error != 0 && port == 1) return machine.port_error;
    out->state = machine.state;
    out->max_mtu = IBV_MTU_4096;
    out->active_mtu = IBV_MTU_1024;
    out->gid_tbl_len = machine.gid_room;
    out->max_msg_sz = 1U << 31;
    out->lid = 17;
    out->link_layer = machine.link_layer;
    return 0;
  }
  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t count_max) override {
    const Machine& machine = of(context);
    if (machine.gids_error != 0) return -machine.gids_error;
    if (machine.gids.size() > count_max) return -EINVAL;
    std::copy(machine.gids.begin(), machine.gids.end(), entries);
    return static_cast<ssize_t>(machine.gids.size());
  }
  ibv_pd* alloc_pd(ibv_context* context) override {
    if (of(context).pd_error == 0) {
      pd_.context = context;
      ++open_count;
      return &pd_;
    }
    errno = of(context).pd_error;
    return nullptr;
  }
  int dealloc_pd(ibv_pd*) override {
    --open_count;
    return 0;
  }
  ibv_mr* reg_mr(ibv_pd* pd, void* begin, std::size_t size, int) override {
    if (of(pd->context).register_error != 0) {
      errno = of(pd->context).register_error;
      return nullptr;
    }
    std::memset(begin, 1, size);  // as the device may
    registered_max = std::max(registered_max, size);
    ++open_count;
    return &mr_;
  }
  int dereg_mr(ibv_mr*) override {
    --open_count;
    return 0;
  }

  ibv_comp_channel* create_comp_channel(ibv_context*) override { return nullptr; }
  int destroy_comp_channel(ibv_comp_channel*) override { return ENOSYS; }
  ibv_cq* create_cq(ibv_context*, int, ibv_comp_channel*) override { return nullptr; }
  int destroy_cq(ibv_cq*) override { return ENOSYS; }
  int req_notify_cq(ibv_cq*) override { return ENOSYS; }
  int take_cq_event(ibv_comp_channel*) override { return ENOSYS; }
  int poll_cq(ibv_cq*, int, ibv_wc*) override { return -1; }
  ibv_qp* create_qp(ibv_pd*, ibv_qp_init_attr*) override { return nullptr; }
  int modify_qp(ibv_qp*, ibv_qp_attr*, int) override { return ENOSYS; }
  int destroy_qp(ibv_qp*) override { return ENOSYS; }
  int post_send(ibv_qp*, ibv_send_wr*, ibv_send_wr**) override { return ENOSYS; }

 private:
  const Machine& of(const ibv_context* context) const {
    for (const auto& [name, machine] : machines) {
      if (&machine.context == context) return machine;
    }
    ADD_FAILURE() << "a context of no device";
    return machines.begin()->second;
  }

  ibv_pd pd_{};
  ibv_mr mr_{};
};

ibv_gid_entry entry(std::uint32_t index, std::string_view address, std::uint32_t type, std::uint32_t interface, std::uint32_t port = 1) {
  ibv_gid_entry out{};
  const Gid bytes = gid(address);
  std::memcpy(out.gid.raw, bytes.data(), bytes.size());
  out.gid_index = index;
  out.port_num = port;
  out.gid_type = type;
  out.ndev_ifindex = interface;
  return out;
}

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
  Machine& machine = api.add("rx0");
  machine.gids = {entry(0, "fe80::5054:ff:fe12:3456", IBV_GID_TYPE_ROCE_V2, 4), entry(1, "10.1.0.1", IBV_GID_TYPE_ROCE_V1, 4), entry(2, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4)};
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
  api.add("rx0").gids = {entry(0, "fe80::5054:ff:fe99:9999", IBV_GID_TYPE_ROCE_V2, 4), entry(1, "10.9.0.1", IBV_GID_TYPE_ROCE_V2, 4), entry(2, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 9),
                         entry(3, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 0)};
  const auto ports = read(api);
  ASSERT_EQ(ports.size(), 1U);
  ASSERT_EQ(ports[0].gids.size(), 4U);
  for (const GidRow& row : ports[0].gids) EXPECT_EQ(row.interface, "") << row.index;
  EXPECT_EQ(rank_choices(ports, {}, {}).error().code(), Code::kUnavailable);
}

TEST(VerbsPorts, EveryPortGetsItsOwnGids) {
  TableVerbs api;
  Machine& machine = api.add("mlx4_0");
  machine.ports = 2;
  machine.gid_room = 1;
  machine.gids = {entry(0, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4, 1), entry(0, "fd00::1", IBV_GID_TYPE_ROCE_V2, 4, 2)};
  const auto ports = read(api);
  ASSERT_EQ(ports.size(), 2U);
  ASSERT_EQ(ports[1].gids.size(), 1U);
  EXPECT_EQ(ports[1].port, 2);
  EXPECT_EQ(ports[1].gids[0].gid, gid("fd00::1"));
  // One of them in trouble leaves the other.
  machine.port_error = EIO;
  const auto half = read(api);
  ASSERT_EQ(half.size(), 2U);
  EXPECT_EQ(half[0].problem, "ibv_query_port of port 1: Input/output error (errno 5)");
  EXPECT_EQ(half[1].problem, "ibv_query_gid_table: Invalid argument (errno 22)") << "the table has no room for what the first port would say";
  machine.gid_room = 2;
  EXPECT_EQ(read(api)[1].problem, "");
}

TEST(VerbsPorts, InfiniBandNeedsNoInterface) {
  TableVerbs api;
  Machine& machine = api.add("ib0");
  machine.link_layer = IBV_LINK_LAYER_INFINIBAND;
  machine.gids = {entry(0, "fe80::1c34:da03:7c:1", IBV_GID_TYPE_IB, 0)};
  const auto ports = read(api);
  const auto choices = rank_choices(ports, {}, {});
  ASSERT_TRUE(choices.ok()) << choices.error().message();
  EXPECT_EQ(choices->front().to_string(), "ib0 port 1 GID 0 (IB, fe80::1c34:da03:7c:1)");
}

TEST(VerbsPorts, StatesHaveTheirNames) {
  TableVerbs api;
  Machine& machine = api.add("rx0");
  machine.gids = {entry(0, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4)};
  machine.state = IBV_PORT_DOWN;
  EXPECT_EQ(read(api)[0].state, "DOWN");
  machine.state = IBV_PORT_ARMED;
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
  api.add("i0").gids = {entry(0, "10.1.0.1", IBV_GID_TYPE_ROCE_V2, 4)};
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
  api.add("rx0").gids = {entry(0, "127.0.0.1", IBV_GID_TYPE_ROCE_V2, lo->index)};
  const auto ports = read_ports(api);
  ASSERT_TRUE(ports.ok());
  EXPECT_EQ(ports->at(0).gids.at(0).interface, "lo");
  EXPECT_EQ(route_source(gid("127.0.0.9")), gid("127.0.0.1"));
}

TEST(VerbsPorts, RouteToALinkLocalAddressNeedsAnInterface) { EXPECT_EQ(route_source(gid("fe80::9")), std::nullopt); }

TEST(VerbsPorts, MemoryIsRegisteredForATryAndGivenBack) {
  TableVerbs api;
  Machine& machine = api.add("rx0");
  EXPECT_TRUE(try_registration(api, "rx0", 1U << 22).ok());
  EXPECT_EQ(api.registered_max, 1U << 22);
  machine.register_error = ENOMEM;
  const Status locked = try_registration(api, "rx0", 1U << 22);
  ASSERT_FALSE(locked.ok());
  EXPECT_EQ(locked.error().code(), Code::kUnavailable);
  expect_parts(locked.error().message(), {"registering memory at rx0, 4 MiB (4194304 bytes): Cannot allocate memory (errno 12)", "this process may lock ", "`ulimit -l unlimited`",
                                          "`--ulimit memlock=-1`"});
  machine.register_error = EFAULT;
  const Status fault = try_registration(api, "rx0", 4096);
  EXPECT_EQ(fault.error().message(), "registering memory at rx0, 4 KiB (4096 bytes): Bad address (errno 14)") << "no word of limits";
  machine.pd_error = ENOMEM;
  EXPECT_EQ(try_registration(api, "rx0", 4096).error().message(), "ibv_alloc_pd at rx0: Cannot allocate memory (errno 12)");
  machine.open_error = ENODEV;
  expect_parts(try_registration(api, "rx0", 4096).error().message(), {"rx0: ibv_open_device: No such device"});
  EXPECT_EQ(api.open_count, 0);
}

}  // namespace
}  // namespace paramwire
