// Rows of a chunk table that somebody made up, over bytes that he made up as well: whatever they declare, decoding them ends with an
// error, and with memory for what is at hand only.
#include "fuzz.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/codec/block.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paramwire::fuzz {

// codec, dtype, first chunk, number of rows; rows of 8 bytes; the rest is stored bytes.
void run(std::span<const std::byte> input) {
  if (input.size() < 4) return;
  const auto codec = static_cast<CodecId>(static_cast<unsigned>(input[0]) % (kCodecMax + 2));
  const auto dtype = static_cast<DType>(1 + static_cast<unsigned>(input[1]) % kDTypeMax);
  const auto first = static_cast<std::uint64_t>(input[2]);
  const std::size_t rows = std::min<std::size_t>(static_cast<std::size_t>(input[3]) % 4, (input.size() - 4) / 8);
  std::vector<EncodedChunk> chunks;
  for (std::size_t i = 0; i < rows; ++i) {
    chunks.push_back({load_le<std::uint32_t>(input.data() + 4 + 8 * i), load_le<std::uint32_t>(input.data() + 8 + 8 * i)});
  }
  const std::vector<std::byte> stored(input.begin() + 4 + 8 * static_cast<std::ptrdiff_t>(rows), input.end());
  std::vector<std::byte> raw(rows == 0 ? 0 : (rows - 1) * kChunkBytes + 1024);
  for (const auto check : {StoredCheck::kVerify, StoredCheck::kTrusted}) {
    const Status status = decode_block(codec, dtype, stored, chunks, first, raw, 1, check);
    if (status.ok()) continue;
    const Code code = status.error().code();
    require(code == Code::kCorrupt || (code == Code::kInvalid && static_cast<unsigned>(codec) > kCodecMax), "a refusal says corrupt, an unknown codec invalid");
    require(!status.error().message().empty(), "and why");
  }
}

}  // namespace paramwire::fuzz
