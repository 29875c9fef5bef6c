// A session on a simulated device, given its pieces by hand: which waits its two streams need, when views are free, and what it refuses.
#include "cpp/cuda_session_fixture.hpp"

#include <cstring>
#include <string>

namespace paramwire {
namespace {

using namespace testing;
using Fixture = SessionFixture;

constexpr std::uint64_t kRows = 32, kWindow = 2 * 12'800;  // pieces of 32 rows, two or three in a window

// With one wait between copies and computation left out, something must be wrong in one order or another that the rules allow: computation that runs
// ahead finds no weights, copies that run ahead write over weights that are still computed with.
TEST(CudaSession, EveryWaitBetweenItsStreamsIsNeeded) {
  std::vector<std::vector<float>> wanted;
  std::uint64_t waits = 0;
  // returns: whether something was wrong
  const auto run = [&](std::uint32_t skipped, SimOrder order, std::uint64_t seed) {
    Fixture fixture(sim_options(order, seed), kRows, 5, kWindow);
    if (wanted.empty()) wanted = fixture.cpu_logits();
    const std::uint64_t before = fixture.sim().calls("cuStreamWaitEvent");
    if (skipped > 0) fixture.sim().skip_call("cuStreamWaitEvent", skipped);
    bool wrong = false;
    for (std::size_t i = 0; i < kTokens.size() && !wrong; ++i) {
      const auto logits = fixture.step(kTokens[i]);
      wrong = !logits.ok() || largest_difference(*logits, wanted[i]) > kTolerance;
    }
    waits = fixture.sim().calls("cuStreamWaitEvent") - before;
    fixture.close();
    return wrong || !fixture.sim().take_failures().empty();
  };
  ASSERT_FALSE(run(0, SimOrder::kLate, 0));
  const std::uint64_t all = waits;
  ASSERT_GE(all, 12U) << "several windows";
  for (std::uint64_t seed = 0; seed < 6; ++seed) ASSERT_FALSE(run(0, seed < 2 ? SimOrder::kGreedy : SimOrder::kRandom, seed)) << "seed " << seed;
  for (std::uint32_t skipped = 1; skipped <= all; ++skipped) {
    bool seen = false;
    for (const SimOrder order : {SimOrder::kGreedy, SimOrder::kLate}) {
      for (std::uint64_t seed = 0; seed < 2 && !seen; ++seed) seen = run(skipped, order, seed);
    }
    EXPECT_TRUE(seen) << "wait " << skipped << " of " << all << " is not needed, or its lack is not seen";
  }
}

TEST(CudaSession, AViewMayBeOverwrittenOnceItIsReleasedAndNotBefore) {
  for (const bool too_early : {false, true}) {
    Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
    const auto wanted = fixture.cpu_logits();
    const auto logits = fixture.step(kTokens[0], [&](std::size_t piece) {
      if (!too_early) must(fixture.session().release(fixture.session().supplied()));
      std::memset(fixture.staged(piece).data(), 0x7f, fixture.staged(piece).size());
    });
    EXPECT_EQ(largest_difference(must(logits), wanted[0]) > kTolerance, too_early);
  }
}

TEST(CudaSession, ABitThatFlipsOnItsWayIsFoundOnTheDeviceBeforeAResultLeaves) {
  for (const std::size_t damaged : {0U, 7U, 30U}) {
    Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
    fixture.with_checks = true;
    const auto wanted = fixture.cpu_logits();
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
    must(fixture.session().rewind(0));
    std::byte& byte = fixture.staged(damaged)[3];
    byte ^= std::byte{0x10};
    // The piece may be one that stays, and is there: then nothing is wrong.
    bool given = false;
    const auto refused = fixture.step(kTokens[0], [&](std::size_t piece) { given = given || piece == damaged; });
    ASSERT_EQ(refused.ok(), !given);
    byte ^= std::byte{0x10};
    if (given) {
      EXPECT_EQ(refused.error().code(), Code::kCorrupt);
      EXPECT_NE(refused.error().message().find("1 of "), std::string::npos) << refused.error().message();
      EXPECT_EQ(fixture.session().position(), 0U);
    } else {
      must(fixture.session().rewind(0));
    }
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance) << "and the next step is right";
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[1])), wanted[1]), kTolerance);
  }
}

TEST(CudaSession, ChecksThatAreNoRunOfExtentsAreRefused) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
  const Token token = 1;
  must(fixture.session().begin({&token, 1}));
  must(fixture.supply_rows());
  for (const ExtentCheck& check : {ExtentCheck{0, 0, 1}, ExtentCheck{1, 1U << 20, 1}, ExtentCheck{1U << 30, 4, 1}}) {
    const auto refused = fixture.supply_next({&check, 1});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
  }
}

TEST(CudaSession, PlanesOutsideOfTheirViewAndThoseNobodySpokeOfAreRefused) {
  for (const std::uint64_t planes_bytes : {0U, 1U << 16}) {
    Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow, 1, planes_bytes);
    const Token token = 1;
    must(fixture.session().begin({&token, 1}));
    must(fixture.supply_rows());
    const auto size = static_cast<std::uint32_t>(fixture.bytes_of(fixture.next_piece()).size());
    const std::vector<std::vector<PlanesApart>> wrong = {{{0, 0}}, {{0, 3}}, {{2, 4}}, {{0, size + 4}}, {{size, 4}}, {{0, 8}, {4, 8}}, {{UINT64_MAX - 3, 8}}};
    for (const auto& planes : wrong) {
      WeightView view = fixture.view(fixture.next_piece(), {});
      view.planes = planes;
      const Status refused = fixture.session().supply(view);
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.error().code(), Code::kInvalid) << refused.error().message();
    }
    WeightView view = fixture.view(fixture.next_piece(), {});
    const PlanesApart right{0, size};
    view.planes = {&right, 1};
    EXPECT_EQ(fixture.session().supply(view).ok(), planes_bytes > 0);
    fixture.session().abandon();
  }
}

TEST(CudaSession, PiecesThatStayAreAskedForOnce) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 1, 0);
  const auto wanted = fixture.cpu_logits();
  std::size_t supplied = 0;
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    EXPECT_LE(largest_difference(must(fixture.step(kTokens[i], [&](std::size_t) { ++supplied; })), wanted[i]), kTolerance);
  }
  EXPECT_EQ(supplied, fixture.pieces());
}

TEST(CudaSession, AnAbandonedStepLeavesPositionAndTheNextOneIsRight) {
  Fixture fixture(sim_options(SimOrder::kLate), kRows, 5, kWindow);
  const auto wanted = fixture.cpu_logits();
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
  std::size_t supplied = 0;
  const Token other = 77;
  must(fixture.session().begin({&other, 1}));
  fixture.session().abandon();
  EXPECT_EQ(fixture.session().position(), 1U);
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[1], [&](std::size_t) { ++supplied; })), wanted[1]), kTolerance);
  must(fixture.session().rewind(0));
  EXPECT_LE(largest_difference(must(fixture.step(kTokens[0])), wanted[0]), kTolerance);
}

TEST(CudaSession, MoreTokensInAStepThanAGridHasBlocksAreRefusedWhenItIsOpened) {
  Gpu gpu(sim_options(SimOrder::kLate));
  const Graph graph = must(llama_graph(oracle::small_llama(), Naming::kGguf));
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  SessionOptions options;
  options.step_tokens = 65'536;
  const auto refused = gpu.backend->open_session(must(graph.bind(oracle::infos(tensors))), options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find("step_tokens is 65536, expected at most 16777216 and 65535"), std::string::npos) << refused.error().message();
}

TEST(CudaSession, WhatItCannotComputeIsRefusedWhenItIsOpened) {
  Gpu gpu(sim_options(SimOrder::kLate));
  LlamaConfig config = oracle::small_llama();
  config.heads = 1;
  config.kv_heads = 1;
  config.head_size = 320;
  const Graph graph = must(llama_graph(config, Naming::kGguf));
  const auto tensors = oracle::random_tensors(graph, DType::kF32, kSeed);
  const auto binding = must(graph.bind(oracle::infos(tensors)));
  const auto refused = gpu.backend->open_session(binding, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find("heads of 320, expected at most 256"), std::string::npos) << refused.error().message();
}

}  // namespace
}  // namespace paramwire
