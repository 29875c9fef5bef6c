// CRC-64 and CRC-32C folded in 512-bit registers, beside the copy: every byte is loaded once, into the register that
// both the store and the fold read.
//
// Method: crc_polynomial.hpp's source, with four 128-bit lanes a register and four registers in flight. Only
// functions marked here are compiled for AVX-512, so that no inline function of a shared header can be emitted for it
// by accident.
#include "paramwire/base/crc_bodies.hpp"

#ifndef __x86_64__

const paramwire::crc::Body* paramwire::crc::vpclmulqdq_body() noexcept { return nullptr; }

#else

#include "paramwire/base/crc_polynomial.hpp"

// GCC 12 warns about its own "undefined" operands in the intrinsics' headers (gcc.gnu.org/PR105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <cstring>
#include <immintrin.h>

#define PARAMWIRE_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,vpclmulqdq,pclmul,sse4.2"
#define PARAMWIRE_BODY __attribute__((target(PARAMWIRE_TARGET)))
#define PARAMWIRE_PART __attribute__((target(PARAMWIRE_TARGET), always_inline)) inline

namespace paramwire::crc {

namespace {

constexpr std::size_t kBlock = 64;  // bytes of one 512-bit register

// Four registers are in flight: a fold is two multiplications (latency 8 cycles on Ice Lake and later, one issued a
// cycle; uops.info, VPCLMULQDQ_ZMM) and an exclusive or, so four keep the multiplier busy for 8 cycles of 9.
constexpr std::size_t kWide = 4 * kBlock;

// From this size the main loops pay for their set-up, and one wide step is left after the largest head that aligning
// the target can cut off.
constexpr std::size_t kWideFrom = kWide + kBlock;

// Long runs are read as four streams, a page apart: prefetchers stop at the ends of pages, and with one stream the
// processor waits there each time. On cold memory (Sapphire Rapids, copies of 1 and 16 MiB with streaming stores) one
// stream moved 9.2 and 8.7 GB/s, one with software prefetch 10.8 and 10.6, two streams 10.5 and 10.9, four 11.2 and
// 11.9, eight 11.2 and 11.9; four streams 2 KiB apart 9.1 and 10.0, 8 KiB apart no more than 4 KiB. A copy without
// any CRC was no faster than four streams.
constexpr std::size_t kStreamBytes = 4096;
constexpr std::size_t kGroup = 4 * kStreamBytes;

constexpr auto i64(std::uint64_t value) noexcept { return static_cast<long long>(value); }

// 0, 1, 2, ... 63: adding n and permuting moves bytes n places towards the front.
struct alignas(64) ByteIndex {
  std::uint8_t at[kBlock];
  constexpr ByteIndex() noexcept : at{} {
    for (std::size_t i = 0; i < kBlock; ++i) at[i] = static_cast<std::uint8_t>(i);
  }
};
constexpr ByteIndex kByteIndex;

PARAMWIRE_PART __m512i index_from(std::size_t first) noexcept {
  return _mm512_add_epi8(_mm512_load_si512(&kByteIndex), _mm512_set1_epi8(static_cast<char>(first)));
}

PARAMWIRE_PART __m512i xor3(__m512i a, __m512i b, __m512i c) noexcept {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

template <class P, unsigned kDistance>
PARAMWIRE_PART __m512i multiplier() noexcept {
  return _mm512_broadcast_i32x4(_mm_set_epi64x(i64(P::fold_second(kDistance)), i64(P::fold_first(kDistance))));
}

// value * x^distance + bytes, lane by lane.
PARAMWIRE_PART __m512i fold(__m512i value, __m512i by, __m512i bytes) noexcept {
  return xor3(_mm512_clmulepi64_epi128(value, by, 0x00), _mm512_clmulepi64_epi128(value, by, 0x11), bytes);
}

// lane * x^64 mod P: the CRC register after the 16 message bytes of `lane`, started from zero.
PARAMWIRE_PART std::uint64_t reduce(Crc64Polynomial, __m128i lane) noexcept {
  using P = Crc64Polynomial;
  const __m128i first = _mm_cvtsi64_si128(i64(P::power_of_x(127)));
  const __m128i barrett = _mm_set_epi64x(i64(P::barrett_polynomial()), i64(P::barrett_quotient()));
  // The first eight bytes times x^128, the last eight times x^64; together a 128-bit value to reduce.
  const __m128i value = _mm_xor_si128(_mm_clmulepi64_si128(lane, first, 0x00), _mm_srli_si128(lane, 8));
  const __m128i quotient = _mm_clmulepi64_si128(value, barrett, 0x00);  // low half
  const __m128i product = _mm_clmulepi64_si128(quotient, barrett, 0x10);
  // The high half of quotient * P; P's constant term was cut off and contributes the quotient itself.
  const __m128i sum = _mm_xor_si128(_mm_xor_si128(value, product), _mm_slli_si128(quotient, 8));
  return static_cast<std::uint64_t>(_mm_extract_epi64(sum, 1));
}

// SSE4.2's instruction is this polynomial's reduction.
PARAMWIRE_PART std::uint64_t reduce(Crc32cPolynomial, __m128i lane) noexcept {
  const std::uint64_t first = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(lane)));
  return _mm_crc32_u64(first, static_cast<std::uint64_t>(_mm_extract_epi64(lane, 1)));
}

// The CRC register of a message so far, as 64 bytes that have the same remainder. Order of calls: head() at most once
// and first; then runs of begin(), next()..., end(); then block()s; then tail() at most once and only behind a whole
// block; then finish().
template <class P>
class Folding {
 public:
  // `state` is the CRC register (inverted CRC); it enters by exclusive or with the first bytes that follow.
  PARAMWIRE_PART explicit Folding(std::uint64_t state) noexcept
      : sum_(_mm512_setzero_si512()), pending_(_mm512_zextsi128_si512(_mm_cvtsi64_si128(i64(state)))) {}

  // `count` bytes (1 to 63) at the front of `bytes`, zeros behind. They are moved to the back: zeros before a message
  // do not change its remainder. State that reaches past them waits for the next block, or for finish().
  PARAMWIRE_PART void head(__m512i bytes, std::size_t count) noexcept {
    const __m512i turned = _mm512_permutexvar_epi8(index_from(count), _mm512_xor_si512(bytes, pending_));
    const __mmask64 back = ~std::uint64_t{0} << (kBlock - count);
    sum_ = _mm512_maskz_mov_epi8(back, turned);
    pending_ = _mm512_maskz_mov_epi8(~back, turned);
  }

  PARAMWIRE_PART void block(__m512i bytes) noexcept {
    sum_ = fold(sum_, multiplier<P, 512>(), _mm512_xor_si512(bytes, pending_));
    pending_ = _mm512_setzero_si512();
  }

  // Begins four registers that take turns; block `a` is the one behind all that is summed.
  PARAMWIRE_PART void begin(__m512i a, __m512i b, __m512i c, __m512i d) noexcept {
    block(a);
    a_ = sum_, b_ = b, c_ = c, d_ = d;
  }

  // One more block for each register, kStride bytes behind its last.
  template <std::size_t kStride>
  PARAMWIRE_PART void next(__m512i a, __m512i b, __m512i c, __m512i d) noexcept {
    const __m512i by = multiplier<P, kStride * 8>();
    a_ = fold(a_, by, a);
    b_ = fold(b_, by, b);
    c_ = fold(c_, by, c);
    d_ = fold(d_, by, d);
  }

  // Sums the four; the last block of each was kApart bytes behind that of the register before it.
  template <std::size_t kApart>
  PARAMWIRE_PART void end() noexcept {
    const __m512i b_and_d = fold(b_, multiplier<P, 2 * kApart * 8>(), d_);
    const __m512i all_but_c = fold(a_, multiplier<P, 3 * kApart * 8>(), b_and_d);
    sum_ = fold(c_, multiplier<P, kApart * 8>(), all_but_c);
  }

  // `count` bytes (1 to 63) at the front of `bytes`, zeros behind: what is summed so far moves `count` bytes forward.
  // Those pushed out at the front become a block of their own before it.
  PARAMWIRE_PART void tail(__m512i bytes, std::size_t count) noexcept {
    const __m512i index = index_from(count);
    const __m512i out = _mm512_maskz_permutexvar_epi8(~std::uint64_t{0} << (kBlock - count), index, sum_);
    sum_ = fold(out, multiplier<P, 512>(), _mm512_permutex2var_epi8(sum_, index, bytes));
  }

  // The CRC register.
  PARAMWIRE_PART std::uint64_t finish() const noexcept {
    const __m512i by = _mm512_set_epi64(0, 0, i64(P::fold_second(128)), i64(P::fold_first(128)),        //
                                        i64(P::fold_second(256)), i64(P::fold_first(256)),             //
                                        i64(P::fold_second(384)), i64(P::fold_first(384)));
    const __m512i lanes = fold(sum_, by, _mm512_maskz_mov_epi64(0xC0, sum_));
    const __m256i two = _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    const __m128i one = _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    const auto past = static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(pending_)));
    return reduce(P{}, one) ^ past;
  }

 private:
  __m512i sum_;
  __m512i pending_;
  __m512i a_, b_, c_, d_;  // the four registers of the main loop
};

// Both CRCs over one stream of registers.
class FoldingBoth {
 public:
  PARAMWIRE_PART FoldingBoth(std::uint64_t state64, std::uint64_t state32) noexcept
      : one_(state64), two_(state32) {}
  PARAMWIRE_PART void head(__m512i bytes, std::size_t count) noexcept {
    one_.head(bytes, count), two_.head(bytes, count);
  }
  PARAMWIRE_PART void block(__m512i bytes) noexcept { one_.block(bytes), two_.block(bytes); }
  PARAMWIRE_PART void begin(__m512i a, __m512i b, __m512i c, __m512i d) noexcept {
    one_.begin(a, b, c, d), two_.begin(a, b, c, d);
  }
  template <std::size_t kStride>
  PARAMWIRE_PART void next(__m512i a, __m512i b, __m512i c, __m512i d) noexcept {
    one_.template next<kStride>(a, b, c, d), two_.template next<kStride>(a, b, c, d);
  }
  template <std::size_t kApart>
  PARAMWIRE_PART void end() noexcept {
    one_.template end<kApart>(), two_.template end<kApart>();
  }
  PARAMWIRE_PART void tail(__m512i bytes, std::size_t count) noexcept {
    one_.tail(bytes, count), two_.tail(bytes, count);
  }
  PARAMWIRE_PART std::uint64_t finish64() const noexcept { return one_.finish(); }
  PARAMWIRE_PART std::uint64_t finish32() const noexcept { return two_.finish(); }

 private:
  Folding<Crc64Polynomial> one_;
  Folding<Crc32cPolynomial> two_;
};

// No CRC: what a plain copy feeds.
class FoldingNone {
 public:
  PARAMWIRE_PART void head(__m512i, std::size_t) noexcept {}
  PARAMWIRE_PART void block(__m512i) noexcept {}
  PARAMWIRE_PART void begin(__m512i, __m512i, __m512i, __m512i) noexcept {}
  template <std::size_t kStride>
  PARAMWIRE_PART void next(__m512i, __m512i, __m512i, __m512i) noexcept {}
  template <std::size_t kApart>
  PARAMWIRE_PART void end() noexcept {}
  PARAMWIRE_PART void tail(__m512i, std::size_t) noexcept {}
};

enum class Target { kNone, kCached, kStream };

// Makes the value of `bytes` unknown to the compiler, so that it cannot load the source a second time for a second
// use: in between, another process may have changed it.
PARAMWIRE_PART __m512i loaded_once(__m512i bytes) noexcept {
  asm("" : "+v"(bytes));
  return bytes;
}

template <Target kTarget>
PARAMWIRE_PART __m512i move_block(std::byte* target, const std::byte* source, std::size_t at) noexcept {
  const __m512i bytes = loaded_once(_mm512_loadu_si512(source + at));
  if constexpr (kTarget == Target::kCached) _mm512_storeu_si512(target + at, bytes);
  if constexpr (kTarget == Target::kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), bytes);
  return bytes;
}

// Fewer than 64 bytes; masked bytes are neither read nor written (Intel SDM volume 1, 15.6.4, fault suppression).
template <Target kTarget>
PARAMWIRE_PART __m512i move_part(std::byte* target, const std::byte* source, std::size_t at,
                                 std::size_t count) noexcept {
  const __mmask64 front = (std::uint64_t{1} << count) - 1;
  const __m512i bytes = loaded_once(_mm512_maskz_loadu_epi8(front, source + at));
  if constexpr (kTarget != Target::kNone) _mm512_mask_storeu_epi8(target + at, front, bytes);
  return bytes;
}

// Feeds `steps` steps from `at` on: four blocks kApart bytes apart, then the four that lie kStride bytes behind them,
// and so on.
template <Target kTarget, std::size_t kApart, std::size_t kStride, class Crc>
PARAMWIRE_PART void feed_four(Crc& crc, std::byte* target, const std::byte* source, std::size_t at,
                              std::size_t steps) noexcept {
  for (std::size_t step = 0; step < steps; ++step, at += kStride) {
    const __m512i a = move_block<kTarget>(target, source, at);
    const __m512i b = move_block<kTarget>(target, source, at + kApart);
    const __m512i c = move_block<kTarget>(target, source, at + 2 * kApart);
    const __m512i d = move_block<kTarget>(target, source, at + 3 * kApart);
    if (step == 0) {
      crc.begin(a, b, c, d);
    } else {
      crc.template next<kStride>(a, b, c, d);
    }
  }
  crc.template end<kApart>();
}

// Feeds `size` bytes of `source` to `crc` and, by kTarget, to `target`. kStream only from kWideFrom bytes up.
template <Target kTarget, class Crc>
PARAMWIRE_PART void feed(Crc& crc, std::byte* target, const std::byte* source, std::size_t size) noexcept {
  if (size < kBlock) {
    if (size != 0) crc.head(move_part<kTarget>(target, source, 0, size), size);
    return;
  }
  std::size_t at = 0;
  if (size >= kWideFrom) {
    if constexpr (kTarget != Target::kNone) {
      // Streaming stores must be aligned, and cached ones are slower when each straddles two lines.
      at = -reinterpret_cast<std::uintptr_t>(target) % kBlock;
      if (at != 0) crc.head(move_part<kTarget>(target, source, 0, at), at);
    }
    // In the second-level cache the four streams cost a third: 46 instead of 69 GB/s for crc64 of 64 KiB.
    const bool from_memory = kTarget == Target::kStream || (kTarget == Target::kNone && size >= kStreamFromBytes);
    for (; from_memory && size - at >= kGroup; at += kGroup) {
      feed_four<kTarget, kStreamBytes, kBlock>(crc, target, source, at, kStreamBytes / kBlock);
    }
    if (const std::size_t steps = (size - at) / kWide; steps != 0) {
      feed_four<kTarget, kBlock, kWide>(crc, target, source, at, steps);
      at += steps * kWide;
    }
  }
  for (; size - at >= kBlock; at += kBlock) crc.block(move_block<kTarget>(target, source, at));
  if (at != size) crc.tail(move_part<kTarget>(target, source, at, size - at), size - at);
}

template <class P>
PARAMWIRE_BODY std::uint64_t check(std::uint64_t state, const std::byte* source, std::size_t size) noexcept {
  Folding<P> crc(state);
  feed<Target::kNone>(crc, nullptr, source, size);
  return crc.finish();
}

template <class P>
PARAMWIRE_BODY std::uint64_t copy(std::uint64_t state, std::byte* target, const std::byte* source,
                                  std::size_t size) noexcept {
  Folding<P> crc(state);
  feed<Target::kCached>(crc, target, source, size);
  return crc.finish();
}

template <class P>
PARAMWIRE_BODY std::uint64_t copy_streaming(std::uint64_t state, std::byte* target, const std::byte* source,
                                            std::size_t size) noexcept {
  Folding<P> crc(state);
  feed<Target::kStream>(crc, target, source, size);
  return crc.finish();
}

std::uint64_t crc64(const std::byte* source, std::size_t size, std::uint64_t before) noexcept {
  return ~check<Crc64Polynomial>(~before, source, size);
}

// SSE4.2's instruction, 8 bytes at a time. Below a register's 64 bytes it is three times as fast as folding; and it loads no more than what
// was stored at once, where a load over several fresh stores waits for all stores before them (those of a copy that streams past the cache).
PARAMWIRE_BODY std::uint32_t crc32c_short(const std::byte* source, std::size_t size, std::uint32_t before) noexcept {
  std::uint64_t state = ~before;
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    std::uint64_t word;
    std::memcpy(&word, source + at, sizeof word);
    state = _mm_crc32_u64(state, word);
  }
  auto narrow = static_cast<std::uint32_t>(state);
  if (at + 4 <= size) {
    std::uint32_t word;
    std::memcpy(&word, source + at, sizeof word);
    narrow = _mm_crc32_u32(narrow, word);
    at += 4;
  }
  for (; at < size; ++at) narrow = _mm_crc32_u8(narrow, static_cast<unsigned char>(source[at]));
  return ~narrow;
}

std::uint32_t crc32c(const std::byte* source, std::size_t size, std::uint32_t before) noexcept {
  if (size < kBlock) return crc32c_short(source, size, before);
  return ~static_cast<std::uint32_t>(check<Crc32cPolynomial>(~before, source, size));
}

std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before,
                         bool stream) noexcept {
  const auto body = stream && size >= kWideFrom ? copy_streaming<Crc64Polynomial> : copy<Crc64Polynomial>;
  return ~body(~before, target, source, size);
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before,
                          bool stream) noexcept {
  const auto body = stream && size >= kWideFrom ? copy_streaming<Crc32cPolynomial> : copy<Crc32cPolynomial>;
  return ~static_cast<std::uint32_t>(body(~before, target, source, size));
}

PARAMWIRE_BODY std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size,
                                                std::uint32_t* extents, bool stream) noexcept {
  std::uint64_t state = ~std::uint64_t{0};
  for (std::size_t at = 0; at < size; at += kExtentBytes) {
    const std::size_t count = size - at < kExtentBytes ? size - at : std::size_t{kExtentBytes};
    FoldingBoth crc(state, ~std::uint32_t{0});
    if (stream && count >= kWideFrom) {
      feed<Target::kStream>(crc, target + at, source + at, count);
    } else {
      feed<Target::kCached>(crc, target + at, source + at, count);
    }
    state = crc.finish64();
    extents[at / kExtentBytes] = ~static_cast<std::uint32_t>(crc.finish32());
  }
  return ~state;
}

PARAMWIRE_BODY void copy_plain_streaming(std::byte* target, const std::byte* source, std::size_t size) noexcept {
  FoldingNone none;
  feed<Target::kStream>(none, target, source, size);
}

void copy_plain(std::byte* target, const std::byte* source, std::size_t size, bool stream) noexcept {
  if (stream && size >= kWideFrom) return copy_plain_streaming(target, source, size);
  if (size != 0) std::memcpy(target, source, size);
}

constexpr Body kBody = {"vpclmulqdq", crc64, crc32c, copy_crc64, copy_crc64_extents, copy_crc32c, copy_plain};

}  // namespace

const Body* vpclmulqdq_body() noexcept {
  __builtin_cpu_init();  // in case a static initialiser asks before libgcc's own
  // libgcc's answers include the operating system's: AVX-512 state that XCR0 does not enable counts as absent.
  const bool runs = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                    __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
                    __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0 &&
                    __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.2") != 0;
  return runs ? &kBody : nullptr;
}

}  // namespace paramwire::crc

#endif
