// The version clock: the newest committed version and its root. Pure; caller locks.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <array>
#include <cstddef>
#include <optional>

namespace paramwire {

class VersionClock {
 public:
  using Root = std::array<std::byte, 32>;
  // errors: kStale when `base` is not the newest; kInvalid when `next` is not above it.
  Status commit(const std::optional<Version>& base, Version next, const Root& root);
  const std::optional<Version>& newest() const noexcept { return newest_; }
  const Root& root() const noexcept { return root_; }

 private:
  std::optional<Version> newest_;
  Root root_{};
};

}  // namespace paramwire
