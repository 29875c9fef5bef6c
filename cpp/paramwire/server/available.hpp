// What this build has and what this machine gives it, seam by seam, for people (`paramwire doctor`).
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

struct SeamAvailability {
  std::string seam;  // plural: "transports", "tiers", "codecs", "coordinators"
  std::vector<Availability> lines;
};

// Looks, each time: opens and closes files, sockets, libraries and RDMA devices, and takes one arena of 2 MiB a tier. Any thread.
// blocks: up to a quarter of a second, where something swallows what is sent to etcd's port.
std::vector<SeamAvailability> available_seams();

// Every RDMA device's ports and GIDs, as they are now; none where the line of "verbs" says why. Any thread.
std::vector<PortFacts> rdma_ports();

// How much memory a server here could take now, what bounds that, and which file says so (store/memory_limit.hpp).
struct MemoryRoom {
  std::uint64_t available_bytes = 0;
  std::uint64_t limit_bytes = 0;
  std::string source;
};
MemoryRoom memory_room();

// What the core was built with and what it was linked with, name and version.
std::vector<std::pair<std::string, std::string>> build_versions();

}  // namespace paramwire
