// CudaSession: one computation on a CUDA device. See backend.hpp for the contract.
//
// Two streams: copies and checks of weights on one, computation on the other, joined by events:
//
//   copy:     wait(slot computed) | copy, check, copy, check ... | record(arrived)
//   compute:                                 wait(arrived) | segment (a captured graph) | record(slot computed)
//
// The wait is never part of a graph: what is captured are kernels on fixed addresses. So graphs made when the session is opened compute
// with whatever version of the weights lies in the slots, and in the set of those that stay. Experts, which the computation itself names, are
// CudaExperts'.
#pragma once

#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/cuda_checks.hpp"
#include "paramwire/compute/cuda_emit.hpp"
#include "paramwire/compute/cuda_experts.hpp"
#include "paramwire/compute/cuda_planes.hpp"
#include "paramwire/compute/cuda_sets.hpp"
#include "paramwire/compute/cuda_walk.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/module.hpp"

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace paramwire {

// What a session shares with its backend.
struct CudaContext {
  cuda::DevicePtr device;
  std::shared_ptr<const cuda::Module> module;
  std::shared_ptr<const cuda::BlasLtApi> blas;  // null: not there, for
  std::string blas_problem;                     // this reason
};

class CudaSession final : public Session {
 public:
  static Result<std::unique_ptr<Session>> open(std::shared_ptr<const CudaContext> context, const Binding& binding, const SessionOptions& options);
  ~CudaSession() override;

  Status begin(std::span<const Token> tokens) override;
  const Pending* pending() const noexcept override { return waiting_ ? &pending_ : nullptr; }
  std::uint64_t supplied() const noexcept override { return supplied_; }
  std::uint64_t released() override;
  Status release(std::uint64_t count) override;
  Status supply(const WeightView& view) override;
  Result<std::span<const float>> finish() override;
  void abandon() noexcept override;
  Status rewind(std::uint64_t position) override;
  std::uint64_t position() const noexcept override { return position_; }
  Status renew(std::span<const std::size_t> pieces) override;
  Status stage(std::size_t piece, const WeightView& view) override { return sets_->stage(piece, view); }
  Status stage_same(std::size_t piece) override { return sets_->stage_same(piece); }
  Status staged() override { return sets_->staged(); }
  Status swap() override;
  const Binding& binding() const noexcept override { return binding_; }
  std::uint64_t state_bytes() const noexcept override { return emitter_->device_bytes() + experts_->device_bytes(); }

 private:
  // Supplies whose copies may be on their way: enough that a ring of 16 MiB in pieces of 256 KiB is never held up by them.
  static constexpr std::size_t kInFlight = 64;

  CudaSession(std::shared_ptr<const CudaContext> context, const Binding& binding, const SessionOptions& options)
      : context_(std::move(context)), binding_(binding), options_(options) {}
  Status prepare();
  Status allocate();
  Status capture();

  void wait() noexcept;
  void await();
  Status supply_rows(const WeightView& view);
  Status supply_experts(const WeightView& view);
  Status supply_piece(const WeightView& view);
  Status verdict();
  Status advance();
  Status await_experts(std::size_t need);
  std::uint64_t table_row(std::size_t index) const noexcept;
  void want_rows();
  Status run_segment(const CudaSegment& segment);
  Status emit(std::size_t segment, unsigned set, unsigned slot);

  const std::shared_ptr<const CudaContext> context_;
  const Binding binding_;
  SessionOptions options_;
  CudaWalk walk_;
  cuda::Stream copy_, compute_;
  std::unique_ptr<CudaEmitter> emitter_;
  std::unique_ptr<CudaExperts> experts_;
  std::unique_ptr<CudaSets> sets_;
  cuda::DeviceMemory slots_;
  std::vector<std::array<std::array<cuda::GraphExec, 2>, 2>> graphs_;  // by segment, set and slot, for steps of one token
  std::array<cuda::Event, kInFlight> copied_;           // by supply, in turn
  std::array<cuda::Event, 2> computed_;                 // by slot
  cuda::Event arrived_, done_;
  cuda::HostMemory upload_, rows_, logits_;
  CudaPlanes planes_;
  CudaChecks checks_;
  cuda::HostMemory met_;  // StepState::met, after the step

  std::uint64_t position_ = 0;
  std::vector<Token> tokens_;
  std::vector<std::uint64_t> wanted_rows_;   // that the need that waits takes, distinct, ascending
  std::vector<std::size_t> rows_needs_;      // of embeddings
  std::size_t rows_need_ = 0, rows_taken_ = 0;  // the one of them that waits, and how many of wanted_rows_ it has
  std::size_t next_piece_ = 0;
  std::size_t next_segment_ = 0;
  bool fresh_pieces_ = false;                // copied since the last segment was launched
  unsigned slot_ = 0;                        // of the window that is being supplied, or was last
  std::uint64_t windows_begun_ = 0;
  std::array<bool, 2> slot_used_{};
  bool running_ = false, waiting_ = false;
  std::uint64_t supplied_ = 0, released_ = 0;
  Pending pending_;
};

}  // namespace paramwire
