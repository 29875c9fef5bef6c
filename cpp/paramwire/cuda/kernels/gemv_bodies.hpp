// Bodies of gemv and expert_gemv: products of few tokens, bound by reading the weights once.
//
// A warp takes one or two rows, and of each column block every lane 16 bytes a row; four steps are in flight together. On an H200 (4.8
// TB/s, 132 multiprocessors, about 600 ns to memory) 22 KiB of loads a multiprocessor hide the latency; 16 warps of one row with four
// steps have 32 KiB, and 24 of them are resident. x comes from the first-level cache, which the weights' loads pass by.
#pragma once

#include "paramwire/cuda/kernels/numbers.hpp"

namespace paramwire::cuda {

// Warps of a block. Four, so that a matrix of 576 rows still makes 144 blocks.
inline constexpr std::uint32_t kGemvWarps = 4;

// Rows that a warp takes at once. Two halve what is read of x, which is worth more with several tokens, and with so many rows that the
// device is full all the same.
PARAMWIRE_HOST_BODY std::uint32_t gemv_rows_per_warp(const GemvArgs& args) { return args.tokens > 1 || args.rows >= 8192 ? 2 : 1; }

// This lane's sums of products, for kRows rows and kTokens vectors. Arrays are of constant size, and loops over them unrolled: registers.
template <std::uint32_t kRows, std::uint32_t kTokens>
struct Dots {
  float value[kRows][kTokens] = {};
};

template <typename Weight, std::uint32_t kRows, std::uint32_t kTokens, typename Lane>
PARAMWIRE_BODY Dots<kRows, kTokens> dot_rows(const Lane& lane, const unsigned char* const (&rows)[kRows], const float* const (&x)[kTokens],
                                             std::uint32_t columns, bool packed) {
  constexpr std::uint32_t kSteps = 4 / kRows, kStep = kWarp * Weight::kPerPack;
  Dots<kRows, kTokens> dots;
  const std::uint32_t whole = packed ? columns : 0;
  for (std::uint32_t first = lane.lane_in_warp() * Weight::kPerPack; first < whole; first += kSteps * kStep) {
    // All loads before all sums, and those behind the row's end left out one by one: a loop that may end between two loads has one in
    // flight, and rows of small models are shorter than four steps.
    Pack packs[kSteps][kRows] = {};
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t s = 0; s < kSteps; ++s) {
      PARAMWIRE_UNROLL(4)
      for (std::uint32_t r = 0; r < kRows; ++r) {
        if (first + s * kStep < whole) packs[s][r] = load_pack_once(rows[r] + std::uint64_t{first + s * kStep} * Weight::kBytes);
      }
    }
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t s = 0; s < kSteps; ++s) {
      if (first + s * kStep >= whole) continue;
      PARAMWIRE_UNROLL(4)
      for (std::uint32_t t = 0; t < kTokens; ++t) {
        PARAMWIRE_UNROLL(4)
        for (std::uint32_t r = 0; r < kRows; ++r) dots.value[r][t] = add_dot<Weight>(dots.value[r][t], packs[s][r], x[t] + first + s * kStep);
      }
    }
  }
  for (std::uint32_t column = whole + lane.lane_in_warp(); column < columns; column += kWarp) {
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t r = 0; r < kRows; ++r) {
      const float value = Weight::get(rows[r], column);
      PARAMWIRE_UNROLL(4)
      for (std::uint32_t t = 0; t < kTokens; ++t) dots.value[r][t] += value * x[t][column];
    }
  }
  return dots;
}

// Rows from `row` on, tokens from 0 on. Those that aren't there are computed for the last that is, and not stored.
template <typename Weight, std::uint32_t kRows, std::uint32_t kTokens, typename Lane>
PARAMWIRE_BODY void gemv_rows(const Lane& lane, const GemvArgs& args, std::uint32_t row, bool packed) {
  const auto* weight = static_cast<const unsigned char*>(args.weight);
  const unsigned char* rows[kRows];
  const float* x[kTokens];
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t r = 0; r < kRows; ++r) {
    rows[r] = weight + (row + r < args.rows ? row + r : args.rows - 1) * (std::uint64_t{args.columns} * Weight::kBytes);
  }
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t t = 0; t < kTokens; ++t) x[t] = args.x + (t < args.tokens ? t : args.tokens - 1) * args.x_stride;
  const Dots<kRows, kTokens> dots = dot_rows<Weight, kRows, kTokens>(lane, rows, x, args.columns, packed);
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t r = 0; r < kRows; ++r) {
    PARAMWIRE_UNROLL(4)
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      float sum = lane.warp_sum(dots.value[r][t]);
      if (lane.lane_in_warp() != 0 || row + r >= args.rows || t >= args.tokens) continue;
      float* out = args.out + t * args.out_stride + row + r;
      if (args.bias != nullptr) sum += Weight::get(args.bias, row + r);
      if (args.accumulate != 0) sum += *out;
      *out = sum;
    }
  }
}

template <typename Weight, typename Lane>
PARAMWIRE_BODY void gemv_body(const Lane& lane, const GemvArgs& args) {
  // Rows of packs begin at multiples of 16 bytes when one row is a multiple of it, or there is only one.
  const bool packed = aligned_to(args.weight, 16) && args.columns % Weight::kPerPack == 0 && aligned_to(args.x, 16) &&
                      (args.tokens == 1 || args.x_stride % 4 == 0);
  const std::uint32_t per_warp = gemv_rows_per_warp(args);
  const std::uint64_t row = (std::uint64_t{lane.block_x()} * kGemvWarps + lane.warp()) * per_warp;
  if (row >= args.rows) return;  // a whole warp
  const auto first = static_cast<std::uint32_t>(row);
  if (args.tokens > 2) {
    gemv_rows<Weight, 2, kGemvTokensMax>(lane, args, first, packed);
  } else if (args.tokens == 2) {
    gemv_rows<Weight, 2, 2>(lane, args, first, packed);
  } else if (per_warp == 2) {
    gemv_rows<Weight, 2, 1>(lane, args, first, packed);
  } else {
    gemv_rows<Weight, 1, 1>(lane, args, first, packed);
  }
}

// ---------------------------------------------------------------- experts

template <typename Weight, typename Lane>
PARAMWIRE_BODY void expert_body(const Lane& lane, const ExpertArgs& args) {
  const std::uint64_t row = std::uint64_t{lane.block_x()} * kGemvWarps + lane.warp();
  if (row >= args.rows) return;
  const std::uint64_t row_bytes = std::uint64_t{args.columns} * Weight::kBytes;
  const bool packed = aligned_to(args.weights, 16) && args.columns % Weight::kPerPack == 0 && aligned_to(args.x, 16);
  const std::uint64_t token = lane.block_z();
  const float* routing = args.routing + token * 2 * args.k;
  const auto product = [&](std::uint32_t slot, const float* x) {
    const std::uint64_t place = args.place_of[static_cast<std::uint32_t>(routing[slot])];
    const unsigned char* const rows[1] = {static_cast<const unsigned char*>(args.weights) + (place * args.rows + row) * row_bytes};
    const float* const vectors[1] = {x};
    return lane.warp_sum(dot_rows<Weight, 1, 1>(lane, rows, vectors, args.columns, packed).value[0][0]);
  };
  if (args.combine == 0) {
    const std::uint32_t slot = lane.block_y();
    const float value = product(slot, args.x + token * args.columns);
    if (lane.lane_in_warp() == 0) args.out[(token * args.k + slot) * args.rows + row] = value;
    return;
  }
  float sum = 0;
  for (std::uint32_t slot = 0; slot < args.k; ++slot) sum += routing[args.k + slot] * product(slot, args.x + (token * args.k + slot) * args.columns);
  if (lane.lane_in_warp() == 0) args.out[token * args.rows + row] = sum;
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
