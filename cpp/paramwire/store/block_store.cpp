#include "paramwire/store/block_store.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>

namespace paramwire {

BlockStore::BlockStore(Tier& tier, PinSource* pins, const BlockStoreOptions& options)
    : tier_(tier), pins_(pins), options_(options), slots_(tier), leases_(options.leases_max, options.incarnation.low >> 1) {
  assert(options.epoch != 0);
}

// ---------------------------------------------------------------- read

Result<BlockStore::Opened> BlockStore::open(const std::optional<Version>& want, Micros lease_ttl, Micros now) {
  if (versions_.empty()) return Error(Code::kNotFound, "nothing is published yet: publish first, or wait for a version");
  auto it = std::prev(versions_.end());
  if (want) {
    const Version newest = it->first;
    it = versions_.find(*want);
    if (it == versions_.end()) {
      if (*want > newest) return Error(Code::kStale, cat("version ", *want, " is not there yet, the newest is ", newest, ": wait for it"));
      return Error(Code::kStale, cat("version ", *want, " is gone, readable are ", versions_.begin()->first, " to ", newest,
                                     ": take a newer snapshot"));
    }
  }
  Opened opened{it->second, 0, 0};
  if (lease_ttl > 0) {
    opened.lease_ttl = std::min(lease_ttl, options_.lease_ttl_max);
    const bool retained = std::distance(it, versions_.end()) <= static_cast<std::ptrdiff_t>(options_.retained_versions);
    PARAMWIRE_TRY(lease, leases_.grant(it->first, opened.lease_ttl, now, retained));
    opened.lease = lease;
  }
  return opened;
}

Result<Micros> BlockStore::renew(LeaseId lease, Micros ttl, Micros now) {
  const Micros granted = std::min(ttl, options_.lease_ttl_max);
  PARAMWIRE_CHECK(leases_.renew(lease, granted, now));
  return granted;
}

void BlockStore::release(LeaseId lease, Micros now) {
  leases_.release(lease);
  retire(now);
}

std::shared_ptr<const Manifest> BlockStore::manifest(Version version) const {
  const auto it = versions_.find(version);
  return it == versions_.end() ? nullptr : it->second;
}

std::vector<Version> BlockStore::versions() const {
  std::vector<Version> out;
  for (const auto& [version, manifest] : versions_) out.push_back(version);
  return out;
}

Result<BlockStore::Held> BlockStore::hold(BlockId block, Version version) {
  // Newest first: nearly every fetch is for it, and an unchanged block has one entry version in all of them.
  std::optional<Version> other;
  for (auto it = versions_.rbegin(); it != versions_.rend(); ++it) {
    const auto hit = it->second->find(block);
    if (!hit || hit->entry.kind != EntryKind::kBlock) continue;
    if (hit->entry.version != version) {
      if (!other) other = hit->entry.version;
      continue;
    }
    const SlotIndex slot = hit->tag;
    ++holds_[slot];
    return Held{slot, slots_.payload(slot), slots_.extent_table(slot), hit->entry.codec, hit->entry.dtype, hit->entry.raw_size};
  }
  if (!other) return Error(Code::kNotFound, cat("block ", block, " is in no readable snapshot"));
  return Error(Code::kStale, cat("block ", block, " at version ", version, " is gone or not there yet, the newest readable is ",
                                 *other, ": take a newer snapshot"));
}

void BlockStore::unhold(SlotIndex slot, Micros) {
  const auto it = holds_.find(slot);
  assert(it != holds_.end());
  if (it != holds_.end() && --it->second == 0) holds_.erase(it);
}

// ---------------------------------------------------------------- reclaim

void BlockStore::tick(Micros now) {
  leases_.expire(now);
  for (auto it = publishes_.begin(); it != publishes_.end();) {
    const auto next = std::next(it);
    if (it->second.active + options_.publish_idle_max <= now) drop(it);
    it = next;
  }
  retire(now);
}

// Versions beyond the newest few stay only while leased.
void BlockStore::retire(Micros) {
  std::size_t older = versions_.size() > options_.retained_versions ? versions_.size() - options_.retained_versions : 0;
  for (auto it = versions_.begin(); older > 0; --older) {
    const bool keep = leases_.holds(it->first) && !options_.omitted.lease;
    it = keep ? std::next(it) : versions_.erase(it);
  }
  reclaim();
}

bool BlockStore::needed(SlotIndex slot, Version to) const {
  if (holds_.contains(slot)) return true;
  const SlotHeader header = slots_.header(slot);
  const auto first = versions_.lower_bound({header.epoch, header.version_counter});
  return first != versions_.end() && first->first < to;
}

void BlockStore::reclaim() {
  bool candidates = false;
  for (const Superseded& group : superseded_) {
    for (const SlotIndex slot : group.slots) {
      if (needed(slot, group.to)) continue;
      slots_.withdraw(slot);
      candidates = true;
    }
  }
  if (!candidates) return;

  // Withdrawal before the scan, pins after their own fence before they read seq: whichever comes second sees the other
  // (the store-buffering pattern: both sides need the full fence).
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::vector<PinnedWord> pinned;
  if (pins_ != nullptr && !options_.omitted.quarantine) pins_->collect(pinned);
  std::sort(pinned.begin(), pinned.end(), [](const PinnedWord& a, const PinnedWord& b) { return a.word < b.word; });

  quarantined_slots_ = quarantined_bytes_ = 0;
  quarantine_pid_ = 0;
  for (Superseded& group : superseded_) {
    std::erase_if(group.slots, [&](SlotIndex slot) {
      if (needed(slot, group.to)) return false;
      const std::uint64_t word = pin_word(slots_.locator(slot));
      const auto pin = std::lower_bound(pinned.begin(), pinned.end(), word, [](const PinnedWord& a, std::uint64_t w) { return a.word < w; });
      if (pin != pinned.end() && pin->word == word) {
        ++quarantined_slots_;
        quarantined_bytes_ += slots_.payload(slot).size();
        quarantine_pid_ = pin->pid;
        return false;
      }
      slots_.close(slot);
      ++counters_.slots_reclaimed;
      return true;
    });
  }
  std::erase_if(superseded_, [](const Superseded& group) { return group.slots.empty(); });
}

bool BlockStore::revoke_for_room(Micros now) {
  if (versions_.size() <= options_.retained_versions) return false;
  const auto oldest_retained = std::prev(versions_.end(), static_cast<std::ptrdiff_t>(options_.retained_versions));
  if (!leases_.revoke_oldest(oldest_retained->first, options_.lease_age_max, now)) return false;
  ++counters_.leases_revoked;
  retire(now);
  return true;
}

void BlockStore::close_slot(SlotIndex slot) {
  slots_.withdraw(slot);
  slots_.close(slot);
}

StoreStats BlockStore::stats() const {
  StoreStats out = counters_;
  if (!versions_.empty()) {
    const Manifest& newest = *versions_.rbegin()->second;
    out.blocks = newest.entry_count();
    out.raw_bytes = newest.total_raw_bytes();
  }
  out.versions_readable = versions_.size();
  out.leases = leases_.count();
  out.publishes_open = publishes_.size();
  out.slots_in_use = slots_.slots_in_use();
  out.used_bytes = tier_.used_bytes();
  out.committed_bytes = tier_.committed_bytes();
  out.limit_bytes = tier_.limit_bytes();
  for (const Superseded& group : superseded_) out.superseded_slots += group.slots.size();
  out.quarantined_slots = quarantined_slots_;
  out.quarantined_bytes = quarantined_bytes_;
  return out;
}

}  // namespace paramwire
