// Whole blocks through a codec: encoded once at publish, decoded whole or in runs of chunks.
#pragma once

#include "paramwire/codec/codec.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace paramwire {

// Chunks that one encoder sees between restarts, and the unit of parallel work, so that a block's bytes don't depend on the
// number of threads. 1 MiB of raw bytes: code tables are built once a run where the statistics hold still, and two threads find
// work in blocks from 2 MiB on.
inline constexpr std::uint64_t kChunksPerRun = 16;

// A row of a block's chunk table, in the form of wire/FORMAT.md, "Chunk row".
struct EncodedChunk {
  std::uint32_t stored_size = 0;
  std::uint32_t crc32c = 0;  // of the stored bytes
  bool operator==(const EncodedChunk&) const noexcept = default;
};

struct EncodedBlock {
  CodecId codec = CodecId::kRaw;  // kRaw where what was asked for would not have been smaller: `bytes` are the raw bytes then
  DType dtype = DType::kU8;       // of the raw bytes: after the cast
  std::uint64_t raw_size = 0;     // bytes, after the cast
  std::vector<std::byte> bytes;   // the stored bytes, chunk after chunk
  std::vector<EncodedChunk> chunks;  // chunk_count(raw_size) rows
  std::uint64_t crc64 = 0;             // CRC-64/XZ of `bytes`
  std::uint64_t overflowed = 0;        // finite float32 values that float16 or bfloat16 can't hold, which became infinities
};

// Encode `raw`, elements of `dtype`, into `block`, whose vectors keep their capacity: reuse one for many tensors.
// threads: of encoding, the caller's included; more than one is used for blocks of two runs and more. Same bytes for any number.
// errors:  kInvalid: `raw` is no whole number of elements, or 0 threads; kUnavailable: no such codec here. Never for content.
Status encode_block(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads, EncodedBlock& block);
Result<EncodedBlock> encode_block(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads);

// How decode_block() treats the CRC-32C of the stored bytes. Frames have a CRC of the raw bytes inside, checked always.
enum class StoredCheck : std::uint8_t {
  kVerify,   // check each chunk against its row: a damaged one is told apart from a wrong encoder. kRaw has no other check
  kTrusted,  // whoever received the bytes has just done it
};

// Decode the chunks [first_chunk, first_chunk + chunks.size()) of a block into `raw`.
// stored:  their stored bytes, one after the other: as many as the rows say together
// raw:     all their raw bytes: 64 KiB each, less for the last one of the block. Undefined after an error
// threads: as in encode_block
// errors:  kCorrupt naming the chunk (counted from the block's start) and the plane; kInvalid: rows that don't fit `raw`, 0
//          threads; kUnavailable: no such codec here. A row that declares more than Codec::bound() is kCorrupt, before any work.
Status decode_block(CodecId codec, DType dtype, std::span<const std::byte> stored, std::span<const EncodedChunk> chunks,
                    std::uint64_t first_chunk, std::span<std::byte> raw, unsigned threads,
                    StoredCheck check = StoredCheck::kVerify);

}  // namespace paramwire
