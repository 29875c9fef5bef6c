// Checkpoints: versions of a model in a directory, saved whole or not at all, restored bit for bit. Layout: wire/FORMAT.md, "Checkpoints".
//
//   auto saved = save_checkpoint("weights", source, {.keep = 3}, posix_files());
//   PARAMWIRE_TRY(checkpoint, Checkpoint::open("weights", std::nullopt, posix_files()));
//   PARAMWIRE_CHECK(restore_checkpoint(*checkpoint, sink, {}));
//
// Where the bytes come from and go to are seams (CheckpointSource, CheckpointSink), as is the file system, so that tests stop a save at any of
// its system calls. Files are read and written by pread(2) and pwrite(2), never mapped: what a source is mapped from may be saved
// over, and a file that is cut meanwhile is an error, not a signal.
//
// errors of all below that touch files, beside those named: kBackpressure when the disk or a quota is full, or another process saves into the
// directory; kUnavailable when the directory can't be read, written, locked or renamed in, with the call and errno; kCorrupt when a
// read fails (EIO). Texts name path, bytes, and the next step. An earlier checkpoint is whole after each of them.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/store/checkpoint_files.hpp"
#include "paramwire/store/checkpoint_format.hpp"
#include "paramwire/wire/manifest.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paramwire {

// What is to be saved. Its methods are called by several threads at once.
class CheckpointSource {
 public:
  virtual ~CheckpointSource() = default;
  // All blocks and aliases, with the version that the checkpoint will have. The same for the whole save.
  virtual const Manifest& manifest() const = 0;
  // The raw bytes of `entry`: memory of the source that stays as it is until the save is over, or `scratch`, filled.
  // scratch: entry.raw_size bytes; empty when lends() says so
  virtual Result<std::span<const std::byte>> read(const ManifestEntry& entry, std::span<std::byte> scratch) = 0;
  // Whether read() gives memory of its own and needs no scratch.
  virtual bool lends() const noexcept { return false; }
};

// What a save, restore or verification under way tells other threads, and is told by them.
struct CheckpointProgress {
  std::atomic<std::uint64_t> blocks{0};       // to be done in all
  std::atomic<std::uint64_t> blocks_done{0};
  std::atomic<std::uint64_t> bytes{0};        // raw bytes to be done in all (verification: bytes of files)
  std::atomic<std::uint64_t> bytes_done{0};
  // On steady_clock(): past it the work is abandoned before the next block, with kTimeout.
  std::atomic<Micros> stop_at{kNever};
};

// Of block buffers over all workers. Each worker holds one block: its raw bytes (unless the source lends them), its stored bytes, and for a delta its
// base and the delta. A quarter at most is buffers that workers keep. Less than two workers need makes them take turns; a block
// that needs more alone than the rest is refused before anything is written. Delta and codec take up to 16 MiB a worker beside it.
inline constexpr std::uint64_t kCheckpointMemoryDefault = std::uint64_t{4} << 30;

struct CheckpointSaveOptions {
  std::uint32_t workers = 2;
  // Every N-th save writes every block in full; those between write deltas, and nothing of blocks that did not change. 1: all full. Bounds how many
  // records a restore reads for a block, and how long old data files are kept.
  std::uint32_t full_every = 8;
  // Checkpoints that stay, this one included; older ones are removed after the new one is whole. 0: all stay.
  std::uint32_t keep = 0;
  CodecId codec = CodecId::kPlanes;  // of blocks in full; those that don't get smaller are stored raw
  bool delta = true;                 // false: what changed is written in full
  bool verify = false;               // decodes every record and compares, before it is written
  std::uint64_t memory_limit = kCheckpointMemoryDefault;
  std::uint64_t created_us = 0;      // since 1970-01-01 UTC, for people; 0: not known
  std::shared_ptr<CheckpointProgress> progress{};
};

// What a save did.
struct CheckpointSaved {
  Version version;
  bool existed = false;                // the version was there already, the same: nothing was written
  bool full = false;
  std::uint64_t blocks = 0;            // in the version; the next four add up to it
  std::uint64_t blocks_full = 0;       // written in full
  std::uint64_t blocks_delta = 0;      // written as a delta
  std::uint64_t blocks_unchanged = 0;  // not written: an earlier record is named
  std::uint64_t blocks_resumed = 0;    // found whole in what an earlier save of this version left behind
  std::uint64_t raw_bytes = 0;         // of all blocks
  std::uint64_t written_bytes = 0;     // to data files by this call
  std::uint64_t leftovers_removed = 0; // files of saves that were ended
  std::vector<Version> removed;        // by `keep`
  std::vector<std::string> notes;      // what went on otherwise than asked, for people: a base that could not be read, files kept for a damaged manifest
};

// Saves `source` into `directory`, which is made if its parent is there. When an earlier save of this version and root was ended, what it
// left whole is used, after its CRCs were checked.
// errors: kStale when the source's version is below the newest checkpoint's, or the same with another root (versions never go back: save
//         into another directory, or restart the server from the checkpoint); kInvalid for options or a block larger than
//         memory_limit allows; kTimeout when progress->stop_at passed: what is sealed stays for the next save; kCorrupt when a
//         source's bytes are not what its manifest says; the source's own.
// threads: any; blocks until done, in `workers` threads "pw-save"
Result<CheckpointSaved> save_checkpoint(const std::string& directory, CheckpointSource& source, const CheckpointSaveOptions& options, FileSystem& files);

// Buffers of one thread that reads blocks. They grow to the largest block read, and are kept.
struct CheckpointScratch {
  Buffer stored;
  Buffer raw;
};

// One checkpoint, open for reading. Any thread. While it lives, no save removes a file in the directory (old ones are left to later saves).
class Checkpoint {
 public:
  // version: none: the newest that is whole; manifests newer than it that can't be read are told in notes().
  // errors: kNotFound when there is none, or not that one, naming those that are there; kCorrupt when that version's manifest is damaged.
  static Result<std::shared_ptr<Checkpoint>> open(const std::string& directory, const std::optional<Version>& version, FileSystem& files);
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  const Manifest& manifest() const noexcept { return manifest_.manifest; }  // codec raw; tags are indices of placements
  const CheckpointManifest& facts() const noexcept { return manifest_; }
  const std::string& directory() const noexcept { return directory_; }
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  // The raw bytes of `entry`, of this manifest, into `target`, of its raw_size; undefined after an error. Verified, stored and raw.
  // errors: kCorrupt naming file, block and extent; kStale when a data file is gone (somebody removed it by hand).
  Status read(const ManifestEntry& entry, std::span<std::byte> target, CheckpointScratch& scratch) const;
  // The links of `entry` in the order of the file.
  const std::vector<CheckpointLink>& links(const ManifestEntry& entry) const;
  // Bytes that reading `entry` takes beside its target.
  std::uint64_t scratch_bytes(const ManifestEntry& entry) const;

 private:
  Checkpoint(std::string directory, CheckpointManifest manifest, FileSystem& files);
  Result<std::shared_ptr<const File>> file(std::uint32_t index) const;
  Status load(const ManifestEntry& entry, const CheckpointLink& link, RecordForm form, bool newest, std::span<const std::byte> base, std::span<std::byte> out, CheckpointScratch& scratch) const;

  const std::string directory_;
  const CheckpointManifest manifest_;
  FileSystem& files_;
  File readers_;  // holds the lock that keeps files from being removed
  std::vector<std::string> notes_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const File>> open_;  // data files, opened when they are first read
};

// Where a restored model goes.
class CheckpointSink {
 public:
  virtual ~CheckpointSink() = default;
  // Memory of entry.raw_size that the block's bytes are to go straight to; empty: put() gets them. Several threads at once.
  virtual std::span<std::byte> target(const ManifestEntry&) { return {}; }
  // A block whose target() was empty. One call at a time, in no order. `raw` may change once this returns.
  virtual Status put(const ManifestEntry& entry, std::span<const std::byte> raw) = 0;
};

struct CheckpointRestoreOptions {
  std::uint32_t workers = 2;
  std::uint64_t memory_limit = kCheckpointMemoryDefault;  // as for a save
  std::shared_ptr<CheckpointProgress> progress{};
};

// Every block of `checkpoint`, once, to `sink`; aliases are the caller's to take from the manifest.
// errors: as Checkpoint::read and the sink's; kTimeout past progress->stop_at; kInvalid for options or a block larger than memory_limit allows.
// threads: any; blocks until done, in `workers` threads "pw-restore"
Status restore_checkpoint(const Checkpoint& checkpoint, CheckpointSink& sink, const CheckpointRestoreOptions& options);
// The same of some blocks, entries of its manifest.
Status restore_blocks(const Checkpoint& checkpoint, std::vector<ManifestEntry> blocks, CheckpointSink& sink, const CheckpointRestoreOptions& options);

// ---------------------------------------------------------------- what is there

struct CheckpointSummary {
  std::string file;                  // of the manifest
  Version version;                   // by its name
  bool whole = false;                // manifest sealed, every data file there with its size; what is inside is verify_checkpoints()'
  std::string problem;               // why not whole
  std::uint64_t created_us = 0;      // since 1970-01-01 UTC, 0: not known
  bool full = false;                 // no block needs a file of an earlier save
  std::uint32_t chain = 0;           // saves since the last full one
  std::uint64_t blocks = 0;
  std::uint64_t raw_bytes = 0;
  std::uint64_t stored_bytes = 0;    // of all records that it needs
  std::uint64_t written_bytes = 0;   // of those, in data files of its own save
};
// Newest first. errors: kNotFound when there is no such directory.
Result<std::vector<CheckpointSummary>> list_checkpoints(const std::string& directory, FileSystem& files);

struct CheckpointProblem {
  std::string file;
  std::uint64_t offset = 0;             // in the file, bytes
  std::string block;                    // "blk.0.attn_q.weight[rows[0:64]]"; empty: not of one block
  std::optional<std::uint64_t> extent;  // of the block's payload, where that is known
  std::string text;
  std::vector<Version> versions;        // checkpoints that need these bytes; none: no checkpoint does
};
struct CheckpointVerified {
  std::uint64_t checkpoints = 0;  // read
  std::uint64_t files = 0;
  std::uint64_t records = 0;
  std::uint64_t bytes = 0;
  std::vector<CheckpointProblem> problems;  // empty: every bit is as it was written
};
struct CheckpointVerifyOptions {
  std::optional<Version> version{};  // none: all of them
  bool decode = false;             // also decodes every block of every checkpoint and checks its raw bytes
  std::uint32_t workers = 2;
  std::uint64_t memory_limit = kCheckpointMemoryDefault;
  std::shared_ptr<CheckpointProgress> progress{};
};
// Reads every file of the directory's checkpoints, each once, and finds every bit that changed since it was written, in data, headers and manifests.
// errors: kNotFound when there is no checkpoint to look at; kTimeout past progress->stop_at. Damage is no error of the call.
Result<CheckpointVerified> verify_checkpoints(const std::string& directory, const CheckpointVerifyOptions& options, FileSystem& files);

}  // namespace paramwire
