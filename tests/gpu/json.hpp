// Just enough JSON to be written: what programs here tell scripts.
#pragma once

#include "paramwire/base/text.hpp"

#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>

namespace paramwire::gpu {

inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char each : text) {
    if (each == '"' || each == '\\') out += '\\';
    // What a driver says may hold anything; it is for people.
    out += static_cast<unsigned char>(each) < 0x20 ? ' ' : each;
  }
  return out + '"';
}
// JSON has no infinities and no NaN.
inline std::string json_number(double value) { return std::isfinite(value) ? cat(value) : "null"; }

// returns: whether it could be written
inline bool write_file(const std::string& path, std::string_view text) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return false;
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  return std::fclose(file) == 0 && written;
}

}  // namespace paramwire::gpu
