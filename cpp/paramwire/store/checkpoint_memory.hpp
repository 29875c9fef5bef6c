// Checkpoints of tensors that lie in memory of this process, and back.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/store/checkpoint.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

struct MemoryBlock {
  std::string tensor;
  DType dtype = DType::kU8;
  Shape shape;  // of the whole tensor
  Shard shard;
  std::span<const std::byte> bytes;  // raw, row-major, little-endian; unchanged while the source lives
};

// Tensors in memory as a source: nothing is copied, but a block that changes before it is written is refused.
class MemorySource final : public CheckpointSource {
 public:
  // Reads all bytes once for their CRCs, in `workers` threads. aliases: (name, target).
  // errors: kInvalid for a name, shape or shard that can't be, two blocks that are the same, an alias without target, bytes that don't fit.
  static Result<std::unique_ptr<MemorySource>> make(Version version, std::vector<MemoryBlock> blocks, const std::vector<std::pair<std::string, std::string>>& aliases,
                                                    std::uint32_t workers);
  const Manifest& manifest() const override { return manifest_; }
  Result<std::span<const std::byte>> read(const ManifestEntry& entry, std::span<std::byte> scratch) override;
  bool lends() const noexcept override { return true; }

 private:
  MemorySource() = default;
  std::vector<MemoryBlock> blocks_;
  Manifest manifest_;  // tags are indices of blocks_
};

// Whole tensors in memory as a sink: every block goes straight to its rows.
class MemorySink final : public CheckpointSink {
 public:
  // Of exactly the tensor's size. One thread, before the restore.
  void add(std::string tensor, std::span<std::byte> bytes) { tensors_[std::move(tensor)] = bytes; }
  std::span<std::byte> target(const ManifestEntry& entry) override;
  // Only of tensors that were not added, which are left out.
  Status put(const ManifestEntry&, std::span<const std::byte>) override { return {}; }

 private:
  std::map<std::string, std::span<std::byte>, std::less<>> tensors_;
};

// A tensor of a manifest, with its blocks in the order of their rows.
struct CheckpointTensor {
  std::string name;
  std::string alias_of;  // empty: no alias
  DType dtype = DType::kU8;
  Shape shape;
  std::uint64_t bytes = 0;  // of the whole tensor
  Version version;          // of its newest block
  std::vector<ManifestEntry> blocks;  // views into the manifest; of an alias: those of its target
  bool covered = true;      // the blocks are all of it
};
// By name. An alias whose target has no blocks has none either.
std::vector<CheckpointTensor> checkpoint_tensors(const Manifest& manifest);

}  // namespace paramwire
