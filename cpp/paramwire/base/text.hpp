// cat(a, b, ...): one string out of strings, characters, numbers and types with to_string(). GCC 12 has no std::format.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace paramwire {

namespace detail {

inline void append(std::string& out, std::string_view part) { out.append(part); }
inline void append(std::string& out, char part) { out.push_back(part); }
// A template, so that pointers and arrays don't decay to it.
template <std::same_as<bool> T>
void append(std::string& out, T part) { out.append(part ? "true" : "false"); }

template <typename T>
  requires(std::is_arithmetic_v<T> && !std::same_as<T, bool> && !std::same_as<T, char>)
void append(std::string& out, T part) {
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, part).ptr;
  out.append(text, static_cast<std::size_t>(end - text));  // not (text, end): GCC 12 warns of an overlap there (its bug 105651)
}

template <typename T>
  requires requires(const T& part) { { part.to_string() } -> std::convertible_to<std::string>; }
void append(std::string& out, const T& part) { out.append(part.to_string()); }

}  // namespace detail

template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

// "16 MiB", "1.5 GiB", "64 B": the largest binary unit with at most one decimal, for people. Exact bytes go beside it in errors.
std::string human_bytes(std::uint64_t bytes);
// 16 lower-case hex digits, most significant first.
std::string hex64(std::uint64_t value);
// 8 of them.
std::string hex32(std::uint32_t value);

}  // namespace paramwire
