// Damaged and forged deltas: no bit of one can be wrong unseen, and nothing that lies behind right checksums harms.
#include "delta_fixture.hpp"

#include "paramwire/base/crc.hpp"

#include <array>

namespace paramwire {
namespace {

// A delta of each form, small enough that every bit can be tried.
struct Sample {
  const char* name;
  DType dtype;
  Bytes base, next, delta;
};
std::vector<Sample> samples() {
  std::vector<Sample> out;
  const auto add = [&](const char* name, DType dtype, Bytes base, Bytes next, const DeltaTuning& tuning) {
    Bytes delta = encoded(dtype, base, next, tuning);
    out.push_back({name, dtype, std::move(base), std::move(next), std::move(delta)});
  };
  const Trained half = trained(DType::kBF16, 600, 1e-4, 3), whole = trained(DType::kF32, 120, 1e-5, 4);
  add("same", DType::kBF16, half.base, half.base, {});
  add("full", DType::kBF16, half.base, half.next, {DeltaForm::kFull});
  add("xor", DType::kBF16, half.base, half.next, {DeltaForm::kXor});
  add("steps", DType::kF32, whole.base, whole.next, {DeltaForm::kSteps});
  add("sparse", DType::kBF16, half.base, half.next, {DeltaForm::kSparse, 1});
  add("sparse by class", DType::kBF16, half.base, half.next, {DeltaForm::kSparse, 16});
  add("dense", DType::kF32, whole.base, whole.next, {DeltaForm::kSparse, 16});
  return out;
}

TEST(Delta, EveryFlippedBitIsFound) {
  for (const Sample& sample : samples()) {
    for (std::size_t bit = 0; bit < 8 * sample.delta.size(); ++bit) {
      Bytes damaged = sample.delta;
      damaged[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      Bytes block = sample.base;
      const auto done = apply_delta(damaged, sample.dtype, block, kBase, block, 1);
      ASSERT_FALSE(done.ok()) << sample.name << ", bit " << bit;
      ASSERT_EQ(done.error().code(), Code::kCorrupt) << sample.name << ", bit " << bit << ": " << done.error().message();
      ASSERT_TRUE(block == sample.base) << sample.name << ", bit " << bit;
    }
  }
}

TEST(Delta, EveryCutAndEveryByteTooManyIsFound) {
  for (const Sample& sample : samples()) {
    for (std::size_t size = 0; size < sample.delta.size(); ++size) {
      ASSERT_EQ(read_delta(std::span(sample.delta).first(size)).error().code(), Code::kCorrupt) << sample.name << " cut to " << size;
    }
    Bytes longer = sample.delta;
    longer.push_back({});
    EXPECT_EQ(read_delta(longer).error().code(), Code::kCorrupt);
  }
}

// Puts right checksums into a delta of one piece that was changed on purpose, so that what lies behind them is tried.
void seal(Bytes& delta) {
  constexpr std::size_t kRow = kDeltaHeaderBytes, kPayload = kRow + 12;
  store_le(delta.data() + kRow + 4, static_cast<std::uint32_t>(delta.size() - kPayload));
  store_le(delta.data() + kRow + 8, crc32c(std::span(delta).subspan(kPayload)));
  store_le(delta.data() + 28, crc32c(std::span(delta).subspan(kRow, 12)));
  store_le(delta.data() + 48, static_cast<std::uint64_t>(delta.size() - kPayload));
  store_le(delta.data() + 60, crc32c(std::span(delta).first(60)));
}

TEST(Delta, WrongBytesUnderRightChecksumsAreNeverAWrongResult) {
  // Every byte of every piece at six values, sealed again: an error, or the right result where a byte did not matter; the block is the base or the result.
  for (const Sample& sample : samples()) {
    if (sample.delta.size() == kDeltaHeaderBytes) continue;
    for (std::size_t at = kDeltaHeaderBytes + 12; at < sample.delta.size(); ++at) {
      for (const unsigned value : {0x00U, 0x01U, 0x7fU, 0x80U, 0xfeU, 0xffU}) {
        Bytes forged = sample.delta;
        forged[at] = static_cast<std::byte>(value);
        seal(forged);
        Bytes block = sample.base;
        const auto done = apply_delta(forged, sample.dtype, block, kBase, block, 1);
        if (done.ok()) {
          ASSERT_TRUE(block == sample.next) << sample.name << ", byte " << at << " is " << value;
        } else {
          ASSERT_EQ(done.error().code(), Code::kCorrupt);
          ASSERT_TRUE(block == sample.base) << sample.name << ", byte " << at << " is " << value;
        }
      }
    }
  }
}

TEST(Delta, SwappedRepeatedAndMissingPiecesAreFound) {
  const Trained weights = trained(DType::kBF16, 3 * kPiece / 2, 1e-5, 9);  // three pieces
  const Bytes delta = encoded(DType::kBF16, weights.base, weights.next);
  constexpr std::size_t kTable = kDeltaHeaderBytes;
  std::size_t sizes[3], starts[3];
  std::size_t at = kTable + 36;
  for (std::size_t i = 0; i < 3; ++i) {
    starts[i] = at;
    sizes[i] = load_le<std::uint32_t>(delta.data() + kTable + 12 * i + 4);
    at += sizes[i];
  }
  ASSERT_EQ(at, delta.size());
  const auto rebuilt = [&](std::array<std::size_t, 3> order) {
    Bytes out(delta.begin(), delta.begin() + kTable);
    for (const std::size_t i : order) out.insert(out.end(), delta.begin() + static_cast<std::ptrdiff_t>(kTable + 12 * i), delta.begin() + static_cast<std::ptrdiff_t>(kTable + 12 * i + 12));
    for (const std::size_t i : order) out.insert(out.end(), delta.begin() + static_cast<std::ptrdiff_t>(starts[i]), delta.begin() + static_cast<std::ptrdiff_t>(starts[i] + sizes[i]));
    // Header and table are made right again: only the result's CRC can tell.
    store_le(out.data() + 28, crc32c(std::span(out).subspan(kTable, 36)));
    store_le(out.data() + 48, static_cast<std::uint64_t>(out.size() - kTable - 36));
    store_le(out.data() + 60, crc32c(std::span(out).first(60)));
    return out;
  };
  EXPECT_TRUE(rebuilt({0, 1, 2}) == delta);
  for (const auto& order : {std::array<std::size_t, 3>{1, 0, 2}, {0, 2, 1}, {0, 0, 2}, {2, 1, 2}}) {
    Bytes block = weights.base;
    const auto done = apply_delta(rebuilt(order), DType::kBF16, block, kBase, block, 1);
    ASSERT_FALSE(done.ok());
    EXPECT_EQ(done.error().code(), Code::kCorrupt);
    EXPECT_TRUE(block == weights.base);
  }
}

TEST(Delta, DeclaredSizesAreCheckedBeforeAnythingIsAllocated) {
  // Sizes that would be exabytes, under a right header CRC.
  for (const std::uint64_t size : {std::uint64_t{1} << 40, std::uint64_t{1} << 56, (std::uint64_t{1} << 56) + 2, UINT64_MAX - 1, UINT64_MAX - kPiece + 1}) {
    for (const std::uint64_t payload : {std::uint64_t{0}, UINT64_MAX, UINT64_MAX - 12 * (size / kPiece) + 1}) {
      Bytes delta = encoded(DType::kBF16, Bytes(4096), random_bytes(4096, 1));
      store_le(delta.data() + 8, size);
      store_le(delta.data() + 48, payload);
      store_le(delta.data() + 60, crc32c(std::span(delta).first(60)));
      EXPECT_EQ(read_delta(delta).error().code(), Code::kCorrupt);
    }
  }
}

TEST(Delta, AnErrorNamesPieceAndStream) {
  const Trained weights = trained(DType::kBF16, kPiece, 1e-5, 9);  // two pieces
  Bytes delta = encoded(DType::kBF16, weights.base, weights.next);
  delta.back() ^= std::byte{1};
  Bytes out(weights.base.size());
  const std::string text = apply_delta(delta, DType::kBF16, weights.base, kBase, out, 1).error().message();
  EXPECT_NE(text.find("piece 1 of 2"), std::string::npos) << text;

  Bytes one = encoded(DType::kBF16, Bytes(weights.base.begin(), weights.base.begin() + 4096), Bytes(weights.next.begin(), weights.next.begin() + 4096), {DeltaForm::kXor});
  one[kDeltaHeaderBytes + 12] = std::byte{9};  // form of plane 0
  seal(one);
  const std::string stream = apply_delta(one, DType::kBF16, std::span(weights.base).first(4096), kBase, std::span(out).first(4096), 1).error().message();
  EXPECT_NE(stream.find("piece 0 of 1 (xor): plane 0"), std::string::npos) << stream;
}

}  // namespace
}  // namespace paramwire
