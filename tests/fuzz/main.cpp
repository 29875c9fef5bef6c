// LLVMFuzzerTestOneInput for run(). The input is copied to memory of exactly its size, so that reading past it is seen.
#include "fuzz.hpp"

#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const std::vector<std::byte> input(bytes, bytes + size);
  paramwire::fuzz::run(input);
  return 0;
}
