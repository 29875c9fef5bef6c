#include "paramwire/codec/delta.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_piece.hpp"
#include "paramwire/codec/pieces.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

namespace paramwire {
namespace {

static_assert(std::endian::native == std::endian::little, "pieces are coded as little-endian words; a big-endian port needs loads");

constexpr std::uint32_t kMagic = 0x44525750;  // "PWRD"
constexpr std::uint32_t kOnebitMagic = 0x42525750;  // "PWRB": codec/onebit.cpp
constexpr std::uint8_t kFormat = 1;
constexpr std::uint64_t kRowBytes = 12;
// Chunk and piece counts of larger blocks would not matter to anybody; 2^56 bytes keep every sum below far from 64 bits.
constexpr std::uint64_t kRawMax = std::uint64_t{1} << 56;

constexpr std::uint64_t piece_count(std::uint64_t raw_size) noexcept { return (raw_size + kDeltaPieceBytes - 1) / kDeltaPieceBytes; }

// Blocks up to this are applied in place by way of a copy of the result, larger ones are decoded twice. With what a thread needs anyway (4 MiB) it's
// within kDeltaScratchBytes.
constexpr std::uint64_t kKeptBytes = 8 * kDeltaPieceBytes;

struct Header {
  DeltaInfo info;
  std::uint64_t payload_size = 0;
  std::uint32_t table_crc = 0;
};

// A row of the table, and where its piece lies.
struct Row {
  DeltaForm form = DeltaForm::kSame;
  std::uint32_t stored_size = 0;
  std::uint32_t crc32c = 0;
};

Error corrupt(std::string why) { return {Code::kCorrupt, cat("delta: ", why)}; }

template <typename Byte>
std::span<Byte> piece_of(std::span<Byte> raw, std::uint64_t index) {
  const std::uint64_t begin = index * kDeltaPieceBytes;
  return raw.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(std::min<std::uint64_t>(kDeltaPieceBytes, raw.size() - begin)));
}

void put_header(std::vector<std::byte>& out, const Header& header) {
  ByteWriter put(out);
  put.put(kMagic);
  put.put(kFormat);
  put.put(static_cast<std::uint8_t>(header.info.form));
  put.put(static_cast<std::uint16_t>(header.info.dtype));
  put.put(header.info.raw_size);
  put.put(header.info.base_version.counter);
  put.put(header.info.base_version.epoch);
  put.put(header.table_crc);
  put.put(header.info.base_crc64);
  put.put(header.info.result_crc64);
  put.put(header.payload_size);
  put.put(std::uint32_t{0});
  put.put(crc32c(out));
}

Result<Header> get_header(std::span<const std::byte> delta) {
  if (delta.size() < kDeltaHeaderBytes) return corrupt(cat("of ", delta.size(), " bytes; its header alone has ", kDeltaHeaderBytes));
  ByteReader in(delta.first(kDeltaHeaderBytes));
  if (const auto magic = in.get<std::uint32_t>(); magic != kMagic) return corrupt(cat("its first bytes are not \"PWRD\"", magic == kOnebitMagic ? ", but a one-bit delta's: apply_onebit takes it" : ""));
  if (const auto format = in.get<std::uint8_t>(); format != kFormat) return corrupt(cat("of format ", format, "; this build reads ", kFormat));
  const std::uint32_t crc = crc32c(delta.first(kDeltaHeaderBytes - 4));
  if (const auto named = load_le<std::uint32_t>(delta.data() + kDeltaHeaderBytes - 4); named != crc) {
    return corrupt(cat("CRC-32C of its header is ", crc, ", not ", named));
  }
  Header header;
  DeltaInfo& info = header.info;
  const auto form = in.get<std::uint8_t>();
  if (form > static_cast<std::uint8_t>(DeltaForm::kMixed)) return corrupt(cat("of form ", form, ", which is none"));
  info.form = static_cast<DeltaForm>(form);
  auto dtype = dtype_from_code(in.get<std::uint16_t>());
  if (!dtype.ok()) return corrupt(dtype.error().message());
  info.dtype = *dtype;
  info.raw_size = in.get<std::uint64_t>();
  info.base_version.counter = in.get<std::uint64_t>();
  info.base_version.epoch = in.get<std::uint32_t>();
  header.table_crc = in.get<std::uint32_t>();
  info.base_crc64 = in.get<std::uint64_t>();
  info.result_crc64 = in.get<std::uint64_t>();
  header.payload_size = in.get<std::uint64_t>();
  info.delta_size = delta.size();
  if (in.get<std::uint32_t>() != 0) return corrupt("bytes 56 to 59 of its header are not zero");
  if (!info.base_version.valid()) return corrupt(cat("its base version is ", info.base_version));
  if (info.raw_size > kRawMax || info.raw_size % delta::element_of(info.dtype).bytes != 0) {
    return corrupt(cat("of a block of ", info.raw_size, " bytes, which are no whole elements of ", dtype_name(info.dtype), ", or too many"));
  }
  return header;
}

struct Parsed {
  Header header;
  std::vector<Row> rows;                 // empty when nothing changed
  std::vector<std::uint64_t> offsets;    // of each piece in the delta

  std::span<const std::byte> stored(std::span<const std::byte> delta, std::size_t piece) const {
    return delta.subspan(static_cast<std::size_t>(offsets[piece]), rows[piece].stored_size);
  }
};

DeltaForm form_of(std::span<const Row> rows) noexcept {
  DeltaForm form = DeltaForm::kSame;
  for (const Row& row : rows) {
    if (row.form == DeltaForm::kSame || row.form == form) continue;
    if (form != DeltaForm::kSame) return DeltaForm::kMixed;
    form = row.form;
  }
  return form;
}

// Header and table, checked against each other and the size.
Result<Parsed> parse(std::span<const std::byte> delta) {
  PARAMWIRE_TRY(header, get_header(delta));
  Parsed parsed{header, {}, {}};
  const std::uint64_t raw_size = header.info.raw_size;
  const std::uint64_t pieces = header.info.form == DeltaForm::kSame ? 0 : piece_count(raw_size);
  const std::uint64_t behind = delta.size() - kDeltaHeaderBytes;
  // raw_size is bounded, so that pieces * kRowBytes is no larger than 2^40.
  if (pieces * kRowBytes > behind || behind - pieces * kRowBytes != header.payload_size) {
    return corrupt(cat("of ", delta.size(), " bytes, with ", pieces, " pieces of together ", header.payload_size, " bytes; it was cut, or others came behind it"));
  }
  const auto table = delta.subspan(kDeltaHeaderBytes, static_cast<std::size_t>(pieces * kRowBytes));
  if (const std::uint32_t crc = crc32c(table); crc != header.table_crc) return corrupt(cat("CRC-32C of its table is ", crc, ", not ", header.table_crc));
  parsed.rows.reserve(static_cast<std::size_t>(pieces));
  parsed.offsets.reserve(static_cast<std::size_t>(pieces));
  ByteReader in(table);
  std::uint64_t offset = kDeltaHeaderBytes + table.size();
  for (std::uint64_t i = 0; i < pieces; ++i) {
    const auto form = in.get<std::uint32_t>();
    const Row row{static_cast<DeltaForm>(form & 0xff), in.get<std::uint32_t>(), in.get<std::uint32_t>()};
    if (form >= static_cast<std::uint32_t>(DeltaForm::kMixed)) return corrupt(cat("piece ", i, " has form ", form, ", which is none"));
    const std::uint64_t raw = std::min(kDeltaPieceBytes, raw_size - i * kDeltaPieceBytes);
    if (row.stored_size > delta::piece_bound(raw) || (row.form == DeltaForm::kSame) != (row.stored_size == 0)) {
      return corrupt(cat("piece ", i, ", ", delta_form_name(row.form), ", has ", row.stored_size, " bytes for ", raw));
    }
    parsed.rows.push_back(row);
    parsed.offsets.push_back(offset);
    offset += row.stored_size;
  }
  if (offset != delta.size()) return corrupt(cat("its pieces end at byte ", offset, " of ", delta.size()));
  if (form_of(parsed.rows) != header.info.form) return corrupt(cat("of form ", delta_form_name(header.info.form), ", which its pieces are not"));
  if (header.info.form == DeltaForm::kSame && header.info.base_crc64 != header.info.result_crc64) return corrupt("changes nothing, but names two CRC-64s");
  return parsed;
}

// What all threads together found out before anything is written.
struct Checked {
  std::uint64_t base_crc64 = 0;
  Status payload;  // kCorrupt: the stored bytes of a piece are damaged
};

std::uint64_t join_pieces(std::span<const std::uint64_t> crcs, std::uint64_t raw_size) noexcept { return pieces::join_crcs(crcs, kDeltaPieceBytes, raw_size); }

Checked check_all(std::span<const std::byte> delta, const Parsed& parsed, std::span<const std::byte> base, unsigned threads) {
  Checked checked;
  std::vector<std::uint64_t> crcs(static_cast<std::size_t>(piece_count(base.size())));
  std::vector<std::uint32_t> stored_crcs(parsed.rows.size());
  const auto check = [&](std::uint64_t index, const pieces::Nothing&) -> Status {
    const auto at = static_cast<std::size_t>(index);
    crcs[at] = crc64(piece_of(base, index));
    if (at < stored_crcs.size()) stored_crcs[at] = crc32c(parsed.stored(delta, at));
    return {};
  };
  checked.payload = pieces::for_each<pieces::Nothing>(crcs.size(), threads, check);
  checked.base_crc64 = join_pieces(crcs, base.size());
  for (std::size_t i = 0; i < stored_crcs.size() && checked.payload.ok(); ++i) {
    const Row& row = parsed.rows[i];
    if (stored_crcs[i] == row.crc32c) continue;
    checked.payload = corrupt(cat("piece ", i, " of ", parsed.rows.size(), ": CRC-32C of its ", row.stored_size, " bytes is ", stored_crcs[i], ", not ", row.crc32c));
  }
  return checked;
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  const std::less<const std::byte*> before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

// Decodes all pieces, to `out`, or, where that is empty, to scratch.
// returns: the CRC-64 of the result
Result<std::uint64_t> decode_all(std::span<const std::byte> delta, const Parsed& parsed, std::span<const std::byte> base, std::span<std::byte> out,
                                 unsigned threads) {
  struct Scratch {
    delta::DecodeScratch decode;
    std::vector<std::byte> result;
  };
  const delta::Element element = delta::element_of(parsed.header.info.dtype);
  std::vector<std::uint64_t> crcs(parsed.rows.size());
  const auto decode = [&](std::uint64_t index, Scratch& scratch) -> Status {
    const auto at = static_cast<std::size_t>(index);
    const Row& row = parsed.rows[at];
    const auto from = piece_of(base, index);
    auto to = std::span<std::byte>();
    if (out.empty()) {
      scratch.result.resize(from.size());
      to = scratch.result;
    } else {
      to = piece_of(out, index);
    }
    if (const auto status = delta::decode_piece(element, row.form, parsed.stored(delta, at), from, to, scratch.decode); !status.ok()) {
      return corrupt(cat("piece ", index, " of ", parsed.rows.size(), " (", delta_form_name(row.form), "): ", status.error().message()));
    }
    crcs[at] = crc64(to);
    return {};
  };
  PARAMWIRE_CHECK(pieces::for_each<Scratch>(parsed.rows.size(), threads, decode));
  return join_pieces(crcs, base.size());
}

}  // namespace

std::string_view delta_form_name(DeltaForm form) noexcept {
  constexpr std::string_view kNames[] = {"same", "full", "xor", "steps", "sparse", "mixed"};
  const auto code = static_cast<std::size_t>(form);
  return code < std::size(kNames) ? kNames[code] : "unknown";
}

Result<std::vector<std::byte>> encode_delta(DType dtype, std::span<const std::byte> base, const DeltaBase& base_is,
                                            std::span<const std::byte> next, unsigned threads, const DeltaTuning& tuning) {
  if (base.size() != next.size()) {
    return Error(Code::kInvalid, cat("delta: base has ", base.size(), " bytes, its successor ", next.size(), "; publish it in full"));
  }
  const delta::Element element = delta::element_of(dtype);
  if (base.size() % element.bytes != 0 || base.size() > kRawMax) {
    return Error(Code::kInvalid, cat("delta: ", base.size(), " bytes are no whole elements of ", dtype_name(dtype), ", or too many"));
  }
  if (!base_is.version.valid()) return Error(Code::kInvalid, cat("delta: the base's version is ", base_is.version, "; both parts count from 1"));
  if (tuning.classes < 1 || tuning.classes > delta::kClassesMax || (tuning.only && (*tuning.only == DeltaForm::kSame || *tuning.only >= DeltaForm::kMixed))) {
    return Error(Code::kInvalid, cat("delta: tuning asks for ", tuning.classes, " classes (1 to ", delta::kClassesMax, " are possible), or a form that is none"));
  }
  std::vector<delta::Piece> made(static_cast<std::size_t>(piece_count(base.size())));
  std::vector<std::uint64_t> base_crcs(made.size()), next_crcs(made.size());
  std::vector<std::uint32_t> stored_crcs(made.size());
  const auto encode = [&](std::uint64_t index, delta::EncodeScratch& scratch) -> Status {
    const auto at = static_cast<std::size_t>(index);
    const auto from = piece_of(base, index), to = piece_of(next, index);
    made[at] = delta::encode_piece(element, from, to, tuning, scratch);
    // While they are in cache.
    base_crcs[at] = crc64(from);
    next_crcs[at] = made[at].form == DeltaForm::kSame ? base_crcs[at] : crc64(to);
    stored_crcs[at] = crc32c(made[at].bytes);
    return {};
  };
  PARAMWIRE_CHECK(pieces::for_each<delta::EncodeScratch>(made.size(), threads, encode));

  std::vector<Row> rows;
  std::vector<std::byte> table;
  ByteWriter put(table);
  Header header;
  for (std::size_t i = 0; i < made.size(); ++i) {
    const delta::Piece& piece = made[i];
    rows.push_back({piece.form, static_cast<std::uint32_t>(piece.bytes.size()), stored_crcs[i]});
    put.put(static_cast<std::uint32_t>(rows.back().form));
    put.put(rows.back().stored_size);
    put.put(rows.back().crc32c);
    header.payload_size += piece.bytes.size();
  }
  header.info.form = form_of(rows);
  if (header.info.form == DeltaForm::kSame) table.clear();
  header.info.dtype = dtype;
  header.info.raw_size = base.size();
  header.info.base_version = base_is.version;
  header.info.base_crc64 = join_pieces(base_crcs, base.size());
  header.info.result_crc64 = join_pieces(next_crcs, next.size());
  header.table_crc = crc32c(table);
  std::vector<std::byte> out;
  out.reserve(static_cast<std::size_t>(kDeltaHeaderBytes + table.size() + header.payload_size));
  put_header(out, header);
  out.insert(out.end(), table.begin(), table.end());
  for (delta::Piece& piece : made) {
    out.insert(out.end(), piece.bytes.begin(), piece.bytes.end());
    piece.bytes = {};
  }
  return out;
}

Result<DeltaInfo> read_delta(std::span<const std::byte> delta) {
  PARAMWIRE_TRY(parsed, parse(delta));
  return parsed.header.info;
}

Result<DeltaApplied> apply_delta(std::span<const std::byte> delta, DType dtype, std::span<const std::byte> base,
                                 const std::optional<Version>& base_version, std::span<std::byte> out, unsigned threads) {
  PARAMWIRE_TRY(parsed, parse(delta));
  const DeltaInfo& info = parsed.header.info;
  if (dtype != info.dtype || base.size() != info.raw_size) {
    return Error(Code::kInvalid, cat("delta: of ", info.raw_size, " bytes of ", dtype_name(info.dtype), "; the block has ", base.size(), " of ", dtype_name(dtype)));
  }
  const bool in_place = out.data() == base.data();
  if (out.size() != base.size() || (!in_place && overlap(base, out)) || overlap(delta, out)) {
    return Error(Code::kInvalid, cat("delta: the target has ", out.size(), " bytes for ", base.size(), ", or overlaps base or delta in part"));
  }
  const Checked checked = check_all(delta, parsed, base, threads);
  const std::uint64_t base_crc = checked.base_crc64;
  if (base_crc == info.result_crc64) {
    if (!in_place && !base.empty()) std::memcpy(out.data(), base.data(), base.size());
    return DeltaApplied{false};
  }
  if (base_version && *base_version != info.base_version) {
    return Error(Code::kStale, cat("delta: from version ", info.base_version, "; the block held is version ", *base_version, ". Fetch it in full"));
  }
  if (base_crc != info.base_crc64) {
    return Error(Code::kStale, cat("delta: from a base (version ", info.base_version, ") with CRC-64 ", hex64(info.base_crc64), "; that of the block held is ",
                                   hex64(base_crc), ". Fetch it in full"));
  }
  PARAMWIRE_CHECK(checked.payload);
  const auto decode = [&](std::span<std::byte> target) -> Status {
    PARAMWIRE_TRY(crc, decode_all(delta, parsed, base, target, threads));
    if (crc == info.result_crc64) return {};
    return corrupt(cat("the CRC-64 of what it makes of version ", info.base_version, " is ", hex64(crc), ", not ", hex64(info.result_crc64)));
  };
  if (in_place && base.size() <= kKeptBytes) {
    std::vector<std::byte> result(base.size());
    PARAMWIRE_CHECK(decode(result));
    std::copy(result.begin(), result.end(), out.begin());
    return DeltaApplied{true};
  }
  // In place, the first time only to see that the result is right: until then the base is all there is.
  if (in_place) PARAMWIRE_CHECK(decode({}));
  PARAMWIRE_CHECK(decode(out));
  return DeltaApplied{true};
}

}  // namespace paramwire
