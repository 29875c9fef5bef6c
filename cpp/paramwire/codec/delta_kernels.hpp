// The loops of sparse pieces that touch every element, compiled for each vector target that Highway knows. Internal to codec/; tests include it.
//
// They look at 64 elements at once: which of them changed, or are of a class, are the bits of a word, element i at bit i % 64 of word i / 64. So what
// lies between two changes is counted, not visited.
#pragma once

#include "paramwire/codec/delta_numbers.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paramwire::delta {

inline constexpr std::size_t kWordElements = 64;
constexpr std::size_t words_of(std::size_t elements) noexcept { return (elements + kWordElements - 1) / kWordElements; }
// Class of what fills the last 64 elements.
inline constexpr std::uint8_t kNoClass = 255;

// Sets the bits of the elements that differ. changed: words_of(elements of base). returns: how many do
std::size_t find_changes(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, std::uint64_t* changed) noexcept;

// classes: one for each of 64 * words_of(elements), kNoClass behind the last element
void find_classes(const Element& element, const Classes& classes, std::span<const std::byte> base, std::uint8_t* target) noexcept;

// Sets the bits of the elements whose class c has bit c of `wanted`. classes: as find_classes() leaves them
void find_elements_of(const std::uint8_t* classes, std::size_t elements, std::uint32_t wanted, std::uint64_t* selected) noexcept;

// Counts the unchanged elements of a class before its first change (distances[c]) and behind each change (distances[count + k], k-th change of the piece).
// classes, changed: as above; distances: count + changed elements; in_class: elements of each class
void measure_distances(const std::uint8_t* classes, const std::uint64_t* changed, std::size_t elements, unsigned count, std::uint32_t* distances,
                       std::array<std::uint32_t, kClassesMax>& in_class) noexcept;

// What apply_changes() met, if anything.
struct ApplyFault {
  enum class Kind : std::uint8_t {
    kNone,
    kStepTooLong,  // `number`, more than a word has, at element `at`
    kNoStep,       // at element `at`: a step of 0, or none
    kDistanceTooLong,  // of class `at`: it goes `number` elements beyond the last of them
  };
  Kind kind = Kind::kNone;
  std::size_t at = 0;
  std::uint64_t number = 0;
};

// Writes base with all changes to `out`, which is `base` or beside it. dense: bit c for class c. The readers are left behind what was read.
ApplyFault apply_changes(const Element& element, const Classes& classes, std::uint32_t dense, NumberReader& distances, NumberReader& steps,
                         std::span<const std::byte> base, std::span<std::byte> out) noexcept;

}  // namespace paramwire::delta
