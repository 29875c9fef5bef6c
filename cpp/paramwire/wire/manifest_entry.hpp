// One entry of a manifest and its encoding. Layout: wire/FORMAT.md, "Manifest entry".
//
// The encoding is canonical: one entry, one byte string. So entries are compared, hashed and passed on as bytes, and decoded
// only where a field is wanted. All functions: any thread.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/types.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// Longest tensor name, in bytes of UTF-8. Bounds what one entry can make a reader allocate; the longest name seen in a
// published model is under 200 bytes. Longer names are refused, never cut.
inline constexpr std::uint64_t kMaxNameBytes = 4096;

enum class EntryKind : std::uint8_t { kBlock = 0, kAlias = 1 };

// One entry, decoded. The string views point into the manifest (or delta) that it was read from.
struct ManifestEntry {
  EntryKind kind = EntryKind::kBlock;
  BlockId id;
  std::string_view tensor;     // UTF-8 by convention; any bytes but NUL are kept as they are
  Version version;             // that wrote this entry, <= the manifest's version
  // kAlias: another name of `target` (tied weights); shard whole, the rest empty.
  std::string_view target;
  // kBlock:
  Shard shard;
  DType dtype = DType::kU8;
  Shape shape;                 // of the whole tensor; the block's is shard_shape(shape, shard)
  CodecId codec = CodecId::kRaw;
  std::uint64_t raw_size = 0;     // bytes of the block, decoded; follows from dtype, shape and shard
  std::uint64_t stored_size = 0;  // bytes that travel; equals raw_size for codec raw
  std::uint64_t crc64 = 0;        // CRC-64/XZ of the stored bytes
  std::uint32_t extent_table_crc = 0;  // CRC-32C of the extent table; 0 when the block is one extent or less

  // "blk.0.attn_q.weight[rows[0:64]]", or the name alone for a whole tensor.
  std::string to_string() const;
};

// raw_size of a block entry from its dtype, shape and shard. A row or head range of a sub-byte type must start and end on
// a byte. errors: kInvalid as shard_rows, or naming the bits that do not fill a byte.
Result<std::uint64_t> block_bytes(DType dtype, const Shape& shape, const Shard& shard);

// Whether fields that a shard's kind does not use are zero (kRows has no heads, kWhole no range): one shard, one block id.
bool canonical(const Shard& shard) noexcept;
// Whether `name` can stand in a block's canonical key: 1 to kMaxNameBytes bytes, no NUL (which ends it there).
bool valid_name(std::string_view name) noexcept;

// ok when encode_entry() would write something that decode_entry() reads back equal.
// errors: kInvalid naming the entry and the field; kInternal when the id is not the hash of the key.
Status check_entry(const ManifestEntry& entry);
// Appends the encoding. `entry` has passed check_entry().
void encode_entry(std::vector<std::byte>& out, const ManifestEntry& entry);
// Reads one entry and checks all of it, the id against the key included. errors: kCorrupt naming the field and the byte.
Result<ManifestEntry> decode_entry(ByteReader& in);
// Decodes `bytes` that begin with an entry which check_entry() or decode_entry() has passed: nothing is checked again, for
// the 64-byte fetch that waits on it.
ManifestEntry decode_checked_entry(const std::byte* bytes) noexcept;
// The tensor name alone, of such bytes.
std::string_view checked_entry_name(const std::byte* bytes) noexcept;

// kCorrupt "manifest stream: bad FIELD near byte N".
Error malformed(const ByteReader& in, std::string_view field);

}  // namespace paramwire
