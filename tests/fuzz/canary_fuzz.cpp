// A decoder that believes a length. The run must find it: a fuzzer that finds nothing here would find nothing elsewhere.
#include "fuzz.hpp"

#include <cstdint>
#include <cstring>

namespace paramwire::fuzz {

void run(std::span<const std::byte> input) {
  if (input.size() < 6 || std::memcmp(input.data(), "PWR1", 4) != 0) return;
  std::uint16_t size = 0;
  std::memcpy(&size, input.data() + 4, 2);
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < size; ++i) sum += static_cast<std::uint32_t>(input.data()[6 + i]);
  require(sum != 0xffffffff, "no sum is that large");
}

}  // namespace paramwire::fuzz
