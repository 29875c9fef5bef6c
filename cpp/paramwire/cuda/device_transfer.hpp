// Moves bytes between the host and device memory that somebody else owns: a framework's tensors. Through two page-locked halves, so that one is
// filled, or emptied, by the host while the device copies the other.
//
//   host:    fill half 0 | fill half 1 | wait(half 0), fill it | ...
//   stream:               copy, check half 0 | copy, check half 1 | ...
//
// All copies are on a stream of its own. What a caller's stream holds goes before them by an event, and nothing is ever enqueued behind it in that
// stream, for three reasons. Every call waits for its copies anyway: their verdict must be known, and the halves are used again. A capture that
// another thread begins on that stream can't swallow a copy, whose replay would read memory that is long gone. And the per-thread default stream is
// another one in each thread, while copies may be made by any.
//
// The host waits for the caller's work before the first copy, with a deadline: a caller's work may take any time, and copies that were enqueued
// behind it would still write to the caller's memory after an error had told it that the call is over.
//
// threads: one; it may change between calls, but for after().
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/extent_check.hpp"
#include "paramwire/cuda/device.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"
#include "paramwire/cuda/module.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

namespace paramwire::cuda {

// Of each half. A copy of 8 MiB takes 0.3 ms where the link moves 25 GB/s, against 10 us for what surrounds it; twice 8 MiB is all that is locked.
inline constexpr std::uint64_t kTransferHalfBytes = std::uint64_t{8} << 20;

// What is wrong with [address, address + bytes) as memory of `device` that copies go to or come from: nothing, when all of it is the device's, or managed.
// `what` begins the text: "out". `ordinal_said`: by the array's protocol.
//
// errors: kInvalid: memory of the host or of nobody, with the next step; memory of another device, naming both; a range that ends before
//         `bytes` do. Those of the driver
// threads: any
Status check_device_range(const Device& device, CUdeviceptr address, std::uint64_t bytes, std::string_view what);
// The device whose memory holds `address`.  errors: kInvalid: none's, naming `what`
Result<int> device_of(const Driver& driver, CUdeviceptr address, std::string_view what);

class DeviceTransfer {
 public:
  // `module` has the kernel of the checks.  errors: kBackpressure: no memory; those of the driver
  static Result<std::unique_ptr<DeviceTransfer>> open(DevicePtr device, std::shared_ptr<const Module> module, std::uint64_t half_bytes = kTransferHalfBytes);
  // Waits for copies that were enqueued.
  ~DeviceTransfer();
  DeviceTransfer(const DeviceTransfer&) = delete;
  DeviceTransfer& operator=(const DeviceTransfer&) = delete;

  const Device& device() const noexcept { return *device_; }
  std::uint64_t half_bytes() const noexcept { return half_bytes_; }
  bool pinned() const noexcept { return halves_[0].pinned() && halves_[1].pinned(); }
  // Where the copies are made. Producers of arrays may make it wait for their work (DLPack's `stream`).
  CUstream stream() const noexcept { return stream_.handle(); }
  // A call to the driver failed: what is in its stream is not known, it serves no other call.
  bool failed() const noexcept { return failed_; }
  // Whether it may serve another call now: not while its stream waits for a caller's work that took too long, or was drawn into a capture.
  bool reusable() const;

  // ---- order

  // What is copied from here on comes after what `stream` holds now. CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (of the calling thread) are streams, too.
  // errors: kInvalid: it is being captured, or no stream of this device's primary context; nothing was enqueued then
  Status after(CUstream stream);
  // Waits until all that has come to pass, and what producers had the stream wait for. To be called before the first copy.
  // errors: kInvalid: a producer's stream is being captured, and drew this one in; kTimeout at `until`, nothing was copied; kUnavailable: that work failed
  Status ready(Micros until);

  // ---- to the device

  struct Part {
    std::uint64_t offset = 0;  // in the half
    std::uint64_t bytes = 0;
    CUdeviceptr target = 0;
    std::span<const ExtentCheck> checks;  // offsets count from the part's first byte
  };
  // A half that the device is done with, to be filled. The same until it is sent.
  Result<std::span<std::byte>> next_half();
  // Enqueues copies out of that half, and behind them the comparison of what landed with `checks`.
  // errors: kInvalid: checks that are no extents of 64 KiB one behind the other within their part, or more than a half may have
  Status send(std::span<const Part> parts);
  // Extents that were sent to be checked so far: the first of the next part has this number.
  std::uint32_t extents() const noexcept { return extents_; }
  struct Bad {
    std::uint32_t count = 0;   // extents that are not what they must be
    std::uint32_t lowest = 0;  // number of the first
  };
  // Waits for all that was sent. nullopt: all of it is what it must be.
  Result<std::optional<Bad>> finish();

  // ---- to the host

  // Copies `target.size()` bytes from `source`; they are there when it returns.
  Status read(CUdeviceptr source, std::span<std::byte> target);

 private:
  DeviceTransfer(DevicePtr device, std::shared_ptr<const Module> module, std::uint64_t half_bytes)
      : device_(std::move(device)), module_(std::move(module)), half_bytes_(half_bytes) {}
  Status prepare();
  Status check_stream(CUstream stream, std::string_view whose) const;
  Status enqueue(std::span<const Part> parts);
  Status enqueue_checks(const Part& part, std::uint32_t& used);
  Status enqueue_read(std::size_t half, CUdeviceptr source, std::uint64_t bytes);
  Status abandon(Status error);

  const DevicePtr device_;
  const std::shared_ptr<const Module> module_;
  const std::uint64_t half_bytes_;
  Stream stream_;
  Event called_;                   // of callers' streams
  Event ready_;
  std::array<HostMemory, 2> halves_;
  std::array<Event, 2> copied_;    // by half
  std::array<bool, 2> used_{};     // by half: copied_ was recorded
  // What extents must be, by half, and what came out of comparing.
  std::uint32_t extents_max_ = 0;  // of a half
  HostMemory expected_host_, verdict_host_;
  DeviceMemory expected_, verdict_;
  std::uint32_t extents_ = 0;
  std::size_t next_ = 0;           // half
  bool waiting_ = false;           // for what ready_ is behind
  bool copying_ = false;           // copies of ours may be under way
  bool failed_ = false;
};

}  // namespace paramwire::cuda
