// The Coordinator seam: where the epoch and the version clock live. Implementation: `memory`, in this process, with a small
// state file so that a restarted server gets a higher epoch.
//
// The clock moves by compare-and-set, once per publish, never per block. Any thread.
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

class Coordinator {
 public:
  virtual ~Coordinator() = default;
  // The epoch given to this server when it opened the coordinator: higher than any given before. Non-zero.
  virtual std::uint32_t epoch() const = 0;
  virtual std::optional<Version> newest() const = 0;
  // SHA-256 root of the newest version's manifest; zeros before the first publish.
  virtual std::array<std::byte, 32> root() const = 0;
  // In one step: if the newest version is `base` and `next` is above it, `next` with `root` is the newest.
  // errors: kStale naming the version found.
  virtual Status commit(const std::optional<Version>& base, Version next, const std::array<std::byte, 32>& root) = 0;
};

// `spec`: "memory", or "memory:PATH" with a state file. Without a file the epoch is drawn from the clock in seconds since
// 2020, so that restarts still grow; with one it is the stored epoch + 1, on disk before this returns. Either way it is above `epoch_after`: that of the
// checkpoint that the server is restored from, whose versions its readers may have seen.
// errors: kInvalid for an unknown spec or a malformed state file (naming it); kUnavailable with errno when the file can't be
//         read or written.
Result<std::unique_ptr<Coordinator>> open_coordinator(std::string_view spec, std::uint32_t epoch_after = 0);
// One line for each, "etcd" included, which this build lacks: whether a server answers where etcd listens by default.
std::vector<Availability> available_coordinators();

}  // namespace paramwire
