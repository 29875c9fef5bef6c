// Kernels that go element by element or row by row, against plain double-precision loops.
#include "cpp/cuda_kernels_rig.hpp"

namespace paramwire::testing {
namespace {

using namespace cuda;

class CudaElementwise : public CudaKernels {};

TEST_F(CudaElementwise, EmbeddingWidensTheRowsThatAreNamed) {
  for (int format = 0; format < 3; ++format) {
    for (const std::uint32_t width : {1U, 31U, 576U, 2051U}) {
      const Weights rows(format, std::size_t{5} * width, width, width % 2);
      Array<std::uint32_t> row_of(4);
      row_of[0] = 4, row_of[1] = 0, row_of[2] = 4, row_of[3] = 2;
      Array<float> out(std::size_t{4} * width, 1);
      const EmbeddingArgs args{.rows = rows.data(), .row_of = row_of.data(), .out = out.data(), .tokens = 4, .width = width};
      const Launch launch = embedding_launch(args);
      EXPECT_EQ(launch.blocks[0], 4U);
      run(std::string("embedding") + kFormats[format], launch, args, width);
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], rows.get(row_of[i / width] * std::size_t{width} + i % width));
    }
  }
}

// s, and what a norm makes of it, with the bound of its rounding.
struct NormOracle {
  std::vector<double> sum, out, bound;
};
NormOracle norm_oracle(bool centred, const Array<float>& x, const Array<float>* add, const Weights& weight, const Weights* bias, std::uint32_t width, double epsilon,
                       std::uint32_t threads) {
  NormOracle oracle;
  for (std::size_t row = 0; row < x.size() / width; ++row) {
    double mean = 0, squares = 0, size = 0;
    for (std::uint32_t i = 0; i < width; ++i) {
      const std::size_t at = row * width + i;
      oracle.sum.push_back(add == nullptr ? static_cast<double>(x[at]) : static_cast<double>(x[at] + (*add)[at]));  // in float: what goes on
      mean += oracle.sum.back() / width;
      size = std::max(size, std::abs(oracle.sum.back()));
    }
    if (!centred) mean = 0;
    for (std::uint32_t i = 0; i < width; ++i) squares += std::pow(oracle.sum[row * width + i] - mean, 2);
    const double root = std::sqrt(squares / width + epsilon);
    // Additions on the longest way to a sum: a thread's own, the tree of a warp, the tree of warps; the mean is off by that much of the largest.
    const double additions = std::ceil(static_cast<double>(width) / threads) + 12;
    const double mean_error = centred ? gamma_of(additions) * size : 0;
    const double relative = gamma_of(additions / 2 + 8) + 2 * mean_error / root;
    for (std::uint32_t i = 0; i < width; ++i) {
      const double w = static_cast<double>(weight.get(i)), b = bias == nullptr ? 0 : static_cast<double>(bias->get(i));
      const double value = (oracle.sum[row * width + i] - mean) / root * w;
      oracle.out.push_back(value + b);
      oracle.bound.push_back(std::abs(value) * relative + std::abs(w) * mean_error / root * 2 + std::abs(value + b) * 2 * kUnit + 1e-30);
    }
  }
  return oracle;
}

TEST_F(CudaElementwise, NormsAreWithinTheBoundsOfTheirSums) {
  std::uint64_t round = 0;
  for (const bool centred : {false, true}) {
    for (int format = 0; format < 3; ++format) {
      for (const std::uint32_t width : {1U, 5U, 64U, 576U, 2500U}) {
        for (const bool adds : {false, true}) {
          const std::uint64_t seed = round++;
          const std::uint32_t tokens = 3;
          const Half half = static_cast<Half>(seed % 3);
          Array<float> x(std::size_t{tokens} * width, seed % 2), add(x.size(), seed % 3), sum(x.size()), out(x.size());
          Array<std::uint16_t> out16(x.size(), 1);
          fill_random(x, seed + 1, -2, 3);
          fill_random(add, seed + 2);
          const Weights weight(format, width, seed + 3), bias(format, width, seed + 4);
          const bool biased = centred && seed % 2 == 0;
          NormArgs args{.x = x.data(), .add = adds ? add.data() : nullptr, .sum = sum.data(), .weight = weight.data(), .bias = biased ? bias.data() : nullptr,
                        .out = out.data(), .out16 = half == Half::kNone ? nullptr : out16.data(), .half = half, .tokens = tokens, .width = width, .epsilon = 1e-5F};
          const Launch launch = norm_launch(args);
          EXPECT_EQ(launch.blocks[0], tokens);
          const NormOracle oracle = norm_oracle(centred, x, adds ? &add : nullptr, weight, biased ? &bias : nullptr, width, 1e-5, launch.threads);
          // In place: the sum into x, the value into x where nothing is added.
          const bool in_place = seed % 4 == 1;
          if (in_place) (adds ? args.sum : args.out) = x.data();
          run(std::string(centred ? "layer_norm" : "rms_norm") + kFormats[format], launch, args, seed);
          const Array<float>& result = in_place && !adds ? x : out;
          for (std::size_t i = 0; i < out.size(); ++i) {
            ASSERT_TRUE(near(result[i], oracle.out[i], oracle.bound[i])) << "width " << width << ", round " << seed << ", element " << i;
            if (half != Half::kNone) {
              ASSERT_EQ(out16[i], narrowed(half, result[i]));
            }
            if (adds) {
              ASSERT_EQ(static_cast<double>(args.sum[i]), oracle.sum[i]);
            }
          }
        }
      }
    }
  }
}

TEST_F(CudaElementwise, NotANumberStaysInItsRow) {
  const std::uint32_t width = 70;
  Array<float> x(std::size_t{3} * width), out(x.size());
  fill_random(x, 1);
  x[width + 33] = kNaN;
  const Weights weight(0, width, 2);
  const NormArgs norm{.x = x.data(), .add = nullptr, .sum = nullptr, .weight = weight.data(), .bias = nullptr, .out = out.data(), .out16 = nullptr,
                      .half = Half::kNone, .tokens = 3, .width = width, .epsilon = 0};
  const SoftmaxArgs softmax{.x = x.data(), .out = out.data(), .rows = 3, .width = width};
  const auto check = [&] {
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(std::isnan(out[i]), i / width == 1) << i;
  };
  run("rms_norm_f32", norm_launch(norm), norm);
  check();
  run("layer_norm_f32", norm_launch(norm), norm);
  check();
  run("softmax", softmax_launch(softmax), softmax);
  check();
}

TEST_F(CudaElementwise, RotaryTablesAreRightToTheLastPlace) {
  const std::uint32_t pairs = 67, tokens = 3;
  Array<double> turns(pairs);
  for (std::uint32_t i = 0; i < pairs; ++i) turns[i] = std::pow(10000.0, -static_cast<double>(i) / pairs);
  for (const std::uint32_t position : {0U, 1U, 511U, 8191U, 131070U, 1048570U}) {
    const StepState state{.position = position, .tokens = tokens, .generation = 0, .met = kNoGeneration};
    Array<float> cosines(std::size_t{tokens} * pairs), sines(cosines.size());
    const RotaryTableArgs args{.state = &state, .turns = turns.data(), .cosines = cosines.data(), .sines = sines.data(), .tokens = tokens, .pairs = pairs};
    run("rotary_table", rotary_table_launch(args), args, position);
    for (std::uint32_t i = 0; i < cosines.size(); ++i) {
      const double angle = (position + i / pairs) * turns[i % pairs];
      // Half a unit of float32 for the cast, and the reduction's and series' 1e-12.
      ASSERT_TRUE(near(cosines[i], std::cos(angle), std::abs(std::cos(angle)) * kUnit * 1.001 + 1e-12)) << angle;
      ASSERT_TRUE(near(sines[i], std::sin(angle), std::abs(std::sin(angle)) * kUnit * 1.001 + 1e-12)) << angle;
    }
  }
}

TEST_F(CudaElementwise, RotaryTurnsPairsOfEitherLayoutAndKeepsTheRest) {
  for (const std::uint32_t interleaved : {0U, 1U}) {
    for (const auto& [heads, size, pairs] : {std::array{1U, 2U, 1U}, {9U, 64U, 32U}, {3U, 80U, 16U}, {5U, 7U, 3U}}) {
      const std::uint32_t tokens = 4, width = heads * size;
      Array<float> x(std::size_t{tokens} * width), out(x.size()), cosines(std::size_t{tokens} * pairs), sines(cosines.size());
      fill_random(x, width);
      fill_random(cosines, 1);
      fill_random(sines, 2);
      RotaryArgs args{.x = x.data(), .out = out.data(), .cosines = cosines.data(), .sines = sines.data(), .tokens = tokens, .heads = heads, .head_size = size,
                      .pairs = pairs, .interleaved = interleaved};
      run("rotary", rotary_launch(args), args, 1);
      for (std::uint32_t i = 0; i < x.size(); ++i) {
        const std::uint32_t token = i / width, d = i % size, base = i - d;
        if (d >= 2 * pairs) {
          ASSERT_EQ(out[i], x[i]);
          continue;
        }
        const std::uint32_t pair = interleaved != 0 ? d / 2 : d % pairs;
        const std::uint32_t first = base + (interleaved != 0 ? 2 * pair : pair), second = interleaved != 0 ? first + 1 : first + pairs;
        const double a = static_cast<double>(x[first]), b = static_cast<double>(x[second]);
        const double c = static_cast<double>(cosines[token * pairs + pair]), s = static_cast<double>(sines[token * pairs + pair]);
        const double expected = i == first ? a * c - b * s : a * s + b * c;
        ASSERT_TRUE(near(out[i], expected, gamma_of(2) * (std::abs(a) + std::abs(b)))) << i;
      }
      Array<float> in_place(x.size());
      std::copy(x.begin(), x.end(), in_place.begin());
      args.x = args.out = in_place.data();
      run("rotary", rotary_launch(args), args, 2);
      for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(in_place[i], out[i]);
    }
  }
}

TEST_F(CudaElementwise, CacheTakesTheStepAtItsPositionAndNothingBeyondItsEnd) {
  const std::uint32_t kv_heads = 3, size = 5, context = 7, tokens = 4;
  Array<float> key(std::size_t{tokens} * kv_heads * size), value(key.size());
  fill_random(key, 1);
  fill_random(value, 2);
  for (const std::uint32_t position : {0U, 3U, 5U, 7U}) {
    const StepState state{.position = position, .tokens = tokens, .generation = 0, .met = kNoGeneration};
    Array<float> keys(std::size_t{kv_heads} * context * size, 0, 9.0F), values(keys.size(), 0, 8.0F);
    const CacheWriteArgs args{.state = &state, .key = key.data(), .value = value.data(), .keys = keys.data(), .values = values.data(), .tokens = tokens,
                              .kv_heads = kv_heads, .head_size = size, .context = context};
    run("cache_write", cache_write_launch(args), args, 3);
    for (std::uint32_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t head = i / (context * size), at = i / size % context, d = i % size;
      const bool written = at >= position && at < position + tokens;
      const std::size_t from = written ? (std::size_t{at - position} * kv_heads + head) * size + d : 0;
      ASSERT_EQ(keys[i], written ? key[from] : 9.0F);
      ASSERT_EQ(values[i], written ? value[from] : 8.0F);
    }
  }
}

struct PairCase {
  const char* name;
  double (*of)(double, double);
  bool two;
  double units;  // of rounding, relative to the largest intermediate
};
// silu: exp to 2 units (CUDA C++ Programming Guide, "Mathematical Functions", expf and erff 2 units, tanhf 2), four operations.
const PairCase kPairs[] = {
    {"add", [](double a, double b) { return a + b; }, true, 1},
    {"swiglu", [](double a, double b) { return a / (1 + std::exp(-a)) * b; }, true, 10},
    {"gelu", [](double a, double) { return 0.5 * a * (1 + std::erf(a / std::sqrt(2.0))); }, false, 10},
    {"gelu_tanh", [](double a, double) { return 0.5 * a * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (a + 0.044715 * a * a * a))); }, false, 16}};

TEST_F(CudaElementwise, PairsAreRightForEveryAlignmentAndLength) {
  std::uint64_t round = 0;
  for (const PairCase& it : kPairs) {
    for (const std::size_t count : {0U, 1U, 3U, 4U, 1023U, 5000U}) {
      for (const std::size_t offset : {0U, 1U}) {
        const Half half = static_cast<Half>(round % 3);
        const bool narrow_only = round++ % 5 == 4 && half != Half::kNone;
        Array<float> left(count, offset), right(count), out(count);
        Array<std::uint16_t> out16(count, offset);
        fill_random(left, round, -8, 8);
        fill_random(right, round + 1, -2, 2);
        const PairArgs args{.left = left.data(), .right = it.two ? right.data() : nullptr, .out = narrow_only ? nullptr : out.data(),
                            .out16 = half == Half::kNone ? nullptr : out16.data(), .half = half, .count = count};
        run(it.name, pair_launch(args), args, round);
        for (std::size_t i = 0; i < count; ++i) {
          const double a = static_cast<double>(left[i]), b = static_cast<double>(right[i]), expected = it.of(a, b);
          // The terms of 1 + erf and 1 + tanh may cancel: the bound is of a, not of the result.
          const double size = std::abs(it.two ? expected : a);
          if (!narrow_only) {
            ASSERT_TRUE(near(out[i], expected, it.units * kUnit * size)) << it.name << " of " << a << " and " << b;
          }
          if (half != Half::kNone && !narrow_only) {
            ASSERT_EQ(out16[i], narrowed(half, out[i]));
          }
          // bfloat16 has 8 bits: half a unit of it more.
          if (narrow_only && half == Half::kBF16) {
            ASSERT_TRUE(near(std::bit_cast<float>(f32_from_bf16(out16[i])), expected, std::abs(expected) * 0x1p-8 + 1e-5));
          }
        }
      }
    }
  }
}

TEST_F(CudaElementwise, PairsBeyondTheLargestGridAreAllDone) {
  const std::size_t count = std::size_t{4} * 256 * 2560 + 4099;
  Array<float> left(count, 0, 1.0F), right(count, 0, 2.0F);
  const PairArgs args{.left = left.data(), .right = right.data(), .out = left.data(), .out16 = nullptr, .half = Half::kNone, .count = count};
  const Launch launch = pair_launch(args);
  EXPECT_EQ(launch.blocks[0], 2560U);
  run("add", launch, args);
  EXPECT_TRUE(std::all_of(left.begin(), left.end(), [](float value) { return value == 3.0F; }));
}

TEST_F(CudaElementwise, SoftmaxIsStableInAndOutOfPlace) {
  for (const std::uint32_t width : {1U, 2U, 33U, 1000U, 4097U}) {
    for (const float most : {1.0F, 3.0e38F}) {
      Array<float> x(std::size_t{2} * width), out(x.size());
      fill_random(x, width, most == 1.0F ? -30 : most / 2, most);
      const SoftmaxArgs args{.x = x.data(), .out = out.data(), .rows = 2, .width = width};
      const Launch launch = softmax_launch(args);
      std::vector<double> expected, bound;
      for (std::size_t row = 0; row < 2; ++row) {
        double top = -INFINITY, sum = 0;
        for (std::uint32_t i = 0; i < width; ++i) top = std::max(top, static_cast<double>(x[row * width + i]));
        for (std::uint32_t i = 0; i < width; ++i) sum += std::exp(static_cast<double>(x[row * width + i]) - top);
        for (std::uint32_t i = 0; i < width; ++i) {
          const double below = top - static_cast<double>(x[row * width + i]);
          expected.push_back(std::exp(-below) / sum);
          // The difference is rounded once, which exp turns into a relative error; so it is for each term of the sum, of which those far below weigh nothing.
          bound.push_back(expected.back() * (gamma_of(std::ceil(width / static_cast<double>(launch.threads)) + 12 + 8) + (below + 1) * kUnit) + 1e-44);
        }
      }
      run("softmax", launch, args, width);
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_TRUE(near(out[i], expected[i], bound[i])) << width << " " << i;
      SoftmaxArgs in_place = args;
      in_place.out = x.data();
      run("softmax", launch, in_place, width + 1);
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(x[i], out[i]);
    }
  }
}

TEST_F(CudaElementwise, MeanNormaliseAndBiasAreRight) {
  for (const std::uint32_t width : {1U, 70U, 384U, 1501U}) {
    const std::uint32_t rows = 9;
    Array<float> x(std::size_t{rows} * width, 1), mean(width), unit(x.size());
    fill_random(x, width);
    const MeanArgs mean_args{.x = x.data(), .out = mean.data(), .rows = rows, .width = width};
    run("mean", mean_launch(mean_args), mean_args, 1);
    for (std::uint32_t column = 0; column < width; ++column) {
      double sum = 0, size = 0;
      for (std::uint32_t row = 0; row < rows; ++row) {
        sum += static_cast<double>(x[row * std::size_t{width} + column]);
        size += std::abs(static_cast<double>(x[row * std::size_t{width} + column]));
      }
      ASSERT_TRUE(near(mean[column], sum / rows, gamma_of(rows + 1) * size / rows));
    }
    std::fill_n(x.data(), width, 0.0F);  // a row without length
    const NormaliseArgs unit_args{.x = x.data(), .out = unit.data(), .rows = rows, .width = width, .epsilon = 1e-12F};
    const Launch launch = normalise_launch(unit_args);
    run("normalise", launch, unit_args, 2);
    for (std::uint32_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (std::uint32_t i = 0; i < width; ++i) squares += std::pow(static_cast<double>(x[row * std::size_t{width} + i]), 2);
      for (std::uint32_t i = 0; i < width; ++i) {
        const double expected = static_cast<double>(x[row * std::size_t{width} + i]) / std::max(std::sqrt(squares), 1e-12);
        ASSERT_TRUE(near(unit[row * std::size_t{width} + i], expected, std::abs(expected) * gamma_of(std::ceil(width / static_cast<double>(launch.threads)) / 2 + 10)));
      }
    }
  }
  for (int format = 0; format < 3; ++format) {
    const std::uint32_t rows = 300;
    const Weights bias(format, rows, 1);
    Array<float> out(std::size_t{2} * rows + 40, 0, 7.0F);
    const BiasArgs args{.bias = bias.data(), .out = out.data(), .tokens = 2, .rows = rows, .out_stride = rows + 40};
    run(std::string("bias") + kFormats[format], bias_launch(args), args, 2);
    for (std::uint32_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i % (rows + 40) < rows ? bias.get(i % (rows + 40)) : 7.0F);
  }
}

TEST_F(CudaElementwise, CastsHaveTheBitsOfTheCodecs) {
  std::mt19937_64 random(7);
  for (const bool f16 : {false, true}) {
    const DType dtype = f16 ? DType::kF16 : DType::kBF16;
    // Every half, widened.
    Array<std::uint16_t> halves(65536);
    Array<std::uint32_t> wide(65536), expected(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) halves[i] = static_cast<std::uint16_t>(i);
    const CastArgs widen{.x = halves.data(), .out = wide.data(), .half = Half::kNone, .count = 65536};
    run(f16 ? "widen_f16" : "widen_bf16", cast_launch(widen), widen);
    ASSERT_TRUE(cast_elements(dtype, std::as_bytes(std::span(halves.data(), 65536)), DType::kF32, std::as_writable_bytes(std::span(expected.data(), 65536))).ok());
    for (std::uint32_t i = 0; i < 65536; ++i) ASSERT_EQ(wide[i], expected[i]) << i;

    for (const std::size_t count : {0U, 1U, 7U, 8U, 4099U, 70000U}) {
      for (const std::size_t offset : {0U, 1U}) {
        for (const std::uint32_t saturate : {0U, 1U}) {
          Array<std::uint32_t> x(count, offset);
          for (std::size_t i = 0; i < count; ++i) {
            // Any bits; those around every half, where rounding decides; and what overflows.
            const auto any = static_cast<std::uint32_t>(random());
            const std::uint32_t near_half = wide[any % 65536] + static_cast<std::uint32_t>((any >> 16) % 5) - 2 + ((any >> 24 & 1) != 0 ? (f16 ? 0x1000U : 0x8000U) : 0U);
            x[i] = i % 3 == 0 ? any : near_half;
          }
          Array<std::uint16_t> out(count, offset), right(count);
          std::uint32_t overflowed = 5;
          const CastArgs args{.x = x.data(), .out = out.data(), .half = f16 ? Half::kF16 : Half::kBF16, .count = count, .saturate = saturate, .overflowed = &overflowed};
          run("narrow", cast_launch(args), args, count);
          const auto counted = cast_elements(DType::kF32, std::as_bytes(std::span(x.data(), count)), dtype, std::as_writable_bytes(std::span(right.data(), count)),
                                             saturate != 0 ? Overflow::kSaturate : Overflow::kInfinity);
          ASSERT_TRUE(counted.ok());
          EXPECT_EQ(overflowed, *counted + 5);
          for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], right[i]) << std::hex << x[i];
          // And widened again, at that alignment.
          Array<std::uint32_t> back(count, 1), back_right(count);
          const CastArgs again{.x = out.data(), .out = back.data(), .half = Half::kNone, .count = count};
          run(f16 ? "widen_f16" : "widen_bf16", cast_launch(again), again, 1);
          for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(back[i], f16 ? f32_from_f16(out[i]) : f32_from_bf16(out[i]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace paramwire::testing
