// The key of a UDP session whose control connection is TLS: never sent, both sides export it. Layout: wire/FORMAT.md, UDP_KEY.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/siphash.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace paramwire {

inline constexpr std::string_view kUdpKeyLabel = "EXPORTER-paramwire-udp";

// `connection`: a Socket, or a ServerSession. nullopt: it has no TLS. No context: the session's number is under every MAC, so
// what was sent for one session of a connection says nothing to another. Source: RFC 8446, 7.5.
template <typename Connection>
std::optional<SipKey> exported_udp_key(const Connection& connection) {
  const auto exported = connection.export_key(kUdpKeyLabel, {});
  if (!exported) return std::nullopt;
  return SipKey{load_le<std::uint64_t>(exported->data()), load_le<std::uint64_t>(exported->data() + 8)};
}

}  // namespace paramwire
