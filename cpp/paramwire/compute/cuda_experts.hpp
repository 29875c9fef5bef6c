// The experts of a mixture on a device: which ones the routing of a step picked, where their matrices lie, and their products.
//
//   compute:  ... top_k | routing to host | record(routed)         (the host waits for routed, groups the picks, asks for the experts)
//             lists to device |   wait(arrived) | products, record(computed) |   wait(arrived) | products, record(computed) ...
//   copy:       expert, expert | record(arrived)     expert, expert | record(arrived)      wait(computed of this half) | expert ...
//
// What a step picks is not bounded by memory: experts come in batches, each to one of two halves in turn, and a batch is one launch. Launches are
// given their batch as arguments, so nothing of this is captured; the graphs before and behind know of experts only the values that they leave.
//
// threads: one at a time, with the device current.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/cuda_emit.hpp"
#include "paramwire/compute/graph.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/module.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace paramwire {

// Groups the picks of a routing by expert.
//
// routing:  [rows, 2 k], as OpKind::kTopK makes it    experts: how many there are
// distinct: those that were picked, ascending
// begin, picks: [at least distinct + 1] and [rows * k]: picks[begin[i]] to picks[begin[i + 1] - 1], ascending, are those of distinct[i], as row * k + slot
// errors: kInternal: a number that is no expert's
Status group_picks(std::span<const float> routing, std::uint32_t k, std::uint64_t experts, std::vector<std::uint64_t>& distinct, std::span<std::uint32_t> begin,
                   std::span<std::uint32_t> picks);

class CudaExperts {
 public:
  CudaExperts(cuda::DevicePtr device, std::shared_ptr<const cuda::Module> module, const Binding& binding, const SessionOptions& options)
      : device_(std::move(device)), module_(std::move(module)), binding_(binding), options_(options) {}

  // Makes all that steps use; nothing where the graph has no experts. errors: kInvalid: rows_bytes do not hold the largest expert, naming it;
  // kBackpressure.
  Status prepare();

  // After the step before has been waited for.
  void begin_step() noexcept;

  // From here on experts of need `need` are wanted, until all have been taken. Its input and routing have been enqueued on `compute`.
  // returns: whether the host waited for all of `compute`, which it does once for a routing
  // errors: the device's; kInternal: what it picked are no experts. Then nothing has begun
  Result<bool> begin(std::size_t need, const CudaEmitter& emitter, const cuda::Stream& compute);
  // The need that began last; SIZE_MAX: none in this step.
  std::size_t need() const noexcept { return need_; }
  // Its experts that are still wanted, ascending. Valid until the next begin().
  std::span<const std::uint64_t> wanted() const noexcept;
  // Enqueues copies of the wanted experts in `view`, which holds the first of them, and products with the batches that are full.
  Status take(const WeightView& view, const CudaEmitter& emitter, const cuda::Stream& copy, const cuda::Stream& compute);

  // Device memory of lists, without the experts' own (SessionOptions::rows_bytes).
  std::uint64_t device_bytes() const noexcept { return lists_.size(); }

 private:
  // A top_k whose experts are read.
  struct Routing {
    std::uint32_t op = 0;
    std::uint64_t rows_max = 0, experts = 0;
    std::uint64_t values_at = 0;            // bytes into picked_: [rows_max, 2 k] as it came
    std::uint64_t begin_at = 0, picks_at = 0;  // bytes into lists_host_ and lists_: [least of experts and picks, one more], [picks]
    bool known = false;                     // in this step
    std::vector<std::uint64_t> distinct{};
  };

  Status place();
  Status learn(Routing& routing, const CudaEmitter& emitter, const cuda::Stream& compute);
  Status multiply(const CudaEmitter& emitter, const cuda::Stream& copy, const cuda::Stream& compute);
  std::span<std::uint32_t> list(std::uint64_t at, std::uint64_t count) const noexcept {
    return {reinterpret_cast<std::uint32_t*>(lists_host_.data() + at), static_cast<std::size_t>(count)};
  }

  const cuda::DevicePtr device_;
  const std::shared_ptr<const cuda::Module> module_;
  const Binding& binding_;
  const SessionOptions& options_;

  std::vector<Routing> routings_;
  std::vector<std::uint32_t> routing_of_;  // by operation: index into routings_
  std::uint32_t halves_ = 2;               // one, where two of the largest expert have no room
  std::uint64_t half_bytes_ = 0;
  cuda::DeviceMemory experts_, lists_;
  cuda::HostMemory picked_, lists_host_;
  cuda::Event routed_, arrived_;
  std::array<cuda::Event, 2> computed_;    // by half

  std::size_t need_ = SIZE_MAX;
  std::uint32_t routing_ = 0;              // of need_: index into routings_
  std::size_t taken_ = 0;                  // of its experts
  std::uint64_t batch_ = 0;                // experts in the half that is being filled
  unsigned half_ = 0;
  std::uint64_t batches_ = 0;
  std::array<bool, 2> used_{};             // since the host last waited for the computation
};

}  // namespace paramwire
