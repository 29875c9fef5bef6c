// Where the values of a graph's operations lie in one block of memory: each as long as somebody still reads it. Pure.
#pragma once

#include "paramwire/compute/graph.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paramwire {

// By operation: the last operation that reads its value, itself where none does; the output's is the number of operations.
std::vector<std::size_t> last_uses(const Graph& graph);

struct ValuePlaces {
  std::vector<std::uint64_t> offsets;  // by operation, in floats; multiples of 16 (64 bytes)
  std::uint64_t floats = 0;            // in all
};
// step_tokens: rows of values that have one a token.    last_use: as last_uses(), or later ones
ValuePlaces place_values(const Graph& graph, std::uint64_t step_tokens, const std::vector<std::size_t>& last_use);

}  // namespace paramwire
