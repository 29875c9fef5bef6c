// A CUDA device and what is made on it: memory, streams, events, graphs; each an owner that gives it back.
//
// Everything here works in the device's primary context, so that pointers are exchanged with frameworks of the same process (torch, CuPy) as
// they are. Nothing uses the legacy default stream, and every call that a stream capture of the user's would forbid to its own thread is
// made with the thread's capture mode relaxed (Current), so that a library thread never breaks a capture, and a user's thread that captures is
// refused only where the user's own stream is concerned. Source: CUDA Driver API manual, "Stream Management", cuThreadExchangeStreamCaptureMode.
//
// threads: any; one object by one thread at a time unless said.  After fork() the child can't use CUDA (CUDA C++ Programming Guide): the
// objects of the parent refuse to work there and their destructors do nothing.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/cuda/driver.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace paramwire::cuda {

struct DeviceFacts {
  int ordinal = 0;
  std::string name;                // "NVIDIA H200"
  int major = 0, minor = 0;        // compute capability
  int multiprocessors = 0;
  std::uint64_t memory_bytes = 0;
  int driver_version = 0;          // 13000 is 13.0
};

// Whether the driver is new enough; nothing is initialised. errors: kUnavailable with what to install
Status check_version(const Driver& driver);

class Device {
 public:
  // How many devices the driver shows (CUDA_VISIBLE_DEVICES counts), which may be 0.
  // errors: kUnavailable: cuInit failed, or the driver is older than kDriverVersionMin, with what to install
  static Result<int> count(const Driver& driver);
  // Retains the device's primary context until the last owner is gone.
  // errors: as count(); kInvalid: no such ordinal, with those there are; kUnavailable: compute capability below 8.0
  static Result<std::shared_ptr<const Device>> open(std::shared_ptr<const Driver> driver, int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const noexcept { return *driver_; }
  const DeviceFacts& facts() const noexcept { return facts_; }
  std::string label() const;  // "cuda:0"
  bool in_child() const noexcept { return fork_.in_child(); }
  // errors: kInvalid in a child of fork()
  Status check_process() const { return fork_.check(label()); }
  // Bytes free on the device now, for error texts and plans; 0 when the driver does not say.
  std::uint64_t free_bytes() const;

  Status check(CUresult result, std::string_view doing) const {
    if (result == CUDA_SUCCESS) return {};
    return error(result, doing);
  }
  Error error(CUresult result, std::string_view doing) const;

 private:
  friend class Current;
  Device(std::shared_ptr<const Driver> driver, CUdevice device) : driver_(std::move(driver)), device_(device) {}
  Status look(int ordinal);

  const std::shared_ptr<const Driver> driver_;
  const CUdevice device_;
  CUcontext context_ = nullptr;
  DeviceFacts facts_;
  ForkGuard fork_;
};
using DevicePtr = std::shared_ptr<const Device>;

// While it lives, the device's context is current in this thread and the thread's capture mode is relaxed; both are as before afterwards.
class Current {
 public:
  explicit Current(const Device& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  // errors: kUnavailable, kInvalid (after fork); what is done all the same fails by itself.
  const Status& status() const noexcept { return status_; }

 private:
  const Device& device_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool pushed_ = false;
  Status status_;
};

// Device memory, 256-byte aligned, uninitialised. Move-only.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // what: for errors: "the weights' slots". errors: kBackpressure naming size and what is free; kUnavailable.
  static Result<DeviceMemory> allocate(DevicePtr device, std::uint64_t size, std::string_view what);
  ~DeviceMemory() { reset(); }
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  CUdeviceptr address() const noexcept { return address_; }
  std::uint64_t size() const noexcept { return size_; }
  // The address `offset` bytes on, as kernel arguments take it. Never to be read by the host.
  template <typename T>
  T* at(std::uint64_t offset = 0) const noexcept {
    return reinterpret_cast<T*>(address_ + offset);  // NOLINT: a device address, which only kernels follow
  }

 private:
  void reset() noexcept;
  void swap(DeviceMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(size_, other.size_);
  }
  DevicePtr device_;
  CUdeviceptr address_ = 0;
  std::uint64_t size_ = 0;
};

// Host memory that the device copies from and to: page-locked where the system gives that, else plain (copies are then slower and staged by
// the driver; nothing else changes). Small limits on locked memory are no error: CASES of WSL and containers.
class HostMemory {
 public:
  HostMemory() = default;
  // errors: kBackpressure when not even plain memory can be had.
  static Result<HostMemory> allocate(DevicePtr device, std::uint64_t size);
  ~HostMemory() { reset(); }
  HostMemory(HostMemory&& other) noexcept { swap(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const noexcept { return data_; }
  std::uint64_t size() const noexcept { return size_; }
  std::span<std::byte> span() const noexcept { return {data_, static_cast<std::size_t>(size_)}; }
  bool pinned() const noexcept { return pinned_; }

 private:
  void reset() noexcept;
  void swap(HostMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(pinned_, other.pinned_);
    std::swap(plain_, other.plain_);
  }
  DevicePtr device_;
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  bool pinned_ = false;
  Buffer plain_;
};

// An event without timing (cheaper), or with.
class Event {
 public:
  Event() = default;
  static Result<Event> create(DevicePtr device, bool timing = false);
  ~Event() { reset(); }
  Event(Event&& other) noexcept { swap(other); }
  Event& operator=(Event&& other) noexcept {
    swap(other);
    return *this;
  }

  CUevent handle() const noexcept { return event_; }
  // Waits on the host until what was recorded last is done. Nothing recorded: at once. errors: kUnavailable: what ran before it failed.
  Status synchronize() const;
  // Whether it is done, without waiting.
  Result<bool> done() const;

 private:
  void reset() noexcept;
  void swap(Event& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
  }
  DevicePtr device_;
  CUevent event_ = nullptr;
};

// A captured graph, ready to be launched any number of times.
class GraphExec {
 public:
  GraphExec() = default;
  GraphExec(DevicePtr device, CUgraphExec exec) : device_(std::move(device)), exec_(exec) {}
  ~GraphExec() { reset(); }
  GraphExec(GraphExec&& other) noexcept { swap(other); }
  GraphExec& operator=(GraphExec&& other) noexcept {
    swap(other);
    return *this;
  }
  CUgraphExec handle() const noexcept { return exec_; }

 private:
  void reset() noexcept;
  void swap(GraphExec& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(exec_, other.exec_);
  }
  DevicePtr device_;
  CUgraphExec exec_ = nullptr;
};

// A non-blocking stream of our own. Calls need the device Current.
class Stream {
 public:
  Stream() = default;
  static Result<Stream> create(DevicePtr device);
  ~Stream() { reset(); }
  Stream(Stream&& other) noexcept { swap(other); }
  Stream& operator=(Stream&& other) noexcept {
    swap(other);
    return *this;
  }

  CUstream handle() const noexcept { return stream_; }
  const Device& device() const noexcept { return *device_; }
  Status synchronize() const;
  // What is enqueued from here on runs after what `event` was last recorded behind.
  Status wait(const Event& event) const;
  Status record(const Event& event) const;
  // The source must stay as it is until the copy is done.
  Status to_device(CUdeviceptr target, std::span<const std::byte> source) const;
  Status to_host(std::span<std::byte> target, CUdeviceptr source) const;
  Status copy(CUdeviceptr target, CUdeviceptr source, std::uint64_t size) const;
  Status fill(CUdeviceptr target, std::byte value, std::uint64_t size) const;
  Status launch(const GraphExec& graph) const;
  // Prepares the graph's first launch, which then takes no longer than others.
  Status upload(const GraphExec& graph) const;

  // Captures what `enqueue` puts into this stream and what joins it (and runs none of it).
  // errors: those of enqueue; kInternal: something in it can't be captured, naming what the driver says
  template <typename Enqueue>
  Result<GraphExec> capture(Enqueue&& enqueue) const {
    PARAMWIRE_CHECK(begin_capture());
    Status status = enqueue();
    return end_capture(std::move(status));
  }

 private:
  Status begin_capture() const;
  Result<GraphExec> end_capture(Status enqueued) const;
  void reset() noexcept;
  void swap(Stream& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
  }
  DevicePtr device_;
  CUstream stream_ = nullptr;
};

}  // namespace paramwire::cuda
