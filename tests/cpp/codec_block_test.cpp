// Whole blocks: the same bytes for any number of threads, CRCs of what is stored, ranges, and blocks that don't get smaller.
#include "support/codec_samples.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/codec/block.hpp"
#include "paramwire/codec/byteplane.hpp"
#include "paramwire/codec/cast.hpp"
#include "paramwire/codec/plane_kernels.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 77;

EncodedBlock encoded(std::string_view spec, DType dtype, std::span<const std::byte> raw, unsigned threads = 1) {
  auto block = encode_block(*parse_codec(spec), dtype, raw, threads);
  EXPECT_TRUE(block.ok()) << block.error().message();
  return std::move(*block);
}

Status decode(const EncodedBlock& block, std::span<std::byte> raw, unsigned threads = 1, StoredCheck check = StoredCheck::kVerify) {
  return decode_block(block.codec, block.dtype, block.bytes, block.chunks, 0, raw, threads, check);
}

TEST(CodecBlock, EveryDTypeSpecAndSizeComesBackAsItsCast) {
  for (const DType dtype : all_dtypes()) {
    for (const std::string_view spec : {"raw", "planes", "lz4", "bf16", "fp16+planes", "bf16+lz4"}) {
      for (const std::size_t bytes : {std::size_t{0}, element_bytes(dtype), 48 * std::size_t{7}, std::size_t{kChunkBytes} + 16}) {
        const auto raw = sample(dtype, Content::kWeights, bytes, kSeed);
        const auto block = encoded(spec, dtype, raw);
        ASSERT_EQ(block.dtype, parse_codec(spec)->encoded_dtype(dtype));
        std::vector<std::byte> wanted(raw);
        if (block.dtype != dtype) {
          wanted.resize(raw.size() / 2);
          ASSERT_TRUE(cast_elements(dtype, raw, block.dtype, wanted).ok());
        }
        ASSERT_EQ(block.raw_size, wanted.size());
        ASSERT_EQ(block.chunks.size(), chunk_count(wanted.size()));
        ASSERT_LE(block.bytes.size(), wanted.size()) << "stored raw where it would not get smaller";
        ASSERT_EQ(block.crc64, crc64(block.bytes));
        std::size_t at = 0;
        for (const EncodedChunk& chunk : block.chunks) {
          ASSERT_EQ(chunk.crc32c, crc32c(std::span(block.bytes).subspan(at, chunk.stored_size)));
          at += chunk.stored_size;
        }
        ASSERT_EQ(at, block.bytes.size());
        std::vector<std::byte> back(wanted.size());
        const Status status = decode(block, back);
        ASSERT_TRUE(status.ok()) << status.error().message();
        ASSERT_EQ(back, wanted) << spec << " " << dtype_name(dtype) << " " << bytes;
      }
    }
  }
}

TEST(CodecBlock, PlanesLeftApartAreTheElementsAndTheCrcIsThatOfTheRawBytes) {
  for (const DType dtype : all_dtypes()) {
    const std::size_t element = element_bytes(dtype);
    for (const Content content : all_contents()) {
      for (const std::size_t bytes : {element, 48 * std::size_t{7}, std::size_t{kChunkBytes}}) {
        const auto raw = sample(dtype, content, bytes, kSeed);
        const auto codec = *open_codec(CodecId::kPlanes);
        std::vector<std::byte> frame(codec->bound(dtype, raw.size()));
        const auto stored = codec->encoder(dtype)->encode(7, raw, frame);
        ASSERT_TRUE(stored.ok());
        const std::span<const std::byte> whole = std::span(frame).first(*stored);
        std::vector<std::byte> out(raw.size()), merged(raw.size());
        const auto decoder = codec->decoder(dtype);
        const auto apart = decoder->decode_apart(7, whole, out);
        ASSERT_TRUE(apart.ok()) << apart.error().message();
        EXPECT_EQ(apart->crc32c, crc32c(raw)) << dtype_name(dtype) << ", " << bytes << " bytes";
        if (apart->planes) {
          const PlaneShape shape = plane_shape(dtype);
          std::array<const std::uint8_t*, 8> planes{};
          for (std::size_t p = 0; p < shape.width; ++p) planes[p] = reinterpret_cast<const std::uint8_t*>(out.data()) + p * (raw.size() / shape.width);
          planes::merge(planes.data(), raw.size() / shape.width, shape.width, shape.rotate, reinterpret_cast<std::uint8_t*>(merged.data()));
          EXPECT_EQ(merged, raw);
        } else {
          EXPECT_EQ(out, raw);
        }
        // What is cut or of another place is not given as something else: the frame's structure tells, or the CRC does.
        EXPECT_FALSE(decoder->decode_apart(7, whole.first(whole.size() - 1), out).ok());
        const auto other = decoder->decode_apart(8, whole, out);
        EXPECT_TRUE(!other.ok() || other->crc32c != crc32c(raw));
      }
    }
  }
  std::vector<std::byte> some(64);
  EXPECT_EQ((*open_codec(CodecId::kLz4))->decoder(DType::kF32)->decode_apart(0, some, some).error().code(), Code::kUnavailable);
}

TEST(CodecBlock, BytesDoNotDependOnTheNumberOfThreads) {
  // Two runs and a piece, of changing statistics.
  std::vector<std::byte> raw;
  for (std::uint64_t i = 0; i < 11; ++i) {
    const auto part = sample(DType::kBF16, i % 4 == 3 ? Content::kSparse : Content::kWeights, 240000, kSeed + i);
    raw.insert(raw.end(), part.begin(), part.end());
  }
  for (const std::string_view spec : {"planes", "lz4", "raw"}) {
    const auto one = encoded(spec, DType::kBF16, raw, 1);
    for (const unsigned threads : {2U, 3U, 64U}) {
      const auto many = encoded(spec, DType::kBF16, raw, threads);
      ASSERT_EQ(many.bytes, one.bytes) << spec << " " << threads;
      ASSERT_EQ(many.chunks, one.chunks);
      ASSERT_EQ(many.crc64, one.crc64);
      ASSERT_EQ(many.codec, one.codec);
      std::vector<std::byte> back(raw.size());
      ASSERT_TRUE(decode(many, back, threads).ok());
      ASSERT_EQ(back, raw);
    }
  }
}

TEST(CodecBlock, ARunOfChunksDecodesByItself) {
  const auto raw = sample(DType::kF32, Content::kWeights, 40 * kChunkBytes + 1000, kSeed);
  const auto block = encoded("planes", DType::kF32, raw);
  const auto at = [&](std::size_t chunk) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < chunk; ++i) bytes += block.chunks[i].stored_size;
    return bytes;
  };
  for (const auto& [first, count] : std::vector<std::pair<std::size_t, std::size_t>>{{0, 1}, {7, 3}, {15, 18}, {39, 2}, {40, 1}, {12, 0}}) {
    const std::size_t begin = first * kChunkBytes, end = std::min<std::size_t>(raw.size(), (first + count) * kChunkBytes);
    std::vector<std::byte> back(end - begin);
    const auto stored = std::span(block.bytes).subspan(at(first), at(first + count) - at(first));
    const Status status = decode_block(block.codec, block.dtype, stored, std::span(block.chunks).subspan(first, count), first, back, 2);
    ASSERT_TRUE(status.ok()) << status.error().message();
    ASSERT_TRUE(std::equal(back.begin(), back.end(), raw.begin() + static_cast<std::ptrdiff_t>(begin)));
    if (count == 0) continue;
    // As other chunks than they are, they are refused.
    const Status moved = decode_block(block.codec, block.dtype, stored, std::span(block.chunks).subspan(first, count), first + 1, back, 2);
    ASSERT_FALSE(moved.ok());
    EXPECT_EQ(moved.error().code(), Code::kCorrupt);
  }
}

TEST(CodecBlock, ABlockThatDoesNotGetSmallerIsRaw) {
  const auto raw = sample(DType::kU8, Content::kRandom, 3 * kChunkBytes, kSeed);
  for (const std::string_view spec : {"planes", "lz4"}) {
    const auto block = encoded(spec, DType::kU8, raw);
    EXPECT_EQ(block.codec, CodecId::kRaw);
    EXPECT_EQ(block.bytes, raw);
  }
  const auto floats = sample(DType::kF32, Content::kRandom, 3 * kChunkBytes, kSeed);
  const auto cast = encoded("bf16+lz4", DType::kF32, floats);
  EXPECT_EQ(cast.codec, CodecId::kRaw);
  EXPECT_EQ(cast.dtype, DType::kBF16);
  EXPECT_EQ(cast.bytes.size(), floats.size() / 2);
}

TEST(CodecBlock, AnIncompressibleChunkAmongOthersGrowsByItsFrameOnly) {
  auto raw = sample(DType::kBF16, Content::kWeights, 3 * kChunkBytes, kSeed);
  const auto noise = sample(DType::kU8, Content::kRandom, kChunkBytes, kSeed);
  std::copy(noise.begin(), noise.end(), raw.begin() + kChunkBytes);
  const auto block = encoded("planes", DType::kBF16, raw);
  ASSERT_EQ(block.codec, CodecId::kPlanes);
  EXPECT_LE(block.chunks[1].stored_size, kChunkBytes + 5);
  EXPECT_LT(block.chunks[0].stored_size, kChunkBytes * 3 / 4);
  EXPECT_LT(block.chunks[2].stored_size, kChunkBytes * 3 / 4);
}

// Bytes that no code of single bytes can be below: the entropy of every byte plane of `raw`, its sign in the lowest bit. Planes of noise count in full:
// a Gaussian's mantissas have 7.97 bits of 8, which a code of whole bits can't take.
template <typename Word>
double order0_bytes(std::span<const std::byte> raw) {
  std::array<std::array<double, 256>, sizeof(Word)> counts{};
  for (std::size_t at = 0; at < raw.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, raw.data() + at, sizeof(Word));
    word = std::rotl(word, 1);
    for (std::size_t plane = 0; plane < sizeof(Word); ++plane) ++counts[plane][(word >> (8 * plane)) & 0xff];
  }
  const double symbols = static_cast<double>(raw.size()) / sizeof(Word);
  double bits = 0;
  for (const auto& plane : counts) {
    double entropy = 0;
    for (const double count : plane) entropy += count > 0 ? count * std::log2(symbols / count) : 0;
    bits += entropy > 7.9 * symbols ? 8 * symbols : entropy;
  }
  return bits / 8;
}

TEST(CodecBlock, WeightsAreStoredWithinAPercentOfTheirPlanesOrderZeroEntropy) {
  const std::size_t bytes = 32 * kChunkBytes;
  const auto check = [&](DType dtype, auto word) {
    const auto raw = sample(dtype, Content::kWeights, bytes, kSeed);
    const double bound = order0_bytes<decltype(word)>(raw);
    ASSERT_LT(bound, 0.9 * static_cast<double>(bytes)) << "no weights";
    EXPECT_LT(static_cast<double>(encoded("planes", dtype, raw).bytes.size()), 1.01 * bound) << dtype_name(dtype);
  };
  check(DType::kBF16, std::uint16_t{});
  check(DType::kF32, std::uint32_t{});
}

TEST(CodecBlock, AReusedBlockKeepsNothingOfItsPast) {
  EncodedBlock block;
  const auto big = sample(DType::kF32, Content::kWeights, 20 * kChunkBytes, kSeed);
  ASSERT_TRUE(encode_block(*parse_codec("fp16+planes"), DType::kF32, big, 1, block).ok());
  const auto small = sample(DType::kI64, Content::kRamp, 800, kSeed);
  ASSERT_TRUE(encode_block(*parse_codec("planes"), DType::kI64, small, 1, block).ok());
  const auto fresh = encoded("planes", DType::kI64, small);
  EXPECT_EQ(block.bytes, fresh.bytes);
  EXPECT_EQ(block.chunks, fresh.chunks);
  EXPECT_EQ(block.crc64, fresh.crc64);
  EXPECT_EQ(block.raw_size, 800U);
}

TEST(CodecBlock, ValuesThatOverflowTheCastAreCounted) {
  std::vector<float> values(3 * kChunkBytes / 4, 1.0F);
  values[5] = 65520.0F;
  values[70000 / 4] = -1e30F;
  values[40000] = 65519.0F;
  values[9] = std::numeric_limits<float>::infinity();
  const auto raw = std::as_bytes(std::span(values));
  EXPECT_EQ(encoded("fp16+planes", DType::kF32, raw).overflowed, 2U);
  EXPECT_EQ(encoded("fp16", DType::kF32, raw).overflowed, 2U);
  EXPECT_EQ(encoded("bf16+planes", DType::kF32, raw).overflowed, 0U);
}

TEST(CodecBlock, MistakesOfTheCallerAreInvalid) {
  std::vector<std::byte> raw(1000);
  const auto is_invalid = [](const Status& status) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code(), Code::kInvalid) << status.error().message();
  };
  EncodedBlock block;
  is_invalid(encode_block({}, DType::kF32, std::span(raw).first(999), 1, block));
  is_invalid(encode_block({}, DType::kF32, raw, 0, block));
  is_invalid(encode_block({}, static_cast<DType>(0), raw, 1, block));
  is_invalid(encode_block({DType::kF64, CodecId::kRaw}, DType::kF32, raw, 1, block));
  is_invalid(encode_block({std::nullopt, static_cast<CodecId>(9)}, DType::kF32, raw, 1, block));
  block = encoded("planes", DType::kF32, raw);
  is_invalid(decode_block(block.codec, block.dtype, block.bytes, block.chunks, 0, raw, 0));
  is_invalid(decode_block(static_cast<CodecId>(9), block.dtype, block.bytes, block.chunks, 0, raw, 1));
  is_invalid(decode_block(block.codec, block.dtype, block.bytes, {}, 0, raw, 1));
  is_invalid(decode_block(block.codec, block.dtype, block.bytes, block.chunks, 0, std::span(raw).first(999), 1));
}

TEST(CodecBlock, RowsThatDeclareTooMuchAreRefusedBeforeAnyWork) {
  const auto raw = sample(DType::kBF16, Content::kWeights, 2 * kChunkBytes, kSeed);
  auto block = encoded("planes", DType::kBF16, raw);
  std::vector<std::byte> back(raw.size());
  const auto refused = [&](std::string_view reason) {
    const Status status = decode(block, back, 2, StoredCheck::kTrusted);
    ASSERT_FALSE(status.ok()) << reason;
    EXPECT_EQ(status.error().code(), Code::kCorrupt);
    EXPECT_NE(status.error().message().find(reason), std::string::npos) << status.error().message();
  };
  const auto rows = block.chunks;
  block.chunks[1].stored_size = 0xffffffff;
  refused("chunk 1");
  block.chunks = rows;
  block.chunks[0].stored_size += 1;
  refused("declare");
  block.chunks = rows;
  block.bytes.pop_back();
  refused("declare");
}

}  // namespace
}  // namespace paramwire
