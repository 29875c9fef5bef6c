// A small model that changes from version to version, as a source and a sink of checkpoints.
#pragma once

#include "paramwire/base/crc.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/store/checkpoint.hpp"
#include "paramwire/store/checkpoint_block.hpp"

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::testing {

struct ModelBlock {
  std::string tensor;
  DType dtype = DType::kU8;
  Shape shape;
  Shard shard;
  Version version;
  std::vector<std::byte> bytes;
};

class ModelSource final : public CheckpointSource {
 public:
  explicit ModelSource(Version version = {3, 1}) : version_(version) {}

  // Every shape of block: a scalar, empties, one extent, several, shards, an alias, weights of each float type. `small`: one of two extents at most.
  void fill(Random& random, bool small = false) {
    put("scalar", DType::kF32, {}, Shard::whole(), random);
    put("empty", DType::kBF16, {0, 7}, Shard::whole(), random);
    put("bytes", DType::kU8, {1000}, Shard::whole(), random);
    put("norm", DType::kF32, {257}, Shard::whole(), random);
    put("big", DType::kBF16, {small ? 103U : 300U, 331}, Shard::whole(), random);
    const Shape cut{100, small ? 16U : 512U};
    put("cut", DType::kF16, cut, Shard::rows(0, 64), random);
    put("cut", DType::kF16, cut, Shard::rows(64, 100), random);
    put("heads", DType::kF32, {24, 8}, Shard::head_range(6, 2, 4), random);
    aliases_["tied"] = "big";
  }
  void put(const std::string& tensor, DType dtype, const Shape& shape, const Shard& shard, Random& random) {
    ModelBlock block{tensor, dtype, shape, shard, version_, {}};
    block.bytes.resize(static_cast<std::size_t>(*block_bytes(dtype, shape, shard)));
    // Weights: exponents that are mostly alike, so that codecs find something.
    for (std::size_t i = 0; i < block.bytes.size(); ++i) {
      const bool top = i % (dtype == DType::kF32 ? 4 : 2) == (dtype == DType::kF32 ? 3 : 1);
      block.bytes[i] = static_cast<std::byte>(top && dtype != DType::kU8 ? 0x3c + random.below(2) : random.below(256));
    }
    blocks_[{tensor, shard.to_string()}] = std::move(block);
    manifest_.reset();
  }
  // The next version: about `percent` of the blocks change, in a few bytes each.
  void step(Random& random, std::uint32_t percent) {
    ++version_.counter;
    manifest_.reset();
    for (auto& [key, block] : blocks_) {
      if (block.bytes.empty() || !random.chance(percent)) continue;
      block.version = version_;
      for (std::uint64_t i = 0; i < 1 + block.bytes.size() / 100; ++i) {
        std::byte& byte = block.bytes[static_cast<std::size_t>(random.below(block.bytes.size()))];
        byte = static_cast<std::byte>(std::to_integer<unsigned>(byte) + 1);
      }
    }
  }
  void alias(const std::string& name, const std::string& target) {
    aliases_[name] = target;
    manifest_.reset();
  }
  void remove(const std::string& tensor) {
    std::erase_if(blocks_, [&](const auto& item) { return item.second.tensor == tensor; });
    manifest_.reset();
  }
  void set_version(Version version) {
    version_ = version;
    manifest_.reset();
  }
  Version version() const { return version_; }
  std::map<std::pair<std::string, std::string>, ModelBlock>& blocks() { return blocks_; }

  const Manifest& manifest() const override {
    if (!manifest_) manifest_.emplace(make());
    return *manifest_;
  }
  Result<std::span<const std::byte>> read(const ManifestEntry& entry, std::span<std::byte> scratch) override {
    const auto& bytes = blocks_.at({std::string(entry.tensor), entry.shard.to_string()}).bytes;
    {
      const std::lock_guard lock(mutex_);
      ++reads;
    }
    if (lending) return std::span<const std::byte>(bytes);
    std::ranges::copy(bytes, scratch.begin());
    return std::span<const std::byte>(scratch.first(bytes.size()));
  }
  bool lends() const noexcept override { return lending; }

  bool lending = false;
  std::uint64_t reads = 0;

 private:
  Manifest make() const {
    std::vector<ManifestChange> changes;
    for (const auto& [key, block] : blocks_) {
      ManifestEntry entry;
      entry.tensor = block.tensor;
      entry.shard = block.shard;
      entry.id = block_id(block.tensor, block.shard);
      entry.version = block.version;
      entry.dtype = block.dtype;
      entry.shape = block.shape;
      entry.raw_size = entry.stored_size = block.bytes.size();
      const PlainCheck check = check_plain(block.bytes);
      entry.crc64 = check.crc64;
      entry.extent_table_crc = check.table_crc;
      changes.push_back({entry, false, 0});
    }
    for (const auto& [name, target] : aliases_) {
      ManifestEntry entry;
      entry.kind = EntryKind::kAlias;
      entry.tensor = name;
      entry.target = target;
      entry.id = block_id(name, Shard::whole());
      entry.version = {version_.epoch, 1};
      changes.push_back({entry, false, 0});
    }
    auto made = Manifest::with_changes({}, version_, std::move(changes));
    return *std::move(made);
  }

  Version version_;
  std::map<std::pair<std::string, std::string>, ModelBlock> blocks_;
  std::map<std::string, std::string> aliases_;
  mutable std::optional<Manifest> manifest_;
  std::mutex mutex_;
};

// Every block's bytes by its name; half of them go straight to their memory.
class ModelSink final : public CheckpointSink {
 public:
  explicit ModelSink(const Manifest& manifest) {
    manifest.for_each([&](const Manifest::Hit& hit) {
      if (hit.entry.kind != EntryKind::kBlock) return true;
      // All of them: target() looks them up while put() runs.
      std::vector<std::byte>& block = blocks[hit.entry.to_string()];
      if (hit.entry.id.value % 2 == 0) block.resize(static_cast<std::size_t>(hit.entry.raw_size));
      return true;
    });
  }
  std::span<std::byte> target(const ManifestEntry& entry) override {
    if (entry.id.value % 2 != 0) return {};
    return blocks.at(entry.to_string());
  }
  Status put(const ManifestEntry& entry, std::span<const std::byte> raw) override {
    blocks.at(entry.to_string()).assign(raw.begin(), raw.end());
    return {};
  }
  std::map<std::string, std::vector<std::byte>> blocks;
};

}  // namespace paramwire::testing
