// What deltas are made of: byte streams in their smallest form, numbers of any size as symbols with raw low bits, and those bits.
//
// Layout: wire/FORMAT.md, "Deltas". Internal to codec/; tests include it.
#pragma once

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/codec/huffman.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace paramwire::symbols {

// ---------------------------------------------------------------- streams of bytes

// How a stream of bytes is stored. Codes are stored: never renumber.
enum class Form : std::uint8_t {
  kRaw = 0,
  kConstant = 1,  // all bytes are the one that follows
  kHuffman = 2,   // code table, sizes of its streams, streams
};

// Bytes that a stream takes beside its symbols: form, and what Huffman coding writes before its streams. An estimate, for choices.
inline constexpr double kHuffmanOverhead = 1 + 2 + 1.5 * huffman::kStreams;

// Order-0 entropy of `counts` in bytes, at least a bit a symbol (which is what Huffman codes can do), or 1 when all are the same, and at
// most one byte a symbol: about what put() will take, without the code table. `table`: adds that, too.
double estimate(const huffman::Counts& counts, bool table) noexcept;

// Appends `source` in its smallest form. An empty stream is no byte. `table` is scratch.
void put(std::vector<std::byte>& out, std::span<const std::uint8_t> source, huffman::EncodeTable& table);
// Reads a stream of target.size() bytes. `table` is scratch.
// errors: kCorrupt with the reason.
Status get(ByteReader& in, std::span<std::uint8_t> target, huffman::DecodeTable& table);

// ---------------------------------------------------------------- numbers as symbols

// Below 8 a number is its own symbol. Above, four symbols share an octave: a symbol says how many bits a number has and the two
// after the first, the rest are raw. Weights' steps and their distances fill an octave so evenly that coding the rest would gain
// less than 0.1 % (a geometric distribution loses at most 2^-7 bits a symbol to it), and 64 bits need 252 symbols: a byte.
inline constexpr std::uint64_t kPlainNumbers = 8;
inline constexpr unsigned kSymbolsMax = 252;

struct Symbol {
  std::uint8_t symbol;
  std::uint8_t extra;  // raw low bits
};
// Without branches, here and below: whether a number is a small one is what no processor can guess.
constexpr Symbol symbol_of(std::uint64_t number) noexcept {
  const unsigned extra = static_cast<unsigned>(std::bit_width(number | 4)) - 3;
  return {static_cast<std::uint8_t>(4 * extra + (number >> extra)), static_cast<std::uint8_t>(extra)};
}
static_assert(symbol_of(7).symbol == 7 && symbol_of(8).symbol == 8 && symbol_of(10).symbol == 9 && symbol_of(16).symbol == 12);
static_assert(symbol_of(UINT64_MAX).symbol == kSymbolsMax - 1 && symbol_of(UINT64_MAX).extra == 61);

// Raw low bits of a symbol, and its number with all of them zero. Only for symbols below kSymbolsMax.
constexpr unsigned extra_bits(std::uint8_t symbol) noexcept { return (symbol | (symbol < 4 ? 4U : 0U)) / 4 - 1; }
constexpr std::uint64_t least_number(std::uint8_t symbol) noexcept {
  return std::uint64_t{symbol < 4 ? symbol : 4U + symbol % 4U} << extra_bits(symbol);
}
static_assert(least_number(8) == 8 && extra_bits(8) == 1 && least_number(12) == 16 && extra_bits(12) == 2 && least_number(251) == std::uint64_t{7} << 61);

// ---------------------------------------------------------------- bits

// Bits from the lowest of each byte up; a number's lowest bit first.
class BitWriter {
 public:
  void put(std::uint64_t value, unsigned bits) {
    if (bits > 32) {
      put(value & 0xffffffffU, 32);
      value >>= 32;
      bits -= 32;
    }
    held_ |= value << count_;  // count_ is below 8 here, so that nothing is lost
    count_ += bits;
    if (bytes_.size() - size_ < sizeof held_) bytes_.resize(std::max<std::size_t>(4096, 2 * bytes_.size()));
    store_le(bytes_.data() + size_, held_);
    size_ += count_ / 8;
    held_ >>= count_ / 8 * 8;
    count_ %= 8;
  }
  // The bytes, the last one filled with zeros. Ends the stream.
  const std::vector<std::byte>& finish() {
    bytes_.resize(size_ + (count_ > 0 ? 1 : 0));  // put() has stored what it holds
    held_ = count_ = 0;
    return bytes_;
  }
  void clear() noexcept {
    bytes_.clear();
    size_ = 0;
    held_ = count_ = 0;
  }

 private:
  std::vector<std::byte> bytes_;  // room; the first size_ are whole
  std::size_t size_ = 0;
  std::uint64_t held_ = 0;
  unsigned count_ = 0;
};

// Sticky failure, as ByteReader: bits past the end are zero, and finished() is false.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> source) : source_(source) {}

  std::uint64_t get(unsigned bits) noexcept {
    if (bits > 32) {
      const std::uint64_t low = get(32);
      return low | get(bits - 32) << 32;
    }
    const std::size_t at = at_ / 8;
    const unsigned shift = at_ % 8;
    at_ += bits;
    std::uint64_t word = 0;
    if (at + 8 <= source_.size()) [[likely]] {
      std::memcpy(&word, source_.data() + at, 8);
    } else {
      for (std::size_t i = 0; i < 8 && at + i < source_.size(); ++i) word |= static_cast<std::uint64_t>(source_[at + i]) << (8 * i);
    }
    return (word >> shift) & ((std::uint64_t{1} << bits) - 1);
  }
  // All bits were read, none too many, and those that fill the last byte are zero.
  bool finished() const noexcept {
    if ((at_ + 7) / 8 != source_.size()) return false;
    return at_ % 8 == 0 || static_cast<unsigned>(source_.back()) >> (at_ % 8) == 0;
  }

 private:
  std::span<const std::byte> source_;
  std::size_t at_ = 0;  // in bits; a piece's are far from overflowing it
};

}  // namespace paramwire::symbols
