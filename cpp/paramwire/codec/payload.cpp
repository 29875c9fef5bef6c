#include "paramwire/codec/payload.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire {

Result<ChunkOffsets> read_chunk_index(CodecId codec, DType dtype, std::uint64_t raw_size, std::uint64_t stored_size, std::span<const std::byte> front) {
  PARAMWIRE_TRY(implementation, open_codec(codec));
  const std::uint64_t chunks = chunk_count(raw_size);
  const std::uint64_t index = chunk_index_bytes(raw_size);
  const auto corrupt = [&](std::string_view what) { return Error(Code::kCorrupt, cat("chunk index of ", codec_name(codec), ": ", what)); };
  if (index > stored_size || front.size() < index) return corrupt(cat(chunks, " chunks in ", std::min<std::uint64_t>(stored_size, front.size()), " bytes"));
  ChunkOffsets offsets(static_cast<std::size_t>(chunks) + 1);
  std::uint64_t at = index;
  for (std::size_t i = 0; i < chunks; ++i) {
    const std::uint64_t raw = std::min(kChunkBytes, raw_size - i * kChunkBytes);
    const std::uint32_t size = load_le<std::uint32_t>(front.data() + i * sizeof(std::uint32_t));
    if (size == 0 || size > implementation->bound(dtype, static_cast<std::size_t>(raw))) return corrupt(cat("chunk ", i, " of ", raw, " bytes is stored in ", size));
    offsets[i] = at;
    at += size;
  }
  if (at != stored_size) return corrupt(cat("the chunks end at byte ", at, " of ", stored_size));
  offsets.back() = at;
  return offsets;
}

Status decode_payload(CodecId codec, DType dtype, std::span<const std::byte> stored, std::span<std::byte> raw, unsigned threads) {
  PARAMWIRE_TRY(offsets, read_chunk_index(codec, dtype, raw.size(), stored.size(), stored));
  std::vector<EncodedChunk> chunks(offsets.size() - 1);
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i].stored_size = static_cast<std::uint32_t>(offsets[i + 1] - offsets[i]);
  return decode_block(codec, dtype, stored.subspan(static_cast<std::size_t>(chunk_index_bytes(raw.size()))), chunks, 0, raw, threads, StoredCheck::kTrusted);
}

Result<PayloadEncoder::Payload> PayloadEncoder::encode(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads) {
  if (spec.encoded_dtype(dtype) == dtype && spec.codec == CodecId::kRaw) return Payload{CodecId::kRaw, dtype, raw, 0};
  PARAMWIRE_CHECK(encode_block(spec, dtype, raw, threads, block_));
  const std::uint64_t index = chunk_index_bytes(block_.raw_size);
  if (block_.codec == CodecId::kRaw) return Payload{CodecId::kRaw, block_.dtype, block_.bytes, block_.overflowed};
  if (index + block_.bytes.size() >= block_.raw_size) {
    PARAMWIRE_CHECK(encode_block({spec.cast, CodecId::kRaw}, dtype, raw, threads, block_));
    return Payload{CodecId::kRaw, block_.dtype, block_.bytes, block_.overflowed};
  }
  bytes_.clear();
  bytes_.reserve(static_cast<std::size_t>(index) + block_.bytes.size());
  ByteWriter out(bytes_);
  for (const auto& chunk : block_.chunks) out.put<std::uint32_t>(chunk.stored_size);
  out.bytes(block_.bytes);
  return Payload{block_.codec, block_.dtype, bytes_, block_.overflowed};
}

}  // namespace paramwire
