// The publish half of BlockStore: start / put / finish / abort.
#include "paramwire/store/block_store.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire {

namespace {

// Answers to repeated finishes that are kept: a client repeats within its own deadline, so a few suffice; bounded so that
// ids cannot grow a server.
constexpr std::size_t kFinishedKept = 1024;

const Manifest kNothing;

std::uint64_t encode_key(Bytes& keys, std::string_view tensor, std::string_view target, const BlockSpec& spec) {
  const std::uint64_t at = keys.size();
  ByteWriter out(keys);
  out.text(tensor);
  out.text(target);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(spec.dtype));
  out.put<std::uint8_t>(static_cast<std::uint8_t>(spec.shape.rank()));
  for (std::uint64_t dim : spec.shape.dims()) out.varint(dim);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(spec.shard.kind));
  out.varint(spec.shard.heads);
  out.varint(spec.shard.begin);
  out.varint(spec.shard.end);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(spec.codec));
  return at;
}

void decode_key(const Bytes& keys, std::uint64_t at, ManifestEntry& entry) {
  ByteReader in(std::span<const std::byte>(keys).subspan(static_cast<std::size_t>(at)));
  entry.tensor = in.text(kMaxNameBytes);
  entry.target = in.text(kMaxNameBytes);
  entry.dtype = static_cast<DType>(in.get<std::uint8_t>());
  std::array<std::uint64_t, Shape::kMaxAxes> dims{};
  const std::size_t rank = in.get<std::uint8_t>();
  for (std::size_t i = 0; i < rank; ++i) dims[i] = in.varint();
  entry.shape = *Shape::from({dims.data(), rank});  // was a Shape when it was encoded
  entry.shard.kind = static_cast<ShardKind>(in.get<std::uint8_t>());
  entry.shard.heads = static_cast<std::uint32_t>(in.varint());
  entry.shard.begin = in.varint();
  entry.shard.end = in.varint();
  entry.codec = static_cast<CodecId>(in.get<std::uint8_t>());
}

Status check_name(std::string_view tensor) {
  if (tensor.size() <= kMaxNameBytes) return {};
  return Error(Code::kInvalid, cat("a tensor name has at most ", kMaxNameBytes, " bytes, \"", tensor.substr(0, 40), "...\" has ", tensor.size()));
}

}  // namespace

Result<Version> BlockStore::publish_start(PublishId id, bool any_base, const std::optional<Version>& base, Micros now) {
  const auto newest_version = newest();
  if (!any_base && base != newest_version) {
    ++counters_.publishes_refused;
    return Error(Code::kStale, cat("a publish on base ", to_text(base), " was asked for, the newest version is ", to_text(newest_version),
                                   ": read it again and start from there"));
  }
  if (publishes_.size() >= options_.publishes_max) {
    return Error(Code::kBackpressure, cat(publishes_.size(), " publishes are open, the limit: finish or abort one; idle ones end after ",
                                          options_.publish_idle_max / kMicrosPerSecond, " s"));
  }
  if (publishes_.contains(id) || finished_.contains(id)) return Error(Code::kInvalid, cat("publish id ", id, " was used before"));
  reclaim();
  PARAMWIRE_CHECK(check_quarantine());
  Publish publish;
  publish.base = newest_version;
  publish.version = {options_.epoch, newest_version && newest_version->epoch == options_.epoch ? newest_version->counter + 1 : 1};
  publish.active = now;
  const Version version = publish.version;
  publishes_.emplace(id, std::move(publish));
  return version;
}

Status BlockStore::check_quarantine() const {
  if (quarantined_bytes_ <= options_.quarantine_bytes_max) return {};
  return Error(Code::kBackpressure, cat("views in process ", quarantine_pid_, " (and maybe others) keep ", quarantined_bytes_,
                                        " bytes of withdrawn versions, the cap is ", options_.quarantine_bytes_max,
                                        ": close views there, or end that process"));
}

Result<BlockStore::Publish*> BlockStore::open_publish(PublishId id, Micros now) {
  const auto it = publishes_.find(id);
  if (it == publishes_.end()) {
    return Error(Code::kStale, cat("publish ", id, " is not open here (finished, aborted, idle for over ",
                                   options_.publish_idle_max / kMicrosPerSecond, " s, or from before a restart): start a new one"));
  }
  it->second.active = now;
  return &it->second;
}

Result<SlotIndex> BlockStore::open_slot(std::uint64_t size, Micros now) {
  for (;;) {
    auto slot = slots_.open(size);
    if (slot.ok() || slot.error().code() != Code::kBackpressure) return slot;
    const std::uint64_t before = counters_.slots_reclaimed;
    retire(now);
    if (counters_.slots_reclaimed == before && !revoke_for_room(now)) return slot;
  }
}

Result<PutSlot> BlockStore::put_begin(PublishId id, const BlockSpec& spec, Micros now) {
  PARAMWIRE_TRY(publish, open_publish(id, now));
  PARAMWIRE_CHECK(check_name(spec.tensor));
  auto size = block_bytes(spec.dtype, spec.shape, spec.shard);
  if (!size.ok()) return Error(Code::kInvalid, cat("tensor \"", spec.tensor, "\": ", size.error().message()));
  const std::uint64_t stored_size = spec.codec == CodecId::kRaw ? *size : spec.stored_size;
  if (static_cast<std::uint16_t>(spec.codec) > kCodecMax || !stored_size_valid(spec.codec, *size, stored_size)) {
    return Error(Code::kInvalid, cat("tensor \"", spec.tensor, "\": ", dtype_name(spec.dtype), ' ', spec.shape, ' ', spec.shard, " has ", *size, " bytes, which codec ",
                                     static_cast<unsigned>(spec.codec), " can't store as ", stored_size));
  }
  PARAMWIRE_CHECK(check_quarantine());
  PARAMWIRE_TRY(slot, open_slot(stored_size, now));
  open_puts_.emplace(slot, OpenPut{id, encode_key(publish->keys, spec.tensor, "", spec), false});
  publish->shards = publish->shards || spec.shard.kind != ShardKind::kWhole;
  return PutSlot{slot, block_id(spec.tensor, spec.shard), slots_.payload(slot)};
}

void BlockStore::stage(Publish& publish, Staged staged) {
  staged.order = static_cast<std::uint32_t>(publish.staged.size());
  publish.staged.push_back(staged);
}

Status BlockStore::put_seal(PublishId id, const PutSlot& put, std::uint64_t crc64, std::span<const std::uint32_t> extents, Micros now) {
  const auto open = open_puts_.find(put.slot);
  if (open == open_puts_.end() || open->second.publish != id) {
    return Error(Code::kInternal, cat("put of block ", put.block, " was not begun in publish ", id));
  }
  const bool orphan = open->second.orphan;
  const std::uint64_t key = open->second.key;
  if (extents.size() != extent_count(put.payload.size())) {
    return Error(Code::kInternal, cat("put of block ", put.block, ": ", extents.size(), " extent CRCs for ", put.payload.size(), " bytes"));
  }
  auto publish = open_publish(id, now);
  open_puts_.erase(open);
  if (orphan || !publish.ok()) {
    close_slot(put.slot);
    return publish.ok() ? Error(Code::kStale, "the publish of this put is gone") : std::move(publish).error();
  }
  ManifestEntry entry;
  decode_key((*publish)->keys, key, entry);
  Staged staged;
  staged.id = put.block;
  staged.key = key;
  staged.crc64 = crc64;
  staged.slot = put.slot;
  const std::uint64_t raw_size = *block_bytes(entry.dtype, entry.shape, entry.shard);  // as put_begin had it
  staged.table_crc = slots_.seal(put.slot, {put.block, (*publish)->version, entry.dtype, entry.codec, raw_size, crc64}, extents);
  if (entry.shard.kind != ShardKind::kWhole) {
    const BlockId whole = block_id(entry.tensor, Shard::whole());
    if ((*publish)->aliases.contains(whole) || aliases_.contains(std::string(entry.tensor))) {
      Staged undo;  // the name had been an alias: it gets bytes of its own
      undo.kind = Staged::Kind::kRemove;
      undo.id = whole;
      stage(**publish, undo);
    }
  }
  stage(**publish, staged);
  return {};
}

void BlockStore::put_progress(PublishId id, Micros now) {
  if (const auto it = publishes_.find(id); it != publishes_.end()) it->second.active = now;
}

void BlockStore::put_cancel(PublishId, const PutSlot& put) {
  if (open_puts_.erase(put.slot) > 0) close_slot(put.slot);
}

// Stages the removal of every block named `tensor`, committed or staged.
void BlockStore::stage_removals(Publish& publish, std::string_view tensor, bool keep_whole) {
  std::vector<BlockId> ids;
  const Manifest& base = publish.base ? *versions_.at(*publish.base) : kNothing;
  const BlockId whole = block_id(tensor, Shard::whole());
  if (base.find(whole)) ids.push_back(whole);
  if (any_shards_) {
    base.for_each([&](const Manifest::Hit& hit) {
      if (hit.entry.tensor == tensor && hit.entry.id != whole) ids.push_back(hit.entry.id);
      return true;
    });
  }
  for (const Staged& staged : publish.staged) {
    if (staged.kind == Staged::Kind::kRemove) continue;
    ManifestEntry entry;
    decode_key(publish.keys, staged.key, entry);
    if (entry.tensor == tensor) ids.push_back(staged.id);
  }
  for (BlockId id : ids) {
    if (keep_whole && id == whole) continue;
    Staged staged;
    staged.kind = Staged::Kind::kRemove;
    staged.id = id;
    stage(publish, staged);
  }
}

Status BlockStore::remove(PublishId id, std::string_view tensor, Micros now) {
  PARAMWIRE_TRY(publish, open_publish(id, now));
  const std::size_t before = publish->staged.size();
  if (publish->base) {
    if (!versions_.contains(*publish->base)) return Error(Code::kStale, cat("base ", *publish->base, " of the publish is gone"));
  }
  stage_removals(*publish, tensor, false);
  if (publish->staged.size() == before) return Error(Code::kNotFound, cat("tensor \"", tensor, "\" has no blocks to remove"));
  return {};
}

Status BlockStore::alias(PublishId id, std::string_view tensor, std::string_view target, Micros now) {
  PARAMWIRE_TRY(publish, open_publish(id, now));
  PARAMWIRE_CHECK(check_name(tensor));
  PARAMWIRE_CHECK(check_name(target));
  if (publish->base && !versions_.contains(*publish->base)) return Error(Code::kStale, cat("base ", *publish->base, " of the publish is gone"));
  std::string final_target(target);
  if (const auto it = aliases_.find(final_target); it != aliases_.end()) final_target = it->second;  // one step, never a chain
  if (final_target == tensor) return Error(Code::kInvalid, cat("tensor \"", tensor, "\" cannot be an alias of itself"));
  stage_removals(*publish, tensor, true);
  Staged staged;
  staged.kind = Staged::Kind::kAlias;
  staged.id = block_id(tensor, Shard::whole());
  staged.key = encode_key(publish->keys, tensor, final_target, BlockSpec{});
  publish->aliases.insert(staged.id);
  stage(*publish, staged);
  return {};
}

std::vector<ManifestChange> BlockStore::take_changes(Publish& publish, const Manifest& base) {
  auto& staged = publish.staged;
  std::sort(staged.begin(), staged.end(), [](const Staged& a, const Staged& b) { return a.id != b.id ? a.id < b.id : a.order < b.order; });
  std::size_t kept = 0;
  for (std::size_t i = 0; i < staged.size(); ++i) {
    const bool last = i + 1 == staged.size() || staged[i + 1].id != staged[i].id;
    if (!last) {
      if (staged[i].kind == Staged::Kind::kBlock) close_slot(staged[i].slot);
      continue;
    }
    staged[kept++] = staged[i];
  }
  staged.resize(kept);

  std::vector<ManifestChange> changes;
  changes.reserve(kept);
  for (const Staged& item : staged) {
    ManifestChange change;
    change.entry.id = item.id;
    if (item.kind == Staged::Kind::kRemove) {
      if (!base.find(item.id)) continue;  // put and removed in this very publish
      change.remove = true;
    } else {
      decode_key(publish.keys, item.key, change.entry);
      change.entry.version = publish.version;
      change.entry.kind = item.kind == Staged::Kind::kAlias ? EntryKind::kAlias : EntryKind::kBlock;
      change.tag = item.slot;
      if (item.kind == Staged::Kind::kBlock) {
        change.entry.raw_size = *block_bytes(change.entry.dtype, change.entry.shape, change.entry.shard);
        change.entry.stored_size = slots_.payload(item.slot).size();
        change.entry.crc64 = item.crc64;
        change.entry.extent_table_crc = item.table_crc;
      }
    }
    changes.push_back(change);
  }
  return changes;
}

// Shards of one tensor agree in dtype and shape, do not overlap, and stand beside no whole block or alias of that name;
// aliases have a target.
Status BlockStore::check_tensors(const Publish& publish, const Manifest& next) const {
  std::map<std::string_view, std::vector<ManifestEntry>> cut;
  if (any_shards_ || publish.shards) {
    next.for_each([&](const Manifest::Hit& hit) {
      if (hit.entry.shard.kind != ShardKind::kWhole) cut[hit.entry.tensor].push_back(hit.entry);
      return true;
    });
  }
  for (auto& [tensor, entries] : cut) {
    if (next.find(block_id(tensor, Shard::whole()))) {
      return Error(Code::kInvalid, cat("tensor \"", tensor, "\" is there whole (or as an alias) and in parts: remove one of them"));
    }
    const auto first_row = [](const ManifestEntry& e) { return shard_rows(e.shape, e.shard)->first; };
    std::sort(entries.begin(), entries.end(), [&](const ManifestEntry& a, const ManifestEntry& b) { return first_row(a) < first_row(b); });
    for (std::size_t i = 1; i < entries.size(); ++i) {
      const ManifestEntry &a = entries[i - 1], &b = entries[i];
      if (a.shape != b.shape || a.dtype != b.dtype) {
        return Error(Code::kInvalid, cat("parts of tensor \"", tensor, "\" disagree: ", a.shard, " is ", dtype_name(a.dtype), ' ', a.shape, ", ",
                                         b.shard, " is ", dtype_name(b.dtype), ' ', b.shape));
      }
      if (shard_rows(a.shape, a.shard)->second > first_row(b)) {
        return Error(Code::kInvalid, cat("parts of tensor \"", tensor, "\" overlap: ", a.shard, " and ", b.shard));
      }
    }
  }
  std::map<std::string, std::string> aliases = aliases_;
  for (const Staged& item : publish.staged) {
    if (item.kind != Staged::Kind::kAlias) continue;
    ManifestEntry entry;
    decode_key(publish.keys, item.key, entry);
    aliases[std::string(entry.tensor)] = entry.target;
  }
  for (const auto& [tensor, target] : aliases) {
    const auto hit = next.find(block_id(tensor, Shard::whole()));
    if (!hit || hit->entry.kind != EntryKind::kAlias) continue;  // untied or removed
    const auto whole = next.find(block_id(target, Shard::whole()));
    const bool found = whole ? whole->entry.kind == EntryKind::kBlock : cut.contains(target);
    if (!found) return Error(Code::kInvalid, cat("alias \"", tensor, "\": its target \"", target, "\" has no blocks"));
  }
  return {};
}

void BlockStore::supersede(const std::vector<ManifestChange>& changes, const Manifest& base, Version next) {
  Superseded group{next, {}};
  for (const ManifestChange& change : changes) {
    const auto old = base.find(change.entry.id);
    if (old && old->entry.kind == EntryKind::kBlock) group.slots.push_back(old->tag);
    const bool was_alias = old && old->entry.kind == EntryKind::kAlias;
    if (was_alias) aliases_.erase(std::string(old->entry.tensor));
    if (!change.remove && change.entry.kind == EntryKind::kAlias) aliases_[std::string(change.entry.tensor)] = change.entry.target;
  }
  if (group.slots.empty()) return;
  group.slots.shrink_to_fit();
  superseded_.push_back(std::move(group));
}

Result<Version> BlockStore::finish(PublishId id, const CommitClock& commit, Micros now) {
  if (const auto done = finished_.find(id); done != finished_.end()) return done->second;
  PARAMWIRE_TRY(publish, open_publish(id, now));
  const auto it = publishes_.find(id);
  if (publish->base != newest() && !options_.omitted.publish_fence) {
    Error error(Code::kStale, cat("publish ", id, " was started on version ", to_text(publish->base), ", version ", to_text(newest()),
                                  " was published since: read it again and start from there"));
    ++counters_.publishes_refused;
    drop(it);
    return error;
  }
  for (const auto& [slot, open] : open_puts_) {
    if (open.publish == id && !open.orphan) return Error(Code::kInvalid, cat("publish ", id, " has a put that is not complete"));
  }
  const auto base_manifest = publish->base ? manifest(*publish->base) : nullptr;
  const Manifest& base = base_manifest ? *base_manifest : kNothing;
  const auto changes = take_changes(*publish, base);
  auto next = Manifest::with_changes(base, publish->version, changes);
  Status checked = next.ok() ? check_tensors(*publish, *next) : Status(next.error());
  if (checked.ok()) checked = commit(publish->base, publish->version, next->root());
  if (!checked.ok()) {
    ++counters_.publishes_refused;
    drop(it);
    return std::move(checked).error();
  }
  // From here on the version exists. Slots were sealed by put_seal.
  supersede(changes, base, publish->version);
  any_shards_ = any_shards_ || publish->shards;
  const Version version = publish->version;
  versions_[version] = std::make_shared<const Manifest>(std::move(*next));
  publishes_.erase(it);
  finished_.emplace(id, version);
  finished_order_.push_back(id);
  if (finished_order_.size() > kFinishedKept) {
    finished_.erase(finished_order_.front());
    finished_order_.erase(finished_order_.begin());
  }
  ++counters_.publishes;
  retire(now);
  return version;
}

void BlockStore::abort(PublishId id) {
  if (const auto it = publishes_.find(id); it != publishes_.end()) drop(it);
}

void BlockStore::drop(std::map<PublishId, Publish>::iterator publish) {
  for (auto& [slot, open] : open_puts_) {
    if (open.publish == publish->first) open.orphan = true;
  }
  for (const Staged& staged : publish->second.staged) {
    if (staged.kind == Staged::Kind::kBlock) close_slot(staged.slot);
  }
  publishes_.erase(publish);
}

}  // namespace paramwire
