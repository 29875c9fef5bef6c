// Cases of products of few tokens, whose CPU twin is the CPU backend's own loop, and of experts.
#include "gpu/case_make.hpp"
#include "gpu/cases.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/kernels.hpp"

#include <array>

namespace paramwire::gpu {

using namespace cuda;

namespace {

constexpr Kernel kGemv[] = {Kernel::k_gemv_f32, Kernel::k_gemv_bf16, Kernel::k_gemv_f16};
constexpr Kernel kExpert[] = {Kernel::k_expert_gemv_f32, Kernel::k_expert_gemv_bf16, Kernel::k_expert_gemv_f16};

struct GemvShape {
  std::uint32_t rows, columns, tokens;
  bool accumulate = false, bias = false, nan = false, unaligned = false;
};

// What the sums of a lane, the warp's tree, bias and what was there may be off, twice; sums of other orders (the CPU's) are within it too.
double product_bound(std::uint32_t columns, double size) { return 2 * gamma_of(columns / 8.0 + 24) * size; }

Case gemv_case(int format, const GemvShape& it) {
  Case out{.operation = "gemv",
           .name = cat("gemv ", kFormats[format], " of ", it.rows, " x ", it.columns, " for ", it.tokens, it.accumulate ? ", added" : "", it.bias ? ", bias" : "", it.nan ? ", NaN" : "",
                       it.unaligned ? ", unaligned" : "")};
  const std::uint64_t x_stride = it.columns + (it.unaligned ? 3 : 0), out_stride = it.rows + 5;
  std::vector<float> weight = random_floats(std::size_t{it.rows} * it.columns, it.columns);
  if (it.nan) weight[std::size_t{it.rows / 2} * it.columns + it.columns / 3] = kNaN;
  out.buffers.push_back(weights_of("weight", format, {it.rows, it.columns}, weight));
  out.buffers.back().offset = it.unaligned ? type_bytes(kWeightTypes[format]) : 0;
  out.buffers.push_back(floats_of("x", {it.tokens, x_stride}, it.columns + 1));
  if (it.bias) out.buffers.push_back(random_weights("bias", format, {it.rows}, it.rows));
  CaseBuffer result = output_of("out", Type::kF32, {it.tokens, out_stride});
  result.bytes = bytes_of(random_floats(result.count(), it.rows + 1));
  result.expected = result.bytes;
  const std::vector<double> w = values_of(out.buffers[0]), x = values_of(out.buffers[1]);
  std::vector<float> twin(std::size_t{it.tokens} * out_stride);
  std::memcpy(twin.data(), result.bytes.data(), result.bytes.size());
  const std::size_t bytes = type_bytes(kWeightTypes[format]);
  kernels::usable_sets().back()->dot_rows[format]({out.buffers[0].bytes.data(), it.rows, it.columns, it.columns * bytes}, reinterpret_cast<const float*>(out.buffers[1].bytes.data()),
                                                  static_cast<std::size_t>(x_stride), it.tokens, twin.data(), static_cast<std::size_t>(out_stride), it.accumulate);
  for (std::uint32_t token = 0; token < it.tokens; ++token) {
    for (std::uint32_t row = 0; row < out_stride; ++row) {
      if (row >= it.rows) {
        result.bounds.push_back(0);
        continue;
      }
      double size = 2;  // bias, and what was there
      for (std::uint32_t c = 0; c < it.columns; ++c) size += std::abs(w[std::size_t{row} * it.columns + c] * x[token * x_stride + c]);
      result.bounds.push_back(product_bound(it.columns, size));
      if (it.bias) twin[token * out_stride + row] += static_cast<float>(element(kWeightTypes[format], out.buffers[2].bytes, row));
    }
  }
  result.expected = bytes_of(twin);
  out.buffers.push_back(std::move(result));
  out.numbers = {{"rows", it.rows}, {"columns", it.columns}, {"accumulate", it.accumulate ? 1 : 0}};
  out.steps.push_back([=](const Places& at) {
    const GemvArgs args{.weight = at.at<const char>("weight"), .x = at.at<const float>("x"), .out = at.at<float>("out"), .bias = it.bias ? at.at<const char>("bias") : nullptr, .rows = it.rows,
                        .columns = it.columns, .tokens = it.tokens, .x_stride = x_stride, .out_stride = out_stride, .accumulate = it.accumulate ? 1U : 0U};
    return bound(kGemv[format], gemv_launch(args), args);
  });
  return out;
}

// Picks of random experts, grouped by expert, one of whom nobody picked. shared: a row of x for each token, not for each pick
Case expert_case(int format, std::uint32_t rows, std::uint32_t columns, bool shared) {
  constexpr std::uint32_t kExperts = 4, kK = 2, kTokens = 7, kPicks = kTokens * kK;
  Case out{.operation = "expert_gemv", .name = cat("expert_gemv ", kFormats[format], " of ", rows, " x ", columns, shared ? ", shared" : "")};
  std::mt19937_64 random(rows + columns);
  std::vector<std::vector<std::uint32_t>> of_expert(kExperts);
  for (std::uint32_t pick = 0; pick < kPicks; ++pick) of_expert[pick < 9 ? 2 : random() % 2 * 3].push_back(pick);
  std::vector<std::uint32_t> begin = {0}, picks;
  for (const auto& each : of_expert) {
    picks.insert(picks.end(), each.begin(), each.end());
    begin.push_back(static_cast<std::uint32_t>(picks.size()));
  }
  out.buffers.push_back(random_weights("weights", format, {kExperts, rows, columns}, rows));
  out.buffers.push_back(buffer_of("begin", Type::kU32, {kExperts + 1}, begin));
  out.buffers.push_back(buffer_of("picks", Type::kU32, {kPicks}, picks));
  out.buffers.push_back(floats_of("x", {shared ? kTokens : kPicks, columns}, columns));
  out.buffers.push_back(output_of("out", Type::kF32, {kPicks, rows}, product_bound(columns, columns)));  // of numbers up to 1
  out.numbers = {{"share", shared ? kK : 1}};
  out.steps.push_back([=](const Places& at) {
    ExpertArgs args{};
    args.weights = at.at<const char>("weights");
    args.begin = at.at<const std::uint32_t>("begin");
    args.picks = at.at<const std::uint32_t>("picks");
    args.x = at.at<const float>("x");
    args.out = at.at<float>("out");
    args.experts = kExperts;
    args.rows = rows;
    args.columns = columns;
    args.share = shared ? kK : 1;
    args.picks_max = 9;
    return bound(kExpert[format], expert_launch(args), args);
  });
  return out;
}

Case expert_sum_case(std::uint32_t tokens, std::uint32_t k, std::uint32_t rows) {
  Case out{.operation = "expert_sum", .name = cat("expert_sum of ", tokens, " x ", k, " x ", rows)};
  out.buffers.push_back(floats_of("products", {tokens * k, rows}, rows));
  out.buffers.push_back(floats_of("routing", {tokens, 2 * k}, k));
  out.buffers.push_back(output_of("out", Type::kF32, {tokens, rows}, 2 * gamma_of(k + 1) * k));  // of numbers up to 1
  out.steps.push_back([=](const Places& at) {
    const ExpertSumArgs args{.products = at.at<const float>("products"), .routing = at.at<const float>("routing"), .out = at.at<float>("out"), .tokens = tokens, .k = k, .rows = rows};
    return bound(Kernel::k_expert_sum, expert_sum_launch(args), args);
  });
  return out;
}

}  // namespace

std::vector<Case> product_cases(const Scale& scale) {
  std::vector<Case> out;
  for (int format = 0; format < 3; ++format) {
    out.push_back(gemv_case(format, {.rows = 1, .columns = 1, .tokens = 1}));
    out.push_back(gemv_case(format, {.rows = 9, .columns = 7, .tokens = 2, .accumulate = true}));
    out.push_back(gemv_case(format, {.rows = 17, .columns = 250, .tokens = 3, .bias = true}));
    out.push_back(gemv_case(format, {.rows = 9, .columns = 576, .tokens = 4, .accumulate = true, .bias = true}));
    out.push_back(gemv_case(format, {.rows = 10, .columns = 520, .tokens = 3, .nan = true, .unaligned = true}));
    out.push_back(gemv_case(format, {.rows = 3, .columns = 2056, .tokens = 1, .bias = true}));
    out.push_back(gemv_case(format, {.rows = scale.rows, .columns = 576, .tokens = 1}));
    out.push_back(gemv_case(format, {.rows = scale.rows, .columns = 200, .tokens = 4}));
    for (const bool shared : {false, true}) {
      out.push_back(expert_case(format, 1, 5, shared));
      out.push_back(expert_case(format, 30, 264, shared));
      out.push_back(expert_case(format, scale.rows, 64, shared));
    }
  }
  out.push_back(expert_sum_case(1, 1, 3));
  out.push_back(expert_sum_case(5, 2, scale.rows));
  return out;
}

}  // namespace paramwire::gpu
