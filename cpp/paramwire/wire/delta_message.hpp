// The messages by which a client that holds an older version of blocks gets what changed. Layout: wire/FORMAT.md, "Messages". As wire/message.hpp.
#pragma once

#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <vector>

namespace paramwire {

// Blocks that one DELTAS names at most. Bounds its meta to 32 KiB, and what a server does between two looks at others.
inline constexpr std::size_t kDeltasMax = 1024;
// In place of a size: the delta is being made, ask again in a while.
inline constexpr std::uint64_t kDeltaPending = ~std::uint64_t{0};

// Ask for deltas of blocks, each from the version that the client holds to the one that its snapshot's manifest names.
struct DeltasMessage {
  struct Ask {
    BlockId block;
    Version version;  // of the block's manifest entry
    Version base;     // held
    bool operator==(const Ask&) const noexcept = default;
  };
  Incarnation incarnation;  // whose manifest named the versions
  std::vector<Ask> asks;
  Bytes encode(std::uint64_t request) const;
  static Result<DeltasMessage> decode(std::span<const std::byte> meta);
};

// For the first sizes.size() of what was asked, in order: bytes of each delta, 0 when there is none (fetch the block), or kDeltaPending.
// Body: the deltas, one after the other (wire/FORMAT.md, "Deltas").
struct DeltaListMessage {
  std::vector<std::uint64_t> sizes;
  std::uint64_t body_size() const noexcept;
  Bytes encode(std::uint64_t request) const;
  // errors: kCorrupt also when the sizes together exceed 2^40.
  static Result<DeltaListMessage> decode(std::span<const std::byte> meta);
};

}  // namespace paramwire
