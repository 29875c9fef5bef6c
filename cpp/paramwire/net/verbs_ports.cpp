#include "paramwire/net/verbs_ports.hpp"

#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/verbs_lib.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <ifaddrs.h>
#include <memory>
#include <net/if.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace paramwire {

namespace {

// Entries of the largest GID tables of one port (mlx5, irdma) are a few hundred; a device that says more is not believed.
constexpr std::size_t kGidsMax = 65536;
// Vendor id of soft-RoCE. Source: Linux, drivers/infiniband/sw/rxe/rxe_param.h.
constexpr std::uint32_t kVendorRxe = 0xffffff;

Gid gid_of(const in_addr& address) {
  Gid out{};
  out[10] = out[11] = 0xff;
  std::memcpy(out.data() + 12, &address, 4);
  return out;
}
Gid gid_of(const in6_addr& address) {
  Gid out{};
  std::memcpy(out.data(), &address, out.size());
  return out;
}

std::optional<Gid> gid_of(const sockaddr* address) {
  if (address->sa_family == AF_INET) return gid_of(reinterpret_cast<const sockaddr_in*>(address)->sin_addr);
  if (address->sa_family == AF_INET6) return gid_of(reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  return std::nullopt;
}

// The link-local address that an Ethernet address gives (RFC 4291, appendix A): the first GID of every RoCE port, there even where IPv6 is off
// and the interface has no such address.
bool is_made_of(const Gid& gid, const std::vector<std::uint8_t>& hardware) {
  if (hardware.size() != 6) return false;
  const Gid made = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, static_cast<std::uint8_t>(hardware[0] ^ 2), hardware[1], hardware[2], 0xff, 0xfe, hardware[3], hardware[4], hardware[5]};
  return gid == made;
}

std::string interface_of(const Gid& gid, std::uint32_t index, std::span<const NetworkInterface> interfaces) {
  for (const NetworkInterface& interface : interfaces) {
    if (interface.index != index) continue;
    const bool has = std::find(interface.addresses.begin(), interface.addresses.end(), gid) != interface.addresses.end();
    return has || is_made_of(gid, interface.hardware) ? interface.name : "";
  }
  return "";
}

std::string state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_NOP: return "NOP";
    case IBV_PORT_DOWN: return "DOWN";
    case IBV_PORT_INIT: return "INIT";
    case IBV_PORT_ARMED: return "ARMED";
    case IBV_PORT_ACTIVE: return "ACTIVE";
    case IBV_PORT_ACTIVE_DEFER: return "ACTIVE_DEFER";
  }
  return cat("in state ", static_cast<int>(state));
}

// 256 to 4096; 0 for what the enumeration does not have.
std::uint16_t mtu_bytes(ibv_mtu mtu) {
  if (mtu < IBV_MTU_256 || mtu > IBV_MTU_4096) return 0;
  return static_cast<std::uint16_t>(128U << static_cast<unsigned>(mtu));
}

// The limit as it is set. CAP_IPC_LOCK lifts it, but that of the first user namespace only, so whether it holds can't be told here.
std::string memlock_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : cat(human_bytes(limit.rlim_cur), " (", limit.rlim_cur, " bytes)");
}

// What this process holds pinned for devices (VmPin of proc(5)), as the kernel writes it: "2048 kB".
std::string pinned_text() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("VmPin:")) continue;
    const std::size_t begin = line.find_first_not_of(" \t", 6);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::string open_problem(int error) {
  std::string out = errno_error(Code::kUnavailable, "ibv_open_device", error).message();
  // libibverbs makes ENOENT of both.
  if (error == ENOENT || error == EACCES || error == EPERM) {
    out += ": its file in /dev/infiniband is not here, or not for this user (ls -l /dev/infiniband); a container needs --device=/dev/infiniband";
  }
  if (error == ENODEV) out += ": it is gone, or belongs to another network namespace (rdma system show)";
  if (error == ENOMEM) out += cat(": the limit on locked memory is ", memlock_text(), "; ulimit -l unlimited, in a container --ulimit memlock=-1");
  return out;
}

struct Closer {
  VerbsApi* api;
  void operator()(ibv_context* context) const { static_cast<void>(api->close_device(context)); }
};
using Device = std::unique_ptr<ibv_context, Closer>;

class Reader {
 public:
  Reader(VerbsApi& api, std::span<const NetworkInterface> interfaces) : api_(api), interfaces_(interfaces) {}

  // Rows of one device, at least one.
  std::vector<PortFacts> read(const std::string& name) {
    const Device device(api_.open_device(name), Closer{&api_});
    if (device == nullptr) return failed(name, open_problem(errno));
    if (device->device != nullptr && device->device->transport_type != IBV_TRANSPORT_IB) {
      return failed(name, "neither RoCE nor InfiniBand (iWARP, perhaps): it has no queue pairs of the kind that is used here");
    }
    ibv_device_attr attributes{};
    if (const int error = api_.query_device(device.get(), &attributes); error != 0) return failed(name, call_problem("ibv_query_device", error));
    std::vector<PortFacts> out;
    std::size_t gids = 0;
    for (unsigned port = 1; port <= attributes.phys_port_cnt; ++port) {
      out.push_back(read_port(device.get(), name, static_cast<std::uint8_t>(port), attributes, gids));
    }
    if (out.empty()) return failed(name, "it has no port");
    read_gids(device.get(), std::min(gids, kGidsMax), out);
    return out;
  }

 private:
  static std::string call_problem(std::string_view call, int error) { return errno_error(Code::kUnavailable, call, error).message(); }
  static std::vector<PortFacts> failed(const std::string& name, std::string problem) {
    PortFacts out;
    out.device = name;
    out.state = "unknown";
    out.problem = std::move(problem);
    return {std::move(out)};
  }

  // Adds to `gids` how many the port has room for.
  PortFacts read_port(ibv_context* device, const std::string& name, std::uint8_t port, const ibv_device_attr& attributes, std::size_t& gids) {
    PortFacts out;
    out.device = name;
    out.port = port;
    out.software = attributes.vendor_id == kVendorRxe;
    ibv_port_attr found{};
    if (const int error = api_.query_port(device, port, &found); error != 0) {
      out.state = "unknown";
      out.problem = call_problem(cat("ibv_query_port of port ", unsigned{port}), error);
      return out;
    }
    out.ethernet = found.link_layer == IBV_LINK_LAYER_ETHERNET;
    out.state = state_name(found.state);
    out.mtu_active = mtu_bytes(found.active_mtu);
    out.mtu_max = mtu_bytes(found.max_mtu);
    out.lid = found.lid;
    out.message_max = found.max_msg_sz;
    out.reads_max = static_cast<std::uint32_t>(std::max(0, std::min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom)));
    gids += static_cast<std::size_t>(std::max(0, found.gid_tbl_len));
    return out;
  }

  void read_gids(ibv_context* device, std::size_t count_max, std::vector<PortFacts>& ports) {
    std::vector<ibv_gid_entry> entries(std::max<std::size_t>(count_max, 1));
    const ssize_t count = api_.query_gid_table(device, entries.data(), entries.size());
    if (count < 0) {
      for (PortFacts& port : ports) {
        if (port.problem.empty()) port.problem = call_problem("ibv_query_gid_table", static_cast<int>(-count));
      }
      return;
    }
    entries.resize(std::min(static_cast<std::size_t>(count), entries.size()));
    for (const ibv_gid_entry& entry : entries) {
      for (PortFacts& port : ports) {
        if (port.port != entry.port_num || !port.problem.empty()) continue;
        GidRow row;
        row.index = entry.gid_index;
        std::memcpy(row.gid.data(), entry.gid.raw, row.gid.size());
        row.type = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? GidType::kRoceV2 : entry.gid_type == IBV_GID_TYPE_ROCE_V1 ? GidType::kRoceV1 : GidType::kInfiniBand;
        if (port.ethernet) row.interface = interface_of(row.gid, entry.ndev_ifindex, interfaces_);
        port.gids.push_back(std::move(row));
      }
    }
  }

  VerbsApi& api_;
  std::span<const NetworkInterface> interfaces_;
};

struct Unmapper {
  std::size_t size;
  void operator()(void* begin) const { ::munmap(begin, size); }
};

}  // namespace

std::vector<NetworkInterface> network_interfaces() {
  std::vector<NetworkInterface> out;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return out;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    // An IPv4 address with a label is listed under it: "eth0:1" is eth0.
    std::string name = at->ifa_name;
    name.resize(std::min(name.find(':'), name.size()));
    auto found = std::find_if(out.begin(), out.end(), [&](const NetworkInterface& interface) { return interface.name == name; });
    if (found == out.end()) {
      const unsigned index = ::if_nametoindex(name.c_str());
      if (index == 0) continue;  // gone meanwhile
      found = out.insert(out.end(), NetworkInterface{index, std::move(name), {}, {}});
    }
    if (at->ifa_addr == nullptr) continue;
    if (at->ifa_addr->sa_family == AF_PACKET) {
      const auto* link = reinterpret_cast<const sockaddr_ll*>(at->ifa_addr);
      found->hardware.assign(link->sll_addr, link->sll_addr + std::min<std::size_t>(link->sll_halen, sizeof link->sll_addr));
    } else if (const auto gid = gid_of(at->ifa_addr)) {
      found->addresses.push_back(*gid);
    }
  }
  return out;
}

Result<std::vector<PortFacts>> read_ports(VerbsApi& api) { return read_ports(api, network_interfaces()); }

Result<std::vector<PortFacts>> read_ports(VerbsApi& api, std::span<const NetworkInterface> interfaces) {
  PARAMWIRE_TRY(names, api.device_names());
  std::vector<PortFacts> out;
  Reader reader(api, interfaces);
  for (const std::string& name : names) {
    for (PortFacts& port : reader.read(name)) out.push_back(std::move(port));
  }
  return out;
}

std::optional<Gid> route_source(const Gid& target) {
  if (is_link_local(target)) return std::nullopt;
  sockaddr_storage address{};
  socklen_t size = 0;
  if (is_ipv4(target)) {
    auto* to = reinterpret_cast<sockaddr_in*>(&address);
    to->sin_family = AF_INET;
    to->sin_port = htons(4791);  // where RoCE v2 goes (annex A17), so that a routing rule on ports sees it; nothing is sent
    std::memcpy(&to->sin_addr, target.data() + 12, 4);
    size = sizeof *to;
  } else {
    auto* to = reinterpret_cast<sockaddr_in6*>(&address);
    to->sin6_family = AF_INET6;
    to->sin6_port = htons(4791);
    std::memcpy(&to->sin6_addr, target.data(), target.size());
    size = sizeof *to;
  }
  const Fd probe(::socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe.valid() || ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) return std::nullopt;
  size = sizeof address;
  if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  return gid_of(reinterpret_cast<const sockaddr*>(&address));
}

Error registration_error(std::string_view what, std::size_t bytes, int error_number) {
  const std::string subject = bytes == 0 ? std::string(what) : cat(what, ", ", human_bytes(bytes), " (", bytes, " bytes)");
  const Error plain = errno_error(Code::kUnavailable, subject, error_number);
  if (error_number != ENOMEM) return plain;
  const std::string pinned = pinned_text();
  return Error(Code::kUnavailable, cat(plain.message(), "; the limit on locked memory is ", memlock_text(), pinned.empty() ? "" : cat(", of which ", pinned, " are pinned"),
                                       ": raise it with `ulimit -l unlimited`, for a container with `--ulimit memlock=-1`"));
}

Status try_registration(VerbsApi& api, const std::string& device, std::size_t bytes) {
  const Device context(api.open_device(device), Closer{&api});
  if (context == nullptr) return Error(Code::kUnavailable, cat(device, ": ", open_problem(errno)));
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return errno_error(Code::kUnavailable, cat("mmap of ", bytes, " bytes"), errno);
  const std::unique_ptr<void, Unmapper> owner(memory, Unmapper{bytes});
  ibv_pd* pd = api.alloc_pd(context.get());
  if (pd == nullptr) return errno_error(Code::kUnavailable, cat("ibv_alloc_pd at ", device), errno);
  Status out;
  if (ibv_mr* region = api.reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE); region != nullptr) {
    static_cast<void>(api.dereg_mr(region));
  } else {
    out = registration_error(cat("registering memory at ", device), bytes, errno);
  }
  static_cast<void>(api.dealloc_pd(pd));
  return out;
}

}  // namespace paramwire
