#include "paramwire/compute/value_places.hpp"

#include <algorithm>

namespace paramwire {

std::vector<std::size_t> last_uses(const Graph& graph) {
  const std::vector<Op>& ops = graph.ops();
  std::vector<std::size_t> last_use(ops.size());
  for (std::size_t index = 0; index < ops.size(); ++index) {
    last_use[index] = index;
    for (const std::uint32_t input : ops[index].inputs) last_use[input] = index;
  }
  last_use.back() = ops.size();  // the output stays for the caller
  return last_use;
}

// The lowest gap that no value alive at the same time uses.
ValuePlaces place_values(const Graph& graph, std::uint64_t step_tokens, const std::vector<std::size_t>& last_use) {
  struct Place {
    std::uint64_t begin, end;
    std::size_t last;
  };
  std::vector<Place> live;  // by begin
  const std::vector<Op>& ops = graph.ops();
  ValuePlaces out;
  out.offsets.assign(ops.size(), 0);
  for (std::size_t index = 0; index < ops.size(); ++index) {
    std::erase_if(live, [index](const Place& place) { return place.last < index; });
    const std::uint64_t rows = ops[index].last_only ? 1 : step_tokens;
    const std::uint64_t size = (rows * ops[index].width + 15) / 16 * 16;
    std::uint64_t at = 0;
    auto next = live.begin();
    while (next != live.end() && next->begin - at < size) at = (next++)->end;
    live.insert(next, {at, at + size, last_use[index]});
    out.offsets[index] = at;
    out.floats = std::max(out.floats, at + size);
  }
  return out;
}

}  // namespace paramwire
