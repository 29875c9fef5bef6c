// Which tensor names a graph is built with.
#pragma once

#include <cstdint>

namespace paramwire {

enum class Naming : std::uint8_t {
  kGguf,         // of GGUF files (llama.cpp): token_embd.weight, blk.0.attn_q.weight, ...; rotary pairs are interleaved
  kHuggingFace,  // of Hugging Face checkpoints: model.layers.0.self_attn.q_proj.weight, ...; rotary pairs are half-split
};

}  // namespace paramwire
