// Fetches into memory of a CUDA device that somebody else owns (torch, CuPy, a program's own), and reads out of it for publishes.
//
//   auto work = (*DeviceArrays::open())->begin(0, {});
//   (*work)->after(stream);                              // the caller's, if it has one
//   DeviceFetch want{.tensor = "w", .target = {address, bytes}};
//   Status ok = (*work)->fetch(*snapshot, std::span(&want, 1), {});
//
// Every call is over when it returns: bytes have landed and are verified, or were read. What the caller enqueues from then on, in any stream, comes
// after it. Bytes of raw blocks are compared with their CRCs in device memory, after the copy; the rest on the host, before.
//
// Page-locked memory: two halves of 8 MiB for each call at the same time (pageable where the system gives none), of which there may be four on a device. They
// are kept for the next ones. Larger tensors go through them in pieces, one fetched while the one before is copied.
//
// In a build without CUDA open() says so.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/client/client.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace paramwire {

// Streams by number, as the array API standard has them for DLPack on CUDA (section "DLPack", `stream`), and Numba's CUDA Array Interface: a CUstream, or
inline constexpr std::uint64_t kLegacyStream = 1;     // the legacy default stream
inline constexpr std::uint64_t kPerThreadStream = 2;  // the default stream of the calling thread

// Device or managed memory, of one device; contiguous.
struct DeviceRange {
  std::uint64_t address = 0;  // a CUdeviceptr
  std::uint64_t bytes = 0;
};

// A tensor, or a contiguous row or head range of it, into device memory of exactly its size.
struct DeviceFetch {
  std::string_view tensor;
  Shard part;
  DeviceRange target;  // undefined after an error
};

// One call's work on one device. One thread; it may change between calls, but for after(kPerThreadStream). Destroyed, it has been waited for.
class DeviceWork {
 public:
  virtual ~DeviceWork() = default;
  // The stream that the copies are made on (a CUstream): a producer that orders its work before that of a consumer's stream is given this one.
  virtual std::uint64_t stream() const noexcept = 0;
  // What follows comes after what `stream` of the caller holds now.
  // errors: kInvalid: 0; a stream that is being captured, or of another device; nothing was enqueued then
  virtual Status after(std::uint64_t stream) = 0;
  // Whether `range` is memory of this device. `what` begins the text: "out".
  // errors: kInvalid naming the device, the host, or the bytes that are missing
  virtual Status check(const DeviceRange& range, std::string_view what) const = 0;
  // Fetches all of `wanted`, in order.
  // errors: kInvalid for a target of the wrong size (naming both); kCorrupt naming the tensor and the byte, when what landed is not what the server sealed; kTimeout
  //         also when the caller's work before it does not end in time, nothing was copied then; kUnavailable: the device; as Snapshot::fetch
  virtual Status fetch(Snapshot& snapshot, std::span<const DeviceFetch> wanted, CallOptions options) = 0;
  // Copies `source` to the host.
  // errors: kTimeout as fetch; kUnavailable: the device
  virtual Status read(const DeviceRange& source, std::span<std::byte> target, CallOptions options) = 0;
};

// The devices of this process. Any thread. After fork() the child gets kInvalid, and kUnavailable where the parent had used CUDA before.
class DeviceArrays {
 public:
  // Opens the driver's library; no device is touched.
  // errors: kUnavailable: no driver, with what to install; a build without CUDA
  static Result<std::shared_ptr<DeviceArrays>> open();
  virtual ~DeviceArrays() = default;
  // errors: kInvalid: no such device; kUnavailable: an old driver, a device before compute capability 8.0; kBackpressure: no memory; kTimeout: four
  //         calls on this device are under way, and none ends
  virtual Result<std::unique_ptr<DeviceWork>> begin(int ordinal, CallOptions options) = 0;
  // The device whose memory holds `address`.  errors: kInvalid: none's, naming `what`; as begin
  virtual Result<int> device_of(std::uint64_t address, std::string_view what) = 0;
};

}  // namespace paramwire
