// Page-locked memory that can't be had, memory given back and taken again (CASES UP-35), and a child of fork().
#include "gpu/case_make.hpp"
#include "gpu/session_rig.hpp"

#include <sys/wait.h>
#include <unistd.h>

namespace paramwire::gpu {
namespace {

using namespace cuda;

class GpuMemory : public GpuTest {
 protected:
  static void expect_round_trip(const Bed& on, const HostMemory& host, std::uint8_t value) {
    const DeviceMemory memory = must(on.allocate(host.size()));
    const Current current(*on.device);
    std::fill(host.span().begin(), host.span().end(), std::byte{value});
    must(on.stream.to_device(memory.address(), host.span()));
    must(on.stream.synchronize());
    std::fill(host.span().begin(), host.span().end(), std::byte{0});
    must(on.stream.to_host(host.span(), memory.address()));
    must(on.stream.synchronize());
    EXPECT_TRUE(std::all_of(host.span().begin(), host.span().end(), [&](std::byte byte) { return byte == std::byte{value}; }));
  }
};

CUresult no_pinned_memory(void**, std::size_t, unsigned) { return CUDA_ERROR_OUT_OF_MEMORY; }

TEST_F(GpuMemory, WithoutPageLockedMemoryPlainMemoryDoes) {
  auto table = std::make_shared<Driver>(*world_->driver);
  table->cuMemHostAlloc = no_pinned_memory;
  world_->driver = table;
  {
    const Bed on = bed();
    const HostMemory host = must(HostMemory::allocate(on.device, 300'001));
    EXPECT_FALSE(host.pinned());
    expect_round_trip(on, host, 0x37);
  }
  SessionRig rig(*world_, oracle::small_llama(), DType::kF32, 32);
  const oracle::Tensors tensors = rig.tensors(3);
  rig.load(tensors);
  const Token token = 60;
  EXPECT_LE(largest_difference(must(rig.step(token)), rig.cpu_logits(tensors, {&token, 1})), kLogitTolerance);
}

TEST_F(GpuMemory, MoreThanThereIsIsBackpressureAndWhatFollowsIsWhole) {
  const Bed on = bed();
  const auto device = on.allocate(std::uint64_t{1} << 48);
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.error().code(), Code::kBackpressure) << device.error().to_string();
#if !defined(__SANITIZE_ADDRESS__)  // which ends the process over such a size
  const auto host = HostMemory::allocate(on.device, std::uint64_t{1} << 50);
  ASSERT_FALSE(host.ok());
  EXPECT_EQ(host.error().code(), Code::kBackpressure) << host.error().to_string();
#endif
  expect_round_trip(on, must(HostMemory::allocate(on.device, 70'000)), 0x11);
}

TEST_F(GpuMemory, CyclesOfAllocationLeaveNoErrorAndNoLessMemory) {
  const Bed on = bed();
  expect_round_trip(on, must(HostMemory::allocate(on.device, 1)), 1);
  const std::uint64_t free_before = on.device->free_bytes();
  const std::uint64_t bytes_max = world_->simulated ? 200'000 : 64'000'000;
  for (std::uint32_t cycle = 0; cycle < 64; ++cycle) {
    const HostMemory host = must(HostMemory::allocate(on.device, 1 + cycle * std::uint64_t{7919} * 997 % bytes_max));
    EXPECT_TRUE(host.pinned());
    expect_round_trip(on, host, static_cast<std::uint8_t>(cycle + 1));
  }
  // Other processes may allocate meanwhile; a leak of these cycles would be some 2 GB on a GPU.
  EXPECT_GE(on.device->free_bytes() + (std::uint64_t{256} << 20), free_before);
  // An error that stuck to the context would come out of the next launch.
  const DeviceMemory one = must(on.upload(bytes_of<float>({1})));
  const Current current(*on.device);
  const PairArgs args{.left = one.at<const float>(), .right = one.at<const float>(), .out = one.at<float>(), .out16 = nullptr, .half = Half::kNone, .count = 1};
  must(on.module->launch(on.stream, Kernel::k_add, pair_launch(args), args));
  EXPECT_EQ(must(on.download_as<float>(one, 1))[0], 2.0F);
}

// In the child. returns: what is wrong, as a status; 0: all as it must be
int check_child(const Bed& on, SessionRig& rig, bool simulated) {
  const Token token = 3;
  const auto step = rig.session().begin({&token, 1});
  if (step.ok() || step.error().code() != Code::kInvalid) return 1;
  const auto memory = DeviceMemory::allocate(on.device, 4096, "a child's buffer");
  if (memory.ok() || memory.error().code() != Code::kInvalid) return 2;
  const auto pinned = HostMemory::allocate(on.device, 4096);
  if (pinned.ok() || pinned.error().code() != Code::kInvalid) return 3;
  const Current current(*on.device);
  if (current.status().ok()) return 4;
  if (simulated) return 0;  // which does not know that it was forked
  const auto driver = open_driver();
  if (!driver.ok()) return 5;
  const auto anew = Device::open(*driver, 0);
  if (anew.ok() || (anew.error().code() != Code::kUnavailable && anew.error().code() != Code::kInvalid)) return 6;
  return 0;
}

TEST_F(GpuMemory, AChildOfForkGetsTypedErrorsAndTheParentGoesOn) {
  const Bed on = bed();
  SessionRig rig(*world_, oracle::small_llama(), DType::kF32, 32);
  const oracle::Tensors tensors = rig.tensors(3);
  rig.load(tensors);
  const Token tokens[] = {60, 61};
  EXPECT_LE(largest_difference(must(rig.step(tokens[0])), rig.cpu_logits(tensors, {tokens, 1})), kLogitTolerance);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(check_child(on, rig, world_->simulated));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "the child died of signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_LE(largest_difference(must(rig.step(tokens[1])), rig.cpu_logits(tensors, tokens)), kLogitTolerance);
}

}  // namespace
}  // namespace paramwire::gpu
