#include "paramwire/store/checkpoint_format.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>
#include <limits>

namespace paramwire {

namespace {

constexpr std::uint32_t kDataMagic = 0x44435750;      // "PWCD"
constexpr std::uint32_t kRecordMagic = 0x42435750;    // "PWCB"
constexpr std::uint32_t kManifestMagic = 0x4b435750;  // "PWCK"
constexpr std::uint16_t kFormat = 1;
constexpr std::size_t kManifestHeadBytes = 8;
constexpr std::uint64_t kFileNameBytesMax = 255;  // NAME_MAX of every file system at hand
// Of one record: keeps every sum of sizes in a file far from wrapping. 2^48 elements of 16 bytes (base/types.hpp, Shape) take 2^52.
constexpr std::uint64_t kRecordBytesMax = std::uint64_t{1} << 53;

// Least bytes of the payload that a row stands for: a chunk's frame, which has 5 (codec/chunk_frame.hpp) and a body.
constexpr std::uint64_t kRowBytesMin = 5;

constexpr std::size_t kEpochDigits = 10, kCounterDigits = 20, kNumberDigits = 6;
constexpr std::string_view kManifestHead = "checkpoint-", kManifestTail = ".manifest";
constexpr std::string_view kDataHead = "data-", kDataTail = ".blocks";
constexpr std::string_view kTemporaryTail = ".tmp";

std::string digits(std::uint64_t value, std::size_t count) {
  std::string text(count, '0');
  for (std::size_t i = count; i > 0 && value > 0; value /= 10) text[--i] = static_cast<char>('0' + value % 10);
  return text;
}

// Takes exactly `count` digits off the front.
std::optional<std::uint64_t> take_digits(std::string_view& text, std::size_t count) {
  if (text.size() < count) return std::nullopt;
  std::uint64_t value = 0;
  for (const char c : text.substr(0, count)) {
    if (c < '0' || c > '9') return std::nullopt;
    const auto digit = static_cast<std::uint64_t>(c - '0');
    if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  text.remove_prefix(count);
  return value;
}

bool take(std::string_view& text, std::string_view part) {
  if (!text.starts_with(part)) return false;
  text.remove_prefix(part.size());
  return true;
}

Error bad(std::string_view what, std::string_view field) { return Error(Code::kCorrupt, cat(what, ": bad ", field)); }

Digest digest_from(std::span<const std::byte> bytes) {
  Digest digest{};
  std::ranges::copy(bytes, digest.begin());
  return digest;
}

std::vector<std::byte> encode_rows(std::span<const RecordRow> rows) {
  std::vector<std::byte> out;
  ByteWriter writer(out);
  for (const RecordRow& row : rows) {
    writer.put<std::uint32_t>(row.stored_size);
    writer.put<std::uint32_t>(row.crc32c);
  }
  return out;
}

}  // namespace

// ---------------------------------------------------------------- names

std::string checkpoint_manifest_name(Version version) {
  return cat(kManifestHead, digits(version.epoch, kEpochDigits), '-', digits(version.counter, kCounterDigits), kManifestTail);
}

std::string checkpoint_data_name(Version version, std::uint32_t number) {
  return cat(kDataHead, digits(version.epoch, kEpochDigits), '-', digits(version.counter, kCounterDigits), '-', digits(number, kNumberDigits), kDataTail);
}

CheckpointName parse_checkpoint_name(std::string_view name) {
  CheckpointName found;
  std::string_view text = name;
  const bool data = take(text, kDataHead);
  if (!data && !take(text, kManifestHead)) return found;
  const auto epoch = take_digits(text, kEpochDigits);
  if (!epoch || *epoch > std::numeric_limits<std::uint32_t>::max() || !take(text, "-")) return found;
  const auto counter = take_digits(text, kCounterDigits);
  if (!counter) return found;
  found.version = {static_cast<std::uint32_t>(*epoch), *counter};
  if (!found.version.valid()) return found;
  if (data) {
    if (!take(text, "-")) return found;
    const auto number = take_digits(text, kNumberDigits);
    if (!number || !take(text, kDataTail)) return found;
    found.number = static_cast<std::uint32_t>(*number);
  } else if (!take(text, kManifestTail)) {
    return found;
  }
  found.temporary = take(text, kTemporaryTail);
  if (text.empty()) found.kind = data ? CheckpointName::Kind::kData : CheckpointName::Kind::kManifest;
  return found;
}

// ---------------------------------------------------------------- data files

void encode_data_header(std::vector<std::byte>& bytes, const DataHeader& header) {
  const std::size_t begin = bytes.size();
  ByteWriter out(bytes);
  out.put<std::uint32_t>(kDataMagic);
  out.put<std::uint16_t>(kFormat);
  out.put<std::uint16_t>(0);
  out.put<std::uint32_t>(header.version.epoch);
  out.put<std::uint64_t>(header.version.counter);
  out.bytes(header.root);
  out.put<std::uint32_t>(header.number);
  out.put<std::uint32_t>(0);
  out.put<std::uint32_t>(crc32c(std::span(bytes).subspan(begin)));
}

Result<DataHeader> decode_data_header(std::span<const std::byte> bytes) {
  constexpr std::string_view kWhat = "data file header";
  if (bytes.size() != kDataHeaderBytes) return bad(kWhat, "size");
  ByteReader in(bytes);
  DataHeader header;
  if (in.get<std::uint32_t>() != kDataMagic) return bad(kWhat, "magic");
  if (in.get<std::uint16_t>() != kFormat) return bad(kWhat, "format");
  if (in.get<std::uint16_t>() != 0) return bad(kWhat, "reserved field");
  header.version.epoch = in.get<std::uint32_t>();
  header.version.counter = in.get<std::uint64_t>();
  if (!header.version.valid()) return bad(kWhat, "version");
  header.root = digest_from(in.bytes(sizeof(Digest)));
  header.number = in.get<std::uint32_t>();
  if (in.get<std::uint32_t>() != 0) return bad(kWhat, "reserved field");
  if (in.get<std::uint32_t>() != crc32c(bytes.first(kDataHeaderBytes - 4))) return bad(kWhat, "header_crc");
  return header;
}

std::uint64_t record_row_count(RecordForm form, CodecId codec, std::uint64_t raw_size, std::uint64_t stored_size) noexcept {
  if (form == RecordForm::kFull && codec != CodecId::kRaw) return chunk_count(raw_size);
  return stored_size <= kExtentBytes ? 0 : extent_count(stored_size);
}

void encode_record_head(std::vector<std::byte>& bytes, RecordHeader& header, const ManifestEntry& entry, std::span<const RecordRow> rows) {
  std::vector<std::byte> encoded;
  encode_entry(encoded, entry);
  const std::vector<std::byte> table = encode_rows(rows);
  header.entry_size = static_cast<std::uint32_t>(encoded.size());
  header.row_count = static_cast<std::uint32_t>(rows.size());
  header.table_crc = crc32c(table);
  const std::size_t begin = bytes.size();
  ByteWriter out(bytes);
  out.put<std::uint32_t>(kRecordMagic);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(header.form));
  out.put<std::uint8_t>(0);
  out.put<std::uint16_t>(static_cast<std::uint16_t>(header.codec));
  out.put<std::uint32_t>(header.entry_size);
  out.put<std::uint32_t>(header.row_count);
  out.put<std::uint64_t>(header.stored_size);
  out.put<std::uint64_t>(header.stored_crc64);
  out.put<std::uint32_t>(header.base.epoch);
  out.put<std::uint64_t>(header.base.counter);
  out.put<std::uint64_t>(header.base_crc64);
  out.put<std::uint32_t>(header.table_crc);
  header.header_crc = crc32c(encoded, crc32c(std::span(bytes).subspan(begin)));
  out.put<std::uint32_t>(header.header_crc);
  out.bytes(encoded);
  out.bytes(table);
}

Result<RecordHeader> decode_record_header(std::span<const std::byte> bytes) {
  constexpr std::string_view kWhat = "record header";
  if (bytes.size() < kRecordHeaderBytes) return bad(kWhat, "size");
  ByteReader in(bytes.first(kRecordHeaderBytes));
  RecordHeader header;
  if (in.get<std::uint32_t>() != kRecordMagic) return bad(kWhat, "magic");
  const auto form = in.get<std::uint8_t>();
  if (form > static_cast<std::uint8_t>(RecordForm::kDelta)) return bad(kWhat, "form");
  header.form = static_cast<RecordForm>(form);
  if (in.get<std::uint8_t>() != 0) return bad(kWhat, "reserved field");
  const auto codec = in.get<std::uint16_t>();
  if (codec > kCodecMax) return bad(kWhat, "codec");
  header.codec = static_cast<CodecId>(codec);
  header.entry_size = in.get<std::uint32_t>();
  if (header.entry_size > kRecordEntryBytesMax) return bad(kWhat, "entry_size");
  header.row_count = in.get<std::uint32_t>();
  header.stored_size = in.get<std::uint64_t>();
  if (header.stored_size > kRecordBytesMax) return bad(kWhat, "stored_size");
  // The rows are read into memory before their CRC can be looked at: never more of them than the payload, whose bytes are there, has room for.
  if (header.row_count > header.stored_size / kRowBytesMin) return bad(kWhat, "row_count");
  header.stored_crc64 = in.get<std::uint64_t>();
  header.base.epoch = in.get<std::uint32_t>();
  header.base.counter = in.get<std::uint64_t>();
  header.base_crc64 = in.get<std::uint64_t>();
  header.table_crc = in.get<std::uint32_t>();
  header.header_crc = in.get<std::uint32_t>();
  if (header.form == RecordForm::kFull) {
    if (header.base != Version{} || header.base_crc64 != 0) return bad(kWhat, "base (a record in full has none)");
  } else {
    if (!header.base.valid()) return bad(kWhat, "base");
    if (header.codec != CodecId::kRaw) return bad(kWhat, "codec (of a delta)");
  }
  return header;
}

Result<RecordHead> decode_record_head(std::span<const std::byte> bytes) {
  constexpr std::string_view kWhat = "record header";
  PARAMWIRE_TRY(header, decode_record_header(bytes));
  if (bytes.size() != header.head_size()) return bad(kWhat, "size");
  const auto encoded = bytes.subspan(kRecordHeaderBytes, header.entry_size);
  if (header.header_crc != crc32c(encoded, crc32c(bytes.first(kRecordHeaderBytes - 4)))) return bad(kWhat, "header_crc");
  RecordHead head{header, {}, {}};
  ByteReader in(encoded);
  auto entry = decode_entry(in);
  if (!entry.ok()) return std::move(entry).error();
  if (!in.finished()) return bad(kWhat, "entry (bytes left over)");
  if (entry->kind != EntryKind::kBlock || entry->codec != CodecId::kRaw) return bad(kWhat, "entry (no block of raw bytes)");
  head.entry = *entry;
  if (header.row_count != record_row_count(header.form, header.codec, entry->raw_size, header.stored_size)) return bad(kWhat, "row_count");
  if (header.form == RecordForm::kFull && header.codec == CodecId::kRaw && header.stored_size != entry->raw_size) return bad(kWhat, "stored_size");
  const auto table = bytes.subspan(kRecordHeaderBytes + header.entry_size);
  if (header.table_crc != crc32c(table)) return bad("record", "extent table CRC");
  ByteReader rows(table);
  std::uint64_t sum = 0;
  head.rows.reserve(header.row_count);
  for (std::uint32_t i = 0; i < header.row_count; ++i) {
    RecordRow row;
    row.stored_size = rows.get<std::uint32_t>();
    row.crc32c = rows.get<std::uint32_t>();
    sum += row.stored_size;
    head.rows.push_back(row);
  }
  if (header.row_count > 0 && sum != header.stored_size) return bad("record", "extent sizes");
  return head;
}

// ---------------------------------------------------------------- manifest files

std::vector<std::byte> encode_checkpoint_manifest(const CheckpointManifest& manifest) {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put<std::uint32_t>(kManifestMagic);
  out.put<std::uint16_t>(kFormat);
  out.put<std::uint16_t>(0);
  out.put<std::uint64_t>(manifest.created_us);
  out.bytes(manifest.source_root);
  out.varint(manifest.chain);
  out.varint(manifest.files.size());
  for (const CheckpointFile& file : manifest.files) {
    out.text(file.name);
    out.put<std::uint64_t>(file.size);
  }
  const std::vector<std::byte> stream = manifest.manifest.encode_delta(nullptr, nullptr);
  out.varint(stream.size());
  out.bytes(stream);
  manifest.manifest.for_each([&](const Manifest::Hit& hit) {
    const auto& links = manifest.placements[hit.tag];
    out.varint(links.size());
    for (const CheckpointLink& link : links) {
      out.varint(link.file);
      out.varint(link.offset);
      out.varint(link.size);
      out.put<std::uint32_t>(link.header_crc);
    }
    return true;
  });
  out.bytes(sha256(bytes));
  return bytes;
}

namespace {

constexpr std::string_view kManifestWhat = "checkpoint manifest";

Status decode_files(ByteReader& in, CheckpointManifest& out) {
  const std::uint64_t count = in.varint();
  if (!in.ok() || count > in.remaining() / 9) return bad(kManifestWhat, "file count");
  for (std::uint64_t i = 0; i < count; ++i) {
    CheckpointFile file{std::string(in.text(kFileNameBytesMax)), in.get<std::uint64_t>()};
    const CheckpointName name = parse_checkpoint_name(file.name);
    if (!in.ok() || name.kind != CheckpointName::Kind::kData || name.temporary) return bad(kManifestWhat, "file name");
    if (!out.files.empty() && file.name <= out.files.back().name) return bad(kManifestWhat, "file name (not ascending)");
    if (file.size < kDataHeaderBytes || file.size > kRecordBytesMax) return bad(kManifestWhat, "file size");
    out.files.push_back(std::move(file));
  }
  return {};
}

Status decode_links(ByteReader& in, const CheckpointManifest& manifest, const ManifestEntry& entry, std::vector<CheckpointLink>& links, std::vector<bool>& named) {
  const std::uint64_t count = in.varint();
  const bool block = entry.kind == EntryKind::kBlock;
  if (!in.ok() || (block ? count == 0 || count > manifest.chain + std::uint64_t{1} : count != 0)) return bad(kManifestWhat, cat("link count of ", entry));
  for (std::uint64_t i = 0; i < count; ++i) {
    CheckpointLink link;
    const std::uint64_t file = in.varint();
    link.offset = in.varint();
    link.size = in.varint();
    link.header_crc = in.get<std::uint32_t>();
    if (!in.ok() || file >= manifest.files.size()) return bad(kManifestWhat, cat("file of ", entry));
    link.file = static_cast<std::uint32_t>(file);
    const std::uint64_t end = manifest.files[link.file].size;
    if (link.offset < kDataHeaderBytes || link.offset > end || link.size < kRecordHeaderBytes || link.size > end - link.offset) {
      return bad(kManifestWhat, cat("place of ", entry, " in ", manifest.files[link.file].name));
    }
    named[link.file] = true;
    links.push_back(link);
  }
  return {};
}

}  // namespace

Result<CheckpointManifest> decode_checkpoint_manifest(std::span<const std::byte> bytes) {
  if (bytes.size() < kManifestHeadBytes + sizeof(Digest)) return bad(kManifestWhat, cat("size, ", bytes.size(), " bytes: it was cut"));
  const auto sealed = bytes.first(bytes.size() - sizeof(Digest));
  ByteReader in(sealed);
  if (in.get<std::uint32_t>() != kManifestMagic) return bad(kManifestWhat, "magic");
  const auto format = in.get<std::uint16_t>();
  if (!std::ranges::equal(sha256(sealed), bytes.last(sizeof(Digest)))) return bad(kManifestWhat, "seal: its SHA-256 is another, so it was cut or changed");
  if (format != kFormat) return bad(kManifestWhat, cat("format ", format, ": this version reads ", kFormat));
  if (in.get<std::uint16_t>() != 0) return bad(kManifestWhat, "reserved field");
  CheckpointManifest out;
  out.created_us = in.get<std::uint64_t>();
  out.source_root = digest_from(in.bytes(sizeof(Digest)));
  const std::uint64_t chain = in.varint();
  if (!in.ok() || chain > std::numeric_limits<std::uint32_t>::max()) return bad(kManifestWhat, "chain");
  out.chain = static_cast<std::uint32_t>(chain);
  PARAMWIRE_CHECK(decode_files(in, out));
  const auto stream = in.bytes(in.varint());
  if (!in.ok()) return bad(kManifestWhat, "stream size");
  auto manifest = Manifest::apply_delta(nullptr, stream, [](std::size_t i) { return static_cast<std::uint32_t>(i); });
  if (!manifest.ok()) return std::move(manifest).error();
  out.manifest = *std::move(manifest);
  if (!out.manifest.version()) return bad(kManifestWhat, "version");
  out.placements.resize(static_cast<std::size_t>(out.manifest.entry_count()));
  std::vector<bool> named(out.files.size());
  Status status;
  out.manifest.for_each([&](const Manifest::Hit& hit) {
    if (hit.entry.kind == EntryKind::kBlock && hit.entry.codec != CodecId::kRaw) {
      status = bad(kManifestWhat, cat("codec of ", hit.entry));
    } else {
      status = decode_links(in, out, hit.entry, out.placements[hit.tag], named);
    }
    return status.ok();
  });
  if (!status.ok()) return std::move(status).error();
  if (!in.finished()) return bad(kManifestWhat, "end (bytes left over)");
  if (std::ranges::find(named, false) != named.end()) return bad(kManifestWhat, "file that no block lies in");
  return out;
}

}  // namespace paramwire
