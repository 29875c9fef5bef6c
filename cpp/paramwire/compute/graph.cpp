#include "paramwire/compute/graph.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace paramwire {

namespace {

// "matmul blk.0.attn_q", the subject of every error here.
std::string subject(OpKind kind, std::string_view name) { return cat(op_kind_name(kind), " '", name, "'"); }

Error width_error(OpKind kind, std::string_view name, std::string_view input, std::uint64_t actual, std::string_view expected) {
  return Error(Code::kInvalid, cat(subject(kind, name), ": input '", input, "' has width ", actual, ", expected ", expected));
}

Error shape_error(OpKind kind, std::string_view name, std::string_view tensor, const Shape& actual, std::string_view expected) {
  return Error(Code::kInvalid, cat(subject(kind, name), ": tensor '", tensor, "' has shape ", actual, ", expected ", expected));
}

bool is_matrix(const Shape& shape) { return shape.rank() == 2 && shape[0] > 0 && shape[1] > 0; }

Error epsilon_error(OpKind kind, std::string_view name, double epsilon) {
  return Error(Code::kInvalid, cat(subject(kind, name), ": epsilon is ", epsilon, ", expected a finite number, 0 or above"));
}

bool is_epsilon(double value) { return value >= 0 && std::isfinite(value); }

bool right_dtype(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; }

}  // namespace

std::string_view op_kind_name(OpKind kind) noexcept {
  switch (kind) {
    case OpKind::kEmbedding: return "embedding";
    case OpKind::kMatmul: return "matmul";
    case OpKind::kRmsNorm: return "rms_norm";
    case OpKind::kLayerNorm: return "layer_norm";
    case OpKind::kRotary: return "rotary";
    case OpKind::kAttention: return "attention";
    case OpKind::kSwiGlu: return "swiglu";
    case OpKind::kGelu: return "gelu";
    case OpKind::kAdd: return "add";
    case OpKind::kSoftmax: return "softmax";
    case OpKind::kMean: return "mean";
    case OpKind::kNormalise: return "normalise";
    case OpKind::kTopK: return "top_k";
    case OpKind::kExpertMatmul: return "expert_matmul";
    case OpKind::kExpertCombine: return "expert_combine";
    case OpKind::kHead: return "head";
  }
  return "unknown";
}

Status Graph::check_name(OpKind kind, std::string_view name) const {
  if (name.empty()) return Error(Code::kInvalid, cat(op_kind_name(kind), ": the operation has no name; give each a new one"));
  const auto found = op_index_.find(std::string(name));
  if (found == op_index_.end()) return {};
  return Error(Code::kInvalid, cat(subject(kind, name), ": operation ", found->second, ", a ",
                                   op_kind_name(ops_[found->second].kind), ", already has this name; expected a new one"));
}

Result<std::uint32_t> Graph::find_input(std::string_view op, std::string_view input) const {
  const auto found = op_index_.find(std::string(input));
  if (found == op_index_.end()) {
    return Error(Code::kInvalid, cat("operation '", op, "': unknown input '", input, "', expected the name of one of the ",
                                     ops_.size(), " operations before it"));
  }
  return found->second;
}

Status Graph::check_parameter(std::string_view op, std::string_view tensor, const Shape& shape) const {
  if (tensor.empty()) return Error(Code::kInvalid, cat("operation '", op, "': its tensor has no name"));
  const auto found = parameter_index_.find(std::string(tensor));
  if (found == parameter_index_.end() || parameters_[found->second].shape == shape) return {};
  return Error(Code::kInvalid, cat("operation '", op, "': tensor '", tensor, "' has shape ", shape, ", expected ",
                                   parameters_[found->second].shape, " as an earlier operation gave it"));
}

std::uint32_t Graph::parameter_index(std::string_view tensor, const Shape& shape) {
  const auto [at, added] = parameter_index_.emplace(std::string(tensor), static_cast<std::uint32_t>(parameters_.size()));
  if (added) parameters_.push_back({std::string(tensor), shape});
  return at->second;
}

Status Graph::push(Op op) {
  op_index_.emplace(op.name, static_cast<std::uint32_t>(ops_.size()));
  ops_.push_back(std::move(op));
  return {};
}

// An operation with one input, as wide and with as many rows.
Result<Op> Graph::over(OpKind kind, std::string_view name, std::string_view input) const {
  PARAMWIRE_CHECK(check_name(kind, name));
  PARAMWIRE_TRY(from, find_input(name, input));
  Op op{.name = std::string(name), .kind = kind, .inputs = {from}, .parameters = {}};
  op.width = ops_[from].width;
  op.last_only = ops_[from].last_only;
  return op;
}

// For operations that need all positions. `op` has the rows of its input still.
Status Graph::check_positions(const Op& op, std::string_view input) const {
  if (!op.last_only) return {};
  return Error(Code::kInvalid, cat(subject(op.kind, op.name), ": input '", input, "' has one row only, expected one for each position"));
}

Status Graph::embedding(std::string_view name, std::string_view tensor, const Shape& shape, RowsBy by) {
  PARAMWIRE_CHECK(check_name(OpKind::kEmbedding, name));
  if (!is_matrix(shape)) {
    return shape_error(OpKind::kEmbedding, name, tensor, shape,
                       cat("(", by == RowsBy::kToken ? "vocabulary" : by == RowsBy::kPosition ? "positions" : "rows", ", width), both above 0"));
  }
  PARAMWIRE_CHECK(check_parameter(name, tensor, shape));
  if (by == RowsBy::kToken && vocabulary_ != 0 && vocabulary_ != shape[0]) {
    return shape_error(OpKind::kEmbedding, name, tensor, shape, cat(vocabulary_, " rows, as the first embedding has"));
  }
  Op op{.name = std::string(name), .kind = OpKind::kEmbedding, .inputs = {}, .parameters = {parameter_index(tensor, shape)}};
  op.width = shape[1];
  op.rows_by = by;
  if (by == RowsBy::kToken) vocabulary_ = shape[0];
  if (by == RowsBy::kPosition) positions_ = positions_ == 0 ? shape[0] : std::min(positions_, shape[0]);
  return push(std::move(op));
}

Status Graph::matmul(std::string_view name, std::string_view input, std::string_view tensor, const Shape& shape,
                     std::string_view bias) {
  return product(OpKind::kMatmul, name, input, tensor, shape, bias);
}

Status Graph::head(std::string_view name, std::string_view input, std::string_view tensor, const Shape& shape) {
  return product(OpKind::kHead, name, input, tensor, shape, {});
}

Status Graph::product(OpKind kind, std::string_view name, std::string_view input, std::string_view tensor, const Shape& shape,
                      std::string_view bias) {
  PARAMWIRE_TRY(op, over(kind, name, input));
  if (!is_matrix(shape) || shape[1] != op.width) {
    return shape_error(kind, name, tensor, shape,
                       cat(kind == OpKind::kHead ? "(vocabulary, " : "(out, ", op.width, ") to fit input '", input, "'"));
  }
  PARAMWIRE_CHECK(check_parameter(name, tensor, shape));
  if (bias == tensor) return Error(Code::kInvalid, cat(subject(kind, name), ": '", bias, "' is both weight and bias"));
  if (!bias.empty()) PARAMWIRE_CHECK(check_parameter(name, bias, Shape{shape[0]}));
  // The bias comes first: it is written into the output at once, and the weight's pieces add to it.
  if (!bias.empty()) op.parameters.push_back(parameter_index(bias, Shape{shape[0]}));
  op.parameters.push_back(parameter_index(tensor, shape));
  op.width = shape[0];
  op.last_only |= kind == OpKind::kHead;
  return push(std::move(op));
}

Status Graph::rms_norm(std::string_view name, std::string_view input, std::string_view tensor, double epsilon) {
  return norm(OpKind::kRmsNorm, name, input, tensor, {}, epsilon);
}

Status Graph::layer_norm(std::string_view name, std::string_view input, std::string_view tensor, std::string_view bias, double epsilon) {
  return norm(OpKind::kLayerNorm, name, input, tensor, bias, epsilon);
}

Status Graph::norm(OpKind kind, std::string_view name, std::string_view input, std::string_view tensor, std::string_view bias,
                   double epsilon) {
  PARAMWIRE_TRY(op, over(kind, name, input));
  if (!is_epsilon(epsilon)) return epsilon_error(kind, name, epsilon);
  const Shape shape{op.width};
  PARAMWIRE_CHECK(check_parameter(name, tensor, shape));
  if (bias == tensor) return Error(Code::kInvalid, cat(subject(kind, name), ": '", bias, "' is both weight and bias"));
  if (!bias.empty()) {
    PARAMWIRE_CHECK(check_parameter(name, bias, shape));
    op.parameters.push_back(parameter_index(bias, shape));  // first, as a product's
  }
  op.parameters.push_back(parameter_index(tensor, shape));
  op.epsilon = epsilon;
  return push(std::move(op));
}

Status Graph::rotary(std::string_view name, std::string_view input, const RotaryOptions& options) {
  PARAMWIRE_TRY(op, over(OpKind::kRotary, name, input));
  if (options.heads == 0 || std::uint64_t{options.heads} * options.head_size != op.width) {
    return width_error(OpKind::kRotary, name, input, op.width, cat(options.heads, " heads of ", options.head_size));
  }
  if (options.rotary_size == 0 || options.rotary_size % 2 != 0 || options.rotary_size > options.head_size) {
    return Error(Code::kInvalid, cat(subject(OpKind::kRotary, name), ": rotary_size is ", options.rotary_size,
                                     ", expected an even number from 2 to head_size ", options.head_size));
  }
  if (!(options.base > 0) || !std::isfinite(options.base)) {
    return Error(Code::kInvalid, cat(subject(OpKind::kRotary, name), ": base is ", options.base, ", expected a finite number above 0"));
  }
  PARAMWIRE_CHECK(check_positions(op, input));
  op.rotary = options;
  return push(std::move(op));
}

Status Graph::attention(std::string_view name, std::string_view query, std::string_view key, std::string_view value,
                        const AttentionOptions& options) {
  PARAMWIRE_CHECK(check_name(OpKind::kAttention, name));
  if (options.heads == 0 || options.kv_heads == 0 || options.head_size == 0 || options.heads % options.kv_heads != 0) {
    return Error(Code::kInvalid, cat(subject(OpKind::kAttention, name), ": ", options.heads, " heads, ", options.kv_heads,
                                     " kv_heads of ", options.head_size, "; expected numbers above 0, kv_heads a divisor of heads"));
  }
  Op op{.name = std::string(name), .kind = OpKind::kAttention, .inputs = {}, .parameters = {}};
  for (const std::string_view input : {query, key, value}) {
    PARAMWIRE_TRY(from, find_input(name, input));
    const std::uint64_t heads = op.inputs.empty() ? options.heads : options.kv_heads;
    if (ops_[from].width != heads * options.head_size) {
      return width_error(OpKind::kAttention, name, input, ops_[from].width, cat(heads, " heads of ", options.head_size));
    }
    op.last_only = ops_[from].last_only;
    PARAMWIRE_CHECK(check_positions(op, input));
    op.inputs.push_back(from);
  }
  op.width = std::uint64_t{options.heads} * options.head_size;
  op.attention = options;
  if (options.causal) {
    op.cache = caches_++;
  } else {
    whole_text_ = true;
  }
  return push(std::move(op));
}

Status Graph::swiglu(std::string_view name, std::string_view gate, std::string_view up) {
  return pair(OpKind::kSwiGlu, name, gate, up);
}

Status Graph::add(std::string_view name, std::string_view left, std::string_view right) {
  return pair(OpKind::kAdd, name, left, right);
}

Status Graph::pair(OpKind kind, std::string_view name, std::string_view left, std::string_view right) {
  PARAMWIRE_TRY(op, over(kind, name, left));
  PARAMWIRE_TRY(second, find_input(name, right));
  if (op.width != ops_[second].width) {
    return width_error(kind, name, right, ops_[second].width, cat(op.width, " as '", left, "' has"));
  }
  if (op.last_only != ops_[second].last_only) {
    return Error(Code::kInvalid, cat(subject(kind, name), ": one of '", left, "' and '", right,
                                     "' has one row only, expected both or neither"));
  }
  op.inputs.push_back(second);
  return push(std::move(op));
}

Status Graph::gelu(std::string_view name, std::string_view input, Gelu form) {
  PARAMWIRE_TRY(op, over(OpKind::kGelu, name, input));
  op.gelu = form;
  return push(std::move(op));
}

Status Graph::softmax(std::string_view name, std::string_view input) {
  PARAMWIRE_TRY(op, over(OpKind::kSoftmax, name, input));
  return push(std::move(op));
}

Status Graph::mean(std::string_view name, std::string_view input) {
  PARAMWIRE_TRY(op, over(OpKind::kMean, name, input));
  PARAMWIRE_CHECK(check_positions(op, input));
  op.last_only = true;
  return push(std::move(op));
}

Status Graph::normalise(std::string_view name, std::string_view input, double epsilon) {
  PARAMWIRE_TRY(op, over(OpKind::kNormalise, name, input));
  if (!is_epsilon(epsilon)) return epsilon_error(OpKind::kNormalise, name, epsilon);
  op.epsilon = epsilon;
  return push(std::move(op));
}

Status Graph::top_k(std::string_view name, std::string_view scores, std::uint32_t k, bool normalise) {
  PARAMWIRE_TRY(op, over(OpKind::kTopK, name, scores));
  if (op.width > kExpertsMax) return width_error(OpKind::kTopK, name, scores, op.width, cat("at most ", kExpertsMax, " experts"));
  if (k == 0 || k > op.width) {
    return Error(Code::kInvalid, cat(subject(OpKind::kTopK, name), ": k is ", k, ", expected 1 to the ", op.width, " experts of '", scores, "'"));
  }
  op.width = 2 * std::uint64_t{k};
  op.k = k;
  op.normalise = normalise;
  return push(std::move(op));
}

Status Graph::expert_matmul(std::string_view name, std::string_view input, std::string_view routing, std::string_view tensor,
                            const Shape& shape) {
  return experts(OpKind::kExpertMatmul, name, input, routing, tensor, shape);
}

Status Graph::expert_combine(std::string_view name, std::string_view input, std::string_view routing, std::string_view tensor,
                             const Shape& shape) {
  return experts(OpKind::kExpertCombine, name, input, routing, tensor, shape);
}

Status Graph::experts(OpKind kind, std::string_view name, std::string_view input, std::string_view routing, std::string_view tensor,
                      const Shape& shape) {
  PARAMWIRE_TRY(op, over(kind, name, input));
  PARAMWIRE_TRY(second, find_input(name, routing));
  const Op& router = ops_[second];
  if (router.kind != OpKind::kTopK) {
    return Error(Code::kInvalid, cat(subject(kind, name), ": routing '", routing, "' is a ", op_kind_name(router.kind), ", expected a top_k"));
  }
  if (op.last_only != router.last_only) {
    return Error(Code::kInvalid, cat(subject(kind, name), ": one of '", input, "' and '", routing,
                                     "' has one row only, expected both or neither"));
  }
  const std::uint64_t experts = ops_[router.inputs[0]].width, slots = kind == OpKind::kExpertCombine ? router.k : 1;
  if (op.width % slots != 0) return width_error(kind, name, input, op.width, cat("a multiple of the ", slots, " slots of '", routing, "'"));
  if (shape.rank() != 3 || shape[0] != experts || shape[1] == 0 || shape[2] != op.width / slots) {
    return shape_error(kind, name, tensor, shape, cat("(", experts, ", out, ", op.width / slots, ") to fit routing '", routing, "' and input '", input, "'"));
  }
  PARAMWIRE_CHECK(check_parameter(name, tensor, shape));
  op.inputs.push_back(second);
  op.parameters.push_back(parameter_index(tensor, shape));
  op.width = kind == OpKind::kExpertCombine ? shape[1] : router.k * shape[1];
  op.k = router.k;
  return push(std::move(op));
}

Result<Binding> Graph::bind(std::span<const TensorInfo> tensors) const {
  if (ops_.empty() || vocabulary_ == 0) return Error(Code::kInvalid, "graph: no embedding by token; expected one, for the tokens to enter");
  if (!ops_.back().last_only) {
    return Error(Code::kInvalid, cat(subject(ops_.back().kind, ops_.back().name),
                                     ": the graph's output has one row a token, expected one row: end with a head or a mean"));
  }
  std::unordered_map<std::string_view, const TensorInfo*> known;
  for (const TensorInfo& tensor : tensors) known.emplace(tensor.name, &tensor);
  if (known.size() != tensors.size()) {
    return Error(Code::kInvalid, cat("graph: ", tensors.size() - known.size(), " of the ", tensors.size(), " tensors have a name twice"));
  }

  std::string faults;
  const auto fault = [&faults](const std::string& text) { faults += cat(faults.empty() ? "" : "; ", text); };
  Binding binding;
  for (std::uint32_t index = 0; index < ops_.size(); ++index) {
    const Op& op = ops_[index];
    for (const std::uint32_t at : op.parameters) {
      const Parameter& parameter = parameters_[at];
      const auto found = known.find(parameter.name);
      const std::string of = cat("tensor '", parameter.name, "' of ", subject(op.kind, op.name));
      if (found == known.end()) {
        fault(cat(of, " is missing, expected shape ", parameter.shape));
        continue;
      }
      const TensorInfo& tensor = *found->second;
      if (tensor.shape != parameter.shape) fault(cat(of, " has shape ", tensor.shape, ", expected ", parameter.shape));
      if (!right_dtype(tensor.dtype)) fault(cat(of, " has dtype ", dtype_name(tensor.dtype), ", expected bf16, f16 or f32"));
      const std::uint64_t columns = parameter.shape.elements() / parameter.shape[0];  // no axis is 0, as checked
      const bool chosen = op.kind == OpKind::kEmbedding || is_expert(op.kind);
      binding.needs_.push_back({.op = index,
                                .parameter = at,
                                .access = chosen ? Access::kRowsByData : Access::kWhole,
                                .tensor = parameter.name,
                                .dtype = tensor.dtype,
                                .rows = parameter.shape[0],
                                .row_bytes = columns * dtype_bits(tensor.dtype) / 8});
    }
  }
  if (!faults.empty()) return Error(Code::kInvalid, cat("graph does not fit the tensors: ", faults));
  binding.graph_ = *this;
  return binding;
}

std::uint64_t Binding::bytes_per_step() const noexcept {
  std::uint64_t total = 0;
  for (const Need& need : needs_) {
    if (need.access == Access::kWhole) total += need.bytes();
  }
  return total;
}

}  // namespace paramwire
