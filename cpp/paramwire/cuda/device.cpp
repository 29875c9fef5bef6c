#include "paramwire/cuda/device.hpp"

#include "paramwire/base/text.hpp"

namespace paramwire::cuda {

namespace {

// Kernels are compiled for 8.0 (Ampere) and later.
constexpr int kCapabilityMin = 8;

}  // namespace

// ---------------------------------------------------------------- the device

Status check_version(const Driver& driver) {
  int version = 0;
  if (const CUresult result = driver.cuDriverGetVersion(&version); result != CUDA_SUCCESS) return driver_error(driver, result, "cuda: asking for the driver's version");
  if (version >= kDriverVersionMin) return {};
  return Error(Code::kUnavailable, cat("cuda: this driver supports CUDA ", version / 1000, ".", version % 1000 / 10, "; ", kDriverVersionMin / 1000, ".",
                                       kDriverVersionMin % 1000 / 10, " is needed: install NVIDIA driver 580 or newer"));
}

Result<int> Device::count(const Driver& driver) {
  PARAMWIRE_CHECK(check_version(driver));
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) return driver_error(driver, result, "cuda: initialising the driver");
  int devices = 0;
  if (const CUresult result = driver.cuDeviceGetCount(&devices); result != CUDA_SUCCESS) return driver_error(driver, result, "cuda: counting devices");
  return devices;
}

Result<DevicePtr> Device::open(std::shared_ptr<const Driver> driver, int ordinal) {
  PARAMWIRE_TRY(devices, count(*driver));
  if (devices == 0) {
    return Error(Code::kUnavailable, "cuda: the driver shows no device; look at CUDA_VISIBLE_DEVICES, and start a container with --gpus all");
  }
  if (ordinal < 0 || ordinal >= devices) {
    return Error(Code::kInvalid, cat("cuda:", ordinal, ": no such device; there are cuda:0", devices > 1 ? cat(" to cuda:", devices - 1) : std::string()));
  }
  CUdevice device = 0;
  if (const CUresult result = driver->cuDeviceGet(&device, ordinal); result != CUDA_SUCCESS) return driver_error(*driver, result, cat("cuda:", ordinal, ": opening"));
  std::shared_ptr<Device> out(new Device(std::move(driver), device));
  PARAMWIRE_CHECK(out->look(ordinal));
  return DevicePtr(std::move(out));
}

Status Device::look(int ordinal) {
  facts_.ordinal = ordinal;
  char name[256] = {};
  PARAMWIRE_CHECK(check(driver_->cuDeviceGetName(name, static_cast<int>(sizeof name) - 1, device_), "asking for the name"));
  facts_.name = name;
  const std::pair<CUdevice_attribute, int*> attributes[] = {{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &facts_.major},
                                                            {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &facts_.minor},
                                                            {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &facts_.multiprocessors}};
  for (const auto& [attribute, value] : attributes) {
    PARAMWIRE_CHECK(check(driver_->cuDeviceGetAttribute(value, attribute, device_), "asking for attributes"));
  }
  std::size_t memory = 0;
  PARAMWIRE_CHECK(check(driver_->cuDeviceTotalMem(&memory, device_), "asking for the memory's size"));
  facts_.memory_bytes = memory;
  PARAMWIRE_CHECK(check(driver_->cuDriverGetVersion(&facts_.driver_version), "asking for the driver's version"));
  if (facts_.major < kCapabilityMin) {
    return Error(Code::kUnavailable, cat(label(), " (", facts_.name, ") has compute capability ", facts_.major, ".", facts_.minor, "; the kernels need ", kCapabilityMin,
                                         ".0 or later: compute with backend \"cpu\""));
  }
  return check(driver_->cuDevicePrimaryCtxRetain(&context_, device_), "making its context");
}

Device::~Device() {
  if (context_ != nullptr && !in_child()) driver_->cuDevicePrimaryCtxRelease(device_);
}

std::string Device::label() const { return cat("cuda:", facts_.ordinal); }

Error Device::error(CUresult result, std::string_view doing) const { return driver_error(*driver_, result, cat(label(), ": ", doing)); }

std::uint64_t Device::free_bytes() const {
  const Current current(*this);
  std::size_t free = 0, total = 0;
  if (!current.status().ok() || driver_->cuMemGetInfo(&free, &total) != CUDA_SUCCESS) return 0;
  return free;
}

Current::Current(const Device& device) : device_(device), status_(device.check_process()) {
  if (!status_.ok()) return;
  status_ = device.check(device.driver().cuCtxPushCurrent(device.context_), "making its context current");
  if (!status_.ok()) return;
  pushed_ = true;
  // Swaps: mode_ is what it was.
  status_ = device.check(device.driver().cuThreadExchangeStreamCaptureMode(&mode_), "relaxing this thread's capture mode");
}

Current::~Current() {
  if (!pushed_) return;
  device_.driver().cuThreadExchangeStreamCaptureMode(&mode_);
  CUcontext popped = nullptr;
  device_.driver().cuCtxPopCurrent(&popped);
}

// ---------------------------------------------------------------- memory

Result<DeviceMemory> DeviceMemory::allocate(DevicePtr device, std::uint64_t size, std::string_view what) {
  DeviceMemory out;
  if (size == 0) return out;  // the driver refuses it; nothing is ever read there
  const Current current(*device);
  PARAMWIRE_CHECK(current.status());
  const CUresult result = device->driver().cuMemAlloc(&out.address_, static_cast<std::size_t>(size));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    return Error(Code::kBackpressure, cat(device->label(), ": ", human_bytes(size), " for ", what, " are not free; ", human_bytes(device->free_bytes()), " of ",
                                          human_bytes(device->facts().memory_bytes), " are. Give a smaller budget or fewer context tokens"));
  }
  if (result != CUDA_SUCCESS) return device->error(result, cat("allocating ", human_bytes(size), " for ", what));
  out.device_ = std::move(device);
  out.size_ = size;
  return out;
}

void DeviceMemory::reset() noexcept {
  if (address_ == 0) return;
  const Current current(*device_);
  if (current.status().ok()) device_->driver().cuMemFree(address_);
  address_ = 0;
}

Result<HostMemory> HostMemory::allocate(DevicePtr device, std::uint64_t size) {
  HostMemory out;
  out.size_ = size;
  if (size == 0) return out;
  void* data = nullptr;
  {
    const Current current(*device);
    PARAMWIRE_CHECK(current.status());
    // Portable: for every context. Its failure says nothing about the device.
    if (device->driver().cuMemHostAlloc(&data, static_cast<std::size_t>(size), CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS) out.pinned_ = true;
  }
  if (!out.pinned_) {
    PARAMWIRE_TRY(plain, Buffer::allocate(static_cast<std::size_t>(size)));
    out.plain_ = std::move(plain);
    data = out.plain_.data();
  }
  out.device_ = std::move(device);
  out.data_ = static_cast<std::byte*>(data);
  return out;
}

void HostMemory::reset() noexcept {
  if (!pinned_) return;
  const Current current(*device_);
  if (current.status().ok()) device_->driver().cuMemFreeHost(data_);
  pinned_ = false;
}

// ---------------------------------------------------------------- events and graphs

Result<Event> Event::create(DevicePtr device, bool timing) {
  const Current current(*device);
  PARAMWIRE_CHECK(current.status());
  Event out;
  PARAMWIRE_CHECK(device->check(device->driver().cuEventCreate(&out.event_, timing ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING), "making an event"));
  out.device_ = std::move(device);
  return out;
}

void Event::reset() noexcept {
  if (event_ == nullptr) return;
  const Current current(*device_);
  if (current.status().ok()) device_->driver().cuEventDestroy(event_);
  event_ = nullptr;
}

Status Event::synchronize() const {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  return device_->check(device_->driver().cuEventSynchronize(event_), "waiting for its work");
}

Result<bool> Event::done() const {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  const CUresult result = device_->driver().cuEventQuery(event_);
  if (result == CUDA_ERROR_NOT_READY) return false;
  PARAMWIRE_CHECK(device_->check(result, "asking for its work"));
  return true;
}

void GraphExec::reset() noexcept {
  if (exec_ == nullptr) return;
  const Current current(*device_);
  if (current.status().ok()) device_->driver().cuGraphExecDestroy(exec_);
  exec_ = nullptr;
}

// ---------------------------------------------------------------- streams

Result<Stream> Stream::create(DevicePtr device) {
  const Current current(*device);
  PARAMWIRE_CHECK(current.status());
  Stream out;
  PARAMWIRE_CHECK(device->check(device->driver().cuStreamCreate(&out.stream_, CU_STREAM_NON_BLOCKING), "making a stream"));
  out.device_ = std::move(device);
  return out;
}

void Stream::reset() noexcept {
  if (stream_ == nullptr) return;
  const Current current(*device_);
  if (current.status().ok()) device_->driver().cuStreamDestroy(stream_);
  stream_ = nullptr;
}

Status Stream::synchronize() const {
  const Current current(*device_);
  PARAMWIRE_CHECK(current.status());
  return device_->check(device_->driver().cuStreamSynchronize(stream_), "waiting for its stream");
}

Status Stream::wait(const Event& event) const {
  return device_->check(device_->driver().cuStreamWaitEvent(stream_, event.handle(), CU_EVENT_WAIT_DEFAULT), "waiting for an event");
}

Status Stream::record(const Event& event) const { return device_->check(device_->driver().cuEventRecord(event.handle(), stream_), "recording an event"); }

Status Stream::to_device(CUdeviceptr target, std::span<const std::byte> source) const {
  if (source.empty()) return {};
  return device_->check(device_->driver().cuMemcpyHtoDAsync(target, source.data(), source.size(), stream_), "copying to it");
}

Status Stream::to_host(std::span<std::byte> target, CUdeviceptr source) const {
  if (target.empty()) return {};
  return device_->check(device_->driver().cuMemcpyDtoHAsync(target.data(), source, target.size(), stream_), "copying from it");
}

Status Stream::copy(CUdeviceptr target, CUdeviceptr source, std::uint64_t size) const {
  if (size == 0) return {};
  return device_->check(device_->driver().cuMemcpyDtoDAsync(target, source, static_cast<std::size_t>(size), stream_), "copying on it");
}

Status Stream::fill(CUdeviceptr target, std::byte value, std::uint64_t size) const {
  if (size == 0) return {};
  return device_->check(device_->driver().cuMemsetD8Async(target, std::to_integer<unsigned char>(value), static_cast<std::size_t>(size), stream_),
                        "filling its memory");
}

Status Stream::launch(const GraphExec& graph) const {
  return device_->check(device_->driver().cuGraphLaunch(graph.handle(), stream_), "launching a graph");
}

Status Stream::upload(const GraphExec& graph) const {
  return device_->check(device_->driver().cuGraphUpload(graph.handle(), stream_), "uploading a graph");
}

Status Stream::begin_capture() const {
  // Thread-local: what other threads do (prefetch threads, the user's own) neither ends this capture nor is refused because of it.
  return device_->check(device_->driver().cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "beginning to capture");
}

Result<GraphExec> Stream::end_capture(Status enqueued) const {
  const Driver& driver = device_->driver();
  CUgraph graph = nullptr;
  const CUresult ended = driver.cuStreamEndCapture(stream_, &graph);
  Status status = !enqueued.ok() ? std::move(enqueued) : device_->check(ended, "ending a capture");
  CUgraphExec exec = nullptr;
  if (status.ok()) status = device_->check(driver.cuGraphInstantiate(&exec, graph, 0), "instantiating a graph");
  if (graph != nullptr) driver.cuGraphDestroy(graph);
  if (!status.ok()) return std::move(status).error();
  return GraphExec(device_, exec);
}

}  // namespace paramwire::cuda
