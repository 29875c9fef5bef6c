// Extents of weights that are compared on the device, behind the copy that brought them; what they came to is read once for many.
//
// threads: one at a time, with the device current.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/cuda_walk.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"
#include "paramwire/cuda/module.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

class CudaChecks {
 public:
  // in_flight: views whose copies may be on their way at once
  Status open(const cuda::DevicePtr& device, std::shared_ptr<const cuda::Module> module, const CudaWalk& walk, std::size_t in_flight);

  // Forgets what came out before; ordered in `stream`.
  Status begin(const cuda::Stream& stream);
  // What has been copied to `at` by `stream` is compared with view.checks, behind the copy.
  // turn: of the view, modulo in_flight: what it must be is uploaded from memory that is used again by the same turn
  // errors: kInvalid: checks that are no run of extents within the view
  Status enqueue(const cuda::Stream& stream, const WeightView& view, CUdeviceptr at, std::size_t piece, std::uint64_t turn);
  // Brings the verdict to the host, behind all that was enqueued in `stream` or that it waits for.
  Status read(const cuda::Stream& stream) const;
  // Once read() is done. weights: "this step's weights". errors: kCorrupt naming the first extent that is wrong
  Status verdict(const Binding& binding, const CudaWalk& walk, std::string_view weights) const;
  // Pieces of which extents were compared since begin().
  template <typename Visit>
  void for_each_piece(const Visit& visit) const {
    for (const Checked& each : checked_) visit(each.piece);
  }

 private:
  struct Checked {
    std::uint32_t first = 0;  // number of its first extent since begin()
    std::size_t piece = 0;
    std::uint64_t offset = 0;  // of its first extent in the piece
  };

  std::shared_ptr<const cuda::Module> module_;
  std::uint64_t in_flight_ = 0;
  std::uint64_t extents_max_ = 0;  // of a piece
  std::string label_;              // of the device
  cuda::DeviceMemory expected_, verdict_;
  cuda::HostMemory expected_host_, verdict_host_;
  std::vector<Checked> checked_;
  std::uint32_t extents_ = 0;
};

}  // namespace paramwire
