// Plain double-precision versions of every operation, and a driver that streams tensors from memory through a session.
// Tests compare the CPU backend with these; nothing here is shared with it.
#pragma once

#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/graph.hpp"
#include "paramwire/compute/llama.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace paramwire::oracle {

// Unit round-off of float32.
inline constexpr double kUnit = 0x1p-24;

struct Tensor {
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<std::byte> bytes;
  std::vector<double> values;  // exactly what `bytes` hold
};
using Tensors = std::map<std::string, Tensor>;

// Random normal-range values in [-1, 1), rounded to `dtype`.
Tensor random_tensor(DType dtype, const Shape& shape, std::uint64_t seed);
Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<double>& values);
// Every parameter of the graph, by seeds that follow one another.
Tensors random_tensors(const Graph& graph, DType dtype, std::uint64_t seed);
// A tiny decoder that has grouped heads, biases and a tied head.
LlamaConfig small_llama();
Tensor identity(std::uint64_t size);
std::vector<TensorInfo> infos(const Tensors& tensors);

// A value and how far a right float32 computation may be from it, both [width].
struct Answer {
  std::vector<double> values;
  std::vector<double> bounds;
};

// The graph over all tokens at once, in double precision: the output's last row. Bounds hold for a graph whose operations,
// but for the last, are exact in float32 (embeddings).
Answer evaluate(const Graph& graph, const Tensors& tensors, const std::vector<Token>& tokens);

// Run one step, cutting every tensor in views of at most `rows` rows. errors: what the session says.
Result<std::vector<float>> step(Session& session, const Tensors& tensors, std::span<const Token> tokens, std::uint64_t rows);

}  // namespace paramwire::oracle
