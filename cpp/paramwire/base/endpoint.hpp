// Addresses of servers as people write them.
//
//   "tcp://HOST:PORT", "HOST:PORT", "HOST" (port 7411), "unix:PATH". HOST is a name, an IPv4 address, or an IPv6 address,
//   which takes brackets when a port follows: "[::1]:7000", "::1", "[fe80::1%lo]:7".
// Plain values: any thread.
#pragma once

#include "paramwire/base/error.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace paramwire {

// Unassigned in the IANA registry's user range; what "HOST" alone means.
inline constexpr std::uint16_t kDefaultPort = 7411;

struct Endpoint {
  enum class Kind : std::uint8_t { kTcp, kUnix };
  Kind kind = Kind::kTcp;
  std::string host;        // kTcp: without brackets; an IPv6 zone stays ("fe80::1%lo")
  std::uint16_t port = 0;  // kTcp: 0 asks a listener for any free port
  std::string path;        // kUnix

  static Endpoint tcp(std::string host, std::uint16_t port) { return {Kind::kTcp, std::move(host), port, {}}; }
  static Endpoint unix_socket(std::string path) { return {Kind::kUnix, {}, 0, std::move(path)}; }
  bool operator==(const Endpoint&) const noexcept = default;
  // "tcp://[::1]:7000", "unix:/run/x.sock": parses back to the same value.
  std::string to_string() const;
};

// errors: kInvalid quoting the text, with the position (bytes from 0) at which it stops making sense.
Result<Endpoint> parse_endpoint(std::string_view text);

}  // namespace paramwire
