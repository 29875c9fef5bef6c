#include "paramwire/wire/manifest_entry.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <array>

namespace paramwire {

namespace {

Status decode_block_body(ByteReader& in, ManifestEntry& entry) {
  const std::uint8_t shard_kind = in.get<std::uint8_t>();
  if (shard_kind > static_cast<std::uint8_t>(ShardKind::kHeads)) return malformed(in, "shard kind");
  entry.shard.kind = static_cast<ShardKind>(shard_kind);
  if (entry.shard.kind == ShardKind::kHeads) {
    const std::uint64_t heads = in.varint();
    if (heads == 0 || heads > 0xffffffffU) return malformed(in, "shard heads");
    entry.shard.heads = static_cast<std::uint32_t>(heads);
  }
  if (entry.shard.kind != ShardKind::kWhole) {
    entry.shard.begin = in.varint();
    entry.shard.end = in.varint();
  }
  const auto dtype = dtype_from_code(in.varint());
  if (!in.ok() || !dtype.ok()) return malformed(in, "dtype");
  entry.dtype = *dtype;
  const std::uint8_t rank = in.get<std::uint8_t>();
  if (rank > Shape::kMaxAxes) return malformed(in, "rank");
  std::array<std::uint64_t, Shape::kMaxAxes> dims{};
  for (std::size_t i = 0; i < rank; ++i) dims[i] = in.varint();
  const auto shape = Shape::from({dims.data(), rank});
  if (!in.ok() || !shape.ok()) return malformed(in, "shape");
  entry.shape = *shape;
  const auto raw_size = block_bytes(entry.dtype, entry.shape, entry.shard);
  if (!raw_size.ok()) return malformed(in, "shard range");
  entry.raw_size = *raw_size;
  const std::uint64_t codec = in.varint();
  if (codec > kCodecMax) return malformed(in, "codec");
  entry.codec = static_cast<CodecId>(codec);
  entry.stored_size = entry.codec == CodecId::kRaw ? entry.raw_size : in.varint();
  if (!stored_size_valid(entry.codec, entry.raw_size, entry.stored_size)) return malformed(in, "stored size");
  entry.crc64 = in.get<std::uint64_t>();
  if (entry.stored_size > kExtentBytes) entry.extent_table_crc = in.get<std::uint32_t>();
  return {};
}

// ByteReader without its checks.
class CheckedCursor {
 public:
  explicit CheckedCursor(const std::byte* at) : at_(at) {}
  template <std::unsigned_integral T>
  T get() noexcept {
    const T value = load_le<T>(at_);
    at_ += sizeof(T);
    return value;
  }
  std::uint64_t varint() noexcept {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = get<std::uint8_t>();
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  }
  std::string_view text() noexcept {
    const auto size = static_cast<std::size_t>(varint());
    const std::string_view part(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return part;
  }

 private:
  const std::byte* at_;
};

// block_bytes() of fields that it has passed before.
std::uint64_t checked_block_bytes(DType dtype, const Shape& shape, const Shard& shard) noexcept {
  if (shard.kind == ShardKind::kWhole) return tensor_bytes(dtype, shape);
  const std::uint64_t parts = shard.kind == ShardKind::kHeads ? shard.heads : shape[0];
  return shape.elements() / parts * (shard.end - shard.begin) * dtype_bits(dtype) / 8;
}

}  // namespace

Error malformed(const ByteReader& in, std::string_view field) {
  return Error(Code::kCorrupt, cat("manifest stream: bad ", field, " near byte ", in.position()));
}

std::string ManifestEntry::to_string() const {
  if (shard.kind == ShardKind::kWhole) return std::string(tensor);
  return cat(tensor, '[', shard, ']');
}

Result<std::uint64_t> block_bytes(DType dtype, const Shape& shape, const Shard& shard) {
  if (shard.kind == ShardKind::kWhole) return tensor_bytes(dtype, shape);
  PARAMWIRE_TRY(rows, shard_rows(shape, shard));
  const std::uint64_t row_bits = shape.elements() / shape[0] * dtype_bits(dtype);  // shard_rows refuses zero rows
  if ((rows.first * row_bits) % 8 != 0 || (rows.second * row_bits) % 8 != 0) {
    return Error(Code::kInvalid, cat(shard.to_string(), ": rows of ", row_bits, " bits do not start and end on a byte"));
  }
  return (rows.second - rows.first) * row_bits / 8;
}

bool canonical(const Shard& shard) noexcept {
  switch (shard.kind) {
    case ShardKind::kWhole: return shard == Shard::whole();
    case ShardKind::kRows: return shard.heads == 0;
    case ShardKind::kHeads: return shard.heads != 0;
  }
  return false;
}

bool valid_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= kMaxNameBytes && name.find('\0') == std::string_view::npos;
}

Status check_entry(const ManifestEntry& entry) {
  const auto refuse = [&](std::string_view why) { return Error(Code::kInvalid, cat("manifest entry ", entry.to_string(), ": ", why)); };
  for (const std::string_view name : {entry.tensor, entry.kind == EntryKind::kAlias ? entry.target : entry.tensor}) {
    if (!valid_name(name)) {
      return Error(Code::kInvalid, cat("a tensor name has 1 to ", kMaxNameBytes, " bytes, none of them NUL; got ", name.size(),
                                       " bytes: ", name.substr(0, 64)));
    }
  }
  if (!entry.version.valid()) return refuse(cat("version ", entry.version, " has a zero part"));
  if (!canonical(entry.shard)) return refuse(cat("shard ", entry.shard, " has a value in a field that its kind does not use"));
  if (entry.id != block_id(entry.tensor, entry.shard)) {
    return Error(Code::kInternal, cat("manifest entry ", entry.to_string(), ": id ", entry.id, " is not the hash of its key"));
  }
  if (entry.kind == EntryKind::kAlias) {
    if (entry.shard.kind != ShardKind::kWhole) return refuse("an alias stands for a whole tensor");
    return {};
  }
  if (entry.kind != EntryKind::kBlock) return refuse(cat("unknown kind ", static_cast<unsigned>(entry.kind)));
  PARAMWIRE_CHECK(dtype_from_code(static_cast<std::uint64_t>(entry.dtype)));
  PARAMWIRE_TRY(bytes, block_bytes(entry.dtype, entry.shape, entry.shard));
  if (bytes != entry.raw_size) return refuse(cat("holds ", bytes, " bytes, not ", entry.raw_size));
  if (static_cast<std::uint16_t>(entry.codec) > kCodecMax) return refuse(cat("unknown codec ", static_cast<unsigned>(entry.codec)));
  if (!stored_size_valid(entry.codec, entry.raw_size, entry.stored_size)) {
    return refuse(cat("codec ", static_cast<unsigned>(entry.codec), " stores ", entry.raw_size, " bytes as ", entry.stored_size, ": raw keeps the size, the others lessen it"));
  }
  if (entry.stored_size <= kExtentBytes && entry.extent_table_crc != 0) {
    return refuse(cat("a block of ", entry.stored_size, " stored bytes has no extent table, so its CRC is 0"));
  }
  return {};
}

void encode_entry(std::vector<std::byte>& bytes, const ManifestEntry& entry) {
  ByteWriter out(bytes);
  out.put<std::uint64_t>(entry.id.value);
  out.put<std::uint8_t>(static_cast<std::uint8_t>(entry.kind));
  out.text(entry.tensor);
  out.varint(entry.version.epoch);
  out.varint(entry.version.counter);
  if (entry.kind == EntryKind::kAlias) {
    out.text(entry.target);
    return;
  }
  out.put<std::uint8_t>(static_cast<std::uint8_t>(entry.shard.kind));
  if (entry.shard.kind == ShardKind::kHeads) out.varint(entry.shard.heads);
  if (entry.shard.kind != ShardKind::kWhole) {
    out.varint(entry.shard.begin);
    out.varint(entry.shard.end);
  }
  out.varint(static_cast<std::uint64_t>(entry.dtype));
  out.put<std::uint8_t>(static_cast<std::uint8_t>(entry.shape.rank()));
  for (std::uint64_t dim : entry.shape.dims()) out.varint(dim);
  out.varint(static_cast<std::uint64_t>(entry.codec));
  if (entry.codec != CodecId::kRaw) out.varint(entry.stored_size);
  out.put<std::uint64_t>(entry.crc64);
  if (entry.stored_size > kExtentBytes) out.put<std::uint32_t>(entry.extent_table_crc);
}

Result<ManifestEntry> decode_entry(ByteReader& in) {
  ManifestEntry entry;
  entry.id.value = in.get<std::uint64_t>();
  const std::uint8_t kind = in.get<std::uint8_t>();
  if (!in.ok() || kind > static_cast<std::uint8_t>(EntryKind::kAlias)) return malformed(in, "entry kind");
  entry.kind = static_cast<EntryKind>(kind);
  entry.tensor = in.text(kMaxNameBytes);
  if (!in.ok() || !valid_name(entry.tensor)) return malformed(in, "tensor name");
  const std::uint64_t epoch = in.varint();
  entry.version.counter = in.varint();
  if (!in.ok() || epoch > 0xffffffffU) return malformed(in, "entry version");
  entry.version.epoch = static_cast<std::uint32_t>(epoch);
  if (!entry.version.valid()) return malformed(in, "entry version");
  if (entry.kind == EntryKind::kAlias) {
    entry.target = in.text(kMaxNameBytes);
    if (!in.ok() || !valid_name(entry.target)) return malformed(in, "alias target");
  } else {
    PARAMWIRE_CHECK(decode_block_body(in, entry));
  }
  if (!in.ok()) return malformed(in, "entry");
  if (block_id(entry.tensor, entry.shard) != entry.id) return malformed(in, "block id");
  return entry;
}

ManifestEntry decode_checked_entry(const std::byte* bytes) noexcept {
  CheckedCursor in(bytes);
  ManifestEntry entry;
  entry.id.value = in.get<std::uint64_t>();
  entry.kind = static_cast<EntryKind>(in.get<std::uint8_t>());
  entry.tensor = in.text();
  entry.version.epoch = static_cast<std::uint32_t>(in.varint());
  entry.version.counter = in.varint();
  if (entry.kind == EntryKind::kAlias) {
    entry.target = in.text();
    return entry;
  }
  entry.shard.kind = static_cast<ShardKind>(in.get<std::uint8_t>());
  if (entry.shard.kind == ShardKind::kHeads) entry.shard.heads = static_cast<std::uint32_t>(in.varint());
  if (entry.shard.kind != ShardKind::kWhole) {
    entry.shard.begin = in.varint();
    entry.shard.end = in.varint();
  }
  entry.dtype = static_cast<DType>(in.varint());
  std::array<std::uint64_t, Shape::kMaxAxes> dims{};
  const std::size_t rank = in.get<std::uint8_t>();
  for (std::size_t i = 0; i < rank; ++i) dims[i] = in.varint();
  if (const auto shape = Shape::from({dims.data(), rank}); shape.ok()) entry.shape = *shape;
  entry.codec = static_cast<CodecId>(in.varint());
  entry.raw_size = checked_block_bytes(entry.dtype, entry.shape, entry.shard);
  entry.stored_size = entry.codec == CodecId::kRaw ? entry.raw_size : in.varint();
  entry.crc64 = in.get<std::uint64_t>();
  if (entry.stored_size > kExtentBytes) entry.extent_table_crc = in.get<std::uint32_t>();
  return entry;
}

std::string_view checked_entry_name(const std::byte* bytes) noexcept {
  return CheckedCursor(bytes + sizeof(std::uint64_t) + sizeof(EntryKind)).text();
}

}  // namespace paramwire
