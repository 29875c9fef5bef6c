// One-bit deltas three ways: the input as one; the input as scales and signs behind a header that is right; and the input as base and fine-tuned weights.
#include "fuzz.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/base/crc.hpp"
#include "paramwire/codec/onebit.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paramwire::fuzz {
namespace {

constexpr Version kVersion{1, 1};
constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

void as_delta(std::span<const std::byte> input) {
  const auto info = read_onebit(input);
  if (!info.ok()) return;
  require(info->rows * info->columns <= 8 * input.size(), "what is declared is there");
  std::vector<std::byte> base(static_cast<std::size_t>(info->rows * info->columns * dtype_bits(info->dtype) / 8));
  const auto before = base;
  require(apply_onebit(input, info->dtype, base, std::nullopt, base, 1).ok() || base == before, "a block is its base after an error");
}

// dtype and scale | rows | columns | scales and signs
void as_payload(std::span<const std::byte> input) {
  if (input.size() < 3) return;
  const DType dtype = kTypes[static_cast<unsigned>(input[0]) % 3];
  const std::uint64_t rows = static_cast<std::uint64_t>(input[1]), columns = static_cast<std::uint64_t>(input[2]);
  const auto payload = input.subspan(3);
  std::vector<std::byte> base(static_cast<std::size_t>(rows * columns * dtype_bits(dtype) / 8), std::byte{0x3c});
  std::vector<std::byte> delta;
  ByteWriter put(delta);
  put.put(std::uint32_t{0x42525750});
  put.put(std::uint8_t{1});
  put.put(static_cast<std::uint8_t>(static_cast<unsigned>(input[0]) / 128));
  put.put(static_cast<std::uint16_t>(dtype));
  put.put(std::uint32_t{1});
  put.put(kVersion.epoch);
  put.put(kVersion.counter);
  put.put(rows);
  put.put(columns);
  put.put(crc64(base));
  put.put(crc64(payload));
  put.put(std::uint32_t{0});
  put.put(crc32c(delta));
  put.bytes(payload);
  const auto before = base;
  const bool read = read_onebit(delta).ok();
  const bool done = apply_onebit(delta, dtype, base, kVersion, base, 1).ok();
  require(read == done, "what is whole can be applied to its base, and nothing else");
  require(done || base == before, "a block is its base after an error");
}

// dtype and scale | rows | base and fine-tuned weights, halves of the rest
void as_weights(std::span<const std::byte> input) {
  if (input.size() < 2) return;
  const DType dtype = kTypes[static_cast<unsigned>(input[0]) % 3];
  const std::uint64_t bytes = dtype_bits(dtype) / 8, rows = 1 + static_cast<std::uint64_t>(input[1]) % 8;
  const std::uint64_t columns = (input.size() - 2) / 2 / bytes / rows;
  const auto size = static_cast<std::size_t>(rows * columns * bytes);
  const auto base = input.subspan(2, size), tuned = input.subspan(2 + size, size);
  const auto scale = static_cast<OnebitScale>(static_cast<unsigned>(input[0]) / 128);
  const auto delta = encode_onebit(dtype, Shape{rows, columns}, base, kVersion, tuned, scale);
  if (!delta.ok()) return require(delta.error().code() == Code::kInvalid, "only values that are not finite are refused");
  std::vector<std::byte> out(size);
  require(apply_onebit(*delta, dtype, base, kVersion, out, 1).ok(), "what is encoded can be applied");
}

}  // namespace

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto rest = input.subspan(1);
  switch (static_cast<unsigned>(input[0]) % 3) {
    case 0: return as_delta(rest);
    case 1: return as_payload(rest);
    default: return as_weights(rest);
  }
}

}  // namespace paramwire::fuzz
