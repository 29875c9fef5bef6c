// Copies between the host and device memory of somebody else, on a device that works as late as the rules allow: order behind the caller's work, halves
// that are used again, checks of what landed, and everything that a caller may hand over wrongly.
#include "support/rig.hpp"
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_kernels.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/cuda/device_transfer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire::cuda {
namespace {

using namespace paramwire::testing;

constexpr std::uint64_t kHalf = 256U << 10;
const SimOrder kOrders[] = {SimOrder::kLate, SimOrder::kEager, SimOrder::kRandom, SimOrder::kGreedy};

SimCudaOptions options_of(SimOrder order) {
  SimCudaOptions options;
  options.order = order;
  options.kernels = sim_host_kernels();
  return options;
}

// A device with a framework's stream and memory on it.
struct World {
  explicit World(SimCudaOptions options = options_of(SimOrder::kLate)) : sim(std::move(options)), driver(sim.driver()) {
    device = must(Device::open(driver, 0));
    module = must(Module::load(device));
    theirs = must(Stream::create(device));
  }
  std::unique_ptr<DeviceTransfer> open() const { return must(DeviceTransfer::open(device, module, kHalf)); }
  DeviceMemory memory(std::uint64_t bytes) const { return must(DeviceMemory::allocate(device, bytes, "a tensor")); }
  // Sends `bytes` in one part.
  Status send(DeviceTransfer& transfer, CUdeviceptr target, std::span<const std::byte> bytes, std::span<const ExtentCheck> checks = {}) const {
    PARAMWIRE_TRY(half, transfer.next_half());
    std::copy(bytes.begin(), bytes.end(), half.begin());
    const DeviceTransfer::Part part{0, bytes.size(), target, checks};
    return transfer.send({&part, 1});
  }
  // Something of the caller's in a stream of its own.
  void enqueue(std::function<void()> body, CUdeviceptr touched) {
    const Current current(*device);
    EXPECT_EQ(sim.enqueue(theirs.handle(), "theirs", {{touched, 1}}, std::move(body)), CUDA_SUCCESS);
  }

  SimCuda sim;
  std::shared_ptr<const Driver> driver;
  DevicePtr device;
  std::shared_ptr<const Module> module;
  Stream theirs;
};

std::vector<ExtentCheck> checks_of(std::span<const std::byte> bytes) {
  std::vector<ExtentCheck> out;
  for (std::size_t at = 0; at < bytes.size(); at += kExtentBytes) {
    const std::size_t size = std::min<std::size_t>(kExtentBytes, bytes.size() - at);
    out.push_back({at, static_cast<std::uint32_t>(size), crc32c(bytes.subspan(at, size))});
  }
  return out;
}

void expect_invalid(const Status& status, std::string_view text) {
  ASSERT_FALSE(status.ok()) << text;
  EXPECT_EQ(status.error().code(), Code::kInvalid) << status.error().to_string();
  EXPECT_NE(status.error().message().find(text), std::string::npos) << status.error().message();
}

TEST(DeviceTransfer, HalvesAreUsedAgainOnlyWhenTheDeviceIsDoneWithThem) {
  for (const SimOrder order : kOrders) {
    World world(options_of(order));
    const auto transfer = world.open();
    for (const std::size_t size : {std::size_t{1}, std::size_t{100'003}, std::size_t{kHalf}}) {
      const DeviceMemory memory = world.memory(7 * size + 3);
      const Bytes bytes = random_bytes(7 * size, size);
      must(transfer->ready(kNever));
      for (std::size_t i = 0; i < 7; ++i) {
        const auto piece = std::span<const std::byte>(bytes).subspan(i * size, size);
        must(world.send(*transfer, memory.address() + 3 + i * size, piece, checks_of(piece)));
      }
      EXPECT_FALSE(must(transfer->finish()).has_value());
      EXPECT_EQ(world.sim.peek(memory.address() + 3, bytes.size()), bytes);
      EXPECT_TRUE(transfer->reusable());
    }
  }
}

TEST(DeviceTransfer, WhatIsReadIsWhatTheCallersStreamLeavesThere) {
  for (const SimOrder order : kOrders) {
    World world(options_of(order));
    const auto transfer = world.open();
    for (const std::uint64_t size : {std::uint64_t{1}, kHalf - 1, kHalf, 5 * kHalf + 77}) {
      const DeviceMemory memory = world.memory(size + 5);
      {
        const Current current(*world.device);
        must(world.theirs.fill(memory.address(), std::byte{1}, 5));
        must(world.theirs.fill(memory.address() + 5, std::byte{0x5a}, size));
      }
      must(transfer->after(world.theirs.handle()));
      must(transfer->ready(kNever));
      Bytes got(static_cast<std::size_t>(size));
      must(transfer->read(memory.address() + 5, got));
      EXPECT_EQ(got, Bytes(got.size(), std::byte{0x5a}));
    }
  }
}

TEST(DeviceTransfer, CopiesComeAfterTheCallersWork) {
  World world;
  const auto transfer = world.open();
  const DeviceMemory memory = world.memory(64);
  {
    const Current current(*world.device);
    must(world.theirs.fill(memory.address(), std::byte{9}, 64));  // runs only when somebody waits for it
  }
  must(transfer->after(world.theirs.handle()));
  must(transfer->ready(kNever));
  const Bytes bytes = random_bytes(64, 1);
  must(world.send(*transfer, memory.address(), bytes));
  EXPECT_FALSE(must(transfer->finish()).has_value());
  world.sim.run_all();
  EXPECT_EQ(world.sim.peek(memory.address(), 64), bytes);
}

TEST(DeviceTransfer, TheDefaultStreamsAreStreamsToo) {
  SimCudaOptions options = options_of(SimOrder::kLate);
  options.default_stream = true;
  World world(std::move(options));
  const auto transfer = world.open();
  const DeviceMemory memory = world.memory(64);
  for (const CUstream stream : {CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
    const Current current(*world.device);
    ASSERT_EQ(world.driver->cuMemsetD8Async(memory.address(), 7, 64, stream), CUDA_SUCCESS);
    must(transfer->after(stream));
    must(transfer->ready(kNever));
    Bytes got(64);
    must(transfer->read(memory.address(), got));
    EXPECT_EQ(got, Bytes(64, std::byte{7}));
  }
}

TEST(DeviceTransfer, BytesThatLandedWrongAreFoundOnTheDevice) {
  for (const SimOrder order : kOrders) {
    World world(options_of(order));
    const auto transfer = world.open();
    const DeviceMemory memory = world.memory(3 * kHalf);
    const Bytes bytes = random_bytes(kHalf - 1000, 3);
    for (const std::size_t bad : {std::size_t{0}, std::size_t{kExtentBytes}, bytes.size() - 1}) {
      Bytes torn = bytes;
      torn[bad] ^= std::byte{4};
      must(transfer->ready(kNever));
      must(world.send(*transfer, memory.address(), bytes, checks_of(bytes)));
      must(world.send(*transfer, memory.address() + kHalf, torn, checks_of(bytes)));
      must(world.send(*transfer, memory.address() + 2 * kHalf, bytes, checks_of(bytes)));
      const auto found = must(transfer->finish());
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->count, 1U);
      EXPECT_EQ(found->lowest, 4 + bad / kExtentBytes);
      must(world.send(*transfer, memory.address(), bytes, checks_of(bytes)));
      EXPECT_FALSE(must(transfer->finish()).has_value()) << "the verdict begins anew";
    }
  }
}

TEST(DeviceTransfer, RunsOfExtentsMayBeginAnywhereInAPart) {
  World world;
  const auto transfer = world.open();
  const DeviceMemory memory = world.memory(kHalf);
  Bytes bytes = random_bytes(static_cast<std::size_t>(kHalf), 4);
  const auto of = [&](std::uint64_t at, std::uint32_t size) { return ExtentCheck{at, size, crc32c(std::span<const std::byte>(bytes).subspan(static_cast<std::size_t>(at), size))}; };
  const std::uint32_t extent = kExtentBytes;
  const std::vector<ExtentCheck> checks = {of(17, extent), of(17 + extent, 100), of(117 + extent, extent), of(117 + 2 * extent, 1), of(200'000, 777)};
  must(transfer->ready(kNever));
  must(world.send(*transfer, memory.address(), bytes, checks));
  EXPECT_FALSE(must(transfer->finish()).has_value());
  bytes[200'776] ^= std::byte{1};
  must(world.send(*transfer, memory.address(), bytes, checks));
  EXPECT_EQ(must(transfer->finish())->lowest, 4U);
  for (const ExtentCheck& wrong : {ExtentCheck{0, extent + 1, 0}, ExtentCheck{0, 0, 0}, ExtentCheck{kHalf - 1, 2, 0}}) {
    expect_invalid(world.send(*transfer, memory.address(), bytes, {&wrong, 1}), "expected extents of 65536 within them");
    static_cast<void>(transfer->finish());
  }
}

TEST(DeviceTransfer, AStreamThatIsBeingCapturedIsRefusedBeforeAnythingIsEnqueued) {
  World world;
  const auto transfer = world.open();
  const Current current(*world.device);
  const auto graph = must(world.theirs.capture([&]() -> Status {
    const std::uint64_t recorded = world.sim.calls("cuEventRecord");
    expect_invalid(transfer->after(world.theirs.handle()), "is being captured");
    EXPECT_EQ(world.sim.calls("cuEventRecord"), recorded);
    return {};
  }));
  EXPECT_TRUE(transfer->reusable());
  must(transfer->after(world.theirs.handle()));
}

TEST(DeviceTransfer, ACaptureOnAnotherStreamIsNotDisturbedByAnythingOfOurs) {
  for (const CUstreamCaptureMode mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    World world;
    const DeviceMemory memory = world.memory(2 * kHalf);
    const DeviceMemory captured = world.memory(64);
    const Current current(*world.device);
    CUstreamCaptureMode own = mode;
    ASSERT_EQ(world.driver->cuThreadExchangeStreamCaptureMode(&own), CUDA_SUCCESS);  // of a user's thread, which need not be relaxed
    ASSERT_EQ(world.driver->cuStreamBeginCapture(world.theirs.handle(), mode), CUDA_SUCCESS);
    const auto everything = [&] {
      const auto transfer = world.open();
      const Bytes bytes = random_bytes(static_cast<std::size_t>(kHalf), 5);
      must(check_device_range(*world.device, memory.address(), memory.size(), "out"));
      must(transfer->ready(kNever));
      must(world.send(*transfer, memory.address(), bytes, checks_of(bytes)));
      EXPECT_FALSE(must(transfer->finish()).has_value());
      Bytes got(bytes.size());
      must(transfer->read(memory.address(), got));
      EXPECT_EQ(got, bytes);
    };
    everything();  // in the thread that captures, and in another one
    std::thread(everything).join();
    must(world.theirs.fill(captured.address(), std::byte{1}, 64));
    CUgraph graph = nullptr;
    EXPECT_EQ(world.driver->cuStreamEndCapture(world.theirs.handle(), &graph), CUDA_SUCCESS);
    EXPECT_EQ(world.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    ASSERT_EQ(world.driver->cuThreadExchangeStreamCaptureMode(&own), CUDA_SUCCESS);
  }
}

// A library that is asked to order its work before that of our stream, while it captures its own: our stream is then part of the capture.
TEST(DeviceTransfer, AStreamThatAProducerDrewIntoItsCaptureIsRefusedAndNotUsedAgainBefore) {
  World world;
  const auto transfer = world.open();
  const DeviceMemory memory = world.memory(64);
  const Event event = must(Event::create(world.device));
  const Current current(*world.device);
  CUgraph graph = nullptr;
  ASSERT_EQ(world.driver->cuStreamBeginCapture(world.theirs.handle(), CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  must(world.theirs.fill(memory.address(), std::byte{1}, 64));
  must(world.theirs.record(event));
  ASSERT_EQ(world.driver->cuStreamWaitEvent(transfer->stream(), event.handle(), 0), CUDA_SUCCESS);
  expect_invalid(transfer->ready(kNever), "the stream that the array's library works on is being captured");
  EXPECT_FALSE(transfer->reusable());
  EXPECT_FALSE(transfer->failed());
  // Nothing was put into it, so that the capture is as good as without us.
  EXPECT_EQ(world.driver->cuStreamEndCapture(world.theirs.handle(), &graph), CUDA_SUCCESS);
  EXPECT_EQ(world.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
  EXPECT_TRUE(transfer->reusable());
}

TEST(DeviceTransfer, WorkThatDoesNotEndIsATimeoutAndNothingWasCopied) {
  SimCudaOptions options = options_of(SimOrder::kLate);
  options.polls_not_ready = 1'000'000;  // what was asked for is never done by asking
  World world(std::move(options));
  const auto transfer = world.open();
  const DeviceMemory memory = world.memory(64);
  world.enqueue([] {}, memory.address());
  must(transfer->after(world.theirs.handle()));
  const Status late = transfer->ready(steady_clock().now() + 2000);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Code::kTimeout) << late.error().to_string();
  EXPECT_FALSE(transfer->reusable());
  EXPECT_FALSE(must(transfer->finish()).has_value());
  const auto ran = world.sim.ran();
  EXPECT_EQ(std::count(ran.begin(), ran.end(), "theirs"), 0) << "and nobody waited for it";
  world.sim.run_all();
  EXPECT_TRUE(transfer->reusable());
}

TEST(DeviceTransfer, StreamsOfAnotherDeviceAreRefused) {
  SimCudaOptions options = options_of(SimOrder::kLate);
  options.devices = 2;
  World world(std::move(options));
  const auto transfer = world.open();
  const DevicePtr other = must(Device::open(world.driver, 1));
  const Stream stream = must(Stream::create(other));
  expect_invalid(transfer->after(stream.handle()), "give one that was made on the array's device");
  EXPECT_EQ(world.sim.take_failures().size(), 1U);
  EXPECT_TRUE(transfer->reusable());
}

TEST(DeviceTransfer, MemoryOfAnybodyElseIsNamed) {
  SimCudaOptions options = options_of(SimOrder::kLate);
  options.devices = 2;
  World world(std::move(options));
  const DevicePtr other = must(Device::open(world.driver, 1));
  const DeviceMemory near = world.memory(100), far = must(DeviceMemory::allocate(other, 100, "a tensor"));
  const HostMemory pinned = must(HostMemory::allocate(world.device, 100));
  ASSERT_TRUE(pinned.pinned());
  int plain = 0;
  must(check_device_range(*world.device, near.address(), 100, "out"));
  must(check_device_range(*world.device, near.address() + 99, 1, "out"));
  must(check_device_range(*world.device, 0, 0, "out"));
  expect_invalid(check_device_range(*world.device, far.address(), 100, "out"), "out: its memory is of cuda:1, and its array says cuda:0");
  expect_invalid(check_device_range(*world.device, near.address() + 40, 100, "out"), "of its 100 bytes");
  expect_invalid(check_device_range(*world.device, near.address() + 40, 100, "out"), "only 60 are memory of cuda:0");
  expect_invalid(check_device_range(*world.device, reinterpret_cast<CUdeviceptr>(pinned.data()), 100, "out"), "page-locked host memory");
  expect_invalid(check_device_range(*world.device, reinterpret_cast<CUdeviceptr>(&plain), 4, "out"), "no memory of a CUDA device");
  EXPECT_EQ(must(device_of(*world.driver, far.address(), "out")), 1);
  const auto none = device_of(*world.driver, reinterpret_cast<CUdeviceptr>(&plain), "out");
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Code::kInvalid);
}

// The simulation has neither: a driver that says so of parts of one allocation.
CUdeviceptr mapped = 0;
decltype(Driver::cuPointerGetAttributes) real_attributes = nullptr;
CUresult small_mappings(unsigned count, CUpointer_attribute* names, void** out, CUdeviceptr address) {
  const CUresult result = real_attributes(count, names, out, address);
  constexpr std::uint64_t kMapping = 64;
  for (unsigned i = 0; i < count; ++i) {
    if (names[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *static_cast<unsigned*>(out[i]) = 0;
    if (names[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED) *static_cast<unsigned*>(out[i]) = address < mapped + 3 * kMapping ? 1 : 0;
    if (names[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *static_cast<CUdeviceptr*>(out[i]) = mapped + (address - mapped) / kMapping * kMapping;
    if (names[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE) *static_cast<std::size_t*>(out[i]) = kMapping;
  }
  return result;
}

TEST(DeviceTransfer, ManagedMemoryAndTensorsOverManyMappingsAreTaken) {
  World world;
  const DeviceMemory memory = world.memory(256);
  mapped = memory.address();
  Driver changed = *world.driver;
  real_attributes = std::exchange(changed.cuPointerGetAttributes, &small_mappings);
  const DevicePtr device = must(Device::open(std::make_shared<const Driver>(changed), 0));
  must(check_device_range(*device, mapped, 192, "out"));
  must(check_device_range(*device, mapped + 63, 2, "out"));
  expect_invalid(check_device_range(*device, mapped + 10, 192, "out"), "only 182 are memory of cuda:0");
}

TEST(DeviceTransfer, WithoutPageLockedMemoryItIsRightAllTheSame) {
  for (const SimOrder order : kOrders) {
    SimCudaOptions options = options_of(order);
    options.pinned_bytes = 0;
    World world(std::move(options));
    const auto transfer = world.open();
    EXPECT_FALSE(transfer->pinned());
    const DeviceMemory memory = world.memory(3 * kHalf);
    const Bytes bytes = random_bytes(static_cast<std::size_t>(3 * kHalf), 6);
    must(transfer->ready(kNever));
    for (std::size_t i = 0; i < 3; ++i) {
      const auto piece = std::span<const std::byte>(bytes).subspan(i * kHalf, kHalf);
      must(world.send(*transfer, memory.address() + i * kHalf, piece, checks_of(piece)));
    }
    EXPECT_FALSE(must(transfer->finish()).has_value());
    Bytes got(bytes.size());
    must(transfer->read(memory.address(), got));
    EXPECT_EQ(got, bytes);
  }
}

TEST(DeviceTransfer, AnyCallThatFailsOnceIsATypedErrorAndLeavesNothingBehind) {
  const char* const functions[] = {"cuStreamCreate",       "cuEventCreate",   "cuMemAlloc",         "cuCtxPushCurrent",   "cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing",
                                   "cuEventRecord",        "cuEventQuery",    "cuStreamWaitEvent",  "cuMemcpyHtoDAsync",  "cuMemcpyDtoHAsync",                 "cuMemsetD8Async",
                                   "cuEventSynchronize",   "cuLaunchKernel",  "cuStreamSynchronize", "cuPointerGetAttributes"};
  const Bytes bytes = random_bytes(static_cast<std::size_t>(kHalf), 7);
  for (const char* function : functions) {
    std::uint32_t failed = 0;
    for (const std::uint32_t nth : {1U, 2U, 3U, 4U, 9U, 25U}) {
      World world;
      const DeviceMemory memory = world.memory(4 * kHalf);
      world.sim.fail_call(function, nth, CUDA_ERROR_OUT_OF_MEMORY);
      const auto work = [&]() -> Status {
        PARAMWIRE_TRY(transfer, DeviceTransfer::open(world.device, world.module, kHalf));
        PARAMWIRE_CHECK(check_device_range(*world.device, memory.address(), memory.size(), "out"));
        PARAMWIRE_CHECK(transfer->after(world.theirs.handle()));
        PARAMWIRE_CHECK(transfer->ready(kNever));
        for (std::uint64_t i = 0; i < 4; ++i) PARAMWIRE_CHECK(world.send(*transfer, memory.address() + i * kHalf, bytes, checks_of(bytes)));
        PARAMWIRE_TRY(bad, transfer->finish());
        EXPECT_FALSE(bad.has_value());
        Bytes got(4 * bytes.size());
        PARAMWIRE_CHECK(transfer->read(memory.address(), got));
        EXPECT_EQ(std::vector(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(bytes.size())), bytes);
        return {};
      };
      const Status status = work();
      if (status.ok()) continue;
      ++failed;
      EXPECT_EQ(status.error().code(), Code::kBackpressure) << function << ", call " << nth << ": " << status.error().to_string();
      EXPECT_NE(status.error().message().find("cuda:0"), std::string::npos) << status.error().to_string();
      must(work());  // the device is as good as before
    }
    EXPECT_GT(failed, 0U) << function << " is not called, or its failure goes unseen";
  }
}

TEST(DeviceTransfer, ALostDeviceIsUnavailable) {
  World world;
  const auto transfer = world.open();
  const DeviceMemory memory = world.memory(64);
  const Bytes bytes = random_bytes(64, 8);
  must(transfer->ready(kNever));
  must(world.send(*transfer, memory.address(), bytes));
  world.sim.lose_device();
  const auto lost = transfer->finish();
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnavailable) << lost.error().to_string();
  EXPECT_TRUE(transfer->failed());
}

TEST(DeviceTransfer, TheChildOfAForkIsRefused) {
  World world;
  const auto transfer = world.open();
  const pid_t child = ::fork();
  if (child == 0) {
    Bytes got(1);
    const bool refused = transfer->read(1, got).error().code() == Code::kInvalid && transfer->after(world.theirs.handle()).error().code() == Code::kInvalid &&
                         check_device_range(*world.device, 1, 1, "out").error().code() == Code::kInvalid && !transfer->reusable();
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace paramwire::cuda
