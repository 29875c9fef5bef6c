// llama_graph(): the operations of Llama-shaped decoders (Llama, SmolLM2, Mistral without sliding windows).
#pragma once

#include "paramwire/compute/graph.hpp"
#include "paramwire/compute/naming.hpp"

namespace paramwire {

// Sizes are elements. The names follow the Hugging Face configuration in brackets.
struct LlamaConfig {
  std::uint32_t layers = 0;         // [num_hidden_layers]; 0 is allowed: embedding, final norm and head alone
  std::uint64_t width = 0;          // [hidden_size]
  std::uint64_t ffn_width = 0;      // [intermediate_size]
  std::uint64_t vocabulary = 0;     // [vocab_size]
  std::uint32_t heads = 0;          // [num_attention_heads]
  std::uint32_t kv_heads = 0;       // [num_key_value_heads]
  std::uint32_t head_size = 0;      // [head_dim]; 0 means width / heads
  std::uint32_t rotary_size = 0;    // 0 means head_size
  double rotary_base = 10000.0;     // [rope_theta]
  double norm_epsilon = 1e-5;       // [rms_norm_eps]
  bool tied_head = false;           // [tie_word_embeddings]: the head reads the embedding's tensor
  bool attention_bias = false;      // q, k, v and output projections carry a bias
};

// errors: kInvalid naming the field, what was expected and what was given.
Result<Graph> llama_graph(const LlamaConfig& config, Naming naming);

}  // namespace paramwire
