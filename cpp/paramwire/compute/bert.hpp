// bert_graph(): the operations of BERT-shaped encoders (BERT, MiniLM and the sentence encoders made of them).
//
// A text is one step from position 0; its tokens are all of the first sentence (token type 0) and none is padding. The output is the
// mean of the last layer's rows, what sentence encoders call mean pooling.
// Source: Devlin et al., "BERT", arXiv 1810.04805, with the order of Hugging Face transformers' BertModel: norms follow the
// residual sums.
#pragma once

#include "paramwire/compute/graph.hpp"
#include "paramwire/compute/naming.hpp"

namespace paramwire {

// Sizes are elements. The names follow the Hugging Face configuration in brackets.
struct BertConfig {
  std::uint32_t layers = 0;         // [num_hidden_layers]; 0 is allowed: embeddings, their norm and the mean
  std::uint64_t width = 0;          // [hidden_size]
  std::uint64_t ffn_width = 0;      // [intermediate_size]
  std::uint64_t vocabulary = 0;     // [vocab_size]
  std::uint32_t heads = 0;          // [num_attention_heads]
  std::uint64_t positions = 0;      // [max_position_embeddings]: most tokens of a text
  std::uint64_t token_types = 2;    // [type_vocab_size]
  double norm_epsilon = 1e-12;      // [layer_norm_eps]
  Gelu gelu = Gelu::kExact;         // [hidden_act]: "gelu" or "gelu_pytorch_tanh"
  bool normalise = false;           // the output has length 1
};

// errors: kInvalid naming the field, what was expected and what was given.
Result<Graph> bert_graph(const BertConfig& config, Naming naming);

}  // namespace paramwire
