#include "paramwire/client/mirror.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/client/client_impl.hpp"
#include "paramwire/codec/delta.hpp"
#include "paramwire/wire/delta_message.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <thread>
#include <utility>

namespace paramwire {

namespace {

constexpr unsigned kThreadsMax = 4;
// Between two questions for deltas that are being made: short at first, since most take milliseconds.
constexpr Micros kAskAgainMin = 1'000, kAskAgainMax = 50'000;

// A block that changed, on its way into its tensor's new memory.
struct Changed {
  ManifestEntry entry;                      // its views point into the snapshot's manifest
  std::span<std::byte> target;
  std::span<const std::byte> base;          // what is held of it; empty: nothing that a delta could begin with
  Version base_version;
  bool done = false;
};

}  // namespace

// One way from a state to the next.
class Mirror::Update {
 public:
  Update(Client& client, const MirrorOptions& options, const Incarnation& incarnation, Micros deadline)
      : client_(client), options_(options), incarnation_(incarnation), deadline_(deadline) {}

  Result<std::shared_ptr<const State>> run(const std::shared_ptr<const State>& before, const std::shared_ptr<Snapshot>& snapshot) {
    auto next = std::make_shared<State>();
    next->version = snapshot->version();
    next->incarnation = incarnation_;
    PARAMWIRE_CHECK(lay_out(*snapshot, before.get(), *next));
    if (options_.deltas) PARAMWIRE_CHECK(take_deltas());
    PARAMWIRE_CHECK(fetch_rest(*snapshot));
    for (const auto& [target, aliases] : aliases_) {
      const auto found = next->tensors.find(target);
      if (found == next->tensors.end()) continue;
      for (const std::string& alias : aliases) next->tensors.emplace(alias, found->second);
    }
    for (const std::string& helper : helpers_) next->tensors.erase(helper);
    return std::shared_ptr<const State>(std::move(next));
  }

  MirrorStats counts;

 private:
  using Blocks = std::map<std::string_view, std::vector<ManifestEntry>>;

  // Memory for every tensor of the version: the one before's where nothing changed.
  Status lay_out(const Snapshot& snapshot, const State* before, State& next) {
    Blocks blocks;
    std::map<std::string_view, std::string_view> target_of;
    snapshot.manifest().for_each([&](const Manifest::Hit& hit) {
      if (hit.entry.kind == EntryKind::kAlias) target_of[hit.entry.tensor] = hit.entry.target;
      else blocks[hit.entry.tensor].push_back(hit.entry);
      return true;
    });
    if (options_.tensors.empty()) {
      for (const auto& [alias, target] : target_of) aliases_[std::string(target)].emplace_back(alias);
    } else {
      Blocks wanted;
      for (const std::string& name : options_.tensors) {
        const auto alias = target_of.find(name);
        const std::string_view target = alias == target_of.end() ? std::string_view(name) : alias->second;
        const auto found = blocks.find(target);
        if (found == blocks.end()) return snapshot.find(name).error();  // which names the nearest
        if (alias != target_of.end()) {
          aliases_[std::string(target)].push_back(name);
          if (std::find(options_.tensors.begin(), options_.tensors.end(), target) == options_.tensors.end()) helpers_.emplace_back(target);
        }
        wanted.insert(*found);
      }
      blocks = std::move(wanted);
    }
    for (auto& [name, entries] : blocks) {
      const Tensor* old = held(before, name);
      std::sort(entries.begin(), entries.end(), [](const ManifestEntry& a, const ManifestEntry& b) {
        return shard_rows(a.shape, a.shard)->first < shard_rows(b.shape, b.shard)->first;
      });
      PARAMWIRE_TRY(tensor, one_tensor(entries, old));
      if (tensor != nullptr) {
        next.tensors.emplace(name, std::move(tensor));
      } else {
        next.tensors.emplace(name, held_pointer(before, name));
        for (const ManifestEntry& entry : entries) counts.kept_bytes += entry.raw_size;
      }
    }
    return {};
  }

  std::shared_ptr<const Tensor> held_pointer(const State* before, std::string_view name) const {
    if (before == nullptr) return nullptr;
    if (const auto found = before->tensors.find(name); found != before->tensors.end()) return found->second;
    // Wanted under other names alone.
    if (const auto aliases = aliases_.find(std::string(name)); aliases != aliases_.end()) {
      for (const std::string& alias : aliases->second) {
        if (const auto found = before->tensors.find(alias); found != before->tensors.end()) return found->second;
      }
    }
    return nullptr;
  }
  const Tensor* held(const State* before, std::string_view name) const { return held_pointer(before, name).get(); }

  // nullptr: it is `old`, unchanged. Blocks that have to come are added to changed_.
  Result<std::shared_ptr<const Tensor>> one_tensor(const std::vector<ManifestEntry>& entries, const Tensor* old) {
    auto tensor = std::make_shared<Tensor>();
    const ManifestEntry& first = entries.front();
    tensor->dtype = first.dtype;
    tensor->shape = first.shape;
    std::uint64_t at = 0;
    for (const ManifestEntry& entry : entries) {
      tensor->parts.push_back({entry.id, entry.version, entry.crc64, at, entry.raw_size});
      tensor->version = std::max(tensor->version, entry.version);
      at += entry.raw_size;
    }
    PARAMWIRE_TRY(whole, block_bytes(first.dtype, first.shape, Shard::whole()));
    if (at != whole) {
      return Error(Code::kNotFound, cat("tensor \"", first.tensor, "\" has ", whole, " bytes, of which the blocks of this server hold ", at));
    }
    const auto same = [&](const Part& a, const Part& b) { return a.block == b.block && a.version == b.version && a.crc64 == b.crc64; };
    const bool alike = old != nullptr && old->dtype == tensor->dtype && old->shape == tensor->shape;
    if (alike && std::equal(old->parts.begin(), old->parts.end(), tensor->parts.begin(), tensor->parts.end(), same)) return std::shared_ptr<const Tensor>();
    PARAMWIRE_TRY(memory, Buffer::allocate(static_cast<std::size_t>(whole)));
    tensor->bytes = std::move(memory);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const Part& part = tensor->parts[i];
      const auto target = tensor->bytes.span().subspan(static_cast<std::size_t>(part.offset), static_cast<std::size_t>(part.size));
      const Part* was = alike ? part_of(*old, part.block) : nullptr;
      const auto base = was == nullptr || was->size != part.size ? std::span<const std::byte>()
                                                                 : old->bytes.span().subspan(static_cast<std::size_t>(was->offset), static_cast<std::size_t>(was->size));
      if (was != nullptr && same(*was, part) && !target.empty()) {
        std::memcpy(target.data(), base.data(), target.size());
        counts.kept_bytes += part.size;
      } else if (!target.empty()) {
        changed_.push_back({entries[i], target, base, was == nullptr ? Version{} : was->version});
      }
    }
    return std::shared_ptr<const Tensor>(std::move(tensor));
  }

  static const Part* part_of(const Tensor& tensor, BlockId block) {
    for (const Part& part : tensor.parts) {
      if (part.block == block) return &part;
    }
    return nullptr;
  }

  // Asks for deltas of what has a base. What has none, or one that is refused, is left for fetch_rest().
  // errors: the control link's; a server that does not know the question has none.
  Status take_deltas() {
    std::vector<Changed*> asking;
    for (Changed& changed : changed_) {
      if (!changed.base.empty()) asking.push_back(&changed);
    }
    const Micros until = std::min(deadline_, steady_clock().now() + options_.delta_wait);
    Micros pause = kAskAgainMin;
    while (!asking.empty()) {
      std::vector<Changed*> pending;
      std::size_t at = 0;
      while (at < asking.size()) {
        PARAMWIRE_TRY(answered, ask(std::span(asking).subspan(at, std::min(asking.size() - at, kDeltasMax)), pending));
        at += answered;
      }
      asking = std::move(pending);
      const Micros now = steady_clock().now();
      if (asking.empty() || now >= until) break;
      rest(std::min(until, now + pause));
      if (wait_interrupted()) return Error(Code::kTimeout, "the wait for deltas was interrupted");
      pause = std::min(2 * pause, kAskAgainMax);
    }
    return {};
  }

  // returns: how many of them were answered.
  Result<std::size_t> ask(std::span<Changed* const> asking, std::vector<Changed*>& pending) {
    DeltasMessage message;
    message.incarnation = incarnation_;
    for (const Changed* changed : asking) message.asks.push_back({changed->entry.id, changed->entry.version, changed->base_version});
    PARAMWIRE_TRY(answer, client_.impl_->call([&](std::uint64_t request) { return message.encode(request); }, FrameType::kDeltaList, deadline_));
    PARAMWIRE_TRY(list, DeltaListMessage::decode(answer.meta));
    if (list.sizes.empty() || list.sizes.size() > asking.size() || list.body_size() != answer.body.size()) {
      return Error(Code::kCorrupt, cat(client_.address(), ": ", list.sizes.size(), " deltas of ", list.body_size(), " bytes in answer to ", asking.size(), ", with ", answer.body.size()));
    }
    std::span<const std::byte> body(answer.body);
    for (std::size_t i = 0; i < list.sizes.size(); ++i) {
      if (list.sizes[i] == kDeltaPending) {
        pending.push_back(asking[i]);
      } else if (list.sizes[i] > 0) {
        apply(*asking[i], body.first(static_cast<std::size_t>(list.sizes[i])));
        body = body.subspan(static_cast<std::size_t>(list.sizes[i]));
      }
    }
    return list.sizes.size();
  }

  // One that does not fit is no failure: the block is fetched.
  void apply(Changed& changed, std::span<const std::byte> delta) {
    const ManifestEntry& entry = changed.entry;
    const auto info = read_delta(delta);
    const bool fits = info.ok() && (entry.codec != CodecId::kRaw || info->result_crc64 == entry.crc64);
    const unsigned threads = options_.threads > 0 ? options_.threads : std::clamp(std::thread::hardware_concurrency(), 1U, kThreadsMax);
    if (!fits || !apply_delta(delta, entry.dtype, changed.base, changed.base_version, changed.target, threads).ok()) {
      ++counts.refused;
      return;
    }
    changed.done = true;
    ++counts.deltas;
    counts.delta_bytes += delta.size();
    counts.replaced_bytes += entry.stored_size;
  }

  Status fetch_rest(Snapshot& snapshot) {
    std::vector<FetchRequest> requests;
    for (const Changed& changed : changed_) {
      if (changed.done) continue;
      FetchRequest request;
      request.block = changed.entry.id;
      request.target = changed.target;
      requests.push_back(request);
      ++counts.fetched;
      counts.fetched_bytes += changed.entry.stored_size;
    }
    if (requests.empty()) return {};
    return snapshot.fetch(requests, CallOptions{deadline_ - steady_clock().now()});
  }

  static void rest(Micros until) {
    std::mutex mutex;
    std::condition_variable never;
    std::unique_lock lock(mutex);
    wait_on(never, lock, until, [] { return false; });
  }

  Client& client_;
  const MirrorOptions& options_;
  Incarnation incarnation_;  // whose manifest says what is wanted
  Micros deadline_;
  std::vector<Changed> changed_;
  std::map<std::string, std::vector<std::string>> aliases_;  // of each target
  std::vector<std::string> helpers_;                         // targets that only aliases want
};

Result<std::unique_ptr<Mirror>> Mirror::open(std::shared_ptr<Client> client, const MirrorOptions& options, CallOptions call) {
  std::unique_ptr<Mirror> mirror(new Mirror(std::move(client), options));
  PARAMWIRE_TRY(version, mirror->update(call));
  static_cast<void>(version);
  return mirror;
}

std::shared_ptr<const Mirror::State> Mirror::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

MirrorStats Mirror::stats() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

Result<Version> Mirror::update(CallOptions call) {
  const Micros deadline = client_->impl_->deadline(call.timeout);
  const std::lock_guard turn(turn_);
  SnapshotOptions newest;
  newest.timeout = call.timeout;
  PARAMWIRE_TRY(snapshot, client_->snapshot(newest));
  const auto before = state();
  const Incarnation& incarnation = snapshot->state_->held->incarnation();
  if (before && before->version == snapshot->version() && before->incarnation == incarnation) return before->version;
  Update update(*client_, options_, incarnation, deadline);
  PARAMWIRE_TRY(next, update.run(before, snapshot));
  const std::lock_guard lock(mutex_);
  state_ = std::move(next);
  counters_.updates += 1;
  counters_.kept_bytes += update.counts.kept_bytes;
  counters_.deltas += update.counts.deltas;
  counters_.delta_bytes += update.counts.delta_bytes;
  counters_.replaced_bytes += update.counts.replaced_bytes;
  counters_.refused += update.counts.refused;
  counters_.fetched += update.counts.fetched;
  counters_.fetched_bytes += update.counts.fetched_bytes;
  return state_->version;
}

}  // namespace paramwire
