// Deltas three ways: the input as a delta; the input as the piece of a delta whose checksums are right, so that its decoders are reached; and
// the input as base and result of one. What is refused leaves the block as it was, what is encoded comes back.
#include "fuzz.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/codec/delta.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paramwire::fuzz {
namespace {

constexpr Version kVersion{1, 1};

std::vector<std::byte> block(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 37 / 5 + i / 11);
  return bytes;
}

void as_delta(std::span<const std::byte> input) {
  const auto info = read_delta(input);
  if (!info.ok() || info->raw_size > 4096) return;
  std::vector<std::byte> base = block(static_cast<std::size_t>(info->raw_size));
  const auto before = base;
  const auto done = apply_delta(input, info->dtype, base, std::nullopt, base, 1);
  require(done.ok() || base == before, "a block in place is its base after an error");
}

// dtype | form | base size / 8 | piece
void as_piece(std::span<const std::byte> input) {
  if (input.size() < 4) return;
  const auto dtype = static_cast<DType>(1 + static_cast<unsigned>(input[0]) % kDTypeMax);
  const auto form = static_cast<std::uint32_t>(input[1]) % 5;
  std::vector<std::byte> base = block((1 + static_cast<std::size_t>(input[2])) * 16);
  const auto piece = input.subspan(3);
  std::vector<std::byte> delta;
  std::vector<std::byte> row;
  ByteWriter in_row(row);
  in_row.put(form);
  in_row.put(static_cast<std::uint32_t>(piece.size()));
  in_row.put(crc32c(piece));
  ByteWriter put(delta);
  put.put(std::uint32_t{0x44525750});
  put.put(std::uint8_t{1});
  put.put(static_cast<std::uint8_t>(form));
  put.put(static_cast<std::uint16_t>(dtype));
  put.put(std::uint64_t{base.size()});
  put.put(kVersion.counter);
  put.put(kVersion.epoch);
  put.put(crc32c(row));
  put.put(crc64(base));
  put.put(std::uint64_t{0});  // hardly the CRC of what comes out: a whole piece ends there
  put.put(std::uint64_t{piece.size()});
  put.put(std::uint32_t{0});
  put.put(crc32c(delta));
  put.bytes(row);
  put.bytes(piece);
  const auto before = base;
  const auto done = apply_delta(delta, dtype, base, kVersion, base, 1);
  require(done.ok() || base == before, "a block in place is its base after an error");
  std::vector<std::byte> out(base.size());
  if (!done.ok()) require(!apply_delta(delta, dtype, before, kVersion, out, 1).ok(), "beside is refused as in place is");
}

// dtype | base and result, halves of the rest
void as_blocks(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto dtype = static_cast<DType>(1 + static_cast<unsigned>(input[0]) % kDTypeMax);
  const std::size_t size = (input.size() - 1) / 32 * 16;
  const auto base = input.subspan(1, size), next = input.subspan(1 + size, size);
  const auto delta = encode_delta(dtype, base, {kVersion}, next, 1);
  require(delta.ok(), "two blocks of a size have a delta");
  require(delta->size() <= kDeltaHeaderBytes + 12 + 8 + size, "a delta is no larger than its block and a table");
  std::vector<std::byte> out(size);
  require(apply_delta(*delta, dtype, base, kVersion, out, 1).ok() && std::ranges::equal(out, next), "a delta brings its base to the result");
}

}  // namespace

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto rest = input.subspan(1);
  switch (static_cast<unsigned>(input[0]) % 3) {
    case 0: return as_delta(rest);
    case 1: return as_piece(rest);
    default: return as_blocks(rest);
  }
}

}  // namespace paramwire::fuzz
