// The executor that runs kernel bodies in tests finds what a GPU would hide: each fault is made once, on purpose.
#include "support/lane_executor.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace paramwire::testing {
namespace {

using cuda::Launch;

struct Args {
  std::uint32_t* out;
  float* floats;
  std::uint32_t count;
};

#if defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kSeeds = 3;  // one of each order; a fiber costs it milliseconds
#else
constexpr std::uint64_t kSeeds = 9;
#endif

Launch launch_of(std::uint32_t blocks, std::uint32_t threads, std::uint32_t shared_bytes = 0) {
  return Launch{.blocks = {blocks, 1, 1}, .threads = threads, .shared_bytes = shared_bytes};
}

TEST(LaneExecutor, EveryThreadOfEveryBlockRunsOnceInEveryOrder) {
  LaneExecutor executor;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (std::uint32_t threads : {32U, 64U, 256U, 1024U}) {
      std::vector<std::uint32_t> out(std::size_t{2} * 3 * 4 * threads, 0);
      const Args args{.out = out.data(), .floats = nullptr, .count = 0};
      const Launch launch{.blocks = {2, 3, 4}, .threads = threads, .shared_bytes = 0};
      const std::string fault = run_grid(executor, "fill", launch, args, seed, [](const HostLane& lane, const Args& a) {
        const std::uint32_t block = (lane.block_z() * lane.blocks_y() + lane.block_y()) * lane.blocks_x() + lane.block_x();
        if (lane.thread() % 3 == 0 || lane.thread() % 3 == 1) lane.sync();  // both ways to the one barrier
        else lane.sync();
        a.out[block * lane.threads() + lane.warp() * 32 + lane.lane_in_warp()] += 1 + lane.blocks_z();
      });
      EXPECT_EQ(fault, "") << "seed " << seed;
      for (const std::uint32_t value : out) ASSERT_EQ(value, 5U) << "seed " << seed << ", " << threads << " threads";
    }
  }
}

TEST(LaneExecutor, WarpOperationsGiveEveryLaneWhatAButterflyGives) {
  LaneExecutor executor;
  std::vector<float> floats(3 * 64 * 3);
  const Args args{.out = nullptr, .floats = floats.data(), .count = 0};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string fault = run_grid(executor, "warps", launch_of(3, 64), args, seed, [](const HostLane& lane, const Args& a) {
      const float mine = 0.1F * static_cast<float>(lane.thread() + 1) + static_cast<float>(lane.block_x());
      float* out = a.floats + (lane.block_x() * lane.threads() + lane.thread()) * 3;
      float butterfly = mine;
      for (unsigned mask = 16; mask > 0; mask /= 2) butterfly += lane.warp_xor(butterfly, mask);
      out[0] = lane.warp_sum(mine) - butterfly;
      out[1] = lane.warp_max(lane.lane_in_warp() == 5 ? std::nanf("") : mine);
      out[2] = static_cast<float>(lane.warp_xor(lane.thread(), 7));
    });
    ASSERT_EQ(fault, "");
    for (std::uint32_t i = 0; i < 3 * 64; ++i) {
      const std::uint32_t thread = i % 64;
      const auto block = static_cast<float>(i / 64);
      ASSERT_EQ(floats[i * 3], 0.0F) << "bit for bit the butterfly's";
      ASSERT_EQ(floats[i * 3 + 1], 0.1F * static_cast<float>(thread / 32 * 32 + 32) + block) << "fmax leaves NaN out, as the device's";
      ASSERT_EQ(floats[i * 3 + 2], static_cast<float>(thread ^ 7));
    }
  }
}

TEST(LaneExecutor, SharedMemoryIsTheBlocksOwnAndBeginsWithNaN) {
  LaneExecutor executor;
  std::vector<float> floats(8);
  std::vector<std::uint32_t> out(8, 0);
  const Args args{.out = out.data(), .floats = floats.data(), .count = 0};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string fault = run_grid(executor, "shared", launch_of(8, 64, 64 * 4), args, seed, [](const HostLane& lane, const Args& a) {
      auto* shared = lane.shared<float>();
      if (!std::isnan(shared[lane.thread()])) lane.atomic_add(a.out, 1);
      lane.sync();
      shared[lane.thread()] = static_cast<float>(lane.thread() + lane.block_x());
      lane.sync();
      if (lane.thread() == 0) a.floats[lane.block_x()] = shared[63];
    });
    ASSERT_EQ(fault, "");
    EXPECT_EQ(out[0], 0U);
    for (std::uint32_t i = 0; i < 8; ++i) ASSERT_EQ(floats[i], static_cast<float>(63 + i));
  }
}

TEST(LaneExecutor, BarrierThatSomeThreadsPassByIsAFault) {
  LaneExecutor executor;
  const Args args{};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string ended = run_grid(executor, "pw_early", launch_of(2, 64), args, seed, [](const HostLane& lane, const Args&) {
      if (lane.thread() != 40) lane.sync();
    });
    EXPECT_NE(ended.find("pw_early: block ("), std::string::npos) << ended;
    EXPECT_NE(ended.find("a barrier was reached by 63 of 64 threads, 1 have ended"), std::string::npos) << ended;
    const std::string twice = run_grid(executor, "pw_twice", launch_of(1, 64), args, seed, [](const HostLane& lane, const Args&) {
      for (std::uint32_t i = 0; i < 3 + lane.warp(); ++i) lane.sync();
    });
    EXPECT_NE(twice.find("a barrier was reached by 32 of 64 threads, 32 have ended"), std::string::npos) << twice;
  }
}

TEST(LaneExecutor, MissingBarrierGivesAWrongResultInSomeOrder) {
  LaneExecutor executor;
  std::uint32_t wrong_reads = 0;
  std::uint32_t wrong_overwrites = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<std::uint32_t> out(128, 0);
    const Args args{.out = out.data(), .floats = nullptr, .count = 0};
    // Reads what another warp may not have written yet.
    ASSERT_EQ(run_grid(executor, "read", launch_of(1, 128, 512), args, seed,
                       [](const HostLane& lane, const Args& a) {
                         auto* shared = lane.shared<std::uint32_t>();
                         shared[lane.thread()] = lane.thread();
                         a.out[lane.thread()] = shared[127 - lane.thread()];
                       }),
              "");
    for (std::uint32_t i = 0; i < 128; ++i) wrong_reads += out[i] != 127 - i ? 1U : 0U;
    // Overwrites in the second round what another warp may not have read in the first: one of the two barriers of a loop is missing.
    ASSERT_EQ(run_grid(executor, "overwrite", launch_of(1, 128, 512), args, seed,
                       [](const HostLane& lane, const Args& a) {
                         auto* shared = lane.shared<std::uint32_t>();
                         std::uint32_t sum = 0;
                         for (std::uint32_t round = 0; round < 4; ++round) {
                           shared[lane.thread()] = round * 1000 + lane.thread();
                           lane.sync();
                           sum += shared[127 - lane.thread()];
                         }
                         a.out[lane.thread()] = sum;
                       }),
              "");
    for (std::uint32_t i = 0; i < 128; ++i) wrong_overwrites += out[i] != 6000 + 4 * (127 - i) ? 1U : 0U;
  }
  EXPECT_GT(wrong_reads, 0U);
  EXPECT_GT(wrong_overwrites, 0U);
}

TEST(LaneExecutor, DivergedShufflesAreFaults) {
  LaneExecutor executor;
  const Args args{};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string some = run_grid(executor, "pw_some", launch_of(1, 64), args, seed, [](const HostLane& lane, const Args&) {
      if (lane.thread() < 48) static_cast<void>(lane.warp_sum(1.0F));
    });
    EXPECT_NE(some.find("pw_some"), std::string::npos) << some;
    EXPECT_NE(some.find("warp_sum"), std::string::npos) << some;
    const std::string masks = run_grid(executor, "pw_masks", launch_of(1, 32), args, seed, [](const HostLane& lane, const Args&) {
      static_cast<void>(lane.warp_xor(1U, lane.thread() < 7 ? 1 : 2));
    });
    EXPECT_NE(masks.find("of mask 2"), std::string::npos) << masks;
    EXPECT_NE(masks.find("of mask 1"), std::string::npos) << masks;
    const std::string kinds = run_grid(executor, "pw_kinds", launch_of(1, 32), args, seed, [](const HostLane& lane, const Args&) {
      static_cast<void>(lane.thread() == 9 ? lane.warp_sum(1.0F) : lane.warp_max(1.0F));
    });
    EXPECT_NE(kinds.find("while lanes of its warp are in"), std::string::npos) << kinds;
    const std::string barrier = run_grid(executor, "pw_barrier", launch_of(1, 64), args, seed, [](const HostLane& lane, const Args&) {
      if (lane.thread() == 3) lane.sync();
      static_cast<void>(lane.warp_sum(1.0F));
      if (lane.thread() != 3) lane.sync();
    });
    EXPECT_NE(barrier.find("pw_barrier"), std::string::npos) << barrier;
  }
  EXPECT_NE(run_grid(executor, "pw_wide", launch_of(1, 32), args, 0,
                     [](const HostLane& lane, const Args&) { static_cast<void>(lane.warp_xor(1U, 32)); })
                .find("a warp has 32 lanes"),
            std::string::npos);
}

#if !defined(__SANITIZE_ADDRESS__)
TEST(LaneExecutor, WritesOutsideOfSharedMemoryAreFaults) {
  LaneExecutor executor;
  for (std::uint32_t size : {1U, 100U, 4096U, 49152U}) {
    for (std::uint32_t past : {0U, 1U, 200U}) {
      const Args args{.out = nullptr, .floats = nullptr, .count = size + past};
      const std::string fault = run_grid(executor, "pw_past", launch_of(3, 64, size), args, 0, [](const HostLane& lane, const Args& a) {
        if (lane.thread() == 63 && lane.block_x() == 1) lane.shared<unsigned char>()[a.count] = 1;
      });
      EXPECT_NE(fault.find("pw_past: block (1, 0, 0)"), std::string::npos) << fault;
      EXPECT_NE(fault.find(std::to_string(past) + " bytes past the launch's " + std::to_string(size) + " bytes"), std::string::npos)
          << fault;
    }
  }
  const Args args{};
  const std::string before = run_grid(executor, "pw_before", launch_of(1, 32, 64), args, 0, [](const HostLane& lane, const Args&) {
    if (lane.thread() == 0) *(lane.shared<unsigned char>() - 4) = 1;
  });
  EXPECT_NE(before.find("4 bytes before its start"), std::string::npos) << before;
}
#endif

TEST(LaneExecutor, GeometryThatADeviceRefusesIsAFault) {
  LaneExecutor executor;
  const Args args{};
  const auto run = [&](const Launch& launch) {
    return run_grid(executor, "pw_geometry", launch, args, 0, [](const HostLane& lane, const Args&) { lane.sync(); });
  };
  EXPECT_NE(run(launch_of(1, 0)), "");
  EXPECT_NE(run(launch_of(1, 33)), "");
  EXPECT_NE(run(launch_of(1, 1056)), "");
  EXPECT_NE(run(launch_of(0, 32)), "");
  EXPECT_NE(run(launch_of(1, 32, 48 * 1024 + 1)), "");
  EXPECT_NE(run(Launch{.blocks = {1, 65536, 1}, .threads = 32, .shared_bytes = 0}), "");
  EXPECT_EQ(run(launch_of(1, 1024, 48 * 1024)), "");
}

TEST(LaneExecutor, WorksAgainAfterAFault) {
  LaneExecutor executor;
  for (int round = 0; round < 5; ++round) {
    std::vector<std::uint32_t> out(1, 0);
    const Args args{.out = out.data(), .floats = nullptr, .count = 0};
    EXPECT_NE(run_grid(executor, "bad", launch_of(1, 256), args, 0,
                       [](const HostLane& lane, const Args&) {
                         if (lane.warp() < 4) lane.sync();
                       }),
              "");
    EXPECT_EQ(run_grid(executor, "good", launch_of(1, 1024), args, 0,
                       [](const HostLane& lane, const Args& a) {
                         lane.sync();
                         lane.atomic_add(a.out, 1);
                       }),
              "");
    EXPECT_EQ(out[0], 1024U);
  }
}

TEST(LaneExecutor, ThreadsWithoutBarriersCostNoSwitches) {
  LaneExecutor executor;
  std::vector<std::uint32_t> out(1, 0);
  const Args args{.out = out.data(), .floats = nullptr, .count = 0};
  ASSERT_EQ(run_grid(executor, "plain", launch_of(100, 256), args, 0,
                     [](const HostLane& lane, const Args& a) { lane.atomic_add(a.out, 1); }),
            "");
  EXPECT_EQ(out[0], 25600U);
  EXPECT_EQ(executor.switches(), 200U) << "into each block and out of it";
  const std::uint64_t before = executor.switches();
  ASSERT_EQ(run_grid(executor, "sums", launch_of(1, 32), args, 0,
                     [](const HostLane& lane, const Args&) {
                       for (int i = 0; i < 100; ++i) static_cast<void>(lane.warp_sum(1.0F));
                     }),
            "");
  EXPECT_LE(executor.switches() - before, 100U * 32 + 64) << "one rendezvous is at most one switch a lane";
}

}  // namespace
}  // namespace paramwire::testing
