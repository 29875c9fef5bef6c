#include "paramwire/store/checkpoint_block.hpp"

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta.hpp"

#include <algorithm>
#include <utility>

namespace paramwire {

namespace {

// Bytes that are read and checked at a time: they stay in a second-level cache between the two.
constexpr std::size_t kScanBytes = std::size_t{512} << 10;

Error damaged(std::string_view text) { return Error(Code::kCorrupt, std::string(text)); }

}  // namespace

PlainCheck check_plain(std::span<const std::byte> bytes) {
  PlainCheck check;
  if (bytes.size() <= kExtentBytes) {
    check.crc64 = crc64(bytes);
    return check;
  }
  std::vector<std::byte> table;
  ByteWriter out(table);
  check.rows.reserve(static_cast<std::size_t>(extent_count(bytes.size())));
  for (std::size_t at = 0; at < bytes.size(); at += kExtentBytes) {
    const auto extent = bytes.subspan(at, std::min<std::size_t>(kExtentBytes, bytes.size() - at));
    check.crc64 = crc64(extent, check.crc64);
    check.rows.push_back({static_cast<std::uint32_t>(extent.size()), crc32c(extent)});
    out.put<std::uint32_t>(check.rows.back().stored_size);
    out.put<std::uint32_t>(check.rows.back().crc32c);
  }
  check.table_crc = crc32c(table);
  return check;
}

std::uint64_t stored_bytes_max(RecordForm form, CodecId codec, std::uint64_t raw_size) noexcept {
  if (form == RecordForm::kFull && codec == CodecId::kRaw) return raw_size;
  // Codecs store a chunk that does not get smaller as it is, in a frame of less than a thousandth of it; a delta is written only where it is smaller.
  return raw_size + raw_size / 64 + kExtentBytes;
}

std::uint64_t encode_bytes_max(std::uint64_t raw_size, CodecId codec, bool with_base) noexcept {
  std::uint64_t bytes = 0;
  if (codec != CodecId::kRaw) bytes += stored_bytes_max(RecordForm::kFull, codec, raw_size);
  if (with_base) bytes += stored_bytes_max(RecordForm::kDelta, CodecId::kRaw, raw_size);
  return bytes;
}

namespace {

// From this part of the raw bytes on, a delta is compared with the block in full, which costs encoding it twice.
constexpr std::uint64_t kDeltaSurelySmaller = 2;

// nullopt: there is none, or the base is of no help.
Result<std::optional<std::vector<std::byte>>> make_delta(const ManifestEntry& entry, std::span<const std::byte> raw, const RecordBase& base) {
  auto delta = encode_delta(entry.dtype, base.bytes, DeltaBase{base.version}, raw, 1);
  if (!delta.ok()) {
    if (delta.error().code() == Code::kInvalid) return std::optional<std::vector<std::byte>>();  // elements that deltas don't know
    return std::move(delta).error();
  }
  PARAMWIRE_TRY(info, read_delta(*delta));
  if (info.form == DeltaForm::kFull || delta->size() >= raw.size()) return std::optional<std::vector<std::byte>>();
  return std::optional(*std::move(delta));
}

void take_delta(EncodedRecord& out, const RecordBase& base, const ManifestEntry& entry) {
  const PlainCheck check = check_plain(out.delta);
  out.payload = out.delta;
  out.header.form = RecordForm::kDelta;
  out.header.stored_size = out.delta.size();
  out.header.stored_crc64 = check.crc64;
  out.header.base = base.version;
  out.header.base_crc64 = base.crc64;
  encode_record_head(out.head, out.header, entry, check.rows);
}

void take_full(EncodedRecord& out, std::span<const std::byte> raw, const PlainCheck& check, CodecId codec, const ManifestEntry& entry) {
  if (codec == CodecId::kRaw) {
    out.payload = raw;
    out.header.stored_size = raw.size();
    out.header.stored_crc64 = check.crc64;
    encode_record_head(out.head, out.header, entry, check.rows);
    return;
  }
  out.payload = out.encoded.bytes;
  out.header.codec = codec;
  out.header.stored_size = out.encoded.bytes.size();
  out.header.stored_crc64 = out.encoded.crc64;
  std::vector<RecordRow> rows;
  rows.reserve(out.encoded.chunks.size());
  for (const EncodedChunk& chunk : out.encoded.chunks) rows.push_back({chunk.stored_size, chunk.crc32c});
  encode_record_head(out.head, out.header, entry, rows);
}

Status verify_record(const EncodedRecord& record, std::span<const std::byte> raw, const std::optional<RecordBase>& base) {
  if (record.payload.data() == raw.data()) return {};
  PARAMWIRE_TRY(head, decode_record_head(record.head));
  PARAMWIRE_TRY(decoded, Buffer::allocate(raw.size()));
  const Status status = decode_record(head, record.payload, base ? base->bytes : std::span<const std::byte>(), decoded.span());
  if (status.ok() && std::ranges::equal(decoded.span(), raw)) return {};
  return Error(Code::kInternal, cat("block ", head.entry, ": what was encoded does not decode to the same bytes: ", status.ok() ? std::string("they differ") : status.error().message()));
}

}  // namespace

Status encode_record(const ManifestEntry& entry, std::span<const std::byte> raw, const PlainCheck& check, CodecId codec, const std::optional<RecordBase>& base,
                     bool verify, EncodedRecord& out) {
  out.header = {};
  out.head.clear();
  std::optional<std::vector<std::byte>> delta;
  if (base) {
    PARAMWIRE_TRY(made, make_delta(entry, raw, *base));
    delta = std::move(made);
  }
  if (delta && delta->size() <= raw.size() / kDeltaSurelySmaller) {
    out.delta = *std::move(delta);
    take_delta(out, *base, entry);
  } else {
    CodecId full = CodecId::kRaw;
    if (codec != CodecId::kRaw && !raw.empty()) {
      PARAMWIRE_CHECK(encode_block(CodecSpec{std::nullopt, codec}, entry.dtype, raw, 1, out.encoded));
      full = out.encoded.codec;
    }
    const std::size_t full_size = full == CodecId::kRaw ? raw.size() : out.encoded.bytes.size();
    if (delta && delta->size() < full_size) {
      out.delta = *std::move(delta);
      take_delta(out, *base, entry);
    } else {
      take_full(out, raw, check, full, entry);
    }
  }
  return verify ? verify_record(out, raw, base) : Status();
}

Status decode_record(const RecordHead& head, std::span<const std::byte> payload, std::span<const std::byte> base, std::span<std::byte> out) {
  const RecordHeader& header = head.header;
  if (out.size() != head.entry.raw_size) return damaged("the block has another size");
  if (header.form == RecordForm::kDelta) {
    PARAMWIRE_TRY(info, read_delta(payload));
    if (info.base_crc64 != header.base_crc64 || info.base_version != header.base) return damaged("the delta inside names another base than the record");
    if (info.result_crc64 != head.entry.crc64) return damaged("the delta inside makes another block than the record says");
    PARAMWIRE_CHECK(apply_delta(payload, head.entry.dtype, base, header.base, out, 1));
    return {};
  }
  if (header.codec == CodecId::kRaw) {
    if (header.stored_crc64 != head.entry.crc64) return damaged("payload and entry have two CRC-64s, though the one is the other's bytes");
    if (payload.data() != out.data()) std::ranges::copy(payload, out.begin());
    return {};
  }
  std::vector<EncodedChunk> chunks;
  chunks.reserve(head.rows.size());
  for (const RecordRow& row : head.rows) chunks.push_back({row.stored_size, row.crc32c});
  PARAMWIRE_CHECK(decode_block(header.codec, head.entry.dtype, payload, chunks, 0, out, 1, StoredCheck::kTrusted));
  if (crc64(out) != head.entry.crc64) return damaged("what was decoded has another CRC-64 than the raw bytes that were saved");
  return {};
}

Result<PayloadCheck> scan_payload(const File& file, std::uint64_t offset, const RecordHead& head, std::span<std::byte> out) {
  const std::uint64_t begin = offset + head.header.head_size();
  const std::uint64_t size = head.header.stored_size;
  std::vector<std::byte> piece(out.empty() ? static_cast<std::size_t>(std::min<std::uint64_t>(kScanBytes, size)) : 0);
  PayloadCheck check;
  std::size_t row = 0;
  std::uint64_t row_left = head.rows.empty() ? 0 : head.rows[0].stored_size;
  std::uint32_t row_crc = 0;
  for (std::uint64_t at = 0; at < size;) {
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(kScanBytes, size - at));
    const auto bytes = out.empty() ? std::span(piece).first(count) : out.subspan(static_cast<std::size_t>(at), count);
    PARAMWIRE_CHECK(file.read(bytes, begin + at));
    check.crc64 = crc64(bytes, check.crc64);
    for (std::size_t used = 0; row < head.rows.size() && used < count;) {
      const auto part = static_cast<std::size_t>(std::min<std::uint64_t>(row_left, count - used));
      row_crc = crc32c(bytes.subspan(used, part), row_crc);
      used += part;
      row_left -= part;
      if (row_left > 0) break;
      if (row_crc != head.rows[row].crc32c) check.bad_extents.push_back(row);
      row_crc = 0;
      if (++row < head.rows.size()) row_left = head.rows[row].stored_size;
    }
    at += count;
  }
  return check;
}

}  // namespace paramwire
