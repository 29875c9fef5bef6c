// Casts between float32 and the 16-bit floats.
//
// Narrowing rounds to nearest, ties to even (IEEE 754-2019, 4.3.1). Infinities and signed zeros stay. A NaN stays a NaN: quiet, with
// its sign and the top bits of its payload. Subnormals are results as any other: nothing is flushed. Widening is exact,
// signalling NaNs become quiet. The vector bodies (Highway, chosen at run time) give the bits of the scalar ones.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace paramwire {

// What becomes of finite values that round beyond the largest finite one (65504 in float16, 0x7f7f in bfloat16).
enum class Overflow : std::uint8_t {
  kInfinity,  // IEEE 754
  kSaturate,  // the largest finite value of that sign; infinities stay infinities
};

// Cast `source` elements of `from` to `target`, elements of `to`: f32 to f16 or bf16, or back. Any alignment; no overlap.
// returns: how many finite values overflowed; 0 when widening
// errors:  kInvalid: other dtypes, sizes that are not those of one element count
// threads: any
Result<std::uint64_t> cast_elements(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target,
                                    Overflow overflow = Overflow::kInfinity);

// One element, bit by bit: the definition that every vector body is tested against.
std::uint16_t f16_from_f32(std::uint32_t bits) noexcept;
std::uint16_t bf16_from_f32(std::uint32_t bits) noexcept;
std::uint32_t f32_from_f16(std::uint16_t bits) noexcept;
std::uint32_t f32_from_bf16(std::uint16_t bits) noexcept;

// The vector body of this process: "avx3", "avx2", "sse4", ... For `doctor` and bench records.
std::string_view cast_implementation() noexcept;

}  // namespace paramwire
