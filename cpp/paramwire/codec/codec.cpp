#include "paramwire/codec/codec.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/byteplane.hpp"
#include "paramwire/codec/cast.hpp"
#include "paramwire/codec/lz4.hpp"
#include "paramwire/codec/raw.hpp"

namespace paramwire {
namespace {

constexpr std::string_view kKnown = "raw, planes, lz4, fp16, bf16, and a cast with a codec (fp16+planes, bf16+planes, fp16+lz4, bf16+lz4)";

std::optional<DType> cast_of(std::string_view word) noexcept {
  if (word == "bf16") return DType::kBF16;
  if (word == "fp16" || word == "f16") return DType::kF16;
  return std::nullopt;
}

}  // namespace

std::string CodecSpec::to_string() const {
  if (!cast) return std::string(codec_name(codec));
  const std::string word(*cast == DType::kF16 ? "fp16" : dtype_name(*cast));
  return codec == CodecId::kRaw ? word : cat(word, "+", codec_name(codec));
}

DType CodecSpec::encoded_dtype(DType dtype) const noexcept { return cast && dtype == DType::kF32 ? *cast : dtype; }

Result<CodecSpec> parse_codec(std::string_view text) {
  CodecSpec spec;
  const std::size_t plus = text.find('+');
  const std::string_view first = text.substr(0, plus);
  spec.cast = cast_of(first);
  if (spec.cast && plus == std::string_view::npos) return spec;
  if (spec.cast || plus == std::string_view::npos) {
    if (const auto codec = codec_of(spec.cast ? text.substr(plus + 1) : first); codec.ok()) {
      spec.codec = *codec;
      return spec;
    }
  }
  return Error(Code::kInvalid, cat("unknown codec \"", text, "\"; known: ", kKnown));
}

Result<const Codec*> open_codec(CodecId id) {
  switch (id) {
    case CodecId::kRaw: return &raw_codec();
    case CodecId::kPlanes: return &byteplane_codec();
    case CodecId::kLz4: return &lz4_codec();
  }
  return Error(Code::kInvalid, cat("unknown codec code ", static_cast<unsigned>(id), "; this build knows 0 to ", kCodecMax));
}

Result<ChunkDecoder::Apart> ChunkDecoder::decode_apart(std::uint64_t, std::span<const std::byte>, std::span<std::byte>) {
  return Error(Code::kUnavailable, "this codec has no planes: decode() its chunks");
}

std::vector<Availability> available_codecs() {
  return {
      {"raw", true, "bytes as they are"},
      {"planes", true, cat("lossless, for weights; kernels: ", cast_implementation())},
      {"lz4", true, cat("lossless, for sparse and delta streams; lz4 ", lz4_version())},
      {"fp16, bf16", true, cat("casts of float32, round to nearest even; kernels: ", cast_implementation())},
  };
}

}  // namespace paramwire
