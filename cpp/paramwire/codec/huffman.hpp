// Order-0 Huffman coding of byte planes: code lengths, their description, and the coding of interleaved streams.
//
// Lengths are at most kCodeBitsMax, optimal under that limit (package-merge: L. Larmore and D. Hirschberg, "A fast algorithm for
// optimal length-limited Huffman codes", JACM 37(3), 1990), codes canonical, in order of (length, symbol), and written from the
// lowest bit of a byte up, the code's first bit first. The bytes: wire/FORMAT.md, "Codecs". Internal to codec/; tests include it.
#pragma once

#include "paramwire/base/error.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace paramwire::huffman {

// 11 bits: a decode table of 2,048 entries of 8 bytes is a third of a first-level cache of 48 KiB, and bytes of any statistics lose
// less than 0.2 % to the limit. With 12 it would not stay in the cache beside the data; with 10, exponents lose 0.5 %.
inline constexpr unsigned kCodeBitsMax = 11;
inline constexpr std::size_t kTableEntries = std::size_t{1} << kCodeBitsMax;
// Streams of a plane, decoded side by side: one alone waits for its look-ups, eight cycles each. Symbol i lies in stream
// i / ceil(count / 8). Four streams were slower by a fifth (Sapphire Rapids), and each costs two bytes.
inline constexpr std::size_t kStreams = 8;
// Most bytes of a description: two and 256 lengths of four bits.
inline constexpr std::size_t kDescriptionMax = 2 + 128;

using Lengths = std::array<std::uint8_t, 256>;  // bits of each symbol's code; 0: the symbol has none
using Counts = std::array<std::uint32_t, 256>;

// Lengths for the symbols with a count, complete (Kraft sum 1): the smallest sum of count * length. Needs two such symbols.
Lengths make_lengths(const Counts& counts) noexcept;
// Bits of the counted symbols; nullopt when a counted one has no code.
std::optional<std::uint64_t> cost_bits(const Counts& counts, const Lengths& lengths) noexcept;

// Write the description: `first`, `last` symbol, then their lengths and those between, a nibble each, low nibble first.
// target: at least kDescriptionMax bytes. returns: bytes written.
std::size_t write_description(const Lengths& lengths, std::byte* target) noexcept;
struct Description {
  Lengths lengths;
  std::size_t size;  // bytes read
};
// errors: kCorrupt with the reason: cut, a length above the limit, a code that is over- or under-subscribed.
Result<Description> read_description(std::span<const std::byte> source);

// ---------------------------------------------------------------- coding

// A code as its writer takes it: the code's bits at the top of the word, their number at its bottom. So a round of codes needs one
// shift, one or and one addition each.
struct EncodeTable {
  static constexpr std::size_t kPairSymbolsMax = 64;
  std::array<std::uint64_t, 256> single;
  // Two symbols at once, those of the first in the lower byte: 32-bit words of the same form. Filled when at most kPairSymbolsMax
  // symbols have a code, for pairs of these only; what they touch of the table then stays in the first-level cache.
  std::array<std::uint32_t, 65536> pairs;
  bool has_pairs;
};
void fill(EncodeTable& table, const Lengths& lengths) noexcept;

// Entry of the next 11 bits: up to 6 whole symbols in bytes 0 to 5, the bits that they take in byte 6, their number in byte 7.
struct DecodeTable {
  alignas(64) std::array<std::uint64_t, kTableEntries> entries;
  Lengths lengths;
};
void fill(DecodeTable& table, const Lengths& lengths) noexcept;

// Room for the streams of `count` symbols whose codes take `bits`.
constexpr std::size_t streams_bound(std::uint64_t bits) noexcept { return static_cast<std::size_t>(bits / 8) + kStreams * 16; }

// Encode `count` symbols (any number) to `target`, streams one after the other. Every symbol has a code.
// target: at least streams_bound() bytes. sizes: bytes of each stream.
void encode_streams(const EncodeTable& table, const std::uint8_t* symbols, std::size_t count, std::byte* target,
                    std::array<std::size_t, kStreams>& sizes) noexcept;

// Decode `count` symbols. source: the streams, one after the other, `sizes` bytes each, which together are source.size().
// returns: false when a stream ends early or late, or its last byte has bits set after the last code.
bool decode_streams(const DecodeTable& table, std::span<const std::byte> source, const std::array<std::size_t, kStreams>& sizes,
                    std::uint8_t* symbols, std::size_t count) noexcept;

// Whether every byte has a code.
bool all_coded(const Lengths& lengths, const std::uint8_t* bytes, std::size_t size) noexcept;
void histogram(const std::uint8_t* bytes, std::size_t size, Counts& counts) noexcept;

}  // namespace paramwire::huffman
