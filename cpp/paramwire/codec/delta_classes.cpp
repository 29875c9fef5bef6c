#include "paramwire/codec/delta_classes.hpp"

#include <algorithm>

namespace paramwire::delta {

Classes choose_classes(const Element& element, std::span<const std::byte> base, unsigned count_max) noexcept {
  if (element.exponent_mask == 0 || count_max < 2) return {};
  // A sample of large pieces: 1 KiB of each 4 KiB, so that every row of most matrices has its share.
  constexpr std::size_t kPartBytes = 1024, kLarge = 64 * kPartBytes;
  const std::size_t every = base.size() < kLarge ? kPartBytes : 4 * kPartBytes;
  std::array<std::uint32_t, kExponents> counts{};
  std::size_t elements = 0;
  with_word(element.bytes, [&](auto kind) {
    using U = decltype(kind);
    const std::uint32_t shift = element.exponent_shift % (8 * sizeof(U)), mask = element.exponent_mask;
    for (std::size_t begin = 0; begin < base.size(); begin += every) {
      const auto part = base.subspan(begin, std::min(kPartBytes, base.size() - begin));
      for (std::size_t i = 0; i < part.size() / sizeof(U); ++i) ++counts[static_cast<std::uint32_t>(load<U>(part.data(), i) >> shift) & mask];
      elements += part.size() / sizeof(U);
    }
  });
  // A class costs 1 byte and a distance or two: 1/256 of the elements of a piece above, 1/1024 below are worth that, and hardly less.
  std::uint32_t top = element.exponent_mask, bottom = 0;
  for (std::size_t above = counts[top]; above <= elements / 256 && top > 0;) above += counts[--top];
  for (std::size_t below = counts[bottom]; below <= elements / 1024 && bottom < top;) below += counts[++bottom];
  const unsigned count = std::min(top - bottom + 1, count_max);
  return {count, count == 1 ? 0 : top};
}

double share_tables(const std::array<huffman::Counts, kClassesMax>& counts, unsigned classes, Groups& groups) noexcept {
  struct Group {
    huffman::Counts counts;
    double size;        // bytes
    double with_next;   // bytes of this and the next as one
  };
  std::array<Group, kClassesMax> all;
  std::array<unsigned, kClassesMax> first{};  // class that a group begins with
  const auto joined = [](const huffman::Counts& a, const huffman::Counts& b) {
    huffman::Counts sum;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = a[i] + b[i];
    return sum;
  };
  unsigned count = classes;
  for (unsigned i = 0; i < count; ++i) {
    all[i] = {counts[i], symbols::estimate(counts[i], true), 0};
    first[i] = i;
  }
  const auto look_ahead = [&](unsigned i) {
    if (i + 1 < count) all[i].with_next = symbols::estimate(joined(all[i].counts, all[i + 1].counts), true);
  };
  for (unsigned i = 0; i < count; ++i) look_ahead(i);
  while (count > 1) {
    unsigned best = 0;
    double gain = -1;
    for (unsigned i = 0; i + 1 < count; ++i) {
      const double saved = all[i].size + all[i + 1].size - all[i].with_next;
      if (saved > gain) {
        gain = saved;
        best = i;
      }
    }
    if (gain < 0) break;
    all[best].counts = joined(all[best].counts, all[best + 1].counts);
    all[best].size = all[best].with_next;
    for (unsigned i = best + 1; i + 1 < count; ++i) {
      all[i] = all[i + 1];
      first[i] = first[i + 1];
    }
    --count;
    look_ahead(best);
    if (best > 0) look_ahead(best - 1);
  }
  double size = 0;
  groups.fill(0);
  for (unsigned i = 0; i < count; ++i) {
    size += all[i].size;
    for (unsigned c = first[i]; c < (i + 1 < count ? first[i + 1] : classes); ++c) groups[c] = static_cast<std::uint8_t>(i);
  }
  return size;
}

}  // namespace paramwire::delta
