#include "paramwire/codec/huffman.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace paramwire::huffman {
namespace {

std::uint32_t reversed(std::uint32_t code, unsigned bits) noexcept {
  std::uint32_t out = 0;
  for (unsigned i = 0; i < bits; ++i) out |= (code >> i & 1) << (bits - 1 - i);
  return out;
}

// Canonical codes, bit-reversed: the first bit of a code is its lowest.
std::array<std::uint16_t, 256> make_codes(const Lengths& lengths) noexcept {
  std::array<std::uint32_t, kCodeBitsMax + 2> next{};
  for (const std::uint8_t length : lengths) {
    if (length > 0) ++next[length + 1U];
  }
  next[1] = 0;
  for (unsigned bits = 2; bits <= kCodeBitsMax; ++bits) next[bits] = (next[bits - 1] + next[bits]) << 1;
  // next[b] is the sum of all shorter codes shifted to b bits: the first code of b bits.
  std::array<std::uint16_t, 256> codes{};
  for (std::size_t symbol = 0; symbol < codes.size(); ++symbol) {
    const unsigned bits = lengths[symbol];
    if (bits > 0) codes[symbol] = static_cast<std::uint16_t>(reversed(next[bits]++, bits));
  }
  return codes;
}

}  // namespace

Lengths make_lengths(const Counts& counts) noexcept {
  // Leaves in ascending order of (count, symbol).
  std::array<std::uint64_t, 256> leaves;
  std::size_t n = 0;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    if (counts[symbol] > 0) leaves[n++] = std::uint64_t{counts[symbol]} << 8 | symbol;
  }
  assert(n >= 2);
  std::sort(leaves.begin(), leaves.begin() + static_cast<std::ptrdiff_t>(n));
  // Package-merge: the list of each level holds the leaves and the pairs of the level before, in order of weight. Of the last
  // list the first 2n - 2 items are taken; a pair that is taken takes its two items of the list before. A leaf has as many bits as
  // levels that take it; levels take leaves from the front, so their numbers are all there is to keep.
  std::array<std::array<bool, 512>, kCodeBitsMax> is_leaf;
  std::array<std::uint64_t, 512> list, merged;
  std::size_t size = 0;
  for (unsigned level = 0; level < kCodeBitsMax; ++level) {
    const std::size_t pairs = size / 2;
    std::size_t leaf = 0, pair = 0, out = 0;
    while (leaf < n || pair < pairs) {
      const std::uint64_t pair_weight = pair < pairs ? list[2 * pair] + list[2 * pair + 1] : UINT64_MAX;
      // A leaf goes before a pair of the same weight.
      if (leaf < n && leaves[leaf] >> 8 <= pair_weight) {
        is_leaf[level][out] = true;
        merged[out++] = leaves[leaf++] >> 8;
      } else {
        is_leaf[level][out] = false;
        merged[out++] = pair_weight;
        ++pair;
      }
    }
    size = out;
    std::swap(list, merged);
  }
  Lengths lengths{};
  std::size_t take = 2 * n - 2;
  for (unsigned level = kCodeBitsMax; level-- > 0 && take > 0;) {
    const auto taken = static_cast<std::size_t>(std::count(is_leaf[level].begin(), is_leaf[level].begin() + static_cast<std::ptrdiff_t>(take), true));
    for (std::size_t i = 0; i < taken; ++i) ++lengths[leaves[i] & 0xff];
    take = 2 * (take - taken);
  }
  return lengths;
}

std::optional<std::uint64_t> cost_bits(const Counts& counts, const Lengths& lengths) noexcept {
  std::uint64_t bits = 0;
  bool missing = false;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    bits += std::uint64_t{counts[symbol]} * lengths[symbol];
    missing |= counts[symbol] > 0 && lengths[symbol] == 0;
  }
  if (missing) return std::nullopt;
  return bits;
}

std::size_t write_description(const Lengths& lengths, std::byte* target) noexcept {
  std::size_t first = 0, last = 255;
  while (lengths[first] == 0) ++first;
  while (lengths[last] == 0) --last;
  target[0] = static_cast<std::byte>(first);
  target[1] = static_cast<std::byte>(last);
  const std::size_t nibbles = last - first + 1;
  const std::size_t size = 2 + (nibbles + 1) / 2;
  std::memset(target + 2, 0, size - 2);
  for (std::size_t i = 0; i < nibbles; ++i) target[2 + i / 2] |= static_cast<std::byte>(lengths[first + i] << (i % 2 * 4));
  return size;
}

Result<Description> read_description(std::span<const std::byte> source) {
  const auto corrupt = [](std::string_view why) { return Error(Code::kCorrupt, std::string(why)); };
  if (source.size() < 2) return corrupt("the code table is cut");
  const auto first = static_cast<std::size_t>(source[0]);
  const auto last = static_cast<std::size_t>(source[1]);
  if (first >= last) return corrupt(cat("the code table goes from symbol ", first, " to ", last));
  const std::size_t nibbles = last - first + 1;
  Description out{{}, 2 + (nibbles + 1) / 2};
  if (source.size() < out.size) return corrupt("the code table is cut");
  std::uint32_t filled = 0;
  for (std::size_t i = 0; i < nibbles; ++i) {
    const auto length = static_cast<std::uint8_t>(static_cast<unsigned>(source[2 + i / 2]) >> (i % 2 * 4) & 0xf);
    if (length > kCodeBitsMax) return corrupt(cat("symbol ", first + i, " has a code of ", length, " bits; at most ", kCodeBitsMax));
    out.lengths[first + i] = length;
    if (length > 0) filled += 1U << (kCodeBitsMax - length);
  }
  if (out.lengths[first] == 0 || out.lengths[last] == 0) return corrupt("the code table begins or ends with a symbol without a code");
  if (nibbles % 2 != 0 && static_cast<unsigned>(source[out.size - 1]) >> 4 != 0) return corrupt("the code table ends with a nibble that is not zero");
  // 2^11 / 2^11 exactly: then every 11 bits are some code's, and at least two symbols have one.
  if (filled != kTableEntries) return corrupt(cat("the code is ", filled < kTableEntries ? "under" : "over", "-subscribed: ", filled, " of ", kTableEntries));
  return out;
}

void fill(EncodeTable& table, const Lengths& lengths) noexcept {
  const auto codes = make_codes(lengths);
  std::array<std::uint8_t, 256> coded;
  std::size_t n = 0;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    const unsigned length = lengths[symbol];
    table.single[symbol] = 0;
    if (length == 0) continue;
    table.single[symbol] = std::uint64_t{codes[symbol]} << (64 - length) | length;
    coded[n++] = static_cast<std::uint8_t>(symbol);
  }
  table.has_pairs = n <= EncodeTable::kPairSymbolsMax;
  if (!table.has_pairs) return;
  for (std::size_t j = 0; j < n; ++j) {
    const std::size_t second = coded[j];
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t first = coded[i];
      const unsigned length = unsigned{lengths[first]} + lengths[second];
      const std::uint32_t code = codes[first] | std::uint32_t{codes[second]} << lengths[first];
      table.pairs[second << 8 | first] = code << (32 - length) | length;
    }
  }
}

void fill(DecodeTable& table, const Lengths& lengths) noexcept {
  table.lengths = lengths;
  const auto codes = make_codes(lengths);
  // Symbols with a code, shortest first.
  std::array<std::uint8_t, 256> order;
  std::size_t n = 0;
  for (unsigned bits = 1; bits <= kCodeBitsMax; ++bits) {
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
      if (lengths[symbol] == bits) order[n++] = static_cast<std::uint8_t>(symbol);
    }
  }
  // tables[b] holds the entries of b bits: what whole symbols lie in them. That of a symbol of l bits and the rest of b - l bits is
  // the symbol followed by tables[b - l]'s. Each entry is written once, so this costs two table sizes.
  std::array<std::uint64_t, kTableEntries> shorter{};  // tables[b] begins at 2^b, for b from 0 to 10
  for (unsigned bits = 1; bits <= kCodeBitsMax; ++bits) {
    std::uint64_t* const target = bits == kCodeBitsMax ? table.entries.data() : shorter.data() + (std::size_t{1} << bits);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint8_t symbol = order[i];
      const unsigned length = lengths[symbol];
      if (length > bits) break;
      const std::uint64_t* const rest = shorter.data() + (std::size_t{1} << (bits - length));
      for (std::size_t k = 0; k < std::size_t{1} << (bits - length); ++k) {
        std::uint64_t entry = rest[k];
        if (entry >> 56 == 6) {  // full: its last symbol goes
          entry -= std::uint64_t{1} << 56 | std::uint64_t{lengths[entry >> 40 & 0xff]} << 48;
          entry &= ~(std::uint64_t{0xff} << 40);
        }
        const std::uint64_t symbols = (entry & 0xffffffffffU) << 8 | symbol;
        target[codes[symbol] | k << length] = symbols | (((entry >> 48) + 0x100 + length) << 48);
      }
    }
  }
}

}  // namespace paramwire::huffman
