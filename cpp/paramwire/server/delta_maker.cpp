#include "paramwire/server/delta_maker.hpp"

#include "paramwire/base/thread.hpp"
#include "paramwire/codec/delta.hpp"
#include "paramwire/codec/payload.hpp"

#include <algorithm>
#include <utility>

namespace paramwire {

namespace {

// Deltas that wait to be made: more than any model has blocks that one publish changes, less than a client could make us remember.
constexpr std::size_t kWaitingMax = std::size_t{1} << 18;
// One thread makes them: a server's processors are for what it serves.
constexpr unsigned kThreads = 1;

// Raw bytes of a held block: its payload, or `decoded` with what that decodes to.
Result<std::span<const std::byte>> raw_bytes(const BlockStore::Held& held, std::vector<std::byte>& decoded) {
  if (held.codec == CodecId::kRaw) return held.payload;
  decoded.resize(static_cast<std::size_t>(held.raw_size));
  PARAMWIRE_CHECK(decode_payload(held.codec, held.dtype, held.payload, decoded, kThreads));
  return std::span<const std::byte>(decoded);
}

}  // namespace

DeltaMaker::~DeltaMaker() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

DeltaMaker::Found DeltaMaker::find(BlockId block, Version version, Version base, Micros now) {
  asked_ = now;
  const Key key{block, version, base};
  if (base == version) return {};
  want(key);
  const auto known = deltas_.find(key);
  if (known == deltas_.end()) return {};
  return {known->second.bytes, !known->second.done};
}

// Notes that this delta is to be made, unless it is known, or its block has changed since, or there is no room.
void DeltaMaker::want(const Key& key) {
  if (deltas_.contains(key) || queue_.size() >= kWaitingMax || counters_.kept_bytes >= options_.bytes_max) return;
  const auto newest = store_.newest();
  const auto manifest = newest ? store_.manifest(*newest) : nullptr;
  const auto hit = manifest ? manifest->find(key.block) : std::nullopt;
  if (!hit || hit->entry.kind != EntryKind::kBlock || hit->entry.version != key.version || hit->entry.raw_size > options_.block_bytes_max) return;
  if (!readable(key.block, key.base)) return;  // and so there are no more keys than blocks in readable versions, whatever is asked
  if (!thread_.joinable()) {
    auto thread = start_thread("pw-deltas", [this] { loop(); });
    if (!thread.ok()) return;
    thread_ = std::move(*thread);
  }
  deltas_.emplace(key, Made{});
  queue_.push_back(key);
  wake_.notify_one();
}

bool DeltaMaker::readable(BlockId block, Version version) const {
  for (const Version each : store_.versions()) {
    const auto hit = store_.manifest(each)->find(block);
    if (hit && hit->entry.kind == EntryKind::kBlock && hit->entry.version == version) return true;
  }
  return false;
}

void DeltaMaker::published(Micros now) {
  const auto newest = store_.newest();
  const auto manifest = newest ? store_.manifest(*newest) : nullptr;
  if (!manifest) return;
  std::erase_if(deltas_, [&](const auto& known) {
    const auto hit = manifest->find(known.first.block);
    if (hit && hit->entry.version == known.first.version) return false;
    if (known.second.bytes) {
      --counters_.kept;
      counters_.kept_bytes -= known.second.bytes->size();
    }
    return true;
  });
  if (!asked_ || now - *asked_ > options_.interest) return;
  for (const Version older : store_.versions()) {
    if (older == *newest) continue;
    const auto base = store_.manifest(older);
    manifest->for_each([&](const Manifest::Hit& hit) {
      if (hit.entry.kind != EntryKind::kBlock || hit.entry.version != *newest) return true;
      const auto was = base->find(hit.entry.id);
      if (was && was->entry.kind == EntryKind::kBlock && was->entry.dtype == hit.entry.dtype && was->entry.raw_size == hit.entry.raw_size) {
        want({hit.entry.id, hit.entry.version, was->entry.version});
      }
      return true;
    });
  }
}

void DeltaMaker::sent(std::uint64_t bytes) noexcept {
  ++counters_.sent;
  counters_.sent_bytes += bytes;
}

DeltaStats DeltaMaker::stats() const noexcept {
  DeltaStats out = counters_;
  out.waiting = queue_.size();
  return out;
}

void DeltaMaker::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return over_ || !queue_.empty(); });
    if (over_) return;
    const Key key = queue_.front();
    queue_.pop_front();
    if (deltas_.contains(key)) make(lock, key);  // else its block changed meanwhile
  }
}

// The lock is open while bytes are looked at: held slots stay.
void DeltaMaker::make(std::unique_lock<std::mutex>& lock, const Key& key) {
  const auto finish = [&](std::shared_ptr<const Bytes> bytes) {
    const auto known = deltas_.find(key);
    if (known == deltas_.end()) return;
    known->second = {std::move(bytes), true};
    if (!known->second.bytes) return;
    ++counters_.made;
    ++counters_.kept;
    counters_.kept_bytes += known->second.bytes->size();
  };
  auto next = store_.hold(key.block, key.version);
  if (!next.ok()) return finish(nullptr);
  auto base = store_.hold(key.block, key.base);
  if (!base.ok()) {
    store_.unhold(next->slot, steady_clock().now());
    return finish(nullptr);
  }
  lock.unlock();
  std::shared_ptr<const Bytes> bytes;
  bool useless = false;
  if (base->dtype == next->dtype && base->raw_size == next->raw_size) {
    std::vector<std::byte> base_decoded, next_decoded;
    const auto from = raw_bytes(*base, base_decoded);
    const auto to = raw_bytes(*next, next_decoded);
    if (from.ok() && to.ok()) {
      auto made = encode_delta(next->dtype, *from, {key.base}, *to, kThreads);
      useless = made.ok() && made->size() >= next->payload.size();
      if (made.ok() && !useless) bytes = std::make_shared<const Bytes>(std::move(*made));
    }
  }
  lock.lock();
  store_.unhold(base->slot, steady_clock().now());
  store_.unhold(next->slot, steady_clock().now());
  counters_.useless += useless;
  finish(std::move(bytes));
}

}  // namespace paramwire
