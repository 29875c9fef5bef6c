#include "paramwire/base/env.hpp"

#include <bit>
#include <cerrno>
#include <ctime>
#include <sys/random.h>

namespace paramwire {

namespace {

class SteadyClock final : public Clock {
 public:
  Micros now() const override {
    timespec ts{};
    clock_gettime(CLOCK_MONOTONIC, &ts);  // cannot fail for a clock that every kernel has
    return static_cast<Micros>(ts.tv_sec) * kMicrosPerSecond + ts.tv_nsec / 1000;
  }
};

}  // namespace

Clock& steady_clock() {
  // Never destroyed: threads may ask for the time while the process ends.
  static SteadyClock& clock = *new SteadyClock();
  return clock;
}

Random::Random(std::uint64_t seed) {
  for (std::uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15U;
    std::uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    word = z ^ (z >> 31);
  }
}

std::uint64_t Random::next() {
  const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const std::uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

std::uint64_t Random::below(std::uint64_t bound) {
  // Rejection, so that no value is favoured: the lowest 2^64 mod bound draws are thrown away.
  const std::uint64_t threshold = (0 - bound) % bound;
  for (;;) {
    const std::uint64_t draw = next();
    if (draw >= threshold) return draw % bound;
  }
}

Result<std::uint64_t> system_random() {
  std::uint64_t value = 0;
  PARAMWIRE_CHECK(system_random_fill({&value, 1}));
  return value;
}

Status system_random_fill(std::span<std::uint64_t> values) {
  if (getrandom(values.data(), values.size_bytes(), 0) != static_cast<ssize_t>(values.size_bytes())) {
    return errno_error(Code::kUnavailable, "getrandom", errno);
  }
  return {};
}

}  // namespace paramwire
