// CpuSession: one computation on the CPU backend. See backend.hpp for the contract.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/kernels.hpp"
#include "paramwire/compute/team.hpp"

#include <memory>
#include <vector>

namespace paramwire {

// What a session shares with its backend: threads and the kernels chosen.
struct CpuContext {
  std::unique_ptr<Team> team;
  const kernels::Set* kernels = nullptr;
};

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) { return (value + step - 1) / step * step; }

class CpuSession final : public Session {
 public:
  static Result<std::unique_ptr<Session>> open(std::shared_ptr<CpuContext> context, const Binding& binding,
                                               const SessionOptions& options);

  Status begin(std::span<const Token> tokens) override;
  const Pending* pending() const noexcept override { return waiting_ ? &pending_ : nullptr; }
  std::uint64_t supplied() const noexcept override { return supplied_; }
  std::uint64_t released() override { return supplied_; }
  Status release(std::uint64_t) override { return {}; }
  Status supply(const WeightView& view) override;
  Result<std::span<const float>> finish() override;
  void abandon() noexcept override;
  Status rewind(std::uint64_t position) override;
  std::uint64_t position() const noexcept override { return position_; }
  const Binding& binding() const noexcept override { return binding_; }
  std::uint64_t state_bytes() const noexcept override { return activations_.size() + caches_.size() + scratch_.size() + gathered_.size(); }

 private:
  // Cosines and sines of one kind of rotary operation, for the positions of this step: [token][pair].
  struct RotaryTable {
    double base = 0;
    std::uint32_t pairs = 0;
    std::vector<double> turns;  // radians a position, by pair
    std::vector<float> cosines, sines;
  };

  CpuSession(std::shared_ptr<CpuContext> context, const Binding& binding, const SessionOptions& options)
      : context_(std::move(context)), binding_(binding), options_(options) {}
  Status allocate();
  std::uint32_t rotary_table(const RotaryOptions& options);
  std::uint64_t rows_of(const Op& op) const noexcept { return op.last_only ? 1 : tokens_.size(); }
  float* value(std::uint32_t op) noexcept { return reinterpret_cast<float*>(activations_.data()) + value_at_[op]; }
  float* worker_scratch(std::uint32_t worker) noexcept {
    return reinterpret_cast<float*>(scratch_.data()) + worker * scratch_floats_;
  }
  // Positions that keys and values of an attention have room for.
  std::uint64_t room(const Op& op) const noexcept { return op.attention.causal ? options_.context_tokens : options_.step_tokens; }
  float* keys(const Op& op, std::uint32_t kv_head) noexcept;
  float* values(const Op& op, std::uint32_t kv_head) noexcept;

  void advance();
  void await(std::size_t need);
  std::uint64_t table_row(const Op& op, std::size_t index) const noexcept;
  void want_rows(const Op& op);

  // Operations: cpu_operations.cpp.
  template <typename Body>
  void each_row(std::uint64_t rows, std::uint64_t width, Body&& body);
  void multiply(const kernels::Rows& weights, DType dtype, const float* x, std::uint64_t tokens, float* y, std::uint64_t y_stride,
                bool accumulate);
  // Those without parameters.
  void compute(const Op& op, std::uint32_t index);
  void compute_rotary(const Op& op, std::uint32_t index);
  void compute_attention(const Op& op, std::uint32_t index);
  void compute_mean(const Op& op, std::uint32_t index);
  // Before the first piece of a norm's parameters: means_ and scales_.
  void measure_rows(const Op& op);
  // A piece of a parameter for the operation that waits.
  void take(const Op& op, const Need& need, const WeightView& view);
  void take_embedding(const Op& op, const WeightView& view);
  void take_bias(const Op& op, const WeightView& view);
  void take_norm(const Op& op, const WeightView& view);
  void take_matrix(const Op& op, const Need& need, const WeightView& view);
  void take_experts(const Op& op, const Need& need, const WeightView& view);

  const std::shared_ptr<CpuContext> context_;  // shared: a session may outlive its backend
  const Binding binding_;
  const SessionOptions options_;

  Buffer activations_, caches_, scratch_;
  Buffer gathered_;                             // of one expert: the rows that it is to multiply, then its products
  std::uint64_t scratch_floats_ = 0;            // for each worker
  std::vector<std::uint64_t> value_at_;         // by operation: offset of its value in activations_, in floats
  std::vector<std::uint64_t> cache_at_;         // by cache: offset in caches_, in floats
  std::uint64_t step_at_ = 0;                   // the same, for keys and values of the bidirectional attention that runs
  std::vector<RotaryTable> rotary_;
  std::vector<std::uint32_t> rotary_of_;        // by operation: index into rotary_

  std::uint64_t position_ = 0;   // tokens in the cache before the running step
  std::vector<Token> tokens_;    // of the running step
  std::vector<std::uint64_t> wanted_rows_;  // that the operation that waits reads by data, distinct, ascending
  std::size_t rows_taken_ = 0;   // of wanted_rows_
  std::vector<std::uint64_t> picks_;        // of one expert: token * k + slot
  std::vector<double> means_, scales_;      // of each row, for the norm that waits: it takes (x - mean) * scale
  std::uint64_t supplied_ = 0;
  bool running_ = false;
  bool waiting_ = false;
  std::uint32_t next_op_ = 0;    // the operation to run, or the one that waits
  std::size_t next_need_ = 0;
  std::size_t needs_left_ = 0;   // of the operation that waits
  Pending pending_;
};

}  // namespace paramwire
