// SipHash-2-4 with 128 bits of output: the MAC of datagrams.
//
// Source: J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF" (2012), and the 128-bit variant of the reference
// repository (github.com/veorq/SipHash); checked against its published vectors and OpenSSL's. A body of our own: it takes about 110 ns
// for a GET's 97 bytes, OpenSSL's EVP_MAC about 160 with a context kept, and unlike that it can't fail.
// Any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paramwire {

struct SipKey {
  std::uint64_t k0 = 0, k1 = 0;  // the 16 bytes of the key as two little-endian words, first bytes first
  bool operator==(const SipKey&) const noexcept = default;
};
struct SipTag {
  std::uint64_t low = 0, high = 0;  // the 16 bytes of output in the same way
  bool operator==(const SipTag&) const noexcept = default;
};

SipTag siphash128(const SipKey& key, std::span<const std::byte> bytes) noexcept;

}  // namespace paramwire
