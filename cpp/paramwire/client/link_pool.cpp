#include "paramwire/client/link_pool.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire {

namespace {

DatagramStats sum(const DatagramStats& a, const DatagramStats& b) noexcept {
  DatagramStats out = a;
  out.gets += b.gets;
  out.received += b.received;
  out.bytes_needed += b.bytes_needed;
  out.bytes_asked += b.bytes_asked;
  out.lost += b.lost;
  out.duplicates += b.duplicates;
  out.refused += b.refused;
  out.forged += b.forged;
  out.timeouts += b.timeouts;
  out.socket_drops += b.socket_drops;
  out.send_failures += b.send_failures;
  out.gso_disabled += b.gso_disabled;
  out.busy_poll_us += b.busy_poll_us;
  out.size_steps += b.size_steps;
  out.receive_buffer_bytes = std::max(a.receive_buffer_bytes, b.receive_buffer_bytes);
  out.receive_buffer_asked_bytes = std::max(a.receive_buffer_asked_bytes, b.receive_buffer_asked_bytes);
  out.segment_bytes = std::max(a.segment_bytes, b.segment_bytes);
  out.window_bytes = std::max(a.window_bytes, b.window_bytes);
  out.round_trip_us = std::max(a.round_trip_us, b.round_trip_us);
  return out;
}

VerbsStats sum(const VerbsStats& a, const VerbsStats& b) noexcept {
  VerbsStats out = a;
  out.reads += b.reads;
  out.doorbells += b.doorbells;
  out.headers += b.headers;
  out.direct_bytes += b.direct_bytes;
  out.control_calls += b.control_calls;
  out.sleeps += b.sleeps;
  out.failures += b.failures;
  if (b.failures > 0) out.failed_status = b.failed_status;
  out.regions = std::max(a.regions, b.regions);
  out.mtu_bytes = std::max(a.mtu_bytes, b.mtu_bytes);
  out.slice_bytes = std::max(a.slice_bytes, b.slice_bytes);
  out.reads_on_wire = std::max(a.reads_on_wire, b.reads_on_wire);
  out.gid_index = std::max(a.gid_index, b.gid_index);
  out.staging_bytes = std::max(a.staging_bytes, b.staging_bytes);
  return out;
}

}  // namespace

LinkStats operator+(const LinkStats& a, const LinkStats& b) {
  LinkStats out = a;
  out.reads += b.reads;
  out.bytes += b.bytes;
  out.wire_bytes += b.wire_bytes;
  out.blocks_verified += b.blocks_verified;
  out.extents_deferred += b.extents_deferred;
  out.changed += b.changed;
  out.corrupt += b.corrupt;
  out.views += b.views;
  out.views_verified += b.views_verified;
  out.datagram = sum(a.datagram, b.datagram);
  out.verbs = sum(a.verbs, b.verbs);
  if (!b.path.empty()) out.path = b.path;
  return out;
}

Result<LinkPool::Loan> LinkPool::borrow(Micros deadline) {
  std::unique_lock lock(mutex_);
  if (idle_.empty() && lent_ >= links_max_) {
    if (!wait_on(returned_, lock, deadline, [this] { return !idle_.empty() || lent_ < links_max_; })) {
      return Error(Code::kTimeout, cat("all ", links_max_, " links of this client were in use until the deadline"));
    }
  }
  ++lent_;
  const std::uint64_t generation = generation_;
  if (!idle_.empty()) {
    auto link = std::move(idle_.back());
    idle_.pop_back();
    away_.emplace_back(link.get(), link->stats());
    return Loan(*this, std::move(link), generation);
  }
  lock.unlock();
  auto link = open_(deadline);
  if (!link.ok()) {
    lock.lock();
    --lent_;
    returned_.notify_one();
    return std::move(link).error();
  }
  return Loan(*this, std::move(*link), generation);
}

void LinkPool::take_back(std::unique_ptr<Link> link, std::uint64_t generation) {
  const std::lock_guard lock(mutex_);
  --lent_;
  std::erase_if(away_, [&](const auto& known) { return known.first == link.get(); });
  if (closed_ || link->broken() || generation != generation_) {
    dropped_ = dropped_ + link->stats();
  } else {
    idle_.push_back(std::move(link));
  }
  returned_.notify_one();
}

void LinkPool::renew() {
  const std::lock_guard lock(mutex_);
  ++generation_;
  drop_idle();
}

void LinkPool::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  drop_idle();
}

void LinkPool::drop_idle() {
  for (const auto& link : idle_) dropped_ = dropped_ + link->stats();
  idle_.clear();
}

LinkStats LinkPool::stats() const {
  const std::lock_guard lock(mutex_);
  LinkStats out = dropped_;
  for (const auto& link : idle_) out = out + link->stats();
  for (const auto& [link, stats] : away_) out = out + stats;
  return out;
}

}  // namespace paramwire
