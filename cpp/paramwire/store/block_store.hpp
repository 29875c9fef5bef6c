// The block store: versioned, immutable blocks; atomic publishes; snapshots with leases; reclaim of what nobody can read.
//
// Pure but for the tier's memory: the caller brings the time, the pins and the commit of the version clock, so the
// simulation runs this very code. One thread at a time (the server's lock); the payload of a put may be written outside the
// lock between put_begin and put_seal.
//
// Invariants (DESIGN section 4; the simulation checks them from outside):
//   a published slot's bytes never change while a retained, leased or pinned snapshot can reach it;
//   a version is committed whole or not at all: slots sealed, then clock and root in one step, then visible;
//   blocks not put keep their slot.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/store/lease.hpp"
#include "paramwire/store/slot_table.hpp"
#include "paramwire/store/tier.hpp"
#include "paramwire/wire/manifest.hpp"
#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace paramwire {

// Words that readers have pinned now, from every pin table of a living process, with the process for error texts.
struct PinnedWord {
  std::uint64_t word = 0;
  std::uint32_t pid = 0;
};
class PinSource {
 public:
  virtual ~PinSource() = default;
  // Appends; called after a full fence that followed the withdrawals.
  virtual void collect(std::vector<PinnedWord>& out) = 0;
};

// Checks that a store leaves out, for the mutation check of the simulation: with any one of them out, some seed must fail.
struct OmittedChecks {
  bool lease = false;          // leased snapshots do not keep their slots
  bool quarantine = false;     // pinned slots are reused
  bool publish_fence = false;  // finish does not compare the base with the newest version
};

struct BlockStoreOptions {
  Incarnation incarnation;
  std::uint32_t epoch = 0;                     // from the coordinator, non-zero
  std::uint32_t retained_versions = 3;         // readable without a lease; DESIGN P4
  Micros lease_ttl_max = 60 * kMicrosPerSecond;     // longest single grant: bounds how long a dead client costs memory
  Micros lease_age_max = 600 * kMicrosPerSecond;    // after this, a publish that needs the room may revoke
  Micros publish_idle_max = 30 * kMicrosPerSecond;  // a publish without a call for so long is aborted
  std::uint32_t publishes_max = 16;            // open at once
  std::uint32_t leases_max = 65536;
  std::uint64_t quarantine_bytes_max = std::uint64_t{1} << 30;  // pinned bytes of versions nobody else can read
  OmittedChecks omitted;
};

struct BlockSpec {
  std::string_view tensor;
  DType dtype = DType::kU8;
  Shape shape;                // of the whole tensor
  Shard shard;
  CodecId codec = CodecId::kRaw;
  std::uint64_t stored_size = 0;  // of an encoded block: above 0 and below its raw size; not read for codec raw
};

// A put in progress: write exactly `payload.size()` bytes, note each extent's CRC-32C, then put_seal.
struct PutSlot {
  SlotIndex slot = 0;
  BlockId block;
  std::span<std::byte> payload;
};

struct StoreStats {
  std::uint64_t blocks = 0, raw_bytes = 0, versions_readable = 0, leases = 0, publishes_open = 0;
  std::uint64_t slots_in_use = 0, used_bytes = 0, committed_bytes = 0, limit_bytes = 0;
  std::uint64_t superseded_slots = 0, quarantined_slots = 0, quarantined_bytes = 0;
  std::uint64_t publishes = 0, publishes_refused = 0, leases_revoked = 0, slots_reclaimed = 0;
};

class BlockStore {
 public:
  // Commits `next` with `root` on top of `base` in the version clock; an error keeps the publish uncommitted.
  using CommitClock = std::function<Status(const std::optional<Version>& base, Version next, const Digest& root)>;

  // `tier` and `pins` (nullptr: nobody can pin) must outlive the store.
  BlockStore(Tier& tier, PinSource* pins, const BlockStoreOptions& options);

  const Incarnation& incarnation() const noexcept { return options_.incarnation; }
  std::uint32_t epoch() const noexcept { return options_.epoch; }
  const BlockStoreOptions& options() const noexcept { return options_; }
  std::optional<Version> newest() const noexcept { return versions_.empty() ? std::nullopt : std::optional(versions_.rbegin()->first); }

  // ---- publish: start / put / finish / abort. `id` is the caller's, 128 random bits.
  // errors: kStale when `base` (any_base false) is not the newest; kBackpressure at publishes_max, or past the quarantine
  //         cap, naming the process that holds the views.
  Result<Version> publish_start(PublishId id, bool any_base, const std::optional<Version>& base, Micros now);
  // errors of all below: kStale when the publish is unknown here (aborted, expired, or of another incarnation).
  // put_begin: kInvalid for a bad name, shape, shard or stored size; kBackpressure when the tier is full and nothing may be revoked.
  Result<PutSlot> put_begin(PublishId id, const BlockSpec& spec, Micros now);
  // `crc64` and `extents` (one CRC-32C for each 64 KiB) of the payload as written. A second put of a block replaces the first.
  Status put_seal(PublishId id, const PutSlot& put, std::uint64_t crc64, std::span<const std::uint32_t> extents, Micros now);
  // Bytes of a put arrived: its publish is not idle. A put over a slow link may take longer than publish_idle_max.
  void put_progress(PublishId id, Micros now);
  // The writer gave up. Never fails: the publish may be gone already.
  void put_cancel(PublishId id, const PutSlot& put);
  // Drops every block and alias named `tensor`. errors: kNotFound when there is none.
  Status remove(PublishId id, std::string_view tensor, Micros now);
  // `tensor` becomes another name of `target`, which must have blocks when finish is called. A put of `tensor` undoes it.
  Status alias(PublishId id, std::string_view tensor, std::string_view target, Micros now);
  // Commits. Idempotent: repeated for a finished id (the reply was lost) it gives the same version.
  // errors: kStale when another publish was faster (this one is aborted); kInvalid for overlapping or mixed shards, puts not
  //         sealed, aliases without target; the clock's own.
  Result<Version> finish(PublishId id, const CommitClock& commit, Micros now);
  void abort(PublishId id);

  // ---- read
  struct Opened {
    std::shared_ptr<const Manifest> manifest;
    LeaseId lease = 0;
    Micros lease_ttl = 0;  // granted
  };
  // The snapshot of `want` (none: the newest), leased when `lease_ttl` > 0.
  // errors: kNotFound when nothing is published; kStale when `want` is gone, or not there yet (the text says which).
  Result<Opened> open(const std::optional<Version>& want, Micros lease_ttl, Micros now);
  Result<Micros> renew(LeaseId lease, Micros ttl, Micros now);
  void release(LeaseId lease, Micros now);
  // Readable ones, oldest first.
  std::vector<Version> versions() const;
  // The manifest of `version` if it is still readable, for deltas.
  std::shared_ptr<const Manifest> manifest(Version version) const;
  // A block at exactly the entry version asked for, held so that its slot stays until unhold().
  struct Held {
    SlotIndex slot = 0;
    std::span<const std::byte> payload;
    std::span<const std::byte> extent_table;
    CodecId codec = CodecId::kRaw;
    DType dtype = DType::kU8;
    std::uint64_t raw_size = 0;
  };
  // errors: kNotFound (no such block); kStale when that version of the block is gone or not there, naming the one that is.
  Result<Held> hold(BlockId block, Version version);
  void unhold(SlotIndex slot, Micros now);
  Locator locator(SlotIndex slot) const noexcept { return slots_.locator(slot); }

  // Expires leases and idle publishes and reclaims. After queued renewals have been handled.
  void tick(Micros now);
  StoreStats stats() const;
  std::string tier_note() const { return tier_.note(); }

 private:
  // 48 bytes and the encoded key: a publish of a million tensors stages them in about 80 MB.
  struct Staged {
    enum class Kind : std::uint8_t { kBlock, kAlias, kRemove };
    BlockId id;
    std::uint64_t key = 0;  // offset in `keys` of what encode_key() wrote
    std::uint64_t crc64 = 0;
    std::uint32_t table_crc = 0;
    SlotIndex slot = 0;     // kBlock
    std::uint32_t order = 0;  // of staging: the last one of an id wins
    Kind kind = Kind::kBlock;
  };
  struct Publish {
    std::optional<Version> base;
    Version version;
    Micros active = 0;
    std::vector<Staged> staged;
    Bytes keys;
    bool shards = false;    // a row or head range was put
    std::set<BlockId> aliases;  // staged here, maybe undone since
  };
  struct OpenPut {
    PublishId publish;
    std::uint64_t key = 0;
    bool orphan = false;    // its publish is gone; the slot waits for its writer to let go
  };
  // Slots of blocks that version `to` replaced or removed: readable in snapshots V with header version <= V < to. 4 bytes a
  // slot, since a version that changes every one of a million tiny tensors puts them all here.
  struct Superseded {
    Version to;
    std::vector<SlotIndex> slots;
  };

  Result<Publish*> open_publish(PublishId id, Micros now);
  Result<SlotIndex> open_slot(std::uint64_t size, Micros now);
  Status check_quarantine() const;
  void stage(Publish& publish, Staged staged);
  void stage_removals(Publish& publish, std::string_view tensor, bool keep_whole);
  // The changes that a publish makes, last staged of each id; slots of those that lost are closed.
  std::vector<ManifestChange> take_changes(Publish& publish, const Manifest& base);
  Status check_tensors(const Publish& publish, const Manifest& next) const;
  void supersede(const std::vector<ManifestChange>& changes, const Manifest& base, Version next);
  void drop(std::map<PublishId, Publish>::iterator publish);
  void close_slot(SlotIndex slot);
  void retire(Micros now);
  bool needed(SlotIndex slot, Version to) const;
  void reclaim();
  bool revoke_for_room(Micros now);

  Tier& tier_;
  PinSource* pins_;
  BlockStoreOptions options_;
  SlotTable slots_;
  LeaseTable leases_;
  std::map<Version, std::shared_ptr<const Manifest>> versions_;  // readable: the newest few and the leased
  std::vector<Superseded> superseded_;                           // ascending `to`
  std::unordered_map<SlotIndex, std::uint32_t> holds_;
  std::map<PublishId, Publish> publishes_;
  std::unordered_map<SlotIndex, OpenPut> open_puts_;
  std::map<PublishId, Version> finished_;                        // answers to repeated finishes
  std::vector<PublishId> finished_order_;                        // oldest first; bounded
  bool any_shards_ = false;                                      // some committed block is a part of its tensor
  std::map<std::string, std::string> aliases_;                   // of the newest version: name -> target
  std::uint64_t quarantined_slots_ = 0;
  std::uint64_t quarantined_bytes_ = 0;
  std::uint32_t quarantine_pid_ = 0;
  StoreStats counters_;
};

}  // namespace paramwire
