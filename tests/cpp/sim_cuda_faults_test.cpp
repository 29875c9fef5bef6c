// The simulated CUDA device: contexts, handles, launches, faults on demand, what is left at the end, the log.
#include "support/sim_cuda_rig.hpp"

#include <algorithm>
#include <thread>

namespace paramwire::testing {
namespace {

bool mentions(const std::vector<std::string>& lines, const std::string& text) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

// ---------------------------------------------------------------- contexts and handles

TEST(SimCudaRules, CallsBeforeInitAndWithoutAContextAreFound) {
  SimCuda sim({});
  const auto driver = sim.driver();
  CUcontext context = nullptr;
  CUdeviceptr at = 0;
  EXPECT_EQ(driver->cuDevicePrimaryCtxRetain(&context, 0), CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_EQ(driver->cuInit(0), CUDA_SUCCESS);
  EXPECT_EQ(driver->cuMemAlloc(&at, 1), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(driver->cuCtxPopCurrent(&context), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(driver->cuDevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(sim.take_failures(), (std::vector<std::string>{
                                     "cuDevicePrimaryCtxRetain: cuInit was not called",
                                     "cuMemAlloc: no context is current in this thread",
                                     "cuCtxPopCurrent: no context is current in this thread",
                                     "cuDevicePrimaryCtxRelease: it is not retained",
                                 }));
}

TEST(SimCudaRules, NoDeviceIsWhatInitSays) {
  SimCuda sim({.devices = 0});
  EXPECT_EQ(sim.driver()->cuInit(0), CUDA_ERROR_NO_DEVICE);
}

TEST(SimCudaRules, ContextIsOfTheThreadThatPushedIt) {
  SimRig rig;
  std::thread([&] {
    CUdeviceptr at = 0;
    EXPECT_EQ(rig.cu.cuMemAlloc(&at, 1), CUDA_ERROR_INVALID_CONTEXT);
  }).join();
  rig.expect_failure("cuMemAlloc: no context is current in this thread");
}

TEST(SimCudaRules, UseOfAReleasedContextIsFound) {
  SimRig rig;
  ASSERT_EQ(rig.cu.cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  CUevent event = nullptr;
  EXPECT_EQ(rig.cu.cuEventCreate(&event, 0), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  rig.expect_failure("cuEventCreate: the current context was released");
  EXPECT_EQ(rig.cu.cuCtxPushCurrent(rig.context), CUDA_ERROR_INVALID_CONTEXT);
  rig.expect_failure("use of context 1 after it was destroyed");
  const auto left = rig.sim.finish();
  EXPECT_TRUE(mentions(left, "cuStreamCreate: stream 1 is left"));
}

TEST(SimCudaRules, LastReleaseUnderWorkThatNobodyWaitedForIsFound) {
  SimRig rig;
  const CUevent event = rig.event();
  ASSERT_EQ(rig.cu.cuEventRecord(event, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  rig.expect_no_failure();
  ASSERT_EQ(rig.cu.cuDevicePrimaryCtxRetain(&rig.context, 0), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuCtxPushCurrent(rig.context), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(rig.cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  rig.fill(stream, rig.alloc(1), 0, 1);
  ASSERT_EQ(rig.cu.cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  rig.expect_failure("cuDevicePrimaryCtxRelease: the last release of device 0 during work that nobody waited for: fill of 1 B");
  rig.sim.finish();
}

TEST(SimCudaRules, StreamsAndMemoryOfAnotherDeviceAreFound) {
  SimRig rig({.devices = 2});
  const CUdeviceptr at = rig.alloc(8);
  CUcontext other = nullptr;
  CUstream stream = nullptr;
  ASSERT_EQ(rig.cu.cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuCtxPushCurrent(other), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_INVALID_CONTEXT);
  rig.expect_failure("stream 1 is of another context than the one that is current");
  ASSERT_EQ(rig.cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  EXPECT_EQ(rig.fill(stream, at, 0, 1), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("of device 0, used by device 1");
  EXPECT_EQ(rig.cu.cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuCtxPopCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST(SimCudaRules, DefaultStreamsAndBlockingStreamsAreFound) {
  SimRig rig;
  EXPECT_EQ(rig.fill(nullptr, rig.alloc(1), 0, 1), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("cuMemsetD8Async: use of the default stream");
  EXPECT_EQ(rig.cu.cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("use of the default stream");
  CUstream stream = nullptr;
  EXPECT_EQ(rig.cu.cuStreamCreate(&stream, CU_STREAM_DEFAULT), CUDA_SUCCESS);
  rig.expect_failure("cuStreamCreate: without CU_STREAM_NON_BLOCKING");
  EXPECT_EQ(rig.cu.cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST(SimCudaRules, DefaultStreamIsAStreamOfItsOwnWhereATestAllowsIt) {
  SimRig rig({.default_stream = true});
  const CUdeviceptr at = rig.alloc(1);
  const CUevent event = rig.event();
  rig.fill(CU_STREAM_LEGACY, at, 1, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, CU_STREAM_LEGACY), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 0xCB) << "streams that do not block are not ordered with it";
  ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.a, event, 0), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 1);
  EXPECT_EQ(rig.cu.cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  rig.expect_failure("the default stream can't be captured");
}

TEST(SimCudaRules, HandlesThatAreGoneOrOfAnotherKindOrNoneAreFound) {
  SimRig rig;
  CUevent event = nullptr;
  ASSERT_EQ(rig.cu.cuEventCreate(&event, 0), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(reinterpret_cast<CUstream>(event)), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("cuStreamSynchronize: event 1 is no stream");
  ASSERT_EQ(rig.cu.cuEventDestroy(event), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuEventDestroy(event), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("cuEventDestroy: use of event 1 after it was destroyed");
  EXPECT_EQ(rig.cu.cuEventRecord(event, rig.a), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("cuEventRecord: use of event 1 after it was destroyed");
  EXPECT_EQ(rig.cu.cuEventQuery(nullptr), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("cuEventQuery: 0x0 is no event of this simulation");
}

// ---------------------------------------------------------------- kernels

TEST(SimCudaKernel, ArgumentsAreCopiedAtTheLaunchAndTheGeometryArrives) {
  SimCudaOptions options;
  SimLaunch seen;
  options.kernels["look"] = {4, [&](const SimLaunch& launch, const void* arguments) {
                               seen = launch;
                               EXPECT_EQ(*static_cast<const int*>(arguments), 7);
                               return "";
                             }};
  SimRig rig(options);
  int argument = 7;
  void* parameters[] = {&argument};
  ASSERT_EQ(rig.cu.cuLaunchKernel(rig.kernel("look"), 3, 2, 1, 64, 2, 1, 1024, rig.a, parameters, nullptr), CUDA_SUCCESS);
  argument = 8;
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(seen.grid[0], 3U);
  EXPECT_EQ(seen.grid[1], 2U);
  EXPECT_EQ(seen.block[0], 64U);
  EXPECT_EQ(seen.shared_bytes, 1024U);
  EXPECT_EQ(seen.kernel, "look");
}

TEST(SimCudaKernel, UnknownNamesAreNotFoundAndOneNameIsOneKernel) {
  SimRig rig;
  EXPECT_EQ(rig.kernel(), rig.kernel());
  CUkernel kernel = nullptr;
  EXPECT_EQ(rig.cu.cuLibraryGetKernel(&kernel, rig.library, "subtract"), CUDA_ERROR_NOT_FOUND);
  rig.expect_no_failure();
}

TEST(SimCudaKernel, LaunchesOutsideOfTheLimitsAreFound) {
  SimCudaOptions options;
  options.kernels["small"] = {0, [](const SimLaunch&, const void*) { return ""; }, 128, 256};
  SimRig rig(options);
  struct Case {
    unsigned grid[3], block[3], shared;
    CUresult code;
    const char* failure;
  };
  const Case cases[] = {
      {{0, 1, 1}, {32, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE, "0 blocks along axis 0"},
      {{1, 65536, 1}, {32, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE, "65536 blocks along axis 1"},
      {{1, 1, 1}, {0, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE, "0 threads along axis 0"},
      {{1, 1, 1}, {1025, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE, "1025 threads along axis 0"},
      {{1, 1, 1}, {64, 32, 1}, 0, CUDA_ERROR_INVALID_VALUE, "blocks of 2048 threads"},
      {{1, 1, 1}, {160, 1, 1}, 0, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "compiled for 128"},
      {{1, 1, 1}, {32, 1, 1}, 257, CUDA_ERROR_INVALID_VALUE, "257 B of shared memory, 256 is allowed"},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(rig.cu.cuLaunchKernel(rig.kernel("small"), one.grid[0], one.grid[1], one.grid[2], one.block[0], one.block[1], one.block[2], one.shared, rig.a,
                                    nullptr, nullptr),
              one.code);
    rig.expect_failure(one.failure);
  }
  EXPECT_EQ(rig.cu.cuLaunchKernel(rig.kernel("add"), 1, 1, 1, 32, 1, 1, 48 * 1024 + 1, rig.a, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("kernel add: no arguments");
  EXPECT_EQ(rig.sim.counters().pending, 0U);
}

TEST(SimCudaKernel, LibraryUnloadedUnderItsKernelsIsFound) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  const CUfunction kernel = rig.kernel();
  ASSERT_EQ(rig.add(rig.a, at, 1, 1), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuLibraryUnload(std::exchange(rig.library, nullptr)), CUDA_SUCCESS);
  rig.expect_failure("cuLibraryUnload: its kernels are in work that nobody waited for: kernel add on stream 1");
  AddArgs args{at, 1, 1};
  void* parameters[] = {&args};
  EXPECT_EQ(rig.cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, rig.a, parameters, nullptr), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("use of kernel 1 after it was destroyed");
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_LAUNCH_FAILED);
  rig.expect_failure("kernel add: its library was unloaded");
}

TEST(SimCudaKernel, BodyThatAsksForAccessIsHeldToIt) {
  SimCuda* sim = nullptr;
  SimCudaOptions options;
  options.kernels["careful"] = {sizeof(AddArgs), [&](const SimLaunch&, const void* arguments) {
                                  AddArgs args;
                                  std::memcpy(&args, arguments, sizeof args);
                                  EXPECT_TRUE(sim->access(args.target, 8));
                                  EXPECT_FALSE(sim->access(args.target, args.count));
                                  return "";
                                }};
  SimRig rig(options);
  sim = &rig.sim;
  AddArgs args{rig.alloc(8), 9, 0};
  void* parameters[] = {&args};
  ASSERT_EQ(rig.cu.cuLaunchKernel(rig.kernel("careful"), 1, 1, 1, 32, 1, 1, 0, rig.a, parameters, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  rig.expect_failure("kernel careful: 9 B at ");
}

TEST(SimCudaKernel, BodyThatSaysWhatIsWrongIsAFailureAndLosesTheDevice) {
  SimCudaOptions options;
  options.kernels["stuck"] = {0, [](const SimLaunch&, const void*) { return "12 of 32 threads reached the barrier"; }};
  SimRig rig(options);
  ASSERT_EQ(rig.cu.cuLaunchKernel(rig.kernel("stuck"), 1, 1, 1, 32, 1, 1, 0, rig.a, nullptr, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_LAUNCH_FAILED);
  rig.expect_failure("kernel stuck: 12 of 32 threads reached the barrier");
}

// ---------------------------------------------------------------- faults on demand

TEST(SimCudaFaults, NthCallFailsOnceWithoutEffect) {
  SimRig rig;
  rig.sim.fail_call("cuMemAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY);
  CUdeviceptr at = 0;
  rig.alloc(8);
  EXPECT_EQ(rig.cu.cuMemAlloc(&at, 8), CUDA_ERROR_OUT_OF_MEMORY);
  rig.alloc(8);
  EXPECT_EQ(rig.sim.counters().allocations, 2U);
  EXPECT_EQ(rig.sim.calls("cuMemAlloc"), 3U);
}

TEST(SimCudaFaults, FreesAndDestroysActAlthoughTheyFail) {
  SimRig rig;
  CUdeviceptr at = 0;
  ASSERT_EQ(rig.cu.cuMemAlloc(&at, 8), CUDA_SUCCESS);
  rig.sim.fail_call("cuMemFree", 1, CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(rig.cu.cuMemFree(at), CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(rig.sim.counters().allocations, 0U);
}

TEST(SimCudaFaults, SkippedWaitLosesTheOrder) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  const CUevent event = rig.event();
  rig.sim.skip_call("cuStreamWaitEvent", 1);
  rig.fill(rig.a, at, 1, 1);
  rig.cu.cuEventRecord(event, rig.a);
  EXPECT_EQ(rig.cu.cuStreamWaitEvent(rig.b, event, 0), CUDA_SUCCESS);
  rig.add(rig.b, at, 1, 1);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 0xCC);
}

TEST(SimCudaFaults, LostDeviceFailsEveryCallAndRunsNothingButLetsGo) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  rig.fill(rig.a, at, 1, 1);
  rig.sim.lose_device();
  CUdeviceptr more = 0;
  CUcontext context = nullptr;
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(rig.cu.cuMemAlloc(&more, 1), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(rig.fill(rig.a, at, 1, 1), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(rig.cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(rig.byte_at(at), 0xCB);
  EXPECT_EQ(rig.cu.cuMemFree(std::exchange(rig.device[0], 0)), CUDA_ERROR_ECC_UNCORRECTABLE);
  rig.expect_no_failure();
  rig.device.clear();
  EXPECT_EQ(rig.sim.counters().allocations, 0U);
}

TEST(SimCudaFaults, IllegalAccessOfAKernelIsToldByALaterCallAndIsSticky) {
  SimRig rig;
  CUdeviceptr at = 0;
  ASSERT_EQ(rig.cu.cuMemAlloc(&at, 8), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemFree(at), CUDA_SUCCESS);
  EXPECT_EQ(rig.add(rig.a, at, 8, 1), CUDA_SUCCESS) << "the launch does not know";
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS) << "nor does another stream";
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_ERROR_ILLEGAL_ADDRESS);
  rig.expect_failure("which was freed");
}

// ---------------------------------------------------------------- the end

TEST(SimCudaEnd, EveryThingThatIsLeftIsNamed) {
  SimCuda sim({.kernels = sim_test_kernels()});
  const auto driver = sim.driver();
  CUcontext context = nullptr;
  CUdeviceptr at = 0;
  void* host = nullptr;
  CUstream stream = nullptr, capturing = nullptr;
  CUevent event = nullptr;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  CUlibrary library = nullptr;
  ASSERT_EQ(driver->cuInit(0), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuCtxPushCurrent(context), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuMemAlloc(&at, 8), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuMemHostAlloc(&host, 8, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuStreamCreate(&capturing, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuEventCreate(&event, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuLibraryLoadData(&library, "", nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  const auto left = sim.finish();
  EXPECT_EQ(left.size(), 11U) << ::testing::PrintToString(left);
  for (const char* text : {"cuMemAlloc: allocation 1 (8 B at ", "cuMemHostAlloc: pinned allocation 1 (8 B at ", "cuStreamCreate: stream 1 is left", "cuStreamCreate: stream 2 is left",
                           "cuEventCreate: event 1 is left", "cuStreamEndCapture: graph 1 is left", "cuGraphInstantiate: executable graph 1 is left",
                           "cuLibraryLoadData: library 1 is left", "cuStreamBeginCapture: capture 2 was not ended",
                           "cuDevicePrimaryCtxRetain: 1 retains of device 0 are left", "cuCtxPushCurrent: 1 contexts are left current in thread "}) {
    EXPECT_TRUE(mentions(left, text)) << text;
  }
  EXPECT_EQ(driver->cuMemFree(at), CUDA_ERROR_DEINITIALIZED);
}

TEST(SimCudaEnd, WorkThatNobodyWaitedForIsStillChecked) {
  SimCudaOptions options;
  int runs = 0;
  options.kernels["count"] = {0, [&](const SimLaunch&, const void*) {
                                ++runs;
                                return "";
                              }};
  {
    SimRig rig(options);
    ASSERT_EQ(rig.cu.cuLaunchKernel(rig.kernel("count"), 1, 1, 1, 32, 1, 1, 0, rig.a, nullptr, nullptr), CUDA_SUCCESS);
    EXPECT_EQ(runs, 0);
    rig.sim.run_all();
    EXPECT_EQ(runs, 1);
    const CUdeviceptr at = rig.alloc(8);
    rig.fill(rig.a, at, 1, 8);
    ASSERT_EQ(rig.cu.cuMemFree(at), CUDA_SUCCESS);
    rig.device.clear();
    rig.sim.take_failures();
    EXPECT_TRUE(mentions(rig.sim.finish(), "fill of 8 B to "));
  }
}

TEST(SimCudaEnd, LogTellsCallsAndWorkInOrder) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(8);
  rig.sim.clear_log();
  rig.fill(rig.a, at, 1, 8);
  rig.add(rig.a, at, 8, 1);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.sim.ran(), (std::vector<std::string>{"fill", "add"}));
  const auto log = rig.sim.log();
  ASSERT_FALSE(log.empty());
  EXPECT_EQ(log[0].function, "cuMemsetD8Async");
  EXPECT_EQ(log[0].stream, 1U);
  EXPECT_EQ(log[0].address, at);
  EXPECT_NE(log[0].to_string().find(" cuMemsetD8Async stream 1 0x"), std::string::npos) << log[0].to_string();
  EXPECT_NE(log[0].to_string().find(" 8 B: CUDA_SUCCESS"), std::string::npos) << log[0].to_string();
  EXPECT_EQ(log.back().function, "cuStreamSynchronize");
  EXPECT_EQ(rig.sim.counters().kernels, 1U);
}

}  // namespace
}  // namespace paramwire::testing
