// Copies and fills. Which of them wait, and when they read, is section "API synchronization behavior" of the manual, "Memcpy", "Asynchronous":
// pageable to device: the source is staged before the call returns; device to pageable: the call returns when the copy is done; pinned: neither.
#include "support/sim_cuda_state.hpp"

namespace paramwire::testing::sim {

namespace {

// Whether `begin` is pinned; an error where it can't be the host's side of a copy.
CUresult host_side(Sim& sim, const void* begin, std::uint64_t bytes, bool& pinned) {
  const std::uint64_t address = address_of(begin);
  if (begin == nullptr && bytes > 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "no host memory");
  if (sim.memory.reserved(address)) return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat(hex(address), " is device memory, not the host's"));
  pinned = sim.pinned.map().around(address) != nullptr;
  if (!pinned) return CUDA_SUCCESS;
  const std::string problem = sim.pinned.map().problem(address, bytes, 0);
  return problem.empty() ? CUDA_SUCCESS : sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("pinned memory: ", problem));
}

CUresult device_side(Sim& sim, CUdeviceptr begin, std::uint64_t bytes, int device) {
  const std::string problem = sim.memory.map().problem(begin, bytes, device);
  return problem.empty() ? CUDA_SUCCESS : sim.forbid(CUDA_ERROR_INVALID_VALUE, problem);
}

void describe(SimEntry& entry, const Stream& stream, std::uint64_t address, std::uint64_t bytes) {
  entry.stream = stream.number;
  entry.address = address;
  entry.bytes = bytes;
}

CUresult sim_cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, std::size_t bytes, CUstream handle) {
  return call("cuMemcpyHtoDAsync", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    describe(entry, *stream, target, bytes);
    Op op;
    op.kind = OpKind::kToDevice;
    op.target = target;
    op.source = address_of(source);
    op.bytes = bytes;
    code = device_side(sim, target, bytes, stream->device);
    if (code == CUDA_SUCCESS) code = host_side(sim, source, bytes, op.pinned);
    if (code != CUDA_SUCCESS) return code;
    // A captured copy has nothing to stage: its node reads the source at each launch.
    if (!op.pinned && stream->capture == 0) {
      const auto* begin = static_cast<const std::byte*>(source);
      op.held.assign(begin, begin + bytes);
    }
    return sim.push(*stream, std::move(op));
  });
}

CUresult sim_cuMemcpyDtoHAsync(void* target, CUdeviceptr source, std::size_t bytes, CUstream handle) {
  return call("cuMemcpyDtoHAsync", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    describe(entry, *stream, source, bytes);
    Op op;
    op.kind = OpKind::kToHost;
    op.target = address_of(target);
    op.source = source;
    op.bytes = bytes;
    code = device_side(sim, source, bytes, stream->device);
    if (code == CUDA_SUCCESS) code = host_side(sim, target, bytes, op.pinned);
    if (code != CUDA_SUCCESS) return code;
    const bool waits = !op.pinned && stream->capture == 0;
    if (waits) code = sim.conflict_with_capture();
    if (code == CUDA_SUCCESS) code = sim.push(*stream, std::move(op));
    if (!waits || code != CUDA_SUCCESS) return code;
    sim.run_up_to(stream->last);
    return sim.lost_of(stream->device);
  });
}

CUresult sim_cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, std::size_t bytes, CUstream handle) {
  return call("cuMemcpyDtoDAsync", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    describe(entry, *stream, target, bytes);
    code = device_side(sim, target, bytes, stream->device);
    if (code == CUDA_SUCCESS) code = device_side(sim, source, bytes, stream->device);
    if (code != CUDA_SUCCESS) return code;
    Op op;
    op.kind = OpKind::kCopy;
    op.target = target;
    op.source = source;
    op.bytes = bytes;
    return sim.push(*stream, std::move(op));
  });
}

CUresult sim_cuMemsetD8Async(CUdeviceptr target, unsigned char value, std::size_t bytes, CUstream handle) {
  return call("cuMemsetD8Async", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    describe(entry, *stream, target, bytes);
    code = device_side(sim, target, bytes, stream->device);
    if (code != CUDA_SUCCESS) return code;
    Op op;
    op.kind = OpKind::kFill;
    op.target = target;
    op.bytes = bytes;
    op.value = value;
    return sim.push(*stream, std::move(op));
  });
}

}  // namespace

void fill_copy_functions(cuda::Driver& driver) {
  driver.cuMemcpyHtoDAsync = sim_cuMemcpyHtoDAsync;
  driver.cuMemcpyDtoHAsync = sim_cuMemcpyDtoHAsync;
  driver.cuMemcpyDtoDAsync = sim_cuMemcpyDtoDAsync;
  driver.cuMemsetD8Async = sim_cuMemsetD8Async;
}

}  // namespace paramwire::testing::sim
