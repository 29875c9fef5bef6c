// A small decoder on the CUDA backend, each piece from its own place in page-locked memory, with the checks that a server would have sealed; its weights
// can be replaced from step to step, and damaged. Either its matrices stream, or all stays, in two sets that change places.
#pragma once

#include "gpu/gpu_test.hpp"

#include "cpp/compute_oracle.hpp"
#include "paramwire/compute/cuda_backend.hpp"
#include "paramwire/compute/llama.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace paramwire::gpu {

class SessionRig {
 public:
  // rows: of a matrix in one piece, at most
  // sets: 1: matrices stream; 2: all stays
  SessionRig(const World& world, const LlamaConfig& config, DType dtype, std::uint64_t rows, std::uint32_t sets = 1);

  // Tensors from a seed; where matrices stream, those of one axis, which stay once they are there, are always the first.
  oracle::Tensors tensors(std::uint64_t seed) const;
  // Copies them to their places, and seals what is there now.
  void load(const oracle::Tensors& tensors);

  // What was loaded, into the other set, and then steps compute with that one.
  Status stage_and_swap();
  Result<std::vector<float>> step(Token token);
  // The same by the CPU backend, over all of `tokens`: the last one's logits.
  std::vector<float> cpu_logits(const oracle::Tensors& tensors, std::span<const Token> tokens) const;

  std::size_t pieces() const { return pieces_.size(); }
  bool streams(std::size_t piece) const { return !pieces_[piece].resident; }
  const std::string& tensor_of(std::size_t piece) const { return binding_.needs()[pieces_[piece].need].tensor; }
  std::span<std::byte> staged(std::size_t piece);  // after load(): to be damaged
  Session& session() { return *session_; }
  Backend& backend() { return *backend_; }

 private:
  std::uint64_t bytes_of(std::size_t piece) const;
  WeightView view_of(std::size_t piece);
  Status supply(const Pending& pending);

  Graph graph_;
  DType dtype_;
  std::uint32_t sets_;
  oracle::Tensors first_;
  std::shared_ptr<Backend> backend_;
  Binding binding_;
  std::vector<PieceLayout> pieces_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::vector<ExtentCheck>> checks_;
  oracle::Tensors rows_;  // what embeddings are taken from
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Session> session_;
};

// float32 sums in other orders over a few layers: far above rounding, far below what a wrong element makes.
inline constexpr float kLogitTolerance = 2e-4F;
float largest_difference(std::span<const float> a, std::span<const float> b);

}  // namespace paramwire::gpu
