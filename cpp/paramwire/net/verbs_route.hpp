// Which device, port and GID to reach a peer with: choices over tables, no device touched.
//
// A GID names a port to others; a RoCE port has one for each address of its network interface, in two forms (v1 and v2, which is UDP over IP).
// Sources: InfiniBand specification 1.4, annexes A16 (RoCE) and A17 (RoCE v2); ibv_query_gid_table(3); Linux Documentation/ABI/stable/sysfs-class-infiniband.
#pragma once

#include "paramwire/base/error.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// 16 bytes as on the wire. Of RoCE: an IPv6 address, or an IPv4 one as ::ffff:a.b.c.d. Of InfiniBand: subnet prefix and port GUID.
using Gid = std::array<std::uint8_t, 16>;

enum class GidType : std::uint8_t { kInfiniBand = 0, kRoceV1 = 1, kRoceV2 = 2 };
std::string_view gid_type_name(GidType type) noexcept;  // "IB", "RoCE v1", "RoCE v2"

struct GidRow {
  std::uint32_t index = 0;
  Gid gid{};
  GidType type = GidType::kRoceV2;
  std::string interface;     // network interface; empty: none in this network namespace (then RoCE can't use the row), or InfiniBand
};

// One port of a device, as found. A device that can't be opened is one row with a problem.
struct PortFacts {
  std::string device;        // "rx0"
  std::uint8_t port = 1;
  bool ethernet = true;      // RoCE; else InfiniBand
  bool software = false;     // soft-RoCE (rxe): the CPU does it, over a network interface
  std::string state = "ACTIVE";  // "DOWN", "INIT", "ARMED", ...; other than ACTIVE: not usable
  std::uint16_t mtu_active = 0;  // RDMA payload of a packet, bytes: 256 to 4096
  std::uint16_t mtu_max = 0;
  std::uint16_t lid = 0;     // InfiniBand only
  std::uint32_t message_max = 0;  // bytes of one work request
  std::uint32_t reads_max = 0;    // READs outstanding, as requester and as responder
  std::vector<GidRow> gids;
  std::string problem;       // why nothing of it can be used; empty: nothing known
};

// What the user pins. Empty: free choice.
struct VerbsWish {
  std::string device;                        // "rx0", or with its port "rx0:1"
  std::optional<std::uint32_t> gid_index;    // with `device`, or where there is only one
};

// What is known of the other end. Nothing at all over a unix socket; a loopback address says nothing either.
struct VerbsPeer {
  std::optional<Gid> gid;       // its port's, once it said so; goes before `address`
  std::optional<GidType> type;  // of that GID: RoCE v1 and v2 are different protocols and never meet
  std::optional<Gid> address;   // where its control connection goes to
  // Our own address on the way to `address`, as the kernel's routing chose it; not used where `gid` lies in another network than `address`.
  // With route_source() of `gid` (net/verbs_ports.hpp), leave `address` empty.
  std::optional<Gid> source;
  std::string interface;        // the scope of a link-local address ("v0"); empty: not known
};

struct VerbsChoice {
  std::string device;
  std::uint8_t port = 1;
  std::uint32_t gid_index = 0;
  Gid gid{};
  GidType type = GidType::kRoceV2;
  bool ethernet = true;
  std::uint16_t mtu = 0;       // active, bytes
  std::uint16_t lid = 0;
  std::uint32_t message_max = 0;
  std::uint32_t reads_max = 0;
  std::string interface;
  bool software = false;
  // "rx0 port 1 GID 3 (RoCE v2, 10.0.0.5, v0)"
  std::string to_string() const;
};

// Every usable row, best first; to be tried in this order, since what is known of a path is never all.
//   1. the wish, if one was made: nothing else is considered;
//   2. rows that can reach the peer before those that can't, as far as its type and its kind of address tell: IPv4 with IPv4, link-local with link-
//      local (on the same interface where that is known), InfiniBand with InfiniBand;
//   3. the row whose address the kernel's route to the peer uses; then one in the same network as the peer (/24, /64: a guess);
//   4. global addresses before link-local ones; RoCE v2 before v1; larger MTU; then in the order of the table.
// errors: kUnavailable when no row is usable, with every row and its reason; kInvalid for a wish that names what is not there, with the table.
Result<std::vector<VerbsChoice>> rank_choices(std::span<const PortFacts> ports, const VerbsPeer& peer, const VerbsWish& wish);

// Why a row can't be used ("the port is DOWN"); empty when it can. Of a whole port: what holds for all its rows.
std::string row_problem(const PortFacts& port, const GidRow& row);
std::string port_problem(const PortFacts& port);

// The table as text, a line a row, each with an end of line, with the reason where a row can't be used.
std::string to_string(std::span<const PortFacts> ports);
// An IPv4 address as such ("10.0.0.5"), everything else as inet_ntop(3) writes IPv6.
std::string to_string(const Gid& gid);
// Of an IPv4 or IPv6 address text, without a scope; nullopt for anything else.
std::optional<Gid> parse_gid(std::string_view text);

bool is_ipv4(const Gid& gid) noexcept;
bool is_link_local(const Gid& gid) noexcept;  // fe80::/10
bool is_loopback(const Gid& gid) noexcept;    // 127.0.0.0/8, ::1

}  // namespace paramwire
