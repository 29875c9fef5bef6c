// What the tests for a GPU share. A test that can't go on throws, so that the others still run: an hour on a GPU is short.
#pragma once

#include "gpu/bed.hpp"
#include "gpu/world.hpp"

#include "paramwire/base/error.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>

namespace paramwire::gpu {

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.error().to_string());
  return std::move(result).value();
}
inline void must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error().to_string());
}

class GpuTest : public ::testing::Test {
 protected:
  GpuTest() : world_(must(open_world())) {}
  const Scale& scale() const { return world_->scale; }
  Bed bed() const { return must(Bed::open(*world_)); }

  const std::unique_ptr<World> world_;
};

}  // namespace paramwire::gpu
