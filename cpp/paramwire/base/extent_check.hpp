// What extents of fetched bytes must be, and how they lie, for a caller who checks them and puts them together where they end up (in device memory, say).
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

// Elements that were fetched with their byte planes apart, as codec/byteplane.hpp cuts them: of `size / w` elements of w bytes, byte p of element i is at
// offset + p * size / w + i. Floats have been turned left by one bit. An ExtentCheck of such bytes says what they must be once they are put together.
struct PlanesApart {
  std::uint64_t offset = 0;  // of the first plane in the target
  std::uint32_t size = 0;    // bytes, of all planes
  bool operator==(const PlanesApart&) const noexcept = default;
};

// Compares all of `checks` with `bytes`, the target that they were given for. Any thread.
// errors: kCorrupt for the first extent that is not what it must be, naming its offset, both CRCs, and how many are wrong in all;
//         kInvalid for a check that reaches outside of `bytes`, before anything is compared.
Status verify_extents(std::span<const std::byte> bytes, std::span<const ExtentCheck> checks);

}  // namespace paramwire
