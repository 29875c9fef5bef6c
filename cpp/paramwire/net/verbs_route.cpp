#include "paramwire/net/verbs_route.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <charconv>
#include <cstddef>
#include <tuple>

namespace paramwire {

namespace {

// RFC 4291, section 2.5.5.2.
constexpr std::array<std::uint8_t, 12> kIpv4Mapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

bool same_prefix(const Gid& one, const Gid& other, std::size_t bytes) { return std::equal(one.begin(), one.begin() + static_cast<std::ptrdiff_t>(bytes), other.begin()); }

// /24 of IPv4, /64 of everything else: the commonest sizes, since the peer's own prefix is not known here.
bool same_network(const Gid& one, const Gid& other) {
  if (is_ipv4(one) || is_ipv4(other)) return same_prefix(one, other, 15);
  return same_prefix(one, other, 8);
}

bool is_global(const PortFacts& port, const GidRow& row) { return !port.ethernet || !(is_link_local(row.gid) || is_loopback(row.gid)); }

// The peer's address that says something about rows; nullptr: none does.
const Gid* target_of(const VerbsPeer& peer) {
  if (peer.gid) return &*peer.gid;
  return peer.address && !is_loopback(*peer.address) ? &*peer.address : nullptr;
}

// Rule 2.
bool may_reach(const PortFacts& port, const GidRow& row, const VerbsPeer& peer) {
  if (peer.type && *peer.type != row.type) return false;
  const Gid* target = target_of(peer);
  if (target == nullptr) return true;
  // The default subnet prefix of InfiniBand looks like a link-local address, and no IP address is one of its GIDs.
  if (!port.ethernet) return peer.gid.has_value() && same_network(row.gid, *target);
  if (is_ipv4(row.gid) != is_ipv4(*target) || is_link_local(row.gid) != is_link_local(*target)) return false;
  return !is_link_local(*target) || peer.interface.empty() || peer.interface == row.interface;
}

// Rule 3. The route of the control connection says nothing about a GID in some other network.
bool is_routed(const GidRow& row, const VerbsPeer& peer) {
  if (!peer.source || row.gid != *peer.source) return false;
  return !peer.gid || !peer.address || same_network(*peer.gid, *peer.address);
}

bool is_near(const GidRow& row, const VerbsPeer& peer) {
  const Gid* target = target_of(peer);
  return target != nullptr && same_network(row.gid, *target);
}

struct Candidate {
  const PortFacts* port;
  const GidRow* row;

  // Larger is better. In the order of the rules.
  auto merit(const VerbsPeer& peer) const {
    return std::tuple(may_reach(*port, *row, peer), is_routed(*row, peer), is_near(*row, peer), is_global(*port, *row), row->type != GidType::kRoceV1,
                      port->mtu_active);
  }
  VerbsChoice choice() const {
    VerbsChoice out;
    out.device = port->device;
    out.port = port->port;
    out.gid_index = row->index;
    out.gid = row->gid;
    out.type = row->type;
    out.ethernet = port->ethernet;
    out.mtu = port->mtu_active;
    out.lid = port->lid;
    out.message_max = port->message_max;
    out.reads_max = port->reads_max;
    out.interface = row->interface;
    out.software = port->software;
    return out;
  }
};

std::string row_text(std::string_view device, unsigned port, std::uint32_t index, GidType type, const Gid& gid, std::string_view interface) {
  std::string out = cat(device, " port ", port, " GID ", index, " (", gid_type_name(type), ", ", to_string(gid));
  if (!interface.empty()) out += cat(", ", interface);
  return out + ")";
}

Error with_table(Code code, std::string_view what, std::span<const PortFacts> ports) {
  std::string table = to_string(ports);
  if (!table.empty()) table.pop_back();  // its last end of line
  return Error(code, ports.empty() ? cat(what, ": there is no RDMA device") : cat(what, "; the table:\n", table));
}

// Of "rx0:1": the device; and the port, where the text after the last colon is one.
struct DeviceAndPort {
  std::string_view device;
  std::optional<std::uint8_t> port;
};
DeviceAndPort split_device(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return {text, std::nullopt};
  const std::string_view digits = text.substr(colon + 1);
  std::uint8_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size()) return {text, std::nullopt};
  return {text.substr(0, colon), port};
}

// The ports that the wish leaves.
Result<std::vector<const PortFacts*>> wished_ports(std::span<const PortFacts> ports, const VerbsWish& wish) {
  std::vector<const PortFacts*> out;
  bool device_there = false;
  const DeviceAndPort wanted = split_device(wish.device);
  for (const PortFacts& port : ports) {
    const bool named = wish.device.empty() || port.device == wish.device || port.device == wanted.device;
    const bool numbered = port.device == wish.device || !wanted.port || *wanted.port == port.port || !port.problem.empty();
    device_there = device_there || named;
    if (named && numbered) out.push_back(&port);
  }
  if (!device_there && !wish.device.empty()) return with_table(Code::kInvalid, cat("no RDMA device ", wanted.device), ports);
  if (out.empty() && wanted.port) return with_table(Code::kInvalid, cat("RDMA device ", wanted.device, " has no port ", unsigned{*wanted.port}), ports);
  return out;
}

Status check_index(std::span<const PortFacts> ports, std::span<const PortFacts* const> left, const VerbsWish& wish) {
  if (!wish.gid_index) return {};
  bool there = false;
  for (const PortFacts* port : left) {
    if (port->device != left.front()->device) {
      return with_table(Code::kInvalid, cat("GID index ", *wish.gid_index, " needs its device, of which there are several"), ports);
    }
    // A device that can't be asked may have it.
    there = there || !port->problem.empty() || std::any_of(port->gids.begin(), port->gids.end(), [&](const GidRow& row) { return row.index == *wish.gid_index; });
  }
  if (there || left.empty()) return {};
  return with_table(Code::kInvalid, cat("RDMA device ", left.front()->device, " has no GID of index ", *wish.gid_index), ports);
}

std::string wish_text(const VerbsWish& wish) {
  std::string out = wish.device.empty() ? "" : cat(" of ", wish.device);
  if (wish.gid_index) out += cat(" with index ", *wish.gid_index);
  return out;
}

}  // namespace

std::string_view gid_type_name(GidType type) noexcept {
  switch (type) {
    case GidType::kInfiniBand: return "IB";
    case GidType::kRoceV1: return "RoCE v1";
    case GidType::kRoceV2: return "RoCE v2";
  }
  return "unknown";
}

bool is_ipv4(const Gid& gid) noexcept { return std::equal(kIpv4Mapped.begin(), kIpv4Mapped.end(), gid.begin()); }
bool is_link_local(const Gid& gid) noexcept { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }
bool is_loopback(const Gid& gid) noexcept {
  if (is_ipv4(gid)) return gid[12] == 127;
  return std::all_of(gid.begin(), gid.end() - 1, [](std::uint8_t byte) { return byte == 0; }) && gid[15] == 1;
}

std::string VerbsChoice::to_string() const { return row_text(device, port, gid_index, type, gid, interface); }

std::string to_string(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid)) {
    ::inet_ntop(AF_INET, gid.data() + kIpv4Mapped.size(), text, sizeof text);
  } else {
    ::inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  }
  return text;
}

std::optional<Gid> parse_gid(std::string_view text) {
  const std::string terminated(text);
  if (terminated.find('\0') != std::string::npos) return std::nullopt;  // where inet_pton() would stop reading
  Gid out{};
  if (::inet_pton(AF_INET6, terminated.c_str(), out.data()) == 1) return out;
  std::copy(kIpv4Mapped.begin(), kIpv4Mapped.end(), out.begin());
  if (::inet_pton(AF_INET, terminated.c_str(), out.data() + kIpv4Mapped.size()) == 1) return out;
  return std::nullopt;
}

std::string port_problem(const PortFacts& port) {
  if (!port.problem.empty()) return port.problem;
  if (port.state != "ACTIVE") return cat("the port is ", port.state);
  return port.gids.empty() ? "the port has no GID: its network interface has no address" : "";
}

std::string row_problem(const PortFacts& port, const GidRow& row) {
  if (std::string whole = port_problem(port); !whole.empty()) return whole;
  if (!port.ethernet) return "";
  if (row.type == GidType::kInfiniBand) return "no RoCE GID";
  return row.interface.empty() ? "no interface of this network namespace has that address" : "";
}

std::string to_string(std::span<const PortFacts> ports) {
  std::string out;
  for (const PortFacts& port : ports) {
    if (port.gids.empty() || !port.problem.empty()) {
      out += port.problem.empty() ? cat(port.device, " port ", unsigned{port.port}) : port.device;
      out += cat(": ", port_problem(port), '\n');
      continue;
    }
    for (const GidRow& row : port.gids) {
      out += cat(row_text(port.device, port.port, row.index, row.type, row.gid, row.interface), ", MTU ", port.mtu_active);
      if (port.mtu_max != port.mtu_active) out += cat(" of at most ", port.mtu_max);
      const std::string problem = row_problem(port, row);
      out += problem.empty() ? "\n" : cat(": ", problem, '\n');
    }
  }
  return out;
}

Result<std::vector<VerbsChoice>> rank_choices(std::span<const PortFacts> ports, const VerbsPeer& peer, const VerbsWish& wish) {
  PARAMWIRE_TRY(left, wished_ports(ports, wish));
  PARAMWIRE_CHECK(check_index(ports, left, wish));
  std::vector<Candidate> candidates;
  for (const PortFacts* port : left) {
    for (const GidRow& row : port->gids) {
      if (wish.gid_index && *wish.gid_index != row.index) continue;
      if (row_problem(*port, row).empty()) candidates.push_back({port, &row});
    }
  }
  if (candidates.empty()) return with_table(Code::kUnavailable, cat("no GID", wish_text(wish), " can be used"), ports);
  std::stable_sort(candidates.begin(), candidates.end(), [&](const Candidate& one, const Candidate& other) { return one.merit(peer) > other.merit(peer); });
  std::vector<VerbsChoice> out;
  for (const Candidate& candidate : candidates) out.push_back(candidate.choice());
  return out;
}

}  // namespace paramwire
