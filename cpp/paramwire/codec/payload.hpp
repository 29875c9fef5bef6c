// The stored bytes of an encoded block: an index of stored sizes, then one frame for each chunk. Layout: wire/FORMAT.md, "Encoded blocks".
//
// Transports move these bytes and check them as any others; only who publishes and who fetches knows what they mean.
#pragma once

#include "paramwire/codec/block.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace paramwire {

constexpr std::uint64_t chunk_index_bytes(std::uint64_t raw_size) noexcept { return chunk_count(raw_size) * sizeof(std::uint32_t); }

// Where each chunk's frame begins, bytes from the payload's start, and behind the last one where that ends: chunk_count(raw_size) + 1 offsets.
using ChunkOffsets = std::vector<std::uint64_t>;

// Reads the index. `front`: the first bytes of the payload, at least chunk_index_bytes(raw_size) of them.
// errors: kCorrupt naming the chunk: a size of 0 or beyond the codec's bound, or sizes that do not add up to `stored_size`; kUnavailable: no such
//         codec here. Takes 8 bytes a chunk, whatever is declared.
Result<ChunkOffsets> read_chunk_index(CodecId codec, DType dtype, std::uint64_t raw_size, std::uint64_t stored_size, std::span<const std::byte> front);

// Decodes a whole payload that somebody has verified. raw: all of the block's raw bytes. errors: as read_chunk_index() and decode_block().
Status decode_payload(CodecId codec, DType dtype, std::span<const std::byte> stored, std::span<std::byte> raw, unsigned threads);

// Encodes tensor after tensor into the same memory. One thread at a time.
class PayloadEncoder {
 public:
  struct Payload {
    CodecId codec = CodecId::kRaw;     // kRaw where encoding would not have made it smaller
    DType dtype = DType::kU8;          // after the cast
    std::span<const std::byte> bytes;  // to be stored; until the next call, or as long as `raw` where they are `raw` itself
    std::uint64_t overflowed = 0;      // finite values that the cast made infinite
  };
  // errors: as encode_block()
  Result<Payload> encode(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads);

 private:
  EncodedBlock block_;
  std::vector<std::byte> bytes_;
};

}  // namespace paramwire
