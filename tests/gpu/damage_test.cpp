// Payloads that were torn or damaged between sealing and the device are refused there, and nothing that was computed with them leaves.
#include "gpu/session_rig.hpp"

#include <algorithm>
#include <string>

namespace paramwire::gpu {
namespace {

class GpuDamage : public GpuTest {
 protected:
  // Pieces of two extents and a bit, in the head and in the layers.
  static LlamaConfig config() {
    LlamaConfig out = oracle::small_llama();
    out.vocabulary = 3'000;
    return out;
  }
  static constexpr std::uint64_t kRows = 1'100;  // 1,100 rows of 32 float32: 137.5 KiB
  static constexpr Token kToken = 41;

  void SetUp() override {
    good_ = rig_.tensors(5);
    rig_.load(good_);
    wanted_ = rig_.cpu_logits(good_, {&kToken, 1});
    ASSERT_LE(largest_difference(must(rig_.step(kToken)), wanted_), kLogitTolerance);
    must(rig_.session().rewind(0));
  }
  // A step over what lies there now must fail, naming a place in `piece`; `byte`: of the extent that is wrong.
  void expect_refused(std::size_t piece, std::uint64_t byte) {
    const auto refused = rig_.step(kToken);
    ASSERT_FALSE(refused.ok()) << "damage at byte " << byte << " of piece " << piece << " went unseen";
    EXPECT_EQ(refused.error().code(), Code::kCorrupt) << refused.error().to_string();
    const std::string text(refused.error().message());
    EXPECT_NE(text.find("'" + rig_.tensor_of(piece) + "'"), std::string::npos) << text;
    EXPECT_NE(text.find("at byte " + std::to_string(byte / 65'536 * 65'536) + " "), std::string::npos) << text;
    EXPECT_EQ(rig_.session().position(), 0U);
  }
  void expect_right() {
    EXPECT_LE(largest_difference(must(rig_.step(kToken)), wanted_), kLogitTolerance) << "the step behind a refused one";
    must(rig_.session().rewind(0));
  }
  std::size_t longest_piece() {
    std::size_t out = 0;
    for (std::size_t i = 0; i < rig_.pieces(); ++i) {
      if (rig_.staged(i).size() > rig_.staged(out).size()) out = i;
    }
    return out;
  }

  SessionRig rig_{*world_, config(), DType::kF32, kRows};
  oracle::Tensors good_;
  std::vector<float> wanted_;
};

TEST_F(GpuDamage, AnyBitThatFlipsIsNamedByItsExtentAndTheNextStepIsRight) {
  const std::size_t longest = longest_piece();
  ASSERT_GT(rig_.staged(longest).size(), std::size_t{2} * 65'536);
  for (std::size_t piece = 0; piece < rig_.pieces(); ++piece) {
    if (!rig_.streams(piece) || (piece != longest && piece % 5 != 0)) continue;
    const auto bytes = rig_.staged(piece);
    for (const std::size_t at : {std::size_t{0}, bytes.size() / 2, std::min<std::size_t>(65'536, bytes.size() - 1), bytes.size() - 1}) {
      const std::byte bit{static_cast<unsigned char>(1U << (at + piece) % 8)};
      bytes[at] ^= bit;
      expect_refused(piece, at);
      bytes[at] ^= bit;
      if (at == 0) expect_right();
    }
  }
  expect_right();
}

TEST_F(GpuDamage, APieceThatIsHalfAnotherVersionIsRefused) {
  const oracle::Tensors other = rig_.tensors(6);
  const std::size_t piece = longest_piece();
  const auto bytes = rig_.staged(piece);
  const std::vector<std::byte> right(bytes.begin(), bytes.end());
  // Torn within an extent, and between two.
  for (const std::size_t cut : {std::size_t{40'000}, std::size_t{65'536}, std::size_t{131'072}}) {
    rig_.load(other);
    const std::vector<std::byte> newer(bytes.begin(), bytes.end());
    rig_.load(good_);
    std::copy(newer.begin() + static_cast<std::ptrdiff_t>(cut), newer.end(), bytes.begin() + static_cast<std::ptrdiff_t>(cut));
    expect_refused(piece, cut);
    std::copy(right.begin(), right.end(), bytes.begin());
    expect_right();
  }
}

}  // namespace
}  // namespace paramwire::gpu
