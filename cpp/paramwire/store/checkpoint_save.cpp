// save_checkpoint: what is there, what is to be written, the writing, the manifest, and what can go.
#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint.hpp"
#include "paramwire/store/checkpoint_block.hpp"
#include "paramwire/store/checkpoint_directory.hpp"
#include "paramwire/store/checkpoint_records.hpp"
#include "paramwire/store/checkpoint_work.hpp"

#include <algorithm>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace paramwire {

namespace {

// Notes of one save: a damaged base may have a million blocks.
constexpr std::size_t kNotesMax = 16;

bool same_block(const ManifestEntry& a, const ManifestEntry& b) {
  return a.id == b.id && a.tensor == b.tensor && a.shard == b.shard && a.dtype == b.dtype && a.shape == b.shape;
}

bool same_bytes(const ManifestEntry& a, const ManifestEntry& b) {
  return same_block(a, b) && a.raw_size == b.raw_size && a.crc64 == b.crc64 && a.extent_table_crc == b.extent_table_crc;
}

// `entry` of a source as a checkpoint has it: raw, whatever codec the source stores it in.
ManifestEntry as_raw(ManifestEntry entry, std::uint64_t crc64, std::uint32_t table_crc) {
  entry.codec = CodecId::kRaw;
  entry.stored_size = entry.raw_size;
  entry.crc64 = crc64;
  entry.extent_table_crc = table_crc;
  return entry;
}

class Save {
 public:
  Save(const std::string& directory, CheckpointSource& source, const CheckpointSaveOptions& options, FileSystem& files)
      : directory_(directory), source_(source), options_(options), files_(files), version_(*source.manifest().version()), root_(source.manifest().root()),
        gate_(options.memory_limit, options.workers) {}

  Result<CheckpointSaved> run();

 private:
  struct Block {
    ManifestEntry entry;  // of the source; once done, as the checkpoint has it
    std::vector<CheckpointLink> links;  // `file` is an index into names_
    bool todo = false;
  };
  struct Worker {
    Buffer raw, base;
    CheckpointScratch scratch;
    EncodedRecord record;
  };

  Result<bool> look(const DirectoryNames& names);
  Status remove_abandoned(const DirectoryNames& names);
  Status take_blocks();
  Status salvage(const DirectoryNames& names);
  bool take_salvaged(const SalvagedRecord& record, std::uint32_t file);
  void name_unchanged();
  Status write_blocks();
  Status write_some(RecordWriter& writer, WorkList& work, const std::vector<std::size_t>& todo);
  Status write_block(Block& block, RecordWriter& writer, Worker& worker);
  std::optional<RecordBase> base_of(const ManifestEntry& entry, Worker& worker);
  Status seal(RecordWriter& writer);
  Status write_manifest();
  void give_back();

  std::uint64_t need(const ManifestEntry& entry) const;
  std::uint32_t name_index(const std::string& name);
  std::vector<CheckpointLink> base_links(const ManifestEntry& entry);
  void note(std::string text);
  std::string path(std::string_view name) const { return checkpoint_path(directory_, name); }
  Result<bool> has_all_files(const CheckpointManifest& manifest) const;

  const std::string& directory_;
  CheckpointSource& source_;
  const CheckpointSaveOptions& options_;
  FileSystem& files_;
  const Version version_;
  const Digest root_;
  MemoryGate gate_;
  CheckpointSaved saved_;
  std::shared_ptr<Checkpoint> base_;
  std::uint32_t chain_ = 0;
  std::vector<Block> blocks_;          // and aliases, by id
  RecordWriter::Job job_;
  std::mutex mutex_;                   // of what follows, while workers run
  std::vector<std::string> names_;     // data files that links name
  std::map<std::string, std::uint32_t> name_indices_;
  std::map<std::string, std::uint64_t> sizes_;
};

void Save::note(std::string text) {
  const std::lock_guard lock(mutex_);
  if (saved_.notes.size() < kNotesMax) saved_.notes.push_back(std::move(text));
}

// Lock held, or before there are workers.
std::uint32_t Save::name_index(const std::string& name) {
  const auto [at, fresh] = name_indices_.emplace(name, static_cast<std::uint32_t>(names_.size()));
  if (fresh) names_.push_back(name);
  return at->second;
}

std::vector<CheckpointLink> Save::base_links(const ManifestEntry& entry) {
  std::vector<CheckpointLink> links = base_->links(entry);
  for (CheckpointLink& link : links) {
    const CheckpointFile& file = base_->facts().files[link.file];
    link.file = name_index(file.name);
    sizes_[file.name] = file.size;
  }
  return links;
}

Result<bool> Save::has_all_files(const CheckpointManifest& manifest) const {
  for (const CheckpointFile& file : manifest.files) {
    const auto open = open_file(files_, path(file.name), O_RDONLY);
    if (!open.ok() && (open.error().code() == Code::kNotFound || open.error().code() == Code::kCorrupt)) return false;
    if (!open.ok()) return open.error();
    PARAMWIRE_TRY(size, open->size());
    if (size != file.size) return false;
  }
  return true;
}

// Finds the checkpoint to build on. returns: whether this version is there already.
Result<bool> Save::look(const DirectoryNames& names) {
  for (const Version there : names.manifests) {
    if (there > version_) {
      return Error(Code::kStale, cat("version ", version_, " is older than checkpoint ", there, " in ", directory_, ", and versions never go back: the source restarted from an older state; "
                                     "start it with `paramwire serve --checkpoint ", directory_, "`, or save into another directory"));
    }
    auto manifest = read_checkpoint_manifest(directory_, there, files_);
    if (!manifest.ok()) {
      note(manifest.error().message());
      continue;
    }
    PARAMWIRE_TRY(whole, has_all_files(*manifest));
    if (there == version_) {
      if (manifest->source_root != root_) {
        return Error(Code::kStale, cat("checkpoint ", there, " in ", directory_, " is of another model: its manifest has another root; save into another directory"));
      }
      if (whole) return true;
    }
    if (!whole) {
      note(cat("checkpoint ", there, " is not whole: a data file is gone, cut or no file"));
      continue;
    }
    if (there == version_) continue;
    PARAMWIRE_TRY(base, Checkpoint::open(directory_, there, files_));
    chain_ = base->facts().chain + 1;
    if (chain_ < options_.full_every) base_ = std::move(base);
    break;
  }
  if (!base_) chain_ = 0;
  return false;
}

// What saves left behind that no manifest can name: temporary files, and data files above the newest manifest. Those of this version may be used.
Status Save::remove_abandoned(const DirectoryNames& names) {
  std::vector<std::string> gone = names.temporary_manifests;
  for (const DirectoryNames::Data& data : names.data) {
    const bool above = names.manifests.empty() || data.is.version > names.manifests.front();
    if (data.is.version != version_ && (data.is.temporary || above)) gone.push_back(data.name);
  }
  for (const std::string& name : gone) {
    if (const int result = files_.unlink(path(name)); result < 0) return file_error(files_, "remove", path(name), result);
    ++saved_.leftovers_removed;
  }
  return {};
}

std::uint64_t Save::need(const ManifestEntry& entry) const {
  const auto hit = base_ && options_.delta ? base_->manifest().find(entry.id) : std::nullopt;
  std::uint64_t bytes = source_.lends() ? 0 : entry.raw_size;
  bytes += encode_bytes_max(entry.raw_size, options_.codec, hit.has_value());
  if (hit) bytes += entry.raw_size + base_->scratch_bytes(hit->entry);
  return options_.verify ? bytes + entry.raw_size : bytes;
}

Status Save::take_blocks() {
  Status fits;
  source_.manifest().for_each([&](const Manifest::Hit& hit) {
    const bool block = hit.entry.kind == EntryKind::kBlock;
    blocks_.push_back({hit.entry, {}, block});
    if (!block) return true;
    ++saved_.blocks;
    saved_.raw_bytes += hit.entry.raw_size;
    if (!gate_.fits(need(hit.entry))) {
      fits = Error(Code::kInvalid, cat("block ", hit.entry, " needs ", need(hit.entry), " bytes of buffers, more than memory_limit, ", options_.memory_limit, ", has for one with ",
                                       options_.workers, " workers: raise it, or publish the tensor in row ranges"));
    }
    return fits.ok();
  });
  return fits;
}

// A record that an earlier save of this version left whole: whether this save would have written it.
bool Save::take_salvaged(const SalvagedRecord& record, std::uint32_t file) {
  const ManifestEntry& entry = record.head.entry;
  const auto at = std::ranges::lower_bound(blocks_, entry.id, {}, [](const Block& block) { return block.entry.id; });
  if (at == blocks_.end() || !at->todo || !same_block(at->entry, entry) || at->entry.version != entry.version) return false;
  if (at->entry.codec == CodecId::kRaw && !same_bytes(at->entry, entry)) return false;
  const RecordHeader& header = record.head.header;
  at->links.push_back({file, record.offset, header.record_size(), header.header_crc});
  if (header.form == RecordForm::kDelta) {
    const auto base = base_ ? base_->manifest().find(entry.id) : std::nullopt;
    if (!base || header.base != base_->manifest().version() || header.base_crc64 != base->entry.crc64) {
      at->links.clear();
      return false;
    }
    for (const CheckpointLink& link : base_links(base->entry)) at->links.push_back(link);
  }
  at->entry = as_raw(at->entry, entry.crc64, entry.extent_table_crc);
  at->todo = false;
  ++saved_.blocks_resumed;
  return true;
}

Status Save::salvage(const DirectoryNames& names) {
  job_.directory = directory_;
  job_.header = {version_, root_, 0};
  for (const DirectoryNames::Data& data : names.data) {
    if (data.is.version != version_) continue;
    job_.number = std::max(job_.number.load(), data.is.number + 1);
    const std::string sealed = checkpoint_data_name(data.is.version, data.is.number);
    const std::uint32_t index = name_index(sealed);
    const auto file = salvage_data_file(directory_, data.name, job_.header, [&](const SalvagedRecord& record) { return take_salvaged(record, index); }, files_);
    if (!file.ok()) return file.error();
    if (file->size == 0) ++saved_.leftovers_removed;
    sizes_[sealed] = file->size;
  }
  return {};
}

// Blocks that the base has with the same bytes are not written again.
void Save::name_unchanged() {
  if (!base_) return;
  for (Block& block : blocks_) {
    if (!block.todo || block.entry.codec != CodecId::kRaw) continue;
    const auto hit = base_->manifest().find(block.entry.id);
    if (!hit || hit->entry.kind != EntryKind::kBlock || !same_bytes(hit->entry, block.entry)) continue;
    block.links = base_links(hit->entry);
    block.todo = false;
    ++saved_.blocks_unchanged;
  }
}

// The base's bytes of `entry`; nullopt: it has none that fit, or they can't be read, which is no reason to fail.
std::optional<RecordBase> Save::base_of(const ManifestEntry& entry, Worker& worker) {
  if (!base_ || !options_.delta || entry.raw_size == 0) return std::nullopt;
  const auto hit = base_->manifest().find(entry.id);
  if (!hit || !same_block(hit->entry, entry)) return std::nullopt;
  const auto read = [&]() -> Result<RecordBase> {
    PARAMWIRE_TRY(bytes, room(worker.base, entry.raw_size));
    PARAMWIRE_CHECK(base_->read(hit->entry, bytes, worker.scratch));
    return RecordBase{bytes, *base_->manifest().version(), hit->entry.crc64};
  };
  auto base = read();
  if (base.ok()) return *base;
  note(cat("written in full, since its base can't be read: ", base.error().message()));
  return std::nullopt;
}

Status Save::write_block(Block& block, RecordWriter& writer, Worker& worker) {
  const ManifestEntry& entry = block.entry;
  std::span<std::byte> scratch;
  if (!source_.lends()) {
    PARAMWIRE_TRY(buffer, room(worker.raw, entry.raw_size));
    scratch = buffer;
  }
  PARAMWIRE_TRY(raw, source_.read(entry, scratch));
  if (raw.size() != entry.raw_size) return Error(Code::kInternal, cat("block ", entry, ": the source gave ", raw.size(), " bytes, not ", entry.raw_size));
  const PlainCheck check = check_plain(raw);
  if (entry.codec == CodecId::kRaw && check.crc64 != entry.crc64) {
    return Error(Code::kCorrupt, cat("block ", entry, ": its bytes are not those of the source's manifest (CRC-64 ", hex64(check.crc64), ", not ", hex64(entry.crc64),
                                     "): they changed while they were saved; save again, and leave them alone meanwhile"));
  }
  const ManifestEntry as_saved = as_raw(entry, check.crc64, check.table_crc);
  const auto hit = base_ ? base_->manifest().find(entry.id) : std::nullopt;
  if (hit && same_bytes(hit->entry, as_saved)) {  // of a source whose CRCs are not those of raw bytes
    const std::lock_guard lock(mutex_);
    block.links = base_links(hit->entry);
    block.entry = as_saved;
    ++saved_.blocks_unchanged;
    return {};
  }
  PARAMWIRE_CHECK(encode_record(as_saved, raw, check, options_.codec, base_of(entry, worker), options_.verify, worker.record));
  PARAMWIRE_TRY(place, writer.append(worker.record));
  const std::lock_guard lock(mutex_);
  const bool delta = worker.record.header.form == RecordForm::kDelta;
  block.links.push_back({name_index(writer.name()), place.offset, place.size, worker.record.header.header_crc});
  if (delta) {
    for (const CheckpointLink& link : base_links(hit->entry)) block.links.push_back(link);
  }
  block.entry = as_saved;
  ++(delta ? saved_.blocks_delta : saved_.blocks_full);
  return {};
}

Status Save::seal(RecordWriter& writer) {
  PARAMWIRE_TRY(size, writer.seal());
  const std::lock_guard lock(mutex_);
  if (size > 0) sizes_[writer.name()] = size;
  return {};
}

Status Save::write_some(RecordWriter& writer, WorkList& work, const std::vector<std::size_t>& todo) {
  CheckpointProgress* const progress = options_.progress.get();
  Worker worker;
  while (const auto index = work.next()) {
    if (must_stop(progress)) {
      return Error(Code::kTimeout, cat("the save of version ", version_, " into ", directory_, " was stopped with ", progress->blocks_done.load(), " of ", progress->blocks.load(),
                                       " blocks written: they stay for the next save of this version; ",
                                       base_ ? cat("checkpoint ", *base_->manifest().version(), " is whole") : std::string("earlier checkpoints are as they were")));
    }
    Block& block = blocks_[todo[*index]];
    const std::uint64_t bytes = need(block.entry);
    gate_.acquire(bytes);
    Status status = write_block(block, writer, worker);
    if (!gate_.keeps(bytes)) worker = {};
    gate_.release(bytes);
    PARAMWIRE_CHECK(std::move(status));
    if (writer.wants_seal()) PARAMWIRE_CHECK(seal(writer));
    if (progress != nullptr) {
      ++progress->blocks_done;
      progress->bytes_done += block.entry.raw_size;
    }
  }
  return {};
}

Status Save::write_blocks() {
  std::vector<std::size_t> todo;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (!blocks_[i].todo) continue;
    todo.push_back(i);
    bytes += blocks_[i].entry.raw_size;
  }
  if (CheckpointProgress* const progress = options_.progress.get(); progress != nullptr) {
    progress->blocks = saved_.blocks;
    progress->blocks_done = saved_.blocks - todo.size();
    progress->bytes = saved_.raw_bytes;
    progress->bytes_done = saved_.raw_bytes - bytes;
  }
  WorkList work(todo.size());
  const auto workers = static_cast<std::uint32_t>(std::clamp<std::size_t>(todo.size(), 1, options_.workers));
  return run_workers(workers, "pw-save", [&](std::uint32_t) -> Status {
    RecordWriter writer(job_, files_);
    Status status = write_some(writer, work, todo);
    if (status.ok()) status = seal(writer);
    if (!status.ok()) {
      work.fail();
      writer.leave();
    }
    const std::lock_guard lock(mutex_);
    saved_.written_bytes += writer.written_bytes();
    return status;
  });
}

Status Save::write_manifest() {
  CheckpointManifest out;
  out.created_us = options_.created_us;
  out.source_root = root_;
  out.chain = chain_;
  std::set<std::uint32_t> used;
  for (const Block& block : blocks_) {
    for (const CheckpointLink& link : block.links) used.insert(link.file);
  }
  std::vector<std::uint32_t> ordered(used.begin(), used.end());
  std::ranges::sort(ordered, {}, [&](std::uint32_t index) { return names_[index]; });
  std::vector<std::uint32_t> place(names_.size());
  for (const std::uint32_t index : ordered) {
    place[index] = static_cast<std::uint32_t>(out.files.size());
    out.files.push_back({names_[index], sizes_.at(names_[index])});
  }
  ManifestDraft draft;
  for (Block& block : blocks_) {
    for (CheckpointLink& link : block.links) link.file = place[link.file];
    PARAMWIRE_CHECK(draft.put(block.entry, static_cast<std::uint32_t>(out.placements.size())));
    out.placements.push_back(std::move(block.links));
  }
  PARAMWIRE_TRY(manifest, Manifest::with_changes({}, version_, std::move(draft)));
  out.manifest = std::move(manifest);
  const std::vector<std::byte> bytes = encode_checkpoint_manifest(out);
  if (bytes.size() > kManifestFileBytesMax) {
    return Error(Code::kInvalid, cat("the manifest of version ", version_, " would have ", bytes.size(), " bytes for ", saved_.blocks, " blocks, more than the ", kManifestFileBytesMax,
                                     " that are read: publish in larger blocks, or save in full more often (full_every)"));
  }
  return write_sealed(directory_, checkpoint_manifest_name(version_), bytes, files_);
}

// A full disk gets back what this save took: others need the room, and blocks that are on no disk yet can be saved again.
void Save::give_back() {
  const auto names = read_directory(directory_, files_);
  if (!names.ok()) return;
  if (!names->manifests.empty() && names->manifests.front() == version_) return;
  for (const DirectoryNames::Data& data : names->data) {
    if (data.is.version == version_) files_.unlink(path(data.name));
  }
}

Result<CheckpointSaved> Save::run() {
  PARAMWIRE_TRY(lock, lock_for_saving(directory_, files_));
  PARAMWIRE_TRY(names, read_directory(directory_, files_));
  saved_.version = version_;
  PARAMWIRE_TRY(existed, look(names));
  if (existed) {
    saved_.existed = true;
    PARAMWIRE_CHECK(sync_directory(files_, directory_));  // whoever renamed it may have died before it did
    return std::move(saved_);
  }
  saved_.full = !base_;
  PARAMWIRE_CHECK(remove_abandoned(names));
  PARAMWIRE_CHECK(take_blocks());
  PARAMWIRE_CHECK(salvage(names));
  name_unchanged();
  const auto write = [&]() -> Status {
    PARAMWIRE_CHECK(write_blocks());
    PARAMWIRE_CHECK(sync_directory(files_, directory_));
    return write_manifest();
  };
  if (Status status = write(); !status.ok()) {
    if (status.error().code() == Code::kBackpressure) give_back();
    return std::move(status).error();
  }
  base_.reset();  // it holds the lock of readers
  // The new checkpoint is whole, so nothing of this makes the save fail: what could not go is told, and goes next time.
  RemovedFiles removed = remove_old_checkpoints(directory_, options_.keep, files_);
  saved_.removed = std::move(removed.versions);
  for (std::string& text : removed.notes) note(std::move(text));
  return std::move(saved_);
}

}  // namespace

Result<CheckpointSaved> save_checkpoint(const std::string& directory, CheckpointSource& source, const CheckpointSaveOptions& options, FileSystem& files) {
  if (options.workers == 0 || options.workers > kCheckpointWorkersMax) return Error(Code::kInvalid, cat("workers is ", options.workers, ": 1 to ", kCheckpointWorkersMax));
  if (options.full_every == 0) return Error(Code::kInvalid, "full_every is 0: 1 writes every checkpoint in full");
  if (!source.manifest().version()) return Error(Code::kNotFound, "the source has nothing published: publish first");
  return Save(directory, source, options, files).run();
}

}  // namespace paramwire
