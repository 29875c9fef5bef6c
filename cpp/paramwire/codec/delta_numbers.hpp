// Numbers of a sparse piece as its reader takes them: class by class from code tables that neighbouring classes share. Internal to codec/.
#pragma once

#include "paramwire/codec/delta_classes.hpp"
#include "paramwire/codec/symbols.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paramwire::delta {

// Decoded tables of one kind of number, distances or steps.
struct Streams {
  // Where each table is read.
  struct Table {
    const std::uint8_t* at = nullptr;
    const std::uint8_t* end = nullptr;
  };
  std::array<Table, kClassesMax> tables{};
  Groups groups{};
  unsigned count = 0;  // of tables
  std::span<const std::byte> bits;
};

// Numbers of several classes in the order of the piece.
class NumberReader {
 public:
  explicit NumberReader(const Streams& streams) : streams_(streams), bits_(streams.bits) {}

  // Sets `failed` when the class's table has no more.
  [[gnu::always_inline]] std::uint64_t get(std::size_t c) noexcept {
    Streams::Table& table = streams_.tables[streams_.groups[c]];
    if (table.at == table.end) [[unlikely]] {
      failed = true;
      return 0;
    }
    const std::uint8_t symbol = *table.at++;
    return symbols::least_number(symbol) | bits_.get(symbols::extra_bits(symbol));
  }
  bool finished() const noexcept {
    for (unsigned t = 0; t < streams_.count; ++t) {
      if (streams_.tables[t].at != streams_.tables[t].end) return false;
    }
    return !failed && bits_.finished();
  }

  bool failed = false;

 private:
  Streams streams_;
  symbols::BitReader bits_;
};

}  // namespace paramwire::delta
