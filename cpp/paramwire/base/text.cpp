#include "paramwire/base/text.hpp"

#include <array>

namespace paramwire {

std::string human_bytes(std::uint64_t bytes) {
  static constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  std::uint64_t scale = 1;
  while (unit + 1 < kUnits.size() && bytes / scale >= 1024) {
    scale *= 1024;
    ++unit;
  }
  const std::uint64_t tenths = bytes / scale * 10 + bytes % scale * 10 / scale;
  if (tenths % 10 == 0) return cat(tenths / 10, ' ', kUnits[unit]);
  return cat(tenths / 10, '.', tenths % 10, ' ', kUnits[unit]);
}

std::string hex64(std::uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out(16, '0');
  for (std::size_t i = 0; i < 16; ++i) out[15 - i] = kDigits[(value >> (4 * i)) & 15];
  return out;
}

std::string hex32(std::uint32_t value) { return hex64(value).substr(8); }

}  // namespace paramwire
