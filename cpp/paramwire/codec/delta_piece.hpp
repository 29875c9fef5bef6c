// One piece of a delta: at most kDeltaPieceBytes of raw bytes, in the form that is smallest for them.
//
// Layout: wire/FORMAT.md, "Deltas". Internal to codec/; delta.hpp is the interface.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/codec/delta.hpp"
#include "paramwire/codec/symbols.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace paramwire::delta {

// Most bytes that a piece of `raw_size` is stored in: in any form it would else be stored as full planes, each raw behind its form.
constexpr std::uint64_t piece_bound(std::uint64_t raw_size) noexcept { return raw_size + 8; }

// What an element is to a delta: a word, perhaps with sign and exponent. Complex numbers are two elements, 4-bit ones a half.
struct Element {
  std::uint32_t bytes = 1;         // 1, 2, 4 or 8
  bool floating = false;           // sign and magnitude: the highest bit is the sign
  std::uint32_t exponent_shift = 0;
  std::uint32_t exponent_mask = 0;  // 0 unless floating
};
Element element_of(DType dtype) noexcept;

// Classes of elements by the exponent of their base: class 0 has the exponents from `top` up, each further one the next below, the last all the rest.
// Sixteen octaves below the largest weights lie hardly any others.
inline constexpr std::size_t kClassesMax = 16;
// Exponents are at most 11 bits wide.
inline constexpr std::size_t kExponents = 2048;

// ---------------------------------------------------------------- words

template <typename U>
U load(const std::byte* bytes, std::size_t index) noexcept {
  U word;
  std::memcpy(&word, bytes + index * sizeof(U), sizeof(U));
  return word;
}
template <typename U>
void store(std::byte* bytes, std::size_t index, U word) noexcept {
  std::memcpy(bytes + index * sizeof(U), &word, sizeof(U));
}

// Bits of a float as a number that grows as the float does; its own inverse. -0 lies just below 0, NaNs beyond the infinities.
template <typename U>
constexpr U ordered(U bits) noexcept {
  constexpr unsigned kTop = 8 * sizeof(U) - 1;
  const U negative = static_cast<U>(U{0} - static_cast<U>(bits >> kTop));
  return static_cast<U>(bits ^ (negative & static_cast<U>(static_cast<U>(~U{0}) >> 1)));
}
// The step from one word to another, modulo the word, small numbers for small steps of either sign: 0, -1, 1, -2, ...
template <typename U>
constexpr U step_between(U from, U to) noexcept {
  constexpr unsigned kTop = 8 * sizeof(U) - 1;
  const U difference = static_cast<U>(to - from);
  const U negative = static_cast<U>(U{0} - static_cast<U>(difference >> kTop));
  return static_cast<U>(static_cast<U>(difference << 1) ^ negative);
}
template <typename U>
constexpr U after_step(U from, U step) noexcept {
  const U negative = static_cast<U>(U{0} - static_cast<U>(step & 1));
  return static_cast<U>(from + static_cast<U>(static_cast<U>(step >> 1) ^ negative));
}
static_assert(ordered<std::uint16_t>(0x8000) == 0xffff && ordered<std::uint16_t>(ordered<std::uint16_t>(0xff81)) == 0xff81);
static_assert(step_between<std::uint8_t>(3, 2) == 1 && step_between<std::uint8_t>(3, 4) == 2 && after_step<std::uint8_t>(3, 1) == 2);
static_assert(step_between<std::uint8_t>(0, 128) == 255 && after_step<std::uint8_t>(0, 255) == 128);

// Runs body(U{}) with the unsigned type of `bytes` bytes.
template <typename Body>
auto with_word(std::uint32_t bytes, Body&& body) {
  switch (bytes) {
    case 1: return body(std::uint8_t{});
    case 2: return body(std::uint16_t{});
    case 4: return body(std::uint32_t{});
    default: return body(std::uint64_t{});
  }
}

// ---------------------------------------------------------------- one piece

// What a thread works with; kept from piece to piece.
struct EncodeScratch {
  std::vector<std::uint64_t> changed;    // a bit an element (delta_kernels.hpp)
  std::vector<std::uint64_t> with_step;  // the same, of those that a sparse piece has a step for
  std::vector<std::byte> steps;          // words, one a changed element
  std::vector<std::uint8_t> classes;     // one an element
  std::vector<std::uint32_t> distances;  // elements of a class between changed ones
  std::vector<std::byte> words;          // one an element, before they are split into planes
  std::vector<std::uint8_t> symbols;
  std::vector<std::uint8_t> more_symbols;
  std::vector<std::byte> some_base, some_next;  // samples
  huffman::EncodeTable table;
};
struct DecodeScratch {
  std::vector<std::uint8_t> symbols;
  std::vector<std::uint8_t> more_symbols;
  huffman::DecodeTable table;
};

struct Piece {
  DeltaForm form = DeltaForm::kSame;
  std::vector<std::byte> bytes;
};

// base, next: of the same size, whole elements, at most kDeltaPieceBytes.
Piece encode_piece(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, const DeltaTuning& tuning,
                   EncodeScratch& scratch);
// Into `out`, which is `base` or beside it. Undefined after an error.
// errors: kCorrupt, naming the stream.
Status decode_piece(const Element& element, DeltaForm form, std::span<const std::byte> stored, std::span<const std::byte> base, std::span<std::byte> out,
                    DecodeScratch& scratch);

// ---------------------------------------------------------------- the forms

// Byte planes: of the result with the sign at the lowest bit (kFull), of base xor result (kXor), of the steps (kSteps).
double estimate_planes(const Element& element, DeltaForm form, std::span<const std::byte> base, std::span<const std::byte> next,
                       EncodeScratch& scratch);
void encode_planes(const Element& element, DeltaForm form, std::span<const std::byte> base, std::span<const std::byte> next,
                   std::vector<std::byte>& out, EncodeScratch& scratch);
Status decode_planes(const Element& element, DeltaForm form, std::span<const std::byte> stored, std::span<const std::byte> base,
                     std::span<std::byte> out, DecodeScratch& scratch);

// kSparse. `changed` elements of the piece are, and scratch.changed says which (find_changes()).
void encode_sparse(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::size_t changed, unsigned classes_max,
                   std::vector<std::byte>& out, EncodeScratch& scratch);
Status decode_sparse(const Element& element, std::span<const std::byte> stored, std::span<const std::byte> base, std::span<std::byte> out,
                     DecodeScratch& scratch);

}  // namespace paramwire::delta
