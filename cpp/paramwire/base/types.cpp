#include "paramwire/base/types.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cctype>

namespace paramwire {

namespace {

struct DTypeRow {
  DType dtype;
  std::uint32_t bits;
  std::string_view name;
  std::string_view numpy;
  std::string_view safetensors;
};

constexpr DTypeRow kDTypes[] = {
    {DType::kU8, 8, "u8", "uint8", "U8"},
    {DType::kI8, 8, "i8", "int8", "I8"},
    {DType::kU16, 16, "u16", "uint16", "U16"},
    {DType::kI16, 16, "i16", "int16", "I16"},
    {DType::kU32, 32, "u32", "uint32", "U32"},
    {DType::kI32, 32, "i32", "int32", "I32"},
    {DType::kU64, 64, "u64", "uint64", "U64"},
    {DType::kI64, 64, "i64", "int64", "I64"},
    {DType::kF16, 16, "f16", "float16", "F16"},
    {DType::kBF16, 16, "bf16", "bfloat16", "BF16"},
    {DType::kF32, 32, "f32", "float32", "F32"},
    {DType::kF64, 64, "f64", "float64", "F64"},
    {DType::kF8E4M3, 8, "f8_e4m3", "float8_e4m3fn", "F8_E4M3"},
    {DType::kF8E5M2, 8, "f8_e5m2", "float8_e5m2", "F8_E5M2"},
    {DType::kF8E8M0, 8, "f8_e8m0", "float8_e8m0fnu", "F8_E8M0"},
    {DType::kBool, 8, "bool", "bool_", "BOOL"},
    {DType::kC64, 64, "c64", "complex64", "C64"},
    {DType::kC128, 128, "c128", "complex128", "C128"},
    {DType::kI4, 4, "i4", "int4", "I4"},
    {DType::kU4, 4, "u4", "uint4", "U4"},
};

const DTypeRow* row_of(DType dtype) noexcept {
  const auto code = static_cast<std::uint16_t>(dtype);
  if (code < 1 || code > kDTypeMax) return nullptr;
  return &kDTypes[code - 1];
}

}  // namespace

std::uint32_t dtype_bits(DType dtype) noexcept {
  const DTypeRow* row = row_of(dtype);
  return row ? row->bits : 0;
}

std::string_view dtype_name(DType dtype) noexcept {
  const DTypeRow* row = row_of(dtype);
  return row ? row->name : "unknown";
}

Result<DType> dtype_from_name(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (name == row.name || name == row.numpy || name == row.safetensors) return row.dtype;
  }
  std::string known;
  for (const DTypeRow& row : kDTypes) known += cat(known.empty() ? "" : ", ", row.name);
  return Error(Code::kInvalid, cat("unknown dtype \"", name, "\"; known: ", known));
}

Result<DType> dtype_from_code(std::uint64_t code) {
  if (code < 1 || code > kDTypeMax) {
    return Error(Code::kInvalid, cat("unknown dtype code ", code, "; this build knows 1 to ", kDTypeMax));
  }
  return static_cast<DType>(code);
}

std::string_view codec_name(CodecId codec) noexcept {
  switch (codec) {
    case CodecId::kRaw: return "raw";
    case CodecId::kPlanes: return "planes";
    case CodecId::kLz4: return "lz4";
  }
  return "unknown";
}

Result<CodecId> codec_of(std::string_view name) {
  for (std::uint16_t code = 0; code <= kCodecMax; ++code) {
    if (name == codec_name(static_cast<CodecId>(code))) return static_cast<CodecId>(code);
  }
  return Error(Code::kInvalid, cat("unknown codec \"", name, "\"; known: raw, planes, lz4"));
}

Shape::Shape(std::initializer_list<std::uint64_t> dims) : rank_(dims.size()) {
  assert(dims.size() <= kMaxAxes);
  std::copy(dims.begin(), dims.end(), dims_.begin());
}

Result<Shape> Shape::from(std::span<const std::uint64_t> dims) {
  if (dims.size() > kMaxAxes) {
    return Error(Code::kInvalid, cat("a shape has at most ", kMaxAxes, " axes, got ", dims.size()));
  }
  // 2^48 elements of 16 bytes is 2^52 bytes: every later product of sizes stays far inside 64 bits. Zero axes do not
  // lift the limit of the others, or a reshape could overflow later.
  constexpr std::uint64_t kLimit = std::uint64_t{1} << 48;
  std::uint64_t product = 1;
  Shape shape;
  shape.rank_ = dims.size();
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const std::uint64_t dim = dims[i];
    if (dim > kLimit || (dim != 0 && product > kLimit / dim)) {
      return Error(Code::kInvalid, cat("a shape has at most 2^48 elements; axis ", i, " of size ", dim, " exceeds it"));
    }
    if (dim != 0) product *= dim;
    shape.dims_[i] = dim;
  }
  return shape;
}

std::uint64_t Shape::elements() const noexcept {
  std::uint64_t count = 1;
  for (std::uint64_t dim : dims()) count *= dim;
  return count;
}

std::string Shape::to_string() const {
  std::string out = "(";
  for (std::size_t i = 0; i < rank_; ++i) out += cat(i ? ", " : "", dims_[i]);
  if (rank_ == 1) out += ",";
  return out + ")";
}

std::uint64_t tensor_bytes(DType dtype, const Shape& shape) noexcept {
  return (shape.elements() * dtype_bits(dtype) + 7) / 8;
}

std::string Shard::to_string() const {
  switch (kind) {
    case ShardKind::kWhole: return "whole";
    case ShardKind::kRows: return cat("rows[", begin, ":", end, "]");
    case ShardKind::kHeads: return cat("heads[", begin, ":", end, "]/", heads);
  }
  return "unknown";
}

Result<std::pair<std::uint64_t, std::uint64_t>> shard_rows(const Shape& shape, const Shard& shard) {
  using Rows = std::pair<std::uint64_t, std::uint64_t>;
  if (shard.kind == ShardKind::kWhole) return Rows{0, shape.rank() == 0 ? 1 : shape[0]};
  if (shape.rank() == 0) return Error(Code::kInvalid, cat(shard.to_string(), ": a scalar has no rows to cut"));
  if (shard.begin >= shard.end) return Error(Code::kInvalid, cat(shard.to_string(), ": the range is empty"));
  const std::uint64_t rows = shape[0];
  if (shard.kind == ShardKind::kRows) {
    if (shard.end > rows) return Error(Code::kInvalid, cat(shard.to_string(), " is outside the ", rows, " rows of shape ", shape));
    return Rows{shard.begin, shard.end};
  }
  // No rows have no parts: divisible by any number, a head of them would have no first row.
  if (shard.heads == 0 || rows == 0 || rows % shard.heads != 0) {
    return Error(Code::kInvalid, cat(shard.to_string(), ": ", shard.heads, " heads do not divide the ", rows, " rows of shape ", shape));
  }
  if (shard.end > shard.heads) return Error(Code::kInvalid, cat(shard.to_string(), " is outside the ", shard.heads, " heads"));
  const std::uint64_t rows_per_head = rows / shard.heads;
  return Rows{shard.begin * rows_per_head, shard.end * rows_per_head};
}

Result<Shape> shard_shape(const Shape& shape, const Shard& shard) {
  PARAMWIRE_TRY(rows, shard_rows(shape, shard));
  if (shard.kind == ShardKind::kWhole) return shape;
  std::array<std::uint64_t, Shape::kMaxAxes> dims{};
  std::copy(shape.dims().begin(), shape.dims().end(), dims.begin());
  dims[0] = rows.second - rows.first;
  return Shape::from({dims.data(), shape.rank()});
}

std::string BlockId::to_string() const { return hex64(value); }

BlockId block_id(std::string_view tensor, const Shard& shard) noexcept {
  // FNV-1a 64 over the canonical key, then the finaliser of MurmurHash3 (fmix64), since manifest pages are chosen by the
  // top bits and plain FNV mixes those last. Both public domain: draft-eastlake-fnv, github.com/aappleby/smhasher.
  std::uint64_t hash = 0xcbf29ce484222325U;
  const auto mix = [&hash](std::uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3U; };
  for (char c : tensor) mix(static_cast<std::uint8_t>(c));
  mix(0);
  mix(static_cast<std::uint8_t>(shard.kind));
  if (shard.kind != ShardKind::kWhole) {
    for (int i = 0; i < 4; ++i) mix(static_cast<std::uint8_t>(shard.heads >> (8 * i)));
    for (int i = 0; i < 8; ++i) mix(static_cast<std::uint8_t>(shard.begin >> (8 * i)));
    for (int i = 0; i < 8; ++i) mix(static_cast<std::uint8_t>(shard.end >> (8 * i)));
  }
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdU;
  hash ^= hash >> 33;
  hash *= 0xc4ceb9fe1a85ec53U;
  hash ^= hash >> 33;
  return BlockId{hash == 0 ? 1 : hash};
}

std::string Version::to_string() const { return cat(epoch, '.', counter); }

std::string to_text(const std::optional<Version>& version) { return version ? version->to_string() : "none"; }

std::string Incarnation::to_string() const { return hex64(high) + hex64(low); }

}  // namespace paramwire
