#include "paramwire/server/available.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/codec.hpp"
#include "paramwire/control/coordinator.hpp"
#include "paramwire/net/transports.hpp"
#include "paramwire/store/memory_limit.hpp"
#include "paramwire/store/tier.hpp"

#include <openssl/crypto.h>
#include <utility>

namespace paramwire {

std::vector<SeamAvailability> available_seams() {
  std::vector<Availability> tiers = available_tiers();
  std::vector<Availability> transports = available_transports();
  for (const Availability& tier : tiers) {
    // Readers map the memory of the tier "memory": where that can't be had, neither can shm.
    if (tier.name != "memory") continue;
    Availability shm{"shm", tier.usable, tier.usable ? "same host, over a unix socket of the server" : tier.reason, tier.next};
    transports.insert(transports.begin(), std::move(shm));
    break;
  }
  return {{"transports", std::move(transports)},
          {"tiers", std::move(tiers)},
          {"codecs", available_codecs()},
          {"coordinators", available_coordinators()}};
}

std::vector<PortFacts> rdma_ports() { return verbs_here().ports; }

MemoryRoom memory_room() {
  const MemoryLimit limit = memory_limit();
  return {limit.available_bytes, limit.limit_bytes, limit.source};
}

std::vector<std::pair<std::string, std::string>> build_versions() {
#if defined(__clang__)
  const char* compiler = "clang ";
#else
  const char* compiler = "GCC ";
#endif
  return {{"compiler", cat(compiler, __VERSION__)}, {"openssl", OpenSSL_version(OPENSSL_VERSION_STRING)}};
}

}  // namespace paramwire
