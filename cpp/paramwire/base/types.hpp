// The value types that every layer shares: element types, shapes, shards, block ids, versions.
//
// All are plain values: copy freely, any thread.
#pragma once

#include "paramwire/base/error.hpp"

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace paramwire {

// ---------------------------------------------------------------- element types

// Codes are stored and sent (wire/FORMAT.md): never renumber. Complex and sub-byte types travel as labelled bytes.
enum class DType : std::uint16_t {
  kU8 = 1, kI8 = 2, kU16 = 3, kI16 = 4, kU32 = 5, kI32 = 6, kU64 = 7, kI64 = 8,
  kF16 = 9, kBF16 = 10, kF32 = 11, kF64 = 12,
  kF8E4M3 = 13,   // OCP 8-bit, S1E4M3, finite only ("fn")
  kF8E5M2 = 14,   // OCP 8-bit, S1E5M2
  kF8E8M0 = 15,   // OCP MX scale: 8 exponent bits, no sign
  kBool = 16,     // one byte, 0 or 1
  kC64 = 17, kC128 = 18,
  kI4 = 19, kU4 = 20,   // two elements a byte, low nibble first; an odd count leaves the last high nibble zero
};
inline constexpr std::uint16_t kDTypeMax = 20;

// Bits of one element (4 for kI4 and kU4); 0 for a code outside the table.
std::uint32_t dtype_bits(DType dtype) noexcept;
// "bf16", "f32", "f8_e4m3", ...; "unknown" outside the table. The same words in Python, CLI and docs.
std::string_view dtype_name(DType dtype) noexcept;
// The inverse; also takes numpy's and safetensors' spellings ("float32", "BF16", "F8_E4M3"). kInvalid lists the known names.
Result<DType> dtype_from_name(std::string_view name);
Result<DType> dtype_from_code(std::uint64_t code);

// ---------------------------------------------------------------- shapes

// Up to 8 axes, row-major, outermost first. No axes is a scalar (one element); an axis of 0 is an empty tensor.
class Shape {
 public:
  static constexpr std::size_t kMaxAxes = 8;
  Shape() = default;
  Shape(std::initializer_list<std::uint64_t> dims);  // at most kMaxAxes, asserted
  // kInvalid when there are more than kMaxAxes axes or the element count does not fit 2^48.
  static Result<Shape> from(std::span<const std::uint64_t> dims);

  std::size_t rank() const noexcept { return rank_; }
  std::uint64_t operator[](std::size_t axis) const noexcept { return dims_[axis]; }
  std::span<const std::uint64_t> dims() const noexcept { return {dims_.data(), rank_}; }
  std::uint64_t elements() const noexcept;
  bool operator==(const Shape& other) const noexcept = default;
  std::string to_string() const;  // "(49152, 576)"

 private:
  std::array<std::uint64_t, kMaxAxes> dims_{};
  std::size_t rank_ = 0;
};

// Bytes of `shape` elements of `dtype` (sub-byte types rounded up to a byte).
std::uint64_t tensor_bytes(DType dtype, const Shape& shape) noexcept;

// ---------------------------------------------------------------- shards and blocks

// Which part of a tensor a block holds. Rows are indices of the outermost axis; heads are groups of rows of equal size.
//   kWhole: `begin` = `end` = 0.   kRows: rows [begin, end).   kHeads: heads [begin, end) of `heads` in all.
enum class ShardKind : std::uint8_t { kWhole = 0, kRows = 1, kHeads = 2 };

struct Shard {
  ShardKind kind = ShardKind::kWhole;
  std::uint32_t heads = 0;  // kHeads only: heads along the outermost axis, a divisor of it
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  static Shard whole() noexcept { return {}; }
  static Shard rows(std::uint64_t begin, std::uint64_t end) noexcept { return {ShardKind::kRows, 0, begin, end}; }
  static Shard head_range(std::uint32_t heads, std::uint64_t begin, std::uint64_t end) noexcept {
    return {ShardKind::kHeads, heads, begin, end};
  }
  bool operator==(const Shard&) const noexcept = default;
  std::string to_string() const;  // "whole", "rows[0:2048]", "heads[0:3]/9"
};

// Rows [first, second) of the outermost axis that `shard` covers in a tensor of `shape`.
// kInvalid: a range outside the tensor or empty (begin >= end), a scalar cut in rows, `heads` that does not divide the rows.
Result<std::pair<std::uint64_t, std::uint64_t>> shard_rows(const Shape& shape, const Shard& shard);
// Shape of the part: the tensor's, with the outermost axis cut to the shard's rows. Errors as shard_rows.
Result<Shape> shard_shape(const Shape& shape, const Shard& shard);

// Hash of the canonical key (wire/FORMAT.md, "Block id"). 0 is never an id: it means "none" in slot headers.
struct BlockId {
  std::uint64_t value = 0;
  auto operator<=>(const BlockId&) const noexcept = default;
  std::string to_string() const;  // 16 hex digits
};
BlockId block_id(std::string_view tensor, const Shard& shard) noexcept;

// ---------------------------------------------------------------- versions

// (epoch, counter): epochs fence, counters count publishes of one epoch from 1. Compared in that order. "Unknown" is
// std::optional<Version>, never (0, 0); a valid version has both parts non-zero.
struct Version {
  std::uint32_t epoch = 0;
  std::uint64_t counter = 0;
  auto operator<=>(const Version&) const noexcept = default;
  bool valid() const noexcept { return epoch != 0 && counter != 0; }
  std::string to_string() const;  // "3.17"
};
// "none" or "3.17".
std::string to_text(const std::optional<Version>& version);

// 128 random bits drawn at every server start; compared by equality only.
struct Incarnation {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const Incarnation&) const noexcept = default;
  std::string to_string() const;  // 32 hex digits
};

// How stored bytes relate to raw bytes. Codes are stored and sent: never renumber.
enum class CodecId : std::uint16_t {
  kRaw = 0,     // the raw bytes themselves
  kPlanes = 1,  // byte planes, each raw, constant or Huffman-coded (codec/byteplane.hpp)
  kLz4 = 2,     // LZ4 blocks, for sparse and delta streams
};
inline constexpr std::uint16_t kCodecMax = 2;

// "raw", "planes", "lz4"; "unknown" outside the table. The same words in Python, CLI and docs.
std::string_view codec_name(CodecId codec) noexcept;
// The inverse. kInvalid lists the known names.
Result<CodecId> codec_of(std::string_view name);
// Encoded blocks are smaller than raw: what did not get smaller is stored raw. So no reader needs more memory for what arrives than for what it becomes.
constexpr bool stored_size_valid(CodecId codec, std::uint64_t raw_size, std::uint64_t stored_size) noexcept {
  return codec == CodecId::kRaw ? stored_size == raw_size : stored_size > 0 && stored_size < raw_size;
}

// 64 KiB of stored bytes: the unit of ranged verification, each with its own CRC-32C. Smaller extents cost table space
// (8 B each) and a CRC set-up each; larger ones make a one-row fetch verify more bytes than it wants.
inline constexpr std::uint64_t kExtentBytes = 64 * 1024;
constexpr std::uint64_t extent_count(std::uint64_t stored_bytes) noexcept { return (stored_bytes + kExtentBytes - 1) / kExtentBytes; }

// 64 KiB of a block's raw bytes: what a codec encodes and decodes by itself, so that a block decodes in parallel, in part, and as it arrives. Smaller
// chunks cost code tables (about 30 B each), larger ones a first-level cache.
inline constexpr std::uint64_t kChunkBytes = 64 * 1024;
constexpr std::uint64_t chunk_count(std::uint64_t raw_bytes) noexcept { return (raw_bytes + kChunkBytes - 1) / kChunkBytes; }

// Bytes [offset, offset + size) of a block.
struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
  bool operator==(const ByteRange&) const noexcept = default;
};

}  // namespace paramwire

template <>
struct std::hash<paramwire::BlockId> {
  std::size_t operator()(paramwire::BlockId id) const noexcept { return static_cast<std::size_t>(id.value); }
};
