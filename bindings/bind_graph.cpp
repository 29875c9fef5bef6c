#include "convert.hpp"
#include "graph.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/bert.hpp"
#include "paramwire/compute/llama.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace paramwire::bindings {

namespace {

// One of a few words: the value beside it.
template <typename Value, std::size_t kCount>
Value choose(const char* what, const std::string& word, const std::array<std::pair<const char*, Value>, kCount>& known) {
  std::string words;
  for (const auto& [name, value] : known) {
    if (word == name) return value;
    words += cat(words.empty() ? "" : ", ", name);
  }
  raise_invalid(cat(what, " is \"", word, "\": known are ", words));
}

Naming naming_word(const std::string& word) {
  return choose<Naming, 2>("naming", word, {{{"gguf", Naming::kGguf}, {"hf", Naming::kHuggingFace}}});
}

// One field of a configuration: our word, the word of Hugging Face's config.json, and where it goes.
template <typename Value>
void read_field(const py::object& config, const char* ours, const char* theirs, Value& value) {
  for (const char* key : {ours, theirs}) {
    const py::object found = config.attr("get")(key, py::none());
    if (found.is_none()) continue;
    try {
      value = found.cast<Value>();
    } catch (const py::cast_error&) {
      raise_invalid(cat("configuration: ", key, " is ", std::string(py::repr(found)), ", a ",
                        std::is_same_v<Value, bool> ? "bool" : std::is_same_v<Value, std::string> ? "str" : std::is_integral_v<Value> ? "non-negative integer" : "number",
                        " was expected"));
    }
    return;
  }
}

// A configuration that asks for something else would be computed wrongly, and silently.
void refuse_unless(const py::object& mapping, const char* key, const py::object& only, const char* why) {
  const py::object found = mapping.attr("get")(key, py::none());
  if (!found.is_none() && !found.equal(only)) raise_invalid(cat("configuration: ", key, " is ", std::string(py::repr(found)), ": ", why));
}

// A dataclass or a mapping, as a mapping.
py::object mapping_of(const py::object& config, const char* type) {
  const bool fields = py::hasattr(config, "__dataclass_fields__");
  py::object mapping = fields ? py::object(py::module_::import("dataclasses").attr("asdict")(config)) : config;
  if (!py::hasattr(mapping, "get")) {
    throw py::type_error(cat("config must be a ", type, " or a mapping, not ", std::string(py::str(py::type::handle_of(config).attr("__name__")))));
  }
  return mapping;
}

LlamaConfig llama_from(const py::object& mapping) {
  for (const char* key : {"rope_scaling", "sliding_window"}) refuse_unless(mapping, key, py::none(), "llama graphs have none");
  LlamaConfig out;
  read_field(mapping, "layers", "num_hidden_layers", out.layers);
  read_field(mapping, "width", "hidden_size", out.width);
  read_field(mapping, "ffn_width", "intermediate_size", out.ffn_width);
  read_field(mapping, "vocabulary", "vocab_size", out.vocabulary);
  read_field(mapping, "heads", "num_attention_heads", out.heads);
  out.kv_heads = out.heads;  // what a configuration without that key means
  read_field(mapping, "kv_heads", "num_key_value_heads", out.kv_heads);
  read_field(mapping, "head_size", "head_dim", out.head_size);
  read_field(mapping, "rotary_size", "rotary_size", out.rotary_size);
  read_field(mapping, "rotary_base", "rope_theta", out.rotary_base);
  read_field(mapping, "norm_epsilon", "rms_norm_eps", out.norm_epsilon);
  read_field(mapping, "tied_head", "tie_word_embeddings", out.tied_head);
  read_field(mapping, "attention_bias", "attention_bias", out.attention_bias);
  return out;
}

PyGraph llama(const py::object& config, const std::string& naming, std::optional<bool> tied) {
  LlamaConfig read = llama_from(mapping_of(config, "LlamaConfig"));
  if (tied) read.tied_head = *tied;
  return PyGraph{take(llama_graph(read, naming_word(naming)))};
}

BertConfig bert_from(const py::object& mapping) {
  refuse_unless(mapping, "model_type", py::str("bert"), "bert graphs are of the model_type bert");
  refuse_unless(mapping, "position_embedding_type", py::str("absolute"), "bert graphs have absolute ones");
  refuse_unless(mapping, "is_decoder", py::bool_(false), "bert graphs are encoders");
  BertConfig out;
  read_field(mapping, "layers", "num_hidden_layers", out.layers);
  read_field(mapping, "width", "hidden_size", out.width);
  read_field(mapping, "ffn_width", "intermediate_size", out.ffn_width);
  read_field(mapping, "vocabulary", "vocab_size", out.vocabulary);
  read_field(mapping, "heads", "num_attention_heads", out.heads);
  read_field(mapping, "positions", "max_position_embeddings", out.positions);
  read_field(mapping, "token_types", "type_vocab_size", out.token_types);
  read_field(mapping, "norm_epsilon", "layer_norm_eps", out.norm_epsilon);
  read_field(mapping, "normalise", "normalise", out.normalise);
  std::string gelu = "exact";
  read_field(mapping, "gelu", "hidden_act", gelu);
  out.gelu = choose<Gelu, 5>("configuration: gelu", gelu, {{{"exact", Gelu::kExact}, {"tanh", Gelu::kTanh}, {"gelu", Gelu::kExact},
                                                            {"gelu_new", Gelu::kTanh}, {"gelu_pytorch_tanh", Gelu::kTanh}}});
  return out;
}

PyGraph bert(const py::object& config, const std::string& naming, std::optional<bool> normalise) {
  BertConfig read = bert_from(mapping_of(config, "BertConfig"));
  if (normalise) read.normalise = *normalise;
  return PyGraph{take(bert_graph(read, naming_word(naming)))};
}

void rotary(PyGraph& self, const std::string& name, const std::string& input, std::uint32_t heads, std::uint32_t head_size,
            std::optional<std::uint32_t> rotary_size, double base, const std::string& layout) {
  RotaryOptions options;
  options.heads = heads;
  options.head_size = head_size;
  options.rotary_size = rotary_size.value_or(head_size);
  options.base = base;
  options.layout = choose<RotaryLayout, 2>("layout", layout, {{{"interleaved", RotaryLayout::kInterleaved}, {"half_split", RotaryLayout::kHalfSplit}}});
  check(self.graph.rotary(name, input, options));
}

py::list parameters(const PyGraph& self) {
  py::list out;
  for (const Parameter& parameter : self.graph.parameters()) out.append(py::make_tuple(text(parameter.name), shape_tuple(parameter.shape)));
  return out;
}

py::list operations(const PyGraph& self) {
  py::list out;
  for (const Op& op : self.graph.ops()) out.append(py::make_tuple(text(op.name), text(op_kind_name(op.kind))));
  return out;
}

// The operations of encoders and of mixtures of experts.
void bind_operations(py::class_<PyGraph>& graph) {
  using Name = const std::string&;
  graph
      .def("layer_norm",
           [](PyGraph& self, Name name, Name input, Name tensor, Name bias, double epsilon) {
             check(self.graph.layer_norm(name, input, tensor, bias, epsilon));
           },
           py::arg("name"), py::arg("input"), py::arg("tensor"), py::kw_only(), py::arg("bias") = "", py::arg("epsilon") = 1e-5)
      .def("gelu",
           [](PyGraph& self, Name name, Name input, Name form) {
             check(self.graph.gelu(name, input, choose<Gelu, 2>("form", form, {{{"exact", Gelu::kExact}, {"tanh", Gelu::kTanh}}})));
           },
           py::arg("name"), py::arg("input"), py::kw_only(), py::arg("form") = "exact")
      .def("mean", [](PyGraph& self, Name name, Name input) { check(self.graph.mean(name, input)); }, py::arg("name"), py::arg("input"))
      .def("normalise", [](PyGraph& self, Name name, Name input, double epsilon) { check(self.graph.normalise(name, input, epsilon)); },
           py::arg("name"), py::arg("input"), py::kw_only(), py::arg("epsilon") = 1e-12)
      .def("top_k", [](PyGraph& self, Name name, Name scores, std::uint32_t k, bool normalise) { check(self.graph.top_k(name, scores, k, normalise)); },
           py::arg("name"), py::arg("scores"), py::arg("k"), py::kw_only(), py::arg("normalise") = true)
      .def("expert_matmul",
           [](PyGraph& self, Name name, Name input, Name routing, Name tensor, py::handle shape) {
             check(self.graph.expert_matmul(name, input, routing, tensor, shape_from(shape)));
           },
           py::arg("name"), py::arg("input"), py::arg("routing"), py::arg("tensor"), py::arg("shape"))
      .def("expert_combine",
           [](PyGraph& self, Name name, Name input, Name routing, Name tensor, py::handle shape) {
             check(self.graph.expert_combine(name, input, routing, tensor, shape_from(shape)));
           },
           py::arg("name"), py::arg("input"), py::arg("routing"), py::arg("tensor"), py::arg("shape"));
}

}  // namespace

void bind_graph(py::module_& module) {
  using Name = const std::string&;
  py::class_<PyGraph> graph(module, "Graph", py::is_final());
  bind_operations(graph);
  graph.def(py::init<>())
      .def_static("bert", &bert, py::arg("config"), py::kw_only(), py::arg("naming") = "hf", py::arg("normalise") = py::none())
      .def_static("llama", &llama, py::arg("config"), py::kw_only(), py::arg("naming") = "gguf", py::arg("tied") = py::none())
      .def("embedding",
           [](PyGraph& self, Name name, Name tensor, py::handle shape, Name rows) {
             const RowsBy by = choose<RowsBy, 3>("rows", rows, {{{"token", RowsBy::kToken}, {"position", RowsBy::kPosition}, {"first", RowsBy::kFirst}}});
             check(self.graph.embedding(name, tensor, shape_from(shape), by));
           },
           py::arg("name"), py::arg("tensor"), py::arg("shape"), py::kw_only(), py::arg("rows") = "token")
      .def("matmul",
           [](PyGraph& self, Name name, Name input, Name tensor, py::handle shape, Name bias) {
             check(self.graph.matmul(name, input, tensor, shape_from(shape), bias));
           },
           py::arg("name"), py::arg("input"), py::arg("tensor"), py::arg("shape"), py::kw_only(), py::arg("bias") = "")
      .def("rms_norm", [](PyGraph& self, Name name, Name input, Name tensor, double epsilon) { check(self.graph.rms_norm(name, input, tensor, epsilon)); },
           py::arg("name"), py::arg("input"), py::arg("tensor"), py::kw_only(), py::arg("epsilon") = 1e-5)
      .def("rotary", &rotary, py::arg("name"), py::arg("input"), py::kw_only(), py::arg("heads"), py::arg("head_size"),
           py::arg("rotary_size") = py::none(), py::arg("base") = 10000.0, py::arg("layout") = "interleaved")
      .def("attention",
           [](PyGraph& self, Name name, Name query, Name key, Name value, std::uint32_t heads, std::uint32_t kv_heads, std::uint32_t head_size, bool causal) {
             check(self.graph.attention(name, query, key, value, {heads, kv_heads, head_size, causal}));
           },
           py::arg("name"), py::arg("query"), py::arg("key"), py::arg("value"), py::kw_only(), py::arg("heads"), py::arg("kv_heads"), py::arg("head_size"),
           py::arg("causal") = true)
      .def("swiglu", [](PyGraph& self, Name name, Name gate, Name up) { check(self.graph.swiglu(name, gate, up)); }, py::arg("name"), py::arg("gate"),
           py::arg("up"))
      .def("add", [](PyGraph& self, Name name, Name left, Name right) { check(self.graph.add(name, left, right)); }, py::arg("name"), py::arg("left"),
           py::arg("right"))
      .def("softmax", [](PyGraph& self, Name name, Name input) { check(self.graph.softmax(name, input)); }, py::arg("name"), py::arg("input"))
      .def("head", [](PyGraph& self, Name name, Name input, Name tensor, py::handle shape) { check(self.graph.head(name, input, tensor, shape_from(shape))); },
           py::arg("name"), py::arg("input"), py::arg("tensor"), py::arg("shape"))
      .def_property_readonly("parameters", &parameters)
      .def_property_readonly("operations", &operations)
      .def_property_readonly("vocabulary", [](const PyGraph& self) { return self.graph.vocabulary(); });
}

}  // namespace paramwire::bindings
