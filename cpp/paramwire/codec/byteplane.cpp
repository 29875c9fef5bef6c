#include "paramwire/codec/byteplane.hpp"

#include "paramwire/codec/chunk_frame.hpp"
#include "paramwire/codec/huffman.hpp"
#include "paramwire/codec/plane_kernels.hpp"

#include <algorithm>
#include <bit>

namespace paramwire {
namespace {

using frame::Form;
using frame::Place;

enum class Mode : std::uint8_t { kRaw = 0, kConstant = 1, kHuffman = 2 };

// Of the sizes before a Huffman-coded plane's streams.
constexpr std::size_t kSizesBytes = 2 * huffman::kStreams;
static_assert(kChunkBytes / huffman::kStreams * huffman::kCodeBitsMax / 8 < 65536, "a stream's size is a u16");
constexpr std::size_t kPlanesMax = 8;
// Streams of a plane under the worst code, before they are given up for the raw plane.
constexpr std::size_t kStreamsMax = huffman::streams_bound(std::uint64_t{kChunkBytes} * huffman::kCodeBitsMax);

// Scratch memory that begins at a cache line: vectors that cross lines cost twice.
struct alignas(64) Line {
  std::array<std::uint8_t, 64> bytes;
};
class Scratch {
 public:
  explicit Scratch(std::size_t size) : lines_(std::make_unique_for_overwrite<Line[]>((size + 63) / 64)) {}
  std::uint8_t* data() noexcept { return lines_[0].bytes.data(); }

 private:
  std::unique_ptr<Line[]> lines_;
};

// ---------------------------------------------------------------- statistics

// log2 in units of 2^-16, exact at powers of two, wrong by 2^-10 at most between: integers, so that every machine encodes alike.
constexpr std::uint32_t kLogOne = 1U << 16;
std::uint64_t log2_fixed(std::uint32_t n) noexcept {
  const auto whole = static_cast<std::uint32_t>(std::bit_width(n)) - 1;
  // log2(1 + x) = x + x (1 - x) (A - B x), x in [0, 1); A and B make the greatest error least.
  constexpr std::uint64_t kA = 27689, kB = 10420;  // in 2^-16
  const std::uint64_t x = ((std::uint64_t{n} << 16) >> whole) & 0xffff;
  const std::uint64_t bend = (x * (kLogOne - x) >> 16) * (kA - (kB * x >> 16)) >> 16;
  return std::uint64_t{whole} * kLogOne + x + bend;
}

// Entropy of counted symbols in bits: of `total` of them. With the bias of small samples taken out (Miller 1955: 1 / (2 ln 2) bits
// for each symbol but one).
std::uint64_t entropy_bits(const huffman::Counts& counts, std::uint32_t total) noexcept {
  std::uint64_t sum = 0;
  std::uint64_t symbols = 0;
  for (const std::uint32_t count : counts) {
    if (count == 0) continue;
    sum += count * log2_fixed(count);
    ++symbols;
  }
  const std::uint64_t all = total * log2_fixed(total);
  return (all - std::min(sum, all)) / kLogOne + (symbols - 1) * 72 / 100;
}

// About 4,096 bytes of a plane in pieces of 64, evenly spread: enough to tell 1 % of entropy.
constexpr std::size_t kSampleBytes = 4096;
constexpr std::size_t kSamplePiece = 64;
std::uint32_t sample(const std::uint8_t* plane, std::size_t count, huffman::Counts& counts) noexcept {
  if (count < 2 * kSampleBytes) {
    huffman::histogram(plane, count, counts);
    return static_cast<std::uint32_t>(count);
  }
  std::array<std::uint8_t, kSampleBytes> pieces;
  const std::size_t step = count / (kSampleBytes / kSamplePiece);
  for (std::size_t i = 0; i < kSampleBytes / kSamplePiece; ++i) std::memcpy(pieces.data() + i * kSamplePiece, plane + i * step, kSamplePiece);
  huffman::histogram(pieces.data(), pieces.size(), counts);
  return kSampleBytes;
}

// A code that is not a chunk's own may cost this many thousandths of what its own would: 0.5 % of a plane that is a quarter of the
// stored bytes. It spares the encoder a histogram and a code, a third of its time, and the decoder a table, half of its.
constexpr std::uint64_t kCostLimit = 1005;

// Lengths for `counts`, and for symbols that later chunks are likely to have beside them, as long as they cost next to nothing: a
// symbol without a code is the commonest reason for a new one. Exponents thin out by half with each step down, so the next ones below
// come first; zero is the usual outlier of exponents.
constexpr std::size_t kLikelyBelow = 6, kLikelyAbove = 2;
huffman::Lengths lengths_for(const huffman::Counts& counts) noexcept {
  const huffman::Lengths exact = huffman::make_lengths(counts);
  huffman::Counts weights{};
  weights[0] = 1;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    if (counts[symbol] == 0) continue;
    for (std::size_t near = symbol - std::min(symbol, kLikelyBelow); near <= std::min<std::size_t>(255, symbol + kLikelyAbove); ++near) {
      weights[near] = std::max(weights[near], std::uint32_t{1});
    }
    weights[symbol] = counts[symbol] * 16;
  }
  const huffman::Lengths wide = huffman::make_lengths(weights);
  return *huffman::cost_bits(counts, wide) * 1000 <= *huffman::cost_bits(counts, exact) * kCostLimit ? wide : exact;
}

// ---------------------------------------------------------------- encoder

// A plane of which nothing in this run was worth coding is looked at again four chunks later: mantissas stay what they are, and
// looking takes a tenth of a chunk's time.
constexpr unsigned kRawUnlooked = 3;

// The code that a plane's next chunk may use again.
struct PlaneCode {
  bool usable = false;
  unsigned raw_for = 0;  // chunks for which the plane is stored raw unlooked
  huffman::Lengths lengths{};
  std::unique_ptr<huffman::EncodeTable> table{};  // made when the plane is first coded, and not cleared: it has 256 KiB
  std::array<std::byte, huffman::kDescriptionMax> description{};
  std::size_t description_size = 0;
  std::uint64_t cost_per_entropy = 0;  // bits that the code took where it was made, over their entropy, in 2^-16
};

class PlanesEncoder final : public ChunkEncoder {
 public:
  explicit PlanesEncoder(DType dtype) : dtype_(dtype), shape_(plane_shape(dtype)), planes_(kChunkBytes), streams_(kStreamsMax), codes_(shape_.width) {}

  void restart() noexcept override {
    for (PlaneCode& code : codes_) {
      code.usable = false;
      code.raw_for = 0;
    }
  }

  Result<std::size_t> encode(std::uint64_t index, std::span<const std::byte> raw, std::span<std::byte> target) override {
    const Place place{CodecId::kPlanes, dtype_, index};
    PARAMWIRE_CHECK(frame::check_raw_size(place, raw.size()));
    if (target.size() < byteplane_codec().bound(dtype_, raw.size())) {
      return Error(Code::kInvalid, cat("chunk ", index, " has ", target.size(), " bytes to be encoded to; at least ", byteplane_codec().bound(dtype_, raw.size())));
    }
    const std::size_t count = raw.size() / shape_.width;
    planes::split(reinterpret_cast<const std::uint8_t*>(raw.data()), count, shape_.width, shape_.rotate, planes_.data(), count);
    std::byte* out = target.data() + frame::kHeadBytes;
    for (std::size_t p = 0; p < shape_.width; ++p) {
      out = encode_plane(planes_.data() + p * count, count, codes_[p], out, target.data() + frame::kHeadBytes + raw.size());
      if (out == nullptr) return frame::write_raw(place, raw, target.data());
    }
    frame::write_head(target.data(), frame::check(place, raw), Form::kCoded);
    return static_cast<std::size_t>(out - target.data());
  }

 private:
  // returns: the end of what was written; nullptr when it would reach `limit`, where a raw frame ends.
  std::byte* encode_plane(const std::uint8_t* plane, std::size_t count, PlaneCode& code, std::byte* out, const std::byte* limit) noexcept {
    const auto room = static_cast<std::size_t>(limit - out);
    if (std::memcmp(plane, plane + 1, count - 1) == 0) {
      if (room <= 2) return nullptr;
      *out++ = static_cast<std::byte>(Mode::kConstant);
      *out++ = static_cast<std::byte>(plane[0]);
      return out;
    }
    if (choose(plane, count, code)) {
      std::array<std::size_t, huffman::kStreams> sizes;
      huffman::encode_streams(*code.table, plane, count, reinterpret_cast<std::byte*>(streams_.data()), sizes);
      std::size_t total = 0;
      for (const std::size_t size : sizes) total += size;
      const std::size_t all = 1 + code.description_size + kSizesBytes + total;
      if (all < 1 + count) {
        if (room <= all) return nullptr;
        *out++ = static_cast<std::byte>(Mode::kHuffman);
        std::memcpy(out, code.description.data(), code.description_size);
        out += code.description_size;
        for (const std::size_t size : sizes) {
          store_le(out, static_cast<std::uint16_t>(size));
          out += 2;
        }
        std::memcpy(out, streams_.data(), total);
        return out + total;
      }
    }
    if (room <= 1 + count) return nullptr;
    *out++ = static_cast<std::byte>(Mode::kRaw);
    std::memcpy(out, plane, count);
    return out + count;
  }

  // Have `code` ready for this plane. returns: whether coding is worth it.
  static bool choose(const std::uint8_t* plane, std::size_t count, PlaneCode& code) noexcept {
    if (code.raw_for > 0) {
      --code.raw_for;
      return false;
    }
    huffman::Counts counts;
    const std::uint32_t sampled = sample(plane, count, counts);
    const std::uint64_t entropy = entropy_bits(counts, sampled);
    if (entropy * 64 >= std::uint64_t{sampled} * 8 * 63) {
      if (!code.usable) code.raw_for = kRawUnlooked;
      return false;
    }
    if (code.usable) {
      const auto cost = huffman::cost_bits(counts, code.lengths);
      // What an own code would take: the entropy, and what the last one lost to whole bits.
      const std::uint64_t own = entropy * code.cost_per_entropy >> 16;
      if (cost && *cost * 1000 <= own * kCostLimit && huffman::all_coded(code.lengths, plane, count)) return true;
    }
    if (sampled != count) huffman::histogram(plane, count, counts);
    code.lengths = lengths_for(counts);
    if (!code.table) code.table = std::make_unique_for_overwrite<huffman::EncodeTable>();
    huffman::fill(*code.table, code.lengths);
    code.description_size = huffman::write_description(code.lengths, code.description.data());
    const std::uint64_t cost = *huffman::cost_bits(counts, code.lengths);
    const std::uint64_t all = std::max<std::uint64_t>(entropy_bits(counts, static_cast<std::uint32_t>(count)), 1);
    code.cost_per_entropy = (cost << 16) / all;
    code.usable = true;
    return true;
  }

  DType dtype_;
  PlaneShape shape_;
  Scratch planes_;
  Scratch streams_;
  std::vector<PlaneCode> codes_;
};

// ---------------------------------------------------------------- decoder

struct PlaneTable {
  std::unique_ptr<huffman::DecodeTable> table;  // made when the plane is first coded
  std::array<std::byte, huffman::kDescriptionMax> description;
  std::size_t description_size = 0;  // 0: no table yet
};

class PlanesDecoder final : public ChunkDecoder {
 public:
  explicit PlanesDecoder(DType dtype)
      : dtype_(dtype), shape_(plane_shape(dtype)), planes_(kChunkBytes), tables_(shape_.width) {}

  Status decode(std::uint64_t index, std::span<const std::byte> stored, std::span<std::byte> raw) override {
    const Place place{CodecId::kPlanes, dtype_, index};
    PARAMWIRE_CHECK(frame::check_raw_size(place, raw.size()));
    PARAMWIRE_TRY(parts, frame::read(place, stored, raw.size()));
    if (parts.form == Form::kRaw) {
      std::memcpy(raw.data(), parts.body.data(), raw.size());
      return frame::verify(place, raw, parts.check);
    }
    const std::size_t count = raw.size() / shape_.width;
    PARAMWIRE_TRY(where, decode_planes(place, parts.body, count, planes_.data()));
    planes::merge(where.data(), count, shape_.width, shape_.rotate, reinterpret_cast<std::uint8_t*>(raw.data()));
    return frame::verify(place, raw, parts.check);
  }

  Result<Apart> decode_apart(std::uint64_t index, std::span<const std::byte> stored, std::span<std::byte> out) override {
    const Place place{CodecId::kPlanes, dtype_, index};
    PARAMWIRE_CHECK(frame::check_raw_size(place, out.size()));
    PARAMWIRE_TRY(parts, frame::read(place, stored, out.size()));
    const Apart apart{.planes = parts.form == Form::kCoded, .crc32c = frame::crc_of_raw(place, out.size(), parts.check)};
    if (!apart.planes) {
      std::memcpy(out.data(), parts.body.data(), out.size());
      return apart;
    }
    const std::size_t count = out.size() / shape_.width;
    auto* const at = reinterpret_cast<std::uint8_t*>(out.data());
    PARAMWIRE_TRY(where, decode_planes(place, parts.body, count, at));
    for (std::size_t p = 0; p < shape_.width; ++p) {
      if (where[p] != at + p * count) std::memcpy(at + p * count, where[p], count);
    }
    return apart;
  }

 private:
  using Planes = std::array<const std::uint8_t*, kPlanesMax>;
  // returns: where each plane's `count` bytes lie: in the frame, or its part of `own`.
  Result<Planes> decode_planes(const Place& place, std::span<const std::byte> body, std::size_t count, std::uint8_t* own) {
    Planes where{};
    ByteReader in(body);
    for (std::size_t p = 0; p < shape_.width; ++p) {
      PARAMWIRE_TRY(plane, decode_plane(place, p, body, in, count, own + p * count));
      where[p] = plane;
    }
    if (!in.finished()) return frame::corrupt(place, cat("the frame is ", in.remaining(), " bytes longer than its planes"));
    return where;
  }

  // returns: where the plane's `count` bytes lie: in the frame, or at `own`.
  Result<const std::uint8_t*> decode_plane(const Place& place, std::size_t p, std::span<const std::byte> body, ByteReader& in, std::size_t count, std::uint8_t* own) {
    const auto corrupt = [&](std::string_view why) { return frame::corrupt(place, cat("plane ", p, " of ", shape_.width, ": ", why)); };
    const auto mode = in.get<std::uint8_t>();
    if (!in.ok()) return corrupt("the frame ends before it");
    switch (static_cast<Mode>(mode)) {
      case Mode::kRaw: {
        const auto bytes = in.bytes(count);
        if (!in.ok()) return corrupt(cat("the frame ends before its ", count, " bytes"));
        return reinterpret_cast<const std::uint8_t*>(bytes.data());
      }
      case Mode::kConstant: {
        const auto value = in.get<std::uint8_t>();
        if (!in.ok()) return corrupt("the frame ends before its value");
        std::memset(own, value, count);
        return own;
      }
      case Mode::kHuffman: break;
      default: return corrupt(cat("unknown mode ", mode));
    }
    PlaneTable& table = tables_[p];
    const auto rest = body.subspan(in.position());
    if (table.description_size == 0 || rest.size() < table.description_size ||
        std::memcmp(rest.data(), table.description.data(), table.description_size) != 0) {
      const auto description = huffman::read_description(rest);
      if (!description.ok()) return corrupt(description.error().message());
      if (!table.table) table.table = std::make_unique_for_overwrite<huffman::DecodeTable>();
      huffman::fill(*table.table, description->lengths);
      std::memcpy(table.description.data(), rest.data(), description->size);
      table.description_size = description->size;
    }
    in.bytes(table.description_size);
    std::array<std::size_t, huffman::kStreams> sizes;
    std::size_t total = 0;
    for (std::size_t& size : sizes) total += size = in.get<std::uint16_t>();
    const auto streams = in.bytes(total);
    if (!in.ok()) return corrupt(cat("the frame ends before its streams of ", total, " bytes"));
    if (!huffman::decode_streams(*table.table, streams, sizes, own, count)) return corrupt(cat("a stream ends before or after its last of ", count, " symbols"));
    return own;
  }

  DType dtype_;
  PlaneShape shape_;
  Scratch planes_;
  std::vector<PlaneTable> tables_;
};

class PlanesCodec final : public Codec {
 public:
  CodecId id() const noexcept override { return CodecId::kPlanes; }
  std::size_t bound(DType, std::size_t raw_size) const noexcept override { return frame::kHeadBytes + raw_size; }
  std::unique_ptr<ChunkEncoder> encoder(DType dtype) const override { return std::make_unique<PlanesEncoder>(dtype); }
  std::unique_ptr<ChunkDecoder> decoder(DType dtype) const override { return std::make_unique<PlanesDecoder>(dtype); }
};

}  // namespace

PlaneShape plane_shape(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16: return {2, true};
    case DType::kF32:
    case DType::kC64: return {4, true};
    case DType::kF64:
    case DType::kC128: return {8, true};
    case DType::kU16:
    case DType::kI16: return {2, false};
    case DType::kU32:
    case DType::kI32: return {4, false};
    case DType::kU64:
    case DType::kI64: return {8, false};
    default: return {1, false};
  }
}

const Codec& byteplane_codec() noexcept {
  static const PlanesCodec codec;
  return codec;
}

}  // namespace paramwire
