#include "paramwire/store/checkpoint_memory.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint_block.hpp"
#include "paramwire/store/checkpoint_work.hpp"

#include <algorithm>
#include <set>

namespace paramwire {

Result<std::unique_ptr<MemorySource>> MemorySource::make(Version version, std::vector<MemoryBlock> blocks, const std::vector<std::pair<std::string, std::string>>& aliases,
                                                         std::uint32_t workers) {
  if (workers == 0 || workers > kCheckpointWorkersMax) return Error(Code::kInvalid, cat("workers is ", workers, ": 1 to ", kCheckpointWorkersMax));
  std::vector<PlainCheck> checks(blocks.size());
  WorkList work(blocks.size());
  PARAMWIRE_CHECK(run_workers(workers, "pw-save", [&](std::uint32_t) -> Status {
    while (const auto index = work.next()) {
      checks[*index] = check_plain(blocks[*index].bytes);
      checks[*index].rows = {};
    }
    return {};
  }));
  ManifestDraft draft;
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const MemoryBlock& block = blocks[i];
    ManifestEntry entry;
    entry.tensor = block.tensor;
    entry.shard = block.shard;
    entry.id = block_id(block.tensor, block.shard);
    entry.version = version;
    entry.dtype = block.dtype;
    entry.shape = block.shape;
    entry.raw_size = entry.stored_size = block.bytes.size();
    entry.crc64 = checks[i].crc64;
    entry.extent_table_crc = checks[i].table_crc;
    PARAMWIRE_CHECK(draft.put(entry, static_cast<std::uint32_t>(i)));
    names.insert(block.tensor);
  }
  for (const auto& [name, target] : aliases) {
    if (!names.contains(target)) return Error(Code::kInvalid, cat("alias \"", name, "\" of \"", target, "\", which is not among the tensors"));
    ManifestEntry entry;
    entry.kind = EntryKind::kAlias;
    entry.tensor = name;
    entry.target = target;
    entry.id = block_id(name, Shard::whole());
    entry.version = version;
    PARAMWIRE_CHECK(draft.put(entry, 0));
  }
  PARAMWIRE_TRY(manifest, Manifest::with_changes({}, version, std::move(draft)));
  auto made = std::unique_ptr<MemorySource>(new MemorySource());
  made->blocks_ = std::move(blocks);
  made->manifest_ = std::move(manifest);
  return made;
}

Result<std::span<const std::byte>> MemorySource::read(const ManifestEntry& entry, std::span<std::byte>) {
  const auto hit = manifest_.find(entry.id);
  if (!hit) return Error(Code::kInternal, cat("block ", entry, " is not of this source"));
  return blocks_[hit->tag].bytes;
}

std::span<std::byte> MemorySink::target(const ManifestEntry& entry) {
  const auto at = tensors_.find(entry.tensor);
  if (at == tensors_.end()) return {};
  if (entry.shard.kind == ShardKind::kWhole) return at->second;
  const auto rows = shard_rows(entry.shape, entry.shard);
  if (!rows.ok()) return {};
  // Shards begin on a whole byte (block_bytes()).
  const std::uint64_t offset = entry.shape.elements() / entry.shape[0] * dtype_bits(entry.dtype) * rows->first / 8;
  if (offset + entry.raw_size > at->second.size()) return {};
  return at->second.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(entry.raw_size));
}

std::vector<CheckpointTensor> checkpoint_tensors(const Manifest& manifest) {
  std::map<std::string_view, CheckpointTensor> found;
  std::vector<ManifestEntry> aliases;
  manifest.for_each([&](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kAlias) {
      aliases.push_back(hit.entry);
      return true;
    }
    CheckpointTensor& tensor = found[hit.entry.tensor];
    tensor.name = hit.entry.tensor;
    tensor.dtype = hit.entry.dtype;
    tensor.shape = hit.entry.shape;
    tensor.version = std::max(tensor.version, hit.entry.version);
    tensor.blocks.push_back(hit.entry);
    return true;
  });
  const auto first_row = [](const ManifestEntry& entry) {
    const auto rows = shard_rows(entry.shape, entry.shard);
    return rows.ok() ? rows->first : 0;
  };
  for (auto& [name, tensor] : found) {
    std::ranges::sort(tensor.blocks, {}, first_row);
    tensor.bytes = tensor_bytes(tensor.dtype, tensor.shape);
    std::uint64_t sum = 0;
    for (const ManifestEntry& block : tensor.blocks) sum += block.raw_size;
    tensor.covered = sum == tensor.bytes;
  }
  std::vector<CheckpointTensor> out;
  for (const ManifestEntry& alias : aliases) {
    const auto target = found.find(alias.target);
    CheckpointTensor tensor = target == found.end() ? CheckpointTensor{} : target->second;
    tensor.name = alias.tensor;
    tensor.alias_of = alias.target;
    tensor.version = std::max(tensor.version, alias.version);
    out.push_back(std::move(tensor));
  }
  for (auto& [name, tensor] : found) out.push_back(std::move(tensor));
  std::ranges::sort(out, {}, &CheckpointTensor::name);
  return out;
}

}  // namespace paramwire
