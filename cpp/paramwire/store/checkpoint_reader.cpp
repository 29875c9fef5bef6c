// Checkpoint: one version, open for reading; list_checkpoints; restore_checkpoint.
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint.hpp"
#include "paramwire/store/checkpoint_block.hpp"
#include "paramwire/store/checkpoint_directory.hpp"
#include "paramwire/store/checkpoint_work.hpp"

#include <algorithm>
#include <mutex>
#include <utility>
#include <fcntl.h>

namespace paramwire {

namespace {

// What is read of a record first: its head, in nearly every case, and of small blocks all.
constexpr std::size_t kHeadReadBytes = 1024;
// Data files that one Checkpoint keeps open, a quarter of the usual limit of a process (1024); those beyond are opened for each block.
constexpr std::size_t kOpenFilesMax = 256;

std::string versions_text(const std::vector<Version>& versions) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, versions.size()); ++i) text += cat(i > 0 ? ", " : "", versions[i]);
  if (versions.size() > kShown) text += cat(" and ", versions.size() - kShown, " more");
  return text;
}

bool same_block(const ManifestEntry& a, const ManifestEntry& b) {
  return a.id == b.id && a.tensor == b.tensor && a.shard == b.shard && a.dtype == b.dtype && a.shape == b.shape;
}

std::string extents_text(const std::vector<std::uint64_t>& bad, std::uint64_t rows) {
  constexpr std::size_t kShown = 4;
  if (rows == 0) return "its only extent";
  if (bad.empty()) return "no single extent";
  std::string text = bad.size() == 1 ? "extent " : "extents ";
  for (std::size_t i = 0; i < std::min(kShown, bad.size()); ++i) text += cat(i > 0 ? ", " : "", bad[i]);
  if (bad.size() > kShown) text += cat(" and ", bad.size() - kShown, " more");
  return cat(text, " of ", rows);
}

// Whether the bytes of `entry` go straight to `target`. An empty block has nothing to go anywhere: put() is told of it.
bool is_direct(std::span<std::byte> target, const ManifestEntry& entry) { return !target.empty() && target.size() == entry.raw_size; }

// Whether a data file is there with its size; what is inside is another question.
Status check_file_size(const std::string& directory, const CheckpointFile& file, FileSystem& files) {
  PARAMWIRE_TRY(open, open_file(files, checkpoint_path(directory, file.name), O_RDONLY));
  PARAMWIRE_TRY(size, open.size());
  if (size != file.size) return Error(Code::kCorrupt, cat(open.path(), " has ", size, " bytes, not ", file.size));
  return {};
}

}  // namespace

Checkpoint::Checkpoint(std::string directory, CheckpointManifest manifest, FileSystem& files)
    : directory_(std::move(directory)), manifest_(std::move(manifest)), files_(files) {
  open_.resize(std::min(manifest_.files.size(), kOpenFilesMax));
}

Checkpoint::~Checkpoint() = default;

Result<std::shared_ptr<Checkpoint>> Checkpoint::open(const std::string& directory, const std::optional<Version>& version, FileSystem& files) {
  // Looked at before the lock's file is made: a directory that holds none is left as it is.
  PARAMWIRE_TRY(before, read_directory(directory, files));
  if (before.manifests.empty()) {
    return Error(Code::kNotFound, cat("there is no checkpoint in ", directory, before.data.empty() ? "" : " (what is there was left by a save that was ended)",
                                      ": save one first, or check the path"));
  }
  File lock = lock_for_reading(directory, files);
  PARAMWIRE_TRY(names, read_directory(directory, files));
  std::vector<std::string> notes;
  for (const Version candidate : names.manifests) {
    if (version && candidate != *version) continue;
    auto manifest = read_checkpoint_manifest(directory, candidate, files);
    if (!manifest.ok()) {
      if (version) return std::move(manifest).error();
      notes.push_back(manifest.error().message());
      continue;
    }
    auto made = std::shared_ptr<Checkpoint>(new Checkpoint(directory, *std::move(manifest), files));
    made->readers_ = std::move(lock);
    made->notes_ = std::move(notes);
    return made;
  }
  if (version) return Error(Code::kNotFound, cat("no checkpoint of version ", *version, " in ", directory, "; there are ", versions_text(names.manifests)));
  if (notes.empty()) return Error(Code::kStale, cat("the checkpoints in ", directory, " were removed just now: look again"));
  return Error(Code::kCorrupt, cat("no checkpoint in ", directory, " is whole: ", notes.front(), "; take another replica"));
}

const std::vector<CheckpointLink>& Checkpoint::links(const ManifestEntry& entry) const {
  static const std::vector<CheckpointLink> kNone;
  const auto hit = manifest_.manifest.find(entry.id);
  return hit ? manifest_.placements[hit->tag] : kNone;
}

std::uint64_t Checkpoint::scratch_bytes(const ManifestEntry& entry) const {
  const auto& links = this->links(entry);
  std::uint64_t largest = 0;
  for (const CheckpointLink& link : links) largest = std::max(largest, std::min(link.size, stored_bytes_max(RecordForm::kDelta, CodecId::kRaw, entry.raw_size)));
  return largest + (links.size() > 1 ? entry.raw_size : 0);
}

Result<std::shared_ptr<const File>> Checkpoint::file(std::uint32_t index) const {
  const std::lock_guard lock(mutex_);
  if (index < open_.size() && open_[index]) return open_[index];
  auto opened = open_file(files_, checkpoint_path(directory_, manifest_.files[index].name), O_RDONLY);
  if (!opened.ok() && opened.error().code() == Code::kNotFound) {
    return Error(Code::kStale, cat(opened.error().message(), ": version ", to_text(manifest_.manifest.version()), " needs it, and somebody removed it; take another checkpoint"));
  }
  if (!opened.ok()) return std::move(opened).error();
  auto file = std::make_shared<const File>(*std::move(opened));
  if (index < open_.size()) open_[index] = file;
  return file;
}

// One record of `entry`, of this version (`newest`) or an earlier one, into `out`. base: the raw bytes that a delta builds on.
Status Checkpoint::load(const ManifestEntry& entry, const CheckpointLink& link, RecordForm form, bool newest, std::span<const std::byte> base, std::span<std::byte> out,
                        CheckpointScratch& scratch) const {
  PARAMWIRE_TRY(file, this->file(link.file));
  const auto damaged = [&](std::string_view text) {
    return Error(Code::kCorrupt, cat(file->path(), " byte ", link.offset, ", block ", entry, ": ", text, "; take another checkpoint or replica"));
  };
  // The head and, of a small block, the payload with it.
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min<std::uint64_t>(kHeadReadBytes, link.size)));
  PARAMWIRE_CHECK(file->read(bytes, link.offset));
  const auto header = decode_record_header(bytes);
  if (!header.ok()) return damaged(header.error().message());
  if (header->header_crc != link.header_crc) return damaged("the record's header_crc is another than the manifest's: another record lies here");
  if (header->record_size() != link.size) return damaged("the record's sizes are not the manifest's");
  const auto head_size = static_cast<std::size_t>(header->head_size());
  if (const std::size_t have = bytes.size(); have < head_size) {
    bytes.resize(head_size);
    PARAMWIRE_CHECK(file->read(std::span(bytes).subspan(have), link.offset + have));
  }
  const auto head = decode_record_head(std::span(bytes).first(head_size));
  if (!head.ok()) return damaged(head.error().message());
  if (!same_block(head->entry, entry)) return damaged(cat("the record is of block ", head->entry, ", ", dtype_name(head->entry.dtype), " ", head->entry.shape));
  if (newest && head->entry.crc64 != entry.crc64) return damaged("the record is of another version than the manifest's: its CRC-64 is another");
  if (header->form != form) return damaged(form == RecordForm::kDelta ? "the record is no delta, as the manifest has it" : "the record is a delta, where the manifest has a full one");
  if (header->stored_size > stored_bytes_max(header->form, header->codec, entry.raw_size)) {
    return damaged(cat("the payload would have ", header->stored_size, " bytes, more than a block of ", entry.raw_size, " can have"));
  }
  const bool plain = header->form == RecordForm::kFull && header->codec == CodecId::kRaw;
  std::span<std::byte> payload = out;
  if (!plain) {
    PARAMWIRE_TRY(stored, room(scratch.stored, header->stored_size));
    payload = stored;
  }
  if (bytes.size() >= link.size) {
    std::ranges::copy(std::span(bytes).subspan(head_size, payload.size()), payload.begin());
    if (crc64(payload) != header->stored_crc64) return damaged("the payload's CRC-64 is wrong");
  } else {
    PARAMWIRE_TRY(check, scan_payload(*file, link.offset, *head, payload));
    if (check.crc64 != header->stored_crc64 || !check.bad_extents.empty()) return damaged(cat("the payload's CRC is wrong, in ", extents_text(check.bad_extents, header->row_count)));
  }
  if (Status decoded = decode_record(*head, payload, base, out); !decoded.ok()) {
    return decoded.error().code() == Code::kCorrupt || decoded.error().code() == Code::kStale ? Status(damaged(decoded.error().message())) : std::move(decoded);
  }
  return {};
}

Status Checkpoint::read(const ManifestEntry& entry, std::span<std::byte> target, CheckpointScratch& scratch) const {
  const auto& links = this->links(entry);
  if (links.empty()) return Error(Code::kNotFound, cat("block ", entry, " is not in version ", to_text(manifest_.manifest.version()), " of ", directory_));
  if (target.size() != entry.raw_size) return Error(Code::kInvalid, cat("block ", entry, " has ", entry.raw_size, " bytes, its target ", target.size()));
  // From the full record on, to and fro between target and scratch, so that the last one lands in the target.
  std::span<std::byte> other;
  if (links.size() > 1) {
    PARAMWIRE_TRY(raw, room(scratch.raw, target.size()));
    other = raw;
  }
  std::span<const std::byte> before;
  for (std::size_t i = links.size(); i-- > 0;) {
    const std::span<std::byte> out = i % 2 == 0 ? target : other;
    const RecordForm form = i + 1 == links.size() ? RecordForm::kFull : RecordForm::kDelta;
    PARAMWIRE_CHECK(load(entry, links[i], form, i == 0, before, out, scratch));
    before = out;
  }
  return {};
}

// ---------------------------------------------------------------- restore

Status restore_checkpoint(const Checkpoint& checkpoint, CheckpointSink& sink, const CheckpointRestoreOptions& options) {
  std::vector<ManifestEntry> blocks;
  checkpoint.manifest().for_each([&](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kBlock) blocks.push_back(hit.entry);
    return true;
  });
  return restore_blocks(checkpoint, std::move(blocks), sink, options);
}

Status restore_blocks(const Checkpoint& checkpoint, std::vector<ManifestEntry> blocks, CheckpointSink& sink, const CheckpointRestoreOptions& options) {
  if (options.workers == 0 || options.workers > kCheckpointWorkersMax) return Error(Code::kInvalid, cat("workers is ", options.workers, ": 1 to ", kCheckpointWorkersMax));
  MemoryGate gate(options.memory_limit, options.workers);
  const auto need = [&](const ManifestEntry& entry, bool direct) { return (direct ? 0 : entry.raw_size) + checkpoint.scratch_bytes(entry); };
  std::uint64_t bytes = 0;
  for (const ManifestEntry& entry : blocks) {
    bytes += entry.raw_size;
    const std::uint64_t here = need(entry, is_direct(sink.target(entry), entry));
    if (gate.fits(here)) continue;
    return Error(Code::kInvalid, cat("block ", entry, " needs ", here, " bytes of buffers, more than memory_limit, ", options.memory_limit, ", has for one with ", options.workers,
                                     " workers: raise it"));
  }
  // In the order of the files, so that each worker reads ahead of itself.
  const auto place = [&](const ManifestEntry& entry) {
    const CheckpointLink& link = checkpoint.links(entry).front();
    return std::pair(link.file, link.offset);
  };
  std::ranges::sort(blocks, [&](const ManifestEntry& a, const ManifestEntry& b) { return place(a) < place(b); });
  CheckpointProgress* const progress = options.progress.get();
  if (progress != nullptr) {
    progress->blocks = blocks.size();
    progress->bytes = bytes;
  }
  WorkList work(blocks.size());
  std::mutex putting;
  return run_workers(options.workers, "pw-restore", [&](std::uint32_t) -> Status {
    CheckpointScratch scratch;
    Buffer own;
    const auto one = [&](const ManifestEntry& entry, std::span<std::byte> target, bool direct) -> Status {
      if (must_stop(progress)) {
        return Error(Code::kTimeout, cat("the restore was stopped: ", progress->blocks_done.load(), " of ", blocks.size(), " blocks were read; nothing counts, start again"));
      }
      if (!direct) {
        PARAMWIRE_TRY(buffer, room(own, entry.raw_size));
        target = buffer;
      }
      PARAMWIRE_CHECK(checkpoint.read(entry, target, scratch));
      if (direct) return {};
      const std::lock_guard lock(putting);
      return sink.put(entry, target);
    };
    while (const auto index = work.next()) {
      const ManifestEntry& entry = blocks[*index];
      const std::span<std::byte> target = sink.target(entry);
      const bool direct = is_direct(target, entry);
      const std::uint64_t taken = need(entry, direct);
      gate.acquire(taken);
      Status status = one(entry, target, direct);
      if (!gate.keeps(own.size() + scratch.stored.size() + scratch.raw.size())) {
        own = {};
        scratch = {};
      }
      gate.release(taken);
      if (!status.ok()) {
        work.fail();
        return status;
      }
      if (progress != nullptr) {
        ++progress->blocks_done;
        progress->bytes_done += entry.raw_size;
      }
    }
    return {};
  });
}

// ---------------------------------------------------------------- what is there

Result<std::vector<CheckpointSummary>> list_checkpoints(const std::string& directory, FileSystem& files) {
  PARAMWIRE_TRY(names, read_directory(directory, files));
  std::vector<CheckpointSummary> out;
  for (const Version version : names.manifests) {
    CheckpointSummary summary;
    summary.file = checkpoint_manifest_name(version);
    summary.version = version;
    const auto manifest = read_checkpoint_manifest(directory, version, files);
    if (!manifest.ok()) {
      summary.problem = manifest.error().message();
      out.push_back(std::move(summary));
      continue;
    }
    summary.created_us = manifest->created_us;
    summary.chain = manifest->chain;
    summary.full = manifest->chain == 0;
    summary.raw_bytes = manifest->manifest.total_raw_bytes();
    for (const auto& links : manifest->placements) {
      if (!links.empty()) ++summary.blocks;
      for (const CheckpointLink& link : links) {
        summary.stored_bytes += link.size;
        if (parse_checkpoint_name(manifest->files[link.file].name).version == version) summary.written_bytes += link.size;
      }
    }
    for (const CheckpointFile& file : manifest->files) {
      if (const Status fine = check_file_size(directory, file, files); !fine.ok() && summary.problem.empty()) summary.problem = fine.error().message();
    }
    summary.whole = summary.problem.empty();
    out.push_back(std::move(summary));
  }
  return out;
}

}  // namespace paramwire
