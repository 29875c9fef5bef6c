#include "paramwire/client/checkpoint_client.hpp"

#include "paramwire/base/text.hpp"

#include <set>
#include <string>

namespace paramwire {

namespace {

class PublishSink final : public CheckpointSink {
 public:
  PublishSink(Publisher& publish, CallOptions call) : publish_(publish), call_(call) {}
  Status put(const ManifestEntry& entry, std::span<const std::byte> raw) override {
    return publish_.put(entry.tensor, entry.dtype, entry.shape, entry.shard, raw, call_);
  }

 private:
  Publisher& publish_;
  const CallOptions call_;
};

}  // namespace

Result<std::span<const std::byte>> SnapshotSource::read(const ManifestEntry& entry, std::span<std::byte> scratch) {
  FetchRequest request;
  request.block = entry.id;
  request.target = scratch;
  PARAMWIRE_CHECK(snapshot_->fetch(std::span(&request, 1), call_));
  return std::span<const std::byte>(scratch);
}

Status publish_checkpoint(const Checkpoint& checkpoint, Publisher& publish, const Manifest* current, const CheckpointRestoreOptions& options, CallOptions call) {
  const Version saved = *checkpoint.manifest().version();
  if (publish.version() <= saved) {
    return Error(Code::kStale, cat("the server would publish version ", publish.version(), ", not above checkpoint ", saved, " of ", checkpoint.directory(),
                                   ": readers that saw that one would take the restored model for an older one; start the server with `paramwire serve --checkpoint ",
                                   checkpoint.directory(), "`, which begins above it"));
  }
  if (current != nullptr) {
    // A tensor keeps its blocks only where each of them is replaced.
    std::set<std::string> gone;
    current->for_each([&](const Manifest::Hit& hit) {
      const auto same = checkpoint.manifest().find(hit.entry.id);
      if (!same || same->entry.kind != hit.entry.kind) gone.emplace(hit.entry.tensor);
      return true;
    });
    checkpoint.manifest().for_each([&](const Manifest::Hit& hit) {
      if (!current->find(hit.entry.id) && !current->tensor_blocks(hit.entry.tensor).empty()) gone.emplace(hit.entry.tensor);
      return true;
    });
    for (const std::string& tensor : gone) PARAMWIRE_CHECK(publish.remove(tensor, call));
  }
  PublishSink sink(publish, call);
  PARAMWIRE_CHECK(restore_checkpoint(checkpoint, sink, options));
  Status status;
  checkpoint.manifest().for_each([&](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kAlias) status = publish.alias(hit.entry.tensor, hit.entry.target, call);
    return status.ok();
  });
  return status;
}

}  // namespace paramwire
