// One block on its way into a record and out of it: CRCs, codec, delta. Pure but for the file that scan_payload() reads. Any thread.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/codec/block.hpp"
#include "paramwire/store/checkpoint_files.hpp"
#include "paramwire/store/checkpoint_format.hpp"
#include "paramwire/wire/manifest_entry.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace paramwire {

// CRC-64 and extent rows of bytes that are stored as they are, in one pass over memory.
struct PlainCheck {
  std::uint64_t crc64 = 0;
  std::vector<RecordRow> rows;      // none up to one extent
  std::uint32_t table_crc = 0;      // as ManifestEntry::extent_table_crc
};
PlainCheck check_plain(std::span<const std::byte> bytes);

// What a block may be written as a delta from.
struct RecordBase {
  std::span<const std::byte> bytes;  // raw
  Version version;                   // of the checkpoint that they are from
  std::uint64_t crc64 = 0;           // of them
};

// A record but for its file. Vectors keep their capacity: reuse one for many blocks.
struct EncodedRecord {
  RecordHeader header;
  std::vector<std::byte> head;           // header, entry, rows
  std::span<const std::byte> payload;    // of the next two, or the raw bytes themselves
  EncodedBlock encoded;
  std::vector<std::byte> delta;
};
// Encodes `raw` as the smallest of what is asked for: a delta, where there is a base and it is smaller than the block in full. `entry`: of raw bytes, its CRCs
// those of `raw`; `check` is check_plain(raw).
// verify: decodes what was encoded and compares. errors: kInternal when that differs; the codec's.
Status encode_record(const ManifestEntry& entry, std::span<const std::byte> raw, const PlainCheck& check, CodecId codec,
                     const std::optional<RecordBase>& base, bool verify, EncodedRecord& out);
// The raw bytes of a record from its payload, whose CRCs were checked. base: of a delta.
// payload: `out` itself for a full record in codec raw, else memory that does not overlap it
// errors:  kCorrupt naming what does not fit, the raw CRC included; the codec's.
Status decode_record(const RecordHead& head, std::span<const std::byte> payload, std::span<const std::byte> base, std::span<std::byte> out);
// Bytes beside the raw ones that encode_record() allocates at most.
std::uint64_t encode_bytes_max(std::uint64_t raw_size, CodecId codec, bool with_base) noexcept;
// Largest payload that a record of `raw_size` raw bytes may have: a longer one is refused before memory is taken for it.
std::uint64_t stored_bytes_max(RecordForm form, CodecId codec, std::uint64_t raw_size) noexcept;

// What came of reading a payload.
struct PayloadCheck {
  std::uint64_t crc64 = 0;
  std::vector<std::uint64_t> bad_extents;  // whose CRC-32C is not their row's
};
// Reads the payload of a record that begins at `offset` of `file`, and checks it while it is in cache.
// out: gets the bytes, of the header's stored_size; empty: they are only checked
// errors: File::read's. A CRC that differs is in the result.
Result<PayloadCheck> scan_payload(const File& file, std::uint64_t offset, const RecordHead& head, std::span<std::byte> out);

}  // namespace paramwire
