// Little-endian fields in byte buffers: ByteWriter appends, ByteReader reads and never leaves its span.
//
// Explicit shifts, not memcpy of native integers: the bytes are the same on any host, and GCC compiles each to one move.
#pragma once

#include "paramwire/base/error.hpp"

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

template <std::unsigned_integral T>
T load_le(const std::byte* source) noexcept {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | (static_cast<T>(source[i]) << (8 * i)));
  return value;
}

template <std::unsigned_integral T>
void store_le(std::byte* target, T value) noexcept {
  for (std::size_t i = 0; i < sizeof(T); ++i) target[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

class ByteWriter {
 public:
  explicit ByteWriter(std::vector<std::byte>& out) : out_(out) {}

  template <std::unsigned_integral T>
  void put(T value) {
    const std::size_t at = out_.size();
    out_.resize(at + sizeof(T));
    store_le(out_.data() + at, value);
  }
  void bytes(std::span<const std::byte> source) { out_.insert(out_.end(), source.begin(), source.end()); }
  // Length as varint, then the bytes.
  void text(std::string_view source) {
    varint(source.size());
    bytes(std::as_bytes(std::span(source.data(), source.size())));
  }
  // LEB128, 1 to 10 bytes.
  void varint(std::uint64_t value) {
    while (value >= 0x80) {
      out_.push_back(static_cast<std::byte>(value | 0x80));
      value >>= 7;
    }
    out_.push_back(static_cast<std::byte>(value));
  }

 private:
  std::vector<std::byte>& out_;
};

// Sticky failure: after the first short or malformed field every get returns zero and ok() is false. Check ok() before a
// value is used for anything but further reads.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> source) : source_(source) {}

  template <std::unsigned_integral T>
  T get() noexcept {
    if (failed_ || source_.size() - at_ < sizeof(T)) return fail<T>();
    const T value = load_le<T>(source_.data() + at_);
    at_ += sizeof(T);
    return value;
  }
  std::span<const std::byte> bytes(std::uint64_t size) noexcept {
    if (failed_ || source_.size() - at_ < size) {
      failed_ = true;
      return {};
    }
    const auto part = source_.subspan(at_, static_cast<std::size_t>(size));
    at_ += static_cast<std::size_t>(size);
    return part;
  }
  std::uint64_t varint() noexcept {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const std::uint8_t byte = get<std::uint8_t>();
      if (failed_) return 0;
      if (shift == 63 && byte > 1) return fail<std::uint64_t>();  // over 64 bits
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) {
        if (byte == 0 && shift != 0) return fail<std::uint64_t>();  // one value, one encoding
        return value;
      }
    }
    return fail<std::uint64_t>();
  }
  // A string of at most `limit` bytes; a longer declared length fails before anything is read.
  std::string_view text(std::uint64_t limit) noexcept {
    const std::uint64_t size = varint();
    if (size > limit) failed_ = true;
    const auto part = bytes(size);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }

  bool ok() const noexcept { return !failed_; }
  std::size_t position() const noexcept { return at_; }
  std::size_t remaining() const noexcept { return failed_ ? 0 : source_.size() - at_; }
  bool finished() const noexcept { return ok() && at_ == source_.size(); }

 private:
  template <typename T>
  T fail() noexcept {
    failed_ = true;
    return T{};
  }

  std::span<const std::byte> source_;
  std::size_t at_ = 0;
  bool failed_ = false;
};

}  // namespace paramwire
