#include "paramwire/compute/llama.hpp"

#include "paramwire/base/text.hpp"

#include <string>

namespace paramwire {

namespace {

// Tensor names of one naming; the prefix of layer N comes before the layer's own.
struct Names {
  std::string_view embedding, final_norm, head, layer_prefix;
  std::string_view attention_norm, query, key, value, output, ffn_norm, gate, up, down;
};

constexpr Names kGgufNames = {"token_embd", "output_norm", "output",      "blk.",     "attn_norm", "attn_q",   "attn_k",
                              "attn_v",     "attn_output", "ffn_norm",    "ffn_gate", "ffn_up",    "ffn_down"};
constexpr Names kHuggingFaceNames = {"model.embed_tokens", "model.norm",       "lm_head",          "model.layers.",
                                     "input_layernorm",    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                     "self_attn.o_proj",   "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
                                     "mlp.down_proj"};

Error field_error(std::string_view field, std::uint64_t actual, std::string_view expected) {
  return Error(Code::kInvalid, cat("llama config: ", field, " is ", actual, ", expected ", expected));
}

Status check(const LlamaConfig& config) {
  if (config.width == 0) return field_error("width", 0, "above 0");
  if (config.vocabulary == 0) return field_error("vocabulary", 0, "above 0");
  if (config.layers == 0) return {};
  if (config.ffn_width == 0) return field_error("ffn_width", 0, "above 0");
  if (config.heads == 0) return field_error("heads", 0, "above 0");
  if (config.kv_heads == 0 || config.heads % config.kv_heads != 0) {
    return field_error("kv_heads", config.kv_heads, cat("a divisor of heads ", config.heads));
  }
  if (config.head_size == 0 && config.width % config.heads != 0) {
    return field_error("heads", config.heads, cat("a divisor of width ", config.width, ", or a head_size"));
  }
  return {};
}

// One decoder layer; `input` is the name of the operation that it reads, and becomes the one that it ends with.
class LayerBuilder {
 public:
  LayerBuilder(Graph& graph, const LlamaConfig& config, const Names& names, Naming naming, std::uint32_t layer)
      : graph_(graph), config_(config), names_(names), prefix_(cat(names.layer_prefix, layer, ".")) {
    head_size_ = config.head_size != 0 ? config.head_size : static_cast<std::uint32_t>(config.width / config.heads);
    rotary_size_ = config.rotary_size != 0 ? config.rotary_size : head_size_;
    layout_ = naming == Naming::kGguf ? RotaryLayout::kInterleaved : RotaryLayout::kHalfSplit;
  }

  Status build(std::string& input) {
    const std::uint64_t q_width = std::uint64_t{config_.heads} * head_size_;
    const std::uint64_t kv_width = std::uint64_t{config_.kv_heads} * head_size_;
    const std::string norm = op(names_.attention_norm), query = op(names_.query), key = op(names_.key), value = op(names_.value);
    PARAMWIRE_CHECK(graph_.rms_norm(norm, input, cat(norm, ".weight"), config_.norm_epsilon));
    PARAMWIRE_CHECK(project(query, norm, q_width, config_.width, config_.attention_bias));
    PARAMWIRE_CHECK(project(key, norm, kv_width, config_.width, config_.attention_bias));
    PARAMWIRE_CHECK(project(value, norm, kv_width, config_.width, config_.attention_bias));
    const std::string query_turned = cat(query, ".rotary"), key_turned = cat(key, ".rotary"), mixed = op("attention");
    PARAMWIRE_CHECK(graph_.rotary(query_turned, query, rotary(config_.heads)));
    PARAMWIRE_CHECK(graph_.rotary(key_turned, key, rotary(config_.kv_heads)));
    PARAMWIRE_CHECK(graph_.attention(mixed, query_turned, key_turned, value, {config_.heads, config_.kv_heads, head_size_}));
    const std::string output = op(names_.output), after_attention = op("attention.residual");
    PARAMWIRE_CHECK(project(output, mixed, config_.width, q_width, config_.attention_bias));
    PARAMWIRE_CHECK(graph_.add(after_attention, input, output));

    const std::string ffn_norm = op(names_.ffn_norm), gate = op(names_.gate), up = op(names_.up), down = op(names_.down);
    PARAMWIRE_CHECK(graph_.rms_norm(ffn_norm, after_attention, cat(ffn_norm, ".weight"), config_.norm_epsilon));
    PARAMWIRE_CHECK(project(gate, ffn_norm, config_.ffn_width, config_.width, false));
    PARAMWIRE_CHECK(project(up, ffn_norm, config_.ffn_width, config_.width, false));
    PARAMWIRE_CHECK(graph_.swiglu(op("swiglu"), gate, up));
    PARAMWIRE_CHECK(project(down, op("swiglu"), config_.width, config_.ffn_width, false));
    input = op("residual");
    return graph_.add(input, after_attention, down);
  }

 private:
  std::string op(std::string_view name) const { return cat(prefix_, name); }
  RotaryOptions rotary(std::uint32_t heads) const { return {heads, head_size_, rotary_size_, config_.rotary_base, layout_}; }
  Status project(const std::string& name, std::string_view input, std::uint64_t out, std::uint64_t in, bool bias) {
    return graph_.matmul(name, input, cat(name, ".weight"), Shape{out, in}, bias ? cat(name, ".bias") : std::string());
  }

  Graph& graph_;
  const LlamaConfig& config_;
  const Names& names_;
  const std::string prefix_;
  std::uint32_t head_size_ = 0;
  std::uint32_t rotary_size_ = 0;
  RotaryLayout layout_ = RotaryLayout::kInterleaved;
};

}  // namespace

Result<Graph> llama_graph(const LlamaConfig& config, Naming naming) {
  PARAMWIRE_CHECK(check(config));
  const Names& names = naming == Naming::kGguf ? kGgufNames : kHuggingFaceNames;
  Graph graph;
  std::string last(names.embedding);
  const Shape table{config.vocabulary, config.width};
  PARAMWIRE_CHECK(graph.embedding(last, cat(names.embedding, ".weight"), table));
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
    PARAMWIRE_CHECK(LayerBuilder(graph, config, names, naming, layer).build(last));
  }
  PARAMWIRE_CHECK(graph.rms_norm(names.final_norm, last, cat(names.final_norm, ".weight"), config.norm_epsilon));
  const std::string head = cat(config.tied_head ? names.embedding : names.head, ".weight");
  PARAMWIRE_CHECK(graph.head(names.head, names.final_norm, head, table));
  return graph;
}

}  // namespace paramwire
