// Names of codecs, and what is asked for by them.
#include "paramwire/codec/codec.hpp"

#include <gtest/gtest.h>

namespace paramwire {
namespace {

TEST(CodecSpec, EveryNameParsesToItsPartsAndBack) {
  const std::pair<std::string_view, CodecSpec> all[] = {
      {"raw", {std::nullopt, CodecId::kRaw}},      {"planes", {std::nullopt, CodecId::kPlanes}},   {"lz4", {std::nullopt, CodecId::kLz4}},
      {"bf16", {DType::kBF16, CodecId::kRaw}},     {"bf16+planes", {DType::kBF16, CodecId::kPlanes}}, {"bf16+lz4", {DType::kBF16, CodecId::kLz4}},
      {"fp16", {DType::kF16, CodecId::kRaw}},      {"fp16+planes", {DType::kF16, CodecId::kPlanes}},  {"fp16+lz4", {DType::kF16, CodecId::kLz4}},
  };
  for (const auto& [text, spec] : all) {
    const auto parsed = parse_codec(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, spec) << text;
    EXPECT_EQ(spec.to_string(), text);
  }
  EXPECT_EQ(*parse_codec("f16+planes"), (CodecSpec{DType::kF16, CodecId::kPlanes}));
  EXPECT_EQ(*parse_codec("bf16+raw"), (CodecSpec{DType::kBF16, CodecId::kRaw}));
}

TEST(CodecSpec, WhatIsNoCodecIsRefusedWithWhatIs) {
  for (const std::string_view text : {"", "+", "planes+", "planes+bf16", "planes+lz4", "bf16+", "+planes", "bf16+zstd", "bf16 +planes", "RAW", "f32+planes", "bf16+planes+lz4"}) {
    const auto parsed = parse_codec(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.error().code(), Code::kInvalid);
    EXPECT_NE(parsed.error().message().find("bf16+planes"), std::string::npos);
  }
}

TEST(CodecSpec, OnlyFloat32IsCast) {
  const CodecSpec spec{DType::kBF16, CodecId::kPlanes};
  for (std::uint16_t code = 1; code <= kDTypeMax; ++code) {
    const auto dtype = static_cast<DType>(code);
    EXPECT_EQ(spec.encoded_dtype(dtype), dtype == DType::kF32 ? DType::kBF16 : dtype);
    EXPECT_EQ((CodecSpec{std::nullopt, CodecId::kPlanes}.encoded_dtype(dtype)), dtype);
  }
}

TEST(Codec, IdsHaveNamesAndOpen) {
  for (std::uint16_t code = 0; code <= kCodecMax; ++code) {
    const auto id = static_cast<CodecId>(code);
    ASSERT_TRUE(open_codec(id).ok());
    EXPECT_EQ((*open_codec(id))->id(), id);
    EXPECT_EQ(*codec_of(codec_name(id)), id);
  }
  const auto unknown = open_codec(static_cast<CodecId>(kCodecMax + 1));
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code(), Code::kInvalid);
  EXPECT_EQ(codec_name(static_cast<CodecId>(kCodecMax + 1)), "unknown");
  EXPECT_FALSE(codec_of("zstd").ok());
}

TEST(Codec, EachHasALineThatSaysWhatItIs) {
  const auto lines = available_codecs();
  ASSERT_EQ(lines.size(), 4U);
  for (const Availability& line : lines) {
    EXPECT_TRUE(line.usable) << line.name;
    EXPECT_FALSE(line.reason.empty());
  }
}

}  // namespace
}  // namespace paramwire
