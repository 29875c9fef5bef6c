// The decoder of FUZZ_CODEC: a frame of anything decodes to an error or to bytes that pass their check, and leaves the decoder fit for the
// next one. Then its encoder: any bytes come back.
#include "fuzz.hpp"

#include "paramwire/codec/codec.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace paramwire::fuzz {
namespace {

const Codec& codec() { return **open_codec(CodecId::FUZZ_CODEC); }

// One a dtype: their tables are large, and new ones for each input would take most of the time. Restarted, it is as new.
ExtentEncoder& encoder_of(DType dtype) {
  static std::array<std::unique_ptr<ExtentEncoder>, kDTypeMax + 1> made;
  auto& encoder = made[static_cast<std::size_t>(dtype)];
  if (!encoder) encoder = codec().encoder(dtype);
  encoder->restart();
  return *encoder;
}

void round_trip(DType dtype, std::uint64_t index, std::span<const std::byte> raw, ExtentEncoder& encoder, ExtentDecoder& decoder) {
  std::vector<std::byte> stored(codec().bound(dtype, raw.size()));
  const auto size = encoder.encode(index, raw, stored);
  require(size.ok() && *size <= stored.size(), "every extent encodes, within the bound");
  stored.resize(*size);
  std::vector<std::byte> back(raw.size());
  require(decoder.decode(index, stored, back).ok(), "what was encoded decodes");
  require(std::equal(back.begin(), back.end(), raw.begin()), "to the same bytes");
}

}  // namespace

// dtype, index, two bytes of raw size, then a frame.
void run(std::span<const std::byte> input) {
  if (input.size() < 4) return;
  const auto dtype = static_cast<DType>(1 + static_cast<unsigned>(input[0]) % kDTypeMax);
  const auto index = static_cast<std::uint64_t>(input[1]);
  const std::size_t element = std::max<std::size_t>(1, dtype_bits(dtype) / 8);
  const std::size_t asked = static_cast<std::size_t>(input[2]) | static_cast<std::size_t>(input[3]) << 8;
  const std::size_t raw_size = std::max(element, asked / element * element);
  // Memory of exactly its size, so that a sanitizer sees a step past it.
  const std::vector<std::byte> frame(input.begin() + 4, input.end());
  const auto decoder = codec().decoder(dtype);
  std::vector<std::byte> raw(raw_size);
  const Status status = decoder->decode(index, frame, raw);
  if (!status.ok()) require(status.error().code() == Code::kCorrupt && !status.error().message().empty(), "a refusal says corrupt, and why");
  if (status.ok()) round_trip(dtype, index, raw, encoder_of(dtype), *decoder);
  const std::size_t usable = std::min<std::size_t>(frame.size(), kExtentBytes) / element * element;
  if (usable > 0) round_trip(dtype, index + 1, std::span(frame).first(usable), encoder_of(dtype), *decoder);
}

}  // namespace paramwire::fuzz
