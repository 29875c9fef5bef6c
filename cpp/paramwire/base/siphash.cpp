#include "paramwire/base/siphash.hpp"

#include "paramwire/base/bytes.hpp"

#include <bit>

namespace paramwire {

namespace {

struct State {
  std::uint64_t v0, v1, v2, v3;

  void round() noexcept {
    v0 += v1; v1 = std::rotl(v1, 13); v1 ^= v0; v0 = std::rotl(v0, 32);
    v2 += v3; v3 = std::rotl(v3, 16); v3 ^= v2;
    v0 += v3; v3 = std::rotl(v3, 21); v3 ^= v0;
    v2 += v1; v1 = std::rotl(v1, 17); v1 ^= v2; v2 = std::rotl(v2, 32);
  }
  void word(std::uint64_t m) noexcept {
    v3 ^= m;
    round();
    round();
    v0 ^= m;
  }
  std::uint64_t finish() noexcept {
    for (int i = 0; i < 4; ++i) round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

}  // namespace

SipTag siphash128(const SipKey& key, std::span<const std::byte> bytes) noexcept {
  // "somepseudorandomlygeneratedbytes", big-endian; 0xee tells the 128-bit variant from the 64-bit one.
  State s{key.k0 ^ 0x736f6d6570736575U, key.k1 ^ 0x646f72616e646f6dU ^ 0xeeU, key.k0 ^ 0x6c7967656e657261U, key.k1 ^ 0x7465646279746573U};
  const std::uint64_t size = bytes.size();
  while (bytes.size() >= 8) {
    s.word(load_le<std::uint64_t>(bytes.data()));
    bytes = bytes.subspan(8);
  }
  std::uint64_t last = size << 56;
  for (std::size_t i = 0; i < bytes.size(); ++i) last |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  s.word(last);
  SipTag out;
  s.v2 ^= 0xeeU;
  out.low = s.finish();
  s.v1 ^= 0xddU;
  out.high = s.finish();
  return out;
}

}  // namespace paramwire
