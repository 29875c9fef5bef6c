#include "paramwire/store/checkpoint_block.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>

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
  // Codecs store an extent that does not get smaller as it is, in a frame of less than a thousandth of it; a delta is written only where it is smaller.
  return raw_size + raw_size / 64 + kExtentBytes;
}

std::uint64_t encode_bytes_max(std::uint64_t raw_size, CodecId codec, bool with_base) noexcept {
  std::uint64_t bytes = 0;
  if (codec != CodecId::kRaw) bytes += stored_bytes_max(RecordForm::kFull, codec, raw_size);
  if (with_base) bytes += stored_bytes_max(RecordForm::kDelta, CodecId::kRaw, raw_size);
  return bytes;
}

Status encode_record(const ManifestEntry& entry, std::span<const std::byte> raw, const PlainCheck& check, CodecId, const std::optional<RecordBase>&,
                     bool, EncodedRecord& out) {
  out.header = {};
  out.head.clear();
  out.payload = raw;
  out.header.stored_size = raw.size();
  out.header.stored_crc64 = check.crc64;
  encode_record_head(out.head, out.header, entry, check.rows);
  return {};
}

Status decode_record(const RecordHead& head, std::span<const std::byte> payload, std::span<const std::byte> base, std::span<std::byte> out) {
  static_cast<void>(base);
  if (out.size() != head.entry.raw_size) return damaged("size");
  if (payload.data() != out.data()) std::ranges::copy(payload, out.begin());
  if (crc64(out) != head.entry.crc64) return damaged("the CRC-64 of the raw bytes is another than the record's");
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
