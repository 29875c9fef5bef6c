#include "paramwire/compute/cpu_session.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/value_places.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace paramwire {

namespace {

// float32 scratch of one worker for widened tiles: 256 KiB stay in any L2 cache together with the packed copy.
constexpr std::uint64_t kTileFloats = 64 * 1024;
std::uint64_t columns_of(const Parameter& parameter) {
  return parameter.shape.rank() == 1 ? 1 : parameter.shape[parameter.shape.rank() - 1];
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

Status CpuSession::allocate() {
  const Graph& graph = binding_.graph();
  std::uint64_t cache_floats = 0, step_floats = 0, gather_floats = 0, widest = 1, wanted = options_.step_tokens;
  cache_at_.resize(graph.caches());
  rotary_of_.assign(graph.ops().size(), 0);
  for (std::uint32_t index = 0; index < graph.ops().size(); ++index) {
    const Op& op = graph.ops()[index];
    for (const std::uint32_t at : op.parameters) widest = std::max(widest, columns_of(graph.parameters()[at]));
    if (op.kind == OpKind::kRotary) rotary_of_[index] = rotary_table(op.rotary);
    if (op.kind == OpKind::kAttention) {
      const std::uint64_t floats = 2 * room(op) * round_up(std::uint64_t{op.attention.kv_heads} * op.attention.head_size, 16);
      if (op.attention.causal) {
        cache_at_[op.cache] = cache_floats;
        cache_floats += floats;
      } else {
        step_floats = std::max(step_floats, floats);
      }
    }
    if (is_expert(op.kind)) {
      const Shape& shape = graph.parameters()[op.parameters[0]].shape;
      gather_floats = std::max(gather_floats, options_.step_tokens * (shape[1] + shape[2]));
      wanted = std::max(wanted, options_.step_tokens * op.k);
    }
  }
  step_at_ = cache_floats;
  scratch_floats_ = round_up(std::max({kTileFloats, 4 * widest, options_.context_tokens}), 16);
  ValuePlaces places = place_values(graph, options_.step_tokens, last_uses(graph));
  const std::uint64_t value_floats = places.floats;
  value_at_ = std::move(places.offsets);
  PARAMWIRE_TRY(activations, Buffer::allocate(value_floats * sizeof(float)));
  PARAMWIRE_TRY(caches, Buffer::allocate((cache_floats + step_floats) * sizeof(float)));
  PARAMWIRE_TRY(scratch, Buffer::allocate(scratch_floats_ * context_->team->threads() * sizeof(float)));
  PARAMWIRE_TRY(gathered, Buffer::allocate(gather_floats * sizeof(float)));
  activations_ = std::move(activations);
  caches_ = std::move(caches);
  scratch_ = std::move(scratch);
  gathered_ = std::move(gathered);
  // Everything that a step grows, so that later steps allocate nothing.
  tokens_.reserve(options_.step_tokens);
  wanted_rows_.reserve(wanted);
  picks_.reserve(gather_floats > 0 ? options_.step_tokens : 0);
  means_.reserve(options_.step_tokens);
  scales_.reserve(options_.step_tokens);
  for (RotaryTable& table : rotary_) {
    table.cosines.reserve(options_.step_tokens * table.pairs);
    table.sines.reserve(options_.step_tokens * table.pairs);
  }
  return {};
}

// The table of an operation, shared by all that turn by the same angles. returns: index into rotary_.
std::uint32_t CpuSession::rotary_table(const RotaryOptions& options) {
  const std::uint32_t pairs = options.rotary_size / 2;
  const auto same = std::find_if(rotary_.begin(), rotary_.end(), [&](const RotaryTable& table) {
    return table.base == options.base && table.pairs == pairs;
  });
  const auto index = static_cast<std::uint32_t>(same - rotary_.begin());
  if (same != rotary_.end()) return index;
  RotaryTable table{.base = options.base, .pairs = pairs, .turns = {}, .cosines = {}, .sines = {}};
  for (std::uint32_t pair = 0; pair < pairs; ++pair) {
    table.turns.push_back(std::pow(options.base, -2.0 * pair / options.rotary_size));
  }
  rotary_.push_back(std::move(table));
  return index;
}

// Keys of one head: [position][head_size]; all keys of a cache lie before its values.
float* CpuSession::keys(const Op& op, std::uint32_t kv_head) noexcept {
  return reinterpret_cast<float*>(caches_.data()) + (op.attention.causal ? cache_at_[op.cache] : step_at_) +
         room(op) * op.attention.head_size * kv_head;
}

float* CpuSession::values(const Op& op, std::uint32_t kv_head) noexcept {
  return keys(op, kv_head) + room(op) * round_up(std::uint64_t{op.attention.kv_heads} * op.attention.head_size, 16);
}

// ---------------------------------------------------------------- the step

Status CpuSession::begin(std::span<const Token> tokens) {
  if (running_) return Error(Code::kInvalid, "begin: a step is running; finish() or abandon() it first");
  PARAMWIRE_CHECK(check_step(binding_.graph(), options_, position_, tokens));
  tokens_.assign(tokens.begin(), tokens.end());
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
    if (op.kind == OpKind::kRmsNorm || op.kind == OpKind::kLayerNorm) measure_rows(op);
    if (op.kind == OpKind::kExpertCombine) std::fill_n(value(next_op_), rows_of(op) * op.width, 0.0F);
    await(next_need_);
    return;
  }
  waiting_ = false;
}

void CpuSession::await(std::size_t need) {
  waiting_ = true;
  pending_ = {.need = need, .next_row = 0, .rows = {}};
  if (binding_.needs()[need].access == Access::kWhole) return;
  want_rows(binding_.graph().ops()[binding_.needs()[need].op]);
  rows_taken_ = 0;
  pending_.rows = wanted_rows_;
  pending_.next_row = wanted_rows_.front();
}

// The rows of its table that an embedding takes for token `index` of the step.
std::uint64_t CpuSession::table_row(const Op& op, std::size_t index) const noexcept {
  switch (op.rows_by) {
    case RowsBy::kToken: return tokens_[index];
    case RowsBy::kPosition: return position_ + index;
    case RowsBy::kFirst: break;
  }
  return 0;
}

void CpuSession::want_rows(const Op& op) {
  wanted_rows_.clear();
  if (op.kind == OpKind::kEmbedding) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) wanted_rows_.push_back(table_row(op, i));
  } else {
    const float* routing = value(op.inputs[1]);
    for (std::uint64_t row = 0; row < rows_of(op); ++row) {
      for (std::uint32_t slot = 0; slot < op.k; ++slot) wanted_rows_.push_back(static_cast<std::uint64_t>(routing[row * 2 * op.k + slot]));
    }
  }
  std::sort(wanted_rows_.begin(), wanted_rows_.end());
  wanted_rows_.erase(std::unique(wanted_rows_.begin(), wanted_rows_.end()), wanted_rows_.end());
}

Status CpuSession::supply(const WeightView& view) {
  if (!waiting_) {
    return Error(Code::kInvalid, cat("supply of tensor '", view.tensor, "': nothing is pending; ",
                                     running_ ? "finish() the step" : "begin() a step first"));
  }
  PARAMWIRE_CHECK(check_view(binding_, pending_, view));
  const Need& need = binding_.needs()[pending_.need];
  ++supplied_;
  take(binding_.graph().ops()[next_op_], need, view);
  if (need.access == Access::kRowsByData) {
    while (rows_taken_ < wanted_rows_.size() && wanted_rows_[rows_taken_] < view.row_end) ++rows_taken_;
    if (rows_taken_ < wanted_rows_.size()) {
      pending_.rows = std::span<const std::uint64_t>(wanted_rows_).subspan(rows_taken_);
      pending_.next_row = pending_.rows.front();
      return {};
    }
  } else if (view.row_end < need.rows) {
    pending_.next_row = view.row_end;
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

}  // namespace paramwire
