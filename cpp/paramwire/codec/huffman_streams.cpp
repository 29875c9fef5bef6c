// The loops of huffman.hpp, compiled for each vector target that Highway knows: what they need from it is shifts without flags (BMI2).
#include "paramwire/codec/huffman.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paramwire/codec/huffman_streams.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace paramwire::huffman {
namespace HWY_NAMESPACE {

static_assert(std::endian::native == std::endian::little, "streams are read and written as little-endian words");

HWY_INLINE std::uint64_t load_word(const std::uint8_t* source) {
  std::uint64_t word;
  std::memcpy(&word, source, sizeof word);
  return word;
}
HWY_INLINE void store_word(void* target, std::uint64_t word) { std::memcpy(target, &word, sizeof word); }

// ---------------------------------------------------------------- encoding

// The bits of one stream on their way out: the newest are at the top of `bits`, and below the last `held` lies what is written
// already. So nothing has to be cleared.
struct Writer {
  std::uint64_t bits = 0;
  std::uint64_t held = 0;  // its lowest byte counts; the rest is what adding whole table entries leaves there
  std::uint8_t* target;

  HWY_INLINE void put(std::uint64_t entry) {
    bits = bits >> (entry & 63) | entry;
    held += entry;
  }
  HWY_INLINE void put_pair(std::uint64_t entry) {  // its code begins above bit 9
    bits = bits >> (entry & 63) | (entry >> 5) << 37;
    held += entry;
  }
  // Write all whole bytes, and seven more that do not count.
  HWY_INLINE void flush() {
    const std::uint64_t n = held & 0xff;
    store_word(target, bits >> 1 >> (63 - n));
    target += n >> 3;
    held = n & 7;
  }
};

// One stream. returns: its end; up to 8 bytes behind it are written over.
template <bool kPairs>
std::uint8_t* encode_stream(const EncodeTable& table, const std::uint8_t* symbols, std::size_t count, std::uint8_t* target) {
  // `entry`'s lower six bits are or'ed to the bottom of the word: with at most 58 bits held they are below those.
  Writer writer{0, 0, target};
  std::size_t i = 0;
  if constexpr (kPairs) {
    for (; i + 4 <= count; i += 4) {  // 7 + 4 * 11 bits
      std::uint16_t first, second;
      std::memcpy(&first, symbols + i, 2);
      std::memcpy(&second, symbols + i + 2, 2);
      const std::uint32_t a = table.pairs[first], b = table.pairs[second];
      writer.put_pair(a);
      writer.put_pair(b);
      writer.flush();
    }
  } else {
    for (; i + 4 <= count; i += 4) {
      writer.put(table.single[symbols[i]]);
      writer.put(table.single[symbols[i + 1]]);
      writer.put(table.single[symbols[i + 2]]);
      writer.put(table.single[symbols[i + 3]]);
      writer.flush();
    }
  }
  for (; i < count; ++i) writer.put(table.single[symbols[i]]);
  writer.flush();
  if (writer.held > 0) *writer.target++ = static_cast<std::uint8_t>(writer.bits >> (64 - writer.held));
  return writer.target;
}

void encode_all(const EncodeTable& table, const std::uint8_t* symbols, std::size_t count, std::uint8_t* target, std::size_t* sizes) {
  const std::size_t part = (count + kStreams - 1) / kStreams;
  for (std::size_t s = 0; s < kStreams; ++s) {
    const std::size_t begin = std::min(count, s * part);
    const std::size_t size = std::min(count, begin + part) - begin;
    std::uint8_t* const end = table.has_pairs ? encode_stream<true>(table, symbols + begin, size, target) : encode_stream<false>(table, symbols + begin, size, target);
    sizes[s] = static_cast<std::size_t>(end - target);
    target = end;
  }
}

// ---------------------------------------------------------------- decoding

struct Reader {
  const std::uint8_t* source;  // of the stream
  std::size_t size;            // bytes of the stream
  std::uint64_t at;            // bits read
  std::uint8_t* target;
  std::uint8_t* end;           // of its symbols
};

// The next 57 bits or more of a stream. The highest bit is a mark: where it has gone tells how many bits were used.
HWY_INLINE std::uint64_t take(const std::uint8_t* source, std::uint64_t at) {
  return load_word(source + (at >> 3)) >> (at & 7) | std::uint64_t{1} << 63;
}
HWY_INLINE std::uint64_t used(std::uint64_t word) { return static_cast<std::uint64_t>(std::countl_zero(word)); }

HWY_INLINE void step(const std::uint64_t* entries, std::uint64_t& word, std::uint8_t*& target) {
  const std::uint64_t entry = entries[word & (kTableEntries - 1)];
  store_word(target, entry);
  word >>= entry >> 48 & 63;
  target += entry >> 56;
}

// The rest of a stream, with every step checked.
bool finish(const DecodeTable& table, Reader& reader) {
  while (reader.target < reader.end) {
    // Bits behind the end of the stream are zero; that they were used is seen below.
    const std::uint64_t byte = reader.at >> 3;
    if (byte > reader.size) return false;
    std::uint64_t word = 0;
    if (byte + 8 <= reader.size) word = load_word(reader.source + byte);
    else std::memcpy(&word, reader.source + byte, reader.size - static_cast<std::size_t>(byte));
    word >>= reader.at & 7;
    for (int i = 0; i < 5 && reader.target < reader.end; ++i) {
      const std::uint64_t entry = table.entries[word & (kTableEntries - 1)];
      if (reader.end - reader.target >= 8) {
        store_word(reader.target, entry);
        word >>= entry >> 48 & 63;
        reader.at += entry >> 48 & 0xff;
        reader.target += entry >> 56;
      } else {
        const auto symbol = static_cast<std::uint8_t>(entry);
        *reader.target++ = symbol;
        word >>= table.lengths[symbol];
        reader.at += table.lengths[symbol];
      }
    }
  }
  if ((reader.at + 7) >> 3 != reader.size) return false;
  return (reader.at & 7) == 0 || reader.source[reader.size - 1] >> (reader.at & 7) == 0;
}

// A round is five look-ups of at most 11 bits and 6 symbols; a word holds 57 bits or more when it begins inside a byte.
constexpr std::size_t kLookUps = 5, kRoundBytes = 7, kRoundSymbols = 6 * kLookUps;

HWY_INLINE void round_of_four(const std::uint64_t* entries, Reader* readers) {
  Reader &r0 = readers[0], &r1 = readers[1], &r2 = readers[2], &r3 = readers[3];
  std::uint64_t w0 = take(r0.source, r0.at), w1 = take(r1.source, r1.at), w2 = take(r2.source, r2.at), w3 = take(r3.source, r3.at);
  std::uint8_t *t0 = r0.target, *t1 = r1.target, *t2 = r2.target, *t3 = r3.target;
  const auto look_up = [&]() HWY_ATTR {
    step(entries, w0, t0);
    step(entries, w1, t1);
    step(entries, w2, t2);
    step(entries, w3, t3);
  };
  static_assert(kLookUps == 5);
  look_up();
  look_up();
  look_up();
  look_up();
  look_up();
  r0.at += used(w0);
  r1.at += used(w1);
  r2.at += used(w2);
  r3.at += used(w3);
  r0.target = t0;
  r1.target = t1;
  r2.target = t2;
  r3.target = t3;
}

bool decode_all(const DecodeTable& table, const std::uint8_t* source, const std::size_t* sizes, std::uint8_t* symbols, std::size_t count) {
  Reader readers[kStreams];
  const std::size_t part = (count + kStreams - 1) / kStreams;
  for (std::size_t s = 0; s < kStreams; ++s) {
    const std::size_t begin = std::min(count, s * part);
    readers[s] = {source, sizes[s], 0, symbols + begin, symbols + std::min(count, begin + part)};
    source += sizes[s];
  }
  const std::uint64_t* const entries = table.entries.data();
  while (true) {
    // Rounds that stay inside every stream, with the eight bytes that a load or store covers.
    std::size_t rounds = SIZE_MAX;
    for (const Reader& reader : readers) {
      const auto read = static_cast<std::size_t>(reader.at >> 3);
      const std::size_t bytes = reader.size > read ? reader.size - read : 0;
      const auto room = static_cast<std::size_t>(reader.end - reader.target);
      rounds = std::min(rounds, bytes < 8 ? 0 : (bytes - 8) / kRoundBytes);
      rounds = std::min(rounds, room < 8 ? 0 : (room - 8) / kRoundSymbols);
    }
    if (rounds == 0) break;
    for (; rounds > 0; --rounds) {
      // In two groups, as many as have registers: the second one's look-ups begin while the first one's are under way.
      static_assert(kStreams == 8);
      round_of_four(entries, readers);
      round_of_four(entries, readers + 4);
    }
  }
  bool whole = true;
  for (Reader& reader : readers) whole &= finish(table, reader);
  return whole;
}

// ---------------------------------------------------------------- statistics

void count_bytes(const std::uint8_t* bytes, std::size_t size, std::uint32_t* counts) {
  // Equal bytes in a row would wait for one another's store: neighbours go to different tables.
  alignas(64) std::uint32_t parts[4][256] = {};
  std::size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const std::uint64_t word = load_word(bytes + i);
    ++parts[0][word & 0xff];
    ++parts[1][word >> 8 & 0xff];
    ++parts[2][word >> 16 & 0xff];
    ++parts[3][word >> 24 & 0xff];
    ++parts[0][word >> 32 & 0xff];
    ++parts[1][word >> 40 & 0xff];
    ++parts[2][word >> 48 & 0xff];
    ++parts[3][word >> 56];
  }
  for (; i < size; ++i) ++parts[0][bytes[i]];
  for (std::size_t s = 0; s < 256; ++s) counts[s] = parts[0][s] + parts[1][s] + parts[2][s] + parts[3][s];
}

// `known`: bit b % 8 of byte b / 8 is set when byte b is known.
bool all_known(const std::uint8_t* known, const std::uint8_t* bytes, std::size_t size) {
  std::size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint8_t> d;
  alignas(16) static constexpr std::uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const auto bits = hn::LoadDup128(d, kBits);
  const auto low = hn::LoadDup128(d, known);
  const auto high = hn::LoadDup128(d, known + 16);
  const auto seven = hn::Set(d, 7);
  const auto fifteen = hn::Set(d, 15);
  const auto half = hn::Set(d, 127);
  auto least = hn::Set(d, 255);
  for (; i + hn::Lanes(d) <= size; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, bytes + i);
    const auto row = hn::And(hn::ShiftRight<3>(v), fifteen);
    const auto mask = hn::IfThenElse(hn::Gt(v, half), hn::TableLookupBytes(high, row), hn::TableLookupBytes(low, row));
    least = hn::Min(least, hn::And(mask, hn::TableLookupBytes(bits, hn::And(v, seven))));
  }
  if (!hn::AllFalse(d, hn::Eq(least, hn::Zero(d)))) return false;
#endif
  bool all = true;
  for (; i < size; ++i) all &= (known[bytes[i] / 8] >> (bytes[i] % 8) & 1) != 0;
  return all;
}

}  // namespace HWY_NAMESPACE
}  // namespace paramwire::huffman
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace paramwire::huffman {

HWY_EXPORT(encode_all);
HWY_EXPORT(decode_all);
HWY_EXPORT(count_bytes);
HWY_EXPORT(all_known);

void encode_streams(const EncodeTable& table, const std::uint8_t* symbols, std::size_t count, std::byte* target,
                    std::array<std::size_t, kStreams>& sizes) noexcept {
  HWY_DYNAMIC_DISPATCH(encode_all)(table, symbols, count, reinterpret_cast<std::uint8_t*>(target), sizes.data());
}

bool decode_streams(const DecodeTable& table, std::span<const std::byte> source, const std::array<std::size_t, kStreams>& sizes,
                    std::uint8_t* symbols, std::size_t count) noexcept {
  return HWY_DYNAMIC_DISPATCH(decode_all)(table, reinterpret_cast<const std::uint8_t*>(source.data()), sizes.data(), symbols, count);
}

bool all_coded(const Lengths& lengths, const std::uint8_t* bytes, std::size_t size) noexcept {
  alignas(16) std::array<std::uint8_t, 32> known{};
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    if (lengths[symbol] > 0) known[symbol / 8] = static_cast<std::uint8_t>(known[symbol / 8] | 1U << (symbol % 8));
  }
  return HWY_DYNAMIC_DISPATCH(all_known)(known.data(), bytes, size);
}

void histogram(const std::uint8_t* bytes, std::size_t size, Counts& counts) noexcept {
  HWY_DYNAMIC_DISPATCH(count_bytes)(bytes, size, counts.data());
}

}  // namespace paramwire::huffman
#endif
