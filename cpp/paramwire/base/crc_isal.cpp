// The portable body: ISA-L's CRCs, the copy in steps through a small buffer.
//
// Source: ISA-L, isa-l/crc.h (crc32_iscsi: no inversion, an int length) and isa-l/crc64.h (crc64_ecma_refl: inverts itself).
#include "paramwire/base/crc_bodies.hpp"

#include <algorithm>
#include <cstring>
#include <isa-l/crc.h>
#include <isa-l/crc64.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace paramwire::crc {

namespace {

// Bytes copied and checked at a time. A step must stay in the first-level cache (32 KiB and more) beside its source and target
// while it is read up to three times; 4 KiB was as fast as 2 and 8 KiB, 16 KiB and more lost a third (DESIGN.md, section 4).
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

#ifdef __SSE2__
// memcpy that leaves `target` out of the cache. `source` is aligned to 16.
void stream_step(std::byte* target, const std::byte* source, std::size_t size) noexcept {
  const std::size_t ahead = std::min<std::size_t>(size, -reinterpret_cast<std::uintptr_t>(target) % 64);
  std::memcpy(target, source, ahead);
  std::size_t at = ahead;
  for (; size - at >= 64; at += 64) {
    for (std::size_t part = at; part < at + 64; part += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + part), bytes);
    }
  }
  std::memcpy(target + at, source + at, size - at);
}
void fence() noexcept { _mm_sfence(); }
#else
void stream_step(std::byte* target, const std::byte* source, std::size_t size) noexcept { std::memcpy(target, source, size); }
void fence() noexcept {}
#endif

// Calls check(bytes, count, at) on a private copy of each step of the source, or on the target where it is in cache: the
// source itself may change between two reads. Streamed targets are out of cache, so those steps go through `step`.
template <class Check>
void copy_steps(std::byte* target, const std::byte* source, std::size_t size, bool stream, const Check& check) noexcept {
  if (!stream) {
    for (std::size_t at = 0; at < size; at += kStep) {
      const std::size_t count = std::min(kStep, size - at);
      std::memcpy(target + at, source + at, count);
      check(target + at, count, at);
    }
    return;
  }
  alignas(64) std::byte step[kStep];
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t count = std::min(kStep, size - at);
    std::memcpy(step, source + at, count);
    check(step, count, at);
    stream_step(target + at, step, count);
  }
  fence();
}

std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before,
                         bool stream) noexcept {
  copy_steps(target, source, size, stream,
             [&](const std::byte* bytes, std::size_t count, std::size_t) { before = crc64(bytes, count, before); });
  return before;
}

std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t* extents,
                                 bool stream) noexcept {
  static_assert(kExtentBytes % kStep == 0, "a step must not lie in two extents");
  std::uint64_t all = 0;
  copy_steps(target, source, size, stream, [&](const std::byte* bytes, std::size_t count, std::size_t at) {
    all = crc64(bytes, count, all);
    std::uint32_t& extent = extents[at / kExtentBytes];
    extent = crc32c(bytes, count, at % kExtentBytes == 0 ? 0 : extent);
  });
  return all;
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before,
                          bool stream) noexcept {
  copy_steps(target, source, size, stream,
             [&](const std::byte* bytes, std::size_t count, std::size_t) { before = crc32c(bytes, count, before); });
  return before;
}

}  // namespace

const Body kIsalBody = {"isa-l", crc64, crc32c, copy_crc64, copy_crc64_extents, copy_crc32c};

}  // namespace paramwire::crc
