// The inner loops of the CPU backend that a BLAS has no routine for: products over bf16 and f16 rows as they are stored,
// widening, and sums of scaled rows. Chosen once at run time by what the processor has.
//
// Why our own: a decode step multiplies each weight once, so it is bound by reading the weights. BLAS libraries read float32
// only (their bf16 products are matrix times matrix, or missing); widening a tile and then calling sgemv moves each weight
// three times. Measured on a two-core Xeon guest, bf16 [rows, 576], one thread, weights in memory: this loop with AVX-512
// 10.2 GB/s of CPU time (reading alone 13.4); widening and OpenBLAS 0.3.21 sgemv 2.5.
#pragma once

#include "paramwire/base/types.hpp"

#include <cstddef>
#include <span>

namespace paramwire::kernels {

// Rows of weights in memory. `data` is aligned to its element.
struct Rows {
  const std::byte* data = nullptr;
  std::size_t count = 0;
  std::size_t columns = 0;
  std::size_t stride_bytes = 0;  // from one row to the next
};

// y[t * y_stride + r] = (accumulate ? itself : 0) + sum over c of rows[r][c] * x[t * x_stride + c], in float32.
using DotRows = void (*)(const Rows& rows, const float* x, std::size_t x_stride, std::size_t tokens, float* y,
                         std::size_t y_stride, bool accumulate);
// target[i] = source[i] as float32, exactly, `count` elements.
using Widen = void (*)(const std::byte* source, float* target, std::size_t count);
// y[c] = sum over r of weights[r] * rows[r * columns + c]; y holds `columns` floats.
using MixRows = void (*)(const float* weights, const float* rows, std::size_t count, std::size_t columns, float* y);

// One processor level. Arrays are indexed by format_index().
struct Set {
  const char* name = "";  // "avx512", "avx2", "portable"
  DotRows dot_rows[3] = {};
  Widen widen[3] = {};
  MixRows mix_rows = nullptr;
};

// 0 f32, 1 bf16, 2 f16. Precondition: one of these three, as Graph::bind() checks.
constexpr std::size_t format_index(DType dtype) noexcept {
  return dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 1 : 2;
}

// Sets that this processor can run, best first; the last is always "portable".
std::span<const Set* const> usable_sets() noexcept;

}  // namespace paramwire::kernels
