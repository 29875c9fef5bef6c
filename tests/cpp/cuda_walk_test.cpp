// Where weights lie on a device, and what each window computes: checked on a small model, for every size of slot.
#include "support/rig.hpp"

#include "cpp/compute_oracle.hpp"
#include "cpp/small_mixture.hpp"
#include "paramwire/compute/cuda_walk.hpp"
#include "paramwire/compute/llama.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace paramwire {
namespace {

Binding small_model() {
  LlamaConfig config = oracle::small_llama();
  config.tied_head = false;
  const Graph graph = testing::must(llama_graph(config, Naming::kGguf));
  std::vector<TensorInfo> tensors;
  for (const Parameter& parameter : graph.parameters()) tensors.push_back({parameter.name, DType::kBF16, parameter.shape});
  return testing::must(graph.bind(tensors));
}

bool is_vector(const Binding& binding, std::size_t need) {
  return binding.graph().parameters()[binding.needs()[need].parameter].shape.rank() == 1;
}

// Matrices in pieces of at most `rows` rows, every `stay`-th of them resident (0: none).
std::vector<PieceLayout> cut(const Binding& binding, std::uint64_t rows, std::size_t stay) {
  std::vector<PieceLayout> out;
  std::size_t count = 0;
  for (std::size_t need = 0; need < binding.needs().size(); ++need) {
    const Need& each = binding.needs()[need];
    if (each.access != Access::kWhole) continue;
    for (std::uint64_t row = 0; row < each.rows; row += rows) {
      const bool resident = is_vector(binding, need) || (stay > 0 && count++ % stay == 0);
      out.push_back({need, row, std::min(each.rows, row + rows), resident});
    }
  }
  return out;
}

constexpr std::uint64_t kLargest = 16 * 48 * 2;  // bytes of 16 rows of the widest matrix

TEST(CudaWalk, EveryRowIsComputedOnceInGraphOrderInTheSegmentOfItsPiece) {
  const Binding binding = small_model();
  for (const std::size_t stay : {0U, 1U, 2U, 5U}) {
    for (const std::uint64_t slot : {kLargest, 3 * kLargest, std::uint64_t{1} << 20}) {
      const auto walk = testing::must(plan_cuda_walk(binding, cut(binding, 16, stay), slot));
      std::uint32_t op = 0;
      std::map<std::uint32_t, std::uint64_t> rows;  // done, by operation
      for (std::size_t s = 0; s < walk.segments.size(); ++s) {
        const CudaSegment& segment = walk.segments[s];
        ASSERT_EQ(segment.action_begin, s == 0 ? 0 : walk.segments[s - 1].action_end);
        ASSERT_EQ(segment.piece_begin, s == 0 ? 0 : walk.segments[s - 1].piece_end);
        for (std::size_t i = segment.action_begin; i < segment.action_end; ++i) {
          const CudaAction& action = walk.actions[i];
          ASSERT_GE(action.op, op);
          op = action.op;
          if (!action.matrix) {
            ASSERT_EQ(rows.count(action.op), 0U) << "once";
            rows[action.op] = 0;
            continue;
          }
          ASSERT_EQ(action.row_begin, rows[action.op]);
          rows[action.op] = action.row_end;
          const CudaPiece& piece = walk.pieces[action.piece];
          ASSERT_EQ(piece.segment, s);
          ASSERT_TRUE(piece.layout.resident || (segment.streams && piece.window == segment.window));
        }
      }
      ASSERT_EQ(walk.segments.back().action_end, walk.actions.size());
      ASSERT_EQ(walk.segments.back().piece_end, walk.pieces.size());
      ASSERT_EQ(rows.size(), binding.graph().ops().size());
      for (const Need& need : binding.needs()) {
        const Op& it = binding.graph().ops()[need.op];
        const bool product = it.kind == OpKind::kMatmul || it.kind == OpKind::kHead;
        ASSERT_EQ(rows[need.op], product ? it.width : 0) << it.name;
      }
    }
  }
}

TEST(CudaWalk, PiecesOfASlotAndPiecesThatStayNeverOverlapAndAreAligned) {
  const Binding binding = small_model();
  for (const std::size_t stay : {0U, 1U, 3U}) {
    const auto walk = testing::must(plan_cuda_walk(binding, cut(binding, 16, stay), 4 * kLargest));
    std::map<std::uint32_t, std::uint64_t> window_end;
    std::uint64_t resident_end = 0;
    for (std::size_t i = 0; i < walk.pieces.size(); ++i) {
      const CudaPiece& piece = walk.pieces[i];
      std::uint64_t& end = piece.layout.resident ? resident_end : window_end[piece.window];
      ASSERT_GE(piece.offset, end);
      end = piece.offset + piece.bytes;
      const bool run = piece.layout.resident && piece.layout.row_begin > 0 && walk.pieces[i - 1].layout.resident;
      ASSERT_TRUE(piece.offset % kCudaAlignment == 0 || run);
      ASSERT_LE(end, piece.layout.resident ? walk.resident_bytes : walk.slot_bytes);
    }
    EXPECT_LE(walk.slot_bytes, 4 * kLargest);
    EXPECT_EQ(window_end.size(), walk.windows);
    EXPECT_EQ(static_cast<std::size_t>(std::count_if(walk.segments.begin(), walk.segments.end(), [](const CudaSegment& s) { return s.streams; })), walk.windows);
  }
}

TEST(CudaWalk, WhatStaysWholeIsOneSegmentWithOneLaunchAMatrix) {
  const Binding binding = small_model();
  const auto walk = testing::must(plan_cuda_walk(binding, cut(binding, 16, 1), 0));
  EXPECT_EQ(walk.segments.size(), 1U);
  EXPECT_EQ(walk.windows, 0U);
  EXPECT_EQ(walk.slot_bytes, 0U);
  EXPECT_EQ(walk.actions.size(), binding.graph().ops().size());
}

// Each read of experts is a segment of its own, behind its router and before whatever reads its products; windows go on across it.
TEST(CudaWalk, ExpertsAreReadBetweenSegmentsInGraphOrder) {
  const Graph graph = testing::small_mixture({});
  std::vector<TensorInfo> tensors;
  for (const Parameter& parameter : graph.parameters()) tensors.push_back({parameter.name, DType::kF32, parameter.shape});
  const Binding binding = testing::must(graph.bind(tensors));
  for (const std::size_t stay : {0U, 1U, 3U}) {
    for (const std::uint64_t slot : {std::uint64_t{16 * 32 * 4}, std::uint64_t{5'000}, std::uint64_t{1} << 20}) {
      const auto walk = testing::must(plan_cuda_walk(binding, cut(binding, 16, stay), slot));
      std::vector<std::size_t> read;
      std::vector<bool> done(graph.ops().size());
      std::size_t piece = 0, action = 0;
      std::uint32_t window = 0;
      for (const CudaSegment& segment : walk.segments) {
        ASSERT_EQ(segment.piece_begin, piece);
        ASSERT_EQ(segment.action_begin, action);
        piece = segment.piece_end;
        action = segment.action_end;
        if (segment.streams) {
          ASSERT_GE(segment.window, window);
          ASSERT_LE(segment.window, window + 1);
          window = segment.window;
        }
        if (!segment.reads_experts()) {
          for (std::size_t i = segment.action_begin; i < segment.action_end; ++i) {
            const std::uint32_t op = walk.actions[i].op;
            for (const std::uint32_t input : graph.ops()[op].inputs) ASSERT_TRUE(done[input]) << graph.ops()[op].name;
            done[op] = true;
          }
          continue;
        }
        ASSERT_EQ(segment.action_begin, segment.action_end);
        ASSERT_EQ(segment.piece_begin, segment.piece_end);
        ASSERT_FALSE(segment.streams);
        const std::uint32_t op = binding.needs()[segment.experts].op;
        for (const std::uint32_t input : graph.ops()[op].inputs) ASSERT_TRUE(done[input]) << graph.ops()[op].name;
        ASSERT_FALSE(done[op]) << "the sum of an expert_combine comes behind its products";
        done[op] = graph.ops()[op].kind == OpKind::kExpertMatmul;
        read.push_back(segment.experts);
      }
      ASSERT_EQ(piece, walk.pieces.size());
      ASSERT_EQ(action, walk.actions.size());
      ASSERT_EQ(std::count(done.begin(), done.end(), true), static_cast<std::ptrdiff_t>(done.size()));
      ASSERT_EQ(read.size(), 6U);
      ASSERT_TRUE(std::is_sorted(read.begin(), read.end()));
    }
  }
}

TEST(CudaWalk, PiecesThatAreNotTheWalkAreRefusedByNumber) {
  const Binding binding = small_model();
  const auto refused = [&](std::vector<PieceLayout> pieces, std::string_view part, std::uint64_t slot = 1 << 20) {
    const auto walk = plan_cuda_walk(binding, pieces, slot);
    ASSERT_FALSE(walk.ok());
    EXPECT_EQ(walk.error().code(), Code::kInvalid);
    EXPECT_NE(walk.error().message().find(part), std::string::npos) << walk.error().message();
  };
  const std::vector<PieceLayout> right = cut(binding, 16, 0);
  auto pieces = right;
  pieces.pop_back();
  refused(pieces, "missing");
  pieces = right;
  std::swap(pieces[1], pieces[2]);
  refused(pieces, "piece 1");
  pieces = right;
  pieces.push_back(right.back());
  refused(pieces, "needs no more");
  pieces = right;
  pieces[0].resident = false;  // a norm
  refused(pieces, "vector");
  refused(right, "a slot of", kLargest - 1);
}

}  // namespace
}  // namespace paramwire
