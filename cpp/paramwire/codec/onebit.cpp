#include "paramwire/codec/onebit.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/codec/cast.hpp"
#include "paramwire/codec/pieces.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace paramwire {
namespace {

constexpr std::uint32_t kMagic = 0x42525750;  // "PWRB"
constexpr std::uint32_t kLosslessMagic = 0x44525750;  // "PWRD": codec/delta.cpp
constexpr std::uint8_t kFormat = 1;
constexpr std::uint32_t kLossyFlag = 1;
// As shapes: no product below wraps.
constexpr std::uint64_t kElementsMax = std::uint64_t{1} << 48;

// Elements that are widened to f32 at once, a multiple of 8: 8 KiB of each operand, which stay in the first-level cache.
constexpr std::size_t kBlock = 2048;
using Block = std::array<float, kBlock>;

Error corrupt(std::string why) { return {Code::kCorrupt, cat("one-bit delta: ", why)}; }
Error invalid(std::string why) { return {Code::kInvalid, cat("one-bit delta: ", why)}; }

bool takes(DType dtype) noexcept { return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16; }
std::size_t size_of(DType dtype) noexcept { return dtype_bits(dtype) / 8; }
void assert_done([[maybe_unused]] const Result<std::uint64_t>& cast) noexcept { assert(cast.ok()); }
constexpr std::uint64_t bytes_of_bits(std::uint64_t bits) noexcept { return (bits + 7) / 8; }

// `count` elements from `source` on, as f32, and back. The casts refuse only dtypes and sizes, and these are right.
void widen(DType dtype, const std::byte* source, std::size_t count, Block& target) {
  const std::span wide = std::as_writable_bytes(std::span(target).first(count));
  if (dtype == DType::kF32) {
    std::memcpy(wide.data(), source, wide.size());
  } else {
    assert_done(cast_elements(dtype, {source, 2 * count}, DType::kF32, wide));
  }
}
void narrow(DType dtype, const Block& source, std::size_t count, std::byte* target) {
  const std::span wide = std::as_bytes(std::span(source).first(count));
  if (dtype == DType::kF32) {
    std::memcpy(target, wide.data(), wide.size());
  } else {
    assert_done(cast_elements(DType::kF32, wide, dtype, {target, 2 * count}));
  }
}

struct Parsed {
  OnebitInfo info;
  std::span<const std::byte> scales;
  std::span<const std::byte> bits;
  std::uint64_t row_bytes = 0;  // of bits
};

float scale_of(const Parsed& parsed, std::uint64_t row) noexcept {
  return std::bit_cast<float>(load_le<std::uint32_t>(parsed.scales.data() + 4 * row));
}

Result<OnebitInfo> get_header(std::span<const std::byte> delta) {
  if (delta.size() < kOnebitHeaderBytes) return corrupt(cat("of ", delta.size(), " bytes; its header alone has ", kOnebitHeaderBytes));
  ByteReader in(delta.first(kOnebitHeaderBytes));
  if (const auto magic = in.get<std::uint32_t>(); magic != kMagic) return corrupt(cat("its first bytes are not \"PWRB\"", magic == kLosslessMagic ? ", but a lossless delta's: apply_onebit is not for it" : ""));
  if (const auto format = in.get<std::uint8_t>(); format != kFormat) return corrupt(cat("of format ", format, "; this build reads ", kFormat));
  const std::uint32_t crc = crc32c(delta.first(kOnebitHeaderBytes - 4));
  if (const auto named = load_le<std::uint32_t>(delta.data() + kOnebitHeaderBytes - 4); named != crc) {
    return corrupt(cat("CRC-32C of its header is ", crc, ", not ", named));
  }
  OnebitInfo info;
  const auto scale = in.get<std::uint8_t>();
  const auto dtype = in.get<std::uint16_t>();
  if (scale > static_cast<std::uint8_t>(OnebitScale::kRow)) return corrupt(cat("scales are of kind ", scale, ", which is none"));
  if (dtype > kDTypeMax || !takes(static_cast<DType>(dtype))) return corrupt(cat("dtype ", dtype, " is not f32, f16 or bf16"));
  info.scale = static_cast<OnebitScale>(scale);
  info.dtype = static_cast<DType>(dtype);
  if (const auto flags = in.get<std::uint32_t>(); flags != kLossyFlag) return corrupt(cat("its flags are ", flags, ", not ", kLossyFlag, " (lossy)"));
  info.base_version.epoch = in.get<std::uint32_t>();
  info.base_version.counter = in.get<std::uint64_t>();
  info.rows = in.get<std::uint64_t>();
  info.columns = in.get<std::uint64_t>();
  info.base_crc64 = in.get<std::uint64_t>();
  info.delta_size = delta.size();
  if (load_le<std::uint32_t>(delta.data() + 56) != 0) return corrupt("bytes 56 to 59 of its header are not zero");
  if (!info.base_version.valid()) return corrupt(cat("its base version is ", info.base_version));
  const bool too_many = info.rows > kElementsMax || info.columns > kElementsMax || (info.columns != 0 && info.rows > kElementsMax / info.columns);
  if (too_many || (info.scale == OnebitScale::kMatrix ? info.rows != 1 : info.rows == 0 || info.columns == 0)) return corrupt(cat("of ", info.rows, " rows of ", info.columns, " elements"));
  return info;
}

Result<Parsed> parse(std::span<const std::byte> delta) {
  PARAMWIRE_TRY(info, get_header(delta));
  Parsed parsed;
  parsed.info = info;
  parsed.row_bytes = bytes_of_bits(info.columns);
  // At most 2^48 rows of 4 bytes, and 2^48 bits in bytes of which each row leaves at most one in part: no sum wraps.
  const std::uint64_t wanted = kOnebitHeaderBytes + info.rows * (4 + parsed.row_bytes);
  if (delta.size() != wanted) return corrupt(cat("of ", delta.size(), " bytes; ", info.rows, " rows of ", info.columns, " elements take ", wanted));
  const auto payload = delta.subspan(kOnebitHeaderBytes);
  const auto named = load_le<std::uint64_t>(delta.data() + 48);
  if (const std::uint64_t crc = crc64(payload); crc != named) return corrupt(cat("CRC-64 of its scales and bits is ", hex64(crc), ", not ", hex64(named)));
  parsed.scales = payload.first(static_cast<std::size_t>(4 * info.rows));
  parsed.bits = payload.subspan(parsed.scales.size());
  for (std::uint64_t row = 0; row < info.rows; ++row) {
    const float scale = scale_of(parsed, row);
    if (!std::isfinite(scale) || std::signbit(scale)) return corrupt(cat("the scale of row ", row, " is ", scale));
    const unsigned tail = info.columns % 8;
    if (tail != 0 && static_cast<unsigned>(parsed.bits[static_cast<std::size_t>((row + 1) * parsed.row_bytes - 1)]) >> tail != 0) {
      return corrupt(cat("bits behind the last element of row ", row, " are not zero"));
    }
  }
  return parsed;
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  const std::less<const std::byte*> before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

// One row of the encoder: its signs, and the mean of the changes' sizes.
// errors: kInvalid with the index of the first element that is not finite, or a scale beyond f32
Result<float> encode_row(DType dtype, std::span<const std::byte> base, std::span<const std::byte> tuned, std::uint64_t first_index, std::byte* bits) {
  const std::size_t bytes = size_of(dtype);
  const std::size_t count = base.size() / bytes;
  Block from, to;
  double sum = 0;  // in the order of the elements, so that any machine has the same
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    widen(dtype, base.data() + begin * bytes, size, from);
    widen(dtype, tuned.data() + begin * bytes, size, to);
    for (std::size_t i = 0; i < size; ++i) {
      if (!std::isfinite(from[i]) || !std::isfinite(to[i])) {
        return invalid(cat("element ", first_index + begin + i, " is ", from[i], " in the base and ", to[i], " in the fine-tuned weights; both must be finite"));
      }
      const double change = static_cast<double>(to[i]) - static_cast<double>(from[i]);
      sum += std::abs(change);
      if (change > 0) bits[(begin + i) / 8] |= static_cast<std::byte>(1U << ((begin + i) % 8));
    }
  }
  if (count == 0) return 0.0F;
  const double mean = sum / static_cast<double>(count);
  if (mean > static_cast<double>(std::numeric_limits<float>::max())) {
    return invalid(cat("the mean change of the ", count, " elements from ", first_index, " on is ", mean, ", beyond f32"));
  }
  return static_cast<float>(mean);
}

void apply_row(DType dtype, float scale, const std::byte* bits, std::span<const std::byte> base, std::span<std::byte> out) {
  // Nothing changed here; -0 + 0 would be 0.
  if (scale == 0) {
    if (out.data() != base.data() && !base.empty()) std::memcpy(out.data(), base.data(), base.size());
    return;
  }
  const std::size_t bytes = size_of(dtype);
  const std::size_t count = base.size() / bytes;
  const auto negative = std::bit_cast<std::uint32_t>(scale) | 0x80000000U;
  Block values;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    widen(dtype, base.data() + begin * bytes, size, values);
    for (std::size_t i = 0; i < size; ++i) {
      const auto bit = static_cast<std::uint32_t>(bits[(begin + i) / 8]) >> (i % 8) & 1U;
      values[i] += std::bit_cast<float>(negative ^ (bit << 31));
    }
    narrow(dtype, values, size, out.data() + begin * bytes);
  }
}

// What a thread takes at once, in bytes and in elements (a multiple of 8, so that each begins at a byte of signs): 1 MiB, small beside a block and large
// beside what handing it out costs.
constexpr std::uint64_t kPartBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kPartElements = std::uint64_t{1} << 18;

std::uint64_t crc64_of(std::span<const std::byte> bytes, unsigned threads) {
  std::vector<std::uint64_t> crcs(static_cast<std::size_t>((bytes.size() + kPartBytes - 1) / kPartBytes));
  const auto check = [&](std::uint64_t index, const pieces::Nothing&) -> Status {
    const std::uint64_t at = index * kPartBytes;
    crcs[static_cast<std::size_t>(index)] = crc64(bytes.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(std::min(kPartBytes, bytes.size() - at))));
    return {};
  };
  return pieces::for_each<pieces::Nothing>(crcs.size(), threads, check).ok() ? pieces::join_crcs(crcs, kPartBytes, bytes.size()) : 0;
}

// All rows: some short ones, or a part of a long one, at once.
void apply_rows(const Parsed& parsed, std::span<const std::byte> base, std::span<std::byte> out, unsigned threads) {
  const OnebitInfo& info = parsed.info;
  if (info.columns == 0) return;
  const std::uint64_t rows_at_once = std::max<std::uint64_t>(1, kPartElements / info.columns);
  const std::uint64_t parts_of_row = (info.columns + kPartElements - 1) / kPartElements;
  const std::uint64_t parts = (info.rows + rows_at_once - 1) / rows_at_once * parts_of_row;
  const auto apply = [&](std::uint64_t index, const pieces::Nothing&) -> Status {
    const std::uint64_t first_row = index / parts_of_row * rows_at_once, first = index % parts_of_row * kPartElements;
    const auto size = static_cast<std::size_t>(std::min(kPartElements, info.columns - first) * size_of(info.dtype));
    for (std::uint64_t row = first_row; row < std::min(info.rows, first_row + rows_at_once); ++row) {
      const auto at = static_cast<std::size_t>((row * info.columns + first) * size_of(info.dtype));
      apply_row(info.dtype, scale_of(parsed, row), parsed.bits.data() + row * parsed.row_bytes + first / 8, base.subspan(at, size), out.subspan(at, size));
    }
    return {};
  };
  [[maybe_unused]] const Status done = pieces::for_each<pieces::Nothing>(parts, threads, apply);
  assert(done.ok());
}

}  // namespace

Result<std::vector<std::byte>> encode_onebit(DType dtype, const Shape& shape, std::span<const std::byte> base, const Version& base_version,
                                             std::span<const std::byte> tuned, OnebitScale scale) {
  if (!takes(dtype)) return invalid(cat("of ", dtype_name(dtype), "; f32, f16 and bf16 can be"));
  const std::uint64_t size = tensor_bytes(dtype, shape);
  if (base.size() != size || tuned.size() != size) {
    return invalid(cat("base has ", base.size(), " bytes, fine-tuned weights ", tuned.size(), "; ", shape, ' ', dtype_name(dtype), " takes ", size));
  }
  if (!base_version.valid()) return invalid(cat("the base's version is ", base_version, "; both parts count from 1"));
  const bool by_row = scale == OnebitScale::kRow && shape.rank() >= 2 && size > 0;
  const std::uint64_t rows = by_row ? shape[0] : 1;
  std::uint64_t columns = 1;
  for (std::size_t axis = by_row ? 1 : 0; axis < shape.rank(); ++axis) columns *= shape[axis];  // Shape: at most 2^48
  const std::uint64_t row_bytes = bytes_of_bits(columns);

  std::vector<std::byte> out(static_cast<std::size_t>(kOnebitHeaderBytes + rows * (4 + row_bytes)));
  std::byte* const scales = out.data() + kOnebitHeaderBytes;
  std::byte* const bits = scales + 4 * rows;
  const auto row_size = static_cast<std::size_t>(columns * size_of(dtype));
  for (std::uint64_t row = 0; row < rows; ++row) {
    const auto at = static_cast<std::size_t>(row) * row_size;
    PARAMWIRE_TRY(mean, encode_row(dtype, base.subspan(at, row_size), tuned.subspan(at, row_size), row * columns, bits + row * row_bytes));
    store_le(scales + 4 * row, std::bit_cast<std::uint32_t>(mean));
  }
  std::vector<std::byte> header;
  ByteWriter put(header);
  put.put(kMagic);
  put.put(kFormat);
  put.put(static_cast<std::uint8_t>(by_row ? OnebitScale::kRow : OnebitScale::kMatrix));
  put.put(static_cast<std::uint16_t>(dtype));
  put.put(kLossyFlag);
  put.put(base_version.epoch);
  put.put(base_version.counter);
  put.put(rows);
  put.put(columns);
  put.put(crc64(base));
  put.put(crc64(std::span(out).subspan(kOnebitHeaderBytes)));
  put.put(std::uint32_t{0});
  put.put(crc32c(header));
  std::copy(header.begin(), header.end(), out.begin());
  return out;
}

Result<OnebitInfo> read_onebit(std::span<const std::byte> delta) {
  PARAMWIRE_TRY(parsed, parse(delta));
  return parsed.info;
}

Status apply_onebit(std::span<const std::byte> delta, DType dtype, std::span<const std::byte> base,
                    const std::optional<Version>& base_version, std::span<std::byte> out, unsigned threads) {
  PARAMWIRE_TRY(parsed, parse(delta));
  const OnebitInfo& info = parsed.info;
  const std::uint64_t row_size = info.columns * size_of(info.dtype);
  if (dtype != info.dtype || base.size() != info.rows * row_size) {
    return invalid(cat("of ", info.rows * row_size, " bytes of ", dtype_name(info.dtype), "; the block has ", base.size(), " of ", dtype_name(dtype)));
  }
  if (out.size() != base.size() || (out.data() != base.data() && overlap(base, out)) || overlap(delta, out)) {
    return invalid(cat("the target has ", out.size(), " bytes for ", base.size(), ", or overlaps base or delta in part"));
  }
  if (base_version && *base_version != info.base_version) {
    return Error(Code::kStale, cat("one-bit delta: of version ", info.base_version, "; the block held is version ", *base_version));
  }
  if (const std::uint64_t crc = crc64_of(base, threads); crc != info.base_crc64) {
    return Error(Code::kStale, cat("one-bit delta: of a base (version ", info.base_version, ") with CRC-64 ", hex64(info.base_crc64), "; that of the block held is ", hex64(crc)));
  }
  apply_rows(parsed, base, out, threads);
  return {};
}

}  // namespace paramwire
