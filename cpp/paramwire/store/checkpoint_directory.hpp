// What lies in a checkpoint directory, and who may change it.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/store/checkpoint_files.hpp"
#include "paramwire/store/checkpoint_format.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

std::string checkpoint_path(const std::string& directory, std::string_view name);

// The names in it, by what they are. Manifests in descending order of version.
struct DirectoryNames {
  struct Data {
    std::string name;
    CheckpointName is;
  };
  std::vector<Version> manifests;   // sealed ones
  std::vector<std::string> temporary_manifests;
  std::vector<Data> data;           // temporary ones too, by name
};
// errors: kNotFound when there is no such directory; as file_error.
Result<DirectoryNames> read_directory(const std::string& directory, FileSystem& files);

// errors: kNotFound; kCorrupt naming the file; as file_error.
Result<CheckpointManifest> read_checkpoint_manifest(const std::string& directory, Version version, FileSystem& files);

// The lock of who saves, held while the file is open; makes the directory when its parent is there, and tries whether files can be renamed in it.
// errors: kBackpressure when another save holds it; kUnavailable when the directory can't be written or renamed in.
Result<File> lock_for_saving(const std::string& directory, FileSystem& files);
// The lock of who reads, which keeps files from being removed. A closed File where there can't be one (a directory that may not be written).
File lock_for_reading(const std::string& directory, FileSystem& files);
// The same lock for who removes files. nullopt: somebody reads, or there are no locks here.
std::optional<File> lock_for_removing(const std::string& directory, FileSystem& files);

struct RemovedFiles {
  std::vector<Version> versions;
  std::vector<std::string> notes;  // what could not go, and why, for people
};
// Removes all but the newest `keep` checkpoints that can be read (0: none), then every data file that no manifest names, unless one can't be read: it may
// need them. Holds the lock of who removes; nothing goes while somebody reads. The caller holds the lock of who saves.
RemovedFiles remove_old_checkpoints(const std::string& directory, std::uint32_t keep, FileSystem& files);

// Writes a file under its temporary name, syncs it, renames it and syncs the directory.
Status write_sealed(const std::string& directory, const std::string& name, std::span<const std::byte> bytes, FileSystem& files);

}  // namespace paramwire
