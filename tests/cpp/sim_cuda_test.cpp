// The simulated CUDA device: streams and events as the manual has them.
#include "support/sim_cuda_rig.hpp"

#include <set>

namespace paramwire::testing {
namespace {

TEST(SimCudaStream, OnlyWhatIsWaitedForRuns) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(3);
  const CUevent event = rig.event();
  rig.fill(rig.a, at, 1, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, rig.a), CUDA_SUCCESS);
  rig.fill(rig.a, at + 1, 1, 1);
  rig.fill(rig.b, at + 2, 1, 1);
  EXPECT_EQ(rig.sim.counters().ran, 0U);
  ASSERT_EQ(rig.cu.cuEventSynchronize(event), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 1);
  EXPECT_EQ(rig.byte_at(at + 1), 0xCB) << "later in the stream";
  EXPECT_EQ(rig.byte_at(at + 2), 0xCB) << "another stream";
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at + 1), 0xCB);
  EXPECT_EQ(rig.byte_at(at + 2), 1);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
}

TEST(SimCudaStream, EventsOrderStreamsTransitivelyAndAMissingWaitIsSeen) {
  for (const bool waits : {true, false}) {
    SimRig rig;
    const CUdeviceptr at = rig.alloc(1);
    const CUevent copied = rig.event();
    rig.fill(rig.a, at, 1, 1);
    ASSERT_EQ(rig.cu.cuEventRecord(copied, rig.a), CUDA_SUCCESS);
    if (waits) {
      ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.b, copied, 0), CUDA_SUCCESS);
    }
    ASSERT_EQ(rig.add(rig.b, at, 1, 1), CUDA_SUCCESS);
    ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
    EXPECT_EQ(rig.byte_at(at), waits ? 2 : 0xCC);
    ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  }
}

// Both are needed by what is waited for, and nothing orders them: the newer one runs first, so that luck does not hide it.
TEST(SimCudaStream, UnorderedWorkRunsNewestFirst) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  const CUevent event = rig.event();
  rig.fill(rig.a, at, 1, 1);
  rig.fill(rig.b, at, 2, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, rig.b), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.a, event, 0), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 1);
}

TEST(SimCudaStream, WaitIsForTheRecordAtTheTimeOfTheWait) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(2);
  const CUevent event = rig.event();
  ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.b, event, 0), CUDA_SUCCESS) << "never recorded: nothing";
  rig.fill(rig.a, at, 1, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamWaitEvent(rig.b, event, 0), CUDA_SUCCESS);
  rig.fill(rig.a, at + 1, 1, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.b), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 1);
  EXPECT_EQ(rig.byte_at(at + 1), 0xCB);
  ASSERT_EQ(rig.cu.cuEventSynchronize(event), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at + 1), 1);
}

TEST(SimCudaStream, PollsSayNotReadyAsOftenAsConfiguredThenRunJustThat) {
  SimRig rig({.polls_not_ready = 3});
  const CUdeviceptr at = rig.alloc(2);
  const CUevent event = rig.event();
  EXPECT_EQ(rig.cu.cuEventQuery(event), CUDA_SUCCESS) << "never recorded: done";
  EXPECT_EQ(rig.cu.cuStreamQuery(rig.a), CUDA_SUCCESS) << "empty";
  rig.fill(rig.a, at, 1, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, rig.a), CUDA_SUCCESS);
  rig.fill(rig.a, at + 1, 1, 1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rig.cu.cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(rig.byte_at(at), 0xCB);
  EXPECT_EQ(rig.cu.cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 1);
  EXPECT_EQ(rig.byte_at(at + 1), 0xCB);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rig.cu.cuStreamQuery(rig.a), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(rig.cu.cuStreamQuery(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at + 1), 1);
  rig.expect_no_failure();
}

TEST(SimCudaStream, EagerOrderRunsEachCallAtOnce) {
  SimRig rig({.order = SimOrder::kEager});
  const CUdeviceptr at = rig.alloc(1);
  rig.fill(rig.a, at, 1, 1);
  EXPECT_EQ(rig.byte_at(at), 1);
  EXPECT_EQ(rig.sim.counters().pending, 0U);
}

// Unordered work ends both ways over the seeds, ordered work one way; a seed ends the same way each time.
TEST(SimCudaStream, RandomOrderTriesBothWaysAndKeepsTheRules) {
  const auto race = [](std::uint64_t seed, bool ordered) {
    SimRig rig({.order = SimOrder::kRandom, .seed = seed});
    const CUdeviceptr at = rig.alloc(1);
    const CUevent event = rig.event();
    rig.fill(rig.a, at, 1, 1);
    rig.cu.cuEventRecord(event, rig.a);
    if (ordered) rig.cu.cuStreamWaitEvent(rig.b, event, 0);
    rig.fill(rig.b, at, 2, 1);
    rig.cu.cuEventRecord(event, rig.b);
    rig.cu.cuStreamWaitEvent(rig.a, event, 0);
    EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
    return rig.byte_at(at);
  };
  std::set<int> ends, ordered_ends;
  for (std::uint64_t seed = 1; seed <= 32; ++seed) {
    ends.insert(race(seed, false));
    ordered_ends.insert(race(seed, true));
    EXPECT_EQ(race(seed, false), race(seed, false)) << "seed " << seed;
  }
  EXPECT_EQ(ends, (std::set<int>{1, 2}));
  EXPECT_EQ(ordered_ends, std::set<int>{2});
}

TEST(SimCudaStream, WorkOfADestroyedStreamStillRunsForWhoWaits) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  CUstream stream = nullptr;
  ASSERT_EQ(rig.cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const CUevent event = rig.event();
  rig.fill(stream, at, 1, 1);
  ASSERT_EQ(rig.cu.cuEventRecord(event, stream), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamDestroy(stream), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuEventSynchronize(event), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 1);
}

TEST(SimCudaStream, ElapsedTimeNeedsRecordsThatAreDoneAndEventsThatKeepTime) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  const CUevent from = rig.event(0), to = rig.event(0), timeless = rig.event();
  float ms = 0;
  EXPECT_EQ(rig.cu.cuEventElapsedTime(&ms, from, to), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("never recorded");
  rig.cu.cuEventRecord(from, rig.a);
  rig.fill(rig.a, at, 1, 1);
  rig.cu.cuEventRecord(to, rig.a);
  EXPECT_EQ(rig.cu.cuEventElapsedTime(&ms, from, to), CUDA_ERROR_NOT_READY);
  ASSERT_EQ(rig.cu.cuEventSynchronize(to), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuEventElapsedTime(&ms, from, to), CUDA_SUCCESS);
  EXPECT_FLOAT_EQ(ms, 0.002F);
  EXPECT_EQ(rig.cu.cuEventElapsedTime(&ms, from, timeless), CUDA_ERROR_INVALID_HANDLE);
  rig.expect_failure("keeps no time");
}

}  // namespace
}  // namespace paramwire::testing
