#include "paramwire/codec/symbols.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cmath>

namespace paramwire::symbols {
namespace {

struct Shape {
  std::uint64_t total = 0;
  std::size_t used = 0;  // symbols with a count
  std::size_t first = 0, last = 0;
};

Shape shape_of(const huffman::Counts& counts) noexcept {
  Shape shape;
  for (std::size_t symbol = 0; symbol < counts.size(); ++symbol) {
    if (counts[symbol] == 0) continue;
    if (shape.used == 0) shape.first = symbol;
    shape.last = symbol;
    shape.total += counts[symbol];
    ++shape.used;
  }
  return shape;
}

}  // namespace

double estimate(const huffman::Counts& counts, bool table) noexcept {
  const Shape shape = shape_of(counts);
  if (shape.used == 0) return 0;
  if (shape.used == 1) return 2;
  const auto total = static_cast<double>(shape.total);
  double bits = total * std::log2(total);
  for (std::size_t symbol = shape.first; symbol <= shape.last; ++symbol) {
    if (counts[symbol] > 1) bits -= counts[symbol] * std::log2(static_cast<double>(counts[symbol]));
  }
  const double overhead = table ? kHuffmanOverhead + static_cast<double>(shape.last - shape.first + 2) / 2 : 0;
  return std::min(std::max(bits, total) / 8 + overhead, total + 1);
}

void put(std::vector<std::byte>& out, std::span<const std::uint8_t> source, huffman::EncodeTable& table) {
  if (source.empty()) return;
  huffman::Counts counts{};
  huffman::histogram(source.data(), source.size(), counts);
  const Shape shape = shape_of(counts);
  if (shape.used == 1) {
    out.push_back(static_cast<std::byte>(Form::kConstant));
    out.push_back(static_cast<std::byte>(shape.first));
    return;
  }
  const std::size_t begin = out.size();
  // A code table alone is larger than a few bytes.
  if (source.size() > 16) {
    const huffman::Lengths lengths = huffman::make_lengths(counts);
    const std::size_t bound = huffman::streams_bound(huffman::cost_bits(counts, lengths).value_or(0));
    huffman::fill(table, lengths);
    out.push_back(static_cast<std::byte>(Form::kHuffman));
    std::array<std::byte, huffman::kDescriptionMax> description;
    const std::size_t description_size = huffman::write_description(lengths, description.data());
    out.insert(out.end(), description.begin(), description.begin() + static_cast<std::ptrdiff_t>(description_size));
    // Sizes are varints, so the streams go to the end first and are moved behind them.
    constexpr std::size_t kSizesMax = huffman::kStreams * 5;
    const std::size_t at = out.size();
    out.resize(at + kSizesMax + bound);
    std::array<std::size_t, huffman::kStreams> sizes{};
    huffman::encode_streams(table, source.data(), source.size(), out.data() + at + kSizesMax, sizes);
    std::size_t stored = 0;
    std::vector<std::byte> written;
    for (const std::size_t size : sizes) {
      ByteWriter(written).varint(size);
      stored += size;
    }
    std::copy(written.begin(), written.end(), out.begin() + static_cast<std::ptrdiff_t>(at));
    std::memmove(out.data() + at + written.size(), out.data() + at + kSizesMax, stored);
    out.resize(at + written.size() + stored);
    if (out.size() - begin <= source.size()) return;
    out.resize(begin);
  }
  out.push_back(static_cast<std::byte>(Form::kRaw));
  const auto bytes = std::as_bytes(source);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

Status get(ByteReader& in, std::span<std::uint8_t> target, huffman::DecodeTable& table) {
  if (target.empty()) return {};
  const auto corrupt = [](std::string_view why) { return Error(Code::kCorrupt, std::string(why)); };
  const auto form = in.get<std::uint8_t>();
  if (!in.ok()) return corrupt("is cut");
  if (form == static_cast<std::uint8_t>(Form::kConstant)) {
    const auto value = in.get<std::uint8_t>();
    if (!in.ok()) return corrupt("is cut");
    std::fill(target.begin(), target.end(), value);
    return {};
  }
  if (form == static_cast<std::uint8_t>(Form::kRaw)) {
    const auto bytes = in.bytes(target.size());
    if (!in.ok()) return corrupt("is cut");
    std::memcpy(target.data(), bytes.data(), bytes.size());
    return {};
  }
  if (form != static_cast<std::uint8_t>(Form::kHuffman)) return corrupt(cat("has form ", form, ", which is none"));
  ByteReader ahead = in;
  PARAMWIRE_TRY(description, huffman::read_description(ahead.bytes(ahead.remaining())));
  in.bytes(description.size);
  std::array<std::size_t, huffman::kStreams> sizes{};
  std::uint64_t total = 0;
  for (std::size_t& size : sizes) {
    const std::uint64_t read = in.varint();
    if (!in.ok() || read > in.remaining()) return corrupt("is cut");
    total += read;
    size = static_cast<std::size_t>(read);
  }
  const auto streams = in.bytes(total);
  if (!in.ok()) return corrupt("is cut");
  huffman::fill(table, description.lengths);
  if (!huffman::decode_streams(table, streams, sizes, target.data(), target.size())) return corrupt("ends early or late");
  return {};
}

}  // namespace paramwire::symbols
