#include "paramwire/compute/cpu_session.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/blas.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
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
// float32 scratch of one worker for widened tiles: 256 KiB stay in any L2 cache together with the packed copy.
constexpr std::uint64_t kTileFloats = 64 * 1024;
constexpr std::uint64_t kTileRowsMax = 128;
// Elements below which a loop over rows is not worth a job for the team (about 10 microseconds of work).
constexpr std::uint64_t kTeamElements = 32 * 1024;
// Query positions of one attention part: enough to outweigh taking it, few enough to share a prompt's late, long rows.
constexpr std::uint64_t kAttentionTokens = 8;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) { return (value + step - 1) / step * step; }

std::uint64_t columns_of(const Parameter& parameter) { return parameter.shape.rank() == 1 ? 1 : parameter.shape[1]; }

float silu(float x) { return x / (1.0F + std::exp(-x)); }

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

}  // namespace

// ---------------------------------------------------------------- opening

Result<std::unique_ptr<Session>> CpuSession::open(std::shared_ptr<CpuContext> context, const Binding& binding,
                                                  const SessionOptions& options) {
  if (options.context_tokens == 0 || options.step_tokens == 0) {
    return Error(Code::kInvalid, cat("cpu session: context_tokens is ", options.context_tokens, ", step_tokens is ",
                                     options.step_tokens, ", expected both above 0"));
  }
  // Products take int sizes (blas.hpp), positions are 32 bits everywhere else too.
  constexpr std::uint64_t kMost = 1U << 24;
  if (options.context_tokens > kMost || options.step_tokens > kMost) {
    return Error(Code::kInvalid, cat("cpu session: context_tokens is ", options.context_tokens, ", step_tokens is ",
                                     options.step_tokens, ", expected at most ", kMost));
  }
  for (const Parameter& parameter : binding.graph().parameters()) {
    for (const std::uint64_t size : parameter.shape.dims()) {
      if (size > kMost * 64) return Error(Code::kInvalid, cat("cpu session: tensor '", parameter.name, "' has an axis of ", size));
    }
  }
  for (const Op& op : binding.graph().ops()) {
    if (op.kind == OpKind::kAttention && op.attention.heads > Team::kPartsMax) {
      return Error(Code::kInvalid, cat("cpu session: operation '", op.name, "' has ", op.attention.heads, " heads, expected at most ",
                                       Team::kPartsMax));
    }
  }
  std::unique_ptr<CpuSession> session(new CpuSession(std::move(context), binding, options));
  PARAMWIRE_CHECK(session->allocate());
  return std::unique_ptr<Session>(std::move(session));
}

// Where each value lies: the lowest gap that no value alive at the same time uses. returns: floats in all.
std::uint64_t CpuSession::place_values(std::vector<std::uint64_t>& offsets) const {
  const std::vector<Op>& ops = binding_.graph().ops();
  std::vector<std::size_t> last_use(ops.size());
  for (std::size_t index = 0; index < ops.size(); ++index) {
    last_use[index] = index;
    for (const std::uint32_t input : ops[index].inputs) last_use[input] = index;
  }
  last_use.back() = ops.size();  // the output stays for the caller
  struct Place {
    std::uint64_t begin, end;
    std::size_t last;
  };
  std::vector<Place> live;  // by begin
  std::uint64_t total = 0;
  offsets.assign(ops.size(), 0);
  for (std::size_t index = 0; index < ops.size(); ++index) {
    std::erase_if(live, [index](const Place& place) { return place.last < index; });
    const std::uint64_t rows = ops[index].last_only ? 1 : options_.step_tokens;
    const std::uint64_t size = round_up(rows * ops[index].width, 16);  // 64 bytes
    std::uint64_t at = 0;
    auto next = live.begin();
    while (next != live.end() && next->begin - at < size) at = (next++)->end;
    live.insert(next, {at, at + size, last_use[index]});
    offsets[index] = at;
    total = std::max(total, at + size);
  }
  return total;
}

Status CpuSession::allocate() {
  const Graph& graph = binding_.graph();
  std::uint64_t cache_floats = 0, widest = 1;
  cache_at_.resize(graph.caches());
  rotary_of_.assign(graph.ops().size(), 0);
  for (std::size_t index = 0; index < graph.ops().size(); ++index) {
    const Op& op = graph.ops()[index];
    if (op.kind == OpKind::kAttention) {
      cache_at_[op.cache] = cache_floats;
      cache_floats += 2 * options_.context_tokens * round_up(std::uint64_t{op.attention.kv_heads} * op.attention.head_size, 16);
    }
    for (const std::uint32_t at : op.parameters) widest = std::max(widest, columns_of(graph.parameters()[at]));
    if (op.kind != OpKind::kRotary) continue;
    const std::uint32_t pairs = op.rotary.rotary_size / 2;
    const auto same = std::find_if(rotary_.begin(), rotary_.end(), [&](const RotaryTable& table) {
      return table.base == op.rotary.base && table.pairs == pairs;
    });
    rotary_of_[index] = static_cast<std::uint32_t>(same - rotary_.begin());
    if (same != rotary_.end()) continue;
    RotaryTable table{.base = op.rotary.base, .pairs = pairs, .turns = {}, .cosines = {}, .sines = {}};
    for (std::uint32_t pair = 0; pair < pairs; ++pair) {
      table.turns.push_back(std::pow(op.rotary.base, -2.0 * pair / op.rotary.rotary_size));
    }
    rotary_.push_back(std::move(table));
  }
  scratch_floats_ = round_up(std::max({kTileFloats, 4 * widest, options_.context_tokens}), 16);
  const std::uint64_t value_floats = place_values(value_at_);
  PARAMWIRE_TRY(activations, Buffer::allocate(value_floats * sizeof(float)));
  PARAMWIRE_TRY(caches, Buffer::allocate(cache_floats * sizeof(float)));
  PARAMWIRE_TRY(scratch, Buffer::allocate(scratch_floats_ * context_->team->threads() * sizeof(float)));
  activations_ = std::move(activations);
  caches_ = std::move(caches);
  scratch_ = std::move(scratch);
  // Everything that a step grows, so that later steps allocate nothing.
  tokens_.reserve(options_.step_tokens);
  wanted_rows_.reserve(options_.step_tokens);
  norms_.reserve(options_.step_tokens);
  for (RotaryTable& table : rotary_) {
    table.cosines.reserve(options_.step_tokens * table.pairs);
    table.sines.reserve(options_.step_tokens * table.pairs);
  }
  return {};
}

// Keys of one head: [position][head_size]; all keys of a cache lie before its values.
float* CpuSession::keys(const Op& op, std::uint32_t kv_head) noexcept {
  return reinterpret_cast<float*>(caches_.data()) + cache_at_[op.cache] +
         options_.context_tokens * op.attention.head_size * kv_head;
}

float* CpuSession::values(const Op& op, std::uint32_t kv_head) noexcept {
  return keys(op, kv_head) + options_.context_tokens * round_up(std::uint64_t{op.attention.kv_heads} * op.attention.head_size, 16);
}

// ---------------------------------------------------------------- the step

Status CpuSession::begin(std::span<const Token> tokens) {
  if (running_) return Error(Code::kInvalid, "begin: a step is running; finish() or abandon() it first");
  if (tokens.empty() || tokens.size() > options_.step_tokens) {
    return Error(Code::kInvalid, cat("begin: ", tokens.size(), " tokens, expected 1 to step_tokens ", options_.step_tokens));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= binding_.graph().vocabulary()) {
      return Error(Code::kInvalid, cat("begin: token ", i, " is ", tokens[i], ", expected below the vocabulary's ",
                                       binding_.graph().vocabulary()));
    }
  }
  if (tokens.size() > options_.context_tokens - position_) {
    return Error(Code::kBackpressure, cat("begin: ", tokens.size(), " tokens after position ", position_,
                                          " exceed context_tokens ", options_.context_tokens,
                                          "; rewind(), or open a session with more"));
  }
  tokens_.assign(tokens.begin(), tokens.end());
  wanted_rows_.assign(tokens.begin(), tokens.end());
  std::sort(wanted_rows_.begin(), wanted_rows_.end());
  wanted_rows_.erase(std::unique(wanted_rows_.begin(), wanted_rows_.end()), wanted_rows_.end());
  for (RotaryTable& table : rotary_) {
    table.cosines.resize(tokens.size() * table.pairs);
    table.sines.resize(tokens.size() * table.pairs);
    for (std::size_t at = 0; at < table.cosines.size(); ++at) {
      const double angle = static_cast<double>(position_ + at / table.pairs) * table.turns[at % table.pairs];
      table.cosines[at] = static_cast<float>(std::cos(angle));
      table.sines[at] = static_cast<float>(std::sin(angle));
    }
  }
  running_ = true;
  next_op_ = 0;
  next_need_ = 0;
  advance();
  return {};
}

// Run operations up to the next one that needs a parameter, or to the end.
void CpuSession::advance() {
  const std::vector<Op>& ops = binding_.graph().ops();
  for (; next_op_ < ops.size(); ++next_op_) {
    const Op& op = ops[next_op_];
    if (op.parameters.empty()) {
      compute(op, next_op_);
      continue;
    }
    needs_left_ = op.parameters.size();
    if (op.kind == OpKind::kRmsNorm) {
      norms_.resize(rows_of(op));
      const float* x = value(op.inputs[0]);
      each_row(norms_.size(), op.width, [&](std::uint64_t row) {
        double squares = 0;
        for (std::uint64_t i = 0; i < op.width; ++i) squares += static_cast<double>(x[row * op.width + i]) * static_cast<double>(x[row * op.width + i]);
        norms_[row] = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(op.width) + op.epsilon));
      });
    }
    await(next_need_);
    return;
  }
  waiting_ = false;
}

void CpuSession::await(std::size_t need) {
  waiting_ = true;
  rows_taken_ = 0;
  pending_ = {.need = need, .next_row = 0, .rows = {}};
  if (binding_.needs()[need].access == Access::kRowsByData) {
    pending_.rows = wanted_rows_;
    pending_.next_row = wanted_rows_.front();
  }
}

Status CpuSession::check_view(const Need& need, const WeightView& view) const {
  const auto refuse = [&](const std::string& text) {
    return Error(Code::kInvalid, cat("supply for tensor '", need.tensor, "' of operation '", binding_.graph().ops()[need.op].name,
                                     "': ", text));
  };
  if (view.tensor != need.tensor) return refuse(cat("given tensor '", view.tensor, "'"));
  if (view.dtype != need.dtype) return refuse(cat("given dtype ", dtype_name(view.dtype), ", expected ", dtype_name(need.dtype)));
  const bool begins_right = need.access == Access::kWhole ? view.row_begin == pending_.next_row : view.row_begin <= pending_.next_row;
  if (!begins_right || view.row_end <= pending_.next_row || view.row_end > need.rows) {
    return refuse(cat("given rows [", view.row_begin, ", ", view.row_end, "), expected rows from ", pending_.next_row,
                      " on, at most to ", need.rows));
  }
  const std::uint64_t bytes = (view.row_end - view.row_begin) * need.row_bytes;
  if (view.data.size() != bytes) return refuse(cat("given ", view.data.size(), " bytes, expected ", bytes));
  const std::uintptr_t element = dtype_bits(need.dtype) / 8;
  if (reinterpret_cast<std::uintptr_t>(view.data.data()) % element != 0) {
    return refuse(cat("data is not aligned to its element of ", element, " bytes"));
  }
  return {};
}

Status CpuSession::supply(const WeightView& view) {
  if (!waiting_) {
    return Error(Code::kInvalid, cat("supply of tensor '", view.tensor, "': nothing is pending; ",
                                     running_ ? "finish() the step" : "begin() a step first"));
  }
  const Need& need = binding_.needs()[pending_.need];
  PARAMWIRE_CHECK(check_view(need, view));
  const Op& op = binding_.graph().ops()[next_op_];
  bool complete = view.row_end == need.rows;
  switch (op.kind) {
    case OpKind::kEmbedding:
      take_embedding(op, view);
      while (rows_taken_ < wanted_rows_.size() && wanted_rows_[rows_taken_] < view.row_end) ++rows_taken_;
      complete = rows_taken_ == wanted_rows_.size();
      if (!complete) pending_.rows = std::span<const std::uint64_t>(wanted_rows_).subspan(rows_taken_);
      break;
    case OpKind::kRmsNorm: take_norm(op, view); break;
    default:
      if (needs_left_ == 2) {
        take_bias(op, view);
      } else {
        take_matrix(op, need, view);
      }
      break;
  }
  if (!complete) {
    pending_.next_row = op.kind == OpKind::kEmbedding ? pending_.rows.front() : view.row_end;
    return {};
  }
  ++next_need_;
  if (--needs_left_ > 0) {
    await(next_need_);
  } else {
    ++next_op_;
    advance();
  }
  return {};
}

Result<std::span<const float>> CpuSession::finish() {
  if (!running_) return Error(Code::kInvalid, "finish: no step is running; begin() one first");
  if (waiting_) {
    return Error(Code::kInvalid, cat("finish: tensor '", binding_.needs()[pending_.need].tensor, "' is still pending from row ",
                                     pending_.next_row, " on; supply() it"));
  }
  running_ = false;
  position_ += tokens_.size();
  const std::uint32_t last = static_cast<std::uint32_t>(binding_.graph().ops().size() - 1);
  return std::span<const float>(value(last), binding_.output_width());
}

void CpuSession::abandon() noexcept {
  // Keys and values of the step lie behind position_: the next step overwrites them before it reads them.
  running_ = false;
  waiting_ = false;
}

Status CpuSession::rewind(std::uint64_t position) {
  if (running_) return Error(Code::kInvalid, "rewind: a step is running; finish() or abandon() it first");
  if (position > position_) return Error(Code::kInvalid, cat("rewind to ", position, ", expected at most the position ", position_));
  position_ = position;
  return {};
}

// ---------------------------------------------------------------- operations

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
  switch (op.kind) {
    case OpKind::kRotary: return compute_rotary(op, index);
    case OpKind::kAttention: return compute_attention(op, index);
    case OpKind::kSwiGlu: {
      const float* up = value(op.inputs[1]);
      return each_row(rows, width * 4, [&](std::uint64_t row) {
        for (std::uint64_t i = row * width; i < (row + 1) * width; ++i) out[i] = silu(left[i]) * up[i];
      });
    }
    case OpKind::kAdd: {
      const float* right = value(op.inputs[1]);
      return each_row(rows, width, [&](std::uint64_t row) {
        for (std::uint64_t i = row * width; i < (row + 1) * width; ++i) out[i] = left[i] + right[i];
      });
    }
    case OpKind::kSoftmax:
      return each_row(rows, width * 4, [&](std::uint64_t row) {
        std::copy_n(left + row * width, width, out + row * width);
        softmax_row(out + row * width, width);
      });
    default: return;  // the others have parameters and never come here
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
    const std::uint64_t seen = position_ + token + 1;  // causal: itself and all before it
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

void CpuSession::take_embedding(const Op& op, const WeightView& view) {
  const std::size_t format = kernels::format_index(view.dtype);
  const std::uint64_t row_bytes = view.data.size() / (view.row_end - view.row_begin);
  float* out = value(next_op_);
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    if (tokens_[i] < view.row_begin || tokens_[i] >= view.row_end) continue;
    context_->kernels->widen[format](view.data.data() + (tokens_[i] - view.row_begin) * row_bytes, out + i * op.width, op.width);
  }
}

void CpuSession::take_bias(const Op& op, const WeightView& view) {
  const std::uint64_t count = view.row_end - view.row_begin;
  float* out = value(next_op_) + view.row_begin;
  context_->kernels->widen[kernels::format_index(view.dtype)](view.data.data(), out, count);
  for (std::uint64_t row = 1; row < rows_of(op); ++row) std::copy_n(out, count, out + row * op.width);
}

void CpuSession::take_norm(const Op& op, const WeightView& view) {
  const std::uint64_t count = view.row_end - view.row_begin, rows = rows_of(op);
  const float* x = value(op.inputs[0]) + view.row_begin;
  float* out = value(next_op_) + view.row_begin;
  // The weight is widened into the first row of the output, which is computed last.
  context_->kernels->widen[kernels::format_index(view.dtype)](view.data.data(), out, count);
  for (std::uint64_t row = rows; row-- > 0;) {
    for (std::uint64_t i = 0; i < count; ++i) out[row * op.width + i] = x[row * op.width + i] * norms_[row] * out[i];
  }
}

// Output columns [row_begin, row_end) of x W^T.
void CpuSession::take_matrix(const Op& op, const Need& need, const WeightView& view) {
  const Op& input = binding_.graph().ops()[op.inputs[0]];
  const std::uint64_t tokens = rows_of(op), columns = input.width, rows = view.row_end - view.row_begin;
  // A head reads the last position alone.
  const float* x = value(op.inputs[0]) + (rows_of(input) - tokens) * columns;
  float* out = value(next_op_) + view.row_begin;
  const bool accumulate = op.parameters.size() == 2;
  const std::size_t format = kernels::format_index(need.dtype);
  const std::uint64_t threads = context_->team->threads();

  if (tokens <= kDotTokens) {
    const std::uint64_t wanted = std::clamp<std::uint64_t>(view.data.size() / kPartBytes, 1, std::min<std::uint64_t>(8 * threads, Team::kPartsMax));
    const std::uint64_t per_part = round_up((rows + wanted - 1) / wanted, 4);
    context_->team->run(static_cast<std::uint32_t>((rows + per_part - 1) / per_part), [&](std::uint32_t part, std::uint32_t) {
      const std::uint64_t first = part * per_part;
      const kernels::Rows piece{view.data.data() + first * need.row_bytes, std::min(per_part, rows - first), columns, need.row_bytes};
      context_->kernels->dot_rows[format](piece, x, columns, tokens, out + first, op.width, accumulate);
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
      const std::byte* weights = view.data.data() + first * need.row_bytes;
      const float* wide = reinterpret_cast<const float*>(weights);
      if (need.dtype != DType::kF32) {
        context_->kernels->widen[format](weights, worker_scratch(worker), count * columns);
        wide = worker_scratch(worker);
      }
      blas::multiply(tokens, count, columns, x, columns, wide, columns, out + first, op.width, accumulate);
    }
  });
}

}  // namespace paramwire
