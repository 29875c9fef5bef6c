// The Transport seam's lines for people: what can move blocks on this machine, and why not the rest.
#pragma once

#include "paramwire/base/availability.hpp"

#include <string>
#include <vector>

namespace paramwire {

// What is there for RDMA, found by looking.
struct VerbsFacts {
  std::string kernel;                // release of the running kernel
  std::string distribution;          // "debian", ...
  std::vector<std::string> devices;  // of /sys/class/infiniband
  bool rxe_loaded = false;           // the module rdma_rxe (soft-RoCE: RDMA over any network interface), or built in
  bool rxe_on_disk = false;          // modprobe would find it
  bool modules_on_disk = false;      // /lib/modules has a folder of the running kernel
  std::string library_problem;       // of libibverbs.so.1; empty: it opens
  std::string interface;             // a network interface that soft-RoCE could use; empty: there is only loopback
};
// `root`, `kernel`: as in base/probe.hpp.
VerbsFacts look_for_verbs(const std::string& root, const std::string& kernel);
// The line of "verbs", which this build does not have; what the machine lacks, too, and the commands that would mend it.
Availability verbs_availability(const VerbsFacts& facts);

// One line a transport, but for "shm", whose memory belongs to the Tier seam (server/available.hpp puts both together).
std::vector<Availability> available_transports();

}  // namespace paramwire
