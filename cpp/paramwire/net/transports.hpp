// The Transport seam's lines for people: what can move blocks on this machine, and why not the rest.
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <string>
#include <vector>

namespace paramwire {

class VerbsApi;

// What is there for RDMA, found by looking.
struct VerbsFacts {
  std::string kernel;                // release of the running kernel
  std::string distribution;          // "debian", ...
  std::vector<std::string> devices;  // of /sys/class/infiniband
  std::vector<std::string> fileless;  // those of them whose file in /dev/infiniband is not here: containers get none by themselves
  bool uverbs_loaded = false;        // the module ib_uverbs, by which programs reach devices, or built in
  bool rxe_loaded = false;           // the module rdma_rxe (soft-RoCE: RDMA over any network interface), or built in
  bool rxe_on_disk = false;          // modprobe would find it
  bool modules_on_disk = false;      // /lib/modules has a folder of the running kernel
  std::string library_problem;       // of libibverbs.so.1, the loader's words; empty: it opens
  std::string library_unfit;         // it opens and does not do: too old, or too late for forks
  std::string interface;             // a network interface that soft-RoCE could use; empty: there is only loopback

  // By look_at_devices(), where there are devices and a library.
  std::vector<PortFacts> ports;
  std::string list_problem;          // why the library lists no device
  std::string memory_problem;        // why the best port's device takes no memory
};
// `root`, `kernel`: as in base/probe.hpp. Opens no device.
VerbsFacts look_for_verbs(const std::string& root, const std::string& kernel);
// Reads every device's table and registers 4 MiB for a moment at the one that would be chosen. blocks: on the devices, milliseconds
void look_at_devices(VerbsFacts& facts, VerbsApi& api);
// Both, of this machine.
VerbsFacts verbs_here();
// The line of "verbs": device, port and GID that a peer not known yet would be reached by; or all that is in the way, with the commands that would mend it.
Availability verbs_availability(const VerbsFacts& facts);

// One line a transport, but for "shm", whose memory belongs to the Tier seam (server/available.hpp puts both together).
std::vector<Availability> available_transports();

}  // namespace paramwire
