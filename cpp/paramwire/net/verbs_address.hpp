// The addresses of a control connection as GIDs, which is what RoCE makes of them.
#pragma once

#include "paramwire/net/udp_socket.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <cstring>
#include <optional>

namespace paramwire {

// IPv4 as ::ffff:a.b.c.d. nullopt for none (a unix socket).
inline std::optional<Gid> gid_of(const std::optional<DatagramAddress>& address) noexcept {
  if (!address) return std::nullopt;
  Gid out;
  std::memcpy(out.data(), address->bytes().data(), out.size());
  return out;
}

}  // namespace paramwire
