// Brings weights to the device whose byte planes are still apart, and puts their elements together there.
//
// Bytes go to scratch memory and from there to their place, by one stream: while a piece is put together no other is copied, which for a piece of
// 4 MiB is a few microseconds of the device's memory.
//
// threads: one at a time, with the device current.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"
#include "paramwire/cuda/module.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paramwire {

class CudaPlanes {
 public:
  // piece_bytes: of the largest view that may have planes apart; 0: none may
  // in_flight:   views whose copies may be on their way at once
  Status open(const cuda::DevicePtr& device, std::shared_ptr<const cuda::Module> module, std::uint64_t piece_bytes, std::size_t in_flight);

  // view.data to `at`, by `stream`; turn: of the view, modulo in_flight: what describes it lies in memory that is used again by the same turn.
  // errors: kInvalid: planes that are not ascending and within the view, not of whole elements, or of a view larger than piece_bytes
  Status copy(const cuda::Stream& stream, const WeightView& view, CUdeviceptr at, std::uint64_t turn) const;

 private:
  Status check(const WeightView& view, std::uint64_t width) const;

  std::shared_ptr<const cuda::Module> module_;
  std::uint64_t piece_bytes_ = 0, in_flight_ = 0, chunks_max_ = 0;  // chunks_max_: of a view
  cuda::DeviceMemory scratch_, described_;
  cuda::HostMemory described_host_;  // MergePiece [in_flight][chunks_max]
};

}  // namespace paramwire
