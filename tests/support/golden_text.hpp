// The words of golden files: numbers, and bytes in hexadecimal.
#pragma once

#include <gtest/gtest.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace paramwire::testing {

// Fails the test where `text` is not a number of `base` and nothing else.
inline std::uint64_t number(const std::string& text, int base = 10) {
  std::uint64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value, base);
  EXPECT_TRUE(end.ec == std::errc() && end.ptr == text.data() + text.size()) << text;
  return value;
}

inline std::vector<std::byte> unhex(const std::string& text) {
  EXPECT_EQ(text.size() % 2, 0U) << text;
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) bytes.push_back(static_cast<std::byte>(number(text.substr(i, 2), 16)));
  return bytes;
}

inline std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) {
    text += "0123456789abcdef"[std::to_integer<unsigned>(b) >> 4U];
    text += "0123456789abcdef"[std::to_integer<unsigned>(b) & 15U];
  }
  return text;
}

}  // namespace paramwire::testing
