// The simulated CUDA device: stream capture and graphs, by the rules of the manual and of the programming guide ("Creating a Graph Using Stream
// Capture"), and that each break of them is found.
#include "support/sim_cuda_rig.hpp"

#include <thread>

namespace paramwire::testing {
namespace {

constexpr CUstreamCaptureMode kGlobal = CU_STREAM_CAPTURE_MODE_GLOBAL;
constexpr CUstreamCaptureMode kLocal = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
constexpr CUstreamCaptureMode kRelaxed = CU_STREAM_CAPTURE_MODE_RELAXED;

struct CaptureRig : SimRig {
  explicit CaptureRig(SimCudaOptions options = {}) : SimRig(std::move(options)) {
    at = alloc(8);
    kernel();  // loading is unsafe while a capture runs
    cu.cuMemsetD8Async(at, 0, 8, a);
    EXPECT_EQ(cu.cuStreamSynchronize(a), CUDA_SUCCESS);
  }
  void begin(CUstreamCaptureMode mode = kGlobal) { EXPECT_EQ(cu.cuStreamBeginCapture(a, mode), CUDA_SUCCESS); }
  CUresult end() {
    CUgraph graph = nullptr;
    const CUresult out = cu.cuStreamEndCapture(a, &graph);
    EXPECT_EQ(graph != nullptr, out == CUDA_SUCCESS);
    if (graph != nullptr) cu.cuGraphDestroy(graph);
    return out;
  }
  CUgraphExec finish() {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    EXPECT_EQ(cu.cuStreamEndCapture(a, &graph), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
    return exec;
  }
  CUstreamCaptureStatus status(CUstream stream) {
    CUstreamCaptureStatus out{};
    EXPECT_EQ(cu.cuStreamIsCapturing(stream, &out), CUDA_SUCCESS);
    return out;
  }
  CUdeviceptr at = 0;
};

// Runs `body` in a thread that has the context current and says `mode`.
template <typename Body>
void in_thread(CaptureRig& rig, CUstreamCaptureMode mode, const Body& body) {
  std::thread([&] {
    EXPECT_EQ(rig.cu.cuCtxPushCurrent(rig.context), CUDA_SUCCESS);
    CUstreamCaptureMode swapped = mode;
    EXPECT_EQ(rig.cu.cuThreadExchangeStreamCaptureMode(&swapped), CUDA_SUCCESS);
    EXPECT_EQ(swapped, kGlobal) << "every thread begins so";
    body();
    EXPECT_EQ(rig.cu.cuCtxPopCurrent(nullptr), CUDA_SUCCESS);
  }).join();
}

TEST(SimCudaCapture, WorkIsRecordedAndRunsAtEachLaunchWithTheArgumentsOfTheCapture) {
  CaptureRig rig;
  unsigned char* pinned = rig.pin(1);
  rig.begin();
  EXPECT_EQ(rig.status(rig.a), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  AddArgs args{rig.at, 1, 1};
  void* parameters[] = {&args};
  ASSERT_EQ(rig.cu.cuLaunchKernel(rig.kernel(), 1, 1, 1, 32, 1, 1, 0, rig.a, parameters, nullptr), CUDA_SUCCESS);
  args.value = 100;
  ASSERT_EQ(rig.cu.cuMemcpyHtoDAsync(rig.at + 1, pinned, 1, rig.a), CUDA_SUCCESS);
  CUgraphExec exec = rig.finish();
  EXPECT_EQ(rig.status(rig.a), CU_STREAM_CAPTURE_STATUS_NONE);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(rig.at), 0) << "capturing runs nothing";
  ASSERT_EQ(rig.cu.cuGraphUpload(exec, rig.b), CUDA_SUCCESS);
  for (int i = 1; i <= 3; ++i) {
    pinned[0] = static_cast<unsigned char>(i);
    ASSERT_EQ(rig.cu.cuGraphLaunch(exec, rig.b), CUDA_SUCCESS);
    EXPECT_EQ(rig.byte_at(rig.at), i - 1);
    ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
    EXPECT_EQ(rig.byte_at(rig.at), i);
    EXPECT_EQ(rig.byte_at(rig.at + 1), i) << "addresses are fixed, what lies there is not";
  }
  EXPECT_EQ(rig.cu.cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

// A fork: b's node must come after a's first and before a's last, whatever order the replay chooses.
TEST(SimCudaCapture, StreamJoinsByWaitAndEdgesHoldInEveryOrder) {
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    CaptureRig rig({.order = SimOrder::kRandom, .seed = seed});
    const CUevent fork = rig.event(), join = rig.event();
    rig.begin();
    rig.fill(rig.a, rig.at, 1, 2);
    ASSERT_EQ(rig.cu.cuEventRecord(fork, rig.a), CUDA_SUCCESS);
    ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.b, fork, 0), CUDA_SUCCESS);
    EXPECT_EQ(rig.status(rig.b), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    rig.add(rig.b, rig.at, 1, 1);
    rig.add(rig.a, rig.at + 1, 1, 2);
    ASSERT_EQ(rig.cu.cuEventRecord(join, rig.b), CUDA_SUCCESS);
    ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.a, join, 0), CUDA_SUCCESS);
    ASSERT_EQ(rig.cu.cuMemcpyDtoDAsync(rig.at + 2, rig.at, 2, rig.a), CUDA_SUCCESS);
    CUgraphExec exec = rig.finish();
    EXPECT_EQ(rig.status(rig.b), CU_STREAM_CAPTURE_STATUS_NONE);
    ASSERT_EQ(rig.cu.cuGraphLaunch(exec, rig.a), CUDA_SUCCESS);
    ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
    EXPECT_EQ(rig.byte_at(rig.at + 2), 2) << "seed " << seed;
    EXPECT_EQ(rig.byte_at(rig.at + 3), 3) << "seed " << seed;
    rig.cu.cuGraphExecDestroy(exec);
  }
}

TEST(SimCudaCapture, ForkWithoutEdgeReplaysNewestFirst) {
  CaptureRig rig;
  const CUevent fork = rig.event(), join = rig.event();
  rig.begin();
  rig.cu.cuEventRecord(fork, rig.a);
  rig.cu.cuStreamWaitEvent(rig.b, fork, 0);
  rig.fill(rig.a, rig.at, 1, 1);
  rig.fill(rig.b, rig.at, 2, 1);
  rig.cu.cuEventRecord(join, rig.b);
  rig.cu.cuStreamWaitEvent(rig.a, join, 0);
  CUgraphExec exec = rig.finish();
  rig.cu.cuGraphLaunch(exec, rig.a);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(rig.at), 1);
  rig.cu.cuGraphExecDestroy(exec);
}

TEST(SimCudaCapture, LaunchesOfOneExecutableGraphAreOrderedOverStreams) {
  CaptureRig rig;
  rig.begin();
  rig.add(rig.a, rig.at, 1, 1);
  CUgraphExec exec = rig.finish();
  ASSERT_EQ(rig.cu.cuGraphLaunch(exec, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuGraphLaunch(exec, rig.b), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(rig.at), 2);
  ASSERT_EQ(rig.cu.cuGraphLaunch(exec, rig.b), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuGraphExecDestroy(exec), CUDA_SUCCESS) << "in flight: freed when it is done";
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(rig.at), 3);
  EXPECT_EQ(rig.cu.cuGraphLaunch(exec, rig.b), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("use of executable graph 1 after it was destroyed");
}

TEST(SimCudaCapture, UnjoinedForkFailsTheEndAndGivesNoGraph) {
  CaptureRig rig;
  const CUevent fork = rig.event();
  rig.begin();
  rig.cu.cuEventRecord(fork, rig.a);
  rig.cu.cuStreamWaitEvent(rig.b, fork, 0);
  rig.fill(rig.b, rig.at, 1, 1);
  EXPECT_EQ(rig.end(), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  rig.expect_failure("cuStreamEndCapture: a stream that joined capture 1 was not waited for");
  EXPECT_EQ(rig.status(rig.b), CU_STREAM_CAPTURE_STATUS_NONE);
}

// Each of these conflicts with the capture whatever the thread's mode is, and invalidates it.
TEST(SimCudaCapture, WaitingForAndQueryingWhatIsCapturedFailsAndInvalidates) {
  struct Case {
    const char* failure;
    CUresult code;
    std::function<CUresult(CaptureRig&, CUevent)> call;
  };
  const Case cases[] = {
      {"cuStreamSynchronize: waiting for stream 1", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [](CaptureRig& r, CUevent) { return r.cu.cuStreamSynchronize(r.a); }},
      {"cuStreamQuery: querying stream 1", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [](CaptureRig& r, CUevent) { return r.cu.cuStreamQuery(r.a); }},
      {"cuEventSynchronize: waiting for event 1", CUDA_ERROR_CAPTURED_EVENT, [](CaptureRig& r, CUevent e) { return r.cu.cuEventSynchronize(e); }},
      {"cuEventQuery: querying event 1", CUDA_ERROR_CAPTURED_EVENT, [](CaptureRig& r, CUevent e) { return r.cu.cuEventQuery(e); }},
  };
  for (const Case& one : cases) {
    CaptureRig rig;
    CUstreamCaptureMode mode = kRelaxed;
    rig.cu.cuThreadExchangeStreamCaptureMode(&mode);
    const CUevent event = rig.event();
    rig.begin();
    rig.cu.cuEventRecord(event, rig.a);
    EXPECT_EQ(one.call(rig, event), one.code);
    rig.expect_failure(one.failure);
    EXPECT_EQ(rig.status(rig.a), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EXPECT_EQ(rig.fill(rig.a, rig.at, 1, 1), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    rig.expect_failure("which is invalid already");
    EXPECT_EQ(rig.end(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    rig.expect_no_failure();
    ASSERT_EQ(rig.fill(rig.a, rig.at, 1, 1), CUDA_SUCCESS) << "usable again";
  }
}

TEST(SimCudaCapture, WaitForAnEventOfOutsideBreaksIsolation) {
  for (const bool recorded : {true, false}) {
    CaptureRig rig;
    const CUevent event = rig.event();
    if (recorded) rig.cu.cuEventRecord(event, rig.b);
    rig.begin();
    EXPECT_EQ(rig.cu.cuStreamWaitEvent(rig.a, event, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    rig.expect_failure("stream 1 is being captured, and event 1 was not recorded in that capture");
    EXPECT_EQ(rig.end(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
}

TEST(SimCudaCapture, EventOfACaptureThatEndedCanNotBeWaitedFor) {
  CaptureRig rig;
  const CUevent event = rig.event();
  rig.begin();
  rig.cu.cuEventRecord(event, rig.a);
  EXPECT_EQ(rig.end(), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamWaitEvent(rig.b, event, 0), CUDA_ERROR_CAPTURED_EVENT);
  rig.expect_failure("event 1 was last recorded in a capture that has ended");
  EXPECT_EQ(rig.cu.cuEventRecord(event, rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamWaitEvent(rig.a, event, 0), CUDA_SUCCESS);
}

TEST(SimCudaCapture, TwoCapturesDoNotMerge) {
  CaptureRig rig;
  const CUevent event = rig.event();
  rig.begin();
  ASSERT_EQ(rig.cu.cuStreamBeginCapture(rig.b, kGlobal), CUDA_SUCCESS);
  rig.cu.cuEventRecord(event, rig.a);
  EXPECT_EQ(rig.cu.cuStreamWaitEvent(rig.b, event, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
  rig.expect_failure("stream 2 and event 1 are in different captures");
  CUgraph graph = nullptr;
  EXPECT_EQ(rig.cu.cuStreamEndCapture(rig.b, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(rig.end(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST(SimCudaCapture, EndMustBeOfTheStreamAndThreadThatBegan) {
  CaptureRig rig;
  CUgraph graph = nullptr;
  EXPECT_EQ(rig.cu.cuStreamEndCapture(rig.a, &graph), CUDA_ERROR_ILLEGAL_STATE);
  rig.expect_failure("stream 1 is not being captured");
  rig.begin(kLocal);
  EXPECT_EQ(rig.cu.cuStreamBeginCapture(rig.a, kLocal), CUDA_ERROR_ILLEGAL_STATE);
  rig.expect_failure("stream 1 is being captured already");
  in_thread(rig, kGlobal, [&] { EXPECT_EQ(rig.cu.cuStreamEndCapture(rig.a, &graph), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD); });
  rig.expect_failure("capture 1 began in another thread");
  EXPECT_EQ(rig.end(), CUDA_SUCCESS);
  rig.begin(kRelaxed);
  in_thread(rig, kGlobal, [&] { EXPECT_EQ(rig.end(), CUDA_SUCCESS); });
  const CUevent fork = rig.event();
  rig.begin();
  rig.cu.cuEventRecord(fork, rig.a);
  rig.cu.cuStreamWaitEvent(rig.b, fork, 0);
  EXPECT_EQ(rig.cu.cuStreamEndCapture(rig.b, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  rig.expect_failure("capture 3 began in another stream than 2");
  EXPECT_EQ(rig.end(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

// The table of cuThreadExchangeStreamCaptureMode: capture's mode, this thread's mode, whether this thread began it; whether unsafe calls are refused.
TEST(SimCudaCapture, UnsafeCallsFollowTheModesOfCaptureAndThread) {
  struct Case {
    CUstreamCaptureMode capture, thread;
    bool same_thread, refused;
  };
  const Case cases[] = {
      {kGlobal, kGlobal, true, true},   {kGlobal, kLocal, true, true},   {kGlobal, kRelaxed, true, false},
      {kLocal, kGlobal, true, true},    {kLocal, kLocal, true, true},    {kLocal, kRelaxed, true, false},
      {kRelaxed, kGlobal, true, false}, {kRelaxed, kLocal, true, false}, {kRelaxed, kRelaxed, true, false},
      {kGlobal, kGlobal, false, true},  {kGlobal, kLocal, false, false}, {kGlobal, kRelaxed, false, false},
      {kLocal, kGlobal, false, false},  {kRelaxed, kGlobal, false, false},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(::testing::Message() << one.capture << ' ' << one.thread << ' ' << one.same_thread);
    CaptureRig rig;
    rig.begin(one.capture);
    CUdeviceptr at = 0;
    const auto allocate = [&] {
      EXPECT_EQ(rig.cu.cuMemAlloc(&at, 1), one.refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS);
      if (at != 0) {
        EXPECT_EQ(rig.cu.cuMemFree(at), CUDA_SUCCESS);
      }
    };
    if (one.same_thread) {
      CUstreamCaptureMode mode = one.thread;
      rig.cu.cuThreadExchangeStreamCaptureMode(&mode);
      allocate();
      rig.cu.cuThreadExchangeStreamCaptureMode(&mode);
    } else {
      in_thread(rig, one.thread, allocate);
    }
    if (one.refused) rig.expect_failure("cuMemAlloc: is unsafe during capture 1");
    EXPECT_EQ(rig.end(), one.refused ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
    rig.expect_no_failure();
  }
}

TEST(SimCudaCapture, EveryUnsafeCallIsRefusedWhileAnotherThreadCapturesGlobally) {
  CaptureRig rig;
  const CUdeviceptr spare = rig.alloc(1);
  void* pinned = rig.pin(1);
  const CUevent event = rig.event();
  CUlibrary library = nullptr;
  void* out = nullptr;
  unsigned char pageable = 0;
  using Call = std::pair<const char*, std::function<CUresult()>>;
  const Call calls[] = {
      {"cuMemFree", [&] { return rig.cu.cuMemFree(spare); }},
      {"cuMemHostAlloc", [&] { return rig.cu.cuMemHostAlloc(&out, 1, 0); }},
      {"cuMemFreeHost", [&] { return rig.cu.cuMemFreeHost(pinned); }},
      {"cuStreamSynchronize", [&] { return rig.cu.cuStreamSynchronize(rig.b); }},
      {"cuStreamQuery", [&] { return rig.cu.cuStreamQuery(rig.b); }},
      {"cuEventQuery", [&] { return rig.cu.cuEventQuery(event); }},
      {"cuEventSynchronize", [&] { return rig.cu.cuEventSynchronize(event); }},
      {"cuMemcpyDtoHAsync", [&] { return rig.cu.cuMemcpyDtoHAsync(&pageable, rig.at, 1, rig.b); }},
      {"cuLibraryLoadData", [&] { return rig.cu.cuLibraryLoadData(&library, "", nullptr, nullptr, 0, nullptr, nullptr, 0); }},
      {"cuLibraryUnload", [&] { return rig.cu.cuLibraryUnload(rig.library); }},
  };
  for (const Call& one : calls) {
    rig.begin(kGlobal);
    in_thread(rig, kGlobal, [&] { EXPECT_EQ(one.second(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) << one.first; });
    rig.expect_failure(std::string(one.first) + ": is unsafe during capture");
    EXPECT_EQ(rig.end(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) << one.first;
  }
  in_thread(rig, kRelaxed, [&] {
    EXPECT_EQ(rig.cu.cuEventQuery(event), CUDA_SUCCESS);
    EXPECT_EQ(rig.fill(rig.b, rig.at, 1, 1), CUDA_SUCCESS);
    EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  });
}

TEST(SimCudaCapture, GraphLaunchedInACaptureBecomesItsNode) {
  CaptureRig rig;
  rig.begin();
  rig.add(rig.a, rig.at, 1, 1);
  CUgraphExec inner = rig.finish();
  rig.begin();
  ASSERT_EQ(rig.cu.cuGraphLaunch(inner, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuGraphLaunch(inner, rig.a), CUDA_SUCCESS);
  CUgraphExec outer = rig.finish();
  ASSERT_EQ(rig.cu.cuGraphLaunch(outer, rig.b), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(rig.at), 2);
  rig.cu.cuGraphExecDestroy(inner);
  rig.cu.cuGraphExecDestroy(outer);
}

TEST(SimCudaCapture, BodyOfAnotherLibraryIsStreamWorkAndReplayed) {
  CaptureRig rig;
  int runs = 0;
  rig.begin();
  ASSERT_EQ(rig.sim.enqueue(rig.a, "product", {{rig.at, 8}}, [&] { ++runs; }), CUDA_SUCCESS);
  CUgraphExec exec = rig.finish();
  EXPECT_EQ(runs, 0);
  rig.cu.cuGraphLaunch(exec, rig.a);
  rig.cu.cuGraphLaunch(exec, rig.a);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(runs, 2);
  ASSERT_EQ(rig.sim.enqueue(rig.a, "product", {{rig.at, 9}}, [&] { ++runs; }), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  rig.expect_failure("product: 9 B at ");
  EXPECT_EQ(runs, 2);
  rig.cu.cuGraphExecDestroy(exec);
}

}  // namespace
}  // namespace paramwire::testing
