// verify_checkpoints: every byte of a directory's checkpoints against its CRC.
#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint.hpp"
#include "paramwire/store/checkpoint_block.hpp"
#include "paramwire/store/checkpoint_directory.hpp"
#include "paramwire/store/checkpoint_work.hpp"

#include <algorithm>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

namespace paramwire {

namespace {

// Problems that are kept; a disk that lost a whole file has them by the million, and the first say where.
constexpr std::size_t kProblemsMax = 10'000;

// A record that some checkpoint needs.
struct Wanted {
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
  std::uint32_t header_crc = 0;
  std::string_view tensor;
  Version version;
};

class Verification {
 public:
  Verification(const std::string& directory, const CheckpointVerifyOptions& options, FileSystem& files) : directory_(directory), options_(options), files_(files) {}
  Result<CheckpointVerified> run();

 private:
  struct DataFile {
    std::uint64_t size = 0;
    std::vector<Wanted> wanted;  // by offset once sorted
  };

  void gather(Version version);
  Status read_files();
  void read_file(const std::string& name, const DataFile& data);
  void read_record(const File& file, std::uint64_t offset, std::uint64_t end, std::span<const Wanted> wanted, std::optional<std::uint64_t>& next);
  Status decode_blocks();
  void report(CheckpointProblem problem);
  Error stopped() const { return Error(Code::kTimeout, cat("the verification of ", directory_, " was stopped after ", result_.records, " records")); }

  const std::string& directory_;
  const CheckpointVerifyOptions& options_;
  FileSystem& files_;
  std::vector<std::pair<Version, CheckpointManifest>> manifests_;
  std::map<std::string, DataFile> data_;
  std::mutex mutex_;  // of result_
  CheckpointVerified result_;
};

std::vector<Version> versions_of(std::span<const Wanted> wanted) {
  std::vector<Version> versions;
  for (const Wanted& one : wanted) versions.push_back(one.version);
  std::ranges::sort(versions);
  versions.erase(std::unique(versions.begin(), versions.end()), versions.end());
  return versions;
}

void Verification::report(CheckpointProblem problem) {
  const std::lock_guard lock(mutex_);
  if (result_.problems.size() < kProblemsMax) result_.problems.push_back(std::move(problem));
}

void Verification::gather(Version version) {
  auto manifest = read_checkpoint_manifest(directory_, version, files_);
  ++result_.checkpoints;
  if (!manifest.ok()) {
    result_.problems.push_back({checkpoint_manifest_name(version), 0, {}, {}, manifest.error().message(), {version}});
    return;
  }
  manifests_.emplace_back(version, *std::move(manifest));
}

// Reads one record and checks all of it. `next` becomes where the following one begins; none where its own size can't be trusted.
void Verification::read_record(const File& file, std::uint64_t offset, std::uint64_t end, std::span<const Wanted> wanted, std::optional<std::uint64_t>& next) {
  const std::string name = file.path().substr(file.path().rfind('/') + 1);
  std::string block = wanted.empty() ? "" : std::string(wanted.front().tensor);
  const auto problem = [&](std::string text, std::optional<std::uint64_t> extent = {}) { report({name, offset, block, extent, std::move(text), versions_of(wanted)}); };
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min<std::uint64_t>(kRecordHeaderBytes, end - offset)));
  if (const Status read = file.read(bytes, offset); !read.ok()) return problem(read.error().message());
  const auto fixed = decode_record_header(bytes);
  if (!fixed.ok()) return problem(fixed.error().message());
  if (fixed->record_size() > end - offset) return problem("record header: bad sizes (they reach beyond the file)");
  bytes.resize(static_cast<std::size_t>(fixed->head_size()));
  if (const Status read = file.read(bytes, offset); !read.ok()) return problem(read.error().message());
  const auto head = decode_record_head(bytes);
  if (!head.ok()) return problem(head.error().message());
  block = head->entry.to_string();
  next = offset + fixed->record_size();
  for (const Wanted& one : wanted) {
    if (one.header_crc != fixed->header_crc || one.size != fixed->record_size()) problem(cat("another record lies here than checkpoint ", one.version, " names"));
  }
  const auto check = scan_payload(file, offset, *head, {});
  if (!check.ok()) return problem(check.error().message());
  for (const std::uint64_t extent : check->bad_extents) problem(cat("CRC-32C of extent ", extent, " of ", head->rows.size(), " is wrong"), extent);
  if (check->crc64 != fixed->stored_crc64 && check->bad_extents.empty()) {
    problem("CRC-64 of the payload is wrong", head->rows.empty() ? std::optional<std::uint64_t>(0) : std::nullopt);
  }
  const std::lock_guard lock(mutex_);
  ++result_.records;
}

void Verification::read_file(const std::string& name, const DataFile& data) {
  const std::string path = checkpoint_path(directory_, name);
  const auto whole_file = [&](std::uint64_t offset, std::string text) { report({name, offset, {}, {}, std::move(text), versions_of(data.wanted)}); };
  const auto file = open_file(files_, path, O_RDONLY);
  if (!file.ok()) return whole_file(0, file.error().message());
  const auto size = file->size();
  if (!size.ok()) return whole_file(0, size.error().message());
  if (*size != data.size) whole_file(std::min(*size, data.size), cat("the file has ", *size, " bytes, not ", data.size));
  std::vector<std::byte> first(static_cast<std::size_t>(std::min<std::uint64_t>(kDataHeaderBytes, *size)));
  if (const Status read = file->read(first, 0); !read.ok()) return whole_file(0, read.error().message());
  const auto header = decode_data_header(first);
  const CheckpointName is = parse_checkpoint_name(name);
  if (!header.ok()) {
    whole_file(0, header.error().message());
  } else if (header->version != is.version || header->number != is.number) {
    whole_file(0, "the file's header is of another file: it was renamed");
  }
  std::uint64_t at = kDataHeaderBytes;
  std::span<const Wanted> rest = data.wanted;
  while (at < *size && !must_stop(options_.progress.get())) {
    while (!rest.empty() && rest.front().offset < at) {
      report({name, rest.front().offset, std::string(rest.front().tensor), {}, "the record lies inside of another", {rest.front().version}});
      rest = rest.subspan(1);
    }
    // One version only: what other versions have between its records is not read.
    if (options_.version && (rest.empty() || rest.front().offset > at)) {
      if (rest.empty()) break;
      at = rest.front().offset;
      continue;
    }
    std::size_t here = 0;
    while (here < rest.size() && rest[here].offset == at) ++here;
    std::optional<std::uint64_t> next;
    read_record(*file, at, *size, rest.first(here), next);
    rest = rest.subspan(here);
    const std::uint64_t to = next ? *next : rest.empty() ? *size : rest.front().offset;
    if (options_.progress) options_.progress->bytes_done += to - at;
    {
      const std::lock_guard lock(mutex_);
      result_.bytes += to - at;
    }
    at = to;
  }
  for (const Wanted& one : rest) {
    if (at >= *size) report({name, one.offset, std::string(one.tensor), {}, "the file ends before the record", {one.version}});
  }
  const std::lock_guard lock(mutex_);
  ++result_.files;
  result_.bytes += kDataHeaderBytes;
}

Status Verification::read_files() {
  for (const auto& [version, manifest] : manifests_) {
    manifest.manifest.for_each([&, version = version, &manifest = manifest](const Manifest::Hit& hit) {
      for (const CheckpointLink& link : manifest.placements[hit.tag]) {
        const CheckpointFile& file = manifest.files[link.file];
        DataFile& data = data_[file.name];
        data.size = file.size;
        data.wanted.push_back({link.offset, link.size, link.header_crc, hit.entry.tensor, version});
      }
      return true;
    });
  }
  std::vector<std::pair<const std::string*, DataFile*>> todo;
  std::uint64_t bytes = 0;
  for (auto& [name, data] : data_) {
    std::ranges::sort(data.wanted, {}, &Wanted::offset);
    todo.emplace_back(&name, &data);
    bytes += data.size;
  }
  if (options_.progress) options_.progress->bytes = bytes;
  WorkList work(todo.size());
  return run_workers(options_.workers, "pw-verify", [&](std::uint32_t) -> Status {
    while (const auto index = work.next()) {
      read_file(*todo[*index].first, *todo[*index].second);
      if (must_stop(options_.progress.get())) {
        work.fail();
        const std::lock_guard lock(mutex_);
        return stopped();
      }
    }
    return {};
  });
}

// What no CRC of stored bytes can say: that they decode to the raw bytes that were saved.
Status Verification::decode_blocks() {
  for (const auto& [version, manifest] : manifests_) {
    auto opened = Checkpoint::open(directory_, version, files_);
    if (!opened.ok()) {
      report({checkpoint_manifest_name(version), 0, {}, {}, opened.error().message(), {version}});
      continue;
    }
    const Checkpoint& checkpoint = **opened;
    std::vector<ManifestEntry> blocks;
    checkpoint.manifest().for_each([&](const Manifest::Hit& hit) {
      if (hit.entry.kind == EntryKind::kBlock) blocks.push_back(hit.entry);
      return true;
    });
    MemoryGate gate(options_.memory_limit, options_.workers);
    WorkList work(blocks.size());
    PARAMWIRE_CHECK(run_workers(options_.workers, "pw-verify", [&, version = version](std::uint32_t) -> Status {
      Buffer raw;
      CheckpointScratch scratch;
      while (const auto index = work.next()) {
        const ManifestEntry& entry = blocks[*index];
        if (must_stop(options_.progress.get())) {
          work.fail();
          const std::lock_guard lock(mutex_);
          return stopped();
        }
        const std::uint64_t need = entry.raw_size + checkpoint.scratch_bytes(entry);
        if (!gate.fits(need)) return Error(Code::kInvalid, cat("block ", entry, " needs ", need, " bytes of buffers to be decoded, more than memory_limit, ", options_.memory_limit, ": raise it"));
        gate.acquire(need);
        const auto read = [&]() -> Status {
          PARAMWIRE_TRY(bytes, room(raw, entry.raw_size));
          return checkpoint.read(entry, bytes, scratch);
        };
        const Status status = read();
        if (!gate.keeps(raw.size() + scratch.stored.size() + scratch.raw.size())) {
          raw = {};
          scratch = {};
        }
        gate.release(need);
        if (status.ok()) continue;
        const CheckpointLink& link = checkpoint.links(entry).front();
        report({checkpoint.facts().files[link.file].name, link.offset, entry.to_string(), {}, status.error().message(), {version}});
      }
      return {};
    }));
  }
  return {};
}

Result<CheckpointVerified> Verification::run() {
  PARAMWIRE_TRY(before, read_directory(directory_, files_));
  const File lock = before.manifests.empty() ? File() : lock_for_reading(directory_, files_);
  PARAMWIRE_TRY(names, read_directory(directory_, files_));
  for (const Version version : names.manifests) {
    if (!options_.version || *options_.version == version) gather(version);
  }
  if (result_.checkpoints == 0) {
    return Error(Code::kNotFound, options_.version ? cat("no checkpoint of version ", *options_.version, " in ", directory_) : cat("there is no checkpoint in ", directory_, ": save one first, or check the path"));
  }
  PARAMWIRE_CHECK(read_files());
  if (options_.decode) PARAMWIRE_CHECK(decode_blocks());
  std::ranges::sort(result_.problems, {}, [](const CheckpointProblem& problem) { return std::pair(problem.file, problem.offset); });
  return std::move(result_);
}

}  // namespace

Result<CheckpointVerified> verify_checkpoints(const std::string& directory, const CheckpointVerifyOptions& options, FileSystem& files) {
  if (options.workers == 0 || options.workers > kCheckpointWorkersMax) return Error(Code::kInvalid, cat("workers is ", options.workers, ": 1 to ", kCheckpointWorkersMax));
  return Verification(directory, options, files).run();
}

}  // namespace paramwire
