#include "paramwire/base/crc.hpp"
#include "paramwire/base/crc_polynomial.hpp"

namespace paramwire {

namespace {

using crc::Crc64Polynomial;

// a * b mod P, both reflected: bit 63 - i is the coefficient of x^i.
std::uint64_t multiply(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t product = 0;
  for (std::uint64_t bit = std::uint64_t{1} << 63; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = Crc64Polynomial::times_x(b);
  }
  return product;
}

}  // namespace

// Appending n bytes multiplies the remainder by x^(8n); initial value and final xor cancel out, as in zlib's crc32_combine.
std::uint64_t crc64_join(std::uint64_t first, std::uint64_t second, std::uint64_t second_size) noexcept {
  std::uint64_t power = std::uint64_t{1} << 55;  // x^8
  for (std::uint64_t n = second_size; n != 0; n >>= 1) {
    if ((n & 1) != 0) first = multiply(first, power);
    power = multiply(power, power);
  }
  return first ^ second;
}

}  // namespace paramwire
