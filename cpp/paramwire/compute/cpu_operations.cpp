// CpuSession's operations.
#include "paramwire/compute/blas.hpp"
#include "paramwire/compute/cpu_session.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

namespace paramwire {

namespace {

// Weights of one part of a decode job: 64 KiB take about 8 microseconds at 8 GB/s, far above the cost of taking a part
// (well below one), and cut the smallest projections of a small model in several. Smaller: overhead; larger: idle threads.
constexpr std::uint64_t kPartBytes = 64 * 1024;
// Up to this many tokens the dot kernels beat widening and BLAS. bf16 [rows, 576], one thread, AVX-512 and BLIS's Haswell
// kernels, GFLOP/s of CPU time for 1, 2, 3, 4, 8, 32 tokens: dot 10.5 17.7 15.5 16.8 18.7 21.1, BLAS 6.4 12.1 15.8 17.8 26.9
// 45.7. With AVX2 and with 1536 columns the two cross at the same place.
constexpr std::uint64_t kDotTokens = 2;
constexpr std::uint64_t kTileRowsMax = 128;
// Elements below which a loop over rows is not worth a job for the team (about 10 microseconds of work).
constexpr std::uint64_t kTeamElements = 32 * 1024;
// Query positions of one attention part: enough to outweigh taking it, few enough to share a prompt's late, long rows.
constexpr std::uint64_t kAttentionTokens = 8;

float silu(float x) { return x / (1.0F + std::exp(-x)); }

float gelu_exact(float x) { return 0.5F * x * (1.0F + std::erf(x * (1.0F / std::numbers::sqrt2_v<float>))); }

float gelu_tanh(float x) {
  constexpr float kScale = 0.797884560802865F;  // sqrt(2 / pi)
  return 0.5F * x * (1.0F + std::tanh(kScale * (x + 0.044715F * x * x * x)));
}

// In place, stable: the largest is taken off first.
void softmax_row(float* row, std::uint64_t count) {
  float most = -std::numeric_limits<float>::infinity();
  for (std::uint64_t i = 0; i < count; ++i) most = std::max(most, row[i]);
  float sum = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    row[i] = std::exp(row[i] - most);
    sum += row[i];
  }
  const float scale = 1.0F / sum;
  for (std::uint64_t i = 0; i < count; ++i) row[i] *= scale;
}

// The order of a routing: larger scores first, ties by number, what is not a number last.
bool precedes(const float* scores, std::uint64_t left, std::uint64_t right) {
  const bool no_left = std::isnan(scores[left]), no_right = std::isnan(scores[right]);
  if (no_left || no_right) return no_left == no_right ? left < right : no_right;
  return scores[left] > scores[right] || (!(scores[left] < scores[right]) && left < right);
}

// One row of a routing: k numbers, then k weights.
void route(const float* scores, std::uint64_t experts, std::uint32_t k, bool normalise, float* routing) {
  float* weights = routing + k;
  std::uint64_t last = experts;  // none yet
  for (std::uint32_t slot = 0; slot < k; ++slot) {
    std::uint64_t next = experts;
    for (std::uint64_t expert = 0; expert < experts; ++expert) {
      if (last != experts && !precedes(scores, last, expert)) continue;
      if (next == experts || precedes(scores, expert, next)) next = expert;
    }
    routing[slot] = static_cast<float>(next);
    weights[slot] = scores[next];
    last = next;
  }
  if (normalise) return softmax_row(weights, k);
  float sum = 0;
  const float most = weights[0];
  for (std::uint64_t expert = 0; expert < experts; ++expert) sum += std::exp(scores[expert] - most);
  for (std::uint32_t slot = 0; slot < k; ++slot) weights[slot] = std::exp(weights[slot] - most) / sum;
}

}  // namespace

// body(row) for each row, by the team when there is enough to do.
template <typename Body>
void CpuSession::each_row(std::uint64_t rows, std::uint64_t width, Body&& body) {
  const std::uint64_t parts = rows * width < kTeamElements ? 1 : std::min<std::uint64_t>(rows, 4 * context_->team->threads());
  if (parts == 1) {
    for (std::uint64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  context_->team->run(static_cast<std::uint32_t>(parts), [&](std::uint32_t part, std::uint32_t) {
    for (std::uint64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) body(row);
  });
}

void CpuSession::compute(const Op& op, std::uint32_t index) {
  const std::uint64_t rows = rows_of(op), width = op.width;
  float* out = value(index);
  const float* left = value(op.inputs[0]);
  // The weight of an element that costs an exponential or the like.
  constexpr std::uint64_t kHard = 4;
  const auto each_element = [&](std::uint64_t weight, auto&& element) {
    each_row(rows, width * weight, [&](std::uint64_t row) {
      for (std::uint64_t i = row * width; i < (row + 1) * width; ++i) out[i] = element(i);
    });
  };
  switch (op.kind) {
    case OpKind::kRotary: return compute_rotary(op, index);
    case OpKind::kAttention: return compute_attention(op, index);
    case OpKind::kMean: return compute_mean(op, index);
    case OpKind::kSwiGlu: return each_element(kHard, [left, up = value(op.inputs[1])](std::uint64_t i) { return silu(left[i]) * up[i]; });
    case OpKind::kAdd: return each_element(1, [left, right = value(op.inputs[1])](std::uint64_t i) { return left[i] + right[i]; });
    case OpKind::kGelu:
      if (op.gelu == Gelu::kTanh) return each_element(kHard, [left](std::uint64_t i) { return gelu_tanh(left[i]); });
      return each_element(kHard, [left](std::uint64_t i) { return gelu_exact(left[i]); });
    case OpKind::kSoftmax:
      return each_row(rows, width * kHard, [&](std::uint64_t row) {
        std::copy_n(left + row * width, width, out + row * width);
        softmax_row(out + row * width, width);
      });
    case OpKind::kNormalise:
      return each_row(rows, width, [&](std::uint64_t row) {
        const float* x = left + row * width;
        double squares = 0;
        for (std::uint64_t i = 0; i < width; ++i) squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        const double length = std::max(std::sqrt(squares), op.epsilon);
        for (std::uint64_t i = 0; i < width; ++i) out[row * width + i] = static_cast<float>(static_cast<double>(x[i]) / length);
      });
    case OpKind::kTopK: {
      const std::uint64_t experts = binding_.graph().ops()[op.inputs[0]].width;
      return each_row(rows, experts * (op.k + kHard), [&](std::uint64_t row) {
        route(left + row * experts, experts, op.k, op.normalise, out + row * width);
      });
    }
    default: return;  // the others have parameters and never come here
  }
}

void CpuSession::compute_mean(const Op& op, std::uint32_t index) {
  const float* x = value(op.inputs[0]);
  float* out = value(index);
  const std::uint64_t rows = tokens_.size();
  for (std::uint64_t column = 0; column < op.width; ++column) {
    double sum = 0;
    for (std::uint64_t row = 0; row < rows; ++row) sum += static_cast<double>(x[row * op.width + column]);
    out[column] = static_cast<float>(sum / static_cast<double>(rows));
  }
}

void CpuSession::compute_rotary(const Op& op, std::uint32_t index) {
  const RotaryTable& table = rotary_[rotary_of_[index]];
  const float* x = value(op.inputs[0]);
  float* out = value(index);
  const bool interleaved = op.rotary.layout == RotaryLayout::kInterleaved;
  const std::uint64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : table.pairs;
  each_row(tokens_.size(), op.width, [&](std::uint64_t row) {
    const float* cosines = table.cosines.data() + row * table.pairs;
    const float* sines = table.sines.data() + row * table.pairs;
    for (std::uint32_t head = 0; head < op.rotary.heads; ++head) {
      const std::uint64_t at = row * op.width + std::uint64_t{head} * op.rotary.head_size;
      for (std::uint32_t pair = 0; pair < table.pairs; ++pair) {
        const std::uint64_t first = at + pair * step;
        const float a = x[first], b = x[first + other];
        out[first] = a * cosines[pair] - b * sines[pair];
        out[first + other] = a * sines[pair] + b * cosines[pair];
      }
      for (std::uint32_t i = op.rotary.rotary_size; i < op.rotary.head_size; ++i) out[at + i] = x[at + i];
    }
  });
}

void CpuSession::compute_attention(const Op& op, std::uint32_t index) {
  const AttentionOptions& options = op.attention;
  const std::uint64_t size = options.head_size, count = tokens_.size();
  const float *query = value(op.inputs[0]), *key = value(op.inputs[1]), *fresh = value(op.inputs[2]);
  float* out = value(index);
  // Bidirectional attention begins at position 0 (check_step).
  for (std::uint32_t head = 0; head < options.kv_heads; ++head) {
    for (std::uint64_t token = 0; token < count; ++token) {
      const std::uint64_t from = (token * options.kv_heads + head) * size, to = (position_ + token) * size;
      std::memcpy(keys(op, head) + to, key + from, size * sizeof(float));
      std::memcpy(values(op, head) + to, fresh + from, size * sizeof(float));
    }
  }

  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  const auto attend = [&](std::uint32_t head, std::uint64_t token, float* scores) {
    const std::uint32_t kv_head = head / (options.heads / options.kv_heads);
    const std::uint64_t seen = options.causal ? position_ + token + 1 : count;
    const std::uint64_t at = (token * options.heads + head) * size;
    const kernels::Rows rows{reinterpret_cast<const std::byte*>(keys(op, kv_head)), seen, size, size * sizeof(float)};
    context_->kernels->dot_rows[kernels::format_index(DType::kF32)](rows, query + at, 0, 1, scores, 0, false);
    for (std::uint64_t i = 0; i < seen; ++i) scores[i] *= scale;
    softmax_row(scores, seen);
    context_->kernels->mix_rows(scores, values(op, kv_head), seen, size, out + at);
  };
  if (op.width * count * (position_ + count) < kTeamElements) {
    for (std::uint32_t head = 0; head < options.heads; ++head) {
      for (std::uint64_t token = 0; token < count; ++token) attend(head, token, worker_scratch(0));
    }
    return;
  }
  // Longest rows first (parts are taken from the highest number down), so that no thread ends with a long one alone.
  const std::uint64_t most_blocks = Team::kPartsMax / options.heads;  // at least 1: open() bounds the heads
  const std::uint64_t per_part = std::max(kAttentionTokens, (count + most_blocks - 1) / most_blocks);
  const std::uint64_t blocks = (count + per_part - 1) / per_part;
  context_->team->run(static_cast<std::uint32_t>(blocks * options.heads), [&](std::uint32_t part, std::uint32_t worker) {
    const std::uint64_t block = part / options.heads;
    for (std::uint64_t token = block * per_part; token < std::min(count, (block + 1) * per_part); ++token) {
      attend(part % options.heads, token, worker_scratch(worker));
    }
  });
}

void CpuSession::measure_rows(const Op& op) {
  means_.resize(rows_of(op));
  scales_.resize(rows_of(op));
  const float* values = value(op.inputs[0]);
  const auto width = static_cast<double>(op.width);
  each_row(rows_of(op), op.width, [&](std::uint64_t row) {
    const float* x = values + row * op.width;
    double mean = 0, squares = 0;
    if (op.kind == OpKind::kLayerNorm) {
      for (std::uint64_t i = 0; i < op.width; ++i) mean += static_cast<double>(x[i]);
      mean /= width;
    }
    for (std::uint64_t i = 0; i < op.width; ++i) {
      const double difference = static_cast<double>(x[i]) - mean;
      squares += difference * difference;
    }
    means_[row] = mean;
    scales_[row] = 1.0 / std::sqrt(squares / width + op.epsilon);
  });
}

void CpuSession::take(const Op& op, const Need& need, const WeightView& view) {
  const bool bias = op.parameters.size() == 2 && needs_left_ == 2;  // it comes before its weight
  switch (op.kind) {
    case OpKind::kEmbedding: return take_embedding(op, view);
    case OpKind::kExpertMatmul:
    case OpKind::kExpertCombine: return take_experts(op, need, view);
    case OpKind::kRmsNorm:
    case OpKind::kLayerNorm: return bias ? take_bias(op, view) : take_norm(op, view);
    default: return bias ? take_bias(op, view) : take_matrix(op, need, view);
  }
}

void CpuSession::take_embedding(const Op& op, const WeightView& view) {
  const std::size_t format = kernels::format_index(view.dtype);
  const std::uint64_t row_bytes = view.data.size() / (view.row_end - view.row_begin);
  float* out = value(next_op_);
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::uint64_t row = table_row(op, i);
    if (row < view.row_begin || row >= view.row_end) continue;
    context_->kernels->widen[format](view.data.data() + (row - view.row_begin) * row_bytes, out + i * op.width, op.width);
  }
}

void CpuSession::take_bias(const Op& op, const WeightView& view) {
  const std::uint64_t count = view.row_end - view.row_begin;
  float* out = value(next_op_) + view.row_begin;
  context_->kernels->widen[kernels::format_index(view.dtype)](view.data.data(), out, count);
  for (std::uint64_t row = 1; row < rows_of(op); ++row) std::copy_n(out, count, out + row * op.width);
}

void CpuSession::take_norm(const Op& op, const WeightView& view) {
  const std::uint64_t element = dtype_bits(view.dtype) / 8;
  const bool biased = op.parameters.size() == 2;
  const float* x = value(op.inputs[0]);
  float* out = value(next_op_);
  float* weights = worker_scratch(0);  // as much of them as fits it at a time
  for (std::uint64_t first = view.row_begin; first < view.row_end; first += scratch_floats_) {
    const std::uint64_t count = std::min(scratch_floats_, view.row_end - first);
    context_->kernels->widen[kernels::format_index(view.dtype)](view.data.data() + (first - view.row_begin) * element, weights, count);
    each_row(rows_of(op), count, [&](std::uint64_t row) {
      const float* from = x + row * op.width + first;
      float* to = out + row * op.width + first;
      for (std::uint64_t i = 0; i < count; ++i) {
        const float scaled = static_cast<float>((static_cast<double>(from[i]) - means_[row]) * scales_[row]) * weights[i];
        to[i] = biased ? to[i] + scaled : scaled;
      }
    });
  }
}

// Output columns [row_begin, row_end) of x W^T.
void CpuSession::take_matrix(const Op& op, const Need& need, const WeightView& view) {
  const Op& input = binding_.graph().ops()[op.inputs[0]];
  const std::uint64_t tokens = rows_of(op);
  // A head reads the last position alone.
  const float* x = value(op.inputs[0]) + (rows_of(input) - tokens) * input.width;
  multiply({view.data.data(), view.row_end - view.row_begin, input.width, need.row_bytes}, need.dtype, x, tokens,
           value(next_op_) + view.row_begin, op.width, op.parameters.size() == 2);
}

// The products of the wanted experts in `view`, one after another: the rows that picked one are gathered, so that its matrix is
// read once, as any other.
void CpuSession::take_experts(const Op& op, const Need& need, const WeightView& view) {
  const Shape& shape = binding_.graph().parameters()[need.parameter].shape;
  const bool combine = op.kind == OpKind::kExpertCombine;
  const std::uint64_t outputs = shape[1], columns = shape[2], rows = rows_of(op);
  const float *x = value(op.inputs[0]), *routing = value(op.inputs[1]);
  float* out = value(next_op_);
  float* gathered = reinterpret_cast<float*>(gathered_.data());
  for (std::size_t at = rows_taken_; at < wanted_rows_.size() && wanted_rows_[at] < view.row_end; ++at) {
    const std::uint64_t expert = wanted_rows_[at];
    picks_.clear();
    for (std::uint64_t pick = 0; pick < rows * op.k; ++pick) {
      if (static_cast<std::uint64_t>(routing[pick / op.k * 2 * op.k + pick % op.k]) != expert) continue;
      std::copy_n(x + (combine ? pick : pick / op.k) * columns, columns, gathered + picks_.size() * columns);
      picks_.push_back(pick);
    }
    float* products = gathered + picks_.size() * columns;
    const std::byte* weights = view.data.data() + (expert - view.row_begin) * need.row_bytes;
    multiply({weights, outputs, columns, need.row_bytes / outputs}, need.dtype, gathered, picks_.size(), products, outputs, false);
    for (std::size_t i = 0; i < picks_.size(); ++i) {
      const float* from = products + i * outputs;
      if (!combine) {
        std::copy_n(from, outputs, out + picks_[i] * outputs);
        continue;
      }
      const std::uint64_t token = picks_[i] / op.k;
      const float weight = routing[token * 2 * op.k + op.k + picks_[i] % op.k];
      for (std::uint64_t column = 0; column < outputs; ++column) out[token * op.width + column] += weight * from[column];
    }
  }
}

// y (+)= x W^T for `tokens` packed rows of x.
void CpuSession::multiply(const kernels::Rows& weights, DType dtype, const float* x, std::uint64_t tokens, float* y,
                          std::uint64_t y_stride, bool accumulate) {
  const std::uint64_t columns = weights.columns, rows = weights.count;
  const std::size_t format = kernels::format_index(dtype);
  const std::uint64_t threads = context_->team->threads();

  if (tokens <= kDotTokens) {
    const std::uint64_t wanted = std::clamp<std::uint64_t>(rows * weights.stride_bytes / kPartBytes, 1, std::min<std::uint64_t>(8 * threads, Team::kPartsMax));
    const std::uint64_t per_part = round_up((rows + wanted - 1) / wanted, 4);
    context_->team->run(static_cast<std::uint32_t>((rows + per_part - 1) / per_part), [&](std::uint32_t part, std::uint32_t) {
      const std::uint64_t first = part * per_part;
      const kernels::Rows piece{weights.data + first * weights.stride_bytes, std::min(per_part, rows - first), columns, weights.stride_bytes};
      context_->kernels->dot_rows[format](piece, x, columns, tokens, y + first, y_stride, accumulate);
    });
    return;
  }

  const std::uint64_t tile = std::clamp<std::uint64_t>(round_up((rows + threads - 1) / threads, 16), 1,
                                                       std::min(kTileRowsMax, scratch_floats_ / columns));
  const std::uint64_t per_part = round_up((rows + Team::kPartsMax - 1) / Team::kPartsMax, tile);
  context_->team->run(static_cast<std::uint32_t>((rows + per_part - 1) / per_part), [&](std::uint32_t part, std::uint32_t worker) {
    const std::uint64_t end = std::min(rows, (part + 1) * per_part);
    for (std::uint64_t first = part * per_part; first < end; first += tile) {
      const std::uint64_t count = std::min(tile, end - first);
      const std::byte* tile_rows = weights.data + first * weights.stride_bytes;
      const float* wide = reinterpret_cast<const float*>(tile_rows);
      if (dtype != DType::kF32) {
        context_->kernels->widen[format](tile_rows, worker_scratch(worker), count * columns);
        wide = worker_scratch(worker);
      }
      blas::multiply(tokens, count, columns, x, columns, wide, columns, y + first, y_stride, accumulate);
    }
  });
}

}  // namespace paramwire
