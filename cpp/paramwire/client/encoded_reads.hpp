// Raw bytes of encoded blocks: which stored bytes they need, reads of these in pieces of bounded memory, decoding while the next pieces arrive.
//
// Links move stored bytes, verified. A block's index (codec/payload.hpp) says where its chunks lie, so a range of rows costs the index, once, and the
// chunks that it touches. Memory: kDecodeBytes for each fetch under way, whatever is asked for, but for blocks whose extent table no DATA can carry.
#pragma once

#include "paramwire/codec/payload.hpp"
#include "paramwire/net/transport.hpp"

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace paramwire {

// Indexes that were read, most recently used first. By content: what it says of a block never changes. Any thread.
class ChunkIndexes {
 public:
  std::shared_ptr<const ChunkOffsets> find(const ManifestEntry& entry);  // nullptr: not here
  void keep(const ManifestEntry& entry, std::shared_ptr<const ChunkOffsets> offsets);

 private:
  struct Kept {
    std::uint64_t key = 0;
    std::shared_ptr<const ChunkOffsets> offsets;
  };
  // 8 bytes for each 64 KiB of raw bytes: the indexes of 64 GiB of blocks.
  static constexpr std::uint64_t kBytesMax = std::uint64_t{8} << 20;
  std::mutex mutex_;
  std::list<Kept> kept_;
  std::uint64_t bytes_ = 0;
};

// For who plans with a budget: what a fetch thread takes at most. Two pieces with room before them are 2.25 MiB of it; decoders, their threads and what the
// allocator keeps for these are the rest, which was chosen by the demo's budget: 6 MiB left its run over tcp 0.1 of 64.
inline constexpr std::uint64_t kDecodeBytes = std::uint64_t{7} << 20;

// What a fetch decodes with, kept for the next one: fresh memory would be faulted in page by page each time. One for each fetch at once. Any thread.
class DecodeBenches {
 public:
  struct Bench;
  DecodeBenches();
  ~DecodeBenches();
  std::unique_ptr<Bench> take();
  void give_back(std::unique_ptr<Bench> bench);
  // Memory of pieces, of those that lie here: a bench that is lent is not counted.
  std::uint64_t bytes() const;

 private:
  // Fetches of one client at once are few: its links are eight.
  static constexpr std::size_t kKept = 8;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Bench>> idle_;
};

struct DecodeCounts {
  std::atomic<std::uint64_t> stored_bytes{0};  // that were decoded; of parts of blocks, their share
  std::atomic<std::uint64_t> raw_bytes{0};     // that they became
};

// Chunks that lie whole in a read's range of raw bytes: as many as its `checks` are, where it has some.
std::size_t whole_chunks(const BlockRead& read) noexcept;

// Reads every item of `batch`, of encoded blocks: as Link::read(), but ranges and targets are of raw bytes.
// Items with `checks` and `planes`, of blocks of the codec planes, leave the planes of whole chunks apart, unverified but for their stored bytes.
// threads: of decoding, beside the caller's, which moves the bytes; started for reads of a few chunks and more, and ended here. 0: the caller decodes.
// errors of an item: the link's; kCorrupt naming block, chunk and plane when its stored bytes are as promised and do not decode.
void read_encoded(Link& link, std::span<BlockRead* const> batch, ChunkIndexes& indexes, DecodeBenches& benches, unsigned threads, DecodeCounts& counts, Micros deadline);

}  // namespace paramwire
