// What every fuzz target shares. A target defines run(); libFuzzer calls it with inputs that it makes (LLVM documentation, "libFuzzer").
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace paramwire::fuzz {

void run(std::span<const std::byte> input);

// A broken promise ends the process, which is how libFuzzer learns of it; the input is kept.
inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

}  // namespace paramwire::fuzz
