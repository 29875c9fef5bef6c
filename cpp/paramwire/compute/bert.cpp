#include "paramwire/compute/bert.hpp"

#include "paramwire/base/text.hpp"

#include <string>

namespace paramwire {

namespace {

// Tensor names of one naming, without ".weight" and ".bias"; the prefix of layer N comes before the layer's own.
struct Names {
  std::string_view word, position, type, norm, layer_prefix;
  std::string_view query, key, value, output, output_norm, up, down, down_norm;
};

constexpr Names kGgufNames = {"token_embd", "position_embd", "token_types",      "token_embd_norm", "blk.",     "attn_q",           "attn_k",
                              "attn_v",     "attn_output",   "attn_output_norm", "ffn_up",          "ffn_down", "layer_output_norm"};
constexpr Names kHuggingFaceNames = {"embeddings.word_embeddings",
                                     "embeddings.position_embeddings",
                                     "embeddings.token_type_embeddings",
                                     "embeddings.LayerNorm",
                                     "encoder.layer.",
                                     "attention.self.query",
                                     "attention.self.key",
                                     "attention.self.value",
                                     "attention.output.dense",
                                     "attention.output.LayerNorm",
                                     "intermediate.dense",
                                     "output.dense",
                                     "output.LayerNorm"};

Error field_error(std::string_view field, std::uint64_t actual, std::string_view expected) {
  return Error(Code::kInvalid, cat("bert config: ", field, " is ", actual, ", expected ", expected));
}

Status check(const BertConfig& config) {
  if (config.width == 0) return field_error("width", 0, "above 0");
  if (config.vocabulary == 0) return field_error("vocabulary", 0, "above 0");
  if (config.positions == 0) return field_error("positions", 0, "above 0");
  if (config.token_types == 0) return field_error("token_types", 0, "above 0");
  if (config.layers == 0) return {};
  if (config.ffn_width == 0) return field_error("ffn_width", 0, "above 0");
  if (config.heads == 0 || config.width % config.heads != 0) {
    return field_error("heads", config.heads, cat("a divisor of width ", config.width));
  }
  return {};
}

class Builder {
 public:
  Builder(Graph& graph, const BertConfig& config, const Names& names) : graph_(graph), config_(config), names_(names) {}

  // returns: the operation whose rows are the layers' input.
  Result<std::string> embeddings() {
    const std::string word(names_.word), position(names_.position), type(names_.type);
    PARAMWIRE_CHECK(graph_.embedding(word, cat(word, ".weight"), Shape{config_.vocabulary, config_.width}));
    PARAMWIRE_CHECK(graph_.embedding(type, cat(type, ".weight"), Shape{config_.token_types, config_.width}, RowsBy::kFirst));
    PARAMWIRE_CHECK(graph_.embedding(position, cat(position, ".weight"), Shape{config_.positions, config_.width}, RowsBy::kPosition));
    PARAMWIRE_CHECK(graph_.add("embeddings.typed", word, type));
    PARAMWIRE_CHECK(graph_.add("embeddings.placed", "embeddings.typed", position));
    PARAMWIRE_CHECK(norm(std::string(names_.norm), "embeddings.placed"));
    return std::string(names_.norm);
  }

  // One layer; `input` is the name of the operation that it reads, and becomes the one that it ends with.
  Status layer(std::uint32_t index, std::string& input) {
    const std::string prefix = cat(names_.layer_prefix, index, ".");
    const auto op = [&](std::string_view name) { return cat(prefix, name); };
    const std::string query = op(names_.query), key = op(names_.key), value = op(names_.value), mixed = op("attention");
    for (const std::string& name : {query, key, value}) PARAMWIRE_CHECK(project(name, input, config_.width, config_.width));
    const auto head_size = static_cast<std::uint32_t>(config_.width / config_.heads);
    PARAMWIRE_CHECK(graph_.attention(mixed, query, key, value,
                                     {.heads = config_.heads, .kv_heads = config_.heads, .head_size = head_size, .causal = false}));
    const std::string output = op(names_.output), attended = op(names_.output_norm), attended_sum = op("attention.residual");
    PARAMWIRE_CHECK(project(output, mixed, config_.width, config_.width));
    PARAMWIRE_CHECK(graph_.add(attended_sum, output, input));
    PARAMWIRE_CHECK(norm(attended, attended_sum));

    const std::string up = op(names_.up), bent = op("gelu"), down = op(names_.down), sum = op("residual");
    PARAMWIRE_CHECK(project(up, attended, config_.ffn_width, config_.width));
    PARAMWIRE_CHECK(graph_.gelu(bent, up, config_.gelu));
    PARAMWIRE_CHECK(project(down, bent, config_.width, config_.ffn_width));
    PARAMWIRE_CHECK(graph_.add(sum, down, attended));
    input = op(names_.down_norm);
    return norm(input, sum);
  }

 private:
  Status project(const std::string& name, std::string_view input, std::uint64_t out, std::uint64_t in) {
    return graph_.matmul(name, input, cat(name, ".weight"), Shape{out, in}, cat(name, ".bias"));
  }
  Status norm(const std::string& name, std::string_view input) {
    return graph_.layer_norm(name, input, cat(name, ".weight"), cat(name, ".bias"), config_.norm_epsilon);
  }

  Graph& graph_;
  const BertConfig& config_;
  const Names& names_;
};

}  // namespace

Result<Graph> bert_graph(const BertConfig& config, Naming naming) {
  PARAMWIRE_CHECK(check(config));
  Graph graph;
  Builder builder(graph, config, naming == Naming::kGguf ? kGgufNames : kHuggingFaceNames);
  PARAMWIRE_TRY(last, builder.embeddings());
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) PARAMWIRE_CHECK(builder.layer(layer, last));
  PARAMWIRE_CHECK(graph.mean("mean", last));
  if (config.normalise) PARAMWIRE_CHECK(graph.normalise("normalised", "mean"));
  return graph;
}

}  // namespace paramwire
