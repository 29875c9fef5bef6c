// Bodies of gemv: products of few tokens, bound by reading the weights once.
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

}  // namespace paramwire::cuda
