#include "paramwire/interop/cuda_arrays.hpp"

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/interop/device_pieces.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

namespace {

using cuda::DeviceTransfer;
using Pieces = std::vector<DevicePiece>;

// Of one device at the same time, each with two halves: 64 MiB of page-locked memory at most.
constexpr std::size_t kTransfersMax = 4;

Micros deadline_after(const CallOptions& options) {
  const Micros now = steady_clock().now(), span = options.timeout.value_or(ClientOptions().timeout);
  return span < kNever - now ? now + span : kNever;
}

class CudaArrays;

class CudaWork final : public DeviceWork {
 public:
  CudaWork(std::shared_ptr<CudaArrays> owner, std::unique_ptr<DeviceTransfer> transfer) : owner_(std::move(owner)), transfer_(std::move(transfer)) {}
  ~CudaWork() override;
  std::uint64_t stream() const noexcept override { return reinterpret_cast<std::uintptr_t>(transfer_->stream()); }
  Status after(std::uint64_t stream) override;
  Status check(const DeviceRange& range, std::string_view what) const override { return cuda::check_device_range(transfer_->device(), range.address, range.bytes, what); }
  Status fetch(Snapshot& snapshot, std::span<const DeviceFetch> wanted, CallOptions options) override;
  Status read(const DeviceRange& source, std::span<std::byte> target, CallOptions options) override;

 private:
  // Where the extents of a piece are among those that were sent to be checked.
  struct Checked {
    std::uint32_t first = 0;
    std::size_t wanted = 0;
    std::vector<std::uint64_t> offsets;  // of the extents in the target
  };
  Status fetch_group(Snapshot& snapshot, std::span<const DeviceFetch> wanted, const Pieces& group, Micros until);
  Status fetch_large(Snapshot& snapshot, const DeviceFetch& want, const DevicePiece& piece, Micros until);
  Status ready(Micros until);
  Status verdict(std::span<const DeviceFetch> wanted, const DeviceTransfer::Bad& bad) const;

  const std::shared_ptr<CudaArrays> owner_;
  std::unique_ptr<DeviceTransfer> transfer_;
  bool ready_ = false;
  std::vector<Checked> checked_;
};

class CudaArrays final : public DeviceArrays, public std::enable_shared_from_this<CudaArrays> {
 public:
  CudaArrays(std::shared_ptr<const cuda::Driver> driver, std::uint64_t half_bytes) : driver_(std::move(driver)), half_bytes_(half_bytes) {}

  Result<std::unique_ptr<DeviceWork>> begin(int ordinal, CallOptions options) override {
    PARAMWIRE_CHECK(fork_.check("device arrays"));  // before the mutex, which another thread may have held at the fork
    const Micros until = deadline_after(options);
    std::unique_lock lock(mutex_);
    auto found = devices_.find(ordinal);
    if (found == devices_.end()) {
      PARAMWIRE_TRY(device, cuda::Device::open(driver_, ordinal));
      PARAMWIRE_TRY(module, cuda::Module::load(device));
      found = devices_.emplace(ordinal, Used{std::move(device), std::move(module)}).first;
    }
    Used& used = found->second;  // stays: devices are never taken out
    for (;;) {
      PARAMWIRE_TRY(transfer, take(used));
      if (transfer) return std::unique_ptr<DeviceWork>(std::make_unique<CudaWork>(shared_from_this(), std::move(transfer)));
      const Micros now = steady_clock().now();
      lock.unlock();  // who is asked may take locks of its own, the interpreter's for one
      const bool over = now >= until || wait_interrupted();
      lock.lock();
      if (over) {
        return Error(Code::kTimeout, cat(used.device->label(), ": ", kTransfersMax, " calls move arrays already, the limit, or wait for work that was enqueued before them: try again when one is over"));
      }
      given_back_.wait_until(lock, time_point(std::min(until, now + kInterruptLook)));
    }
  }

  Result<int> device_of(std::uint64_t address, std::string_view what) override {
    PARAMWIRE_CHECK(fork_.check("device arrays"));
    PARAMWIRE_TRY(devices, cuda::Device::count(*driver_));
    if (devices == 0) return Error(Code::kUnavailable, "cuda: the driver shows no device; look at CUDA_VISIBLE_DEVICES, and start a container with --gpus all");
    return cuda::device_of(*driver_, address, what);
  }

  void give_back(std::unique_ptr<DeviceTransfer> transfer) {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    Used& used = devices_.at(transfer->device().facts().ordinal);
    if (transfer->failed()) {
      transfer.reset();
      --used.made;
    } else {
      used.idle.push_back(std::move(transfer));
    }
    given_back_.notify_one();
  }

 private:
  struct Used {
    cuda::DevicePtr device;
    std::shared_ptr<const cuda::Module> module;
    std::vector<std::unique_ptr<DeviceTransfer>> idle{};  // some of which may wait for a caller's work still, or be drawn into a capture
    std::size_t made = 0;
  };

  // nullptr: as many as there may be are at work.
  Result<std::unique_ptr<DeviceTransfer>> take(Used& used) const {
    for (auto idle = used.idle.begin(); idle != used.idle.end(); ++idle) {
      if (!(*idle)->reusable()) continue;
      std::unique_ptr<DeviceTransfer> out = std::move(*idle);
      used.idle.erase(idle);
      return out;
    }
    if (used.made == kTransfersMax) return std::unique_ptr<DeviceTransfer>();
    PARAMWIRE_TRY(made, DeviceTransfer::open(used.device, used.module, half_bytes_));
    ++used.made;
    return made;
  }

  const std::shared_ptr<const cuda::Driver> driver_;
  const std::uint64_t half_bytes_;
  const ForkGuard fork_;
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::map<int, Used> devices_;
};

// ---------------------------------------------------------------- a call

CudaWork::~CudaWork() { owner_->give_back(std::move(transfer_)); }

Status CudaWork::after(std::uint64_t stream) {
  if (stream == 0) {
    return Error(Code::kInvalid, "stream is 0, which may mean the legacy default stream (1) or the per-thread one (2): give 1, 2, or a stream's handle");
  }
  return transfer_->after(reinterpret_cast<CUstream>(stream));  // NOLINT: a handle
}

Status CudaWork::ready(Micros until) {
  if (ready_) return {};
  PARAMWIRE_CHECK(transfer_->ready(until));
  ready_ = true;
  return {};
}

// What is left for one of the call's steps.
CallOptions until_option(Micros until) { return {.timeout = until == kNever ? kNever : until - steady_clock().now()}; }

// The network brings the next group while the device copies this one.
Status CudaWork::fetch(Snapshot& snapshot, std::span<const DeviceFetch> wanted, CallOptions options) {
  if (!options.timeout) options.timeout = snapshot.client_options().timeout;
  const Micros until = deadline_after(options);
  for (const DeviceFetch& want : wanted) PARAMWIRE_CHECK(check(want.target, cat("the target of tensor \"", want.tensor, '"')));
  PARAMWIRE_TRY(groups, plan_device_pieces(snapshot, wanted, transfer_->half_bytes()));
  checked_.clear();
  ready_ = false;
  Status status;
  for (const Pieces& group : groups) {
    const DevicePiece& first = group.front();
    status = first.bytes > transfer_->half_bytes() ? fetch_large(snapshot, wanted[first.wanted], first, until) : fetch_group(snapshot, wanted, group, until);
    if (!status.ok()) break;
  }
  // Waits for what was sent, in every case: the target is the caller's again.
  auto bad = transfer_->finish();
  PARAMWIRE_CHECK(status);
  if (!bad.ok()) return std::move(bad).error();
  return *bad ? verdict(wanted, **bad) : Status();
}

Status CudaWork::fetch_group(Snapshot& snapshot, std::span<const DeviceFetch> wanted, const Pieces& group, Micros until) {
  PARAMWIRE_TRY(half, transfer_->next_half());
  const bool verify = snapshot.client_options().verify;
  std::vector<std::vector<ExtentCheck>> checks(group.size());
  std::vector<FetchRequest> requests(group.size());
  for (std::size_t i = 0; i < group.size(); ++i) {
    requests[i].tensor = wanted[group[i].wanted].tensor;
    requests[i].part = group[i].part;
    requests[i].target = half.subspan(static_cast<std::size_t>(group[i].half_offset), static_cast<std::size_t>(group[i].bytes));
    if (verify) requests[i].checks = &checks[i];
  }
  PARAMWIRE_CHECK(snapshot.fetch(requests, until_option(until)));
  PARAMWIRE_CHECK(ready(until));
  std::vector<DeviceTransfer::Part> parts;
  std::uint32_t number = transfer_->extents();
  for (std::size_t i = 0; i < group.size(); ++i) {
    const DevicePiece& piece = group[i];
    parts.push_back({piece.half_offset, piece.bytes, wanted[piece.wanted].target.address + piece.target_offset, checks[i]});
    if (checks[i].empty()) continue;
    Checked& checked = checked_.emplace_back(Checked{number, piece.wanted, {}});
    for (const ExtentCheck& check : checks[i]) checked.offsets.push_back(piece.target_offset + check.offset);
    number += static_cast<std::uint32_t>(checks[i].size());
  }
  return transfer_->send(parts);
}

// A row that is larger than a half: verified here, in plain memory, then copied half by half.
Status CudaWork::fetch_large(Snapshot& snapshot, const DeviceFetch& want, const DevicePiece& piece, Micros until) {
  PARAMWIRE_TRY(buffer, Buffer::allocate(static_cast<std::size_t>(piece.bytes)));
  FetchRequest request;
  request.tensor = want.tensor;
  request.part = piece.part;
  request.target = {buffer.data(), static_cast<std::size_t>(piece.bytes)};
  PARAMWIRE_CHECK(snapshot.fetch({&request, 1}, until_option(until)));
  PARAMWIRE_CHECK(ready(until));
  for (std::uint64_t at = 0; at < piece.bytes;) {
    PARAMWIRE_TRY(half, transfer_->next_half());
    const std::uint64_t bytes = std::min<std::uint64_t>(half.size(), piece.bytes - at);
    std::memcpy(half.data(), buffer.data() + at, static_cast<std::size_t>(bytes));
    const DeviceTransfer::Part part{0, bytes, want.target.address + piece.target_offset + at, {}};
    PARAMWIRE_CHECK(transfer_->send({&part, 1}));
    at += bytes;
  }
  return {};
}

Status CudaWork::verdict(std::span<const DeviceFetch> wanted, const DeviceTransfer::Bad& bad) const {
  const auto behind = std::upper_bound(checked_.begin(), checked_.end(), bad.lowest, [](std::uint32_t lowest, const Checked& each) { return lowest < each.first; });
  const Checked& first = *(behind - 1);
  return Error(Code::kCorrupt, cat(transfer_->device().label(), ": ", bad.count, " of ", checked_.back().first + checked_.back().offsets.size(),
                                   " extents that landed in its memory are not what the server sealed; the first is at byte ", first.offsets[bad.lowest - first.first], " of ",
                                   wanted[first.wanted].part, " of tensor \"", wanted[first.wanted].tensor, "\". Fetch it again, from another replica if there is one"));
}

Status CudaWork::read(const DeviceRange& source, std::span<std::byte> target, CallOptions options) {
  if (source.bytes != target.size()) return Error(Code::kInvalid, cat("a target of ", target.size(), " bytes for ", source.bytes, " bytes of ", transfer_->device().label()));
  if (target.empty()) return {};
  PARAMWIRE_CHECK(check(source, "array"));
  ready_ = false;
  PARAMWIRE_CHECK(ready(deadline_after(options)));
  return transfer_->read(source.address, target);
}

}  // namespace

std::shared_ptr<DeviceArrays> open_cuda_arrays(std::shared_ptr<const cuda::Driver> driver, std::uint64_t half_bytes) {
  return std::make_shared<CudaArrays>(std::move(driver), half_bytes);
}

}  // namespace paramwire
