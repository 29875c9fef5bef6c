// Elements to byte planes and back. Internal to codec/; tests include it.
//
// Plane p holds byte p of every element, lowest first, in planes of `stride` bytes. `rotate` first turns each element left by one
// bit, so that the sign of a float leaves the byte of its exponent for the lowest bit of all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paramwire::planes {

// width: 1, 2, 4 or 8 bytes an element. source: count * width bytes. No overlap; any alignment.
void split(const std::uint8_t* source, std::size_t count, std::size_t width, bool rotate, std::uint8_t* planes, std::size_t stride) noexcept;
// `plane[p]` is where plane p lies: width pointers.
void merge(const std::uint8_t* const* plane, std::size_t count, std::size_t width, bool rotate, std::uint8_t* target) noexcept;

}  // namespace paramwire::planes
