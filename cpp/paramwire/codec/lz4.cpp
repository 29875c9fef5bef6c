#include "paramwire/codec/lz4.hpp"

#include "paramwire/codec/chunk_frame.hpp"

#include <lz4.h>

#include <array>

namespace paramwire {
namespace {

using frame::Form;
using frame::Place;

// lz4 takes at most 0x7E000000 bytes, counted in ints; ours are one chunk.
static_assert(kChunkBytes < LZ4_MAX_INPUT_SIZE);

class Lz4Encoder final : public ChunkEncoder {
 public:
  explicit Lz4Encoder(DType dtype) : dtype_(dtype), state_(static_cast<std::size_t>(LZ4_sizeofState()) / sizeof(std::uint64_t) + 1) {}

  void restart() noexcept override {}

  Result<std::size_t> encode(std::uint64_t index, std::span<const std::byte> raw, std::span<std::byte> target) override {
    const Place place{CodecId::kLz4, dtype_, index};
    PARAMWIRE_CHECK(frame::check_raw_size(place, raw.size()));
    if (target.size() < lz4_codec().bound(dtype_, raw.size())) {
      return Error(Code::kInvalid, cat("chunk ", index, " has ", target.size(), " bytes to be encoded to; at least ", lz4_codec().bound(dtype_, raw.size())));
    }
    // One byte less than raw, or not at all: lz4 returns 0 then.
    const int size = LZ4_compress_fast_extState(state_.data(), reinterpret_cast<const char*>(raw.data()),
                                                reinterpret_cast<char*>(target.data() + frame::kHeadBytes), static_cast<int>(raw.size()),
                                                static_cast<int>(raw.size()) - 1, 1);
    if (size <= 0) return frame::write_raw(place, raw, target.data());
    frame::write_head(target.data(), frame::check(place, raw), Form::kCoded);
    return frame::kHeadBytes + static_cast<std::size_t>(size);
  }

 private:
  DType dtype_;
  std::vector<std::uint64_t> state_;  // words, for its alignment
};

class Lz4Decoder final : public ChunkDecoder {
 public:
  explicit Lz4Decoder(DType dtype) : dtype_(dtype) {}

  Status decode(std::uint64_t index, std::span<const std::byte> stored, std::span<std::byte> raw) override {
    const Place place{CodecId::kLz4, dtype_, index};
    PARAMWIRE_CHECK(frame::check_raw_size(place, raw.size()));
    PARAMWIRE_TRY(parts, frame::read(place, stored, raw.size()));
    if (parts.form == Form::kRaw) {
      std::memcpy(raw.data(), parts.body.data(), raw.size());
      return frame::verify(place, raw, parts.check);
    }
    if (parts.body.size() >= raw.size()) return frame::corrupt(place, cat("an LZ4 block of ", parts.body.size(), " bytes for ", raw.size(), " raw ones"));
    const int size = LZ4_decompress_safe(reinterpret_cast<const char*>(parts.body.data()), reinterpret_cast<char*>(raw.data()),
                                         static_cast<int>(parts.body.size()), static_cast<int>(raw.size()));
    if (size < 0) return frame::corrupt(place, cat("no LZ4 block of ", raw.size(), " bytes"));
    if (static_cast<std::size_t>(size) != raw.size()) return frame::corrupt(place, cat("its LZ4 block holds ", size, " of ", raw.size(), " bytes"));
    return frame::verify(place, raw, parts.check);
  }

 private:
  DType dtype_;
};

class Lz4Codec final : public Codec {
 public:
  CodecId id() const noexcept override { return CodecId::kLz4; }
  std::size_t bound(DType, std::size_t raw_size) const noexcept override { return frame::kHeadBytes + raw_size; }
  std::unique_ptr<ChunkEncoder> encoder(DType dtype) const override { return std::make_unique<Lz4Encoder>(dtype); }
  std::unique_ptr<ChunkDecoder> decoder(DType dtype) const override { return std::make_unique<Lz4Decoder>(dtype); }
};

}  // namespace

const Codec& lz4_codec() noexcept {
  static const Lz4Codec codec;
  return codec;
}

std::string_view lz4_version() noexcept { return LZ4_versionString(); }

}  // namespace paramwire
