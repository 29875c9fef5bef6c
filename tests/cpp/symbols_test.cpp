// What deltas are made of: streams in their smallest form, numbers as symbols, bits.
#include "paramwire/base/bytes.hpp"
#include "paramwire/codec/symbols.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace paramwire {
namespace {

using Bytes = std::vector<std::byte>;

TEST(Symbols, EveryNumberComesBackFromItsSymbolAndBits) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100000; ++i) {
    const std::uint64_t number = random() >> (random() % 64);
    const auto symbol = symbols::symbol_of(number);
    ASSERT_LT(symbol.symbol, symbols::kSymbolsMax);
    ASSERT_EQ(symbols::extra_bits(symbol.symbol), symbol.extra);
    const std::uint64_t low = number & ((std::uint64_t{1} << symbol.extra) - 1);
    ASSERT_EQ(symbols::least_number(symbol.symbol) | low, number);
    ASSERT_EQ(symbols::least_number(symbol.symbol) & low, 0U);
  }
}

TEST(Symbols, BitsComeBackAndTheEndIsExact) {
  std::mt19937_64 random(2);
  symbols::BitWriter writer;
  std::vector<std::pair<std::uint64_t, unsigned>> all;
  for (int i = 0; i < 2000; ++i) {
    const auto bits = static_cast<unsigned>(1 + random() % 61);
    all.emplace_back(random() & ((std::uint64_t{1} << bits) - 1), bits);
    writer.put(all.back().first, bits);
  }
  Bytes stream = writer.finish();
  symbols::BitReader reader(stream);
  for (const auto& [value, bits] : all) {
    ASSERT_FALSE(reader.finished());
    ASSERT_EQ(reader.get(bits), value);
  }
  EXPECT_TRUE(reader.finished());
  EXPECT_EQ(reader.get(9), 0U) << "bits past the end are zero";
  EXPECT_FALSE(reader.finished());
}

TEST(Symbols, AStreamTakesItsSmallestForm) {
  const auto stored = [](const std::vector<std::uint8_t>& bytes) {
    Bytes out;
    const auto encode_table = std::make_unique<huffman::EncodeTable>();
    symbols::put(out, bytes, *encode_table);
    ByteReader in(out);
    std::vector<std::uint8_t> back(bytes.size());
    huffman::DecodeTable table;
    EXPECT_TRUE(symbols::get(in, back, table).ok());
    EXPECT_TRUE(in.finished());
    EXPECT_TRUE(back == bytes);
    return out;
  };
  EXPECT_EQ(stored({}).size(), 0U);
  EXPECT_EQ(stored(std::vector<std::uint8_t>(100000, 7)).size(), 2U);
  std::vector<std::uint8_t> skewed(100000), even(100000);
  std::mt19937_64 random(3);
  for (auto& b : skewed) b = static_cast<std::uint8_t>(random() % 16 == 0 ? random() % 4 : 200);
  for (auto& b : even) b = static_cast<std::uint8_t>(random());
  EXPECT_LT(stored(skewed).size(), 15000U);
  EXPECT_EQ(stored(even).size(), even.size() + 1);
}

}  // namespace
}  // namespace paramwire
