// How tensors that are fetched into device memory go through a half of staging: in which pieces, and which of them together. Pure.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/interop/device_arrays.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace paramwire {

struct DevicePiece {
  std::size_t wanted = 0;          // index of its DeviceFetch
  Shard part;                      // of the tensor
  std::uint64_t target_offset = 0; // bytes behind the DeviceFetch's target
  std::uint64_t bytes = 0;
  std::uint64_t half_offset = 0;   // in its half, 64-byte aligned; 0 for one that is larger than a half, which is alone in its group
};

// Groups in order, each of pieces that fill a half together. A piece is larger than a half only where a single row is.
//
// half_bytes: at least 128 KiB, so that pieces hold whole extents
// errors: kInvalid for a target of the wrong size, naming both; as Snapshot::layout
Result<std::vector<std::vector<DevicePiece>>> plan_device_pieces(const Snapshot& snapshot, std::span<const DeviceFetch> wanted, std::uint64_t half_bytes);

}  // namespace paramwire
