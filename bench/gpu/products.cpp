// Reading weights once: products of one and of four tokens beside cuBLASLt, and attention of one token over a full cache.
//
// A model's matrices come from memory, not from the second-level cache: each launch of a graph reads another copy of the weights, as many as
// exceed that cache several times.
#include "bench.hpp"

#include "gpu/case_make.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/cuda/blaslt.hpp"
#include "paramwire/cuda/kernels/compute_args.hpp"

#include <array>
#include <cmath>

namespace paramwire::gpu {

using namespace cuda;

namespace {

constexpr Kernel kGemv[] = {Kernel::k_gemv_f32, Kernel::k_gemv_bf16, Kernel::k_gemv_f16};

struct Shape {
  int format;
  std::uint32_t rows, columns;
};

// One matrix in many copies, and what it is multiplied with.
class Products {
 public:
  static Result<Products> make(Bench& bench, const Shape& shape) {
    Products out(bench, shape);
    PARAMWIRE_CHECK(out.prepare());
    return out;
  }

  // Both ways, for `tokens`.
  Status measure(std::uint32_t tokens) {
    Figure figure{.name = cat("gemv_", kFormats[shape_.format], "_", shape_.rows, "x", shape_.columns, "_t", tokens), .unit = "GB/s"};
    PARAMWIRE_TRY(ours, seconds([&](std::uint64_t copy) { return gemv(copy, tokens); }));
    figure.value = gigabytes(moved(), ours);
    PARAMWIRE_TRY(correct, right(tokens, false));
    figure.correct = correct;
    figure.baseline = "cuBLASLt, inputs narrowed first";
    if (bench_.world.blas == nullptr) {
      figure.baseline = cat("none: ", bench_.world.blas_problem);
    } else {
      PARAMWIRE_TRY(blas, BlasLt::create(bench_.bed.device, bench_.world.blas));
      PARAMWIRE_TRY(theirs, seconds([&](std::uint64_t copy) { return by_blas(*blas, copy, tokens); }));
      figure.baseline_value = gigabytes(moved(), theirs);
      PARAMWIRE_TRY(also_correct, right(tokens, true));
      figure.correct = figure.correct && also_correct;
    }
    bench_.add(std::move(figure));
    return {};
  }

 private:
  static constexpr std::uint32_t kTokensMax = 4;

  Products(Bench& bench, const Shape& shape) : bench_(bench), shape_(shape), bytes_(std::uint64_t{shape.rows} * shape.columns * type_bytes(kWeightTypes[shape.format])) {
    // 50 MiB of second-level cache on an H200, 126 on a B200.
    copies_ = bench.size<std::uint64_t>(2, (std::uint64_t{256} << 20) / bytes_ + 1, (std::uint64_t{1} << 30) / bytes_ + 1);
    copies_ = std::min<std::uint64_t>(copies_, 512);
    stride_ = (bytes_ + 255) / 256 * 256;
  }
  Status prepare() {
    const Bed& bed = bench_.bed;
    weight_ = random_weights("weight", shape_.format, {shape_.rows, shape_.columns}, 1);
    x_ = random_floats(std::size_t{kTokensMax} * shape_.columns, 2);
    PARAMWIRE_TRY(weights, bed.allocate(copies_ * stride_));
    device_weights_ = std::move(weights);
    PARAMWIRE_TRY(x, bed.upload(std::as_bytes(std::span(x_))));
    device_x_ = std::move(x);
    PARAMWIRE_TRY(halves, bed.allocate(2 * x_.size()));
    halves_ = std::move(halves);
    PARAMWIRE_TRY(y, bed.allocate(std::uint64_t{4} * kTokensMax * shape_.rows));
    y_ = std::move(y);
    PARAMWIRE_CHECK(bed.stream.to_device(device_weights_.address(), weight_.bytes));
    for (std::uint64_t copy = 1; copy < copies_; ++copy) PARAMWIRE_CHECK(bed.stream.copy(device_weights_.address() + copy * stride_, device_weights_.address(), bytes_));
    return bed.stream.synchronize();
  }
  double moved() const { return static_cast<double>(bytes_); }
  const void* weight_at(std::uint64_t copy) const { return device_weights_.at<const char>(copy * stride_); }

  Status gemv(std::uint64_t copy, std::uint32_t tokens) const {
    const GemvArgs args{.weight = weight_at(copy), .x = device_x_.at<const float>(), .out = y_.at<float>(), .bias = nullptr, .rows = shape_.rows, .columns = shape_.columns, .tokens = tokens,
                        .x_stride = shape_.columns, .out_stride = shape_.rows, .accumulate = 0};
    return bench_.bed.module->launch(bench_.bed.stream, kGemv[shape_.format], gemv_launch(args), args);
  }
  // As the backend does it for prompts.
  Status by_blas(BlasLt& blas, std::uint64_t copy, std::uint32_t tokens) const {
    cuda::Product product{.dtype = kWeightDTypes[shape_.format], .weight = weight_at(copy), .x = device_x_.at<const char>(), .y = y_.at<float>(), .tokens = tokens, .rows = shape_.rows,
                          .columns = shape_.columns, .y_stride = shape_.rows, .accumulate = false};
    if (shape_.format != 0) {
      const CastArgs cast{.x = device_x_.at<const char>(), .out = halves_.at<char>(), .half = shape_.format == 1 ? Half::kBF16 : Half::kF16, .count = std::uint64_t{tokens} * shape_.columns};
      PARAMWIRE_CHECK(bench_.bed.module->launch(bench_.bed.stream, Kernel::k_narrow, cast_launch(cast), cast));
      product.x = halves_.at<const char>();
    }
    return blas.multiply(product, bench_.bed.stream);
  }
  // Of one product: a graph has one for each copy, as a captured step has one for each matrix.
  template <typename Enqueue>
  Result<double> seconds(const Enqueue& enqueue) {
    const Stream& stream = bench_.bed.stream;
    PARAMWIRE_CHECK(enqueue(0));  // cuBLASLt chooses its algorithm at the first
    PARAMWIRE_CHECK(stream.fill(y_.address(), std::byte{0xff}, y_.size()));
    PARAMWIRE_TRY(graph, stream.capture([&]() -> Status {
      for (std::uint64_t copy = 0; copy < copies_; ++copy) PARAMWIRE_CHECK(enqueue(copy));
      return {};
    }));
    PARAMWIRE_TRY(all, bench_.device_seconds([&] { return stream.launch(graph); }));
    return all / static_cast<double>(copies_);
  }
  // narrowed: inputs lost all but 8 or 11 bits
  Result<bool> right(std::uint32_t tokens, bool narrowed) const {
    PARAMWIRE_TRY(y, bench_.bed.download_as<float>(y_, std::size_t{tokens} * shape_.rows));
    const double input_error = !narrowed || shape_.format == 0 ? 0 : shape_.format == 1 ? 0x1p-8 : 0x1p-11;
    const std::uint32_t step = std::max(1U, shape_.rows / 61);  // some rows of a large matrix
    for (std::uint32_t token = 0; token < tokens; ++token) {
      for (std::uint32_t row = 0; row < shape_.rows; row += step) {
        double sum = 0, size = 0;
        for (std::uint32_t c = 0; c < shape_.columns; ++c) {
          const double term = element(weight_.type, weight_.bytes, std::size_t{row} * shape_.columns + c) * static_cast<double>(x_[std::size_t{token} * shape_.columns + c]);
          sum += term;
          size += std::abs(term);
        }
        const double off = std::abs(static_cast<double>(y[std::size_t{token} * shape_.rows + row]) - sum);
        if (!(off <= (gamma_of(shape_.columns + 8.0) + input_error) * size)) return false;
      }
    }
    return true;
  }

  Bench& bench_;
  Shape shape_;
  std::uint64_t bytes_ = 0, copies_ = 1, stride_ = 0;
  CaseBuffer weight_;
  std::vector<float> x_;
  DeviceMemory device_weights_, device_x_, halves_, y_;
};

// One token over a full cache.
class Attention {
 public:
  Attention(Bench& bench, std::uint32_t heads, std::uint32_t kv_heads, std::uint32_t size, std::uint32_t context)
      : bench_(bench), heads_(heads), kv_heads_(kv_heads), size_(size), context_(context) {}

  Status run() {
    const Bed& bed = bench_.bed;
    const Current current(*bed.device);
    PARAMWIRE_CHECK(current.status());
    const std::vector<float> query = random_floats(std::size_t{heads_} * size_, 1, -2, 2), keys = random_floats(std::size_t{kv_heads_} * context_ * size_, 2, -2, 2),
                             values = random_floats(keys.size(), 3);
    PARAMWIRE_TRY(state, bed.upload(state_of(context_ - 1, 1).bytes));
    PARAMWIRE_TRY(device_query, bed.upload(bytes_of(query)));
    PARAMWIRE_TRY(device_keys, bed.upload(bytes_of(keys)));
    PARAMWIRE_TRY(device_values, bed.upload(bytes_of(values)));
    PARAMWIRE_TRY(out, bed.allocate(4 * query.size()));
    const std::uint32_t splits = attention_splits(1, heads_, context_, static_cast<std::uint32_t>(bed.device->facts().multiprocessors));
    PARAMWIRE_TRY(partial, bed.allocate(4 * attention_partial_floats(1, heads_, splits, size_)));
    AttentionArgs args{};
    args.state = state.at<const StepState>();
    args.query = device_query.at<const float>();
    args.keys = device_keys.at<const float>();
    args.values = device_values.at<const float>();
    args.out = out.at<float>();
    args.partial = partial.at<float>();
    args.tokens = 1;
    args.heads = heads_;
    args.kv_heads = kv_heads_;
    args.head_size = size_;
    args.context = context_;
    args.splits = splits;
    args.causal = 1;
    args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(size_)));
    PARAMWIRE_TRY(copy, bench_.copy_bandwidth());
    const int layers = bench_.size(1, 30, 30);
    PARAMWIRE_TRY(graph, bed.stream.capture([&]() -> Status {
      for (int layer = 0; layer < layers; ++layer) {
        PARAMWIRE_CHECK(bed.module->launch(bed.stream, Kernel::k_attention_split, attention_split_launch(args), args));
        PARAMWIRE_CHECK(bed.module->launch(bed.stream, Kernel::k_attention_join, attention_join_launch(args), args));
      }
      return {};
    }));
    PARAMWIRE_TRY(seconds, bench_.device_seconds([&] { return bed.stream.launch(graph); }));
    PARAMWIRE_TRY(mixed, bed.download_as<float>(out, query.size()));
    bench_.add({.name = cat("attention_", heads_, "of", kv_heads_, "x", size_, "_at", context_), .value = gigabytes(8 * static_cast<double>(keys.size()) * layers, seconds), .unit = "GB/s",
                .baseline = Bench::kCopyBaseline, .baseline_value = copy, .correct = right(query, keys, values, mixed)});
    return {};
  }

 private:
  bool right(const std::vector<float>& query, const std::vector<float>& keys, const std::vector<float>& values, const std::vector<float>& mixed) const {
    for (const std::uint32_t head : {0U, heads_ - 1}) {
      const std::size_t from = std::size_t{head / (heads_ / kv_heads_)} * context_ * size_;
      std::vector<double> weights(context_), mix(size_);
      double most = -INFINITY, sum = 0, score_size = 0;
      for (std::uint32_t at = 0; at < context_; ++at) {
        double size = 0;
        for (std::uint32_t d = 0; d < size_; ++d) {
          const double term = static_cast<double>(query[std::size_t{head} * size_ + d]) * static_cast<double>(keys[from + std::size_t{at} * size_ + d]);
          weights[at] += term;
          size += std::abs(term);
        }
        weights[at] /= std::sqrt(static_cast<double>(size_));
        most = std::max(most, weights[at]);
        score_size = std::max(score_size, size / std::sqrt(static_cast<double>(size_)));
      }
      for (std::uint32_t at = 0; at < context_; ++at) {
        weights[at] = std::exp(weights[at] - most);
        sum += weights[at];
        for (std::uint32_t d = 0; d < size_; ++d) mix[d] += weights[at] * static_cast<double>(values[from + std::size_t{at} * size_ + d]);
      }
      // As derived in cases_attention.cpp, for values up to 1.
      const double most_off = 2 * (2 * (gamma_of(size_ + 3.0) + 4 * kUnit) * score_size + gamma_of(4 + 4 * std::ceil(context_ / 16.0)) + 2 * gamma_of(context_ + 8.0));
      for (std::uint32_t d = 0; d < size_; ++d) {
        if (!(std::abs(static_cast<double>(mixed[std::size_t{head} * size_ + d]) - mix[d] / sum) <= most_off)) return false;
      }
    }
    return true;
  }

  Bench& bench_;
  const std::uint32_t heads_, kv_heads_, size_, context_;
};

}  // namespace

Status bench_gemv(Bench& bench) {
  const Current current(*bench.bed.device);
  PARAMWIRE_CHECK(current.status());
  std::vector<Shape> shapes = {{0, 33, 64}, {1, 33, 64}, {2, 33, 64}};
  if (!bench.world.simulated) {
    shapes = {{1, 576, 576}, {1, 1536, 576}, {1, 49'152, 576}, {1, 4096, 4096}, {2, 4096, 4096}, {0, 4096, 4096}};
    if (!bench.quick) shapes.push_back({1, 14'336, 4096});
  }
  for (const Shape& shape : shapes) {
    PARAMWIRE_TRY(products, Products::make(bench, shape));
    for (const std::uint32_t tokens : {1U, 4U}) PARAMWIRE_CHECK(products.measure(tokens));
  }
  return {};
}

Status bench_attention(Bench& bench) {
  if (bench.world.simulated) return Attention(bench, 4, 2, 16, 70).run();
  PARAMWIRE_CHECK(Attention(bench, 9, 3, 64, 2048).run());
  return Attention(bench, 32, 8, 128, bench.quick ? 8192 : 32'768).run();
}

}  // namespace paramwire::gpu
