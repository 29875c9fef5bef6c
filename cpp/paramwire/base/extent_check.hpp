// What extents of fetched bytes must be, for a caller who checks them where they end up (in device memory, say) in place of the transport.
#pragma once

#include "paramwire/base/error.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

namespace paramwire {

// One extent of a block's stored bytes: 64 KiB, less at the block's end.
struct ExtentCheck {
  std::uint64_t offset = 0;  // of its first byte in the target that it was fetched into
  std::uint32_t size = 0;    // bytes
  std::uint32_t crc32c = 0;  // of these bytes, as base/crc computes it
  bool operator==(const ExtentCheck&) const noexcept = default;
};

// Compares all of `checks` with `bytes`, the target that they were given for. Any thread.
// errors: kCorrupt for the first extent that is not what it must be, naming its offset, both CRCs, and how many are wrong in all;
//         kInvalid for a check that reaches outside of `bytes`, before anything is compared.
Status verify_extents(std::span<const std::byte> bytes, std::span<const ExtentCheck> checks);

}  // namespace paramwire
