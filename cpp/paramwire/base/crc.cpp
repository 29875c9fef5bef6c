#include "paramwire/base/crc.hpp"

#include "paramwire/base/crc_bodies.hpp"

#include <atomic>
#include <cassert>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace paramwire {

namespace {

const crc::Body* choose() noexcept {
#ifdef __SANITIZE_THREAD__
  return &crc::kAtomicBody;
#else
  const crc::Body* fast = crc::vpclmulqdq_body();
  return fast != nullptr ? fast : &crc::kIsalBody;
#endif
}

bool streams(std::size_t size, Stores stores) noexcept {
  return stores >= Stores::kStreaming || (stores == Stores::kBySize && size >= kStreamFromBytes);
}

// Of a copy that streamed.
template <typename Crc>
Crc ended(Crc crc, bool stream, Stores stores) noexcept {
  if (stream && stores != Stores::kStreamingOpen) end_streaming();
  return crc;
}

}  // namespace

const crc::Body& crc::chosen_body() noexcept {
  // Constant-initialised, so usable from any static initialiser. Relaxed on both sides: the pointer is all that is
  // shared (tables are constants), and threads that choose at the same time choose the same body.
  static constinit std::atomic<const Body*> chosen{nullptr};
  const Body* body = chosen.load(std::memory_order_relaxed);
  if (body == nullptr) [[unlikely]] {
    body = choose();
    chosen.store(body, std::memory_order_relaxed);
  }
  return *body;
}

std::uint64_t crc64(std::span<const std::byte> bytes, std::uint64_t before) noexcept {
  return crc::chosen_body().crc64(bytes.data(), bytes.size(), before);
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  return crc::chosen_body().crc32c(bytes.data(), bytes.size(), before);
}

std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before,
                         Stores stores) noexcept {
  const bool stream = streams(size, stores);
  return ended(crc::chosen_body().copy_crc64(target, source, size, before, stream), stream, stores);
}

std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size,
                                 std::span<std::uint32_t> extents, Stores stores) noexcept {
  assert(extents.size() >= extent_count(size));
  const bool stream = streams(size, stores);
  return ended(crc::chosen_body().copy_crc64_extents(target, source, size, extents.data(), stream), stream, stores);
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before,
                          Stores stores) noexcept {
  const bool stream = streams(size, stores);
  return ended(crc::chosen_body().copy_crc32c(target, source, size, before, stream), stream, stores);
}

void copy_bytes(std::byte* target, const std::byte* source, std::size_t size, Stores stores) noexcept {
  const bool stream = streams(size, stores);
  crc::chosen_body().copy(target, source, size, stream);
  if (stream && stores != Stores::kStreamingOpen) end_streaming();
}

void end_streaming() noexcept {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

std::string_view crc_implementation() noexcept { return crc::chosen_body().name; }

}  // namespace paramwire
