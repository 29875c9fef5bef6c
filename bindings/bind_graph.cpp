#include "convert.hpp"
#include "graph.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/llama.hpp"

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace paramwire::bindings {

namespace {

// One field of LlamaConfig: our word, the word of Hugging Face's config.json, and where it goes.
template <typename Value>
void read_field(const py::object& config, const char* ours, const char* theirs, Value& value) {
  for (const char* key : {ours, theirs}) {
    const py::object found = config.attr("get")(key, py::none());
    if (found.is_none()) continue;
    try {
      value = found.cast<Value>();
    } catch (const py::cast_error&) {
      raise_invalid(cat("configuration: ", key, " is ", std::string(py::repr(found)), ", a ",
                        std::is_same_v<Value, bool> ? "bool" : std::is_integral_v<Value> ? "non-negative integer" : "number", " was expected"));
    }
    return;
  }
}

LlamaConfig config_from(const py::object& mapping) {
  // Scaled positions would compute something else than the checkpoint means, silently.
  for (const char* key : {"rope_scaling", "sliding_window"}) {
    const py::object found = mapping.attr("get")(key, py::none());
    if (!found.is_none()) raise_invalid(cat("configuration: ", key, " is ", std::string(py::repr(found)), ": llama graphs have none"));
  }
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
  const bool fields = py::hasattr(config, "__dataclass_fields__");
  const py::object mapping = fields ? py::object(py::module_::import("dataclasses").attr("asdict")(config)) : config;
  if (!py::hasattr(mapping, "get")) {
    throw py::type_error(cat("config must be a LlamaConfig or a mapping, not ", std::string(py::str(py::type::handle_of(config).attr("__name__")))));
  }
  LlamaConfig read = config_from(mapping);
  if (tied) read.tied_head = *tied;
  if (naming != "gguf" && naming != "hf") raise_invalid(cat("naming is \"", naming, "\": known are gguf, hf"));
  return PyGraph{take(llama_graph(read, naming == "gguf" ? Naming::kGguf : Naming::kHuggingFace))};
}

void rotary(PyGraph& self, const std::string& name, const std::string& input, std::uint32_t heads, std::uint32_t head_size,
            std::optional<std::uint32_t> rotary_size, double base, const std::string& layout) {
  if (layout != "interleaved" && layout != "half_split") raise_invalid(cat("layout is \"", layout, "\": known are interleaved, half_split"));
  RotaryOptions options;
  options.heads = heads;
  options.head_size = head_size;
  options.rotary_size = rotary_size.value_or(head_size);
  options.base = base;
  options.layout = layout == "interleaved" ? RotaryLayout::kInterleaved : RotaryLayout::kHalfSplit;
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

}  // namespace

void bind_graph(py::module_& module) {
  using Name = const std::string&;
  py::class_<PyGraph>(module, "Graph", py::is_final())
      .def(py::init<>())
      .def_static("llama", &llama, py::arg("config"), py::kw_only(), py::arg("naming") = "gguf", py::arg("tied") = py::none())
      .def("embedding", [](PyGraph& self, Name name, Name tensor, py::handle shape) { check(self.graph.embedding(name, tensor, shape_from(shape))); },
           py::arg("name"), py::arg("tensor"), py::arg("shape"))
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
           [](PyGraph& self, Name name, Name query, Name key, Name value, std::uint32_t heads, std::uint32_t kv_heads, std::uint32_t head_size) {
             check(self.graph.attention(name, query, key, value, {heads, kv_heads, head_size}));
           },
           py::arg("name"), py::arg("query"), py::arg("key"), py::arg("value"), py::kw_only(), py::arg("heads"), py::arg("kv_heads"), py::arg("head_size"))
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
