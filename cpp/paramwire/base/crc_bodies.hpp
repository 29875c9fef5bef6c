// The bodies behind crc.hpp, for its dispatch, for the tests (each body against a reference) and for the benchmark.
//
// A body is a table of functions with the meanings of crc.hpp. `stream` asks for a target that does not stay in cache
// (non-temporal stores, which the caller ends by end_streaming()); a body may decline where that is slower or the machine
// has none.
// Tables are constants; any thread.
#pragma once

#include "paramwire/base/crc.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace paramwire::crc {

struct Body {
  std::string_view name;
  std::uint64_t (*crc64)(const std::byte* source, std::size_t size, std::uint64_t before) noexcept;
  std::uint32_t (*crc32c)(const std::byte* source, std::size_t size, std::uint32_t before) noexcept;
  std::uint64_t (*copy_crc64)(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before,
                              bool stream) noexcept;
  std::uint64_t (*copy_crc64_extents)(std::byte* target, const std::byte* source, std::size_t size,
                                      std::uint32_t* extents, bool stream) noexcept;
  std::uint32_t (*copy_crc32c)(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before,
                               bool stream) noexcept;
  void (*copy)(std::byte* target, const std::byte* source, std::size_t size, bool stream) noexcept;
};

// ISA-L for the CRCs, 4 KiB steps. Every machine that ISA-L builds for; streams on x86-64 with AVX.
extern const Body kIsalBody;

// Reads the source by relaxed atomic words, so that ThreadSanitizer takes a concurrent rewrite for what it is: allowed.
// Every machine; slower than the others, chosen in ThreadSanitizer builds only.
extern const Body kAtomicBody;

// One pass in 512-bit registers. Null where the compiler's target is not x86-64 or the machine or its operating
// system lacks AVX-512 (F, BW, VL, DQ, VBMI) or VPCLMULQDQ: Intel since Ice Lake, AMD since Zen 4 have all of them.
const Body* vpclmulqdq_body() noexcept;

// The body that crc.hpp's functions use in this process.
const Body& chosen_body() noexcept;

}  // namespace paramwire::crc
