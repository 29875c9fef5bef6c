// Deltas of one block: bit-identical results, and refusals of what they were not made for.
#include "delta_fixture.hpp"

#include "paramwire/base/crc.hpp"

#include <cmath>
#include <cstring>
#include <map>
#include <sys/mman.h>

namespace paramwire {
namespace {

constexpr DType kAllTypes[] = {DType::kU8, DType::kI8, DType::kU16, DType::kI16, DType::kU32, DType::kI32, DType::kU64, DType::kI64, DType::kF16, DType::kBF16,
                               DType::kF32, DType::kF64, DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0, DType::kBool, DType::kC64, DType::kC128, DType::kI4, DType::kU4};

// Applies beside and in place and expects `next` from both.
void expect_result(const Bytes& delta, DType dtype, const Bytes& base, const Bytes& next) {
  Bytes out(base.size(), std::byte{0xa5});
  const auto beside = apply_delta(delta, dtype, base, kBase, out, 1);
  ASSERT_TRUE(beside.ok()) << beside.error().message();
  EXPECT_EQ(beside->applied, base != next);
  EXPECT_TRUE(out == next);
  Bytes block = base;
  const auto in_place = apply_delta(delta, dtype, block, std::nullopt, block, 1);
  ASSERT_TRUE(in_place.ok()) << in_place.error().message();
  EXPECT_TRUE(block == next);
}

constexpr std::optional<DeltaForm> kForms[] = {std::nullopt, DeltaForm::kFull, DeltaForm::kXor, DeltaForm::kSteps, DeltaForm::kSparse};

TEST(Delta, EveryDtypeFormAndSizeComesBackBitForBit) {
  for (const DType dtype : kAllTypes) {
    const std::size_t word = std::max<std::size_t>(dtype_bits(dtype) / 8, 1);
    for (const std::size_t elements : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{17}, std::size_t{1000}, std::size_t{4099}}) {
      const Bytes base = random_bytes(elements * word, elements);
      Bytes some = base;  // one element in ten changed, by any number of bits
      for (std::size_t i = 0; i < elements; i += 10) some[i * word + i % word] ^= static_cast<std::byte>(1 + i % 255);
      for (const Bytes& next : {base, some, random_bytes(elements * word, elements + 1), Bytes(elements * word)}) {
        for (const auto form : kForms) {
          for (const unsigned classes : {1U, 16U}) {
            SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ' ' << elements << " elements, form " << (form ? delta_form_name(*form) : "any"));
            expect_result(encoded(dtype, base, next, {form, classes}), dtype, base, next);
          }
        }
      }
    }
  }
}

TEST(Delta, FullPlanesOf8BitFloatsHaveTheSignLowest) {
  // FORMAT.md, "Planes": rotated left by one bit, a constant stream of one byte behind header and row.
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2, DType::kU8}) {
    const Bytes delta = encoded(dtype, Bytes(3), Bytes(3, std::byte{0xc1}), {DeltaForm::kFull});
    EXPECT_EQ(delta.back(), dtype == DType::kU8 ? std::byte{0xc1} : std::byte{0x83}) << dtype_name(dtype);
  }
}

TEST(Delta, EveryPatternOfA16BitFloatIsKept) {
  // Base and result go through all 65,536 patterns: NaNs with payloads, infinities, subnormals, both zeros.
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Bytes base(2 * 65536), next(2 * 65536);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      store_le(base.data() + std::size_t{2} * i, static_cast<std::uint16_t>(i));
      store_le(next.data() + std::size_t{2} * i, static_cast<std::uint16_t>(i * 40503U + 12345U));
    }
    for (const auto form : kForms) expect_result(encoded(dtype, base, next, {form}), dtype, base, next);
    for (const auto form : kForms) expect_result(encoded(dtype, next, base, {form}), dtype, next, base);
  }
}

TEST(Delta, PiecesOfManySizesAndFormsAreOneBlock) {
  // Four pieces and a bit: unchanged, retrained, replaced by noise, all zero, a few elements.
  const std::size_t elements = 2 * kPiece + 12345;
  const Trained weights = trained(DType::kBF16, elements, 1e-5, 7);
  Bytes next = weights.base;
  std::copy(weights.next.begin() + kPiece, weights.next.begin() + 2 * kPiece, next.begin() + kPiece);
  const Bytes noise = random_bytes(kPiece, 8);
  std::copy(noise.begin(), noise.end(), next.begin() + 2 * kPiece);
  std::fill(next.begin() + 3 * kPiece, next.begin() + 4 * kPiece, std::byte{});
  next.back() ^= std::byte{1};
  const Bytes delta = encoded(DType::kBF16, weights.base, next);
  const auto info = read_delta(delta);
  ASSERT_TRUE(info.ok()) << info.error().message();
  EXPECT_EQ(info->form, DeltaForm::kMixed);
  EXPECT_EQ(info->raw_size, 2 * elements);
  EXPECT_EQ(info->delta_size, delta.size());
  EXPECT_EQ(info->base_version, kBase);
  EXPECT_EQ(info->base_crc64, crc64(weights.base));
  EXPECT_EQ(info->result_crc64, crc64(next));
  expect_result(delta, DType::kBF16, weights.base, next);
  // The noise costs its own size; everything else nearly nothing.
  EXPECT_LT(delta.size(), kPiece + kPiece / 20);
  for (const unsigned threads : {2U, 3U, 9U}) {
    EXPECT_TRUE(encoded(DType::kBF16, weights.base, next, {}, threads) == delta) << threads << " threads made other bytes";
    Bytes out(next.size());
    ASSERT_TRUE(apply_delta(delta, DType::kBF16, weights.base, kBase, out, threads).ok());
    EXPECT_TRUE(out == next);
  }
}

TEST(Delta, NothingMakesOneLargerThanTheBlockAndATable) {
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const std::size_t size : {std::size_t{8}, std::size_t{4096}, std::size_t{kPiece + 64}}) {
      for (const auto form : kForms) {
        const Bytes base = random_bytes(size, 1), next = random_bytes(size, 2);
        const std::size_t pieces = (size + kPiece - 1) / kPiece;
        EXPECT_LE(encoded(dtype, base, next, {form}).size(), kDeltaHeaderBytes + pieces * (12 + 8) + size);
      }
    }
  }
}

TEST(Delta, AnUnchangedBlockIsAHeader) {
  const Bytes base = random_bytes(3 * kPiece, 1);
  const Bytes delta = encoded(DType::kF32, base, base);
  EXPECT_EQ(delta.size(), kDeltaHeaderBytes);
  EXPECT_EQ(read_delta(delta)->form, DeltaForm::kSame);
  expect_result(delta, DType::kF32, base, base);
}

TEST(Delta, SizesStayNearTheEntropyOfAnUpdate) {
  // A million bf16 weights and an update of 1e-5. The bound is what a code needs that knows how each octave of weights moves: the entropy of the
  // step, 0 among them, given the exponent of the base. 10 % on top: tables, and Huffman codes of no less than a bit.
  const Trained weights = trained(DType::kBF16, 1 << 20, 1e-5, 11);
  std::map<int, std::map<int, double>> steps;
  for (std::size_t i = 0; i < weights.base.size(); i += 2) {
    const int before = load_le<std::uint16_t>(weights.base.data() + i), after = load_le<std::uint16_t>(weights.next.data() + i);
    steps[before >> 7 & 0xff][(before ^ after) > 0x7fff ? before + (after & 0x7fff) : after - before] += 1;
  }
  double bits = 0;
  for (const auto& [exponent, counts] : steps) {
    double total = 0;
    for (const auto& [step, count] : counts) total += count;
    for (const auto& [step, count] : counts) bits -= count * std::log2(count / total);
  }
  const Bytes delta = encoded(DType::kBF16, weights.base, weights.next);
  EXPECT_LT(static_cast<double>(delta.size()) * 8, 1.1 * bits);
  // Without classes, and as planes, it's far more.
  EXPECT_GT(encoded(DType::kBF16, weights.base, weights.next, {DeltaForm::kSparse, 1}).size(), delta.size() * 5 / 4);
  EXPECT_GT(encoded(DType::kBF16, weights.base, weights.next, {DeltaForm::kXor}).size(), delta.size() * 3);
}

TEST(Delta, FiftyInARowAreBitIdentical) {
  // Master weights in f32, published as bf16 and as they are.
  std::mt19937_64 random(5);
  std::normal_distribution<float> weight(0, 0.04F), update(0, 1e-5F);
  std::vector<float> master(70000);
  for (float& w : master) w = weight(random);
  const auto published = [&](DType dtype) {
    Bytes bytes(master.size() * dtype_bits(dtype) / 8);
    for (std::size_t i = 0; i < master.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(master[i]);
      if (dtype == DType::kF32) store_le(bytes.data() + 4 * i, bits);
      else store_le(bytes.data() + 2 * i, static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
    }
    return bytes;
  };
  std::vector<Bytes> deltas[2];
  const DType dtypes[] = {DType::kF32, DType::kBF16};
  Bytes last[] = {published(dtypes[0]), published(dtypes[1])};
  Bytes held[] = {last[0], last[1]};
  for (std::uint64_t step = 1; step <= 50; ++step) {
    for (float& w : master) w += update(random);
    for (std::size_t k = 0; k < 2; ++k) {
      Bytes next = published(dtypes[k]);
      const auto delta = encode_delta(dtypes[k], last[k], {Version{1, step}}, next, 1);
      ASSERT_TRUE(delta.ok());
      last[k] = std::move(next);
      deltas[k].push_back(*delta);
    }
  }
  for (std::size_t k = 0; k < 2; ++k) {
    for (std::uint64_t step = 1; step <= 50; ++step) {
      const auto done = apply_delta(deltas[k][step - 1], dtypes[k], held[k], Version{1, step}, held[k], 1);
      ASSERT_TRUE(done.ok()) << done.error().message();
      EXPECT_TRUE(done->applied);
    }
    EXPECT_TRUE(held[k] == last[k]);
  }
}

// Zeros that take memory only where they are written.
class Zeros {
 public:
  explicit Zeros(std::size_t size)
      : size_(size), data_(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Zeros() { ::munmap(data_, size_); }
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
  bool mapped() const { return data_ != MAP_FAILED; }
  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(data_), size_}; }

 private:
  std::size_t size_;
  void* data_;
};

TEST(Delta, BlocksBeyond4GiBHaveTheirChangesWhereTheyWere) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "eight passes over 4 GiB by atomic words take minutes";
#endif
  // Marks around the limits of 32-bit sizes, and at both ends.
  constexpr std::size_t kGiB = std::size_t{1} << 30, kSize = 4 * kGiB + 3 * kPiece + 64;
  constexpr std::size_t kMarks[] = {0, 2 * kGiB - 1, 2 * kGiB, 4 * kGiB - 1, 4 * kGiB, kSize - 1};
  const Zeros base(kSize), next(kSize);
  ASSERT_TRUE(base.mapped() && next.mapped());
  for (std::size_t i = 0; i < std::size(kMarks); ++i) next.bytes()[kMarks[i]] = static_cast<std::byte>(i + 1);
  const auto delta = encode_delta(DType::kU8, base.bytes(), {kBase}, next.bytes(), 2);
  ASSERT_TRUE(delta.ok()) << delta.error().message();
  EXPECT_LT(delta->size(), kDeltaHeaderBytes + 12 * (kSize / kPiece + 1) + 64 * std::size(kMarks));
  const auto done = apply_delta(*delta, DType::kU8, base.bytes(), kBase, base.bytes(), 2);
  ASSERT_TRUE(done.ok()) << done.error().message();
  for (std::size_t i = 0; i < std::size(kMarks); ++i) EXPECT_EQ(base.bytes()[kMarks[i]], static_cast<std::byte>(i + 1)) << kMarks[i];
}

// ---------------------------------------------------------------- wrong bases

TEST(Delta, IsRefusedOnAnotherBase) {
  const Trained weights = trained(DType::kBF16, 5000, 1e-4, 1);
  const Bytes delta = encoded(DType::kBF16, weights.base, weights.next);
  Bytes out(weights.base.size(), std::byte{0x5a});
  const Bytes untouched = out;

  Bytes other = weights.base;
  other[1234] ^= std::byte{4};
  const auto by_crc = apply_delta(delta, DType::kBF16, other, kBase, out, 1);
  ASSERT_FALSE(by_crc.ok());
  EXPECT_EQ(by_crc.error().code(), Code::kStale);
  EXPECT_NE(by_crc.error().message().find("3.17"), std::string::npos) << by_crc.error().message();

  const auto by_version = apply_delta(delta, DType::kBF16, weights.base, Version{3, 16}, out, 1);
  ASSERT_FALSE(by_version.ok());
  EXPECT_EQ(by_version.error().code(), Code::kStale);
  EXPECT_NE(by_version.error().message().find("3.17"), std::string::npos);
  EXPECT_NE(by_version.error().message().find("3.16"), std::string::npos);

  for (const auto& [dtype, size] : {std::pair(DType::kF16, weights.base.size()), std::pair(DType::kBF16, weights.base.size() - 2)}) {
    const auto refused = apply_delta(delta, dtype, std::span(weights.base).first(size), kBase, std::span(out).first(size), 1);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
  }
  EXPECT_TRUE(out == untouched);
}

TEST(Delta, OneThatWasLostIsNotSkippedOver) {
  const Bytes v1 = random_bytes(4096, 1);
  Bytes v2 = v1, v3;
  v2[5] ^= std::byte{1};
  v3 = v2;
  v3[4000] ^= std::byte{8};
  const auto second = encode_delta(DType::kF32, v2, {Version{1, 2}}, v3, 1);
  Bytes held = v1;
  const auto refused = apply_delta(*second, DType::kF32, held, Version{1, 1}, held, 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kStale);
  EXPECT_TRUE(held == v1);
}

TEST(Delta, ComesTwiceAndDoesNothingTheSecondTime) {
  const Trained weights = trained(DType::kF32, 300000, 1e-5, 1);
  const Bytes delta = encoded(DType::kF32, weights.base, weights.next);
  Bytes block = weights.base;
  EXPECT_TRUE(apply_delta(delta, DType::kF32, block, kBase, block, 2)->applied);
  for (const std::optional<Version>& called : {std::optional<Version>(), std::optional(Version{3, 18}), std::optional(kBase)}) {
    const auto again = apply_delta(delta, DType::kF32, block, called, block, 2);
    ASSERT_TRUE(again.ok()) << again.error().message();
    EXPECT_FALSE(again->applied);
    EXPECT_TRUE(block == weights.next);
  }
  Bytes copy(block.size());
  EXPECT_FALSE(apply_delta(delta, DType::kF32, block, std::nullopt, copy, 2)->applied);
  EXPECT_TRUE(copy == weights.next);
}

TEST(Delta, CallsThatCannotBeAreInvalid) {
  const Bytes four(4), eight(8), three(3);
  const auto code = [](const auto& result) { return result.ok() ? Code::kInternal : result.error().code(); };
  EXPECT_EQ(code(encode_delta(DType::kU8, four, {kBase}, eight, 1)), Code::kInvalid);
  EXPECT_EQ(code(encode_delta(DType::kF32, three, {kBase}, three, 1)), Code::kInvalid);
  EXPECT_EQ(code(encode_delta(DType::kU8, four, {Version{0, 1}}, four, 1)), Code::kInvalid);
  EXPECT_EQ(code(encode_delta(DType::kU8, four, {Version{1, 0}}, four, 1)), Code::kInvalid);
  EXPECT_EQ(code(encode_delta(DType::kU8, four, {kBase}, four, 1, {std::nullopt, 17})), Code::kInvalid);
  EXPECT_EQ(code(encode_delta(DType::kU8, four, {kBase}, four, 1, {std::nullopt, 0})), Code::kInvalid);
  EXPECT_EQ(code(encode_delta(DType::kU8, four, {kBase}, four, 1, {DeltaForm::kMixed})), Code::kInvalid);
  // A target that overlaps its base in part.
  Bytes room = random_bytes(64, 1);
  Bytes next = room;
  next[3] ^= std::byte{1};
  const auto base = std::span(room).first(48);
  const Bytes delta = encoded(DType::kU8, Bytes(base.begin(), base.end()), Bytes(next.begin(), next.begin() + 48));
  EXPECT_EQ(code(apply_delta(delta, DType::kU8, base, kBase, std::span(room).subspan(8, 48), 1)), Code::kInvalid);
  EXPECT_EQ(code(apply_delta(delta, DType::kU8, base, kBase, std::span(room).first(40), 1)), Code::kInvalid);
}

}  // namespace
}  // namespace paramwire
