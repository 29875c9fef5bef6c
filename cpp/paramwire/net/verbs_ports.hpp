// The tables that verbs_route chooses from, read from the devices and from this network namespace.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

class VerbsApi;

// A network interface of this network namespace.
struct NetworkInterface {
  std::uint32_t index = 0;
  std::string name;
  std::vector<Gid> addresses;
  std::vector<std::uint8_t> hardware;  // its link-layer address, 6 bytes on Ethernet
};
// As getifaddrs(3) lists them; none where it fails.
std::vector<NetworkInterface> network_interfaces();

// Opens every device, asks it for itself, its ports and their GIDs, and closes it again. What fails is a row whose problem names call, errno,
// limit and next step. A GID gets the interface whose index the device names, but only where that interface of this namespace has the
// address: numbers of interfaces mean something else in each namespace, and the device tells of all of them.
//
// errors: kUnavailable when the list of devices can't be had.      blocks: on the devices, milliseconds      threads: any
Result<std::vector<PortFacts>> read_ports(VerbsApi& api);
Result<std::vector<PortFacts>> read_ports(VerbsApi& api, std::span<const NetworkInterface> interfaces);

// Our own address towards `target` as the kernel would route a datagram there; nullopt where it can't, and for link-local targets, which
// need an interface. Sends nothing.
std::optional<Gid> route_source(const Gid& target);

// What to say when registering `bytes` bytes at a device (or making a queue, which locks memory, too) failed with `error_number`: kUnavailable with
// the bytes, and for ENOMEM the limit on locked memory, what of it is taken, and how to raise it.
// `what`: "registering the arena at rx0". `bytes` 0: not known.
Error registration_error(std::string_view what, std::size_t bytes, int error_number);

// Registers that much anonymous memory at the device for local writes, and gives it back. errors: kUnavailable, saying which call failed.
Status try_registration(VerbsApi& api, const std::string& device, std::size_t bytes);

}  // namespace paramwire
