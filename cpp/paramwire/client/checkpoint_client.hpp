// Checkpoints of what a server holds, and back into a server.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/store/checkpoint.hpp"

#include <memory>
#include <optional>
#include <span>

namespace paramwire {

// A snapshot as a source: blocks are fetched one by one, verified, each by the thread that asks. Take it leased: a save takes longer than versions stay.
class SnapshotSource final : public CheckpointSource {
 public:
  // call: deadline of each block's fetch.
  explicit SnapshotSource(std::shared_ptr<Snapshot> snapshot, CallOptions call = {}) : snapshot_(std::move(snapshot)), call_(call) {}
  const Manifest& manifest() const override { return snapshot_->manifest(); }
  Result<std::span<const std::byte>> read(const ManifestEntry& entry, std::span<std::byte> scratch) override;

 private:
  const std::shared_ptr<Snapshot> snapshot_;
  const CallOptions call_;
};

// Puts all of `checkpoint` into `publish`, which the caller finishes: a version whose tensors are exactly the checkpoint's.
//
// current: manifest of the version that the publish builds on; its tensors that the checkpoint has not, or has cut otherwise, are removed. None: nothing is published yet.
// call:    deadline of each put
// errors:  kStale when the publish would commit a version that is not above the checkpoint's: readers take higher for newer, and versions never go back;
//          as restore_checkpoint and Publisher
// threads: any; puts are made one at a time, from several threads
Status publish_checkpoint(const Checkpoint& checkpoint, Publisher& publish, const Manifest* current, const CheckpointRestoreOptions& options, CallOptions call = {});

}  // namespace paramwire
