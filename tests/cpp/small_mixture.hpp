// A mixture of experts small enough for tests: Mixtral's operations, one tensor for the matrices of a layer's experts.
#pragma once

#include "support/rig.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/graph.hpp"

#include <cstdint>
#include <string>

namespace paramwire::testing {

struct MixtureConfig {
  std::uint32_t layers = 2, experts = 6, k = 2;
  std::uint64_t width = 32, ffn_width = 40, vocabulary = 48;
  bool normalise = true;  // weights of the k picks sum to 1
  bool mean = false;      // ends with the mean of all positions, so that each expert's product shows, in place of the last one's logits
};

inline Graph small_mixture(const MixtureConfig& config) {
  Graph graph;
  must(graph.embedding("x", "embed", Shape{config.vocabulary, config.width}));
  std::string last = "x";
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
    const auto at = [&](std::string_view name) { return cat(layer, ".", name); };
    const Shape square{config.width, config.width}, wide{config.experts, config.ffn_width, config.width}, back{config.experts, config.width, config.ffn_width};
    must(graph.rms_norm(at("n"), last, at("attention_norm"), 1e-5));
    for (const char* name : {"q", "k", "v"}) must(graph.matmul(at(name), at("n"), at(name), square));
    AttentionOptions attention;
    attention.heads = attention.kv_heads = 2;
    attention.head_size = static_cast<std::uint32_t>(config.width / 2);
    must(graph.attention(at("a"), at("q"), at("k"), at("v"), attention));
    must(graph.matmul(at("o"), at("a"), at("o"), square));
    must(graph.add(at("h"), last, at("o")));
    must(graph.rms_norm(at("m"), at("h"), at("ffn_norm"), 1e-5));
    must(graph.matmul(at("scores"), at("m"), at("router"), Shape{config.experts, config.width}));
    must(graph.top_k(at("route"), at("scores"), config.k, config.normalise));
    for (const char* name : {"gate", "up"}) must(graph.expert_matmul(at(name), at("m"), at("route"), at(name), wide));
    must(graph.swiglu(at("g"), at("gate"), at("up")));
    must(graph.expert_combine(at("down"), at("g"), at("route"), at("down"), back));
    must(graph.add(at("out"), at("h"), at("down")));
    last = at("out");
  }
  must(graph.rms_norm("norm", last, "norm", 1e-5));
  must(config.mean ? graph.mean("out", "norm") : graph.head("logits", "norm", "head", Shape{config.vocabulary, config.width}));
  return graph;
}

}  // namespace paramwire::testing
