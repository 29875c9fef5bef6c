// Constants for folding CRCs by carry-less multiplication, computed from the polynomial at compile time.
//
// Source: V. Gopal, E. Ozturk, J. Guilford, G. Wolrich, W. Feghali, M. Dixon, D. Karakoyunlu, "Fast CRC Computation
// for Generic Polynomials Using PCLMULQDQ Instruction", Intel white paper 323102, December 2009: folding ("Fold by
// 4"), reduction 128 -> 64 and Barrett reduction, in their bit-reflected forms. Internal to base/; the tests include
// it too.
//
// Notation. Message bytes are read little-endian and CRCs are reflected, so in a word of W bits bit i is the
// coefficient of x^(W-1-i): the first byte of a message has the highest powers. A carry-less product of two reflected
// 64-bit words, read as a reflected 128-bit word, is a * b * x (the product has 127 bits and leaves the top bit
// empty); every exponent below that is one less than the algebra asks for pays for this x.
#pragma once

#include <cstdint>

namespace paramwire::crc {

// Coefficients of `polynomial` (degree `kWidth`, the leading one left out) in reflected order.
template <unsigned kWidth>
constexpr std::uint64_t reflect(std::uint64_t polynomial) noexcept {
  std::uint64_t reflected = 0;
  for (unsigned i = 0; i < kWidth; ++i) reflected |= (polynomial >> i & 1) << (kWidth - 1 - i);
  return reflected;
}

// A generator polynomial of degree `kWidthBits` (32 or 64), given as catalogues print it: highest power first,
// leading one left out.
template <unsigned kWidthBits, std::uint64_t kPolynomial>
struct Polynomial {
  static constexpr unsigned kWidth = kWidthBits;
  static constexpr std::uint64_t kReflected = reflect<kWidth>(kPolynomial);

  // remainder * x mod P, remainder reflected in kWidth bits.
  static constexpr std::uint64_t times_x(std::uint64_t remainder) noexcept {
    return (remainder >> 1) ^ ((remainder & 1) != 0 ? kReflected : 0);
  }

  // x^power mod P as a reflected 64-bit word (a 32-bit remainder lies in the upper half).
  static consteval std::uint64_t power_of_x(unsigned power) noexcept {
    std::uint64_t remainder = std::uint64_t{1} << (kWidth - 1);
    for (unsigned i = 0; i < power; ++i) remainder = times_x(remainder);
    return remainder << (64 - kWidth);
  }

  // The functions below are consteval: their loops are for the compiler, never for a call.

  // To move a 128-bit lane `distance` bits ahead in the message, multiply its first eight bytes by first(), its last
  // eight by second(), and add the products: a * x^(distance + 64) and b * x^distance modulo P.
  static consteval std::uint64_t fold_first(unsigned distance) noexcept { return power_of_x(distance + 63); }
  static consteval std::uint64_t fold_second(unsigned distance) noexcept { return power_of_x(distance - 1); }

  // floor(x^128 / P) without its constant term, as a reflected 65-bit word cut to 64 bits: x^64 is bit 0. Only for
  // kWidth 64. The term that is cut off reaches only the half of the product that Barrett reduction throws away.
  static consteval std::uint64_t barrett_quotient() noexcept {
    static_assert(kWidth == 64);
    std::uint64_t quotient = 0;
    std::uint64_t remainder = std::uint64_t{1} << 63;  // x^0
    for (unsigned power = 1; power < 128; ++power) {
      // x^(power-1) * x overflows past x^63: the division of x^128 by P has a one at x^(128 - power).
      if ((remainder & 1) != 0) quotient |= std::uint64_t{1} << (power - 64);
      remainder = times_x(remainder);
    }
    return quotient;
  }

  // P as a reflected 65-bit word cut to 64 bits (x^64 is bit 0; the constant term, always one, is cut off).
  static consteval std::uint64_t barrett_polynomial() noexcept {
    static_assert(kWidth == 64);
    return kReflected << 1 | 1;
  }
};

using Crc64Polynomial = Polynomial<64, 0x42F0E1EBA9EA3693>;  // ECMA-182, as in CRC-64/XZ
using Crc32cPolynomial = Polynomial<32, 0x1EDC6F41>;         // Castagnoli, RFC 3720

}  // namespace paramwire::crc
