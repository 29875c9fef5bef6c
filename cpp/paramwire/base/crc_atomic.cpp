// The body of ThreadSanitizer builds: source and target are accessed by relaxed atomic words.
//
// A writer may rewrite a slot while a reader copies it (DESIGN.md, "slot protocol"); the CRC and the header decide
// afterwards whether the copy counts. To the C++ memory model that is a data race unless both sides are atomic, and
// ThreadSanitizer says so where both use one mapping (a server and a reader of its tier in one process; arenas that a
// client maps have addresses of their own, which the sanitizer takes for other memory). Blocks enter a slot and leave it
// through these functions, so with this body what the sanitizer still reports is a fault. It is built everywhere, so that
// the tests hold it to the same answers.
#include "paramwire/base/crc_bodies.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::crc {

namespace {

// Bytes copied, then checked in the target, at a time; a multiple of a word and a divisor of an extent. Speed is no
// aim here.
constexpr std::size_t kStep = 4096;
static_assert(kExtentBytes % kStep == 0, "a step must not lie in two extents");

// The arena is bytes; reading it by words needs a type that may alias them.
using Word [[gnu::may_alias]] = std::uint64_t;
constexpr std::size_t kWord = sizeof(Word);

// clang's atomics take integers, std::byte is an enumeration.
void store_byte(std::byte* target, std::byte value) noexcept {
  __atomic_store_n(reinterpret_cast<unsigned char*>(target), static_cast<unsigned char>(value), __ATOMIC_RELAXED);
}

void store_word(std::byte* target, std::uint64_t word) noexcept {
  if (reinterpret_cast<std::uintptr_t>(target) % kWord == 0) {
    __atomic_store_n(reinterpret_cast<Word*>(target), word, __ATOMIC_RELAXED);
    return;
  }
  std::byte bytes[kWord];
  std::memcpy(bytes, &word, kWord);
  for (std::size_t i = 0; i < kWord; ++i) store_byte(target + i, bytes[i]);
}

// memcpy by atomic accesses: whole words where an address is aligned to them, else single bytes.
void copy_atomic(std::byte* target, const std::byte* source, std::size_t size) noexcept {
  std::size_t at = 0;
  const auto byte = [&] {
    store_byte(target + at, static_cast<std::byte>(__atomic_load_n(reinterpret_cast<const unsigned char*>(source + at), __ATOMIC_RELAXED)));
    ++at;
  };
  const std::size_t ahead = std::min<std::size_t>(size, -reinterpret_cast<std::uintptr_t>(source) % kWord);
  while (at < ahead) byte();
  for (; size - at >= kWord; at += kWord) {
    store_word(target + at, __atomic_load_n(reinterpret_cast<const Word*>(source + at), __ATOMIC_RELAXED));
  }
  while (at < size) byte();
}

// Reading without a copy is for bytes that are the reader's own or are pinned, so ISA-L may read them as it likes.
std::uint64_t crc64(const std::byte* source, std::size_t size, std::uint64_t before) noexcept {
  return kIsalBody.crc64(source, size, before);
}
std::uint32_t crc32c(const std::byte* source, std::size_t size, std::uint32_t before) noexcept {
  return kIsalBody.crc32c(source, size, before);
}

std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before,
                         bool) noexcept {
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t count = std::min(kStep, size - at);
    copy_atomic(target + at, source + at, count);
    before = crc64(target + at, count, before);
  }
  return before;
}

std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t* extents,
                                 bool) noexcept {
  std::uint64_t all = 0;
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t count = std::min(kStep, size - at);
    copy_atomic(target + at, source + at, count);
    all = crc64(target + at, count, all);
    std::uint32_t& extent = extents[at / kExtentBytes];
    extent = crc32c(target + at, count, at % kExtentBytes == 0 ? 0 : extent);
  }
  return all;
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before,
                          bool) noexcept {
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t count = std::min(kStep, size - at);
    copy_atomic(target + at, source + at, count);
    before = crc32c(target + at, count, before);
  }
  return before;
}

void copy(std::byte* target, const std::byte* source, std::size_t size, bool) noexcept { copy_atomic(target, source, size); }

}  // namespace

const Body kAtomicBody = {"atomic-words", crc64, crc32c, copy_crc64, copy_crc64_extents, copy_crc32c, copy};

}  // namespace paramwire::crc
