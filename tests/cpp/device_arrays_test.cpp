// Fetches into simulated device memory and publishes out of it, against a real server: what lands is what was published, whole, in parts and over many pieces;
// bytes that are wrong never pass; whatever fails is typed, and host work goes on.
#include "support/rig.hpp"
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_kernels.hpp"

#include "paramwire/interop/cuda_arrays.hpp"
#include "paramwire/interop/device_pieces.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kHalf = 256U << 10;

SimCudaOptions options_of(SimOrder order, int devices = 1) {
  SimCudaOptions options;
  options.order = order;
  options.devices = devices;
  options.kernels = sim_host_kernels();
  return options;
}

// A server, a client of it, and a device with memory that is not ours.
class World {
 public:
  explicit World(SimCudaOptions options = options_of(SimOrder::kLate), ClientOptions client_options = tcp())
      : sim(std::move(options)), arrays(open_cuda_arrays(sim.driver(), kHalf)), device(must(cuda::Device::open(sim.driver(), 0))),
        client(must(Client::connect(rig.unix_endpoint().to_string(), client_options))) {}

  static ClientOptions tcp() {
    ClientOptions out;
    out.transport = "tcp";
    return out;
  }
  // A matrix of bytes, in blocks that begin at these rows.
  Bytes put(const std::string& name, std::uint64_t rows, std::uint64_t width, std::vector<std::uint64_t> cuts = {0}, DType dtype = DType::kU8) {
    const Shape shape{rows, width};
    Bytes bytes = random_bytes(static_cast<std::size_t>(tensor_bytes(dtype, shape)), rows * width);
    const std::uint64_t row_bits = width * dtype_bits(dtype);
    auto publish = must(rig.server->publish());
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      const std::uint64_t begin = cuts[i], end = i + 1 < cuts.size() ? cuts[i + 1] : rows;
      const Shard shard = cuts.size() == 1 ? Shard::whole() : Shard::rows(begin, end);
      const auto from = static_cast<std::size_t>(begin * row_bits / 8), to = static_cast<std::size_t>((end * row_bits + 7) / 8);
      must(publish.put({name, dtype, shape, shard}, std::span(bytes).subspan(from, to - from)));
    }
    static_cast<void>(must(publish.finish()));
    return bytes;
  }
  std::shared_ptr<paramwire::Snapshot> snapshot() const { return must(client->snapshot({})); }
  cuda::DeviceMemory memory(std::uint64_t bytes) const { return must(cuda::DeviceMemory::allocate(device, bytes, "a tensor")); }
  std::unique_ptr<DeviceWork> begin() const { return must(arrays->begin(0, {})); }
  Bytes at(const cuda::DeviceMemory& memory, std::uint64_t offset, std::uint64_t bytes) const { return sim.peek(memory.address() + offset, bytes); }

  Rig rig;
  SimCuda sim;
  std::shared_ptr<DeviceArrays> arrays;
  cuda::DevicePtr device;
  std::shared_ptr<Client> client;
};

DeviceFetch fetch_of(std::string_view tensor, const Shard& part, CUdeviceptr address, std::uint64_t bytes) { return {.tensor = tensor, .part = part, .target = {address, bytes}}; }

void expect_error(const Status& status, Code code, std::string_view text) {
  ASSERT_FALSE(status.ok()) << text;
  EXPECT_EQ(status.error().code(), code) << status.error().to_string();
  EXPECT_NE(status.error().message().find(text), std::string::npos) << status.error().message();
}

TEST(DeviceArrays, WhatLandsIsWhatWasPublished) {
  for (const SimOrder order : {SimOrder::kLate, SimOrder::kEager, SimOrder::kRandom, SimOrder::kGreedy}) {
    World world(options_of(order));
    const Bytes cut = world.put("cut", 300, 9856, {0, 100, 101, 114});
    const Bytes wide = world.put("wide", 2, 700'001);  // a row is larger than a half
    const Bytes tiny = world.put("tiny", 3, 7);
    const Bytes odd = world.put("odd", 1'500, 777, {0}, DType::kI4);
    const auto snapshot = world.snapshot();
    const auto memory = world.memory(cut.size() + wide.size() + tiny.size() + odd.size() + 64);
    std::vector<DeviceFetch> wanted;
    std::uint64_t at = 1;  // any address will do
    for (const auto& [name, bytes] : {std::pair<std::string_view, const Bytes&>{"cut", cut}, {"wide", wide}, {"tiny", tiny}, {"odd", odd}}) {
      wanted.push_back(fetch_of(name, Shard::whole(), memory.address() + at, bytes.size()));
      at += bytes.size() + 5;
    }
    const std::uint64_t deferred = world.client->stats().link.extents_deferred;
    must(world.begin()->fetch(*snapshot, wanted, {}));
    at = 1;
    for (const Bytes* bytes : {&cut, &wide, &tiny, &odd}) {
      EXPECT_EQ(world.at(memory, at, bytes->size()), *bytes);
      EXPECT_EQ(world.at(memory, at + bytes->size(), 5), Bytes(5, kSimPoison)) << "and nothing beside it";
      at += bytes->size() + 5;
    }
    EXPECT_GT(world.client->stats().link.extents_deferred, deferred + 40) << "checked on the device";
    const auto counters = world.sim.counters();
    EXPECT_LT(counters.pinned_bytes_peak, 2 * kHalf + 4096) << "two halves, whatever the size";
  }
}

TEST(DeviceArrays, PartsLandToo) {
  World world;
  const std::uint64_t width = 9856;
  const Bytes bytes = world.put("w", 300, width, {0, 100, 101, 114});
  const auto snapshot = world.snapshot();
  const auto memory = world.memory(bytes.size());
  const auto work = world.begin();
  Random random(7);
  for (int i = 0; i < 12; ++i) {
    const std::uint64_t begin = random.below(300), end = begin + 1 + random.below(300 - begin), size = (end - begin) * width;
    const DeviceFetch want = fetch_of("w", Shard::rows(begin, end), memory.address(), size);
    must(work->fetch(*snapshot, {&want, 1}, {}));
    const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(begin * width);
    ASSERT_TRUE(std::ranges::equal(world.at(memory, 0, size), std::span(from, from + static_cast<std::ptrdiff_t>(size)))) << "rows " << begin << " to " << end << ", seed 7";
  }
  const DeviceFetch heads = fetch_of("w", Shard::head_range(3, 1, 3), memory.address(), 200 * width);
  must(work->fetch(*snapshot, {&heads, 1}, {}));
  EXPECT_TRUE(std::ranges::equal(world.at(memory, 0, 200 * width), std::span(bytes).subspan(static_cast<std::size_t>(100 * width))));
}

TEST(DeviceArrays, PiecesHoldWholeExtentsAndFillTheirHalves) {
  World world;
  const Bytes bytes = world.put("w", 4'096, 1'024);
  const auto snapshot = world.snapshot();
  const DeviceFetch want = fetch_of("w", Shard::whole(), 1, bytes.size());
  const auto groups = must(plan_device_pieces(*snapshot, {&want, 1}, kHalf));
  EXPECT_EQ(groups.size(), bytes.size() / kHalf);
  std::uint64_t at = 0;
  for (const auto& group : groups) {
    ASSERT_EQ(group.size(), 1U);
    EXPECT_EQ(group[0].target_offset, at);
    EXPECT_EQ(group[0].target_offset % kExtentBytes, 0U);
    EXPECT_LE(group[0].bytes, kHalf);
    at += group[0].bytes;
  }
  EXPECT_EQ(at, bytes.size());
}

TEST(DeviceArrays, ManySmallTensorsShareAFetch) {
  World world;
  auto publish = must(world.rig.server->publish());
  std::vector<std::string> names;
  for (int i = 0; i < 50; ++i) {
    names.push_back(cat("t", i));
    must(publish.put({names.back(), DType::kU8, Shape{100}, {}}, Bytes(100, static_cast<std::byte>(i))));
  }
  static_cast<void>(must(publish.finish()));
  const auto snapshot = world.snapshot();
  const auto memory = world.memory(50 * 100);
  std::vector<DeviceFetch> wanted;
  for (std::size_t i = 0; i < names.size(); ++i) wanted.push_back(fetch_of(names[i], Shard::whole(), memory.address() + 100 * i, 100));
  EXPECT_EQ(must(plan_device_pieces(*snapshot, wanted, kHalf)).size(), 1U);
  must(world.begin()->fetch(*snapshot, wanted, {}));
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(world.at(memory, 100 * i, 100), Bytes(100, static_cast<std::byte>(i)));
}

TEST(DeviceArrays, EncodedTensorsAreDecodedOnTheWay) {
  World world;
  Bytes raw(2 * 400'000);
  for (std::size_t i = 0; i < raw.size(); i += 2) raw[i + 1] = std::byte{0x3f};
  PublishOptions options;
  options.codec.codec = CodecId::kPlanes;
  auto publisher = must(world.client->publish(options));
  must(publisher->put("w", DType::kBF16, Shape{400'000}, {}, raw));
  static_cast<void>(must(publisher->finish()));
  const auto memory = world.memory(raw.size());
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), raw.size());
  must(world.begin()->fetch(*world.snapshot(), {&want, 1}, {}));
  EXPECT_GT(world.client->stats().encoded_bytes, 0U);
  EXPECT_EQ(world.at(memory, 0, raw.size()), raw);
}

TEST(DeviceArrays, WhatIsPublishedIsWhatTheDeviceHolds) {
  World world;
  const std::uint64_t bytes = 3 * kHalf + 11;
  const auto memory = world.memory(bytes), back = world.memory(bytes);
  const cuda::Stream stream = must(cuda::Stream::create(world.device));
  {
    const cuda::Current current(*world.device);
    must(stream.fill(memory.address(), std::byte{0x42}, bytes));
  }
  const auto work = world.begin();
  must(work->after(reinterpret_cast<std::uintptr_t>(stream.handle())));
  Bytes host(static_cast<std::size_t>(bytes));
  must(work->read({memory.address(), bytes}, host, {}));
  auto publisher = must(world.client->publish({}));
  must(publisher->put("w", DType::kU8, Shape{bytes}, {}, host));
  static_cast<void>(must(publisher->finish()));
  const DeviceFetch want = fetch_of("w", Shard::whole(), back.address(), bytes);
  must(work->fetch(*world.snapshot(), {&want, 1}, {}));
  EXPECT_EQ(world.at(back, 0, bytes), Bytes(host.size(), std::byte{0x42}));
}

// A bit of the server's memory turns over after it was sealed; nothing on the host looks at these extents.
TEST(DeviceArrays, BytesThatAreNotWhatTheServerSealedAreFoundOnTheDevice) {
  World world;
  Bytes bytes = world.put("w", 1'000, 1'024);
  std::byte* arena = Rig::arena_memory();
  ASSERT_NE(arena, nullptr);
  const auto* end = arena + (16U << 20);
  std::byte* sealed = std::search(arena, const_cast<std::byte*>(end), bytes.begin(), bytes.begin() + 4096);
  ASSERT_NE(sealed, end);
  const auto memory = world.memory(bytes.size());
  const auto snapshot = world.snapshot();
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), bytes.size());
  const auto work = world.begin();
  must(work->fetch(*snapshot, {&want, 1}, {}));
  Rig::flip(sealed + 5 * kExtentBytes + 9);
  expect_error(work->fetch(*snapshot, {&want, 1}, {}), Code::kCorrupt, "cuda:0: 1 of 16 extents that landed in its memory are not what the server sealed; the first is at byte 327680 of whole of tensor \"w\"");
  const DeviceFetch part = fetch_of("w", Shard::rows(320, 1'000), memory.address(), 680 * 1'024);
  expect_error(work->fetch(*snapshot, {&part, 1}, {}), Code::kCorrupt, "byte 0 of rows[320:1000]");
  Rig::flip(sealed + 5 * kExtentBytes + 9);
  must(work->fetch(*snapshot, {&want, 1}, {}));
  EXPECT_EQ(world.at(memory, 0, bytes.size()), bytes);
}

TEST(DeviceArrays, ATornCopyToTheDeviceIsFound) {
  World world;
  const Bytes bytes = world.put("w", 1'000, 1'024);
  const auto memory = world.memory(bytes.size());
  const auto snapshot = world.snapshot();
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), bytes.size());
  const auto work = world.begin();
  world.sim.skip_call("cuMemcpyHtoDAsync", 1);  // never arrives
  expect_error(work->fetch(*snapshot, {&want, 1}, {}), Code::kCorrupt, "cuda:0: ");
  must(work->fetch(*snapshot, {&want, 1}, {}));
}

TEST(DeviceArrays, WithoutVerifyNothingIsComparedAnywhere) {
  ClientOptions options = World::tcp();
  options.verify = false;
  World world(options_of(SimOrder::kLate), options);
  const Bytes bytes = world.put("w", 1'000, 1'024);
  const auto memory = world.memory(bytes.size());
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), bytes.size());
  must(world.begin()->fetch(*world.snapshot(), {&want, 1}, {}));
  EXPECT_EQ(world.at(memory, 0, bytes.size()), bytes);
  EXPECT_EQ(world.sim.calls("cuLaunchKernel"), 0U);
}

TEST(DeviceArrays, WhatIsWrongIsSaidBeforeAnythingIsCopied) {
  World world(options_of(SimOrder::kLate, 2));
  const Bytes bytes = world.put("w", 10, 10);
  const auto snapshot = world.snapshot();
  const auto memory = world.memory(100);
  const auto far = must(cuda::DeviceMemory::allocate(must(cuda::Device::open(world.sim.driver(), 1)), 100, "a tensor"));
  const auto work = world.begin();
  const auto refused = [&](const DeviceFetch& want, Code code, std::string_view text) { expect_error(work->fetch(*snapshot, {&want, 1}, {}), code, text); };
  refused(fetch_of("w", Shard::whole(), memory.address(), 99), Code::kInvalid, "tensor \"w\": whole is u8 (10, 10) of 100 bytes, and its target has 99");
  refused(fetch_of("w", Shard::rows(3, 11), memory.address(), 80), Code::kInvalid, "tensor \"w\"");
  refused(fetch_of("v", Shard::whole(), memory.address(), 100), Code::kNotFound, "\"v\"");
  refused(fetch_of("w", Shard::whole(), memory.address() + 1, 100), Code::kInvalid, "only 99 are memory of cuda:0");
  refused(fetch_of("w", Shard::whole(), far.address(), 100), Code::kInvalid, "its memory is of cuda:1, and its array says cuda:0");
  refused(fetch_of("w", Shard::whole(), reinterpret_cast<std::uintptr_t>(bytes.data()), 100), Code::kInvalid, "no memory of a CUDA device");
  expect_error(work->after(0), Code::kInvalid, "stream is 0");
  Bytes host(99);
  expect_error(work->read({memory.address(), 100}, host, {}), Code::kInvalid, "a target of 99 bytes for 100");
  EXPECT_EQ(world.sim.counters().copied_to_device, 0U);
  EXPECT_EQ(world.at(memory, 0, 100), Bytes(100, kSimPoison));
  EXPECT_EQ(must(world.arrays->device_of(far.address(), "out")), 1);
  const auto none = world.arrays->begin(2, {});
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Code::kInvalid) << none.error().to_string();
}

TEST(DeviceArrays, AFetchThatFailsHalfwayLeavesNothingUnderWay) {
  World world;
  const Bytes bytes = world.put("w", 4'000, 1'024);
  const auto memory = world.memory(bytes.size());
  const auto snapshot = world.snapshot();
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), bytes.size());
  const auto work = world.begin();
  world.sim.fail_call("cuLaunchKernel", 3, CUDA_ERROR_OUT_OF_MEMORY);
  expect_error(work->fetch(*snapshot, {&want, 1}, {}), Code::kBackpressure, "cuda:0");
  EXPECT_EQ(world.sim.counters().pending, 0U);
  snapshot->close();
  expect_error(work->fetch(*snapshot, {&want, 1}, {}), Code::kInvalid, "closed");
  EXPECT_EQ(world.sim.counters().pending, 0U);
}

TEST(DeviceArrays, TheCallersWorkIsWaitedForUpToTheDeadline) {
  SimCudaOptions options = options_of(SimOrder::kLate);
  options.polls_not_ready = 1'000'000;
  World world(std::move(options));
  const Bytes bytes = world.put("w", 10, 10);
  const auto memory = world.memory(100);
  const cuda::Stream stream = must(cuda::Stream::create(world.device));
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), 100);
  {
    const cuda::Current current(*world.device);
    must(stream.fill(memory.address(), std::byte{3}, 100));
    const auto work = world.begin();
    must(work->after(reinterpret_cast<std::uintptr_t>(stream.handle())));
    expect_error(work->fetch(*world.snapshot(), {&want, 1}, {.timeout = 20'000}), Code::kTimeout, "nothing was copied");
  }
  EXPECT_EQ(world.sim.counters().copied_to_device, 0U);
  // Each of them waits for what it was told to, and they are four in all.
  for (int i = 0; i < 3; ++i) {
    const auto work = world.begin();
    must(work->after(reinterpret_cast<std::uintptr_t>(stream.handle())));
    expect_error(work->fetch(*world.snapshot(), {&want, 1}, {.timeout = 20'000}), Code::kTimeout, "nothing was copied");
  }
  const auto full = world.arrays->begin(0, {.timeout = 1'000});
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code(), Code::kTimeout);
  EXPECT_NE(full.error().message().find("4 calls move arrays already"), std::string::npos) << full.error().message();
  world.sim.run_all();
  const auto work = world.begin();
  world.sim.run_all();
}

TEST(DeviceArrays, CallsAtTheSameTimeEachHaveTheirOwn) {
  World world(options_of(SimOrder::kRandom));
  const Bytes bytes = world.put("w", 2'000, 1'024);
  const auto snapshot = world.snapshot();
  std::vector<cuda::DeviceMemory> memory;
  for (int i = 0; i < 8; ++i) memory.push_back(world.memory(bytes.size()));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const DeviceFetch want = fetch_of("w", Shard::whole(), memory[static_cast<std::size_t>(i)].address(), bytes.size());
      for (int round = 0; round < 2; ++round) must(world.begin()->fetch(*snapshot, {&want, 1}, {}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : memory) EXPECT_EQ(world.at(each, 0, bytes.size()), bytes);
  EXPECT_LE(world.sim.counters().pinned_bytes_peak, 4 * (2 * kHalf + 4096));
}

TEST(DeviceArrays, AnyCallThatFailsOnceIsATypedErrorAndTheNextOneIsRight) {
  const char* const functions[] = {"cuInit",        "cuDevicePrimaryCtxRetain", "cuLibraryLoadData",  "cuMemAlloc",        "cuStreamCreate", "cuEventCreate",       "cuPointerGetAttributes",
                                   "cuEventRecord", "cuMemcpyHtoDAsync",        "cuMemcpyDtoHAsync",  "cuEventQuery",      "cuLaunchKernel", "cuStreamSynchronize", "cuEventSynchronize",
                                   "cuMemsetD8Async", "cuCtxPushCurrent",       "cuStreamIsCapturing", "cuStreamDestroy", "cuMemFree", "cuMemFreeHost", "cuEventDestroy"};
  World world;
  const Bytes bytes = world.put("w", 600, 1'024);
  const auto snapshot = world.snapshot();
  const auto memory = world.memory(bytes.size());
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), bytes.size());
  for (const char* function : functions) {
    for (const std::uint32_t nth : {1U, 2U, 5U}) {
      const auto arrays = open_cuda_arrays(world.sim.driver(), kHalf);
      world.sim.fail_call(function, nth, CUDA_ERROR_OUT_OF_MEMORY);
      for (int round = 0; round < 6; ++round) {
        const auto run = [&]() -> Status {
          PARAMWIRE_TRY(work, arrays->begin(0, {}));
          return work->fetch(*snapshot, {&want, 1}, {});
        };
        const Status status = run();
        if (!status.ok()) {
          EXPECT_EQ(status.error().code(), Code::kBackpressure) << function << ": " << status.error().to_string();
        }
      }
      ASSERT_EQ(world.at(memory, 0, bytes.size()), bytes) << function;
    }
  }
}

TEST(DeviceArrays, ALostDeviceLeavesTheHostAlone) {
  World world;
  const Bytes bytes = world.put("w", 10, 10);
  const auto snapshot = world.snapshot();
  const auto memory = world.memory(100);
  const DeviceFetch want = fetch_of("w", Shard::whole(), memory.address(), 100);
  const auto work = world.begin();
  world.sim.lose_device();
  const Status lost = work->fetch(*snapshot, {&want, 1}, {});
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnavailable) << lost.error().to_string();
  Bytes host(100);
  FetchRequest request;
  request.tensor = "w";
  request.target = host;
  must(snapshot->fetch({&request, 1}));
  EXPECT_EQ(host, bytes);
}

TEST(DeviceArrays, TheChildOfAForkIsRefused) {
  World world;
  { const auto work = world.begin(); }
  const pid_t child = ::fork();
  if (child == 0) {
    const auto begun = world.arrays->begin(0, {});
    const auto owner = world.arrays->device_of(1, "out");
    ::_exit(!begun.ok() && begun.error().code() == Code::kInvalid && !owner.ok() && owner.error().code() == Code::kInvalid ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(DeviceArrays, ABrokenOrMissingDriverIsUnavailable) {
  SimCudaOptions options = options_of(SimOrder::kLate);
  options.devices = 0;
  SimCuda sim(std::move(options));
  const auto arrays = open_cuda_arrays(sim.driver());
  for (const Status& status : {Status(arrays->begin(0, {}).error()), Status(arrays->device_of(1, "out").error())}) {
    EXPECT_EQ(status.error().code(), Code::kUnavailable) << status.error().to_string();
  }
}

}  // namespace
}  // namespace paramwire
