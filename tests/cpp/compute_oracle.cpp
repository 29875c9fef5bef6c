#include "cpp/compute_oracle.hpp"

#include "paramwire/base/env.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace paramwire::oracle {

namespace {

using Row = std::vector<double>;
struct Value {
  std::vector<Row> rows, bounds;
};

double decode(DType dtype, std::uint32_t bits) {
  if (dtype == DType::kF32) return static_cast<double>(std::bit_cast<float>(bits));
  if (dtype == DType::kBF16) return static_cast<double>(std::bit_cast<float>(bits << 16));
  const int exponent = static_cast<int>((bits >> 10) & 0x1f);
  const double fraction = static_cast<double>(bits & 0x3ff) / 1024.0;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0 + fraction, exponent - 15);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Truncates: tests take whatever value results.
std::uint32_t encode(DType dtype, double value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  if (dtype == DType::kF32) return bits;
  if (dtype == DType::kBF16) return bits >> 16;
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  if (std::fabs(value) < 0x1p-14) return sign | static_cast<std::uint32_t>(std::fabs(value) * 0x1p24);  // subnormal
  return sign | ((((bits >> 23) & 0xff) - 112) << 10) | ((bits >> 13) & 0x3ff);
}

class Evaluator {
 public:
  Evaluator(const Graph& graph, const Tensors& tensors, const std::vector<Token>& tokens)
      : graph_(graph), tensors_(tensors), tokens_(tokens) {}

  Answer run() {
    for (const Op& op : graph_.ops()) {
      Value value;
      const std::size_t rows = op.last_only ? 1 : tokens_.size();
      for (std::size_t row = 0; row < rows; ++row) {
        value.rows.emplace_back(op.width);
        value.bounds.emplace_back(op.width);
        compute(op, row, value.rows.back(), value.bounds.back());
      }
      values_.push_back(std::move(value));
    }
    return {values_.back().rows.back(), carry(values_.back().bounds.back())};
  }

 private:
  // The bound of the operation before an identity head (whose own products are exact): its input's. Before a mean: the mean of its
  // input's on top of its own.
  Row carry(Row own) const {
    const Op& last = graph_.ops().back();
    if (last.kind != OpKind::kHead && last.kind != OpKind::kMean) return own;
    const Op& before = graph_.ops()[last.inputs[0]];
    const std::vector<Row>& bounds = values_[last.inputs[0]].bounds;
    if (last.kind == OpKind::kHead) return before.width == last.width && before.kind != OpKind::kEmbedding ? bounds.back() : own;
    for (const Row& bound : bounds) {
      for (std::size_t i = 0; i < own.size(); ++i) own[i] += bound[i] / static_cast<double>(bounds.size());
    }
    return own;
  }
  const std::vector<double>& parameter(const Op& op, std::size_t index) const {
    return tensors_.at(graph_.parameters()[op.parameters[index]].name).values;
  }
  // Row `row` of an operation's value; the last for one that a head reads.
  const Row& input(const Op& op, std::size_t index, std::size_t row) const {
    const Value& value = values_[op.inputs[index]];
    return op.kind == OpKind::kHead ? value.rows.back() : value.rows[row];
  }

  void compute(const Op& op, std::size_t row, Row& out, Row& bound) const {
    switch (op.kind) {
      case OpKind::kEmbedding:
        for (std::size_t i = 0; i < op.width; ++i) out[i] = parameter(op, 0)[table_row(op, row) * op.width + i];
        return;
      case OpKind::kMatmul:
      case OpKind::kHead: return matmul(op, row, out, bound);
      case OpKind::kRmsNorm: return norm(op, row, out, bound);
      case OpKind::kLayerNorm: return layer_norm(op, row, out, bound);
      case OpKind::kRotary: return rotary(op, row, out, bound);
      case OpKind::kAttention: return attention(op, row, out, bound);
      case OpKind::kSwiGlu:
        for (std::size_t i = 0; i < op.width; ++i) {
          const double gate = input(op, 0, row)[i];
          out[i] = gate / (1 + std::exp(-gate)) * input(op, 1, row)[i];
          // exp, sum, quotient and product are each within 2 units for arguments in [-1, 1).
          bound[i] = 8 * kUnit * std::fabs(out[i]);
        }
        return;
      case OpKind::kAdd:
        for (std::size_t i = 0; i < op.width; ++i) {
          out[i] = input(op, 0, row)[i] + input(op, 1, row)[i];
          bound[i] = kUnit * std::fabs(out[i]);
        }
        return;
      case OpKind::kSoftmax: return softmax(input(op, 0, row), out, bound, 0);
      case OpKind::kGelu: return gelu(op, row, out, bound);
      case OpKind::kMean:
        for (std::size_t i = 0; i < op.width; ++i) {
          for (std::size_t at = 0; at < tokens_.size(); ++at) out[i] += input(op, 0, at)[i] / static_cast<double>(tokens_.size());
          bound[i] = 2 * kUnit * std::fabs(out[i]);  // the result's rounding; the sum is a double
        }
        return;
      case OpKind::kNormalise: {
        const Row& x = input(op, 0, row);
        double squares = 0;
        for (const double value : x) squares += value * value;
        for (std::size_t i = 0; i < op.width; ++i) {
          out[i] = x[i] / std::max(std::sqrt(squares), op.epsilon);
          bound[i] = 2 * kUnit * std::fabs(out[i]);
        }
        return;
      }
      case OpKind::kTopK: return top_k(op, row, out, bound);
      case OpKind::kExpertMatmul: return expert_matmul(op, row, out, bound);
      case OpKind::kExpertCombine: return expert_combine(op, row, out, bound);
    }
  }

  std::size_t table_row(const Op& op, std::size_t row) const {
    if (op.rows_by == RowsBy::kToken) return tokens_[row];
    return op.rows_by == RowsBy::kPosition ? row : 0;
  }

  void matmul(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row& x = input(op, 0, row);
    const std::vector<double>& weights = parameter(op, op.parameters.size() - 1);
    for (std::size_t i = 0; i < op.width; ++i) {
      double magnitude = 0;
      if (op.parameters.size() == 2) magnitude = std::fabs(out[i] = parameter(op, 0)[i]);
      for (std::size_t c = 0; c < x.size(); ++c) {
        const double product = x[c] * weights[i * x.size() + c];
        out[i] += product;
        magnitude += std::fabs(product);
      }
      // n products and n sums in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
      bound[i] = static_cast<double>(x.size() + 1) * kUnit * magnitude;
    }
  }

  void norm(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row& x = input(op, 0, row);
    double squares = 0;
    for (const double value : x) squares += value * value;
    for (std::size_t i = 0; i < op.width; ++i) {
      out[i] = x[i] / std::sqrt(squares / static_cast<double>(op.width) + op.epsilon) * parameter(op, 0)[i];
      bound[i] = 4 * kUnit * std::fabs(out[i]);  // one rounding of the scale, two of the products
    }
  }

  void layer_norm(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row& x = input(op, 0, row);
    const bool biased = op.parameters.size() == 2;
    const double width = static_cast<double>(op.width);
    double mean = 0, squares = 0;
    for (const double value : x) mean += value / width;
    for (const double value : x) squares += (value - mean) * (value - mean);
    for (std::size_t i = 0; i < op.width; ++i) {
      const double scaled = (x[i] - mean) / std::sqrt(squares / width + op.epsilon) * parameter(op, biased ? 1 : 0)[i];
      out[i] = scaled + (biased ? parameter(op, 0)[i] : 0);
      bound[i] = 2 * kUnit * std::fabs(scaled) + 2 * kUnit * std::fabs(out[i]) + 1e-14;  // quotient, product, sum; doubles before
    }
  }

  void gelu(const Op& op, std::size_t row, Row& out, Row& bound) const {
    constexpr double kPi = 3.14159265358979323846;
    for (std::size_t i = 0; i < op.width; ++i) {
      const double x = input(op, 0, row)[i];
      const double argument = op.gelu == Gelu::kExact ? x / std::sqrt(2.0) : std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x);
      out[i] = x / 2 * (1 + (op.gelu == Gelu::kExact ? std::erf(argument) : std::tanh(argument)));
      // Half of x times the error of 1 + f(argument), whose slope is at most 2 / sqrt(pi): an argument of up to six roundings,
      // f within two units of at most 1, a sum of at most 2; then two products.
      bound[i] = kUnit * (std::fabs(x) / 2 * (7 * std::fabs(argument) + 4) + 2 * std::fabs(out[i]));
    }
  }

  // Scores must be exact: the order of near ones is part of the value.
  void top_k(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row& scores = input(op, 0, row);
    std::vector<std::size_t> order(scores.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t left, std::size_t right) { return scores[left] > scores[right]; });
    Row taken, weights(op.normalise ? op.k : scores.size()), bounds(weights.size());
    for (std::size_t slot = 0; slot < weights.size(); ++slot) taken.push_back(scores[order[slot]]);
    softmax(taken, weights, bounds, 0);
    for (std::size_t slot = 0; slot < op.k; ++slot) {
      out[slot] = static_cast<double>(order[slot]);
      out[op.k + slot] = weights[slot];
      bound[op.k + slot] = bounds[slot];
    }
  }

  // Row `output` of expert `expert` times the elements of x from `at` on. returns: the sum and that of its magnitudes.
  std::pair<double, double> expert_product(const Op& op, double expert, std::size_t output, const Row& x, std::size_t at) const {
    const Shape& shape = graph_.parameters()[op.parameters[0]].shape;
    const std::vector<double>& weights = parameter(op, 0);
    const std::size_t first = (static_cast<std::size_t>(expert) * shape[1] + output) * shape[2];
    double sum = 0, magnitude = 0;
    for (std::size_t c = 0; c < shape[2]; ++c) {
      const double product = x[at + c] * weights[first + c];
      sum += product;
      magnitude += std::fabs(product);
    }
    return {sum, magnitude};
  }

  void expert_matmul(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row &x = input(op, 0, row), &routing = input(op, 1, row);
    const std::size_t outputs = op.width / op.k;
    for (std::size_t i = 0; i < op.width; ++i) {
      const auto [sum, magnitude] = expert_product(op, routing[i / outputs], i % outputs, x, 0);
      out[i] = sum;
      bound[i] = static_cast<double>(x.size() + 1) * kUnit * magnitude;  // as matmul
    }
  }

  void expert_combine(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row &x = input(op, 0, row), &routing = input(op, 1, row), &slack = values_[op.inputs[1]].bounds[row];
    const std::size_t columns = x.size() / op.k;
    for (std::size_t i = 0; i < op.width; ++i) {
      for (std::size_t slot = 0; slot < op.k; ++slot) {
        const auto [sum, magnitude] = expert_product(op, routing[slot], i, x, slot * columns);
        const double weight = routing[op.k + slot];
        out[i] += weight * sum;
        // The product's error, the weight's, and k products and sums.
        bound[i] += weight * static_cast<double>(columns + 1 + op.k) * kUnit * magnitude + slack[op.k + slot] * std::fabs(sum);
      }
    }
  }

  void rotary(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const Row& x = input(op, 0, row);
    const RotaryOptions& options = op.rotary;
    out = x;
    const std::size_t pairs = options.rotary_size / 2;
    for (std::size_t head = 0; head < options.heads; ++head) {
      for (std::size_t pair = 0; pair < pairs; ++pair) {
        const bool interleaved = options.layout == RotaryLayout::kInterleaved;
        const std::size_t a = head * options.head_size + (interleaved ? 2 * pair : pair);
        const std::size_t b = interleaved ? a + 1 : a + pairs;
        const double angle = static_cast<double>(row) * std::pow(options.base, -2.0 * static_cast<double>(pair) / options.rotary_size);
        out[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
        out[b] = x[a] * std::sin(angle) + x[b] * std::cos(angle);
        bound[a] = bound[b] = 3 * kUnit * (std::fabs(x[a]) + std::fabs(x[b]));  // factor, product, sum
      }
    }
  }

  // `slack`: how far each argument may be off already.
  static void softmax(const Row& x, Row& out, Row& bound, double slack) {
    double most = x[0], sum = 0;
    for (const double value : x) most = std::max(most, value);
    for (std::size_t i = 0; i < x.size(); ++i) sum += out[i] = std::exp(x[i] - most);
    for (std::size_t i = 0; i < x.size(); ++i) {
      out[i] /= sum;
      // Arguments off by `slack` and by the rounding of the difference, in numerator and sum; n additions.
      bound[i] = out[i] * (2 * (slack + kUnit * (most - x[i] + 1)) + (static_cast<double>(x.size()) + 8) * kUnit);
    }
  }

  void attention(const Op& op, std::size_t row, Row& out, Row& bound) const {
    const AttentionOptions& options = op.attention;
    const std::size_t size = options.head_size;
    for (std::size_t head = 0; head < options.heads; ++head) {
      const std::size_t group = head / (options.heads / options.kv_heads);
      const std::size_t end = options.causal ? row + 1 : tokens_.size();
      Row scores(end), weights(end), weight_bounds(end);
      double slack = 0;
      for (std::size_t seen = 0; seen < end; ++seen) {
        double magnitude = 0;
        for (std::size_t i = 0; i < size; ++i) {
          const double product = input(op, 0, row)[head * size + i] * input(op, 1, seen)[group * size + i];
          scores[seen] += product;
          magnitude += std::fabs(product);
        }
        scores[seen] /= std::sqrt(static_cast<double>(size));
        slack = std::max(slack, static_cast<double>(size + 2) * kUnit * magnitude / std::sqrt(static_cast<double>(size)));
      }
      softmax(scores, weights, weight_bounds, slack);
      for (std::size_t i = 0; i < size; ++i) {
        double& sum = out[head * size + i];
        double& error = bound[head * size + i];
        for (std::size_t seen = 0; seen < end; ++seen) {
          const double value = input(op, 2, seen)[group * size + i];
          sum += weights[seen] * value;
          error += (weight_bounds[seen] + static_cast<double>(end + 1) * kUnit * weights[seen]) * std::fabs(value);
        }
      }
    }
  }

  const Graph& graph_;
  const Tensors& tensors_;
  const std::vector<Token>& tokens_;
  std::vector<Value> values_;
};

}  // namespace

Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<double>& values) {
  Tensor tensor{.dtype = dtype, .shape = shape, .bytes = {}, .values = {}};
  const std::size_t size = dtype_bits(dtype) / 8;
  for (const double value : values) {
    const std::uint32_t bits = encode(dtype, value);
    for (std::size_t byte = 0; byte < size; ++byte) tensor.bytes.push_back(static_cast<std::byte>((bits >> (8 * byte)) & 0xff));
    tensor.values.push_back(decode(dtype, bits));
  }
  return tensor;
}

Tensor random_tensor(DType dtype, const Shape& shape, std::uint64_t seed) {
  Random random(seed);
  std::vector<double> values(shape.elements());
  for (double& value : values) value = static_cast<double>(random.below(1U << 24)) / (1U << 23) - 1.0;
  return tensor_of(dtype, shape, values);
}

Tensors random_tensors(const Graph& graph, DType dtype, std::uint64_t seed) {
  Tensors out;
  for (const Parameter& parameter : graph.parameters()) out.emplace(parameter.name, random_tensor(dtype, parameter.shape, seed++));
  return out;
}

LlamaConfig small_llama() {
  LlamaConfig out;
  out.layers = 2;
  out.width = 32;
  out.ffn_width = 48;
  out.vocabulary = 96;
  out.heads = 4;
  out.kv_heads = 2;
  out.attention_bias = true;
  out.tied_head = true;
  return out;
}

Tensor identity(std::uint64_t size) {
  std::vector<double> values(size * size);
  for (std::uint64_t i = 0; i < size; ++i) values[i * size + i] = 1;
  return tensor_of(DType::kF32, Shape{size, size}, values);
}

std::vector<TensorInfo> infos(const Tensors& tensors) {
  std::vector<TensorInfo> out;
  for (const auto& [name, tensor] : tensors) out.push_back({name, tensor.dtype, tensor.shape});
  return out;
}

Answer evaluate(const Graph& graph, const Tensors& tensors, const std::vector<Token>& tokens) {
  return Evaluator(graph, tensors, tokens).run();
}

Result<std::vector<float>> step(Session& session, const Tensors& tensors, std::span<const Token> tokens, std::uint64_t rows) {
  PARAMWIRE_CHECK(session.begin(tokens));
  while (const Pending* pending = session.pending()) {
    const Need& need = session.binding().needs()[pending->need];
    const std::uint64_t begin = pending->next_row, end = std::min(need.rows, begin + rows);
    const std::span<const std::byte> bytes(tensors.at(need.tensor).bytes);
    PARAMWIRE_CHECK(session.supply({need.tensor, need.dtype, begin, end,
                                    bytes.subspan(begin * need.row_bytes, (end - begin) * need.row_bytes)}));
  }
  PARAMWIRE_TRY(logits, session.finish());
  return std::vector<float>(logits.begin(), logits.end());
}

}  // namespace paramwire::oracle
