// Damage of every kind to encoded extents and blocks: a typed error that names the place, or, where a bit changes nothing, the same bytes;
// never other bytes.
#include "support/codec_samples.hpp"

#include "paramwire/codec/block.hpp"

#include <gtest/gtest.h>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 4242;
// ThreadSanitizer builds check CRCs word by word (base/crc_atomic.cpp), a hundred times slower.
#if defined(__SANITIZE_THREAD__)
constexpr int kFlips = 30;
#else
constexpr int kFlips = 1000;
#endif

TEST(CodecCorrupt, EveryFlippedBitOfAnExtentIsFoundOrChangesNothing) {
  for (const CodecId id : {CodecId::kPlanes, CodecId::kLz4}) {
    const Codec& codec = **open_codec(id);
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kU8, DType::kI64}) {
      for (const Content content : {Content::kWeights, Content::kSparse, Content::kTwoValues, Content::kRamp, Content::kRandom}) {
        const auto raw = sample(dtype, content, 1504, kSeed);
        std::vector<std::byte> stored(codec.bound(dtype, raw.size()));
        stored.resize(*codec.encoder(dtype)->encode(2, raw, stored));
        const auto decoder = codec.decoder(dtype);
        std::vector<std::byte> back(raw.size());
        for (std::size_t bit = 0; bit < stored.size() * 8; ++bit) {
          stored[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
          const Status status = decoder->decode(2, stored, back);
          if (status.ok()) {
            ASSERT_EQ(back, raw) << codec_name(id) << " " << dtype_name(dtype) << " bit " << bit;
          } else {
            ASSERT_EQ(status.error().code(), Code::kCorrupt) << status.error().message();
            ASSERT_NE(status.error().message().find("extent 2"), std::string::npos) << status.error().message();
          }
          stored[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
        }
        // And it was none of the decoder's state that refused them.
        ASSERT_TRUE(decoder->decode(2, stored, back).ok());
        ASSERT_EQ(back, raw);
      }
    }
  }
}

class CorruptBlock : public ::testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override {
    raw_ = sample(DType::kBF16, Content::kSparse, 3 * kExtentBytes + 100, kSeed);
    block_ = *encode_block(*parse_codec(GetParam()), DType::kBF16, raw_, 1);
    ASSERT_EQ(codec_name(block_.codec), GetParam());
  }
  void refused(StoredCheck check, std::string_view place) {
    back_.assign(raw_.size(), std::byte{});
    const Status status = decode_block(block_.codec, block_.dtype, block_.bytes, block_.extents, 0, back_, 2, check);
    ASSERT_FALSE(status.ok()) << place;
    EXPECT_EQ(status.error().code(), Code::kCorrupt);
    EXPECT_NE(status.error().message().find(place), std::string::npos) << status.error().message();
  }
  std::size_t begin(std::size_t extent) const {
    std::size_t at = 0;
    for (std::size_t i = 0; i < extent; ++i) at += block_.extents[i].stored_size;
    return at;
  }

  std::vector<std::byte> raw_, back_;
  EncodedBlock block_;
};

TEST_P(CorruptBlock, RandomBitsAreFoundByEitherCheck) {
  Random random(kSeed);
  for (int round = 0; round < kFlips; ++round) {
    const std::size_t bit = random.next() % (block_.bytes.size() * 8);
    block_.bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    refused(StoredCheck::kVerify, "extent ");
    back_.assign(raw_.size(), std::byte{});
    const Status trusted = decode_block(block_.codec, block_.dtype, block_.bytes, block_.extents, 0, back_, 1, StoredCheck::kTrusted);
    if (trusted.ok()) ASSERT_EQ(back_, raw_) << "bit " << bit;
    else ASSERT_EQ(trusted.error().code(), Code::kCorrupt);
    block_.bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }
}

// Two extents with their rows: every CRC of stored bytes holds.
TEST_P(CorruptBlock, SwappedExtentsAreFound) {
  const auto a = begin(1), b = begin(2), c = begin(3);
  std::vector<std::byte> swapped(block_.bytes.begin(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(a));
  swapped.insert(swapped.end(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(b), block_.bytes.begin() + static_cast<std::ptrdiff_t>(c));
  swapped.insert(swapped.end(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(a), block_.bytes.begin() + static_cast<std::ptrdiff_t>(b));
  swapped.insert(swapped.end(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(c), block_.bytes.end());
  block_.bytes = swapped;
  std::swap(block_.extents[1], block_.extents[2]);
  refused(StoredCheck::kVerify, "extent 1");
}

TEST_P(CorruptBlock, ARepeatedExtentIsFound) {
  const auto a = begin(1), b = begin(2), c = begin(3);
  std::vector<std::byte> repeated(block_.bytes.begin(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(b));
  repeated.insert(repeated.end(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(a), block_.bytes.begin() + static_cast<std::ptrdiff_t>(b));
  repeated.insert(repeated.end(), block_.bytes.begin() + static_cast<std::ptrdiff_t>(c), block_.bytes.end());
  block_.bytes = repeated;
  block_.extents[2] = block_.extents[1];
  refused(StoredCheck::kVerify, "extent 2");
}

TEST_P(CorruptBlock, AnAppendedByteIsFound) {
  block_.bytes.push_back(std::byte{0});
  refused(StoredCheck::kVerify, "declare");
  block_.extents.back().stored_size += 1;
  refused(StoredCheck::kTrusted, "extent 3");
}

TEST_P(CorruptBlock, AnotherDTypeOrCodecIsFound) {
  const auto refuses = [&](CodecId codec, DType dtype) {
    back_.assign(raw_.size(), std::byte{});
    const Status status = decode_block(codec, dtype, block_.bytes, block_.extents, 0, back_, 1, StoredCheck::kTrusted);
    ASSERT_FALSE(status.ok()) << codec_name(codec) << " " << dtype_name(dtype);
    EXPECT_EQ(status.error().code(), Code::kCorrupt);
  };
  refuses(block_.codec, DType::kF16);
  refuses(block_.codec, DType::kI16);
  refuses(block_.codec, DType::kU8);
  refuses(block_.codec == CodecId::kPlanes ? CodecId::kLz4 : CodecId::kPlanes, DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(By, CorruptBlock, ::testing::Values("planes", "lz4"), [](const auto& each) { return std::string(each.param); });

// A plane taken out of its frame, and modes that there are none of: the plane is named.
TEST(CodecCorrupt, ADroppedOrUnknownPlaneIsNamed) {
  const Codec& codec = **open_codec(CodecId::kPlanes);
  const auto raw = sample(DType::kF32, Content::kEqual, 400, kSeed);
  std::vector<std::byte> stored(codec.bound(DType::kF32, raw.size()));
  stored.resize(*codec.encoder(DType::kF32)->encode(0, raw, stored));
  ASSERT_EQ(stored.size(), 5U + 4 * 2) << "four constant planes";
  const auto decoder = codec.decoder(DType::kF32);
  std::vector<std::byte> back(raw.size());
  const auto refused = [&](const std::vector<std::byte>& bytes, std::string_view reason) {
    const Status status = decoder->decode(0, bytes, back);
    ASSERT_FALSE(status.ok()) << reason;
    EXPECT_NE(status.error().message().find(reason), std::string::npos) << status.error().message();
  };
  auto dropped = stored;
  dropped.resize(dropped.size() - 2);
  refused(dropped, "plane 3 of 4: the frame ends");
  auto unknown = stored;
  unknown[5 + 2 * 2] = std::byte{3};
  refused(unknown, "plane 2 of 4: unknown mode 3");
  auto form = stored;
  form[4] = std::byte{2};
  refused(form, "unknown form 2");
}

}  // namespace
}  // namespace paramwire
