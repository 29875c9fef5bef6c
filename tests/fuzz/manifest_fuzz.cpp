// A manifest delta from nothing, then one on top: what is taken has the root that it names, and encodes to the same bytes.
#include "fuzz.hpp"

#include "paramwire/wire/manifest.hpp"

#include <algorithm>
#include <cstdint>

namespace paramwire::fuzz {

void run(std::span<const std::byte> input) {
  const auto tag = [](std::size_t i) { return static_cast<std::uint32_t>(i); };
  if (input.empty()) return;
  // The first byte cuts the input in two streams.
  const auto cut = std::min<std::size_t>(static_cast<std::size_t>(input[0]) * (input.size() - 1) / 255, input.size() - 1);
  const auto first = input.subspan(1, cut);
  const auto second = input.subspan(1 + cut);
  const auto base = Manifest::apply_delta(nullptr, first, tag);
  if (base.ok()) {
    const auto again = base->encode_delta(nullptr, nullptr);
    require(std::ranges::equal(again, first), "a manifest has one stream from nothing");
    std::uint64_t entries = 0;
    base->for_each([&](const Manifest::Hit& hit) {
      ++entries;
      require(base->find(hit.entry.id).has_value(), "an entry is found by its id");
      return true;
    });
    require(entries == base->entry_count(), "the count is the count");
  }
  const auto next = Manifest::apply_delta(base.ok() ? &*base : nullptr, second, tag);
  if (next.ok() && base.ok()) {
    const auto stream = next->encode_delta(&*base, nullptr);
    const auto same = Manifest::apply_delta(&*base, stream, tag);
    require(same.ok() && same->root() == next->root(), "a delta brings its base to the target");
  }
}

}  // namespace paramwire::fuzz
