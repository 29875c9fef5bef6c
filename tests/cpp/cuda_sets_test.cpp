// Weights that stay are replaced on a simulated device: in their place, or in a second set while steps compute with the first; what was captured stays.
#include "cpp/cuda_session_fixture.hpp"

#include <set>
#include <string>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;
using Fixture = SessionFixture;

constexpr std::uint64_t kRows = 32, kWindow = 2 * 12'800;

std::vector<std::size_t> pieces_that_stay(const Fixture& fixture) {
  std::vector<std::size_t> out;
  for (std::size_t piece = 0; piece < fixture.pieces(); ++piece) {
    if (fixture.stays(piece)) out.push_back(piece);
  }
  return out;
}

// Every piece that stays, into the other set.
Status stage_all(Fixture& fixture) {
  for (const std::size_t piece : pieces_that_stay(fixture)) {
    const ExtentCheck check = fixture.check(piece);
    PARAMWIRE_CHECK(fixture.session().stage(piece, fixture.view(piece, {&check, 1})));
  }
  return fixture.session().staged();
}

void expect_right(Fixture& fixture, const std::string& what) {
  const auto wanted = fixture.cpu_logits();
  ASSERT_TRUE(fixture.session().rewind(0).ok());
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    const auto logits = fixture.step(kTokens[i]);
    ASSERT_TRUE(logits.ok()) << what << ": " << logits.error().to_string();
    EXPECT_LE(largest_difference(*logits, wanted[i]), kTolerance) << what << ", step " << i;
  }
}

// A model that stays whole: one segment, one graph for each set, captured before there were any weights.
TEST(CudaSets, AHundredVersionsAreComputedByTheGraphsOfTheFirst) {
  for (const std::uint32_t sets : {1U, 2U}) {
    Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0, sets);
    fixture.with_checks = true;
    expect_right(fixture, "first version");
    const std::uint64_t captured = fixture.sim().calls("cuStreamBeginCapture"), allocated = fixture.sim().calls("cuMemAlloc") + fixture.sim().calls("cuMemHostAlloc");
    const auto all = pieces_that_stay(fixture);
    for (std::uint64_t version = 1; version <= 100; ++version) {
      fixture.load(kSeed + version);
      if (sets == 1) {
        must(fixture.session().renew(all));
      } else {
        must(stage_all(fixture));
        must(fixture.session().swap());
      }
      expect_right(fixture, "version " + std::to_string(version));
    }
    EXPECT_EQ(fixture.sim().calls("cuStreamBeginCapture"), captured);
    EXPECT_EQ(fixture.sim().calls("cuMemAlloc") + fixture.sim().calls("cuMemHostAlloc"), allocated);
  }
}

TEST(CudaSets, StepsComputeWithTheFirstSetUntilTheExchangeWhateverIsStagedMeanwhile) {
  for (const SimOrder order : {SimOrder::kLate, SimOrder::kEager, SimOrder::kRandom}) {
    Fixture fixture(sim_options(order), kRows, 1, 0, 2);
    expect_right(fixture, "first version");
    const auto wanted = fixture.cpu_logits();
    fixture.load(kSeed + 1, false);
    must(fixture.session().rewind(0));
    std::vector<std::vector<float>> beside;
    Status staged;
    std::thread thread([&] { staged = stage_all(fixture); });
    for (const Token token : kTokens) beside.push_back(must(fixture.step(token)));
    thread.join();
    must(staged);
    for (std::size_t i = 0; i < kTokens.size(); ++i) EXPECT_LE(largest_difference(beside[i], wanted[i]), kTolerance);
    must(fixture.session().swap());
    fixture.load(kSeed + 1);
    expect_right(fixture, "second version");
  }
}

TEST(CudaSets, PiecesThatAreTheSameAreCopiedOnTheDevice) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow, 2);
  expect_right(fixture, "first version");
  const auto all = pieces_that_stay(fixture);
  const std::uint64_t before = fixture.sim().counters().copied_to_device;
  for (const std::size_t piece : all) must(fixture.session().stage_same(piece));
  must(fixture.session().staged());
  EXPECT_LE(fixture.sim().counters().copied_to_device, before + 64) << "nothing but its generation came from the host";
  must(fixture.session().swap());
  expect_right(fixture, "in the other set");
}

// What is staged is kept over exchanges: a set that comes back needs what has changed since it was in use, and no more.
TEST(CudaSets, APieceStaysInItsSetUntilItIsStagedAgain) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0, 2);
  expect_right(fixture, "first version");
  must(stage_all(fixture));
  must(fixture.session().swap());
  const ExtentCheck check = fixture.check(0);
  must(fixture.session().stage(0, fixture.view(0, {&check, 1})));
  must(fixture.session().staged());
  must(fixture.session().swap());
  expect_right(fixture, "the first set again");
}

TEST(CudaSets, DamagedBytesAreFoundBeforeTheExchangeAndStepsGoOnWithTheOthers) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0, 2);
  expect_right(fixture, "first version");
  must(fixture.session().rewind(0));
  const auto wanted = fixture.cpu_logits();
  fixture.load(kSeed + 1, false);
  fixture.staged(4)[5] ^= std::byte{1};
  const Status refused = stage_all(fixture);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kCorrupt);
  EXPECT_NE(refused.error().message().find("of the staged weights"), std::string::npos) << refused.error().message();
  EXPECT_EQ(fixture.session().swap().error().code(), Code::kInvalid);
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
  fixture.staged(4)[5] ^= std::byte{1};
  must(stage_all(fixture));
  must(fixture.session().swap());
  fixture.load(kSeed + 1);
  expect_right(fixture, "second version");
}

TEST(CudaSets, AnExchangeBeforeAllIsStagedIsRefusedNamingWhatIsMissing) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0, 2);
  expect_right(fixture, "first version");
  EXPECT_EQ(fixture.session().swap().error().code(), Code::kInvalid);
  must(fixture.session().stage(0, fixture.view(0, {})));
  const Status refused = fixture.session().staged();
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("have not been staged"), std::string::npos) << refused.error().message();
  EXPECT_EQ(fixture.session().stage(fixture.pieces(), fixture.view(0, {})).error().code(), Code::kInvalid);
  EXPECT_EQ(fixture.session().stage(1, fixture.view(0, {})).error().code(), Code::kInvalid) << "another piece's bytes";
  must(stage_all(fixture));
  const Token token = 1;
  must(fixture.session().begin({&token, 1}));
  EXPECT_EQ(fixture.session().swap().error().code(), Code::kInvalid) << "in a step";
  fixture.session().abandon();
  must(fixture.session().swap());
  EXPECT_EQ(fixture.session().swap().error().code(), Code::kInvalid) << "twice";
}

TEST(CudaSets, OneSetIsRenewedInItsPlaceAndHasNothingToStage) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
  expect_right(fixture, "first version");
  EXPECT_EQ(fixture.session().stage(0, fixture.view(0, {})).error().code(), Code::kInvalid);
  EXPECT_EQ(fixture.session().staged().error().code(), Code::kInvalid);
  EXPECT_EQ(fixture.session().swap().error().code(), Code::kInvalid);
  const std::size_t outside[] = {fixture.pieces()};
  EXPECT_EQ(fixture.session().renew(outside).error().code(), Code::kInvalid);
  // What was renewed is asked for, and nothing else that stays.
  const auto all = pieces_that_stay(fixture);
  must(fixture.session().renew(std::span(all).first(2)));
  must(fixture.session().rewind(0));
  std::set<std::size_t> asked;
  static_cast<void>(must(fixture.step(kTokens[0], [&](std::size_t piece) { asked.insert(piece); })));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(asked.contains(all[i]), i < 2) << "piece " << all[i];
}

// A number that is not written is what a step meets that computes with weights that are being replaced, or with another set than it thinks.
TEST(CudaSets, AStepThatMeetsAnotherGenerationOfTheWeightsHasNoResult) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0, 2);
  expect_right(fixture, "first version");
  fixture.load(kSeed + 1);
  for (const std::size_t piece : pieces_that_stay(fixture)) must(fixture.session().stage(piece, fixture.view(piece, {})));
  fixture.sim().skip_call("cuMemcpyHtoDAsync", 1);  // the number, by staged()
  must(fixture.session().staged());
  must(fixture.session().swap());
  must(fixture.session().rewind(0));
  const auto refused = fixture.step(kTokens[0]);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInternal);
  EXPECT_NE(refused.error().message().find("a step over generation 2 of the weights met generation 0"), std::string::npos) << refused.error().message();
}

// Each wait of what fills the second set, left out: something must be wrong in one of the orders.
TEST(CudaSets, EveryWaitOfTheSecondSetIsNeeded) {
  const auto run = [&](const char* function, std::uint32_t skipped, SimOrder order, std::uint64_t* waits) {
    Fixture fixture(sim_options(order), kRows, 1, 0, 2);
    bool wrong = !fixture.step(kTokens[0]).ok();
    fixture.load(kSeed + 1);
    const auto wanted = fixture.cpu_logits();
    const std::uint64_t before = fixture.sim().calls(function);
    if (skipped > 0) fixture.sim().skip_call(function, skipped);
    // As an engine does it: two buffers in turn, each used again once the next stage() has returned.
    std::optional<std::size_t> last;
    for (const std::size_t piece : pieces_that_stay(fixture)) {
      const ExtentCheck check = fixture.check(piece);
      wrong = wrong || !fixture.session().stage(piece, fixture.view(piece, {&check, 1})).ok();
      if (last) std::memset(fixture.staged(*last).data(), 0x7f, fixture.staged(*last).size());
      last = piece;
    }
    wrong = wrong || !fixture.session().staged().ok() || !fixture.session().swap().ok() || !fixture.session().rewind(0).ok();
    if (waits != nullptr) *waits = fixture.sim().calls(function) - before;
    if (!wrong) {
      const auto logits = fixture.step(kTokens[0]);
      wrong = !logits.ok() || largest_difference(*logits, wanted[0]) > kTolerance;
    }
    fixture.close();
    return wrong || !fixture.sim().take_failures().empty();
  };
  for (const char* function : {"cuEventSynchronize", "cuStreamSynchronize"}) {
    std::uint64_t waits = 0;
    ASSERT_FALSE(run(function, 0, SimOrder::kLate, &waits));
    ASSERT_GE(waits, 2U);
    for (std::uint32_t skipped = 1; skipped <= waits; ++skipped) {
      EXPECT_TRUE(run(function, skipped, SimOrder::kLate, nullptr) || run(function, skipped, SimOrder::kGreedy, nullptr)) << function << ' ' << skipped << " of " << waits;
    }
  }
}

}  // namespace
}  // namespace paramwire
