// Runs the bodies of CUDA kernels without a GPU: every thread of a block is a fiber, and the fibers take turns at barriers and shuffles.
//
// What a GPU would forgive on one day and not on the next is a fault here, named with its kernel, block and thread:
//   - a barrier that not every thread of the block reaches, or not every thread as often as the others;
//   - a warp operation that not all 32 lanes reach, or where lanes are in different ones;
//   - bytes written just outside of Launch::shared_bytes (kGuardBytes on either side; AddressSanitizer builds fault at once, reads too);
//   - geometry that a device refuses: no whole warps, more than 1024 threads, no blocks, more shared memory than kSharedBytesMax.
// A barrier that is missing shows as a wrong result in some order of threads: `seed` chooses the order (below), so a test runs several.
// Shared memory holds 0xff bytes when a block begins (floats: NaN), as it holds anything on a device.
//
// Orders. Seed 0: by thread number, a warp as far as it gets, then the next; the fastest. Odd seeds: threads and blocks start in an order
// of that seed and the one that became ready last runs on: some run ahead as far as barriers let them. Even seeds: any that is ready.
#pragma once

#include "paramwire/cuda/kernels/compute_args.hpp"
#include "paramwire/cuda/kernels/lane.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

namespace paramwire::testing {

class LaneExecutor;

// The Lane of lane.hpp for a host. Given to a body by LaneExecutor, and good only while that body runs.
class HostLane {
 public:
  HostLane(LaneExecutor& executor, std::uint32_t thread) : executor_(&executor), thread_(thread) {}

  inline std::uint32_t block_x() const;
  inline std::uint32_t block_y() const;
  inline std::uint32_t block_z() const;
  inline std::uint32_t blocks_x() const;
  inline std::uint32_t blocks_y() const;
  inline std::uint32_t blocks_z() const;
  std::uint32_t thread() const { return thread_; }
  inline std::uint32_t threads() const;
  std::uint32_t lane_in_warp() const { return thread_ % cuda::kWarp; }
  std::uint32_t warp() const { return thread_ / cuda::kWarp; }
  inline void sync() const;
  template <typename T>
  T* shared() const;
  template <typename T>
  T warp_xor(T value, unsigned mask) const;
  inline float warp_sum(float value) const;
  inline float warp_max(float value) const;
  void atomic_min(std::uint32_t* at, std::uint32_t value) const {
    if (value < *at) *at = value;
  }
  void atomic_add(std::uint32_t* at, std::uint32_t value) const { *at += value; }

 private:
  LaneExecutor* executor_;
  std::uint32_t thread_;
};

// A kernel as the executor takes it: a body of HostLane, with its arguments behind a pointer.
using HostKernel = void (*)(const HostLane& lane, const void* args);

class LaneExecutor {
 public:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr std::uint32_t kThreadsMax = 1024;              // of a block: CUDA Programming Guide, "Compute Capabilities"
  static constexpr std::uint32_t kSharedBytesMax = 48 * 1024;     // what a launch may ask for without an attribute on every device

  LaneExecutor();
  ~LaneExecutor();
  LaneExecutor(const LaneExecutor&) = delete;
  LaneExecutor& operator=(const LaneExecutor&) = delete;

  // Runs the whole grid; blocks one after the other.
  //
  // returns: what is wrong, beginning with `kernel`, or "". After a fault the rest of the grid is not run
  // threads: one at a time for each executor
  std::string run(std::string_view kernel, const cuda::Launch& launch, HostKernel body, const void* args, std::uint64_t seed = 0);

  // How often a fiber gave way to another: what a run costs beside its bodies.
  std::uint64_t switches() const;

  // For HostLane.
  enum class WarpOperation : std::uint32_t { kNone, kXor, kSum, kMax };
  void sync(std::uint32_t thread);
  std::uint32_t warp(std::uint32_t thread, WarpOperation operation, std::uint32_t bits, std::uint32_t mask);
  std::uint32_t block(unsigned axis) const { return block_[axis]; }
  const cuda::Launch& launch() const { return launch_; }
  void* shared() const { return shared_; }

 private:
  struct State;
  std::unique_ptr<State> state_;
  cuda::Launch launch_;
  std::uint32_t block_[3] = {0, 0, 0};
  void* shared_ = nullptr;
};

inline std::uint32_t HostLane::block_x() const { return executor_->block(0); }
inline std::uint32_t HostLane::block_y() const { return executor_->block(1); }
inline std::uint32_t HostLane::block_z() const { return executor_->block(2); }
inline std::uint32_t HostLane::blocks_x() const { return executor_->launch().blocks[0]; }
inline std::uint32_t HostLane::blocks_y() const { return executor_->launch().blocks[1]; }
inline std::uint32_t HostLane::blocks_z() const { return executor_->launch().blocks[2]; }
inline std::uint32_t HostLane::threads() const { return executor_->launch().threads; }
inline void HostLane::sync() const { executor_->sync(thread_); }

template <typename T>
T* HostLane::shared() const {
  return static_cast<T*>(executor_->shared());
}

template <typename T>
T HostLane::warp_xor(T value, unsigned mask) const {
  static_assert(sizeof(T) == 4 && std::is_trivially_copyable_v<T>);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = executor_->warp(thread_, LaneExecutor::WarpOperation::kXor, bits, mask);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

inline float HostLane::warp_sum(float value) const {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = executor_->warp(thread_, LaneExecutor::WarpOperation::kSum, bits, 0);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

inline float HostLane::warp_max(float value) const {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = executor_->warp(thread_, LaneExecutor::WarpOperation::kMax, bits, 0);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// run_grid<NameArgs>(executor, "name", launch, args, seed, [](const HostLane& lane, const NameArgs& a) { name(lane, a); })
template <typename Args, typename Body>
std::string run_grid(LaneExecutor& executor, std::string_view kernel, const cuda::Launch& launch, const Args& args, std::uint64_t seed,
                     Body) {
  static_assert(std::is_empty_v<Body>, "a body without captures: what it needs is in its arguments, as on a device");
  return executor.run(
      kernel, launch, [](const HostLane& lane, const void* at) { Body{}(lane, *static_cast<const Args*>(at)); }, &args, seed);
}

}  // namespace paramwire::testing
