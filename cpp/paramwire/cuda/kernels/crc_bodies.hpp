// CRCs on a device: CRC-32C of extents, CRC-64/XZ of payloads.
//
// A CRC is the remainder of a polynomial, so it is a sum: the threads of a block take words in turn (0, T, 2 T, ... is thread 0's), so that
// neighbours read neighbours, and each keeps r = (r + word) x^(T words), Horner's rule in steps of T words; at the end its remainder is
// multiplied by the power that belongs to its last word, and all are added. Leading zeros don't change a remainder, so a first, shorter
// round of words is one of leading zeros. All ones, with which a CRC begins, are added to the first bytes of the message.
//
// The product with the one power x^(T words) is a sum over the word's nibbles of what a table of 16 entries says, one table a nibble. In
// shared memory each lane has its own copy of an entry (CRC-64: half a warp, whose 8-byte loads are one transaction), in its own banks: no
// lookup waits for another. One lookup a nibble takes a clock for 32 lanes, so that CRC-32C reads 16 bytes a clock and multiprocessor: 3.7
// TB/s on 132 of them at 1.75 GHz; CRC-64 half of it.
//
// Source: V. Gopal et al., as in base/crc_polynomial.hpp, for the algebra; D. Sarwate, "Computation of cyclic redundancy checks via table
// look-up", 1988. Words are reflected: bit i of a word of W bits is the coefficient of x^(W-1-i).
#pragma once

#include "paramwire/cuda/kernels/integrity_args.hpp"
#include "paramwire/cuda/kernels/numbers.hpp"

#if defined(__CUDACC__)
#define PARAMWIRE_DEVICE_DATA static __device__ const
#else
#define PARAMWIRE_DEVICE_DATA inline constexpr
#endif

namespace paramwire::cuda {

// ---------------------------------------------------------------- algebra

struct Crc32c {
  using Word = std::uint32_t;
  static constexpr Word kPolynomial = 0x82f63b78;  // Castagnoli's, reflected: RFC 3720, appendix B.4
  static constexpr std::uint32_t kThreads = 128;
  static constexpr std::uint32_t kCopies = 32;
};
struct Crc64Xz {
  using Word = std::uint64_t;
  static constexpr Word kPolynomial = 0xc96c5795d7870f42;  // ECMA-182's, reflected
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kCopies = 16;
};

template <typename Crc>
PARAMWIRE_CONSTEXPR_BODY typename Crc::Word crc_times_x(typename Crc::Word r) {
  using Word = typename Crc::Word;
  return (r >> 1) ^ ((r & 1) != 0 ? Crc::kPolynomial : Word{0});
}
// a b modulo the polynomial.
template <typename Crc>
PARAMWIRE_CONSTEXPR_BODY typename Crc::Word crc_multiply(typename Crc::Word a, typename Crc::Word b) {
  using Word = typename Crc::Word;
  Word product = 0;
  PARAMWIRE_UNROLL(4)
  for (std::uint32_t i = 0; i < 8 * sizeof(Word); ++i) {
    product ^= (Word{0} - (a >> (8 * sizeof(Word) - 1 - i) & 1)) & b;
    b = crc_times_x<Crc>(b);
  }
  return product;
}
template <typename Crc>
constexpr typename Crc::Word crc_power(std::uint64_t exponent) {  // x^exponent
  using Word = typename Crc::Word;
  Word result = Word{1} << (8 * sizeof(Word) - 1), square = result >> 1;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = crc_multiply<Crc>(result, square);
    square = crc_multiply<Crc>(square, square);
  }
  return result;
}

// ---------------------------------------------------------------- constants

template <typename Crc>
struct CrcTables {
  static constexpr std::uint32_t kBits = 8 * sizeof(typename Crc::Word), kNibbles = kBits / 4;
  typename Crc::Word step[kNibbles * 16];     // nibble j of value v: v x^(T words), at 16 j + v
  typename Crc::Word after[Crc::kThreads];    // thread t: x^(T - t words), for the word itself and those behind it
  typename Crc::Word strips[40];              // x^(T 2^i words)
};

template <typename Crc>
constexpr CrcTables<Crc> make_crc_tables() {
  using Word = typename Crc::Word;
  constexpr std::uint32_t kBits = CrcTables<Crc>::kBits;
  CrcTables<Crc> tables{};
  Word power = crc_power<Crc>(std::uint64_t{kBits} * Crc::kThreads);
  for (std::uint32_t i = 0; i < 40; ++i) {
    tables.strips[i] = i == 0 ? power : crc_multiply<Crc>(tables.strips[i - 1], tables.strips[i - 1]);
  }
  // Bit i of the word is x^(kBits - 1 - i): from the highest bit down, each a step of x further.
  for (std::uint32_t bit = kBits; bit-- > 0;) {
    for (std::uint32_t v = 0; v < 16; ++v) {
      if ((v >> bit % 4 & 1) != 0) tables.step[bit / 4 * 16 + v] ^= power;
    }
    power = crc_times_x<Crc>(power);
  }
  const Word word = crc_power<Crc>(kBits);
  tables.after[Crc::kThreads - 1] = word;
  for (std::uint32_t t = Crc::kThreads - 1; t-- > 0;) tables.after[t] = crc_multiply<Crc>(tables.after[t + 1], word);
  return tables;
}

PARAMWIRE_DEVICE_DATA CrcTables<Crc32c> kCrc32cTables = make_crc_tables<Crc32c>();
PARAMWIRE_DEVICE_DATA CrcTables<Crc64Xz> kCrc64Tables = make_crc_tables<Crc64Xz>();
template <typename Crc>
PARAMWIRE_BODY const CrcTables<Crc>& crc_tables() {
  if constexpr (sizeof(typename Crc::Word) == 4) return kCrc32cTables;
  else return kCrc64Tables;
}

// ---------------------------------------------------------------- a message as aligned words

// Bytes [begin, end): whole aligned words [begin of the first, `words`), of which the first may begin with bytes that are not of the message,
// and fewer than a word of bytes behind them.
template <typename Crc>
struct CrcMessage {
  using Word = typename Crc::Word;
  const unsigned char* begin;
  const unsigned char* end;
  const unsigned char* first;  // begin, rounded down
  std::uint64_t words;
  // Too short for the all ones to lie in whole words: one thread goes through it by bytes.
  PARAMWIRE_BODY bool tiny() const { return end - begin < static_cast<std::ptrdiff_t>(2 * sizeof(Word)); }
};

template <typename Crc>
PARAMWIRE_BODY CrcMessage<Crc> crc_message(const void* data, std::uint64_t size) {
  constexpr std::uint64_t kBytes = sizeof(typename Crc::Word);
  const auto* begin = static_cast<const unsigned char*>(data);
  const std::uint64_t lead = reinterpret_cast<std::uintptr_t>(begin) % kBytes;
  return {begin, begin + size, begin - lead, (lead + size) / kBytes};
}

// Word `index` with the CRC's first ones in it. Bytes before the message are zero, and are not read.
template <typename Crc>
PARAMWIRE_BODY typename Crc::Word crc_word(const CrcMessage<Crc>& message, std::uint64_t index) {
  using Word = typename Crc::Word;
  constexpr std::uint32_t kBytes = sizeof(Word);
  const auto lead = static_cast<std::uint32_t>(message.begin - message.first);
  if (index == 0 && lead != 0) {
    Word word = 0;
    for (std::uint32_t i = lead; i < kBytes; ++i) word |= Word{message.first[i]} << 8 * i;
    return word ^ (~Word{0} << 8 * lead);
  }
  const Word word = *reinterpret_cast<const Word*>(message.first + index * kBytes);
  if (index == 0) return ~word;
  if (index == 1 && lead != 0) return word ^ (~Word{0} >> (8 * kBytes - 8 * lead));
  return word;
}

template <typename Crc>
PARAMWIRE_BODY typename Crc::Word crc_bytes(typename Crc::Word r, const unsigned char* begin, const unsigned char* end) {
  for (; begin != end; ++begin) {
    r ^= *begin;
    for (int bit = 0; bit < 8; ++bit) r = crc_times_x<Crc>(r);
  }
  return r;
}

// The whole CRC, from the remainder of the message's words.
template <typename Crc>
PARAMWIRE_BODY typename Crc::Word crc_finish(const CrcMessage<Crc>& message, typename Crc::Word remainder) {
  using Word = typename Crc::Word;
  if (message.tiny()) return ~crc_bytes<Crc>(~Word{0}, message.begin, message.end);
  return ~crc_bytes<Crc>(remainder, message.first + message.words * sizeof(Word), message.end);
}

// ---------------------------------------------------------------- a block's words

// Fills shared memory with the copies of the step's table. A barrier belongs behind it.
template <typename Crc, typename Lane>
PARAMWIRE_BODY void crc_fill(const Lane& lane, typename Crc::Word* table) {
  constexpr std::uint32_t kEntries = CrcTables<Crc>::kNibbles * 16;
  for (std::uint32_t i = lane.thread(); i < kEntries * Crc::kCopies; i += lane.threads()) table[i] = crc_tables<Crc>().step[i / Crc::kCopies];
}

template <typename Crc>
PARAMWIRE_BODY typename Crc::Word crc_step(const typename Crc::Word* own_copy, typename Crc::Word r) {
  typename Crc::Word next = 0;
  PARAMWIRE_UNROLL(16)
  for (std::uint32_t j = 0; j < CrcTables<Crc>::kNibbles; ++j) {
    next ^= own_copy[(j * 16 + (static_cast<std::uint32_t>(r >> 4 * j) & 15)) * Crc::kCopies];
  }
  return next;
}

// This thread's part of the remainder of words [from, to): times x^(a word), as a CRC's is. `table` is filled.
template <typename Crc, typename Lane>
PARAMWIRE_BODY typename Crc::Word crc_part(const Lane& lane, const CrcMessage<Crc>& message, std::uint64_t from, std::uint64_t to,
                                           const typename Crc::Word* table) {
  using Word = typename Crc::Word;
  if (to <= from) return 0;
  const Word* own_copy = table + lane.thread() % Crc::kCopies;
  const std::uint64_t rounds = (to - from + Crc::kThreads - 1) / Crc::kThreads;
  const std::uint64_t missing = rounds * Crc::kThreads - (to - from);  // of the first round
  Word r = 0;
  std::uint64_t round = 0;
  // The first words of the message are special, and the first round is short: those by themselves.
  for (; round < rounds && round < 2; ++round) {
    const std::uint64_t at = round * Crc::kThreads + lane.thread();
    r = round == 0 ? Word{0} : crc_step<Crc>(own_copy, r);
    if (at >= missing) r ^= crc_word(message, from + at - missing);
  }
  const Word* words = reinterpret_cast<const Word*>(message.first) + from + lane.thread() - missing;
  // Eight loads in flight, then their eight steps.
  for (; round + 8 <= rounds; round += 8) {
    Word next[8];
    PARAMWIRE_UNROLL(8)
    for (std::uint32_t i = 0; i < 8; ++i) next[i] = words[(round + i) * Crc::kThreads];
    PARAMWIRE_UNROLL(8)
    for (std::uint32_t i = 0; i < 8; ++i) r = crc_step<Crc>(own_copy, r) ^ next[i];
  }
  for (; round < rounds; ++round) r = crc_step<Crc>(own_copy, r) ^ words[round * Crc::kThreads];
  return crc_multiply<Crc>(r, crc_tables<Crc>().after[lane.thread()]);
}

template <typename Lane>
PARAMWIRE_BODY std::uint32_t warp_xor_sum(const Lane& lane, std::uint32_t value) {
  for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) value ^= lane.warp_xor(value, mask);
  return value;
}
template <typename Lane>
PARAMWIRE_BODY std::uint64_t warp_xor_sum(const Lane& lane, std::uint64_t value) {
  const std::uint32_t high = warp_xor_sum(lane, static_cast<std::uint32_t>(value >> 32));
  return std::uint64_t{high} << 32 | warp_xor_sum(lane, static_cast<std::uint32_t>(value));
}

// The sum over the block, in every thread. `scratch`: a word a warp; free again after the next barrier.
template <typename Word, typename Lane>
PARAMWIRE_BODY Word block_xor_sum(const Lane& lane, Word value, Word* scratch) {
  value = warp_xor_sum(lane, value);
  if (lane.lane_in_warp() == 0) scratch[lane.warp()] = value;
  lane.sync();
  Word sum = 0;
  for (std::uint32_t warp = 0; warp < lane.threads() / kWarp; ++warp) sum ^= scratch[warp];
  return sum;
}

template <typename Lane>
PARAMWIRE_BODY void report(const Lane& lane, Verdict* verdict, std::uint32_t number) {
  lane.atomic_add(&verdict->bad_less_one, 1);
  lane.atomic_min(&verdict->lowest, number);
}

// ---------------------------------------------------------------- kernels

template <typename Crc>
constexpr std::uint32_t crc_shared_bytes() {
  return (CrcTables<Crc>::kNibbles * 16 * Crc::kCopies + Crc::kThreads / kWarp) * std::uint32_t{sizeof(typename Crc::Word)};
}

template <typename Lane>
PARAMWIRE_BODY void crc32c_extents_body(const Lane& lane, const Crc32cArgs& args) {
  auto* table = lane.template shared<std::uint32_t>();
  std::uint32_t* scratch = table + CrcTables<Crc32c>::kNibbles * 16 * Crc32c::kCopies;
  crc_fill<Crc32c>(lane, table);
  lane.sync();
  const std::uint64_t extents = (args.size + args.extent_bytes - 1) / args.extent_bytes;
  for (std::uint64_t extent = lane.block_x(); extent < extents; extent += lane.blocks_x()) {
    const std::uint64_t begin = extent * args.extent_bytes;
    const std::uint64_t size = args.size - begin < args.extent_bytes ? args.size - begin : args.extent_bytes;
    const auto message = crc_message<Crc32c>(static_cast<const unsigned char*>(args.data) + begin, size);
    const std::uint32_t part = crc_part(lane, message, 0, message.tiny() ? 0 : message.words, table);
    const std::uint32_t remainder = block_xor_sum(lane, part, scratch);
    if (lane.thread() == 0 && crc_finish(message, remainder) != args.expected[extent]) {
      report(lane, args.verdict, args.first + static_cast<std::uint32_t>(extent));
    }
    lane.sync();  // scratch is free again
  }
}

// Strips of a payload's words, counted from its end: strip b is followed by b whole ones. Each has T 2^k words, the farthest may be shorter.
PARAMWIRE_BODY std::uint32_t crc64_strip_shift(std::uint64_t words) {
  std::uint32_t shift = 4;  // 16 rounds: what a strip costs beside its words is a few rounds' time
  while ((words >> shift) / Crc64Xz::kThreads >= kCrc64StripsMax) ++shift;
  return shift;
}

template <typename Lane>
PARAMWIRE_BODY void crc64_strips_body(const Lane& lane, const Crc64Args& args) {
  auto* table = lane.template shared<std::uint64_t>();
  std::uint64_t* scratch = table + CrcTables<Crc64Xz>::kNibbles * 16 * Crc64Xz::kCopies;
  const auto message = crc_message<Crc64Xz>(args.data, args.size);
  const std::uint32_t shift = crc64_strip_shift(message.words);
  const std::uint64_t strip = std::uint64_t{Crc64Xz::kThreads} << shift;
  const std::uint64_t behind = lane.block_x() * strip;
  // The power that this strip's remainder is multiplied by: a factor a lane for each bit of its number, their product over the warp. By the
  // first warp, while the others are at their words.
  std::uint64_t factor = std::uint64_t{1} << 63;
  if (lane.warp() == 0) {
    if (lane.lane_in_warp() < 11 && (lane.block_x() >> lane.lane_in_warp() & 1) != 0) factor = crc_tables<Crc64Xz>().strips[shift + lane.lane_in_warp()];
    for (unsigned mask = 1; mask < 16; mask *= 2) {
      const std::uint32_t high = lane.warp_xor(static_cast<std::uint32_t>(factor >> 32), mask);
      const std::uint32_t low = lane.warp_xor(static_cast<std::uint32_t>(factor), mask);
      factor = crc_multiply<Crc64Xz>(factor, std::uint64_t{high} << 32 | low);
    }
  }
  crc_fill<Crc64Xz>(lane, table);
  lane.sync();
  std::uint64_t part = 0;
  if (!message.tiny() && behind < message.words) {
    const std::uint64_t to = message.words - behind;
    part = crc_part(lane, message, to > strip ? to - strip : 0, to, table);
  }
  const std::uint64_t remainder = block_xor_sum(lane, part, scratch);
  if (lane.thread() == 0) args.remainders[lane.block_x()] = crc_multiply<Crc64Xz>(remainder, factor);
}

template <typename Lane>
PARAMWIRE_BODY void generation_body(const Lane& lane, const GenerationArgs& args) {
  if (lane.thread() != 0) return;
  const std::uint32_t number = *args.number;
  if (number != args.state->generation) args.state->met = number;
}

template <typename Lane>
PARAMWIRE_BODY void crc64_join_body(const Lane& lane, const Crc64Args& args) {
  const auto message = crc_message<Crc64Xz>(args.data, args.size);
  const std::uint64_t strip = std::uint64_t{Crc64Xz::kThreads} << crc64_strip_shift(message.words);
  const std::uint64_t strips = (message.words + strip - 1) / strip;
  std::uint64_t part = 0;
  for (std::uint64_t i = lane.thread(); i < strips; i += lane.threads()) part ^= args.remainders[i];
  const std::uint64_t remainder = block_xor_sum(lane, part, lane.template shared<std::uint64_t>());
  if (lane.thread() != 0) return;
  const std::uint64_t crc = crc_finish(message, remainder);
  if (args.crc != nullptr) *args.crc = crc;
  if (args.verdict != nullptr && crc != *args.expected) report(lane, args.verdict, args.index);
}

}  // namespace paramwire::cuda
