#include "paramwire/codec/cast.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paramwire/codec/cast.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// Loops of the scalar definition, behind the vectors and where there are none. Once in this file, before the first target.
#ifndef PARAMWIRE_CAST_SCALAR
#define PARAMWIRE_CAST_SCALAR
namespace paramwire::cast_detail {

inline constexpr std::uint32_t kF32Infinity = 0x7f800000;

// Of the absolute value, as bits: the largest finite value, the least that rounds beyond it, and where quiet NaNs begin.
struct Limits {
  std::uint32_t largest;   // as float32 bits
  std::uint32_t overflow;  // as float32 bits: halfway to the next power of two's step, ties go to even, which is infinity
};
inline constexpr Limits kF16Limits{0x477fe000, 0x477ff000};   // 65504, 65520
inline constexpr Limits kBf16Limits{0x7f7f0000, 0x7f7f8000};  // 0x7f7f, half a step more

template <typename To, typename From>
To one(const std::byte* source, std::size_t i, To (*cast)(From) noexcept) noexcept {
  From value;
  std::memcpy(&value, source + i * sizeof(From), sizeof(From));
  return cast(value);
}

inline std::uint64_t narrow_some(const std::byte* source, std::size_t from, std::size_t count, std::byte* target, bool saturate,
                                 const Limits& limits, std::uint16_t (*cast)(std::uint32_t) noexcept) noexcept {
  std::uint64_t overflowed = 0;
  for (std::size_t i = from; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, source + 4 * i, 4);
    const std::uint32_t size = bits & 0x7fffffff;
    if (size >= limits.overflow && size < kF32Infinity) {
      ++overflowed;
      if (saturate) bits = (bits & 0x80000000) | limits.largest;
    }
    const std::uint16_t out = cast(bits);
    std::memcpy(target + 2 * i, &out, 2);
  }
  return overflowed;
}

inline void widen_some(const std::byte* source, std::size_t from, std::size_t count, std::byte* target, std::uint32_t (*cast)(std::uint16_t) noexcept) noexcept {
  for (std::size_t i = from; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, source + 2 * i, 2);
    const std::uint32_t out = cast(bits);
    std::memcpy(target + 4 * i, &out, 4);
  }
}

}  // namespace paramwire::cast_detail
#endif

HWY_BEFORE_NAMESPACE();
namespace paramwire::cast_detail {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

std::uint64_t narrow_bf16(const std::byte* source, std::size_t count, std::byte* target, bool saturate) {
  return narrow_some(source, 0, count, target, saturate, kBf16Limits, bf16_from_f32);
}
void widen_bf16(const std::byte* source, std::size_t count, std::byte* target) { widen_some(source, 0, count, target, f32_from_bf16); }

#else

namespace hn = hwy::HWY_NAMESPACE;

// Count finite values that overflow in `over`, one a lane, and clamp them where asked.
template <class D, class V, bool kSaturate>
HWY_INLINE V limit(D d, V bits, const Limits& limits, V& over) {
  const hn::RebindToSigned<D> signed_d;
  // Absolute values are positive as signed numbers too, which every target compares.
  const auto size = hn::BitCast(signed_d, hn::And(bits, hn::Set(d, 0x7fffffff)));
  const auto overflows = hn::And(hn::Gt(size, hn::Set(signed_d, static_cast<std::int32_t>(limits.overflow - 1))),
                                 hn::Lt(size, hn::Set(signed_d, static_cast<std::int32_t>(kF32Infinity))));
  const auto mask = hn::BitCast(d, hn::VecFromMask(signed_d, overflows));
  over = hn::Sub(over, mask);
  if (!kSaturate) return bits;
  const auto largest = hn::Or(hn::And(bits, hn::Set(d, 0x80000000)), hn::Set(d, limits.largest));
  return hn::Or(hn::AndNot(mask, bits), hn::And(mask, largest));
}

// A lane of 32 bits counts at most this many before it is added up.
constexpr std::size_t kCountedAtOnce = std::size_t{1} << 30;

template <bool kSaturate>
std::uint64_t narrow_bf16_loop(const std::byte* source, std::size_t count, std::byte* target) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::Repartition<std::uint32_t, decltype(bytes)> d;
  const hn::RebindToSigned<decltype(d)> signed_d;
  const hn::Rebind<std::uint16_t, decltype(d)> narrow;
  const hn::Repartition<std::uint8_t, decltype(narrow)> narrow_bytes;
  const auto* const from = reinterpret_cast<const std::uint8_t*>(source);
  auto* const to = reinterpret_cast<std::uint8_t*>(target);
  std::uint64_t overflowed = 0;
  std::size_t i = 0;
  while (i + hn::Lanes(d) <= count) {
    auto over = hn::Zero(d);
    const std::size_t end = std::min(count, i + kCountedAtOnce);
    for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) {
      const auto bits = limit<decltype(d), decltype(over), kSaturate>(d, hn::BitCast(d, hn::LoadU(bytes, from + 4 * i)), kBf16Limits, over);
      const auto size = hn::BitCast(signed_d, hn::And(bits, hn::Set(d, 0x7fffffff)));
      const auto nan = hn::BitCast(d, hn::VecFromMask(signed_d, hn::Gt(size, hn::Set(signed_d, static_cast<std::int32_t>(kF32Infinity)))));
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
      const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7fff)));
      const auto quiet = hn::Or(bits, hn::Set(d, 0x00400000));
      const auto out = hn::ShiftRight<16>(hn::Or(hn::AndNot(nan, rounded), hn::And(nan, quiet)));
      hn::StoreU(hn::BitCast(narrow_bytes, hn::TruncateTo(narrow, out)), narrow_bytes, to + 2 * i);
    }
    overflowed += hn::GetLane(hn::SumOfLanes(d, over));
    if (end == count) break;
  }
  return overflowed + narrow_some(source, i, count, target, kSaturate, kBf16Limits, bf16_from_f32);
}

std::uint64_t narrow_bf16(const std::byte* source, std::size_t count, std::byte* target, bool saturate) {
  return saturate ? narrow_bf16_loop<true>(source, count, target) : narrow_bf16_loop<false>(source, count, target);
}

void widen_bf16(const std::byte* source, std::size_t count, std::byte* target) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::Repartition<std::uint32_t, decltype(bytes)> d;
  const hn::RebindToSigned<decltype(d)> signed_d;
  const hn::Rebind<std::uint16_t, decltype(d)> narrow;
  const hn::Repartition<std::uint8_t, decltype(narrow)> narrow_bytes;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    const auto half = hn::BitCast(narrow, hn::LoadU(narrow_bytes, reinterpret_cast<const std::uint8_t*>(source) + 2 * i));
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(d, half));
    const auto size = hn::BitCast(signed_d, hn::And(bits, hn::Set(d, 0x7fffffff)));
    const auto nan = hn::BitCast(d, hn::VecFromMask(signed_d, hn::Gt(size, hn::Set(signed_d, static_cast<std::int32_t>(kF32Infinity)))));
    const auto out = hn::Or(bits, hn::And(nan, hn::Set(d, 0x00400000)));
    hn::StoreU(hn::BitCast(bytes, out), bytes, reinterpret_cast<std::uint8_t*>(target) + 4 * i);
  }
  widen_some(source, i, count, target, f32_from_bf16);
}

#endif

// float16 by the machine's own conversion (F16C, AVX-512), which rounds as its operand says, not as the thread's control word does.
// Elsewhere by the definition: Highway's emulation rounds differently.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL

template <bool kSaturate>
std::uint64_t narrow_f16_loop(const std::byte* source, std::size_t count, std::byte* target) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::Repartition<std::uint32_t, decltype(bytes)> d;
  const hn::Repartition<float, decltype(bytes)> floats;
  const hn::Rebind<hwy::float16_t, decltype(floats)> narrow;
  const hn::Rebind<std::uint16_t, decltype(floats)> narrow_bits;
  const hn::Repartition<std::uint8_t, decltype(narrow_bits)> narrow_bytes;
  std::uint64_t overflowed = 0;
  std::size_t i = 0;
  while (i + hn::Lanes(d) <= count) {
    auto over = hn::Zero(d);
    const std::size_t end = std::min(count, i + kCountedAtOnce);
    for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) {
      const auto loaded = hn::BitCast(d, hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(source) + 4 * i));
      const auto bits = limit<decltype(d), decltype(over), kSaturate>(d, loaded, kF16Limits, over);
      const auto out = hn::BitCast(narrow_bytes, hn::DemoteTo(narrow, hn::BitCast(floats, bits)));
      hn::StoreU(out, narrow_bytes, reinterpret_cast<std::uint8_t*>(target) + 2 * i);
    }
    overflowed += hn::GetLane(hn::SumOfLanes(d, over));
    if (end == count) break;
  }
  return overflowed + narrow_some(source, i, count, target, kSaturate, kF16Limits, f16_from_f32);
}

std::uint64_t narrow_f16(const std::byte* source, std::size_t count, std::byte* target, bool saturate) {
  return saturate ? narrow_f16_loop<true>(source, count, target) : narrow_f16_loop<false>(source, count, target);
}

void widen_f16(const std::byte* source, std::size_t count, std::byte* target) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::Repartition<float, decltype(bytes)> floats;
  const hn::Rebind<hwy::float16_t, decltype(floats)> narrow;
  const hn::Rebind<std::uint16_t, decltype(floats)> narrow_bits;
  const hn::Repartition<std::uint8_t, decltype(narrow_bits)> narrow_bytes;
  std::size_t i = 0;
  for (; i + hn::Lanes(floats) <= count; i += hn::Lanes(floats)) {
    const auto half = hn::BitCast(narrow, hn::LoadU(narrow_bytes, reinterpret_cast<const std::uint8_t*>(source) + 2 * i));
    hn::StoreU(hn::BitCast(bytes, hn::PromoteTo(floats, half)), bytes, reinterpret_cast<std::uint8_t*>(target) + 4 * i);
  }
  widen_some(source, i, count, target, f32_from_f16);
}

#else

std::uint64_t narrow_f16(const std::byte* source, std::size_t count, std::byte* target, bool saturate) {
  return narrow_some(source, 0, count, target, saturate, kF16Limits, f16_from_f32);
}
void widen_f16(const std::byte* source, std::size_t count, std::byte* target) { widen_some(source, 0, count, target, f32_from_f16); }

#endif

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace paramwire::cast_detail
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace paramwire {
namespace cast_detail {

HWY_EXPORT(narrow_bf16);
HWY_EXPORT(widen_bf16);
HWY_EXPORT(narrow_f16);
HWY_EXPORT(widen_f16);
HWY_EXPORT(target_name);

std::uint64_t narrow(bool to_f16, const std::byte* source, std::size_t count, std::byte* target, bool saturate) {
  if (to_f16) return HWY_DYNAMIC_DISPATCH(narrow_f16)(source, count, target, saturate);
  return HWY_DYNAMIC_DISPATCH(narrow_bf16)(source, count, target, saturate);
}

void widen(bool from_f16, const std::byte* source, std::size_t count, std::byte* target) {
  if (from_f16) HWY_DYNAMIC_DISPATCH(widen_f16)(source, count, target);
  else HWY_DYNAMIC_DISPATCH(widen_bf16)(source, count, target);
}

const char* name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace cast_detail

std::uint16_t f16_from_f32(std::uint32_t bits) noexcept {
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t size = bits & 0x7fffffff;
  const auto with_sign = [sign](std::uint32_t magnitude) { return static_cast<std::uint16_t>(sign | magnitude); };
  if (size > cast_detail::kF32Infinity) return with_sign(0x7e00 | (size >> 13 & 0x3ff));
  if (size >= cast_detail::kF16Limits.overflow) return with_sign(0x7c00);
  if (size >= 0x38800000) {  // 2^-14: normal in both. The exponent's bias goes from 127 to 15
    const std::uint32_t rounded = size + 0xfff + (size >> 13 & 1);
    return with_sign((rounded - 0x38000000) >> 13);
  }
  if (size <= 0x33000000) return with_sign(0);  // 2^-25 is halfway between 0 and the least subnormal: to even
  // Subnormal: the significand, its leading bit explicit, in units of 2^-24.
  const std::uint32_t shift = 126 - (size >> 23);  // 14 to 24
  const std::uint32_t significand = (size & 0x7fffff) | 0x800000;
  const std::uint32_t whole = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  return with_sign(whole + (rest > half || (rest == half && (whole & 1) != 0) ? 1 : 0));
}

std::uint16_t bf16_from_f32(std::uint32_t bits) noexcept {
  if ((bits & 0x7fffffff) > cast_detail::kF32Infinity) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::uint32_t f32_from_f16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1fU;
  const std::uint32_t fraction = bits & 0x3ffU;
  if (exponent == 31) return sign | cast_detail::kF32Infinity | fraction << 13 | (fraction != 0 ? 0x00400000U : 0U);
  if (exponent != 0) return sign | (exponent + 112) << 23 | fraction << 13;
  if (fraction == 0) return sign;
  // Subnormal, fraction * 2^-24: its highest bit becomes the implicit one.
  const auto top = static_cast<std::uint32_t>(std::bit_width(fraction)) - 1;
  return sign | (top + 103) << 23 | (fraction << (23 - top) & 0x7fffffU);
}

std::uint32_t f32_from_bf16(std::uint16_t bits) noexcept {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  return (wide & 0x7fffffff) > cast_detail::kF32Infinity ? wide | 0x00400000 : wide;
}

Result<std::uint64_t> cast_elements(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target, Overflow overflow) {
  const auto half = [](DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; };
  const bool narrows = from == DType::kF32 && half(to);
  if (!narrows && !(half(from) && to == DType::kF32)) {
    return Error(Code::kInvalid, cat("no cast from ", dtype_name(from), " to ", dtype_name(to), "; f32 to f16 or bf16, or back"));
  }
  const std::size_t element = dtype_bits(from) / 8, element_out = dtype_bits(to) / 8;
  const std::size_t count = source.size() / element;
  if (source.size() % element != 0 || target.size() != count * element_out) {
    return Error(Code::kInvalid, cat("a cast of ", source.size(), " bytes of ", dtype_name(from), " to ", target.size(), " of ", dtype_name(to), "; element counts differ"));
  }
  if (narrows) return cast_detail::narrow(to == DType::kF16, source.data(), count, target.data(), overflow == Overflow::kSaturate);
  cast_detail::widen(from == DType::kF16, source.data(), count, target.data());
  return std::uint64_t{0};
}

std::string_view cast_implementation() noexcept { return cast_detail::name(); }

}  // namespace paramwire
#endif
