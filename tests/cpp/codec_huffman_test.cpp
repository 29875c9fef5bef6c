// Code lengths against the unlimited optimum and by their sums; streams against their own inverse; descriptions that no encoder writes.
#include "support/codec_samples.hpp"

#include "paramwire/codec/huffman.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

namespace paramwire {
namespace {

using namespace testing;
using huffman::Counts;
using huffman::Lengths;

std::uint64_t kraft(const Lengths& lengths) {
  std::uint64_t sum = 0;
  for (const std::uint8_t length : lengths) sum += length > 0 ? std::uint64_t{1} << (huffman::kCodeBitsMax - length) : 0;
  return sum;
}

// Huffman's own: the sum of all merges is what the unlimited code takes.
std::uint64_t unlimited_bits(const Counts& counts) {
  std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>> heap;
  for (const std::uint32_t count : counts) {
    if (count > 0) heap.push(count);
  }
  std::uint64_t bits = 0;
  while (heap.size() > 1) {
    const std::uint64_t a = heap.top();
    heap.pop();
    const std::uint64_t both = a + heap.top();
    heap.pop();
    heap.push(both);
    bits += both;
  }
  return bits;
}

// The least sum under the limit, by dynamic programming over sorted counts: cost(i, leaves open at this depth), as a tree is opened level
// by level. Small alphabets only.
std::uint64_t limited_bits(const Counts& counts) {
  std::vector<std::uint64_t> sorted;
  for (const std::uint32_t count : counts) {
    if (count > 0) sorted.push_back(count);
  }
  std::sort(sorted.rbegin(), sorted.rend());
  std::vector<std::uint64_t> rest(sorted.size() + 1);  // sums from i on
  for (std::size_t i = sorted.size(); i-- > 0;) rest[i] = rest[i + 1] + sorted[i];
  const std::size_t n = sorted.size();
  // At each depth `open` nodes; `leaves` of them end there, most frequent first; each level costs the sum of what is below it.
  constexpr std::uint64_t kNone = UINT64_MAX / 2;
  std::vector<std::vector<std::uint64_t>> cost(n + 1, std::vector<std::uint64_t>(n + 1, kNone));
  cost[n][0] = 0;
  for (unsigned depth = 0; depth < huffman::kCodeBitsMax; ++depth) {
    auto next = cost;
    for (std::size_t i = 0; i <= n; ++i) {
      for (std::size_t open = 0; open <= n - i; ++open) {
        for (std::size_t leaves = 0; leaves <= open; ++leaves) {
          const std::size_t opened = 2 * (open - leaves);
          if (i + leaves > n || opened > n - i - leaves) continue;
          if (cost[i + leaves][opened] >= kNone) continue;
          next[i][open] = std::min(next[i][open], cost[i + leaves][opened] + rest[i + leaves]);
        }
      }
    }
    cost = next;
  }
  // The root is one open node at depth 0 that may not be a leaf.
  return cost[0][2] + rest[0];
}

TEST(HuffmanLengths, AreOptimalWhereTheLimitDoesNotMatterAndCompleteAlways) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    Counts counts{};
    const std::size_t symbols = 2 + random.next() % 255;
    for (std::size_t i = 0; i < symbols; ++i) counts[random.next() % 256] = static_cast<std::uint32_t>(1 + random.next() % (round % 2 == 0 ? 8 : 60000));
    if (std::count_if(counts.begin(), counts.end(), [](auto count) { return count > 0; }) < 2) continue;
    const Lengths lengths = huffman::make_lengths(counts);
    ASSERT_EQ(kraft(lengths), huffman::kTableEntries);
    const auto bits = huffman::cost_bits(counts, lengths);
    ASSERT_TRUE(bits.has_value());
    ASSERT_GE(*bits, unlimited_bits(counts));
    if (*std::max_element(lengths.begin(), lengths.end()) < huffman::kCodeBitsMax) {
      ASSERT_EQ(*bits, unlimited_bits(counts));
    }
  }
}

TEST(HuffmanLengths, AreOptimalUnderTheLimit) {
  Random random(6);
  for (int round = 0; round < 40; ++round) {
    Counts counts{};
    // Steep ones, whose unlimited codes would be longer than the limit.
    const std::size_t symbols = 12 + random.next() % 10;
    double weight = 1;
    for (std::size_t i = 0; i < symbols; ++i) {
      counts[i * 7 % 256] = static_cast<std::uint32_t>(std::min(weight, 4e8));
      weight *= 1.3 + static_cast<double>(random.next() % 100) / 100;
    }
    const Lengths lengths = huffman::make_lengths(counts);
    ASSERT_EQ(kraft(lengths), huffman::kTableEntries);
    ASSERT_EQ(*huffman::cost_bits(counts, lengths), limited_bits(counts)) << "round " << round;
  }
}

TEST(HuffmanLengths, TwoSymbolsHaveOneBitEach) {
  Counts counts{};
  counts[0] = 1;
  counts[255] = 1000000;
  const Lengths lengths = huffman::make_lengths(counts);
  EXPECT_EQ(lengths[0], 1);
  EXPECT_EQ(lengths[255], 1);
}

TEST(HuffmanDescription, ComesBackAndStaysBelowItsBound) {
  Random random(8);
  for (int round = 0; round < 200; ++round) {
    Counts counts{};
    for (std::size_t i = 0; i < 2 + random.next() % 254; ++i) counts[random.next() % 256] = static_cast<std::uint32_t>(random.next() % 5000);
    counts[3] = counts[200] = 1;
    const Lengths lengths = huffman::make_lengths(counts);
    std::vector<std::byte> bytes(huffman::kDescriptionMax);
    const std::size_t size = huffman::write_description(lengths, bytes.data());
    ASSERT_LE(size, bytes.size());
    const auto back = huffman::read_description(bytes);
    ASSERT_TRUE(back.ok()) << back.error().message();
    EXPECT_EQ(back->lengths, lengths);
    EXPECT_EQ(back->size, size);
    for (std::size_t cut = 0; cut < size; ++cut) ASSERT_FALSE(huffman::read_description(std::span(bytes).first(cut)).ok());
  }
}

TEST(HuffmanDescription, TablesThatNoEncoderWritesAreRefusedWithTheReason) {
  const auto refused = [](std::vector<unsigned> values, std::string_view reason) {
    std::vector<std::byte> bytes;
    for (const unsigned value : values) bytes.push_back(static_cast<std::byte>(value));
    const auto read = huffman::read_description(bytes);
    ASSERT_FALSE(read.ok()) << reason;
    EXPECT_EQ(read.error().code(), Code::kCorrupt);
    EXPECT_NE(read.error().message().find(reason), std::string::npos) << read.error().message();
  };
  refused({9, 9, 0x01}, "from symbol 9 to 9");
  refused({9, 8, 0x01}, "from symbol 9 to 8");
  refused({8, 9, 0x21}, "under-subscribed");
  refused({8, 10, 0x11, 0x01}, "over-subscribed");
  refused({8, 9, 0xc1}, "12 bits");
  refused({8, 10, 0x11, 0x00}, "begins or ends");
  refused({8, 10, 0x10, 0x01}, "begins or ends");
  refused({8, 10, 0x21, 0x12}, "not zero");
}

TEST(HuffmanStreams, EveryCountOfEveryAlphabetComesBack) {
  for_each_target([&](const std::string& target) {
    Random random(9);
    for (const std::size_t symbols : {2U, 3U, 20U, 64U, 65U, 256U}) {
      for (const std::size_t count : {1U, 2U, 7U, 8U, 9U, 63U, 100U, 333U, 1000U, 5000U, 32768U, 65536U}) {
        std::vector<std::uint8_t> plane(count);
        // Half of them the first symbol, half of the rest the next, ...: codes of all lengths.
        for (auto& byte : plane) byte = static_cast<std::uint8_t>(std::min<std::size_t>(static_cast<std::size_t>(std::countr_zero(random.next() | std::uint64_t{1} << 40)) % symbols + (random.next() % 3 == 0 ? random.next() % symbols : 0), symbols - 1) * (256 / symbols));
        Counts counts{};
        huffman::histogram(plane.data(), count, counts);
        std::uint64_t sum = 0;
        for (const std::uint32_t n : counts) sum += n;
        ASSERT_EQ(sum, count);
        counts[0] += 1;
        counts[255] += 1;
        const Lengths lengths = huffman::make_lengths(counts);
        ASSERT_TRUE(huffman::all_coded(lengths, plane.data(), count));
        huffman::EncodeTable encode;
        huffman::fill(encode, lengths);
        std::vector<std::byte> stored(huffman::streams_bound(*huffman::cost_bits(counts, lengths)));
        std::array<std::size_t, huffman::kStreams> sizes;
        huffman::encode_streams(encode, plane.data(), count, stored.data(), sizes);
        std::size_t total = 0;
        for (const std::size_t size : sizes) total += size;
        ASSERT_LE(total, stored.size());
        stored.resize(total);
        const std::vector<std::byte> exact(stored);
        huffman::DecodeTable decode;
        huffman::fill(decode, lengths);
        std::vector<std::uint8_t> back(count);
        ASSERT_TRUE(huffman::decode_streams(decode, exact, sizes, back.data(), count)) << target << " " << symbols << " " << count;
        ASSERT_EQ(back, plane) << target << " " << symbols << " " << count;
        // Eight symbols of each stream fewer or more (a code of one bit may hide seven in the last byte), and bytes moved from one stream to its neighbour, are seen.
        if (count > 100) {
          std::vector<std::uint8_t> other(count + 64);
          EXPECT_FALSE(huffman::decode_streams(decode, exact, sizes, other.data(), count - 64));
          EXPECT_FALSE(huffman::decode_streams(decode, exact, sizes, other.data(), count + 64));
          auto moved = sizes;
          moved[2] -= 1;
          moved[3] += 1;
          EXPECT_FALSE(huffman::decode_streams(decode, exact, moved, back.data(), count));
        }
      }
    }
  });
}

TEST(HuffmanStreams, AMissingSymbolIsSeenAtEveryPlace) {
  for_each_target([&](const std::string& target) {
    Lengths lengths{};
    for (std::size_t symbol = 0; symbol < 256; ++symbol) lengths[symbol] = symbol % 3 == 1 ? 0 : 8;
    std::vector<std::uint8_t> bytes(300);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i % 85 * 3);
    ASSERT_TRUE(huffman::all_coded(lengths, bytes.data(), bytes.size())) << target;
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      const std::uint8_t before = std::exchange(bytes[at], static_cast<std::uint8_t>(at % 85 * 3 + 1));
      ASSERT_FALSE(huffman::all_coded(lengths, bytes.data(), bytes.size())) << target << " " << at;
      bytes[at] = before;
    }
  });
}

}  // namespace
}  // namespace paramwire
