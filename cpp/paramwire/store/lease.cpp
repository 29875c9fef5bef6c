#include "paramwire/store/lease.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire {

Result<std::uint64_t> LeaseTable::grant(Version version, Micros ttl, Micros now, bool retained) {
  if (leases_.size() >= max_leases_) {
    return Error(Code::kBackpressure, cat("the server holds ", leases_.size(), " leases, its limit: close snapshots or wait"));
  }
  Micros granted = now;
  for (const auto& [other_id, other] : leases_) {
    if (!retained && other.version == version) granted = std::min(granted, other.granted);
  }
  const std::uint64_t id = ++last_id_;
  leases_.emplace(id, Lease{version, granted, now + ttl});
  ++held_[version];
  return id;
}

Status LeaseTable::renew(std::uint64_t lease, Micros ttl, Micros now) {
  const auto it = leases_.find(lease);
  if (it == leases_.end()) {
    return Error(Code::kStale, cat("lease ", lease, " has ended (expired, revoked for room, or released): take a new snapshot"));
  }
  it->second.deadline = std::max(it->second.deadline, now + ttl);
  return {};
}

void LeaseTable::release(std::uint64_t lease) {
  if (const auto it = leases_.find(lease); it != leases_.end()) end(it);
}

void LeaseTable::expire(Micros now) {
  for (auto it = leases_.begin(); it != leases_.end();) {
    const auto next = std::next(it);
    if (it->second.deadline <= now) end(it);
    it = next;
  }
}

std::optional<Version> LeaseTable::revoke_oldest(Version retained, Micros age, Micros now) {
  auto oldest = leases_.end();
  for (auto it = leases_.begin(); it != leases_.end(); ++it) {
    if (it->second.version >= retained || it->second.granted + age > now) continue;
    if (oldest == leases_.end() || it->second.granted < oldest->second.granted) oldest = it;
  }
  if (oldest == leases_.end()) return std::nullopt;
  const Version version = oldest->second.version;
  end(oldest);
  return version;
}

std::vector<Version> LeaseTable::held_versions() const {
  std::vector<Version> out;
  for (const auto& [version, count] : held_) out.push_back(version);
  return out;
}

std::optional<Micros> LeaseTable::next_deadline() const {
  std::optional<Micros> next;
  for (const auto& [id, lease] : leases_) next = next ? std::min(*next, lease.deadline) : lease.deadline;
  return next;
}

void LeaseTable::end(std::map<std::uint64_t, Lease>::iterator lease) {
  const auto held = held_.find(lease->second.version);
  if (--held->second == 0) held_.erase(held);
  leases_.erase(lease);
}

}  // namespace paramwire
