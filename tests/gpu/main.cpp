// gpu_test and gpu_sim_test: the same tests on the machine's own driver and on the simulated device.
//
// status: 0 all passed, 1 some failed, 77 nothing to run on, with the reason on stderr
#include "gpu/world.hpp"

#include <gtest/gtest.h>

#include <cstdio>

int main(int count, char** words) {
  ::testing::InitGoogleTest(&count, words);
  if (!GTEST_FLAG_GET(list_tests)) {
    const auto world = paramwire::gpu::open_world();
    if (!world.ok()) {
      std::fprintf(stderr, "gpu_test: nothing to run on: %s\n", world.error().to_string().c_str());
      return world.error().code() == paramwire::Code::kUnavailable ? paramwire::gpu::kSkipped : 1;
    }
  }
  return RUN_ALL_TESTS();
}
