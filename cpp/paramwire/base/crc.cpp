#include "paramwire/base/crc.hpp"

#include <algorithm>
#include <cstring>
#include <isa-l/crc.h>
#include <isa-l/crc64.h>

namespace paramwire {

namespace {
const unsigned char* u8(const std::byte* p) { return reinterpret_cast<const unsigned char*>(p); }
constexpr std::size_t kStep = 4096;  // copy and check in L1-sized steps, never a second pass over cold memory
}  // namespace

std::uint64_t crc64(std::span<const std::byte> bytes, std::uint64_t before) noexcept {
  return crc64_ecma_refl(before, u8(bytes.data()), bytes.size());
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  // ISA-L takes an int length and does not invert.
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t n = std::min<std::size_t>(bytes.size() - at, std::size_t{1} << 30);
    crc = crc32_iscsi(const_cast<unsigned char*>(u8(bytes.data() + at)), static_cast<int>(n), crc);
    at += n;
  }
  return ~crc;
}

std::uint64_t copy_crc64(std::byte* target, const std::byte* source, std::size_t size, std::uint64_t before) noexcept {
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t n = std::min(kStep, size - at);
    std::memcpy(target + at, source + at, n);
    before = crc64({target + at, n}, before);
  }
  return before;
}

std::uint64_t copy_crc64_extents(std::byte* target, const std::byte* source, std::size_t size,
                                 std::span<std::uint32_t> extents) noexcept {
  std::uint64_t crc = 0;
  std::uint32_t extent = 0;
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t n = std::min(kStep, size - at);
    std::memcpy(target + at, source + at, n);
    crc = crc64({target + at, n}, crc);
    extent = crc32c({target + at, n}, at % kExtentBytes == 0 ? 0 : extent);
    extents[at / kExtentBytes] = extent;
  }
  return crc;
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t size, std::uint32_t before) noexcept {
  for (std::size_t at = 0; at < size; at += kStep) {
    const std::size_t n = std::min(kStep, size - at);
    std::memcpy(target + at, source + at, n);
    before = crc32c({target + at, n}, before);
  }
  return before;
}

std::string_view crc_implementation() noexcept { return "isa-l"; }

}  // namespace paramwire
