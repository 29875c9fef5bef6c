// Turns a segment of a walk into kernel launches: the same code whether they are captured in a graph or run at once.
//
// Steps of up to cuda::kGemvTokensMax tokens read every weight once by matrix-vector kernels; longer ones (prompts) go through cuBLASLt, where it
// is there, with inputs narrowed to the weight's type. An addition whose result the next operation normalises is done by that kernel.
//
// threads: one at a time, with the device current.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/cuda_walk.hpp"
#include "paramwire/compute/graph.hpp"
#include "paramwire/compute/value_places.hpp"
#include "paramwire/cuda/blaslt.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/kernels/compute_args.hpp"
#include "paramwire/cuda/module.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace paramwire {

// Where weights lie for one launch of a segment.
struct CudaWeights {
  CUdeviceptr resident = 0;
  CUdeviceptr slot = 0;  // the segment's window
};

class CudaEmitter {
 public:
  // blas: may be null: long steps then go through the matrix-vector kernels too, a few tokens at a time
  CudaEmitter(cuda::DevicePtr device, std::shared_ptr<const cuda::Module> module, std::unique_ptr<cuda::BlasLt> blas, const Binding& binding, const SessionOptions& options)
      : device_(std::move(device)), module_(std::move(module)), blas_(std::move(blas)), binding_(binding), options_(options) {}

  // Allocates activations and caches and copies what is constant, by `stream`, and waits for it. errors: kInvalid: sizes that the kernels
  // do not take; kBackpressure.
  Status prepare(const cuda::Stream& stream);

  // Where the step's state goes: StepState, then, for each embedding in turn, the index of every token's row
  // in rows(), [step_tokens] of 4 bytes.
  CUdeviceptr state() const noexcept { return state_.address(); }
  cuda::StepState* step_state() const noexcept { return state_.at<cuda::StepState>(); }
  std::uint64_t state_bytes() const noexcept { return state_.size(); }
  // Where embedding rows go, packed, for the need at `need`.
  CUdeviceptr rows(std::size_t need) const noexcept;
  // The step's output, float32 [output width].
  CUdeviceptr output() const noexcept;
  // The value of operation `op`, float32 [rows_of(op), width], while it is alive: for what experts compute between two segments. Device memory.
  float* value(std::uint32_t op) const noexcept { return values_.at<float>(4 * places_.offsets[op]); }
  std::uint32_t rows_of(std::uint32_t op) const noexcept;
  // What expert_combine sums, [rows * k, width]. Device memory.
  float* products() const noexcept { return products_.at<float>(); }

  // Before the first segment of a step.
  void begin_step(std::uint32_t tokens);
  Status emit(const CudaWalk& walk, const CudaSegment& segment, const CudaWeights& weights, const cuda::Stream& stream);

  std::uint64_t device_bytes() const noexcept;

 private:
  struct RotaryTable {
    double base = 0;
    std::uint32_t pairs = 0;
    std::uint64_t turns = 0, cosines = 0, sines = 0;  // bytes into constants_, tables_ and tables_
    std::uint32_t first_op = 0;                       // which fills cosines and sines before it reads them
  };
  Status check_sizes() const;
  Status place();
  Status place_rotary(const cuda::Stream& stream);

  template <typename Args>
  Status launch(cuda::Kernel kernel, const cuda::Launch& geometry, const Args& args, const cuda::Stream& stream) const {
    return module_->launch(stream, kernel, geometry, args);
  }
  std::uint64_t state_bytes(std::size_t rows_needs) const noexcept;
  std::uint32_t splits(const Op& op, std::uint32_t tokens) const noexcept;
  void* half_value(std::uint32_t op) const noexcept { return halves_.at<void>(2 * places_.offsets[op]); }
  // What `op`'s kernel should write beside its value.
  cuda::Half half_wanted(std::uint32_t op) const noexcept;
  const void* vector(const CudaWalk& walk, const CudaWeights& weights, std::size_t need, std::uint64_t row) const noexcept;

  Status run(const CudaWalk& walk, const CudaAction& action, const CudaWeights& weights, const cuda::Stream& stream);
  Status embedding(std::uint32_t op, const cuda::Stream& stream);
  Status norm(const CudaWalk& walk, std::uint32_t op, const CudaWeights& weights, const cuda::Stream& stream);
  Status rotary(std::uint32_t op, const cuda::Stream& stream);
  Status attention(std::uint32_t op, const cuda::Stream& stream);
  Status elementwise(std::uint32_t op, const cuda::Stream& stream);
  Status routing(std::uint32_t op, const cuda::Stream& stream);
  Status pair(std::uint32_t op, const cuda::Stream& stream);
  Status matrix(const CudaWalk& walk, const CudaAction& action, const CudaWeights& weights, const cuda::Stream& stream);
  Status product(const CudaAction& action, const void* weight, const cuda::Stream& stream, const void* bias);

  const cuda::DevicePtr device_;
  const std::shared_ptr<const cuda::Module> module_;
  const std::unique_ptr<cuda::BlasLt> blas_;
  const Binding& binding_;
  const SessionOptions& options_;

  ValuePlaces places_;
  std::vector<std::size_t> first_need_;         // by operation
  std::vector<cuda::Half> half_of_consumers_;   // by operation: of the matrix products that read it
  std::vector<cuda::Half> half_there_;          // by operation: what half_value() holds in this step
  std::vector<std::uint32_t> added_by_;         // by operation: the addition that its kernel does first, or UINT32_MAX
  std::vector<bool> left_to_next_;              // by operation: an addition that the next operation does
  std::vector<RotaryTable> rotary_;
  std::vector<std::uint32_t> rotary_of_;
  std::vector<std::uint64_t> cache_at_, rows_at_, row_of_at_;  // by cache, by need, by need: bytes
  std::uint32_t tokens_ = 0;

  cuda::DeviceMemory values_, halves_, caches_, partial_, products_, constants_, tables_, state_, rows_;
};

}  // namespace paramwire
