#include "paramwire/codec/raw.hpp"

#include "paramwire/codec/chunk_frame.hpp"

namespace paramwire {
namespace {

using frame::Place;

class RawEncoder final : public ChunkEncoder {
 public:
  explicit RawEncoder(DType dtype) : dtype_(dtype) {}
  void restart() noexcept override {}
  Result<std::size_t> encode(std::uint64_t index, std::span<const std::byte> raw, std::span<std::byte> target) override {
    PARAMWIRE_CHECK(frame::check_raw_size({CodecId::kRaw, dtype_, index}, raw.size()));
    if (target.size() < raw.size()) return Error(Code::kInvalid, cat("chunk ", index, " has ", target.size(), " bytes to be encoded to; at least ", raw.size()));
    std::memcpy(target.data(), raw.data(), raw.size());
    return raw.size();
  }

 private:
  DType dtype_;
};

class RawDecoder final : public ChunkDecoder {
 public:
  explicit RawDecoder(DType dtype) : dtype_(dtype) {}
  Status decode(std::uint64_t index, std::span<const std::byte> stored, std::span<std::byte> raw) override {
    const Place place{CodecId::kRaw, dtype_, index};
    PARAMWIRE_CHECK(frame::check_raw_size(place, raw.size()));
    if (stored.size() != raw.size()) return frame::corrupt(place, cat(stored.size(), " stored bytes for ", raw.size(), " raw ones"));
    std::memcpy(raw.data(), stored.data(), raw.size());
    return {};
  }

 private:
  DType dtype_;
};

class RawCodec final : public Codec {
 public:
  CodecId id() const noexcept override { return CodecId::kRaw; }
  std::size_t bound(DType, std::size_t raw_size) const noexcept override { return raw_size; }
  std::unique_ptr<ChunkEncoder> encoder(DType dtype) const override { return std::make_unique<RawEncoder>(dtype); }
  std::unique_ptr<ChunkDecoder> decoder(DType dtype) const override { return std::make_unique<RawDecoder>(dtype); }
};

}  // namespace

const Codec& raw_codec() noexcept {
  static const RawCodec codec;
  return codec;
}

}  // namespace paramwire
