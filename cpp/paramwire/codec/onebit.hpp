// One-bit deltas of fine-tuned weights: the sign of each change, and one scale for a matrix or for each of its rows. **Lossy**: what comes out is
// near the fine-tuned weights, never equal. For many fine-tunes of one base; a checkpoint to resume from needs codec/delta.hpp.
// Layout: wire/FORMAT.md, "One-bit deltas".
//
// source: J. Liu and others, "BitDelta: Your Fine-Tune May Only Be Worth One Bit" (arXiv 2402.10193), section 3.1. With signs s of the changes d, the
//         sum of (d - a s)^2 is least where its derivative -2 sum(s d) + 2 a n is zero: a = sum(s d) / n, the mean of |d|. The same
//         for each row by itself. Weights are changed where their sign is, so no other signs do better.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace paramwire {

inline constexpr std::size_t kOnebitHeaderBytes = 64;

// What shares a scale. Codes are stored: never renumber.
enum class OnebitScale : std::uint8_t {
  kMatrix = 0,  // one for the whole tensor
  kRow = 1,     // one for each index of the first axis, of a tensor of two axes or more; other and empty ones have kMatrix
};

// What a one-bit delta says of itself.
struct OnebitInfo {
  static constexpr bool kLossy = true;  // of every one; its header has the flag, too
  DType dtype = DType::kF32;            // f32, f16 or bf16
  OnebitScale scale = OnebitScale::kMatrix;
  std::uint64_t rows = 0;               // scales stored
  std::uint64_t columns = 0;            // elements to each scale
  std::uint64_t delta_size = 0;         // bytes, header included
  Version base_version;
  std::uint64_t base_crc64 = 0;         // CRC-64/XZ of the base's raw bytes
};

// One-bit delta from `base` to `tuned`, two tensors of `dtype` and `shape`.
//
// dtype:       kF32, kF16, kBF16
// base, tuned: raw bytes, row-major, finite values; unchanged during the call
// errors:      kInvalid: another dtype; a size that is not shape's; a version that is none; NaN or infinity in either, or a scale above what
//              f32 holds, with the index of the first
// threads:     any
Result<std::vector<std::byte>> encode_onebit(DType dtype, const Shape& shape, std::span<const std::byte> base, const Version& base_version,
                                             std::span<const std::byte> tuned, OnebitScale scale);

// Reads what a one-bit delta says of itself and checks all of it but the base: header, sizes, and the CRC of scales and bits.
// errors: kCorrupt, naming the field.    threads: any.
Result<OnebitInfo> read_onebit(std::span<const std::byte> delta);

// Writes base + scale * sign to `out`, element by element in f32, rounded to nearest even to `dtype` (a result beyond the largest finite value of f16
// or bf16 is infinite, as IEEE 754 rounds).
//
// dtype, base, base_version, out: as apply_delta; `out` may be `base` itself, or must not overlap it
// errors:      kInvalid, kStale, kCorrupt as apply_delta. Nothing is written after any of them
// threads:     any; `threads` of them work at once, the caller's own among them, as in apply_delta. The same bytes for any number
Status apply_onebit(std::span<const std::byte> delta, DType dtype, std::span<const std::byte> base,
                    const std::optional<Version>& base_version, std::span<std::byte> out, unsigned threads);

}  // namespace paramwire
