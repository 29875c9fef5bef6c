// The codec seam: how the stored bytes of a block relate to its raw bytes, chunk by chunk.
//
// A chunk is kChunkBytes (64 KiB) of raw bytes, the last of a block may be shorter. Each is encoded and decoded on its own, so a
// block decodes in parallel, in any order, and as it arrives. A decoder trusts nothing that it reads: sizes and tables are checked,
// memory is bounded by one chunk, and what it returned is the chunk that was encoded, at the place where it was, or an error: a
// CRC-32C over place, dtype, size and raw bytes lies in every frame (wire/FORMAT.md, "Codecs"). Only kRaw has no frame: the
// CRCs of its stored bytes are all there is.
//
// For whole blocks see codec/block.hpp.
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// ---------------------------------------------------------------- what is asked for

// What a publisher asks for: perhaps a cast, which loses bits, then a codec, which loses none.
struct CodecSpec {
  std::optional<DType> cast{};  // kF16 or kBF16; applies to float32 tensors, others stay as they are
  CodecId codec = CodecId::kRaw;

  bool operator==(const CodecSpec&) const noexcept = default;
  // "raw", "planes", "bf16", "fp16+planes": what parse_codec() takes.
  std::string to_string() const;
  // The dtype of the raw bytes that a tensor of `dtype` is encoded from: the cast's for float32, else its own.
  DType encoded_dtype(DType dtype) const noexcept;
};

// "raw", "planes", "lz4", "bf16", "fp16", "bf16+planes", "fp16+lz4", ... ("f16" is taken for "fp16", "bf16+raw" for "bf16").
// errors: kInvalid with what is known.
Result<CodecSpec> parse_codec(std::string_view text);

// ---------------------------------------------------------------- chunks

// Encoder of chunks of one dtype. It may use what it learned from the chunks before (code tables), so the bytes depend on the
// order of calls since restart(); decoding doesn't. Blocks restart every kChunksPerRun chunks (codec/block.hpp).
// threads: one at a time. Memory is taken for the first chunks, and used again for all that follow.
class ChunkEncoder {
 public:
  virtual ~ChunkEncoder() = default;
  // Encode `raw`, the chunk `index` of its block, to the front of `target`.
  // raw:     1 to kChunkBytes bytes, a whole number of elements
  // target:  at least Codec::bound() bytes
  // returns: bytes written, at most Codec::bound(); a chunk that does not get smaller is stored raw inside its frame
  // errors:  kInvalid: sizes other than these
  virtual Result<std::size_t> encode(std::uint64_t index, std::span<const std::byte> raw, std::span<std::byte> target) = 0;
  // Forget what was learned: the next chunk is encoded as the first.
  virtual void restart() noexcept = 0;
};

// Decoder of chunks of one dtype. threads: one at a time. Memory as for the encoder: at most 64 KiB and 16 KiB a plane.
class ChunkDecoder {
 public:
  virtual ~ChunkDecoder() = default;
  // Decode `stored`, the frame of chunk `index`, into all of `raw`, whose bytes are undefined after an error.
  // errors: kCorrupt naming chunk and plane: not a frame of this chunk, dtype and size; kInvalid: no possible size of `raw`
  virtual Status decode(std::uint64_t index, std::span<const std::byte> stored, std::span<std::byte> raw) = 0;

  // As decode(), but for what somebody else does better, in device memory say: putting byte planes together, and the check.
  struct Apart {
    bool planes = false;       // `out` holds the planes, as PlanesApart says (base/extent_check.hpp); else the raw bytes
    std::uint32_t crc32c = 0;  // what the raw bytes must have
  };
  // out: as many bytes as decode() would fill. errors: as decode(), but for the check; kUnavailable: this codec has no planes
  virtual Result<Apart> decode_apart(std::uint64_t index, std::span<const std::byte> stored, std::span<std::byte> out);
};

// threads: any. Constants; never destroyed.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual CodecId id() const noexcept = 0;
  // Most bytes that a chunk of `raw_size` bytes of `dtype` is stored in.
  virtual std::size_t bound(DType dtype, std::size_t raw_size) const noexcept = 0;
  virtual std::unique_ptr<ChunkEncoder> encoder(DType dtype) const = 0;
  virtual std::unique_ptr<ChunkDecoder> decoder(DType dtype) const = 0;
};

// errors: kInvalid: a code outside the table; kUnavailable: this build lacks it.
Result<const Codec*> open_codec(CodecId id);
// One line for each codec: what it does here, with the kernels that were chosen.
std::vector<Availability> available_codecs();

}  // namespace paramwire
