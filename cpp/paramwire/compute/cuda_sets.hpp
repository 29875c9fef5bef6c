// The memory of a session's weights that stay: one set, or two, of which one is filled while steps compute with the other.
//
// Each set has a number in device memory: the generation of the weights that lie in it, 0 while it is being filled. A step's kernels look at it first and
// last (cuda::GenerationArgs), so that a replay of a graph over other weights than the session thinks is found, and gives no result.
//
// threads: stage(), stage_same() and staged(): one at a time, in any thread, beside a step in another. renew(): the step's. swap(): beside neither.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/cuda_checks.hpp"
#include "paramwire/compute/cuda_planes.hpp"
#include "paramwire/compute/cuda_walk.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/module.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire {

class CudaSets {
 public:
  // binding, walk: outlive this
  CudaSets(cuda::DevicePtr device, const Binding& binding, const CudaWalk& walk) : device_(std::move(device)), binding_(binding), walk_(walk) {}
  ~CudaSets();
  CudaSets(const CudaSets&) = delete;
  CudaSets& operator=(const CudaSets&) = delete;

  // With the device current. errors: kInvalid: resident_sets other than 1 or 2; kBackpressure
  Status open(const SessionOptions& options, std::shared_ptr<const cuda::Module> module, const cuda::Stream& stream);

  std::uint32_t count() const noexcept { return count_; }
  CUdeviceptr address(unsigned set) const noexcept { return memory_.address() + set * walk_.resident_bytes; }
  // Where the set's generation stands.
  const std::uint32_t* number(unsigned set) const noexcept { return numbers_.at<const std::uint32_t>(set * kCudaAlignment); }
  std::uint64_t bytes() const noexcept { return memory_.size() + numbers_.size(); }

  // Of the set that steps compute with.
  unsigned current() const noexcept { return current_; }
  std::uint32_t generation() const noexcept { return generation_; }
  bool there(std::size_t piece) const noexcept { return there_[current_][piece]; }
  void set_there(std::size_t piece, bool there) noexcept { there_[current_][piece] = there; }

  // As Session's.
  Status renew(std::span<const std::size_t> pieces);
  Status stage(std::size_t piece, const WeightView& view);
  Status stage_same(std::size_t piece);
  Status staged();
  Status swap();

  // The current set's number, if renew() changed it; ordered in `stream`. With the device current.
  Status write_number(const cuda::Stream& stream);

 private:
  // Ready to fill one piece of the other set. errors: kInvalid
  Status begin(std::size_t piece, std::string_view what);
  unsigned other() const noexcept { return 1 - current_; }
  CUdeviceptr place(unsigned set, std::size_t piece) const noexcept { return address(set) + walk_.pieces[piece].offset; }
  Status write(unsigned set, std::uint32_t generation, const cuda::Stream& stream);

  const cuda::DevicePtr device_;
  const Binding& binding_;
  const CudaWalk& walk_;
  std::uint32_t count_ = 1;
  cuda::DeviceMemory memory_, numbers_;
  cuda::HostMemory numbers_host_;  // by set
  unsigned current_ = 0;
  std::uint32_t generation_ = 1, written_ = 0;  // written_: the current set's number
  std::array<std::vector<bool>, 2> there_;      // by set and piece

  // What fills the other set.
  cuda::Stream stream_;
  cuda::Event copied_;
  CudaPlanes planes_;
  CudaChecks checks_;
  std::uint64_t turn_ = 0;
  bool filling_ = false, whole_ = false;
};

}  // namespace paramwire
