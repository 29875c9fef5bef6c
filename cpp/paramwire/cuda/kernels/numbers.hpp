// Numbers as kernels see them: formats of weights, narrowing, packs of 16 bytes. For bodies only; the same results on host and device.
//
// Casts that are stored have the bits of codec/cast.hpp. Weights that are only multiplied are widened by the hardware's own conversion
// where it has one: the same value, but a NaN may lose its payload.
#pragma once

#include "paramwire/cuda/kernels/compute_args.hpp"
#include "paramwire/cuda/kernels/lane.hpp"

#include <math.h>

#include <cstddef>
#include <cstdint>

#if !defined(__CUDACC__)
#include <bit>
#include <cstring>
#endif

// Before a loop: unrolled that often, so that its loads are in flight together.
#define PARAMWIRE_PRAGMA(text) _Pragma(#text)
#if defined(__CUDACC__) || defined(__clang__)
#define PARAMWIRE_UNROLL(times) PARAMWIRE_PRAGMA(unroll times)
#else
#define PARAMWIRE_UNROLL(times) PARAMWIRE_PRAGMA(GCC unroll times)
#endif

namespace paramwire::cuda {

// ---------------------------------------------------------------- bits and packs

#if defined(__CUDACC__)
PARAMWIRE_BODY std::uint32_t bits_of(float value) { return __float_as_uint(value); }
PARAMWIRE_BODY float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
#else
PARAMWIRE_BODY std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
PARAMWIRE_BODY float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
#endif

struct alignas(16) Pack {
  std::uint32_t a, b, c, d;
};
struct alignas(8) HalfPack {
  std::uint32_t a, b;
};
struct Floats4 {
  float a, b, c, d;
};

PARAMWIRE_BODY bool aligned_to(const void* at, std::uintptr_t bytes) { return reinterpret_cast<std::uintptr_t>(at) % bytes == 0; }

// What other blocks read again, or this one wrote. `at`: 16-byte aligned.
PARAMWIRE_BODY Pack load_pack(const void* at) { return *static_cast<const Pack*>(at); }
// What the kernel reads once and never writes: weights. It does not displace activations from the first-level cache.
// PTX ISA, "ld.global.nc": read-only for the time of the kernel.
PARAMWIRE_BODY Pack load_pack_once(const void* at) {
#if defined(__CUDACC__)
  Pack pack;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(pack.a), "=r"(pack.b), "=r"(pack.c), "=r"(pack.d)
      : "l"(at));
  return pack;
#else
  return load_pack(at);
#endif
}
PARAMWIRE_BODY void store_pack(void* at, const Pack& pack) { *static_cast<Pack*>(at) = pack; }

PARAMWIRE_BODY Floats4 floats_of(const Pack& pack) { return {float_of(pack.a), float_of(pack.b), float_of(pack.c), float_of(pack.d)}; }
PARAMWIRE_BODY Floats4 load_floats(const float* at) { return floats_of(load_pack(at)); }
PARAMWIRE_BODY void store_floats(float* at, const Floats4& v) { store_pack(at, {bits_of(v.a), bits_of(v.b), bits_of(v.c), bits_of(v.d)}); }

// ---------------------------------------------------------------- casts, bit for bit those of codec/cast.hpp

inline constexpr std::uint32_t kF32InfinityBits = 0x7f800000;

PARAMWIRE_BODY std::uint32_t narrow_bf16(std::uint32_t bits) {
  if ((bits & 0x7fffffff) > kF32InfinityBits) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

PARAMWIRE_BODY std::uint32_t narrow_f16(std::uint32_t bits) {
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t size = bits & 0x7fffffff;
  if (size > kF32InfinityBits) return sign | 0x7e00 | (size >> 13 & 0x3ff);
#if defined(__CUDACC__)
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(float_of(bits)));  // subnormals are kept: PTX ISA, "cvt"
  return half;
#else
  if (size >= 0x477ff000) return sign | 0x7c00;  // 65520, halfway beyond the largest
  if (size >= 0x38800000) return sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
  if (size <= 0x33000000) return sign;
  const std::uint32_t shift = 126 - (size >> 23);
  const std::uint32_t significand = (size & 0x7fffff) | 0x800000;
  const std::uint32_t rest = significand & ((1U << shift) - 1), half = 1U << (shift - 1), whole = significand >> shift;
  return sign | (whole + (rest > half || (rest == half && (whole & 1) != 0) ? 1U : 0U));
#endif
}

PARAMWIRE_BODY std::uint32_t widen_bf16_bits(std::uint32_t bits) {
  const std::uint32_t wide = bits << 16;
  return (wide & 0x7fffffff) > kF32InfinityBits ? wide | 0x00400000 : wide;
}

PARAMWIRE_BODY std::uint32_t widen_f16_bits(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 31) return sign | kF32InfinityBits | fraction << 13 | (fraction != 0 ? 0x00400000U : 0U);
  if (exponent != 0) return sign | (exponent + 112) << 23 | fraction << 13;
  return sign | bits_of(static_cast<float>(fraction) * 0x1p-24F);  // exact, zero too
}

// `half` is kBF16 or kF16.
PARAMWIRE_BODY std::uint32_t narrow(Half half, std::uint32_t bits) { return half == Half::kF16 ? narrow_f16(bits) : narrow_bf16(bits); }
PARAMWIRE_BODY void store_half(void* at, std::uint64_t index, Half half, float value) {
  static_cast<std::uint16_t*>(at)[index] = static_cast<std::uint16_t>(narrow(half, bits_of(value)));
}
PARAMWIRE_BODY HalfPack narrow_four(Half half, const Floats4& v) {
  return {narrow(half, bits_of(v.a)) | narrow(half, bits_of(v.b)) << 16, narrow(half, bits_of(v.c)) | narrow(half, bits_of(v.d)) << 16};
}

// ---------------------------------------------------------------- formats of weights

// A format gives: kBytes of an element, kPerPack elements of 16 bytes, get(base, index) widened, and add_dot(sum, pack, x): sum + the
// product of a pack's elements with as many floats at x, 16-byte aligned.

struct F32 {
  static constexpr std::uint32_t kBytes = 4, kPerPack = 4;
  PARAMWIRE_BODY static float get(const void* base, std::uint64_t index) { return static_cast<const float*>(base)[index]; }
  PARAMWIRE_BODY static Floats4 low(const Pack& pack) { return floats_of(pack); }
};

struct Bf16 {
  static constexpr std::uint32_t kBytes = 2, kPerPack = 8;
  PARAMWIRE_BODY static float get(const void* base, std::uint64_t index) {
    return float_of(std::uint32_t{static_cast<const std::uint16_t*>(base)[index]} << 16);
  }
  PARAMWIRE_BODY static Floats4 low(const Pack& pack) {
    return {float_of(pack.a << 16), float_of(pack.a & 0xffff0000), float_of(pack.b << 16), float_of(pack.b & 0xffff0000)};
  }
  PARAMWIRE_BODY static Floats4 high(const Pack& pack) { return low({pack.c, pack.d, 0, 0}); }
};

struct F16 {
  static constexpr std::uint32_t kBytes = 2, kPerPack = 8;
  PARAMWIRE_BODY static float widen(std::uint32_t bits) {
#if defined(__CUDACC__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<unsigned short>(bits)));
    return wide;
#else
    return float_of(widen_f16_bits(bits & 0xffff));
#endif
  }
  PARAMWIRE_BODY static float get(const void* base, std::uint64_t index) { return widen(static_cast<const std::uint16_t*>(base)[index]); }
  PARAMWIRE_BODY static Floats4 low(const Pack& pack) {
    return {widen(pack.a & 0xffff), widen(pack.a >> 16), widen(pack.b & 0xffff), widen(pack.b >> 16)};
  }
  PARAMWIRE_BODY static Floats4 high(const Pack& pack) { return low({pack.c, pack.d, 0, 0}); }
};

PARAMWIRE_BODY float add_dot(float sum, const Floats4& left, const Floats4& right) {
  sum += left.a * right.a;
  sum += left.b * right.b;
  sum += left.c * right.c;
  return sum + left.d * right.d;
}

template <typename Weight>
PARAMWIRE_BODY float add_dot(float sum, const Pack& pack, const float* x) {
  sum = add_dot(sum, Weight::low(pack), load_floats(x));
  if constexpr (Weight::kPerPack == 8) sum = add_dot(sum, Weight::high(pack), load_floats(x + 4));
  return sum;
}

}  // namespace paramwire::cuda
