#include "paramwire/base/crc.hpp"
#include "paramwire/base/crc_polynomial.hpp"

namespace paramwire {

namespace {

// a * b mod P, both reflected: bit W - 1 - i of a word of W bits is the coefficient of x^i.
template <typename Polynomial, typename Word>
Word multiply(Word a, Word b) noexcept {
  Word product = 0;
  for (Word bit = Word{1} << (8 * sizeof(Word) - 1); bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = static_cast<Word>(Polynomial::times_x(b));
  }
  return product;
}

// Appending n bytes multiplies the remainder by x^(8n); initial value and final xor cancel out, as in zlib's crc32_combine.
template <typename Polynomial, typename Word>
Word join(Word first, Word second, std::uint64_t second_size) noexcept {
  Word power = Word{1} << (8 * sizeof(Word) - 9);  // x^8
  for (std::uint64_t n = second_size; n != 0; n >>= 1) {
    if ((n & 1) != 0) first = multiply<Polynomial>(first, power);
    power = multiply<Polynomial>(power, power);
  }
  return first ^ second;
}

}  // namespace

std::uint64_t crc64_join(std::uint64_t first, std::uint64_t second, std::uint64_t second_size) noexcept {
  return join<crc::Crc64Polynomial>(first, second, second_size);
}

std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_size) noexcept {
  return join<crc::Crc32cPolynomial>(first, second, second_size);
}

}  // namespace paramwire
