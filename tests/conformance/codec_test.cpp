// What every codec must do with chunks, whatever it makes of them. A codec joins with its id in codecs().
#include "support/codec_samples.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/codec.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 20240611;

class CodecConformance : public ::testing::TestWithParam<CodecId> {
 protected:
  const Codec& codec() const { return **open_codec(GetParam()); }
  // kRaw has no frame, so nothing in it tells one chunk from another of the same size.
  bool framed() const { return GetParam() != CodecId::kRaw; }

  std::vector<std::byte> encode(DType dtype, std::uint64_t index, std::span<const std::byte> raw) const {
    std::vector<std::byte> stored(codec().bound(dtype, raw.size()));
    const auto size = codec().encoder(dtype)->encode(index, raw, stored);
    EXPECT_TRUE(size.ok()) << size.error().message();
    stored.resize(size.ok() ? *size : 0);
    return stored;
  }
};

// Elements of a chunk: one (a scalar), few, odd ones, those around a vector's and a stream's ends, nearly all and all.
std::vector<std::size_t> counts(DType dtype) {
  const std::size_t most = kChunkBytes / element_bytes(dtype);
  return {1, 2, 3, 7, 31, 33, 127, 128, 129, 1001, most - 1, most};
}

TEST_P(CodecConformance, EveryDTypeShapeAndContentComesBackBitForBit) {
  for_each_target([&](const std::string& target) {
    for (const DType dtype : all_dtypes()) {
      const auto encoder = codec().encoder(dtype);
      const auto decoder = codec().decoder(dtype);
      std::vector<std::byte> stored, back;
      std::uint64_t index = 0;
      for (const Content content : all_contents()) {
        for (const std::size_t count : counts(dtype)) {
          const auto raw = sample(dtype, content, count * element_bytes(dtype), kSeed + index);
          stored.assign(codec().bound(dtype, raw.size()) + 1, std::byte{0xee});
          const auto size = encoder->encode(index, raw, std::span(stored).first(stored.size() - 1));
          ASSERT_TRUE(size.ok()) << size.error().message();
          ASSERT_LE(*size, codec().bound(dtype, raw.size()));
          ASSERT_EQ(stored.back(), std::byte{0xee}) << "written past the bound";
          back.assign(raw.size() + 1, std::byte{0xee});
          const auto status = decoder->decode(index, std::span(stored).first(*size), std::span(back).first(raw.size()));
          ASSERT_TRUE(status.ok()) << status.error().message() << " " << target << " " << content_name(content) << " " << count;
          ASSERT_EQ(back.back(), std::byte{0xee}) << "written past the chunk";
          back.pop_back();
          ASSERT_EQ(back, raw) << target << " " << dtype_name(dtype) << " " << content_name(content) << " " << count;
          ++index;
        }
      }
    }
  });
}

TEST_P(CodecConformance, ChunksDecodeInAnyOrderAndByAnotherDecoder) {
  constexpr DType kType = DType::kBF16;
  const auto encoder = codec().encoder(kType);
  std::vector<std::vector<std::byte>> raws, stored;
  for (std::uint64_t i = 0; i < 12; ++i) {
    // Of different statistics, so that code tables change and stay.
    raws.push_back(sample(kType, i % 3 == 2 ? Content::kSparse : Content::kWeights, kChunkBytes - 2 * i, kSeed + i / 2));
    stored.emplace_back(codec().bound(kType, raws.back().size()));
    stored.back().resize(*encoder->encode(i, raws.back(), stored.back()));
  }
  std::vector<std::size_t> order(stored.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  Random random(kSeed);
  for (int round = 0; round < 4; ++round) {
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);
    const auto decoder = codec().decoder(kType);
    for (const std::size_t i : order) {
      std::vector<std::byte> back(raws[i].size());
      const auto status = decoder->decode(i, stored[i], back);
      ASSERT_TRUE(status.ok()) << status.error().message();
      ASSERT_EQ(back, raws[i]) << i;
    }
  }
}

TEST_P(CodecConformance, ARestartedEncoderWritesWhatANewOneWrites) {
  constexpr DType kType = DType::kF32;
  const auto encoder = codec().encoder(kType);
  const auto raw = sample(kType, Content::kWeights, kChunkBytes, kSeed);
  std::vector<std::byte> other(codec().bound(kType, kChunkBytes));
  ASSERT_TRUE(encoder->encode(4, sample(kType, Content::kRandom, kChunkBytes, kSeed), other).ok());
  ASSERT_TRUE(encoder->encode(5, sample(kType, Content::kTwoValues, kChunkBytes, kSeed), other).ok());
  encoder->restart();
  other.resize(*encoder->encode(7, raw, other));
  EXPECT_EQ(other, encode(kType, 7, raw));
}

TEST_P(CodecConformance, AllVectorTargetsWriteTheSameBytes) {
  std::map<std::string, std::vector<std::byte>> first;
  for_each_target([&](const std::string& target) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kU8, DType::kI64}) {
      for (const Content content : all_contents()) {
        const auto stored = encode(dtype, 1, sample(dtype, content, kChunkBytes, kSeed));
        const auto [known, fresh] = first.emplace(cat(dtype_name(dtype), content_name(content)), stored);
        ASSERT_EQ(stored, known->second) << target << " " << known->first << (fresh ? " (new)" : "");
      }
    }
  });
}

TEST_P(CodecConformance, AFrameIsNoOtherChunkDTypeOrSize) {
  if (!framed()) GTEST_SKIP() << "raw bytes have no frame";
  for (const Content content : all_contents()) {
    const auto raw = sample(DType::kBF16, content, 4096, kSeed);
    const auto stored = encode(DType::kBF16, 3, raw);
    const auto refuses = [&](DType dtype, std::uint64_t index, std::size_t size) {
      std::vector<std::byte> back(size);
      const auto status = codec().decoder(dtype)->decode(index, stored, back);
      ASSERT_FALSE(status.ok()) << content_name(content) << " as " << dtype_name(dtype) << " " << index << " of " << size;
      EXPECT_EQ(status.error().code(), Code::kCorrupt);
      EXPECT_NE(status.error().message().find(cat("chunk ", index)), std::string::npos) << status.error().message();
    };
    refuses(DType::kBF16, 2, raw.size());
    refuses(DType::kBF16, 3 + (std::uint64_t{1} << 32), raw.size());
    refuses(DType::kF16, 3, raw.size());
    refuses(DType::kU16, 3, raw.size());
    refuses(DType::kU8, 3, raw.size());
    refuses(DType::kF32, 3, raw.size());
    refuses(DType::kBF16, 3, raw.size() - 2);
    refuses(DType::kBF16, 3, raw.size() + 2);
    refuses(DType::kBF16, 3, kChunkBytes);
  }
}

TEST_P(CodecConformance, ACutOrLongerFrameIsRefused) {
  for (const Content content : all_contents()) {
    const auto raw = sample(DType::kBF16, content, 1500, kSeed);
    auto stored = encode(DType::kBF16, 0, raw);
    const auto decoder = codec().decoder(DType::kBF16);
    std::vector<std::byte> back(raw.size());
    for (std::size_t size = 0; size < stored.size(); ++size) {
      // Memory of exactly this size, so that a sanitizer sees a step past it.
      const std::vector<std::byte> cut(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(size));
      const auto status = decoder->decode(0, cut, back);
      ASSERT_FALSE(status.ok()) << content_name(content) << " cut to " << size;
      ASSERT_EQ(status.error().code(), Code::kCorrupt);
    }
    stored.push_back(std::byte{0});
    const auto status = decoder->decode(0, stored, back);
    ASSERT_FALSE(status.ok()) << content_name(content);
    EXPECT_EQ(status.error().code(), Code::kCorrupt);
  }
}

TEST_P(CodecConformance, SizesThatNoChunkHasAreTheCallersMistake) {
  for (const DType dtype : all_dtypes()) {
    const auto encoder = codec().encoder(dtype);
    const auto decoder = codec().decoder(dtype);
    std::vector<std::byte> bytes(2 * kChunkBytes), target(4 * kChunkBytes);
    std::vector<std::size_t> sizes = {0, kChunkBytes + element_bytes(dtype), 2 * kChunkBytes};
    if (element_bytes(dtype) > 1) sizes.push_back(element_bytes(dtype) + 1);
    for (const std::size_t size : sizes) {
      const auto raw = std::span(bytes).first(size);
      const auto encoded = encoder->encode(0, raw, target);
      ASSERT_FALSE(encoded.ok()) << size;
      EXPECT_EQ(encoded.error().code(), Code::kInvalid);
      const auto decoded = decoder->decode(0, target, raw);
      ASSERT_FALSE(decoded.ok()) << size;
      EXPECT_EQ(decoded.error().code(), Code::kInvalid);
    }
    const auto raw = std::span(bytes).first(16);
    const auto encoded = encoder->encode(0, raw, std::span(target).first(codec().bound(dtype, 16) - 1));
    ASSERT_FALSE(encoded.ok());
    EXPECT_EQ(encoded.error().code(), Code::kInvalid);
  }
}

std::vector<CodecId> codecs() { return {CodecId::kRaw, CodecId::kPlanes, CodecId::kLz4}; }
INSTANTIATE_TEST_SUITE_P(Each, CodecConformance, ::testing::ValuesIn(codecs()),
                         [](const auto& each) { return std::string(codec_name(each.param)); });

}  // namespace
}  // namespace paramwire
