// The key of a UDP session whose control connection is TLS: never sent, both sides export it. Layout: wire/FORMAT.md, UDP_KEY.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/siphash.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace paramwire {

inline constexpr std::string_view kUdpKeyLabel = "EXPORTER-paramwire-udp";

// `connection`: a Socket, or a Session of the server. nullopt: it has no TLS. Source: RFC 8446, 7.5.
template <typename Connection>
std::optional<SipKey> exported_udp_key(const Connection& connection, std::uint64_t session) {
  std::array<std::byte, 8> context{};
  store_le(context.data(), session);
  const auto exported = connection.export_key(kUdpKeyLabel, context);
  if (!exported) return std::nullopt;
  return SipKey{load_le<std::uint64_t>(exported->data()), load_le<std::uint64_t>(exported->data() + 8)};
}

}  // namespace paramwire
