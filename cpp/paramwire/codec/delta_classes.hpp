// Classes of a sparse piece's elements, and the code tables that neighbouring classes share. Internal to codec/.
//
// An optimiser's update has about the same size for all weights, so in units of their last place small weights take long steps at every update, and
// large ones short steps or none. Base and result agree on the exponent of the base, so each octave has its own distances and
// steps: a third smaller than one code for all, for bf16 after 50 steps of AdamW (docs/codecs.md).
#pragma once

#include "paramwire/codec/delta_piece.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paramwire::delta {

// Exponents from `top` up are class 0, top - i is class i, and the last class has all that is below.
struct Classes {
  unsigned count = 1;
  std::uint32_t top = 0;  // exponent of class 0; 0 where there is one class
};
// Up to `count_max` classes, where the exponents of `base` are: the few far above and below the others get none of their own.
Classes choose_classes(const Element& element, std::span<const std::byte> base, unsigned count_max) noexcept;

// What a piece holds, class by class.
struct Census {
  std::array<std::uint32_t, kClassesMax> elements{};
  std::array<std::uint32_t, kClassesMax> changed{};
  std::array<huffman::Counts, kClassesMax> distances{};      // symbols: changed + 1 of them
  std::array<std::uint64_t, kClassesMax> distance_bits{};    // raw low bits
  std::array<huffman::Counts, kClassesMax> steps{};          // symbols of the changed ones; of all in a dense class
  std::array<bool, kClassesMax> dense{};                     // every element has a step, which may be 0, and no distances
};

using Groups = std::array<std::uint8_t, kClassesMax>;  // class -> code table; rises by 0 or 1 from class to class, from 0 on
// Classes that together take fewer bytes with one table than with two share it. returns: estimated bytes of all
double share_tables(const std::array<huffman::Counts, kClassesMax>& counts, unsigned classes, Groups& groups) noexcept;

}  // namespace paramwire::delta
