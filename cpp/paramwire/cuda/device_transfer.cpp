#include "paramwire/cuda/device_transfer.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/types.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <poll.h>
#include <string>
#include <utility>

namespace paramwire::cuda {

// ---------------------------------------------------------------- whose memory

namespace {

// Of a tensor that lies in many small mappings (virtual memory management maps 2 MiB and more): more than any has.
constexpr std::uint32_t kMappingsMax = 1U << 20;

struct PointerFacts {
  unsigned type = 0;  // CUmemorytype; 0: no memory of CUDA's
  unsigned managed = 0;
  int ordinal = -1;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  bool on_device() const noexcept { return managed != 0 || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED; }
};

Result<PointerFacts> facts_of(const Driver& driver, CUdeviceptr address, std::string_view doing) {
  PointerFacts out;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                      CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&out.type, &out.managed, &out.ordinal, &out.begin, &out.bytes};
  const CUresult result = driver.cuPointerGetAttributes(static_cast<unsigned>(std::size(attributes)), attributes, values, address);
  if (result != CUDA_SUCCESS) return driver_error(driver, result, doing);
  return out;
}

Error no_device_memory(CUdeviceptr address, std::string_view what, bool host) {
  return Error(Code::kInvalid, cat(what, ": 0x", hex64(address), host ? " is page-locked host memory, and its array says that it is a device's: give it as a host array"
                                                                      : " is no memory of a CUDA device of this process: give an array that is alive, of this process"));
}

}  // namespace

Result<int> device_of(const Driver& driver, CUdeviceptr address, std::string_view what) {
  PARAMWIRE_TRY(facts, facts_of(driver, address, cat(what, ": asking whose memory it is")));
  if (!facts.on_device() || facts.ordinal < 0) return no_device_memory(address, what, facts.type == CU_MEMORYTYPE_HOST);
  return facts.ordinal;
}

Status check_device_range(const Device& device, CUdeviceptr address, std::uint64_t bytes, std::string_view what) {
  if (bytes == 0) return {};
  const Current current(device);
  PARAMWIRE_CHECK(current.status());
  std::uint64_t checked = 0;
  for (std::uint32_t mappings = 0; checked < bytes; ++mappings) {
    PARAMWIRE_TRY(facts, facts_of(device.driver(), address + checked, cat(device.label(), ": ", what, ": asking whose memory it is")));
    if (!facts.on_device()) {
      if (checked == 0) return no_device_memory(address, what, facts.type == CU_MEMORYTYPE_HOST);
      return Error(Code::kInvalid, cat(what, ": of its ", bytes, " bytes at 0x", hex64(address), " only ", checked, " are memory of ", device.label(), ": the array describes more than it has"));
    }
    if (facts.ordinal != device.facts().ordinal) {
      return Error(Code::kInvalid, cat(what, ": its memory is of cuda:", facts.ordinal, ", and its array says ", device.label(), ": give the array with its own device"));
    }
    const std::uint64_t end = facts.begin + facts.bytes;
    // What does not tell its range is as long as it says.
    if (end <= address + checked || mappings == kMappingsMax) break;
    checked = end - address;
  }
  return {};
}

// ---------------------------------------------------------------- opening

Result<std::unique_ptr<DeviceTransfer>> DeviceTransfer::open(DevicePtr device, std::shared_ptr<const Module> module, std::uint64_t half_bytes) {
  std::unique_ptr<DeviceTransfer> out(new DeviceTransfer(std::move(device), std::move(module), half_bytes));
  PARAMWIRE_CHECK(out->prepare());
  return out;
}

Status DeviceTransfer::prepare() {
  PARAMWIRE_TRY(stream, Stream::create(device_));
  stream_ = std::move(stream);
  for (Event* event : {&called_, &ready_, &copied_[0], &copied_[1]}) {
    PARAMWIRE_TRY(made, Event::create(device_));
    *event = std::move(made);
  }
  // A block that has extents has two at least, of which one may be of a single byte.
  extents_max_ = static_cast<std::uint32_t>(2 * (half_bytes_ / kExtentBytes + 1));
  const struct {
    HostMemory* memory;
    std::uint64_t bytes;
  } wanted[] = {{&halves_[0], half_bytes_}, {&halves_[1], half_bytes_}, {&expected_host_, std::uint64_t{8} * extents_max_}, {&verdict_host_, sizeof(Verdict)}};
  for (const auto& each : wanted) {
    PARAMWIRE_TRY(memory, HostMemory::allocate(device_, each.bytes));
    *each.memory = std::move(memory);
  }
  const std::pair<DeviceMemory*, std::uint64_t> on_device[] = {{&expected_, std::uint64_t{8} * extents_max_}, {&verdict_, sizeof(Verdict)}};
  for (const auto& [memory, bytes] : on_device) {
    auto made = DeviceMemory::allocate(device_, bytes, "the checks of what lands");
    if (!made.ok() && made.error().code() == Code::kBackpressure) {
      return Error(Code::kBackpressure, cat(device_->label(), ": not even ", human_bytes(bytes), " are free for the checks of what lands: free what this process has there (torch.cuda.empty_cache()), or "
                                                              "end what else uses this device (nvidia-smi)"));
    }
    if (!made.ok()) return std::move(made).error();
    *memory = std::move(*made);
  }
  return {};
}

DeviceTransfer::~DeviceTransfer() {
  if (!copying_) return;
  const Current current(*device_);
  if (current.status().ok()) static_cast<void>(stream_.synchronize());
}

bool DeviceTransfer::reusable() const {
  const Current current(*device_);
  if (failed_ || !current.status().ok() || !check_stream(stream_.handle(), "").ok()) return false;
  if (!waiting_) return true;
  const auto done = ready_.done();
  return done.ok() && *done;
}

// ---------------------------------------------------------------- order

// Whether work may be put into `stream`, which is `whose`.
Status DeviceTransfer::check_stream(CUstream stream, std::string_view whose) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = device_->driver().cuStreamIsCapturing(stream, &status);
  if (result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_INVALID_VALUE) {
    return Error(Code::kInvalid, cat(device_->label(), ": ", whose, " is no stream of this device's primary context: give one that was made on the array's device"));
  }
  PARAMWIRE_CHECK(device_->check(result, cat("asking whether ", whose, " is being captured")));
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return {};
  return Error(Code::kInvalid, cat(device_->label(), ": ", whose, " is being captured, and a transfer can't be part of a graph: end the capture first, or give a stream outside of it"));
}

Status DeviceTransfer::after(CUstream stream) {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(check_stream(stream, "the stream that was given"));
  const CUresult result = device_->driver().cuEventRecord(called_.handle(), stream);
  if (result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_CONTEXT) {
    return Error(Code::kInvalid, cat(device_->label(), ": the stream that was given is of another device or context: give one that was made on the array's device"));
  }
  PARAMWIRE_CHECK(device_->check(result, "recording an event in the stream that was given"));
  return abandon(stream_.wait(called_));
}

namespace {

// Between two looks at an event: short at first, since most work is over soon, and at most a millisecond.
constexpr long kPauseNsMin = 20'000;
constexpr long kPauseNsMax = 1'000'000;

}  // namespace

Status DeviceTransfer::ready(Micros until) {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(check_stream(stream_.handle(), "the stream that the array's library works on"));
  PARAMWIRE_CHECK(abandon(stream_.record(ready_)));
  waiting_ = true;
  for (long pause_ns = kPauseNsMin;; pause_ns = std::min(2 * pause_ns, kPauseNsMax)) {
    auto done = ready_.done();
    if (!done.ok()) return abandon(std::move(done).error());
    if (*done) {
      waiting_ = false;
      return {};
    }
    if (steady_clock().now() >= until || wait_interrupted()) {
      return Error(Code::kTimeout, cat(device_->label(), ": what was enqueued before this call, on the stream that was given or that the array's library works on, did not end in time; nothing was "
                                                         "copied. Give a longer timeout, or see what that work waits for"));
    }
    timespec pause{0, pause_ns};
    ppoll(nullptr, 0, &pause, nullptr);
  }
}

// Marks this one as not to be used again where `error` is one: what is in its stream is not known any more.
Status DeviceTransfer::abandon(Status error) {
  if (!error.ok()) failed_ = true;
  return error;
}

// ---------------------------------------------------------------- to the device

Result<std::span<std::byte>> DeviceTransfer::next_half() {
  if (std::exchange(used_[next_], false)) PARAMWIRE_CHECK(abandon(copied_[next_].synchronize()));
  return halves_[next_].span();
}

Status DeviceTransfer::send(std::span<const Part> parts) {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  copying_ = true;
  PARAMWIRE_CHECK(abandon(enqueue(parts)));
  used_[next_] = true;
  next_ = 1 - next_;
  return {};
}

Status DeviceTransfer::enqueue(std::span<const Part> parts) {
  std::uint32_t used = 0;
  for (const Part& part : parts) {
    if (part.offset > half_bytes_ || part.bytes > half_bytes_ - part.offset) {
      return Error(Code::kInternal, cat("a part of ", part.bytes, " bytes at ", part.offset, " of a half of ", half_bytes_));
    }
    PARAMWIRE_CHECK(stream_.to_device(part.target, halves_[next_].span().subspan(static_cast<std::size_t>(part.offset), static_cast<std::size_t>(part.bytes))));
  }
  for (const Part& part : parts) PARAMWIRE_CHECK(enqueue_checks(part, used));
  return stream_.record(copied_[next_]);
}

// One launch for each run of extents that lie one behind the other: those of one block.
Status DeviceTransfer::enqueue_checks(const Part& part, std::uint32_t& used) {
  for (std::size_t begin = 0; begin < part.checks.size();) {
    std::size_t end = begin;
    std::uint64_t at = part.checks[begin].offset;
    bool whole = true;
    while (end < part.checks.size() && whole && part.checks[end].offset == at) {
      const ExtentCheck& check = part.checks[end++];
      whole = check.size == kExtentBytes;
      at += check.size;
      if (check.size == 0 || check.size > kExtentBytes || at > part.bytes) {
        return Error(Code::kInvalid, cat("a check of ", check.size, " bytes at ", check.offset, " of ", part.bytes, ", expected extents of ", kExtentBytes, " within them"));
      }
    }
    const auto count = static_cast<std::uint32_t>(end - begin);
    if (count > extents_max_ - used) return Error(Code::kInvalid, cat(used + count, " checks of a half of ", half_bytes_, " bytes, expected at most ", extents_max_));
    const std::uint64_t place = std::uint64_t{4} * (next_ * extents_max_ + used);
    const auto expected = expected_host_.span().subspan(static_cast<std::size_t>(place), std::size_t{4} * count);
    for (std::uint32_t i = 0; i < count; ++i) std::memcpy(expected.data() + std::size_t{4} * i, &part.checks[begin + i].crc32c, 4);
    if (extents_ == 0) PARAMWIRE_CHECK(stream_.fill(verdict_.address(), std::byte{0xff}, verdict_.size()));
    PARAMWIRE_CHECK(stream_.to_device(expected_.address() + place, expected));
    const std::uint64_t first = part.checks[begin].offset;
    const Crc32cArgs args{.data = reinterpret_cast<const void*>(part.target + first),  // NOLINT: a device address
                          .size = at - first,
                          .expected = expected_.at<const std::uint32_t>(place),
                          .verdict = verdict_.at<Verdict>(),
                          .extent_bytes = static_cast<std::uint32_t>(kExtentBytes),
                          .first = extents_};
    PARAMWIRE_CHECK(module_->launch(stream_, Kernel::k_crc32c_extents, crc32c_extents_launch(args), args));
    used += count;
    extents_ += count;
    begin = end;
  }
  return {};
}

Result<std::optional<DeviceTransfer::Bad>> DeviceTransfer::finish() {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  const std::uint32_t extents = std::exchange(extents_, 0);
  used_ = {};
  if (!copying_) return std::optional<Bad>();  // a caller's work may be in the stream still, which nobody waits for here
  // Where something failed the wait comes all the same: what was enqueued before it reads the halves.
  Status status = extents > 0 ? stream_.to_host(verdict_host_.span(), verdict_.address()) : Status();
  Status waited = stream_.synchronize();
  if (status.ok()) status = std::move(waited);
  PARAMWIRE_CHECK(abandon(std::move(status)));
  copying_ = false;
  if (extents == 0) return std::optional<Bad>();
  Verdict verdict{};
  std::memcpy(&verdict, verdict_host_.data(), sizeof verdict);
  if (bad_count(verdict) == 0) return std::optional<Bad>();
  return std::optional<Bad>({bad_count(verdict), verdict.lowest});
}

// ---------------------------------------------------------------- to the host

Status DeviceTransfer::enqueue_read(std::size_t half, CUdeviceptr source, std::uint64_t bytes) {
  PARAMWIRE_CHECK(stream_.to_host(halves_[half].span().first(static_cast<std::size_t>(bytes)), source));
  return stream_.record(copied_[half]);
}

Status DeviceTransfer::read(CUdeviceptr source, std::span<std::byte> target) {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  const auto half_bytes = static_cast<std::size_t>(half_bytes_);
  copying_ = true;
  Status status;
  std::size_t asked = 0, taken = 0;
  // Two copies are under way, or one and the host's of the one before it.
  for (std::size_t ask = 0, take = 0; taken < target.size() && status.ok();) {
    if (asked < target.size() && ask < take + 2) {
      const std::size_t bytes = std::min(half_bytes, target.size() - asked);
      status = enqueue_read(ask++ % 2, source + asked, bytes);
      asked += bytes;
      continue;
    }
    const std::size_t half = take++ % 2, bytes = std::min(half_bytes, target.size() - taken);
    status = copied_[half].synchronize();
    if (!status.ok()) break;
    std::memcpy(target.data() + taken, halves_[half].data(), bytes);
    taken += bytes;
  }
  if (!status.ok()) static_cast<void>(stream_.synchronize());
  copying_ = !status.ok();
  return abandon(std::move(status));
}

}  // namespace paramwire::cuda
