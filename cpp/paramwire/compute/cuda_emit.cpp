#include "paramwire/compute/cuda_emit.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cmath>

namespace paramwire {

using cuda::Half;
using cuda::Kernel;

namespace {

// By format: f32, bf16, f16.
constexpr Kernel kEmbedding[] = {Kernel::k_embedding_f32, Kernel::k_embedding_bf16, Kernel::k_embedding_f16};
constexpr Kernel kRmsNorm[] = {Kernel::k_rms_norm_f32, Kernel::k_rms_norm_bf16, Kernel::k_rms_norm_f16};
constexpr Kernel kLayerNorm[] = {Kernel::k_layer_norm_f32, Kernel::k_layer_norm_bf16, Kernel::k_layer_norm_f16};
constexpr Kernel kGemv[] = {Kernel::k_gemv_f32, Kernel::k_gemv_bf16, Kernel::k_gemv_f16};
constexpr Kernel kBias[] = {Kernel::k_bias_f32, Kernel::k_bias_bf16, Kernel::k_bias_f16};

// Kernel arguments and grids are 32 bits; positions too.
constexpr std::uint64_t kContextMax = 1U << 24, kAxisMax = 1U << 30;
// Tokens of a step are an axis of grids whose limit is this (CUDA Programming Guide, "Compute Capabilities": y and z dimension of a grid).
constexpr std::uint64_t kStepTokensMax = 65'535;

std::size_t format_of(DType dtype) noexcept { return dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 1 : 2; }
Half half_of(DType dtype) noexcept { return dtype == DType::kBF16 ? Half::kBF16 : dtype == DType::kF16 ? Half::kF16 : Half::kNone; }
std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kCudaAlignment - 1) / kCudaAlignment * kCudaAlignment; }
std::uint32_t narrow(std::uint64_t value) noexcept { return static_cast<std::uint32_t>(value); }
bool is_norm(OpKind kind) noexcept { return kind == OpKind::kRmsNorm || kind == OpKind::kLayerNorm; }
bool is_product(OpKind kind) noexcept { return kind == OpKind::kMatmul || kind == OpKind::kHead; }

}  // namespace

// ---------------------------------------------------------------- opening

Status CudaEmitter::prepare(const cuda::Stream& stream) {
  PARAMWIRE_CHECK(check_sizes());
  PARAMWIRE_CHECK(place());
  return place_rotary(stream);
}

Status CudaEmitter::check_sizes() const {
  if (options_.context_tokens > kContextMax || options_.step_tokens > kStepTokensMax) {
    return Error(Code::kInvalid, cat("cuda session: context_tokens is ", options_.context_tokens, ", step_tokens is ", options_.step_tokens, ", expected at most ", kContextMax, " and ",
                                     kStepTokensMax, "; longer prompts are given in several steps"));
  }
  for (const Parameter& parameter : binding_.graph().parameters()) {
    for (const std::uint64_t size : parameter.shape.dims()) {
      if (size > kAxisMax) return Error(Code::kInvalid, cat("cuda session: tensor '", parameter.name, "' has an axis of ", size, ", expected at most ", kAxisMax));
    }
  }
  for (const Op& op : binding_.graph().ops()) {
    if (op.kind == OpKind::kAttention && op.attention.head_size > cuda::kHeadSizeMax) {
      return Error(Code::kInvalid, cat("cuda session: operation '", op.name, "' has heads of ", op.attention.head_size, ", expected at most ", cuda::kHeadSizeMax));
    }
    // Picks are numbered in 32 bits.
    if (options_.step_tokens * op.k > kAxisMax) {
      return Error(Code::kInvalid, cat("cuda session: operation '", op.name, "' picks ", op.k, " experts for each of ", options_.step_tokens, " tokens, expected at most ", kAxisMax, " in all"));
    }
  }
  return {};
}

// What follows from the graph alone, and the memory that it takes.
Status CudaEmitter::place() {
  const Graph& graph = binding_.graph();
  const std::vector<Op>& ops = graph.ops();
  std::vector<std::size_t> last_use = last_uses(graph);
  first_need_.assign(ops.size(), 0);
  half_of_consumers_.assign(ops.size(), Half::kNone);
  half_there_.assign(ops.size(), Half::kNone);
  added_by_.assign(ops.size(), UINT32_MAX);
  left_to_next_.assign(ops.size(), false);
  cache_at_.assign(graph.caches(), 0);
  rows_at_.assign(binding_.needs().size(), 0);
  row_of_at_.assign(binding_.needs().size(), 0);
  std::uint64_t cache_bytes = 0, partial_bytes = 0, products_bytes = 0, rows_bytes = 0;
  std::size_t need = 0, rows_needs = 0;
  for (std::uint32_t index = 0; index < ops.size(); ++index) {
    const Op& op = ops[index];
    first_need_[index] = need;
    for (std::size_t i = 0; i < op.parameters.size(); ++i, ++need) {
      const Need& read = binding_.needs()[need];
      if (read.access == Access::kRowsByData && !is_expert(op.kind)) {
        rows_at_[need] = rows_bytes;
        row_of_at_[need] = state_bytes(rows_needs++);
        rows_bytes += aligned(options_.step_tokens * read.row_bytes);
      }
      if (is_product(op.kind)) half_of_consumers_[op.inputs[0]] = half_of(read.dtype);
    }
    if (is_norm(op.kind) && op.parameters.size() == 2 && binding_.needs()[need - 2].dtype != binding_.needs()[need - 1].dtype) {
      return Error(Code::kInvalid, cat("cuda session: operation '", op.name, "': bias '", binding_.needs()[need - 2].tensor, "' is ", dtype_name(binding_.needs()[need - 2].dtype), ", expected ",
                                       dtype_name(binding_.needs()[need - 1].dtype), " as '", binding_.needs()[need - 1].tensor, "' is"));
    }
    if (is_norm(op.kind) && index > 0 && op.inputs[0] == index - 1 && ops[index - 1].kind == OpKind::kAdd) {
      added_by_[index] = index - 1;
      left_to_next_[index - 1] = true;
      for (const std::uint32_t input : ops[index - 1].inputs) last_use[input] = std::max<std::size_t>(last_use[input], index);
    }
    if (op.kind == OpKind::kExpertCombine) products_bytes = std::max(products_bytes, 4 * (op.last_only ? 1 : options_.step_tokens) * op.k * op.width);
    if (op.kind != OpKind::kAttention) continue;
    if (op.attention.causal) {
      cache_at_[op.cache] = cache_bytes;
      cache_bytes += 2 * aligned(4 * options_.context_tokens * op.attention.kv_heads * op.attention.head_size);
    }
    for (std::uint32_t tokens = 1; tokens <= cuda::kGemvTokensMax; ++tokens) {
      partial_bytes = std::max(partial_bytes, 4 * cuda::attention_partial_floats(tokens, op.attention.heads, splits(op, tokens), op.attention.head_size));
    }
  }
  places_ = place_values(graph, options_.step_tokens, last_use);
  const struct {
    cuda::DeviceMemory* memory;
    std::uint64_t bytes;
    std::string_view what;
  } wanted[] = {{&values_, 4 * places_.floats, "activations"},
                {&halves_, blas_ != nullptr ? 2 * places_.floats : 0, "activations of 16 bits"},
                {&caches_, cache_bytes, "the key/value cache"},
                {&partial_, partial_bytes, "parts of attention"},
                {&products_, products_bytes, "products of experts"},
                {&state_, state_bytes(rows_needs), "the step's state"},
                {&rows_, rows_bytes, "embedding rows"}};
  for (const auto& each : wanted) {
    PARAMWIRE_TRY(memory, cuda::DeviceMemory::allocate(device_, each.bytes, each.what));
    *each.memory = std::move(memory);
  }
  return {};
}

Status CudaEmitter::place_rotary(const cuda::Stream& stream) {
  const std::vector<Op>& ops = binding_.graph().ops();
  rotary_of_.assign(ops.size(), 0);
  std::vector<double> turns;
  std::uint64_t table_bytes = 0;
  for (std::uint32_t index = 0; index < ops.size(); ++index) {
    if (ops[index].kind != OpKind::kRotary) continue;
    const RotaryOptions& options = ops[index].rotary;
    const std::uint32_t pairs = options.rotary_size / 2;
    const auto same = std::find_if(rotary_.begin(), rotary_.end(), [&](const RotaryTable& table) { return table.base == options.base && table.pairs == pairs; });
    rotary_of_[index] = static_cast<std::uint32_t>(same - rotary_.begin());
    if (same != rotary_.end()) continue;
    RotaryTable table{.base = options.base, .pairs = pairs};
    table.first_op = index;
    table.turns = 8 * turns.size();
    for (std::uint32_t pair = 0; pair < pairs; ++pair) turns.push_back(std::pow(options.base, -2.0 * pair / options.rotary_size));
    table.cosines = table_bytes;
    table.sines = table_bytes + aligned(4 * options_.step_tokens * pairs);
    table_bytes = table.sines + aligned(4 * options_.step_tokens * pairs);
    rotary_.push_back(table);
  }
  PARAMWIRE_TRY(constants, cuda::DeviceMemory::allocate(device_, 8 * turns.size(), "rotary constants"));
  constants_ = std::move(constants);
  PARAMWIRE_TRY(tables, cuda::DeviceMemory::allocate(device_, table_bytes, "rotary tables"));
  tables_ = std::move(tables);
  if (turns.empty()) return {};
  PARAMWIRE_CHECK(stream.to_device(constants_.address(), std::as_bytes(std::span<const double>(turns))));
  return stream.synchronize();
}

// ---------------------------------------------------------------- the step

std::uint64_t CudaEmitter::state_bytes(std::size_t rows_needs) const noexcept { return sizeof(cuda::StepState) + 4 * options_.step_tokens * rows_needs; }

CUdeviceptr CudaEmitter::rows(std::size_t need) const noexcept { return rows_.address() + rows_at_[need]; }

CUdeviceptr CudaEmitter::output() const noexcept { return values_.address() + 4 * places_.offsets.back(); }

std::uint64_t CudaEmitter::device_bytes() const noexcept {
  return values_.size() + halves_.size() + caches_.size() + partial_.size() + products_.size() + constants_.size() + tables_.size() + state_.size() + rows_.size();
}

std::uint32_t CudaEmitter::splits(const Op& op, std::uint32_t tokens) const noexcept {
  return cuda::attention_splits(tokens, op.attention.heads, narrow(options_.context_tokens), static_cast<std::uint32_t>(device_->facts().multiprocessors));
}

std::uint32_t CudaEmitter::rows_of(std::uint32_t op) const noexcept { return binding_.graph().ops()[op].last_only ? 1 : tokens_; }

void CudaEmitter::begin_step(std::uint32_t tokens) {
  tokens_ = tokens;
  std::fill(half_there_.begin(), half_there_.end(), Half::kNone);
}

Half CudaEmitter::half_wanted(std::uint32_t op) const noexcept {
  return blas_ != nullptr && rows_of(op) > cuda::kGemvTokensMax ? half_of_consumers_[op] : Half::kNone;
}

// From element `row` on of the vector that need `need` reads.
const void* CudaEmitter::vector(const CudaWalk& walk, const CudaWeights& weights, std::size_t need, std::uint64_t row) const noexcept {
  const CudaPiece& piece = walk.pieces[walk.vector_piece[need]];
  return reinterpret_cast<const void*>(weights.resident + piece.offset + row * binding_.needs()[need].row_bytes);  // NOLINT: a device address
}

Status CudaEmitter::emit(const CudaWalk& walk, const CudaSegment& segment, const CudaWeights& weights, const cuda::Stream& stream) {
  for (std::size_t i = segment.action_begin; i < segment.action_end; ++i) PARAMWIRE_CHECK(run(walk, walk.actions[i], weights, stream));
  return {};
}

Status CudaEmitter::run(const CudaWalk& walk, const CudaAction& action, const CudaWeights& weights, const cuda::Stream& stream) {
  if (action.matrix) return matrix(walk, action, weights, stream);
  const Op& op = binding_.graph().ops()[action.op];
  switch (op.kind) {
    case OpKind::kEmbedding: return embedding(action.op, stream);
    case OpKind::kRmsNorm:
    case OpKind::kLayerNorm: return norm(walk, action.op, weights, stream);
    case OpKind::kRotary: return rotary(action.op, stream);
    case OpKind::kAttention: return attention(action.op, stream);
    case OpKind::kTopK:
    case OpKind::kExpertCombine: return routing(action.op, stream);
    default: return elementwise(action.op, stream);
  }
}

Status CudaEmitter::embedding(std::uint32_t op, const cuda::Stream& stream) {
  const std::size_t need = first_need_[op];
  const cuda::EmbeddingArgs args{.rows = reinterpret_cast<const void*>(rows(need)),  // NOLINT: a device address
                                 .row_of = state_.at<const std::uint32_t>(row_of_at_[need]),
                                 .out = value(op),
                                 .tokens = tokens_,
                                 .width = narrow(binding_.graph().ops()[op].width)};
  return launch(kEmbedding[format_of(binding_.needs()[need].dtype)], cuda::embedding_launch(args), args, stream);
}

Status CudaEmitter::norm(const CudaWalk& walk, std::uint32_t op, const CudaWeights& weights, const cuda::Stream& stream) {
  const Op& it = binding_.graph().ops()[op];
  const std::size_t need = first_need_[op] + it.parameters.size() - 1;  // a bias comes first
  cuda::NormArgs args{};
  args.x = value(it.inputs[0]);
  if (const std::uint32_t sum = added_by_[op]; sum != UINT32_MAX) {
    const Op& addition = binding_.graph().ops()[sum];
    args.x = value(addition.inputs[0]);
    args.add = value(addition.inputs[1]);
    args.sum = value(sum);
  }
  args.weight = vector(walk, weights, need, 0);
  args.bias = it.parameters.size() == 2 ? vector(walk, weights, need - 1, 0) : nullptr;
  args.out = value(op);
  args.half = half_wanted(op);
  args.out16 = args.half == Half::kNone ? nullptr : half_value(op);
  args.tokens = rows_of(op);
  args.width = narrow(it.width);
  args.epsilon = static_cast<float>(it.epsilon);
  half_there_[op] = args.half;
  const std::size_t format = format_of(binding_.needs()[need].dtype);
  return launch(it.kind == OpKind::kRmsNorm ? kRmsNorm[format] : kLayerNorm[format], cuda::norm_launch(args), args, stream);
}

Status CudaEmitter::rotary(std::uint32_t op, const cuda::Stream& stream) {
  const Op& it = binding_.graph().ops()[op];
  const RotaryTable& table = rotary_[rotary_of_[op]];
  if (table.first_op == op) {
    const cuda::RotaryTableArgs fill{.state = state_.at<const cuda::StepState>(),
                                     .turns = constants_.at<const double>(table.turns),
                                     .cosines = tables_.at<float>(table.cosines),
                                     .sines = tables_.at<float>(table.sines),
                                     .tokens = tokens_,
                                     .pairs = table.pairs};
    PARAMWIRE_CHECK(launch(Kernel::k_rotary_table, cuda::rotary_table_launch(fill), fill, stream));
  }
  const cuda::RotaryArgs args{.x = value(it.inputs[0]),
                              .out = value(op),
                              .cosines = tables_.at<const float>(table.cosines),
                              .sines = tables_.at<const float>(table.sines),
                              .tokens = tokens_,
                              .heads = it.rotary.heads,
                              .head_size = it.rotary.head_size,
                              .pairs = table.pairs,
                              .interleaved = it.rotary.layout == RotaryLayout::kInterleaved};
  return launch(Kernel::k_rotary, cuda::rotary_launch(args), args, stream);
}

Status CudaEmitter::attention(std::uint32_t op, const cuda::Stream& stream) {
  const Op& it = binding_.graph().ops()[op];
  const AttentionOptions& options = it.attention;
  const float *keys = value(it.inputs[1]), *values = value(it.inputs[2]);
  if (options.causal) {
    float* const cached_keys = caches_.at<float>(cache_at_[it.cache]);
    float* const cached_values = cached_keys + aligned(4 * options_.context_tokens * options.kv_heads * options.head_size) / 4;
    const cuda::CacheWriteArgs write{.state = state_.at<const cuda::StepState>(),
                                     .key = keys,
                                     .value = values,
                                     .keys = cached_keys,
                                     .values = cached_values,
                                     .tokens = tokens_,
                                     .kv_heads = options.kv_heads,
                                     .head_size = options.head_size,
                                     .context = narrow(options_.context_tokens)};
    PARAMWIRE_CHECK(launch(Kernel::k_cache_write, cuda::cache_write_launch(write), write, stream));
    keys = cached_keys;
    values = cached_values;
  }
  cuda::AttentionArgs args{};
  args.state = state_.at<const cuda::StepState>();
  args.query = value(it.inputs[0]);
  args.keys = keys;
  args.values = values;
  args.out = value(op);
  args.half = half_wanted(op);
  args.out16 = args.half == Half::kNone ? nullptr : half_value(op);
  args.partial = partial_.at<float>();
  args.tokens = tokens_;
  args.heads = options.heads;
  args.kv_heads = options.kv_heads;
  args.head_size = options.head_size;
  args.context = narrow(options_.context_tokens);
  args.splits = splits(it, tokens_);
  args.causal = options.causal;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(options.head_size)));
  half_there_[op] = args.half;
  if (tokens_ > cuda::kGemvTokensMax) return launch(Kernel::k_attention_tile, cuda::attention_tile_launch(args), args, stream);
  PARAMWIRE_CHECK(launch(Kernel::k_attention_split, cuda::attention_split_launch(args), args, stream));
  return launch(Kernel::k_attention_join, cuda::attention_join_launch(args), args, stream);
}

Status CudaEmitter::elementwise(std::uint32_t op, const cuda::Stream& stream) {
  const Op& it = binding_.graph().ops()[op];
  if (it.kind == OpKind::kSoftmax) {
    const cuda::SoftmaxArgs args{.x = value(it.inputs[0]), .out = value(op), .rows = rows_of(op), .width = narrow(it.width)};
    return launch(Kernel::k_softmax, cuda::softmax_launch(args), args, stream);
  }
  if (it.kind == OpKind::kMean) {
    const cuda::MeanArgs args{.x = value(it.inputs[0]), .out = value(op), .rows = rows_of(it.inputs[0]), .width = narrow(it.width)};
    return launch(Kernel::k_mean, cuda::mean_launch(args), args, stream);
  }
  if (it.kind == OpKind::kNormalise) {
    const cuda::NormaliseArgs args{.x = value(it.inputs[0]), .out = value(op), .rows = rows_of(op), .width = narrow(it.width), .epsilon = static_cast<float>(it.epsilon)};
    return launch(Kernel::k_normalise, cuda::normalise_launch(args), args, stream);
  }
  return pair(op, stream);
}

// The experts' products themselves are CudaExperts'.
Status CudaEmitter::routing(std::uint32_t op, const cuda::Stream& stream) {
  const Op& it = binding_.graph().ops()[op];
  if (it.kind == OpKind::kExpertCombine) {
    const cuda::ExpertSumArgs args{.products = products(), .routing = value(it.inputs[1]), .out = value(op), .tokens = rows_of(op), .k = it.k, .rows = narrow(it.width)};
    return launch(Kernel::k_expert_sum, cuda::expert_sum_launch(args), args, stream);
  }
  const std::uint64_t experts = binding_.graph().ops()[it.inputs[0]].width;
  const cuda::TopKArgs args{.scores = value(it.inputs[0]), .routing = value(op), .tokens = rows_of(op), .experts = narrow(experts), .k = it.k, .normalise = it.normalise ? 1U : 0U};
  return launch(Kernel::k_top_k, cuda::top_k_launch(args), args, stream);
}

Status CudaEmitter::pair(std::uint32_t op, const cuda::Stream& stream) {
  if (left_to_next_[op]) return {};
  const Op& it = binding_.graph().ops()[op];
  cuda::PairArgs args{};
  args.left = value(it.inputs[0]);
  args.right = it.inputs.size() > 1 ? value(it.inputs[1]) : nullptr;
  args.out = value(op);
  args.half = half_wanted(op);
  args.out16 = args.half == Half::kNone ? nullptr : half_value(op);
  args.count = std::uint64_t{rows_of(op)} * it.width;
  half_there_[op] = args.half;
  const Kernel gelu = it.gelu == Gelu::kExact ? Kernel::k_gelu : Kernel::k_gelu_tanh;
  const Kernel kernel = it.kind == OpKind::kSwiGlu ? Kernel::k_swiglu : it.kind == OpKind::kGelu ? gelu : Kernel::k_add;
  return launch(kernel, cuda::pair_launch(args), args, stream);
}

// ---------------------------------------------------------------- matrices

Status CudaEmitter::matrix(const CudaWalk& walk, const CudaAction& action, const CudaWeights& weights, const cuda::Stream& stream) {
  const Op& op = binding_.graph().ops()[action.op];
  const CudaPiece& piece = walk.pieces[action.piece];
  const bool biased = op.parameters.size() == 2;
  const void* const bias = biased ? vector(walk, weights, first_need_[action.op], action.row_begin) : nullptr;
  const CUdeviceptr at = (piece.layout.resident ? weights.resident : weights.slot) + piece.offset;
  return product(action, reinterpret_cast<const void*>(at), stream, bias);  // NOLINT: a device address
}

// Output columns [row_begin, row_end) of x W^T.
Status CudaEmitter::product(const CudaAction& action, const void* weight, const cuda::Stream& stream, const void* bias) {
  const Op& op = binding_.graph().ops()[action.op];
  const std::uint32_t input = op.inputs[0];
  const std::uint64_t columns = binding_.graph().ops()[input].width;
  const std::uint32_t rows = rows_of(action.op), skipped = rows_of(input) - rows;  // a head reads the last position alone
  const Need& need = binding_.needs()[first_need_[action.op] + op.parameters.size() - 1];
  float* const out = value(action.op) + action.row_begin;

  const bool by_blas = rows > cuda::kGemvTokensMax && blas_ != nullptr;
  // A matrix-vector kernel adds a bias of the weight's type itself.
  const std::size_t bias_format = format_of(binding_.needs()[first_need_[action.op]].dtype);
  const bool bias_first = bias != nullptr && (by_blas || bias_format != format_of(need.dtype));
  if (bias_first) {
    const cuda::BiasArgs args{.bias = bias, .out = out, .tokens = rows, .rows = narrow(action.row_end - action.row_begin), .out_stride = op.width};
    PARAMWIRE_CHECK(launch(kBias[bias_format], cuda::bias_launch(args), args, stream));
  }
  if (by_blas) {
    cuda::Product args{.dtype = need.dtype, .weight = weight, .x = value(input), .y = out, .tokens = rows, .rows = action.row_end - action.row_begin, .columns = columns, .y_stride = op.width};
    args.accumulate = bias_first;
    if (const Half half = half_of(need.dtype); half != Half::kNone) {
      if (half_there_[input] != half) {
        const cuda::CastArgs cast{.x = value(input), .out = half_value(input), .half = half, .count = std::uint64_t{rows} * columns};
        PARAMWIRE_CHECK(launch(Kernel::k_narrow, cuda::cast_launch(cast), cast, stream));
        half_there_[input] = half;
      }
      args.x = half_value(input);
    }
    return blas_->multiply(args, stream);
  }
  for (std::uint32_t token = 0; token < rows; token += cuda::kGemvTokensMax) {
    cuda::GemvArgs args{};
    args.weight = weight;
    args.x = value(input) + (skipped + token) * columns;
    args.out = out + token * op.width;
    args.bias = bias_first ? nullptr : bias;
    args.accumulate = bias_first;
    args.rows = narrow(action.row_end - action.row_begin);
    args.columns = narrow(columns);
    args.tokens = std::min(cuda::kGemvTokensMax, rows - token);
    args.x_stride = columns;
    args.out_stride = op.width;
    PARAMWIRE_CHECK(launch(kGemv[format_of(need.dtype)], cuda::gemv_launch(args), args, stream));
  }
  return {};
}

}  // namespace paramwire
