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

TEST(Planner, WhatMustStayStaysAndIsCountedBeforeTheWindow) {
  std::vector<WalkNeed> needs = {need("norm", 64, 2), need("a", 1000, 4096), need("b", 1000, 4096)};
  needs[0].keep = true;
  PlanOptions options;
  options.budget_bytes = 1 << 20;
  options.piece_bytes = 64 << 10;
  options.window_bytes = 512 << 10;
  const auto plan = plan_walk(needs, options);
  ASSERT_TRUE(plan.ok()) << plan.error().to_string();
  EXPECT_LE(plan->window_bytes + plan->resident_bytes, options.budget_bytes);
  std::uint64_t resident = 0;
  for (const Piece& piece : plan->pieces) {
    EXPECT_TRUE(piece.resident || piece.need != 0);
    if (piece.resident) resident += piece.bytes;
  }
  EXPECT_EQ(resident, plan->resident_bytes);
  EXPECT_GT(resident, options.budget_bytes / 3) << "the rest of the budget keeps others";
  options.budget_bytes = walk_budget_min(needs);
  ASSERT_TRUE(plan_walk(needs, options).ok());
  --options.budget_bytes;
  const auto refused = plan_walk(needs, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find(std::to_string(walk_budget_min(needs))), std::string::npos) << refused.error().message();
}

TEST(Planner, TwoCopiesOfWhatStaysAndTheWindowFitTheBudget) {
  std::vector<WalkNeed> needs = {need("norm", 64, 2), need("a", 1000, 4096), need("b", 1000, 4096)};
  needs[0].keep = true;
  PlanOptions options;
  options.piece_bytes = 64 << 10;
  options.window_bytes = 512 << 10;
  options.resident_copies = 2;
  std::uint64_t kept_before = 0;
  for (const std::uint64_t budget : {walk_budget_min(needs, 2), std::uint64_t{1} << 20, std::uint64_t{4} << 20, 2 * (std::uint64_t{64 * 2} + 2 * 1000 * 4096)}) {
    options.budget_bytes = budget;
    const auto plan = plan_walk(needs, options);
    ASSERT_TRUE(plan.ok()) << plan.error().to_string();
    EXPECT_LE(plan->window_bytes + 2 * plan->resident_bytes, budget);
    EXPECT_GE(plan->resident_bytes, kept_before);
    kept_before = plan->resident_bytes;
    EXPECT_EQ(plan->resident_bytes == plan->walk_bytes, plan->window_bytes == 0);
  }
  EXPECT_EQ(kept_before, 64U * 2 + 2 * 1000 * 4096) << "twice all of it is room for all of it, and no window";
  options.budget_bytes = walk_budget_min(needs, 2) - 1;
  const auto refused = plan_walk(needs, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find(std::to_string(walk_budget_min(needs, 2))), std::string::npos) << refused.error().message();
}

TEST(Planner, PiecesThatAreThereAlreadyAreNeverGiven) {
  PlanOptions options;
  options.budget_bytes = 6 << 20;
  options.piece_bytes = 64 << 10;
  options.window_bytes = 256 << 10;
  const auto plan = plan_walk({need("a", 1000, 4096), need("b", 1000, 4096)}, options);
  ASSERT_TRUE(plan.ok());
  std::vector<bool> there;
  std::uint64_t bytes_there = 0;
  for (std::size_t i = 0; i < plan->pieces.size(); ++i) {
    there.push_back(plan->pieces[i].resident && i % 2 == 0);
    bytes_there += there[i] ? plan->pieces[i].bytes : 0;
  }
  ASSERT_GT(bytes_there, 0U);
  for (const bool through_ring : {false, true}) {
    WalkWindow window = through_ring ? WalkWindow(*plan, 256 << 10, there) : WalkWindow(*plan, there);
    EXPECT_EQ(window.held_bytes(), through_ring ? 0U : bytes_there);
    std::uint64_t given = 0;
    while (true) {
      const auto start = window.start();
      ASSERT_TRUE(start.has_value());
      if (start->position >= 2 * plan->pieces.size()) break;
      const std::size_t piece = static_cast<std::size_t>(start->position % plan->pieces.size());
      EXPECT_FALSE(there[piece]);
      EXPECT_TRUE(window.given(start->position));
      given += start->position < plan->pieces.size() ? plan->pieces[piece].bytes : 0;
      window.finish(start->position);
    }
    EXPECT_EQ(given, plan->walk_bytes - bytes_there);
  }
}

TEST(Planner, CutsLieAtWholeExtentsWhereAskedAndWhereItCostsAnEighthOfAPieceAtMost) {
  constexpr std::uint64_t kExtent = 65536;
  PlanOptions options;
  options.piece_bytes = 4 << 20;
  options.budget_bytes = 64 << 20;
  const auto pieces_of = [&](const WalkNeed& what, std::uint64_t cut_bytes) {
    options.cut_bytes = cut_bytes;
    const auto plan = plan_walk({what}, options);
    EXPECT_TRUE(plan.ok()) << plan.error().to_string();
    return plan->pieces;
  };
  const auto begins = [](const std::vector<Piece>& pieces) {
    std::vector<std::uint64_t> out;
    for (const Piece& piece : pieces) out.push_back(piece.row_begin);
    return out;
  };
  struct Row {
    std::uint64_t row_bytes;
    bool aligned;
  };
  // A row of 1,152 bytes ends an extent every 512 rows, 589,824 bytes: 7 of them are 4,128,768 of 4,194,304. One of 1,792: every 256 rows, 458,752 bytes, 9 of
  // them. One of 11,008: 256 rows, 2,818,048 bytes, of which one would be two thirds of a piece. One of 4,097 bytes: never.
  for (const Row& row : {Row{64, true}, Row{1152, true}, Row{1792, true}, Row{65536, true}, Row{11'008, false}, Row{4097, false}, Row{65537, false}}) {
    SCOPED_TRACE(row.row_bytes);
    const std::uint64_t rows = (37 << 20) / row.row_bytes, cut = rows / 3 + 1;
    const WalkNeed what = need("w", rows, row.row_bytes, {0, 5, cut});
    const auto pieces = pieces_of(what, kExtent);
    std::uint64_t at = 0;
    bool inside = false;  // some cut is inside of a block
    for (const Piece& piece : pieces) {
      ASSERT_EQ(piece.row_begin, at);
      ASSERT_GT(piece.row_end, at);
      EXPECT_LE(piece.bytes, options.piece_bytes);
      EXPECT_EQ(piece.bytes, (piece.row_end - piece.row_begin) * row.row_bytes);
      const std::uint64_t block = at >= cut ? cut : at >= 5 ? 5 : 0;
      inside = inside || at != block;
      EXPECT_TRUE(!row.aligned || (at - block) * row.row_bytes % kExtent == 0) << at;
      at = piece.row_end;
      for (const std::uint64_t each : what.cuts) EXPECT_FALSE(piece.row_begin < each && each < piece.row_end);
    }
    EXPECT_EQ(at, rows);
    EXPECT_TRUE(inside);
    const auto anywhere = pieces_of(what, 0);
    EXPECT_TRUE(row.aligned || begins(pieces) == begins(anywhere));
    EXPECT_LE(pieces.size(), anywhere.size() + anywhere.size() / 7 + 2) << "two blocks are cut";
  }
  // What fits in one piece is not cut, though its bytes are no whole number of extents.
  EXPECT_EQ(pieces_of(need("w", (4 << 20) / 1152, 1152), kExtent).size(), 1U);
  EXPECT_EQ(pieces_of(need("w", 0, 1152), kExtent).size(), 0U);
  EXPECT_EQ(pieces_of(need("w", 7, 0), kExtent).size(), 1U);
  EXPECT_EQ(pieces_of(need("w", 0, 0), kExtent).size(), 0U);
}

TEST(Planner, ThroughTheRingEveryPieceComesOnceAndThoseThatStayNeverAgain) {
  PlanOptions options;
  options.budget_bytes = 6 << 20;
  options.piece_bytes = 64 << 10;
  options.window_bytes = 256 << 10;
  const auto plan = plan_walk({need("a", 1000, 4096), need("b", 1000, 4096)}, options);
  ASSERT_TRUE(plan.ok());
  ASSERT_GT(plan->resident_bytes, 0U);
  WalkWindow window(*plan, 200 << 10);
  std::deque<std::pair<std::uint64_t, std::uint64_t>> living;  // position, ring offset
  std::map<std::uint64_t, int> given;                          // by position
  const auto overlaps = [&](std::uint64_t offset, std::uint64_t bytes) {
    return std::any_of(living.begin(), living.end(), [&](const auto& each) { return offset < each.second + window.piece(each.first).bytes && each.second < offset + bytes; });
  };
  const std::uint64_t rounds = 3 * plan->pieces.size();
  while (true) {
    const auto start = window.start();
    if (start && start->position >= rounds) break;
    if (!start) {
      ASSERT_FALSE(living.empty()) << "always progresses";
      window.finish(living.front().first);
      living.pop_front();
      continue;
    }
    const std::uint64_t bytes = window.piece(start->position).bytes;
    ASSERT_LE(start->ring_offset + bytes, window.ring_bytes());
    ASSERT_FALSE(overlaps(start->ring_offset, bytes));
    living.emplace_back(start->position, start->ring_offset);
    ++given[start->position];
  }
  for (std::uint64_t position = 0; position < rounds; ++position) {
    const bool expected = position < plan->pieces.size() || !window.piece(position).resident;
    EXPECT_EQ(given.count(position), expected ? 1U : 0U) << position;
    EXPECT_EQ(window.given(position), expected);
  }
  EXPECT_LE(window.held_bytes_max(), window.ring_bytes());
}

}  // namespace
}  // namespace paramwire
