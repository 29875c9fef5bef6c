// Encoded blocks from the publisher to the client's memory: what is stored, what is read in pieces, and stored bytes that do not decode.
#include "support/rig.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/extent_check.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/client/encoded_reads.hpp"
#include "paramwire/codec/plane_kernels.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// bf16 values as trained ones are: mantissas of noise, few exponents, the smaller ones rarer.
Bytes weights(std::size_t count, std::uint64_t seed) {
  Bytes out(2 * count);
  Random random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t word = random.next();
    const auto exponent = static_cast<std::uint64_t>(120 - std::countr_zero(word | 1U << 20));
    store_le<std::uint16_t>(out.data() + 2 * i, static_cast<std::uint16_t>((word >> 40 & 0x807f) | exponent << 7));
  }
  return out;
}

class EncodedBlocksTest : public ::testing::Test {
 protected:
  // `stored` as they are, with that codec.
  void publish_stored(CodecId codec, std::uint64_t count, const Bytes& stored) {
    auto publish = must(rig_.server->publish());
    must(publish.put(BlockSpec{"w", DType::kBF16, Shape{count}, {}, codec, stored.size()}, stored));
    must(publish.finish());
  }
  Status fetch(Client& client, std::span<std::byte> target) const {
    FetchRequest request;
    request.tensor = "w";
    request.target = target;
    const auto version = client.fetch({&request, 1});
    return version.ok() ? Status() : Status(version.error());
  }
  std::shared_ptr<Client> client(std::string transport, std::uint32_t threads = 2) const {
    ClientOptions options;
    options.transport = std::move(transport);
    options.decode_threads = threads;
    return must(Client::connect(rig_.unix_endpoint().to_string(), options));
  }

  Rig rig_;
  PayloadEncoder encoder_;
};

// Pieces end wherever they end: in frames, between them, in the index.
TEST_F(EncodedBlocksTest, RangesOfABlockOfManyPiecesAreThoseOfItsRawBytes) {
  const std::size_t count = 9'000'001;
  const Bytes raw = weights(count, 3);
  const auto payload = must(encoder_.encode({{}, CodecId::kPlanes}, DType::kBF16, raw, 2));
  ASSERT_EQ(payload.codec, CodecId::kPlanes);
  ASSERT_GT(payload.bytes.size(), 10 * kMiB);
  publish_stored(payload.codec, count, Bytes(payload.bytes.begin(), payload.bytes.end()));
  for (const char* transport : {"shm", "tcp", "udp"}) {
    const auto from = client(transport);
    Bytes target(raw.size());
    must(fetch(*from, target));
    EXPECT_EQ(target, raw) << transport;
    const auto snapshot = must(from->snapshot(SnapshotOptions{}));
    Random random(7);
    for (int i = 0; i < 30; ++i) {
      const std::uint64_t begin = random.next() % count;
      const std::uint64_t end = begin + std::min(count - begin, random.next() % (i % 3 == 0 ? count : 200'000));
      FetchRequest request;
      request.tensor = "w";
      request.part = Shard::rows(begin, end);
      Bytes part(2 * (end - begin));
      request.target = part;
      must(snapshot->fetch({&request, 1}));
      ASSERT_TRUE(std::equal(part.begin(), part.end(), raw.begin() + static_cast<std::ptrdiff_t>(2 * begin))) << transport << " rows " << begin << " to " << end;
    }
  }
}

// Puts together what a fetch left apart, and compares it with its CRCs, as a device does.
void put_together(Bytes& target, const std::vector<PlanesApart>& planes, const std::vector<ExtentCheck>& checks) {
  for (const PlanesApart& each : planes) {
    const Bytes apart(target.begin() + static_cast<std::ptrdiff_t>(each.offset), target.begin() + static_cast<std::ptrdiff_t>(each.offset + each.size));
    const auto* at = reinterpret_cast<const std::uint8_t*>(apart.data());
    const std::uint8_t* const places[] = {at, at + each.size / 2};
    planes::merge(places, each.size / 2, 2, true, reinterpret_cast<std::uint8_t*>(target.data() + each.offset));
  }
  EXPECT_TRUE(verify_extents(target, checks).ok());
}

TEST_F(EncodedBlocksTest, PlanesOfWholeChunksAreLeftApartForWhoAsksForThem) {
  const std::size_t count = 1'000'001;
  const Bytes raw = weights(count, 5);
  const auto payload = must(encoder_.encode({{}, CodecId::kPlanes}, DType::kBF16, raw, 1));
  publish_stored(payload.codec, count, Bytes(payload.bytes.begin(), payload.bytes.end()));
  constexpr std::uint64_t kRow = 2, kChunk = kChunkBytes / kRow;
  for (const char* transport : {"shm", "tcp", "udp"}) {
    const auto from = client(transport);
    for (const auto& [begin, end] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{{0, count}, {0, kChunk}, {1, kChunk}, {7, 3 * kChunk + 1}, {kChunk, 9 * kChunk}, {count - 5, count}, {3 * kChunk + 1, count}}) {
      Bytes target(static_cast<std::size_t>((end - begin) * kRow), std::byte{0xee});
      std::vector<ExtentCheck> checks = {{1, 2, 3}};
      std::vector<PlanesApart> planes = {{4, 5}};
      FetchRequest request;
      request.tensor = "w";
      request.part = Shard::rows(begin, end);
      request.target = target;
      request.checks = &checks;
      request.planes = &planes;
      must(from->fetch({&request, 1}));
      const std::uint64_t first = (begin + kChunk - 1) / kChunk, last = end == count ? (count + kChunk - 1) / kChunk : end / kChunk;
      EXPECT_EQ(checks.size(), last > first ? last - first : 0) << begin << " to " << end;
      EXPECT_EQ(planes.size(), checks.size()) << "all of its chunks have planes";
      put_together(target, planes, checks);
      EXPECT_TRUE(std::equal(target.begin(), target.end(), raw.begin() + static_cast<std::ptrdiff_t>(begin * kRow))) << transport << ", rows " << begin << " to " << end;
    }
  }
}

TEST_F(EncodedBlocksTest, WhatIsStoredAndDoesNotDecodeIsCorruptAndNamesBlockAndChunk) {
  const std::size_t count = 200'000;  // seven chunks
  const Bytes raw = weights(count, 5);
  const auto payload = must(encoder_.encode({{}, CodecId::kPlanes}, DType::kBF16, raw, 1));
  const Bytes good(payload.bytes.begin(), payload.bytes.end());
  const auto offsets = must(read_chunk_index(CodecId::kPlanes, DType::kBF16, raw.size(), good.size(), good));
  ASSERT_EQ(offsets.size(), 8U);
  const auto sized = [&](std::initializer_list<std::size_t> chunks) {  // these chunks, in that order, under an index that says so
    Bytes out;
    ByteWriter writer(out);
    for (const std::size_t c : chunks) writer.put<std::uint32_t>(static_cast<std::uint32_t>(offsets[c + 1] - offsets[c]));
    for (const std::size_t c : chunks) writer.bytes(std::span(good).subspan(offsets[c], offsets[c + 1] - offsets[c]));
    return out;
  };
  ASSERT_EQ(sized({0, 1, 2, 3, 4, 5, 6}), good);
  Bytes flipped = good;
  flipped[offsets[3] + 100] ^= std::byte{4};
  Bytes cut = good;
  cut.resize(good.size() - 10);
  Bytes huge = good;
  store_le<std::uint32_t>(huge.data() + 8, 0xffffffffU);
  struct Case {
    const char* what;
    Bytes stored;
    const char* says;
  };
  const std::vector<Case> cases = {
      {"swapped", sized({0, 2, 1, 3, 4, 5, 6}), "1"}, {"repeated", sized({0, 1, 1, 3, 4, 5, 6}), "2"}, {"a flipped bit", flipped, "3"},
      {"cut", cut, "chunk index"},                    {"a size beyond the bound", huge, "chunk 2"},     {"noise", random_bytes(good.size(), 9), "chunk"},
      {"shorter than its index", Bytes(20), "7 chunks"},
  };
  for (const Case& each : cases) {
    publish_stored(CodecId::kPlanes, count, each.stored);
    for (const std::uint32_t threads : {0U, 2U}) {
      Bytes target(raw.size());
      const Status status = fetch(*client("tcp", threads), target);
      ASSERT_FALSE(status.ok()) << each.what;
      EXPECT_EQ(status.error().code(), Code::kCorrupt) << each.what;
      EXPECT_NE(status.error().message().find("block w"), std::string::npos) << status.error().to_string();
      EXPECT_NE(status.error().message().find(each.says), std::string::npos) << each.what << ": " << status.error().to_string();
    }
  }
  publish_stored(CodecId::kPlanes, count, good);
  Bytes target(raw.size());
  must(fetch(*client("tcp"), target));
  EXPECT_EQ(target, raw);
}

TEST_F(EncodedBlocksTest, APutMustBeSmallerThanItsRawBytesAndOfAKnownCodec) {
  auto publish = must(rig_.server->publish());
  const Bytes stored(100);
  const auto refused = [&](CodecId codec, std::uint64_t count) {
    const Status status = publish.put(BlockSpec{"w", DType::kBF16, Shape{count}, {}, codec, stored.size()}, stored);
    return !status.ok() && status.error().code() == Code::kInvalid;
  };
  EXPECT_TRUE(refused(CodecId::kPlanes, 50)) << "as large";
  EXPECT_TRUE(refused(CodecId::kPlanes, 10)) << "larger";
  EXPECT_TRUE(refused(static_cast<CodecId>(kCodecMax + 1), 1000)) << "unknown";
  EXPECT_TRUE(refused(CodecId::kRaw, 1000)) << "raw and another size";
  EXPECT_FALSE(refused(CodecId::kLz4, 1000));
  const Status empty = publish.put(BlockSpec{"w", DType::kBF16, Shape{10}, {}, CodecId::kPlanes, 0}, {});
  EXPECT_EQ(empty.error().code(), Code::kInvalid);
}

TEST(PayloadEncoder, ATensorThatWouldNotGetSmallerIsItsRawBytes) {
  PayloadEncoder encoder;
  const Bytes noise = random_bytes(300'000, 1);
  for (const CodecId codec : {CodecId::kRaw, CodecId::kPlanes, CodecId::kLz4}) {
    const auto payload = must(encoder.encode({{}, codec}, DType::kU8, noise, 2));
    EXPECT_EQ(payload.codec, CodecId::kRaw);
    EXPECT_TRUE(std::equal(payload.bytes.begin(), payload.bytes.end(), noise.begin(), noise.end()));
  }
}

TEST(PayloadEncoder, BytesDoNotDependOnTheNumberOfThreads) {
  PayloadEncoder one, many;
  const Bytes raw = weights(3'000'000, 2);
  const auto a = must(one.encode({{}, CodecId::kPlanes}, DType::kBF16, raw, 1));
  const auto b = must(many.encode({{}, CodecId::kPlanes}, DType::kBF16, raw, 3));
  EXPECT_TRUE(std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end()));
}

}  // namespace
}  // namespace paramwire
