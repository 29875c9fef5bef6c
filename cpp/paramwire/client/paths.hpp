// How bytes come to one client: a transport for large fetches and one for small ones, chosen at connect, with the reason for each that was not.
//
//   transport       "auto": the first of shm, verbs, udp, tcp that works, where udp must have room for a full window on its way (else it is for
//                   small fetches only); "shm", "verbs", "udp", "tcp": pinned
//   small_transport ""/"same": as the large ones, but with "auto" udp where it works and large fetches go by tcp; or pinned, as above
//
// A fetch goes one way whole: small when its bytes together are at most `small_bytes`. Chosen once: a lost server is a lost server, not a
// reason to go on slower unseen.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/client/link_pool.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/pull_window.hpp"
#include "paramwire/net/verbs_node.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// In order of preference.
enum class Transport : std::uint8_t { kShm, kVerbs, kUdp, kTcp };
inline constexpr std::size_t kTransports = 4;
std::string_view transport_name(Transport transport) noexcept;

class Paths {
 public:
  // `incarnation`: of the server that is connected now; links to another one are refused.
  Paths(const Endpoint& endpoint, const ClientOptions& options, const Caller& caller, std::function<Incarnation()> incarnation);

  // errors: kInvalid for an unknown name.
  static Status check(const ClientOptions& options);
  // Before anything else, once. `facts`: of the connected server.
  // errors: kUnavailable when a pinned transport can't be had, or with `strict` when one failed that should work; of connecting.
  Status choose(const ServerFacts& facts, Micros deadline);

  // Of the way for a fetch of `bytes`. errors: as LinkPool::borrow.
  Result<LinkPool::Loan> borrow(std::uint64_t bytes, Micros deadline) { return pool(bytes <= options_.small_bytes ? small_ : bulk_).borrow(deadline); }
  // A link of its own over shared memory. errors: kUnavailable when that is not among the ways, with the reason.
  Result<std::unique_ptr<Link>> open_shm_alone(Micros deadline) const;
  Transport bulk() const noexcept { return bulk_; }
  Transport small() const noexcept { return small_; }
  bool has(Transport transport) const noexcept { return bulk_ == transport || small_ == transport; }
  const std::vector<RejectedTransport>& rejected() const noexcept { return rejected_; }
  // Buffers that reads of verbs links go straight into.
  const std::shared_ptr<VerbsNode>& verbs() const noexcept { return verbs_; }
  LinkStats stats(Transport transport) const { return pool(transport).stats(); }

  // Idle links end; those of the next generation are of the server that answers now, whose unix socket may be another one.
  void renew(const ServerFacts& facts);
  void close();

 private:
  LinkPool& pool(Transport transport) const noexcept { return *pools_[static_cast<std::size_t>(transport)]; }
  Result<std::unique_ptr<Link>> open(Transport transport, Micros deadline) const;
  // Whether a link of that kind can be had; the first one waits in its pool then. What can't is put down as rejected.
  Status attempt(Transport transport, const ServerFacts& facts, Micros deadline);
  Status try_shm(const ServerFacts& facts, Micros deadline, bool& failed);
  Status try_verbs(Micros deadline, bool& failed);
  Status try_udp(Micros deadline, bool& failed);
  Status try_udp_bulk();
  Result<Transport> choose_bulk(const ServerFacts& facts, Micros deadline);
  Result<Transport> choose_small(const ServerFacts& facts, Micros deadline);
  void reject(Transport transport, const Error& error, bool failed);
  Error unavailable(std::string_view option, std::string_view wanted) const;

  const Endpoint endpoint_;
  const ClientOptions& options_;
  const Caller& caller_;
  const std::function<Incarnation()> incarnation_;
  const std::shared_ptr<InboundCredit> credit_;  // of all udp links
  mutable std::mutex mutex_;
  Endpoint local_;                               // the server's unix socket, for shm; under the mutex
  Transport bulk_ = Transport::kTcp, small_ = Transport::kTcp;
  std::array<std::optional<bool>, kTransports> works_;  // as far as tried
  std::vector<RejectedTransport> rejected_;
  const std::shared_ptr<VerbsNode> verbs_;
  std::array<std::unique_ptr<LinkPool>, kTransports> pools_;
};

}  // namespace paramwire
