// Cases of the kernels that go row by row.
#include "gpu/case_make.hpp"
#include "gpu/cases.hpp"

#include "paramwire/base/text.hpp"

#include <array>

namespace paramwire::gpu {

using namespace cuda;

namespace {

constexpr Kernel kEmbedding[] = {Kernel::k_embedding_f32, Kernel::k_embedding_bf16, Kernel::k_embedding_f16};
constexpr Kernel kBias[] = {Kernel::k_bias_f32, Kernel::k_bias_bf16, Kernel::k_bias_f16};
constexpr Kernel kRmsNorm[] = {Kernel::k_rms_norm_f32, Kernel::k_rms_norm_bf16, Kernel::k_rms_norm_f16};
constexpr Kernel kLayerNorm[] = {Kernel::k_layer_norm_f32, Kernel::k_layer_norm_bf16, Kernel::k_layer_norm_f16};

// Terms of a block's sum: what a thread adds, then five levels of two trees.
double block_terms(std::uint32_t width, std::uint32_t threads) { return std::ceil(static_cast<double>(width) / threads) + 12; }

Case embedding_case(int format, std::uint32_t width) {
  Case out{.operation = "embedding", .name = cat("embedding ", kFormats[format], " of ", width)};
  std::vector<float> rows = random_floats(std::size_t{5} * width, width);
  rows[2 * width] = kNaN;
  rows[4 * width] = kInf;
  out.buffers.push_back(weights_of("rows", format, {5, width}, rows));
  out.buffers.back().offset = width % 2 == 0 ? 0 : type_bytes(kWeightTypes[format]);
  out.buffers.push_back(buffer_of<std::uint32_t>("row_of", Type::kU32, {4}, {4, 0, 4, 2}));
  out.buffers.push_back(output_of("out", Type::kF32, {4, width}));
  out.steps.push_back([=](const Places& at) {
    const EmbeddingArgs args{.rows = at.at<const char>("rows"), .row_of = at.at<const std::uint32_t>("row_of"), .out = at.at<float>("out"), .tokens = 4, .width = width};
    return bound(kEmbedding[format], embedding_launch(args), args);
  });
  return out;
}

Case bias_case(int format, std::uint32_t rows) {
  Case out{.operation = "bias", .name = cat("bias ", kFormats[format], " of ", rows)};
  out.buffers.push_back(random_weights("bias", format, {rows}, rows));
  out.buffers.push_back(output_of("out", Type::kF32, {3, rows + 7}));
  out.steps.push_back([=](const Places& at) {
    const BiasArgs args{.bias = at.at<const char>("bias"), .out = at.at<float>("out"), .tokens = 3, .rows = rows, .out_stride = rows + 7};
    return bound(kBias[format], bias_launch(args), args);
  });
  return out;
}

struct NormShape {
  std::uint32_t tokens, width;
  bool add, bias, nan;
  Half half;
};

// The largest that a row's s is scaled by: 1 / sqrt(variance + epsilon).
double scale_max(const std::vector<double>& s, const NormShape& it, double epsilon) {
  double out = 0;
  for (std::uint32_t token = 0; token < it.tokens; ++token) {
    double mean = 0, squares = 0;
    for (std::uint32_t i = 0; i < it.width; ++i) mean += s[token * it.width + i] / it.width;
    for (std::uint32_t i = 0; i < it.width; ++i) squares += std::pow(s[token * it.width + i] - mean, 2);
    const double scale = 1 / std::sqrt(squares / it.width + epsilon);
    if (!std::isnan(scale)) out = std::max(out, scale);
  }
  return out;
}

Case norm_case(bool layer, int format, const NormShape& it) {
  constexpr float kEpsilon = 1e-5F;
  const Dims shape = {it.tokens, it.width};
  Case out{.operation = layer ? "layer_norm" : "rms_norm",
           .name = cat(layer ? "layer_norm " : "rms_norm ", kFormats[format], " of ", it.tokens, " x ", it.width, it.add ? ", residual" : "", it.bias ? ", bias" : "",
                       it.nan ? ", NaN" : "")};
  std::vector<float> x = random_floats(std::size_t{it.tokens} * it.width, it.width);
  if (it.nan) x[it.width / 2] = kNaN;
  out.buffers.push_back(buffer_of("x", Type::kF32, shape, x));
  std::vector<double> s(x.begin(), x.end());
  if (it.add) {
    out.buffers.push_back(floats_of("add", shape, it.width + 1));
    const std::vector<double> add = values_of(out.buffers.back());
    for (std::size_t i = 0; i < s.size(); ++i) s[i] += add[i];
    out.buffers.push_back(output_of("sum", Type::kF32, shape));  // one addition: the same everywhere
  }
  out.buffers.push_back(random_weights("weight", format, {it.width}, it.width + 2));
  if (it.bias) out.buffers.push_back(random_weights("bias", format, {it.width}, it.width + 3));
  const NormArgs sized{.x = nullptr, .add = nullptr, .sum = nullptr, .weight = nullptr, .bias = nullptr, .out = nullptr, .out16 = nullptr, .half = it.half, .tokens = it.tokens,
                       .width = it.width, .epsilon = kEpsilon};
  // RMS: the sum has no cancellation, so all is relative. Layer norm: mean and s - mean are off by as much as sums of |s| <= 2 are, times what they are scaled by.
  const double relative = gamma_of(block_terms(it.width, norm_launch(sized).threads) + 8);
  const double absolute = layer ? relative * 2 * 2 * scale_max(s, it, kEpsilon) + 2 * kUnit : 0;
  out.buffers.push_back(output_of("out", Type::kF32, shape, 2 * absolute, 2 * relative));
  if (it.half != Half::kNone) out.buffers.push_back(half_output_of(it.half, shape, 2 * absolute));
  out.numbers = {{"epsilon", static_cast<double>(kEpsilon)}};
  const Kernel kernel = layer ? kLayerNorm[format] : kRmsNorm[format];
  out.steps.push_back([=](const Places& at) {
    const NormArgs args{.x = at.at<const float>("x"), .add = it.add ? at.at<const float>("add") : nullptr, .sum = it.add ? at.at<float>("sum") : nullptr,
                        .weight = at.at<const char>("weight"), .bias = it.bias ? at.at<const char>("bias") : nullptr, .out = at.at<float>("out"),
                        .out16 = it.half != Half::kNone ? at.at<char>("out16") : nullptr, .half = it.half, .tokens = it.tokens, .width = it.width, .epsilon = kEpsilon};
    return bound(kernel, norm_launch(args), args);
  });
  return out;
}

Case softmax_case(std::uint32_t width, float low, float high) {
  Case out{.operation = "softmax", .name = cat("softmax of ", width, " up to ", high)};
  out.buffers.push_back(floats_of("x", {3, width}, width, low, high));
  const SoftmaxArgs sized{.x = nullptr, .out = nullptr, .rows = 3, .width = width};
  const double terms = block_terms(width, softmax_launch(sized).threads) + 8;
  out.buffers.push_back(output_of("out", Type::kF32, {3, width}));
  // A difference to the row's largest is rounded once, which exp turns into a relative error of its size.
  const std::vector<double> x = values_of(out.buffers[0]);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t row = i / width * width;
    const double below = *std::max_element(x.begin() + static_cast<std::ptrdiff_t>(row), x.begin() + static_cast<std::ptrdiff_t>(row + width)) - x[i];
    out.buffers[1].bounds.push_back(2 * ((gamma_of(terms) + (below + 1) * kUnit) * std::min(1.0, std::exp(-below)) + 1e-44));
  }
  out.steps.push_back([=](const Places& at) {
    const SoftmaxArgs args{.x = at.at<const float>("x"), .out = at.at<float>("out"), .rows = 3, .width = width};
    return bound(Kernel::k_softmax, softmax_launch(args), args);
  });
  return out;
}

Case mean_case(std::uint32_t rows, std::uint32_t width) {
  Case out{.operation = "mean", .name = cat("mean of ", rows, " x ", width)};
  out.buffers.push_back(floats_of("x", {rows, width}, width));
  out.buffers[0].offset = 4;
  out.buffers.push_back(output_of("out", Type::kF32, {width}, 2 * gamma_of(rows + 1)));
  out.steps.push_back([=](const Places& at) {
    const MeanArgs args{.x = at.at<const float>("x"), .out = at.at<float>("out"), .rows = rows, .width = width};
    return bound(Kernel::k_mean, mean_launch(args), args);
  });
  return out;
}

Case normalise_case(std::uint32_t width) {
  constexpr float kEpsilon = 1e-12F;
  Case out{.operation = "normalise", .name = cat("normalise of ", width)};
  std::vector<float> x = random_floats(std::size_t{3} * width, width);
  std::fill_n(x.begin(), width, 0.0F);  // a row without length
  out.buffers.push_back(buffer_of("x", Type::kF32, {3, width}, x));
  const NormaliseArgs sized{.x = nullptr, .out = nullptr, .rows = 3, .width = width, .epsilon = kEpsilon};
  out.buffers.push_back(output_of("out", Type::kF32, {3, width}, 0, 2 * gamma_of(block_terms(width, normalise_launch(sized).threads) + 4)));
  out.numbers = {{"epsilon", static_cast<double>(kEpsilon)}};
  out.steps.push_back([=](const Places& at) {
    const NormaliseArgs args{.x = at.at<const float>("x"), .out = at.at<float>("out"), .rows = 3, .width = width, .epsilon = kEpsilon};
    return bound(Kernel::k_normalise, normalise_launch(args), args);
  });
  return out;
}

Case top_k_case(std::uint32_t experts, std::uint32_t k, bool normalise) {
  constexpr std::uint32_t kTokens = 5;
  Case out{.operation = "top_k", .name = cat("top_k ", k, " of ", experts, normalise ? "" : ", over all")};
  std::mt19937_64 random(experts + k);
  std::vector<float> scores(std::size_t{kTokens} * experts);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = static_cast<float>(static_cast<int>(random() % 41) - 20) / 4;  // many ties
    if (i / experts == 3 && random() % 4 == 0 && i % experts >= k) scores[i] = kNaN;  // and enough numbers before them
  }
  out.buffers.push_back(buffer_of("scores", Type::kF32, {kTokens, experts}, scores));
  // Numbers of experts are exact: the smallest difference is far above the bound. Scores are within 10 of each other.
  out.buffers.push_back(output_of("routing", Type::kF32, {kTokens, 2 * k}, 0, 2 * (gamma_of(std::max(k, experts / 32) + 22) + 11 * kUnit)));
  out.numbers = {{"k", k}, {"normalise", normalise ? 1 : 0}};
  out.steps.push_back([=](const Places& at) {
    const TopKArgs args{.scores = at.at<const float>("scores"), .routing = at.at<float>("routing"), .tokens = kTokens, .experts = experts, .k = k, .normalise = normalise ? 1U : 0U};
    return bound(Kernel::k_top_k, top_k_launch(args), args);
  });
  return out;
}

}  // namespace

std::vector<Case> row_cases(const Scale& scale) {
  std::vector<Case> out;
  for (int format = 0; format < 3; ++format) {
    for (const std::uint32_t width : {1U, 32U, scale.width}) out.push_back(embedding_case(format, width));
    for (const std::uint32_t rows : {1U, 300U, scale.rows}) out.push_back(bias_case(format, rows));
    for (const bool layer : {false, true}) {
      const Half half = static_cast<Half>(format);
      out.push_back(norm_case(layer, format, {.tokens = 1, .width = 576, .add = false, .bias = false, .nan = false, .half = Half::kNone}));
      out.push_back(norm_case(layer, format, {.tokens = 3, .width = 33, .add = true, .bias = layer, .nan = false, .half = half}));
      out.push_back(norm_case(layer, format, {.tokens = 2, .width = scale.width, .add = true, .bias = false, .nan = true, .half = half}));
      out.push_back(norm_case(layer, format, {.tokens = 5, .width = scale.width - 1, .add = false, .bias = layer, .nan = false, .half = Half::kNone}));
    }
  }
  for (const std::uint32_t width : {1U, 33U, 1000U, scale.width}) {
    out.push_back(softmax_case(width, -30, 1));
    out.push_back(softmax_case(width, 2.9e38F, 3.0e38F));
    out.push_back(normalise_case(width));
    out.push_back(mean_case(9, width));
  }
  for (const bool normalise : {true, false}) {
    for (const auto& [experts, k] : {std::array{1U, 1U}, {8U, 2U}, {33U, 4U}, {128U, 8U}, {kExpertsMax, 40U}}) out.push_back(top_k_case(experts, k, normalise));
  }
  return out;
}

std::vector<Case> all_cases(const Scale& scale) {
  std::vector<Case> out;
  for (const auto& family : {row_cases, element_cases, attention_cases, product_cases, integrity_cases, decode_cases}) {
    for (Case& it : family(scale)) out.push_back(std::move(it));
  }
  return out;
}

}  // namespace paramwire::gpu
