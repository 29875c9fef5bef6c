// Products of few tokens, against double-precision loops and the CPU backend's own.
#include "cpp/cuda_kernels_rig.hpp"

#include "paramwire/compute/kernels.hpp"
#include "paramwire/cuda/kernels/gemv_bodies.hpp"

#include <array>

namespace paramwire::testing {
namespace {

using namespace cuda;

class CudaGemv : public CudaKernels {};

struct GemvCase {
  std::uint32_t rows, columns, tokens;
  std::size_t weight_offset = 0, x_offset = 0;
  bool accumulate = false, bias = false;
};

void check_gemv(LaneExecutor& executor, int format, const GemvCase& it, std::uint64_t seed) {
  Weights weight(format, std::size_t{it.rows} * it.columns, seed, it.weight_offset);
  const Weights bias(format, it.rows, seed + 1);
  const std::size_t x_stride = it.columns + (seed % 2) * 3, out_stride = it.rows + 5;
  Array<float> x(it.tokens * x_stride, it.x_offset), out(it.tokens * out_stride), before(out.size());
  fill_random(x, seed + 2);
  fill_random(out, seed + 3);
  std::copy(out.begin(), out.end(), before.begin());
  const GemvArgs args{.weight = weight.data(), .x = x.data(), .out = out.data(), .bias = it.bias ? bias.data() : nullptr, .rows = it.rows, .columns = it.columns,
                      .tokens = it.tokens, .x_stride = x_stride, .out_stride = out_stride, .accumulate = it.accumulate ? 1U : 0U};
  const Launch launch = gemv_launch(args);
  ASSERT_EQ(launch.blocks[0], (it.rows + kGemvWarps * gemv_rows_per_warp(args) - 1) / (kGemvWarps * gemv_rows_per_warp(args)));
  ASSERT_EQ(run_kernel(executor, std::string("gemv") + kFormats[format], launch, args, seed), "");
  for (std::uint32_t token = 0; token < it.tokens; ++token) {
    for (std::uint32_t row = 0; row < out_stride; ++row) {
      const std::size_t at = token * out_stride + row;
      if (row >= it.rows) {
        ASSERT_EQ(out[at], before[at]) << "behind the rows";
        continue;
      }
      Product product;
      for (std::uint32_t c = 0; c < it.columns; ++c) product.add(static_cast<double>(weight.get(std::size_t{row} * it.columns + c)), static_cast<double>(x[token * x_stride + c]));
      if (it.bias) product.add(static_cast<double>(bias.get(row)), 1);
      if (it.accumulate) product.add(static_cast<double>(before[at]), 1);
      ASSERT_TRUE(near(out[at], product.value, product.bound(it.columns)))
          << kFormats[format] << " rows " << it.rows << " columns " << it.columns << " tokens " << it.tokens << ": row " << row << " token " << token;
    }
  }
}

TEST_F(CudaGemv, ProductsAreWithinTheBoundOfSummation) {
  std::uint64_t seed = 0;
  for (int format = 0; format < 3; ++format) {
    for (const std::uint32_t columns : {1U, 7U, 8U, 64U, 250U, 256U, 576U, 1000U, 2056U}) {
      for (std::uint32_t tokens = 1; tokens <= kGemvTokensMax; ++tokens) {
        const std::uint32_t rows = std::array{1U, 3U, 9U, 17U}[seed % 4];
        check_gemv(executor_, format, {.rows = rows, .columns = columns, .tokens = tokens, .weight_offset = seed % 3 == 1 ? 1U : 0U, .x_offset = seed % 5 == 2 ? 1U : 0U,
                                       .accumulate = seed % 2 == 0, .bias = seed % 3 == 0},
                   seed);
        ++seed;
      }
    }
  }
}

TEST_F(CudaGemv, ManyRowsTakeTwoAWarpAndAllAreThere) {
  for (int format = 0; format < 3; ++format) {
    check_gemv(executor_, format, {.rows = 8193, .columns = 32, .tokens = 1}, 1);
    check_gemv(executor_, format, {.rows = 8192, .columns = 24, .tokens = 1}, 2);
    check_gemv(executor_, format, {.rows = 8191, .columns = 16, .tokens = 1}, 4);
  }
}

TEST_F(CudaGemv, NotANumberStaysInItsRowAndToken) {
  for (int format = 0; format < 3; ++format) {
    const std::uint32_t rows = 7, columns = 520, tokens = 3;
    Weights weight(format, std::size_t{rows} * columns, 1);
    Array<float> x(std::size_t{tokens} * columns), out(std::size_t{tokens} * rows);
    fill_random(x, 2);
    weight.set(2 * columns + 517, kNaN);
    weight.set(4 * columns + 3, kInf);
    x[columns + 300] = kNaN;
    const GemvArgs args{.weight = weight.data(), .x = x.data(), .out = out.data(), .bias = nullptr, .rows = rows, .columns = columns, .tokens = tokens,
                        .x_stride = columns, .out_stride = rows, .accumulate = 0};
    run(std::string("gemv") + kFormats[format], gemv_launch(args), args);
    for (std::uint32_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(std::isnan(out[i]), i % rows == 2 || i / rows == 1) << i;
      ASSERT_EQ(std::isinf(out[i]), i % rows == 4 && i / rows != 1) << i;
    }
  }
}

TEST_F(CudaGemv, AgreesWithTheCpuBackendsLoop) {
  const std::uint32_t rows = 37, columns = 576;
  for (int format = 0; format < 3; ++format) {
    const Weights weight(format, std::size_t{rows} * columns, 5);
    Array<float> x(columns), out(rows), cpu(rows);
    fill_random(x, 6);
    const GemvArgs args{.weight = weight.data(), .x = x.data(), .out = out.data(), .bias = nullptr, .rows = rows, .columns = columns, .tokens = 1, .x_stride = columns,
                        .out_stride = rows, .accumulate = 0};
    run(std::string("gemv") + kFormats[format], gemv_launch(args), args);
    const std::size_t element = format == 0 ? 4 : 2;
    for (const kernels::Set* set : kernels::usable_sets()) {
      set->dot_rows[format]({static_cast<const std::byte*>(weight.data()), rows, columns, columns * element}, x.data(), columns, 1, cpu.data(), rows, false);
      for (std::uint32_t row = 0; row < rows; ++row) {
        Product product;
        for (std::uint32_t c = 0; c < columns; ++c) product.add(static_cast<double>(weight.get(std::size_t{row} * columns + c)), static_cast<double>(x[c]));
        // Two computations, each within the bound of the one true sum; the CPU's lanes are at least 8.
        ASSERT_TRUE(near(out[row], static_cast<double>(cpu[row]), product.bound(columns) + gamma_of(columns / 8.0 + 10) * product.size)) << set->name;
      }
    }
  }
}

}  // namespace
}  // namespace paramwire::testing
