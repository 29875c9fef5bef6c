// The bytes of checkpoint files, both ways. Pure; any thread. Layout: wire/FORMAT.md, "Checkpoints".
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/wire/manifest.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// ---------------------------------------------------------------- names

std::string checkpoint_manifest_name(Version version);
std::string checkpoint_data_name(Version version, std::uint32_t number);
// What a name in a checkpoint directory stands for.
struct CheckpointName {
  enum class Kind : std::uint8_t { kManifest, kData, kOther } kind = Kind::kOther;
  Version version;
  std::uint32_t number = 0;  // kData
  bool temporary = false;    // ends in ".tmp"
};
// kOther for every name that the two functions above would not give, with or without ".tmp".
CheckpointName parse_checkpoint_name(std::string_view name);

// ---------------------------------------------------------------- data files

inline constexpr std::size_t kDataHeaderBytes = 64;
struct DataHeader {
  Version version;
  Digest root{};  // of the source's manifest
  std::uint32_t number = 0;
};
void encode_data_header(std::vector<std::byte>& out, const DataHeader& header);
// errors: kCorrupt naming the field.
Result<DataHeader> decode_data_header(std::span<const std::byte> bytes);

inline constexpr std::size_t kRecordHeaderBytes = 60;
// Longest entry of a block: 8 id, 1 kind, 2 + 4096 name, 5 + 10 version, 1 + 5 + 10 + 10 shard, 3 dtype, 1 + 8 * 10 shape, 3 codec, 8 + 4 CRCs.
inline constexpr std::size_t kRecordEntryBytesMax = 4247;

enum class RecordForm : std::uint8_t { kFull = 0, kDelta = 1 };

// A row of a record's extent table.
struct RecordRow {
  std::uint32_t stored_size = 0;
  std::uint32_t crc32c = 0;
  bool operator==(const RecordRow&) const noexcept = default;
};

struct RecordHeader {
  RecordForm form = RecordForm::kFull;
  CodecId codec = CodecId::kRaw;
  std::uint32_t entry_size = 0;
  std::uint32_t row_count = 0;
  std::uint64_t stored_size = 0;
  std::uint64_t stored_crc64 = 0;
  Version base;                   // kDelta
  std::uint64_t base_crc64 = 0;   // kDelta: of the base's raw bytes
  std::uint32_t table_crc = 0;
  std::uint32_t header_crc = 0;

  std::uint64_t head_size() const noexcept { return kRecordHeaderBytes + entry_size + std::uint64_t{8} * row_count; }
  std::uint64_t record_size() const noexcept { return head_size() + stored_size; }
};
// Header, entry and rows: all of a record but its payload. Sets the sizes, counts and CRCs that follow from the others.
void encode_record_head(std::vector<std::byte>& out, RecordHeader& header, const ManifestEntry& entry, std::span<const RecordRow> rows);
// The fixed part: its ranges, sizes whose sum wraps nothing, not its CRC. errors: kCorrupt naming the field.
Result<RecordHeader> decode_record_header(std::span<const std::byte> bytes);
struct RecordHead {
  RecordHeader header;
  ManifestEntry entry;  // views into the bytes
  std::vector<RecordRow> rows;
};
// All of a record but its payload, every CRC in it checked. `bytes`: head_size() bytes. errors: kCorrupt naming the field.
Result<RecordHead> decode_record_head(std::span<const std::byte> bytes);
// Rows that a record of this form and codec has.
std::uint64_t record_row_count(RecordForm form, CodecId codec, std::uint64_t raw_size, std::uint64_t stored_size) noexcept;

// ---------------------------------------------------------------- manifest files

// Largest manifest file: read into memory as a whole and hashed, before anything in it can be trusted. 1.3 million tensors have one of about 100 MB, so this is room for some ten million blocks,
// 40 TB of the usual 4 MiB; smaller would refuse models that somebody has, larger lets a damaged size take a machine's memory.
inline constexpr std::uint64_t kManifestFileBytesMax = std::uint64_t{1} << 30;

struct CheckpointLink {
  std::uint32_t file = 0;      // index in CheckpointManifest::files
  std::uint64_t offset = 0;    // of the record in its file
  std::uint64_t size = 0;      // of the whole record
  std::uint32_t header_crc = 0;
  bool operator==(const CheckpointLink&) const noexcept = default;
};
struct CheckpointFile {
  std::string name;
  std::uint64_t size = 0;
  bool operator==(const CheckpointFile&) const noexcept = default;
};
struct CheckpointManifest {
  std::uint64_t created_us = 0;  // since 1970-01-01 UTC
  Digest source_root{};
  std::uint32_t chain = 0;       // 0: full
  std::vector<CheckpointFile> files;  // ascending names
  Manifest manifest;             // the tag of an entry is the index of its placement
  std::vector<std::vector<CheckpointLink>> placements;  // newest record first; none for an alias
};
std::vector<std::byte> encode_checkpoint_manifest(const CheckpointManifest& manifest);
// errors: kCorrupt naming what is wrong: the seal, the field, a link that lies outside its file, a file that no link names.
Result<CheckpointManifest> decode_checkpoint_manifest(std::span<const std::byte> bytes);

}  // namespace paramwire
