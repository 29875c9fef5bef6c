#include "paramwire/store/checkpoint_directory.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <set>

namespace paramwire {

namespace {

constexpr std::string_view kWriterLock = "lock";
constexpr std::string_view kReaderLock = "readers";
constexpr std::string_view kProbe = "probe.tmp";
constexpr std::string_view kProbed = "probed.tmp";

// Renaming is what a save relies on at its end: some network and FUSE file systems refuse it, and that is better known before the bytes are written.
Status try_rename(const std::string& directory, FileSystem& files) {
  const std::string from = checkpoint_path(directory, kProbe);
  const std::string to = checkpoint_path(directory, kProbed);
  PARAMWIRE_TRY(probe, open_file(files, from, O_WRONLY | O_CREAT | O_TRUNC));
  probe.close();
  if (const int result = files.rename(from, to); result < 0) {
    files.unlink(from);
    const Error plain = file_error(files, "rename", from, result, cat("to ", to));
    return Error(Code::kUnavailable, cat("checkpoints can't be made in ", directory, ": ", plain.message()));
  }
  files.unlink(to);
  return {};
}

}  // namespace

std::string checkpoint_path(const std::string& directory, std::string_view name) {
  return directory.ends_with('/') ? cat(directory, name) : cat(directory, '/', name);
}

Result<DirectoryNames> read_directory(const std::string& directory, FileSystem& files) {
  std::vector<std::string> names;
  if (const int result = files.list(directory, names); result < 0) return file_error(files, "read the directory", directory, result);
  DirectoryNames found;
  for (std::string& name : names) {
    const CheckpointName is = parse_checkpoint_name(name);
    if (is.kind == CheckpointName::Kind::kData) {
      found.data.push_back({std::move(name), is});
    } else if (is.kind == CheckpointName::Kind::kManifest) {
      if (is.temporary) {
        found.temporary_manifests.push_back(std::move(name));
      } else {
        found.manifests.push_back(is.version);
      }
    }
  }
  std::ranges::sort(found.manifests, std::ranges::greater());
  std::ranges::sort(found.data, {}, &DirectoryNames::Data::name);
  return found;
}

Result<CheckpointManifest> read_checkpoint_manifest(const std::string& directory, Version version, FileSystem& files) {
  const std::string path = checkpoint_path(directory, checkpoint_manifest_name(version));
  PARAMWIRE_TRY(file, open_file(files, path, O_RDONLY));
  PARAMWIRE_TRY(size, file.size());
  if (size > kManifestFileBytesMax) return Error(Code::kCorrupt, cat(path, " has ", size, " bytes, more than the ", kManifestFileBytesMax, " that a manifest may have"));
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  PARAMWIRE_CHECK(file.read(bytes, 0));
  auto manifest = decode_checkpoint_manifest(bytes);
  if (!manifest.ok()) return Error(Code::kCorrupt, cat(path, ": ", manifest.error().message()));
  if (manifest->manifest.version() != version) {
    return Error(Code::kCorrupt, cat(path, " holds version ", to_text(manifest->manifest.version()), ": it was renamed"));
  }
  return manifest;
}

Result<File> lock_for_saving(const std::string& directory, FileSystem& files) {
  if (directory.empty()) return Error(Code::kInvalid, "the directory's path is empty");
  constexpr unsigned kMode = 0777;
  if (const int made = files.make_directory(directory, kMode); made < 0 && made != -EEXIST) {
    return file_error(files, "make the directory", directory, made, made == -ENOENT ? "its parent is not there" : "");
  }
  const std::string path = checkpoint_path(directory, kWriterLock);
  PARAMWIRE_TRY(lock, open_file(files, path, O_RDWR | O_CREAT));
  if (const int result = lock.lock(true); result == -EWOULDBLOCK) {
    return Error(Code::kBackpressure, cat("another process saves into ", directory, " (it, or a child that it forked and left behind, holds ", path, "): wait until it is done, or save into another directory"));
  } else if (result < 0) {
    return file_error(files, "lock", path, result);
  }
  PARAMWIRE_CHECK(try_rename(directory, files));
  return lock;
}

File lock_for_reading(const std::string& directory, FileSystem& files) {
  const std::string path = checkpoint_path(directory, kReaderLock);
  auto lock = open_file(files, path, O_RDONLY | O_CREAT);
  if (!lock.ok()) lock = open_file(files, path, O_RDONLY);
  if (!lock.ok() || lock->lock(false) < 0) return {};
  return *std::move(lock);
}

std::optional<File> lock_for_removing(const std::string& directory, FileSystem& files) {
  auto lock = open_file(files, checkpoint_path(directory, kReaderLock), O_RDONLY | O_CREAT);
  if (!lock.ok() || lock->lock(true) < 0) return std::nullopt;
  return *std::move(lock);
}

RemovedFiles remove_old_checkpoints(const std::string& directory, std::uint32_t keep, FileSystem& files) {
  RemovedFiles out;
  const auto remove = [&](const std::string& name) {
    const std::string path = checkpoint_path(directory, name);
    const int result = files.unlink(path);
    if (result < 0) out.notes.push_back(file_error(files, "remove", path, result).message());
    return result >= 0;
  };
  const auto lock = lock_for_removing(directory, files);
  const auto names = read_directory(directory, files);
  if (!lock || !names.ok()) {
    out.notes.push_back("old files are kept: somebody reads a checkpoint in this directory; the next save removes them");
    return out;
  }
  std::set<std::string> named;
  bool all_read = true;
  std::uint32_t kept = 0;
  for (const Version there : names->manifests) {
    if (keep > 0 && kept >= keep) {
      if (remove(checkpoint_manifest_name(there))) {
        out.versions.push_back(there);
      } else {
        all_read = false;  // it is still there, and what it names was not looked at
      }
      continue;
    }
    const auto manifest = read_checkpoint_manifest(directory, there, files);
    if (!manifest.ok()) {
      all_read = false;
      continue;
    }
    ++kept;
    for (const CheckpointFile& file : manifest->files) named.insert(file.name);
  }
  if (!all_read) {
    out.notes.push_back("data files are kept: a manifest that can't be read may need them; remove it by hand when it is of no use");
    return out;
  }
  // Manifests that are gone must stay gone before the data they need is.
  if (!out.versions.empty() && !sync_directory(files, directory).ok()) {
    out.notes.push_back("data files of removed checkpoints are kept: the directory could not be synced");
    return out;
  }
  for (const DirectoryNames::Data& data : names->data) {
    if (!named.contains(data.name)) remove(data.name);
  }
  return out;
}

Status write_sealed(const std::string& directory, const std::string& name, std::span<const std::byte> bytes, FileSystem& files) {
  const std::string path = checkpoint_path(directory, name);
  const std::string temporary = path + ".tmp";
  const auto write = [&]() -> Status {
    PARAMWIRE_TRY(file, open_file(files, temporary, O_WRONLY | O_CREAT | O_TRUNC));
    PARAMWIRE_CHECK(file.write(bytes, 0));
    PARAMWIRE_CHECK(file.sync());
    file.close();
    if (const int result = files.rename(temporary, path); result < 0) return file_error(files, "rename", temporary, result, cat("to ", path));
    return {};
  };
  if (Status status = write(); !status.ok()) {
    files.unlink(temporary);
    return status;
  }
  return sync_directory(files, directory);
}

}  // namespace paramwire
