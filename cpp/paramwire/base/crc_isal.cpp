// The portable body: ISA-L's CRCs, the copy in small steps.
//
// Source: ISA-L, isa-l/crc.h (crc32_iscsi: no inversion, an int length) and isa-l/crc64.h (crc64_ecma_refl: inverts
// itself).
#include "paramwire/base/crc_bodies.hpp"

#include <algorithm>
#include <cstring>
#include <isa-l/crc.h>
#include <isa-l/crc64.h>
#include <type_traits>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace paramwire::crc {

namespace {

// Bytes copied and checked at a time: a step must stay in the first-level cache (32 KiB and more) while it is read
// again. 16 KiB and more lost a third (DESIGN.md, section 4).
constexpr std::size_t kStep = 4096;

const unsigned char* u8(const std::byte* p) noexcept { return reinterpret_cast<const unsigned char*>(p); }

std::uint64_t crc64(const std::byte* source, std::size_t size, std::uint64_t before) noexcept {
  return crc64_ecma_refl(before, u8(source), size);
}

std::uint32_t crc32c(const std::byte* source, std::size_t size, std::uint32_t before) noexcept {
  std::uint32_t state = ~before;
  for (std::size_t at = 0; at < size;) {
    const std::size_t count = std::min<std::size_t>(size - at, std::size_t{1} << 30);
    state = crc32_iscsi(const_cast<unsigned char*>(u8(source + at)), static_cast<int>(count), state);
    at += count;
  }
  return ~state;
}

#ifdef __x86_64__
// Bytes streamed at a time: four steps side by side, for the reason at kStreamBytes in crc_avx512.cpp.
constexpr std::size_t kGroup = 4 * kStep;

// Copies kGroup bytes to `target` past the cache and, if kKept, to `group` in the cache, each byte loaded once. Both targets
// are aligned to 32.
template <bool kKept>
__attribute__((target("avx")))
void stream_group(std::byte* target, const std::byte* source, std::byte* group) noexcept {
  for (std::size_t line = 0; line < kStep; line += 64) {
    for (std::size_t at = line; at < kGroup; at += kStep) {
      __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(source + at));
      __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(source + at + 32));
      asm("" : "+x"(a), "+x"(b));  // as loaded_once in crc_avx512.cpp
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + 32), b);
      if constexpr (kKept) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(group + at), a);
        _mm256_store_si256(reinterpret_cast<__m256i*>(group + at + 32), b);
      }
    }
  }
}

// What copies are checked by that are not checked.
struct Unchecked {
  void operator()(const std::byte*, std::size_t) const noexcept {}
};

// Streams whole groups and returns how many bytes that were; the rest is the caller's. 0 without AVX: stores of 16
// bytes past the cache were slower than memcpy (Sapphire Rapids, 1 MiB from memory: 0.95 of memcpy, those of 32 bytes
// 1.22).
template <class Check>
std::size_t stream_groups(std::byte* target, const std::byte* source, std::size_t size, const Check& check) noexcept {
  if (size < kGroup + 64 || __builtin_cpu_supports("avx") == 0) return 0;
  std::size_t at = -reinterpret_cast<std::uintptr_t>(target) % 64;
  std::memcpy(target, source, at);
  check(target, at);
  constexpr bool kKept = !std::is_same_v<Check, Unchecked>;
  alignas(64) std::byte group[kKept ? kGroup : 64];
  for (; size - at >= kGroup; at += kGroup) {
    stream_group<kKept>(target + at, source + at, group);
    check(group, kGroup);
  }
  return at;
}
#else
template <class Check>
std::size_t stream_groups(std::byte*, const std::byte*, std::size_t, const Check&) noexcept {
  return 0;
}
#endif

// Copies, and calls check(bytes, count) for one piece after the other. The bytes it is shown are the target or
// another copy from the same load, never the source: that may change between two reads.
template <class Check>
void copy_steps(std::byte* target, const std::byte* source, std::size_t size, bool stream,
                const Check& check) noexcept {
  for (std::size_t at = stream ? stream_groups(target, source, size, check) : 0; at < size;) {
    const std::size_t count = std::min(kStep, size - at);
    std::memcpy(target + at, source + at, count);
    check(target + at, count);
    at += count;
  }
}

std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before,
                         bool stream) noexcept {
  copy_steps(target, source, size, stream,
             [&](const std::byte* bytes, std::size_t count) { before = crc64(bytes, count, before); });
  return before;
}

std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t* extents,
                                 bool stream) noexcept {
  std::uint64_t all = 0;
  for (std::size_t at = 0; at < size; at += kExtentBytes) {
    std::uint32_t extent = 0;
    copy_steps(target + at, source + at, std::min<std::size_t>(kExtentBytes, size - at), stream,
               [&](const std::byte* bytes, std::size_t count) {
                 all = crc64(bytes, count, all);
                 extent = crc32c(bytes, count, extent);
               });
    extents[at / kExtentBytes] = extent;
  }
  return all;
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before,
                          bool stream) noexcept {
  copy_steps(target, source, size, stream,
             [&](const std::byte* bytes, std::size_t count) { before = crc32c(bytes, count, before); });
  return before;
}

void copy(std::byte* target, const std::byte* source, std::size_t size, bool stream) noexcept {
  const std::size_t at = stream ? stream_groups(target, source, size, Unchecked()) : 0;
  if (at < size) std::memcpy(target + at, source + at, size - at);
}

}  // namespace

const Body kIsalBody = {"isa-l", crc64, crc32c, copy_crc64, copy_crc64_extents, copy_crc32c, copy};

}  // namespace paramwire::crc
