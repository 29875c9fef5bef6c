#include "paramwire/codec/plane_kernels.hpp"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paramwire/codec/plane_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace paramwire::planes {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One element at a time: the ends that fill no vector, and 8-byte elements, which are rare.
template <typename T, bool kRotate>
HWY_INLINE void split_some(const std::uint8_t* source, std::size_t from, std::size_t count, std::uint8_t* planes, std::size_t stride) {
  for (std::size_t i = from; i < count; ++i) {
    T element;
    std::memcpy(&element, source + i * sizeof(T), sizeof(T));
    if (kRotate) element = static_cast<T>(element << 1 | element >> (8 * sizeof(T) - 1));
    for (std::size_t p = 0; p < sizeof(T); ++p) planes[p * stride + i] = static_cast<std::uint8_t>(element >> (8 * p));
  }
}

template <typename T, bool kRotate>
HWY_INLINE void merge_some(const std::uint8_t* const* plane, std::size_t from, std::size_t count, std::uint8_t* target) {
  for (std::size_t i = from; i < count; ++i) {
    T element = 0;
    for (std::size_t p = 0; p < sizeof(T); ++p) element = static_cast<T>(element | static_cast<T>(plane[p][i]) << (8 * p));
    if (kRotate) element = static_cast<T>(element >> 1 | element << (8 * sizeof(T) - 1));
    std::memcpy(target + i * sizeof(T), &element, sizeof(T));
  }
}

// Highway's target without vectors has no bytes that are halves of something: the loops above are all of it.
#if HWY_TARGET == HWY_SCALAR

template <bool kRotate>
void split_2(const std::uint8_t* source, std::size_t count, std::uint8_t* planes, std::size_t stride) {
  split_some<std::uint16_t, kRotate>(source, 0, count, planes, stride);
}
template <bool kRotate>
void split_4(const std::uint8_t* source, std::size_t count, std::uint8_t* planes, std::size_t stride) {
  split_some<std::uint32_t, kRotate>(source, 0, count, planes, stride);
}
template <bool kRotate>
void merge_2(const std::uint8_t* const* plane, std::size_t count, std::uint8_t* target) {
  merge_some<std::uint16_t, kRotate>(plane, 0, count, target);
}
template <bool kRotate>
void merge_4(const std::uint8_t* const* plane, std::size_t count, std::uint8_t* target) {
  merge_some<std::uint32_t, kRotate>(plane, 0, count, target);
}

#else

template <class D, class B>
HWY_INLINE auto load_rotated(D d, B bytes, const std::uint8_t* source, bool rotate) {
  auto v = hn::BitCast(d, hn::LoadU(bytes, source));
  if (rotate) v = hn::Or(hn::Add(v, v), hn::ShiftRight<8 * sizeof(hn::TFromD<D>) - 1>(v));
  return hn::BitCast(bytes, v);
}

template <bool kRotate>
void split_2(const std::uint8_t* source, std::size_t count, std::uint8_t* planes, std::size_t stride) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::RepartitionToWide<decltype(bytes)> d;
  const std::size_t lanes = hn::Lanes(bytes);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto a = load_rotated(d, bytes, source + 2 * i, kRotate);
    const auto b = load_rotated(d, bytes, source + 2 * i + lanes, kRotate);
    hn::StoreU(hn::ConcatEven(bytes, b, a), bytes, planes + i);
    hn::StoreU(hn::ConcatOdd(bytes, b, a), bytes, planes + stride + i);
  }
  split_some<std::uint16_t, kRotate>(source, i, count, planes, stride);
}

template <bool kRotate>
void split_4(const std::uint8_t* source, std::size_t count, std::uint8_t* planes, std::size_t stride) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::Repartition<std::uint32_t, decltype(bytes)> d;
  const std::size_t lanes = hn::Lanes(bytes);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto a = load_rotated(d, bytes, source + 4 * i, kRotate);
    const auto b = load_rotated(d, bytes, source + 4 * i + lanes, kRotate);
    const auto c = load_rotated(d, bytes, source + 4 * i + 2 * lanes, kRotate);
    const auto e = load_rotated(d, bytes, source + 4 * i + 3 * lanes, kRotate);
    const auto even_low = hn::ConcatEven(bytes, b, a), even_high = hn::ConcatEven(bytes, e, c);
    const auto odd_low = hn::ConcatOdd(bytes, b, a), odd_high = hn::ConcatOdd(bytes, e, c);
    hn::StoreU(hn::ConcatEven(bytes, even_high, even_low), bytes, planes + i);
    hn::StoreU(hn::ConcatEven(bytes, odd_high, odd_low), bytes, planes + stride + i);
    hn::StoreU(hn::ConcatOdd(bytes, even_high, even_low), bytes, planes + 2 * stride + i);
    hn::StoreU(hn::ConcatOdd(bytes, odd_high, odd_low), bytes, planes + 3 * stride + i);
  }
  split_some<std::uint32_t, kRotate>(source, i, count, planes, stride);
}

template <bool kRotate>
void merge_2(const std::uint8_t* const* plane, std::size_t count, std::uint8_t* target) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::RepartitionToWide<decltype(bytes)> d;
  const hn::Rebind<std::uint8_t, decltype(d)> half;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto low = hn::PromoteTo(d, hn::LoadU(half, plane[0] + i));
    const auto high = hn::PromoteTo(d, hn::LoadU(half, plane[1] + i));
    auto v = hn::Or(low, hn::ShiftLeft<8>(high));
    if (kRotate) v = hn::Or(hn::ShiftRight<1>(v), hn::ShiftLeft<15>(v));
    hn::StoreU(hn::BitCast(bytes, v), bytes, target + 2 * i);
  }
  merge_some<std::uint16_t, kRotate>(plane, i, count, target);
}

template <bool kRotate>
void merge_4(const std::uint8_t* const* plane, std::size_t count, std::uint8_t* target) {
  const hn::ScalableTag<std::uint8_t> bytes;
  const hn::Repartition<std::uint32_t, decltype(bytes)> d;
  const hn::Rebind<std::uint8_t, decltype(d)> quarter;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v0 = hn::PromoteTo(d, hn::LoadU(quarter, plane[0] + i));
    const auto v1 = hn::PromoteTo(d, hn::LoadU(quarter, plane[1] + i));
    const auto v2 = hn::PromoteTo(d, hn::LoadU(quarter, plane[2] + i));
    const auto v3 = hn::PromoteTo(d, hn::LoadU(quarter, plane[3] + i));
    auto v = hn::Or(hn::Or(v0, hn::ShiftLeft<8>(v1)), hn::Or(hn::ShiftLeft<16>(v2), hn::ShiftLeft<24>(v3)));
    if (kRotate) v = hn::RotateRight<1>(v);
    hn::StoreU(hn::BitCast(bytes, v), bytes, target + 4 * i);
  }
  merge_some<std::uint32_t, kRotate>(plane, i, count, target);
}

#endif

template <bool kRotate>
void split_any(const std::uint8_t* source, std::size_t count, std::size_t width, std::uint8_t* planes, std::size_t stride) {
  switch (width) {
    case 2: return split_2<kRotate>(source, count, planes, stride);
    case 4: return split_4<kRotate>(source, count, planes, stride);
    case 8: return split_some<std::uint64_t, kRotate>(source, 0, count, planes, stride);
    default: std::memcpy(planes, source, count);
  }
}

template <bool kRotate>
void merge_any(const std::uint8_t* const* plane, std::size_t count, std::size_t width, std::uint8_t* target) {
  switch (width) {
    case 2: return merge_2<kRotate>(plane, count, target);
    case 4: return merge_4<kRotate>(plane, count, target);
    case 8: return merge_some<std::uint64_t, kRotate>(plane, 0, count, target);
    default: std::memcpy(target, plane[0], count);
  }
}

void split_all(const std::uint8_t* source, std::size_t count, std::size_t width, bool rotate, std::uint8_t* planes, std::size_t stride) {
  if (rotate) split_any<true>(source, count, width, planes, stride);
  else split_any<false>(source, count, width, planes, stride);
}

void merge_all(const std::uint8_t* const* plane, std::size_t count, std::size_t width, bool rotate, std::uint8_t* target) {
  if (rotate) merge_any<true>(plane, count, width, target);
  else merge_any<false>(plane, count, width, target);
}

}  // namespace HWY_NAMESPACE
}  // namespace paramwire::planes
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace paramwire::planes {

HWY_EXPORT(split_all);
HWY_EXPORT(merge_all);

void split(const std::uint8_t* source, std::size_t count, std::size_t width, bool rotate, std::uint8_t* planes, std::size_t stride) noexcept {
  HWY_DYNAMIC_DISPATCH(split_all)(source, count, width, rotate, planes, stride);
}

void merge(const std::uint8_t* const* plane, std::size_t count, std::size_t width, bool rotate, std::uint8_t* target) noexcept {
  HWY_DYNAMIC_DISPATCH(merge_all)(plane, count, width, rotate, target);
}

}  // namespace paramwire::planes
#endif
