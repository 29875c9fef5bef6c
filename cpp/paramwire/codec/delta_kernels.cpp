#include "paramwire/codec/delta_kernels.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paramwire/codec/delta_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace paramwire::delta {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Elements from `raw` on, any alignment.
template <class D>
HWY_INLINE auto load_some(D d, const std::byte* raw) {
#if HWY_TARGET == HWY_SCALAR  // whose one lane can't be loaded as bytes
  return hn::Set(d, load<hn::TFromD<D>>(raw, 0));
#else
  const hn::Repartition<std::uint8_t, D> bytes;
  return hn::BitCast(d, hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(raw)));
#endif
}

template <class D, class V>
HWY_INLINE void store_some(D, V v, std::byte* raw) {
#if HWY_TARGET == HWY_SCALAR
  store<hn::TFromD<D>>(raw, 0, hn::GetLane(v));
#else
  const hn::Repartition<std::uint8_t, D> bytes;
  hn::StoreU(hn::BitCast(bytes, v), bytes, reinterpret_cast<std::uint8_t*>(raw));
#endif
}

// Lanes of a mask as bits, at most 64.
template <class D, class M>
HWY_INLINE std::uint64_t bits_of(D d, M mask) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  std::uint64_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

HWY_INLINE std::uint64_t bit(std::size_t i) { return std::uint64_t{1} << i; }
HWY_INLINE std::uint64_t bits_below(std::size_t i) { return bit(i) - 1; }
HWY_INLINE std::size_t lowest(std::uint64_t bits) { return static_cast<std::size_t>(std::countr_zero(bits)); }
HWY_INLINE std::uint32_t count_of(std::uint64_t bits) { return static_cast<std::uint32_t>(std::popcount(bits)); }

// ---------------------------------------------------------------- which elements

template <typename U>
std::size_t changes_of(const std::byte* base, const std::byte* next, std::size_t elements, std::uint64_t* changed) {
  const hn::CappedTag<U, kWordElements> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t count = 0, i = 0;
  for (; i + kWordElements <= elements; i += kWordElements) {
    std::uint64_t word = 0;
    for (std::size_t j = 0; j < kWordElements; j += lanes) word |= bits_of(d, hn::Ne(load_some(d, base + (i + j) * sizeof(U)), load_some(d, next + (i + j) * sizeof(U)))) << j;
    changed[i / kWordElements] = word;
    count += count_of(word);
  }
  if (i == elements) return count;
  std::uint64_t word = 0;
  for (std::size_t j = 0; i + j < elements; ++j) word |= load<U>(base, i + j) != load<U>(next, i + j) ? bit(j) : 0;
  changed[i / kWordElements] = word;
  return count + count_of(word);
}

// Classes of `elements` elements, and of none behind them up to whole words.
template <typename U>
HWY_INLINE void classes_of(const Element& element, const Classes& classes, const std::byte* base, std::size_t elements, std::uint8_t* target) {
  const hn::ScalableTag<U> d;
  const hn::Rebind<std::uint8_t, decltype(d)> narrow;
  const std::size_t lanes = hn::Lanes(d);
  const auto shift = static_cast<int>(element.exponent_shift % (8 * sizeof(U)));
  const auto mask = static_cast<U>(element.exponent_mask), top = static_cast<U>(classes.top), last = static_cast<U>(classes.count - 1);
  std::size_t i = 0;
  for (; i + lanes <= elements; i += lanes) {
    const auto exponent = hn::Min(hn::And(hn::ShiftRightSame(load_some(d, base + i * sizeof(U)), shift), hn::Set(d, mask)), hn::Set(d, top));
    const auto each = hn::Min(hn::Sub(hn::Set(d, top), exponent), hn::Set(d, last));
    if constexpr (sizeof(U) == 1) hn::StoreU(each, d, target + i);
    else hn::StoreU(hn::TruncateTo(narrow, each), narrow, target + i);
  }
  for (; i < elements; ++i) {
    const U exponent = std::min(static_cast<U>(static_cast<U>(load<U>(base, i) >> shift) & mask), top);
    target[i] = static_cast<std::uint8_t>(std::min(static_cast<U>(top - exponent), last));
  }
  for (; i % kWordElements != 0; ++i) target[i] = kNoClass;
}

using ByteTag = hn::CappedTag<std::uint8_t, kWordElements>;

// Which of 64 elements are of class `c`.
HWY_INLINE std::uint64_t bits_of_class(const std::uint8_t* classes, std::size_t c) {
  const ByteTag d;
  std::uint64_t bits = 0;
  const auto wanted = hn::Set(d, static_cast<std::uint8_t>(c));
  for (std::size_t j = 0; j < kWordElements; j += hn::Lanes(d)) bits |= bits_of(d, hn::Eq(hn::LoadU(d, classes + j), wanted)) << j;
  return bits;
}

std::size_t changes(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::uint64_t* changed) {
  return with_word(element.bytes, [&](auto kind) HWY_ATTR {
    using U = decltype(kind);
    return changes_of<U>(base.data(), next.data(), base.size() / sizeof(U), changed);
  });
}

void classes_of_all(const Element& element, const Classes& classes, std::span<const std::byte> base, std::uint8_t* target) {
  with_word(element.bytes, [&](auto kind) HWY_ATTR {
    using U = decltype(kind);
    classes_of<U>(element, classes, base.data(), base.size() / sizeof(U), target);
  });
}

void elements_of(const std::uint8_t* classes, std::size_t elements, std::uint32_t wanted, std::uint64_t* selected) {
  for (std::size_t w = 0; w < words_of(elements); ++w) {
    std::uint64_t word = 0;
    for (std::uint32_t rest = wanted; rest != 0; rest &= rest - 1) word |= bits_of_class(classes + w * kWordElements, lowest(rest));
    selected[w] = word;
  }
}

// ---------------------------------------------------------------- what lies between

void distances_of(const std::uint8_t* classes, const std::uint64_t* changed, std::size_t elements, unsigned count, std::uint32_t* distances,
                  std::array<std::uint32_t, kClassesMax>& in_class) {
  std::uint32_t run[kClassesMax] = {}, slot[kClassesMax], sizes[kClassesMax] = {};
  for (std::uint32_t c = 0; c < count; ++c) slot[c] = c;
  std::uint32_t slots = count;
  for (std::size_t w = 0; w < words_of(elements); ++w) {
    const std::uint8_t* const here = classes + w * kWordElements;
    std::uint64_t of_class[kClassesMax];
    for (std::size_t c = 0; c < count; ++c) {
      of_class[c] = bits_of_class(here, c);
      sizes[c] += count_of(of_class[c]);
      run[c] += count_of(of_class[c]);  // as if none had changed
    }
    for (std::uint64_t rest = changed[w]; rest != 0; rest &= rest - 1) {
      const std::size_t i = lowest(rest), c = here[i];
      const std::uint32_t behind = count_of(of_class[c] & ~bits_below(i));  // with itself
      distances[slot[c]] = run[c] - behind;
      run[c] = behind - 1;
      slot[c] = slots++;
    }
  }
  for (std::size_t c = 0; c < count; ++c) distances[slot[c]] = run[c];
  std::copy_n(sizes, kClassesMax, in_class.begin());
}

// ---------------------------------------------------------------- applying

// The bit of `bits` that has `rank` set ones below it; 0 where there is none.
HWY_INLINE std::uint64_t bit_of_rank(std::uint64_t bits, std::uint32_t rank) {
  if (rank >= 64) return 0;
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
  return _pdep_u64(bit(rank), bits);
#else
  for (; rank > 0; --rank) bits &= bits - 1;
  return bits & (~bits + 1);
#endif
}

template <class D, class V>
HWY_INLINE V ordered_lanes(D d, V v) {
  const hn::RebindToSigned<D> signed_d;
  const auto negative = hn::BitCast(d, hn::BroadcastSignBit(hn::BitCast(signed_d, v)));
  return hn::Xor(v, hn::And(negative, hn::Set(d, static_cast<hn::TFromD<D>>(hn::TFromD<D>(~hn::TFromD<D>{0}) >> 1))));
}

// out = base moved by steps, of which most may be 0. `out` is `base` or beside it.
template <typename U>
HWY_INLINE void move_some(bool floating, const std::byte* base, const U* steps, std::size_t count, std::byte* out) {
  const hn::ScalableTag<U> d;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    const auto from = load_some(d, base + i * sizeof(U)), step = hn::Load(d, steps + i);
    const auto by = hn::Xor(hn::ShiftRight<1>(step), hn::Sub(hn::Zero(d), hn::And(step, hn::Set(d, U{1}))));
    const auto to = floating ? ordered_lanes(d, hn::Add(ordered_lanes(d, from), by)) : hn::Add(from, by);
    store_some(d, to, out + i * sizeof(U));
  }
  for (; i < count; ++i) {
    const U from = load<U>(base, i);
    store<U>(out, i, floating ? ordered<U>(after_step<U>(ordered<U>(from), steps[i])) : after_step<U>(from, steps[i]));
  }
}

// Takes a word's elements of each class from what is left before the next change. returns: the classes that have less than that left, a bit each
HWY_INLINE std::uint32_t pass_word(std::uint32_t* left, const std::uint32_t* sizes) {
  const hn::CappedTag<std::int32_t, kClassesMax> d;
  std::uint64_t hit = 0;
  for (std::size_t c = 0; c < kClassesMax; c += hn::Lanes(d)) {
    auto* const at = reinterpret_cast<std::int32_t*>(left + c);
    const auto before = hn::Load(d, at), size = hn::Load(d, reinterpret_cast<const std::int32_t*>(sizes + c));
    hit |= bits_of(d, hn::Lt(before, size)) << c;
    hn::Store(hn::Sub(before, size), d, at);
  }
  return static_cast<std::uint32_t>(hit);
}

// Elements whose classes are found at once: few enough to stay in the first-level cache.
constexpr std::size_t kBlockElements = 1024;

template <typename U>
ApplyFault apply_words(const Element& element, const Classes& classes, std::uint32_t dense, NumberReader& distances, NumberReader& steps,
                       const std::byte* base, std::size_t elements, std::byte* out) {
  // Locals of this function, which nothing else can write to.
  NumberReader distance = distances, step_of = steps;
  const bool floating = element.floating;
  const std::size_t class_count = classes.count;
  // Unchanged elements of the class before its next changed one. A dense class has none, ever.
  alignas(64) std::uint32_t left[kClassesMax] = {};
  const auto next_distance = [&](std::size_t c) HWY_ATTR { return static_cast<std::uint32_t>(std::min<std::uint64_t>(distance.get(c), INT32_MAX)); };
  for (std::size_t c = 0; c < class_count; ++c) {
    if ((dense >> c & 1) == 0) left[c] = next_distance(c);
  }
  // Of the words of a block: elements of each class, how many of classes that are not dense, and those of dense ones. All of them are found before any
  // is used: a vector of what was just stored number by number would wait for it.
  alignas(64) U moves[kBlockElements] = {};
  std::uint8_t block[kBlockElements];
  std::uint64_t of_class[words_of(kBlockElements)][kClassesMax], dense_bits[words_of(kBlockElements)];
  alignas(64) std::uint32_t sizes[words_of(kBlockElements)][kClassesMax] = {};
  for (std::size_t begin = 0; begin < elements; begin += kBlockElements) {
    const std::size_t count = std::min(kBlockElements, elements - begin);
    classes_of<U>(element, classes, base + begin * sizeof(U), count, block);
    const std::size_t words_here = words_of(count);
    for (std::size_t w = 0; w < words_here; ++w) {
      dense_bits[w] = 0;
      for (std::size_t c = 0; c < class_count; ++c) {
        const std::uint64_t bits = bits_of_class(block + w * kWordElements, c);
        if ((dense >> c & 1) != 0) dense_bits[w] |= bits;
        else sizes[w][c] = count_of(bits);
        of_class[w][c] = bits;
      }
    }
    for (std::size_t w = 0; w < words_here; ++w) {
      const std::uint8_t* const here = block + w * kWordElements;
      std::uint64_t* const behind = of_class[w];  // elements of each class that are not passed yet
      std::uint64_t changed = dense_bits[w];
      // Goes to the next changed element of the class. One that is not in this word leaves the distance behind it. No branch could be guessed here.
      const auto pass = [&](std::size_t c, std::uint32_t unchanged) HWY_ATTR {
        const std::uint64_t next = bit_of_rank(behind[c], unchanged);
        changed |= next;
        left[c] = unchanged - count_of(behind[c]);
        behind[c] &= ~(next | (next - 1));
      };
      for (std::uint32_t hit = pass_word(left, sizes[w]); hit != 0; hit &= hit - 1) pass(lowest(hit), left[lowest(hit)] + sizes[w][lowest(hit)]);
      for (; changed != 0; changed &= changed - 1) {
        const std::size_t i = lowest(changed), at = w * kWordElements + i;
        const std::size_t c = here[i];
        const std::uint64_t step = step_of.get(c);
        if (step > static_cast<U>(~U{0})) return {ApplyFault::Kind::kStepTooLong, begin + at, step};
        moves[at] = static_cast<U>(step);
        if ((dense >> c & 1) != 0) continue;
        if (step == 0) return {ApplyFault::Kind::kNoStep, begin + at, 0};  // a table that ended gives zeros
        pass(c, next_distance(c));
      }
    }
    move_some<U>(floating, base + begin * sizeof(U), moves, count, out + begin * sizeof(U));
    std::memset(moves, 0, sizeof moves);
  }
  distances = distance;
  steps = step_of;
  for (std::size_t c = 0; c < class_count; ++c) {
    if (left[c] != 0) return {ApplyFault::Kind::kDistanceTooLong, c, left[c]};
  }
  return {};
}

ApplyFault apply_all(const Element& element, const Classes& classes, std::uint32_t dense, NumberReader& distances, NumberReader& steps,
                     std::span<const std::byte> base, std::span<std::byte> out) {
  return with_word(element.bytes, [&](auto kind) HWY_ATTR {
    using U = decltype(kind);
    return apply_words<U>(element, classes, dense, distances, steps, base.data(), base.size() / sizeof(U), out.data());
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace paramwire::delta
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace paramwire::delta {

HWY_EXPORT(changes);
HWY_EXPORT(classes_of_all);
HWY_EXPORT(elements_of);
HWY_EXPORT(distances_of);
HWY_EXPORT(apply_all);

std::size_t find_changes(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::uint64_t* changed) noexcept {
  return HWY_DYNAMIC_DISPATCH(changes)(element, base, next, changed);
}

void find_classes(const Element& element, const Classes& classes, std::span<const std::byte> base, std::uint8_t* target) noexcept {
  HWY_DYNAMIC_DISPATCH(classes_of_all)(element, classes, base, target);
}

void find_elements_of(const std::uint8_t* classes, std::size_t elements, std::uint32_t wanted, std::uint64_t* selected) noexcept {
  HWY_DYNAMIC_DISPATCH(elements_of)(classes, elements, wanted, selected);
}

void measure_distances(const std::uint8_t* classes, const std::uint64_t* changed, std::size_t elements, unsigned count, std::uint32_t* distances,
                       std::array<std::uint32_t, kClassesMax>& in_class) noexcept {
  HWY_DYNAMIC_DISPATCH(distances_of)(classes, changed, elements, count, distances, in_class);
}

ApplyFault apply_changes(const Element& element, const Classes& classes, std::uint32_t dense, NumberReader& distances, NumberReader& steps,
                         std::span<const std::byte> base, std::span<std::byte> out) noexcept {
  return HWY_DYNAMIC_DISPATCH(apply_all)(element, classes, dense, distances, steps, base, out);
}

}  // namespace paramwire::delta
#endif
