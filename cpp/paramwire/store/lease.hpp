// Leases: pins of a snapshot with a deadline. Pure: the caller brings the time.
//
// A lease protects copied fetches, which verify again anyway; what it buys is that the fetch never sees a change.
// One thread (the store's lock).
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/types.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace paramwire {

class LeaseTable {
 public:
  // `max_leases` bounds what clients can make the server keep. Ids count from `first_id`, below 2^63: drawn at random by every
  // incarnation, so that a renewal or release meant for a former one does not hit somebody else's lease.
  explicit LeaseTable(std::uint32_t max_leases, std::uint64_t first_id = 0) : max_leases_(max_leases), last_id_(first_id) {}

  // `retained` false: the version is readable only because others lease it. Its age then counts from the oldest of their
  // leases, or a chain of short leases could keep it for ever.
  // errors: kBackpressure at the limit.
  Result<std::uint64_t> grant(Version version, Micros ttl, Micros now, bool retained = true);
  // errors: kStale when the lease ended (expired, revoked, released, or never was).
  Status renew(std::uint64_t lease, Micros ttl, Micros now);
  // Ending a lease that is gone is not an error: the wish is met.
  void release(std::uint64_t lease);

  // Ends the leases whose deadline has passed. Call it after the renewals that were queued at `now` have been handled: a
  // server that was paused must not expire what its clients renewed in time.
  void expire(Micros now);
  // Ends the oldest lease of a version below `retained` if it was granted `age` ago or earlier; returns its version. Leases
  // of versions that stay readable anyway keep no memory: ending them would make no room.
  std::optional<Version> revoke_oldest(Version retained, Micros age, Micros now);

  bool holds(Version version) const { return held_.contains(version); }
  std::vector<Version> held_versions() const;
  std::size_t count() const noexcept { return leases_.size(); }
  std::optional<Micros> next_deadline() const;

 private:
  struct Lease {
    Version version;
    Micros granted = 0;
    Micros deadline = 0;
  };
  void end(std::map<std::uint64_t, Lease>::iterator lease);

  std::uint32_t max_leases_;
  std::uint64_t last_id_;
  std::map<std::uint64_t, Lease> leases_;     // by id
  std::map<Version, std::uint32_t> held_;     // leases per version
};

}  // namespace paramwire
