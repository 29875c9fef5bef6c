// A user's stream is captured, in the strictest mode, while four threads do what the library's prefetch threads do (CASES UP-25).
#include "gpu/case_make.hpp"
#include "gpu/session_rig.hpp"

#include <atomic>
#include <thread>

namespace paramwire::gpu {
namespace {

using namespace cuda;

class GpuCapture : public GpuTest {};

// Allocates page-locked and device memory, copies through a stream of its own, polls and waits for events, and gives all back, round after round.
class Prefetching {
 public:
  explicit Prefetching(const DevicePtr& device) : device_(device) {
    for (unsigned i = 0; i < kThreads; ++i) threads_.emplace_back([this, i] { run(i); });
  }
  ~Prefetching() { stop(); }
  Prefetching(const Prefetching&) = delete;
  Prefetching& operator=(const Prefetching&) = delete;

  // Until each thread has begun and ended `count` rounds from now on, or one has failed.
  void wait_for_rounds(std::uint64_t count) const {
    std::uint64_t from[kThreads];
    for (unsigned i = 0; i < kThreads; ++i) from[i] = rounds_[i].load(std::memory_order_relaxed);
    for (unsigned i = 0; i < kThreads; ++i) {
      while (rounds_[i].load(std::memory_order_relaxed) < from[i] + count + 1 && !failed_.load(std::memory_order_relaxed)) std::this_thread::yield();
    }
  }
  // returns: what went wrong in a thread, or ""
  std::string stop() {
    stop_.store(true, std::memory_order_relaxed);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    for (const std::string& problem : problems_) {
      if (!problem.empty()) return problem;
    }
    return {};
  }

 private:
  static constexpr unsigned kThreads = 4;

  void run(unsigned number) {
    while (!stop_.load(std::memory_order_relaxed)) {
      const Status done = round(number);
      rounds_[number].fetch_add(1, std::memory_order_relaxed);
      if (done.ok()) continue;
      problems_[number] = done.error().to_string();  // read after join()
      failed_.store(true, std::memory_order_relaxed);
      return;
    }
  }
  Status round(unsigned number) const {
    constexpr std::size_t kBytes = 200'000;
    PARAMWIRE_TRY(stream, Stream::create(device_));
    PARAMWIRE_TRY(there, HostMemory::allocate(device_, kBytes));
    PARAMWIRE_TRY(back, HostMemory::allocate(device_, kBytes));
    PARAMWIRE_TRY(memory, DeviceMemory::allocate(device_, kBytes, "a prefetched piece"));
    PARAMWIRE_TRY(copied, Event::create(device_));
    const auto value = static_cast<std::byte>(number + 1);
    std::fill(there.span().begin(), there.span().end(), value);
    {
      const Current current(*device_);
      PARAMWIRE_CHECK(current.status());
      PARAMWIRE_CHECK(stream.to_device(memory.address(), there.span()));
      PARAMWIRE_CHECK(stream.record(copied));
    }
    for (bool done = false; !done;) {
      PARAMWIRE_TRY(now, copied.done());
      done = now;
    }
    {
      const Current current(*device_);
      PARAMWIRE_CHECK(current.status());
      PARAMWIRE_CHECK(stream.to_host(back.span(), memory.address()));
      PARAMWIRE_CHECK(stream.record(copied));
    }
    PARAMWIRE_CHECK(copied.synchronize());
    PARAMWIRE_CHECK(stream.synchronize());
    if (std::all_of(back.span().begin(), back.span().end(), [&](std::byte byte) { return byte == value; })) return {};
    return Error(Code::kInternal, "a prefetched piece came back as another");
  }

  const DevicePtr device_;
  std::atomic<bool> stop_{false}, failed_{false};
  std::atomic<std::uint64_t> rounds_[kThreads] = {};
  std::string problems_[kThreads];
  std::vector<std::thread> threads_;
};

// A user's thread: not relaxed, as threads are.
class UserMode {
 public:
  explicit UserMode(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~UserMode() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  UserMode(const UserMode&) = delete;
  UserMode& operator=(const UserMode&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

// Adds 1 to one float, as often as it is launched.
Status add_one(const Bed& bed, const DeviceMemory& sum, const DeviceMemory& one) {
  const PairArgs args{.left = sum.at<const float>(), .right = one.at<const float>(), .out = sum.at<float>(), .out16 = nullptr, .half = Half::kNone, .count = 1};
  return bed.module->launch(bed.stream, Kernel::k_add, pair_launch(args), args);
}

TEST_F(GpuCapture, AUsersGlobalCaptureComesOutWholeWhileFourThreadsPrefetch) {
  const Bed on = bed();
  const Driver& driver = on.device->driver();
  const DeviceMemory sum = must(on.upload(bytes_of<float>({0}))), one = must(on.upload(bytes_of<float>({1})));
  Prefetching prefetching(on.device);
  for (int capture = 0; capture < 3; ++capture) {
    constexpr int kNodes = 64;
    const Current current(*on.device);
    const UserMode user(driver);
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    prefetching.wait_for_rounds(1);
    must(on.device->check(driver.cuStreamBeginCapture(on.stream.handle(), CU_STREAM_CAPTURE_MODE_GLOBAL), "beginning"));
    for (int i = 0; i < kNodes / 2; ++i) must(add_one(on, sum, one));
    prefetching.wait_for_rounds(3);  // whole rounds of each thread, within the capture
    for (int i = 0; i < kNodes / 2; ++i) must(add_one(on, sum, one));
    must(on.device->check(driver.cuStreamEndCapture(on.stream.handle(), &graph), "ending"));
    must(on.device->check(driver.cuGraphInstantiate(&exec, graph, 0), "instantiating"));
    for (int i = 0; i < 2; ++i) must(on.device->check(driver.cuGraphLaunch(exec, on.stream.handle()), "launching"));
    EXPECT_EQ(must(on.download_as<float>(sum, 1))[0], static_cast<float>((capture + 1) * 2 * kNodes));
    driver.cuGraphExecDestroy(exec);
    driver.cuGraphDestroy(graph);
  }
  EXPECT_EQ(prefetching.stop(), "");
}

// What the threads above do would end a capture, were they not relaxed: the test above can fail.
TEST_F(GpuCapture, AThreadThatIsNotRelaxedEndsAGlobalCapture) {
  const Bed on = bed();
  const Driver& driver = on.device->driver();
  const DeviceMemory sum = must(on.upload(bytes_of<float>({0}))), one = must(on.upload(bytes_of<float>({1})));
  const Current current(*on.device);
  must(on.device->check(driver.cuStreamBeginCapture(on.stream.handle(), CU_STREAM_CAPTURE_MODE_GLOBAL), "beginning"));
  must(add_one(on, sum, one));
  CUresult refused = CUDA_SUCCESS;
  std::thread([&] {
    const Current other(*on.device);
    const UserMode strict(driver);
    CUdeviceptr memory = 0;
    refused = driver.cuMemAlloc(&memory, 4096);
  }).join();
  CUgraph graph = nullptr;
  const CUresult ended = driver.cuStreamEndCapture(on.stream.handle(), &graph);
  EXPECT_EQ(refused, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(ended, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(world_->findings().empty(), !world_->simulated);
  must(add_one(on, sum, one));  // the stream is whole again
  EXPECT_EQ(must(on.download_as<float>(sum, 1))[0], 1.0F);
}

TEST_F(GpuCapture, ASessionIsCapturedAndRightWhileFourThreadsPrefetch) {
  const Bed on = bed();
  Prefetching prefetching(on.device);
  prefetching.wait_for_rounds(1);
  SessionRig rig(*world_, oracle::small_llama(), DType::kF32, 32);
  const oracle::Tensors tensors = rig.tensors(7);
  rig.load(tensors);
  const Token token = 17;
  EXPECT_LE(largest_difference(must(rig.step(token)), rig.cpu_logits(tensors, {&token, 1})), kLogitTolerance);
  EXPECT_EQ(prefetching.stop(), "");
}

}  // namespace
}  // namespace paramwire::gpu
