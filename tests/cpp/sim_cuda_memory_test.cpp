// The simulated CUDA device: its memory, pinned memory and copies, and that each wrong use of them is found.
#include "support/sim_cuda_rig.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <set>
#include <thread>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace paramwire::testing {
namespace {

// Whether this process may read the byte: write(2) says EFAULT where it may not, and nobody dies.
bool host_can_read(const void* at) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  const bool out = ::write(ends[1], at, 1) == 1;
  if (!out) {
    EXPECT_EQ(errno, EFAULT);
  }
  ::close(ends[0]);
  ::close(ends[1]);
  return out;
}

// ---------------------------------------------------------------- memory

TEST(SimCudaMemory, HostCanNotTouchDeviceMemoryButPinnedMemory) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(64);
  EXPECT_FALSE(host_can_read(reinterpret_cast<const void*>(at)));
  EXPECT_TRUE(host_can_read(rig.pin(64)));
  ASSERT_EQ(rig.fill(rig.a, at, 1, 64), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_FALSE(host_can_read(reinterpret_cast<const void*>(at))) << "after work ran";
}

// A thread that is there before, while a kernel runs in another.
TEST(SimCudaMemory, OtherThreadsCanNotTouchDeviceMemoryWhileWorkRuns) {
  std::atomic<const void*> asked{nullptr};
  std::atomic<int> answer{-1};
  std::thread other([&] {
    const void* at = nullptr;
    while ((at = asked.load()) == nullptr) std::this_thread::yield();
    answer.store(host_can_read(at) ? 1 : 0);
  });
  SimCudaOptions options;
  options.kernels["ask"] = {sizeof(AddArgs), [&](const SimLaunch&, const void* arguments) {
                              AddArgs args;
                              std::memcpy(&args, arguments, sizeof args);
                              asked.store(reinterpret_cast<const void*>(args.target));
                              while (answer.load() < 0) std::this_thread::yield();
                              EXPECT_TRUE(host_can_read(reinterpret_cast<const void*>(args.target))) << "the kernel's own thread";
                              return "";
                            }};
  SimRig rig(options);
  AddArgs args{rig.alloc(8), 0, 0};
  void* parameters[] = {&args};
  EXPECT_EQ(rig.cu.cuLaunchKernel(rig.kernel("ask"), 1, 1, 1, 32, 1, 1, 0, rig.a, parameters, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  if (asked.load() == nullptr) asked.store(&asked);  // it did not run: let the thread end
  other.join();
  if (!rig.sim.protects_per_thread()) GTEST_SKIP() << "this processor or kernel has no protection keys";
  EXPECT_EQ(answer.load(), 0);
}

#if defined(__SANITIZE_ADDRESS__)
TEST(SimCudaMemory, AddressSanitizerKnowsEveryByteOutsideOfLiveAllocations) {
  SimRig rig;
  CUdeviceptr freed = 0;
  const CUdeviceptr at = rig.alloc(13);
  ASSERT_EQ(rig.cu.cuMemAlloc(&freed, 8), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemFree(freed), CUDA_SUCCESS);
  const auto poisoned = [](CUdeviceptr byte) { return __asan_address_is_poisoned(reinterpret_cast<const void*>(byte)) != 0; };
  EXPECT_TRUE(poisoned(at - 1));
  EXPECT_FALSE(poisoned(at));
  EXPECT_FALSE(poisoned(at + 12));
  EXPECT_TRUE(poisoned(at + 13));
  EXPECT_TRUE(poisoned(freed));
}
#endif

TEST(SimCudaMemory, AllocationsAreAlignedTo256AndNoBetterPoisonedAndNeverReused) {
  SimRig rig;
  std::set<CUdeviceptr> seen;
  for (int i = 0; i < 20; ++i) {
    CUdeviceptr at = 0;
    ASSERT_EQ(rig.cu.cuMemAlloc(&at, 100), CUDA_SUCCESS);
    EXPECT_EQ(at % 512, 256U);
    EXPECT_EQ(rig.sim.peek(at, 100), std::vector<std::byte>(100, kSimPoison));
    EXPECT_TRUE(seen.insert(at).second);
    ASSERT_EQ(rig.cu.cuMemFree(at), CUDA_SUCCESS);
  }
  EXPECT_EQ(rig.pin(1)[0], std::to_integer<unsigned char>(kSimPoison));
}

TEST(SimCudaMemory, OutOfMemoryAtTheSizeOfTheDeviceAndOfPinnedMemory) {
  SimRig rig({.device_bytes = 1000, .pinned_bytes = 500});
  CUdeviceptr at = 0;
  void* host = nullptr;
  EXPECT_EQ(rig.cu.cuMemAlloc(&at, 1001), CUDA_ERROR_OUT_OF_MEMORY);
  rig.alloc(600);
  EXPECT_EQ(rig.cu.cuMemAlloc(&at, 401), CUDA_ERROR_OUT_OF_MEMORY);
  std::size_t free = 0, total = 0;
  ASSERT_EQ(rig.cu.cuMemGetInfo(&free, &total), CUDA_SUCCESS);
  EXPECT_EQ(free, 400U);
  EXPECT_EQ(total, 1000U);
  rig.alloc(400);
  EXPECT_EQ(rig.cu.cuMemHostAlloc(&host, 501, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(rig.sim.counters().device_bytes_peak, 1000U);
  rig.expect_no_failure();
}

TEST(SimCudaMemory, DoubleFreesAndFreesOfWhatWasNotAllocatedAreFound) {
  SimRig rig;
  CUdeviceptr at = 0;
  ASSERT_EQ(rig.cu.cuMemAlloc(&at, 64), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuMemFree(at + 8), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("is inside of allocation 1");
  EXPECT_EQ(rig.cu.cuMemFree(at), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuMemFree(at), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("cuMemFree: allocation 1 (64 B at ");
  EXPECT_EQ(rig.cu.cuMemFree(4096), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("was never allocated");
  void* host = nullptr;
  ASSERT_EQ(rig.cu.cuMemHostAlloc(&host, 64, 0), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuMemFreeHost(host), CUDA_SUCCESS);
  EXPECT_FALSE(host_can_read(host));
  EXPECT_EQ(rig.cu.cuMemFreeHost(host), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("cuMemFreeHost: pinned allocation 1 (64 B at ");
}

TEST(SimCudaMemory, CopiesOutsideOfAllocationsAreRefusedAtTheCall) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(64);
  unsigned char bytes[128] = {};
  EXPECT_EQ(rig.cu.cuMemcpyHtoDAsync(at, bytes, 65, rig.a), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("1 B past the end of allocation 1");
  EXPECT_EQ(rig.fill(rig.a, at - 1, 0, 2), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("outside of every allocation");
  EXPECT_EQ(rig.cu.cuMemcpyDtoHAsync(reinterpret_cast<void*>(at), at, 8, rig.a), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("is device memory, not the host's");
  EXPECT_EQ(rig.cu.cuMemcpyHtoDAsync(at, rig.pin(8), 9, rig.a), CUDA_ERROR_INVALID_VALUE);
  rig.expect_failure("pinned memory: 9 B at ");
}

TEST(SimCudaMemory, FreeingWhatPendingWorkUsesIsFoundAtTheFreeAndWhenTheWorkRuns) {
  SimRig rig;
  CUdeviceptr at = 0;
  ASSERT_EQ(rig.cu.cuMemAlloc(&at, 64), CUDA_SUCCESS);
  ASSERT_EQ(rig.add(rig.a, at, 64, 1), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemFree(at), CUDA_SUCCESS);
  rig.expect_failure("is used by work that nobody waited for: kernel add on stream 1");
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  rig.expect_failure("kernel add: the pointer at byte 0 of its arguments: 0 B at ");
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS) << "sticky";
  rig.expect_no_failure();
}

// Instrumented stores past the end would end the process in a build with AddressSanitizer, which is what it is for; here the guards are tested.
__attribute__((no_sanitize("address"))) void store(CUdeviceptr at) { *reinterpret_cast<volatile unsigned char*>(at) = 0; }

TEST(SimCudaMemory, KernelThatWritesPastAnAllocationIsFoundByTheGuards) {
  for (const std::int64_t where : {-1, 64, 70, 319}) {
    SimCudaOptions options;
    options.kernels["wild"] = {sizeof(AddArgs), [&](const SimLaunch&, const void* arguments) {
                                 AddArgs args;
                                 std::memcpy(&args, arguments, sizeof args);
                                 store(args.target + static_cast<CUdeviceptr>(where));
                                 return "";
                               }};
    SimRig rig(options);
    AddArgs args{rig.alloc(64), 0, 0};
    void* parameters[] = {&args};
    ASSERT_EQ(rig.cu.cuLaunchKernel(rig.kernel("wild"), 1, 1, 1, 32, 1, 1, 0, rig.a, parameters, nullptr), CUDA_SUCCESS);
    EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS) << where;
    rig.expect_failure(where < 0 ? "kernel wild: wrote 1 B before the beginning of allocation 1" : "B past the end of allocation 1");
  }
}

TEST(SimCudaMemory, PointerAttributesTellDevicePinnedAndPageableMemory) {
  SimRig rig;
  const auto ask = [&](CUdeviceptr at) {
    unsigned type = 99;
    int device = 99;
    CUdeviceptr begin = 99;
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
    void* out[] = {&type, &device, &begin};
    EXPECT_EQ(rig.cu.cuPointerGetAttributes(3, which, out, at), CUDA_SUCCESS);
    return std::tuple(type, device, begin);
  };
  const CUdeviceptr at = rig.alloc(64);
  const unsigned char* pinned = rig.pin(64);
  int pageable = 0;
  EXPECT_EQ(ask(at + 5), std::tuple(CU_MEMORYTYPE_DEVICE, 0, at));
  EXPECT_EQ(ask(reinterpret_cast<CUdeviceptr>(pinned)), std::tuple(CU_MEMORYTYPE_HOST, 0, reinterpret_cast<CUdeviceptr>(pinned)));
  EXPECT_EQ(ask(reinterpret_cast<CUdeviceptr>(&pageable)), std::tuple(0U, CU_DEVICE_INVALID, CUdeviceptr{0}));
}

// ---------------------------------------------------------------- copies

TEST(SimCudaCopy, PinnedSourceIsReadWhenTheCopyRunsPageableAtTheCall) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(2);
  unsigned char* pinned = rig.pin(1);
  unsigned char pageable = 1;
  pinned[0] = 1;
  ASSERT_EQ(rig.cu.cuMemcpyHtoDAsync(at, pinned, 1, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemcpyHtoDAsync(at + 1, &pageable, 1, rig.a), CUDA_SUCCESS);
  pinned[0] = 2;
  pageable = 2;
  EXPECT_EQ(rig.byte_at(at), 0xCB) << "nobody has waited";
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.byte_at(at), 2);
  EXPECT_EQ(rig.byte_at(at + 1), 1);
}

TEST(SimCudaCopy, ToPinnedMemoryIsLateToPageableMemoryIsSynchronous) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(1);
  unsigned char* pinned = rig.pin(1);
  unsigned char pageable = 0;
  ASSERT_EQ(rig.fill(rig.a, at, 7, 1), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemcpyDtoHAsync(pinned, at, 1, rig.a), CUDA_SUCCESS);
  EXPECT_EQ(pinned[0], 0xCB);
  ASSERT_EQ(rig.cu.cuMemcpyDtoHAsync(&pageable, at, 1, rig.a), CUDA_SUCCESS);
  EXPECT_EQ(pageable, 7);
  EXPECT_EQ(pinned[0], 7) << "the stream's earlier work";
}

TEST(SimCudaCopy, PinnedMemoryFreedBeforeItsCopyRanIsFound) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(8);
  void* pinned = nullptr;
  ASSERT_EQ(rig.cu.cuMemHostAlloc(&pinned, 8, 0), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemcpyHtoDAsync(at, pinned, 8, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemFreeHost(pinned), CUDA_SUCCESS);
  rig.expect_failure("cuMemFreeHost: pinned allocation 1");
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  rig.expect_failure("copy to device of 8 B to ");
}

TEST(SimCudaCopy, OverlappingCopiesOnTheDeviceAreFound) {
  SimRig rig;
  const CUdeviceptr at = rig.alloc(64);
  ASSERT_EQ(rig.cu.cuMemcpyDtoDAsync(at + 32, at, 32, rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_SUCCESS);
  ASSERT_EQ(rig.cu.cuMemcpyDtoDAsync(at + 31, at, 32, rig.a), CUDA_SUCCESS);
  EXPECT_EQ(rig.cu.cuStreamSynchronize(rig.a), CUDA_ERROR_ILLEGAL_ADDRESS);
  rig.expect_failure("source and target overlap");
}

}  // namespace
}  // namespace paramwire::testing
