// Bodies of mixtures of experts: routing, the products of the experts that were fetched, and their sum.
//
// A step's picks are grouped by expert, so that an expert's rows are read from memory once for four of the vectors that picked it, as gemv
// does with tokens; further fours find them in the second-level cache.
#pragma once

#include "paramwire/cuda/kernels/gemv_bodies.hpp"

namespace paramwire::cuda {

// As gemv_rows_per_warp: experts lie side by side in a grid, so their rows add up.
PARAMWIRE_HOST_BODY std::uint32_t expert_rows_per_warp(const ExpertArgs& args) {
  return args.picks_max > 1 || std::uint64_t{args.rows} * args.experts >= 8192 ? 2 : 1;
}

// Rows from `row` on of the expert at `weight`, for `count` picks. Those that aren't there are computed for the last that is, and not stored.
template <typename Weight, std::uint32_t kRows, std::uint32_t kPicks, typename Lane>
PARAMWIRE_BODY void expert_rows(const Lane& lane, const ExpertArgs& args, const unsigned char* weight, std::uint32_t row, const std::uint32_t* picks,
                                std::uint32_t count, bool packed) {
  const unsigned char* rows[kRows];
  const float* x[kPicks];
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t r = 0; r < kRows; ++r) {
    rows[r] = weight + (row + r < args.rows ? row + r : args.rows - 1) * (std::uint64_t{args.columns} * Weight::kBytes);
  }
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t t = 0; t < kPicks; ++t) x[t] = args.x + std::uint64_t{picks[t < count ? t : count - 1] / args.share} * args.columns;
  const Dots<kRows, kPicks> dots = dot_rows<Weight, kRows, kPicks>(lane, rows, x, args.columns, packed);
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t r = 0; r < kRows; ++r) {
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t t = 0; t < kPicks; ++t) {
      const float sum = lane.warp_sum(dots.value[r][t]);
      if (lane.lane_in_warp() == 0 && row + r < args.rows && t < count) args.out[std::uint64_t{picks[t]} * args.rows + row + r] = sum;
    }
  }
}

template <typename Weight, typename Lane>
PARAMWIRE_BODY void expert_body(const Lane& lane, const ExpertArgs& args) {
  const bool packed = aligned_to(args.weights, 16) && args.columns % Weight::kPerPack == 0 && aligned_to(args.x, 16);
  const std::uint32_t per_warp = expert_rows_per_warp(args), expert = lane.block_y();
  const std::uint64_t row = (std::uint64_t{lane.block_x()} * kGemvWarps + lane.warp()) * per_warp;
  if (row >= args.rows) return;  // a whole warp
  const auto* weight = static_cast<const unsigned char*>(args.weights) + expert * (std::uint64_t{args.rows} * args.columns * Weight::kBytes);
  const auto first = static_cast<std::uint32_t>(row);
  const std::uint32_t end = args.begin[expert + 1];
  for (std::uint32_t at = args.begin[expert] + lane.block_z() * kGemvTokensMax; at < end; at += lane.blocks_z() * kGemvTokensMax) {
    const std::uint32_t count = end - at < kGemvTokensMax ? end - at : kGemvTokensMax;
    const std::uint32_t* picks = args.picks + at;
    if (count > 2) {
      expert_rows<Weight, 2, kGemvTokensMax>(lane, args, weight, first, picks, count, packed);
    } else if (count == 2) {
      expert_rows<Weight, 2, 2>(lane, args, weight, first, picks, count, packed);
    } else if (per_warp == 2) {
      expert_rows<Weight, 2, 1>(lane, args, weight, first, picks, count, packed);
    } else {
      expert_rows<Weight, 1, 1>(lane, args, weight, first, picks, count, packed);
    }
  }
}

// A thread an output: neighbours read neighbours, slot after slot.
template <typename Lane>
PARAMWIRE_BODY void expert_sum_body(const Lane& lane, const ExpertSumArgs& args) {
  const std::uint64_t token = lane.block_y();
  const float* weights = args.routing + token * 2 * args.k + args.k;
  const float* products = args.products + token * args.k * args.rows;
  for (std::uint64_t row = std::uint64_t{lane.block_x()} * lane.threads() + lane.thread(); row < args.rows; row += std::uint64_t{lane.blocks_x()} * lane.threads()) {
    float sum = 0;
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t slot = 0; slot < args.k; ++slot) sum += weights[slot] * products[std::uint64_t{slot} * args.rows + row];
    args.out[token * args.rows + row] = sum;
  }
}

// ---------------------------------------------------------------- top k: a warp a token

// Larger for larger scores; both zeros are one; 1 for what is not a number, 0 is for what is taken.
PARAMWIRE_BODY std::uint32_t score_key(float score) {
  const std::uint32_t bits = bits_of(score + 0.0F);
  if ((bits & 0x7fffffff) > kF32InfinityBits) return 1;
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

// A lane looks after the experts whose number is its own modulo 32, so that shared memory is read by who wrote it.
template <typename Lane>
PARAMWIRE_BODY void top_k_body(const Lane& lane, const TopKArgs& args) {
  auto* keys = lane.template shared<std::uint32_t>();
  const float* scores = args.scores + std::uint64_t{lane.block_x()} * args.experts;
  float* numbers = args.routing + std::uint64_t{lane.block_x()} * 2 * args.k;
  float* weights = numbers + args.k;
  const std::uint32_t mine = lane.lane_in_warp();
  for (std::uint32_t i = mine; i < args.experts; i += kWarp) keys[i] = score_key(scores[i]);
  float most = 0, sum = 0;
  for (std::uint32_t slot = 0; slot < args.k; ++slot) {
    std::uint32_t key = 0, expert = 0;
    for (std::uint32_t i = mine; i < args.experts; i += kWarp) {
      if (keys[i] <= key) continue;
      key = keys[i];
      expert = i;
    }
    for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) {
      const std::uint32_t other_key = lane.warp_xor(key, mask), other = lane.warp_xor(expert, mask);
      if (other_key > key || (other_key == key && other < expert)) {
        key = other_key;
        expert = other;
      }
    }
    if (expert % kWarp == mine) keys[expert] = 0;
    if (slot == 0) most = scores[expert];
    const float weight = expf(scores[expert] - most);
    sum += weight;
    if (slot % kWarp != mine) continue;
    numbers[slot] = static_cast<float>(expert);
    weights[slot] = weight;
  }
  if (args.normalise == 0) {
    sum = 0;
    for (std::uint32_t i = mine; i < args.experts; i += kWarp) sum += expf(scores[i] - most);
    sum = lane.warp_sum(sum);
  }
  for (std::uint32_t slot = mine; slot < args.k; slot += kWarp) weights[slot] /= sum;
}

}  // namespace paramwire::cuda
