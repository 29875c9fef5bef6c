// What a kernel's body knows of the thread that runs it.
//
// A kernel is a template over a Lane:  template <typename Lane> PARAMWIRE_BODY void name(const Lane& lane, const NameArgs& args);
// kernels.cu instantiates it with DeviceLane, whose members are a register or one instruction each; the tests (and their simulated device)
// with a lane of theirs, which runs the threads of a block in turns and switches at every barrier and shuffle. So the body that runs on a GPU
// is the one that is tested without one. A Lane has:
//
//   block_x(), block_y(), block_z()         blockIdx
//   blocks_x(), blocks_y(), blocks_z()      gridDim
//   thread(), threads()                     threadIdx.x and blockDim.x; blocks are one-dimensional, of whole warps of 32
//   lane_in_warp(), warp()                  thread() % 32, thread() / 32
//   sync()                                  __syncthreads: every thread of the block, the same number of times
//   shared<T>()                             the block's dynamic shared memory, as T*; 16-byte aligned, Launch::shared_bytes of it
//   warp_xor(T value, unsigned mask)        __shfl_xor_sync over all 32 lanes: the value of lane_in_warp() ^ mask. T of 4 bytes
//   warp_sum(float), warp_max(float)        over the 32 lanes; the same in each
//   atomic_min(uint32_t* at, uint32_t v)    on global memory, relaxed; returns nothing
//   atomic_add(uint32_t* at, uint32_t v)
//
// Bodies: no recursion, no allocation, no local array that is indexed by a variable (it would be spilled to memory: a test keeps the kernel
// table free of that), no assumption on which block runs first. Loops over elements are strided by threads(), so that any block size is right.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define PARAMWIRE_BODY __device__ __forceinline__
#define PARAMWIRE_HOST_BODY __host__ __device__ __forceinline__
#define PARAMWIRE_CONSTEXPR_BODY constexpr __host__ __device__ __forceinline__
#else
#define PARAMWIRE_BODY inline
#define PARAMWIRE_HOST_BODY inline
#define PARAMWIRE_CONSTEXPR_BODY constexpr
#endif
// PARAMWIRE_HOST_BODY: what both bodies and launch functions ask. PARAMWIRE_CONSTEXPR_BODY: what constants are made by, too.

namespace paramwire::cuda {

inline constexpr std::uint32_t kWarp = 32;

#if defined(__CUDACC__)

extern __shared__ __align__(16) unsigned char paramwire_shared[];

struct DeviceLane {
  __device__ std::uint32_t block_x() const { return blockIdx.x; }
  __device__ std::uint32_t block_y() const { return blockIdx.y; }
  __device__ std::uint32_t block_z() const { return blockIdx.z; }
  __device__ std::uint32_t blocks_x() const { return gridDim.x; }
  __device__ std::uint32_t blocks_y() const { return gridDim.y; }
  __device__ std::uint32_t blocks_z() const { return gridDim.z; }
  __device__ std::uint32_t thread() const { return threadIdx.x; }
  __device__ std::uint32_t threads() const { return blockDim.x; }
  __device__ std::uint32_t lane_in_warp() const { return threadIdx.x % kWarp; }
  __device__ std::uint32_t warp() const { return threadIdx.x / kWarp; }
  __device__ void sync() const { __syncthreads(); }
  template <typename T>
  __device__ T* shared() const {
    return reinterpret_cast<T*>(paramwire_shared);
  }
  template <typename T>
  __device__ T warp_xor(T value, unsigned mask) const {
    static_assert(sizeof(T) == 4);
    return __shfl_xor_sync(0xffffffffU, value, static_cast<int>(mask));
  }
  __device__ float warp_sum(float value) const {
    for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) value += warp_xor(value, mask);
    return value;
  }
  __device__ float warp_max(float value) const {
    for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) value = fmaxf(value, warp_xor(value, mask));
    return value;
  }
  __device__ void atomic_min(std::uint32_t* at, std::uint32_t value) const { atomicMin(at, value); }
  __device__ void atomic_add(std::uint32_t* at, std::uint32_t value) const { atomicAdd(at, value); }
};

#endif

// Sum over the block, the same in every thread. `scratch`: shared floats, one a warp; free for use again after the next sync().
template <typename Lane>
PARAMWIRE_BODY float block_sum(const Lane& lane, float value, float* scratch) {
  value = lane.warp_sum(value);
  if (lane.lane_in_warp() == 0) scratch[lane.warp()] = value;
  lane.sync();
  const std::uint32_t warps = lane.threads() / kWarp;
  return lane.warp_sum(lane.lane_in_warp() < warps ? scratch[lane.lane_in_warp()] : 0.0F);
}

template <typename Lane>
PARAMWIRE_BODY float block_max(const Lane& lane, float value, float* scratch) {
  value = lane.warp_max(value);
  if (lane.lane_in_warp() == 0) scratch[lane.warp()] = value;
  lane.sync();
  const std::uint32_t warps = lane.threads() / kWarp;
  return lane.warp_max(lane.lane_in_warp() < warps ? scratch[lane.lane_in_warp()] : scratch[0]);
}

}  // namespace paramwire::cuda
