#include "paramwire/client/planner.hpp"

#include "paramwire/base/env.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>

namespace paramwire {
namespace {

WalkNeed need(const char* tensor, std::uint64_t rows, std::uint64_t row_bytes, std::vector<std::uint64_t> cuts = {0}) {
  return {tensor, rows, row_bytes, std::move(cuts)};
}

TEST(Planner, PiecesCoverEveryRowOnceInOrderAndNeverCrossACut) {
  const std::vector<WalkNeed> needs = {need("a", 1000, 4096, {0, 300, 301}), need("b", 1, 64), need("c", 7, 100'000)};
  PlanOptions options;
  options.budget_bytes = 3 << 20;
  options.piece_bytes = 256 * 1024;
  const auto plan = plan_walk(needs, options);
  ASSERT_TRUE(plan.ok()) << plan.error().to_string();
  std::uint32_t at_need = 0;
  std::uint64_t at_row = 0;
  for (const Piece& piece : plan->pieces) {
    if (piece.need != at_need) {
      EXPECT_EQ(at_row, needs[at_need].rows);
      ASSERT_EQ(piece.need, at_need + 1);
      at_need = piece.need;
      at_row = 0;
    }
    EXPECT_EQ(piece.row_begin, at_row);
    EXPECT_LE(piece.bytes, options.piece_bytes);
    for (const std::uint64_t cut : needs[piece.need].cuts) EXPECT_FALSE(piece.row_begin < cut && cut < piece.row_end);
    at_row = piece.row_end;
  }
  EXPECT_EQ(at_row, 7U);
  EXPECT_LE(plan->window_bytes + plan->resident_bytes, options.budget_bytes);
}

TEST(Planner, AWalkThatFitsTheBudgetStaysWhole) {
  PlanOptions options;
  options.budget_bytes = 8 << 20;
  const auto plan = plan_walk({need("a", 1000, 4096)}, options);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->resident_bytes, 1000U * 4096);
  EXPECT_EQ(plan->window_bytes, 0U);
}

TEST(Planner, ABudgetBelowTwoRowsIsRefusedWithTheOneThatWouldDo) {
  PlanOptions options;
  options.budget_bytes = 10'000;
  const std::vector<WalkNeed> needs = {need("narrow", 9, 64), need("wide", 4, 8192)};
  const auto plan = plan_walk(needs, options);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().code(), Code::kInvalid);
  EXPECT_NE(plan.error().message().find("wide"), std::string::npos);
  EXPECT_NE(plan.error().message().find(std::to_string(walk_budget_min(needs))), std::string::npos);
  options.budget_bytes = walk_budget_min(needs);
  EXPECT_TRUE(plan_walk(needs, options).ok());
  --options.budget_bytes;
  EXPECT_FALSE(plan_walk(needs, options).ok());
}

TEST(Planner, WhatTheWindowDoesNotNeedKeepsPiecesSpreadOverTheWalk) {
  PlanOptions options;
  options.budget_bytes = 32 << 20;
  options.piece_bytes = 1 << 20;
  options.window_bytes = 8 << 20;
  const auto plan = plan_walk({need("a", 64, 1 << 20)}, options);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->window_bytes, std::uint64_t{8} << 20);
  EXPECT_GE(plan->resident_bytes, std::uint64_t{22} << 20);  // of 24 MiB that are left
  std::size_t longest = 0, run = 0;
  for (const Piece& piece : plan->pieces) {
    run = piece.resident ? 0 : run + 1;
    longest = std::max(longest, run);
  }
  EXPECT_LE(longest, 4U);  // 40 of 64 stream: kept ones in front would leave a run of 40
}

// Goal: spans in the ring never overlap, the order is the walk's, and it never gets stuck. Method: random walks against a
// model of what is held.
TEST(Planner, TheWindowNeverOverlapsLivingPiecesAndAlwaysProgresses) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<WalkNeed> needs;
    for (std::uint64_t i = 0; i < 1 + random.below(6); ++i) needs.push_back(need("t", 1 + random.below(40), 1 + random.below(3000)));
    PlanOptions options;
    options.piece_bytes = 1 + random.below(10'000);
    options.budget_bytes = 8'000 + random.below(60'000);
    options.window_bytes = 4'000;
    const auto plan = plan_walk(needs, options);
    if (!plan.ok()) continue;
    WalkWindow window(*plan);
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> living;  // position -> offset, end
    std::uint64_t next_given = 0, next_done = 0;
    const std::uint64_t rounds = 5 * plan->pieces.size();
    while (next_done < rounds) {
      auto start = random.chance(60) ? window.start() : std::nullopt;
      if (start) {
        while (next_given < start->position) {  // skipped: resident, after the first round
          ASSERT_TRUE(window.piece(next_given).resident);
          ASSERT_GE(next_given, plan->pieces.size());
          ++next_given;
        }
        ASSERT_EQ(start->position, next_given);
        ++next_given;
        const Piece& piece = window.piece(start->position);
        if (!piece.resident) {
          const std::uint64_t end = start->ring_offset + piece.bytes;
          ASSERT_LE(end, window.ring_bytes());
          for (const auto& [position, span] : living) ASSERT_TRUE(end <= span.first || start->ring_offset >= span.second);
          living[start->position] = {start->ring_offset, end};
        }
      }
      // The consumer takes pieces in order once they are given; with nothing to take, the next start must succeed.
      const bool there = next_done < next_given || (window.piece(next_done).resident && next_done >= plan->pieces.size());
      if (there && random.chance(50)) {
        living.erase(next_done);
        window.finish(next_done++);
      } else if (!there && living.empty()) {
        auto must = window.start();
        ASSERT_TRUE(must.has_value());
        ASSERT_GE(must->position, next_given);
        next_given = must->position + 1;
        if (!window.piece(must->position).resident) living[must->position] = {must->ring_offset, must->ring_offset + window.piece(must->position).bytes};
      }
    }
    EXPECT_LE(window.held_bytes_max(), options.budget_bytes);
  }
}

}  // namespace
}  // namespace paramwire
