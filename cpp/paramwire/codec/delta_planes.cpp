// Byte planes of a piece: plane p holds byte p of every word, lowest first, each in its smallest form.
#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_piece.hpp"
#include "paramwire/codec/plane_kernels.hpp"

#include <bit>

namespace paramwire::delta {
namespace {

// What `form` makes of an element; not for kFull, whose words are the result's.
template <typename U>
U word_of(bool floating, DeltaForm form, U base, U next) noexcept {
  if (form == DeltaForm::kXor) return static_cast<U>(base ^ next);
  return floating ? step_between<U>(ordered(base), ordered(next)) : step_between<U>(base, next);
}
template <typename U>
U result_of(bool floating, DeltaForm form, U base, U word) noexcept {
  if (form == DeltaForm::kXor) return static_cast<U>(base ^ word);
  return floating ? ordered<U>(after_step<U>(ordered<U>(base), word)) : after_step<U>(base, word);
}

// Which of the forms is smallest shows in a quarter of a piece as well: 1 KiB of each 4 KiB, so that every row of most matrices has its share.
constexpr std::size_t kSampleBytes = 1024;
constexpr std::size_t kSampleEvery = 4 * kSampleBytes;

const std::uint8_t* octets(std::span<const std::byte> bytes) noexcept { return reinterpret_cast<const std::uint8_t*>(bytes.data()); }

// Splits the words that `form` makes of a piece into planes in scratch.symbols. Floats have their sign moved below their mantissa for kFull, so that the
// highest plane has whole exponents (f32, bf16) only.
void split(const Element& element, DeltaForm form, std::span<const std::byte> base, std::span<const std::byte> next, EncodeScratch& scratch) {
  const std::size_t elements = base.size() / element.bytes;
  scratch.symbols.resize(base.size());
  if (form == DeltaForm::kFull && element.bytes == 1 && element.floating) {  // planes::split() takes bytes as they are
    std::transform(next.begin(), next.end(), scratch.symbols.begin(), [](std::byte b) { return std::rotl(static_cast<std::uint8_t>(b), 1); });
    return;
  }
  if (form == DeltaForm::kFull) return planes::split(octets(next), elements, element.bytes, element.floating, scratch.symbols.data(), elements);
  scratch.words.resize(base.size());
  with_word(element.bytes, [&, floating = element.floating, words = scratch.words.data()](auto kind) {
    using U = decltype(kind);
    for (std::size_t i = 0; i < elements; ++i) store<U>(words, i, word_of<U>(floating, form, load<U>(base.data(), i), load<U>(next.data(), i)));
  });
  planes::split(octets(scratch.words), elements, element.bytes, false, scratch.symbols.data(), elements);
}

std::span<const std::uint8_t> plane(const EncodeScratch& scratch, const Element& element, std::size_t p) {
  const std::size_t elements = scratch.symbols.size() / element.bytes;
  return std::span(scratch.symbols).subspan(p * elements, elements);
}

}  // namespace

double estimate_planes(const Element& element, DeltaForm form, std::span<const std::byte> base, std::span<const std::byte> next,
                       EncodeScratch& scratch) {
  const auto sample = [](std::span<const std::byte> raw, std::vector<std::byte>& target) {
    target.clear();
    for (std::size_t at = 0; at < raw.size(); at += kSampleEvery) {
      const auto part = raw.subspan(at, std::min(kSampleBytes, raw.size() - at));
      target.insert(target.end(), part.begin(), part.end());
    }
  };
  sample(base, scratch.some_base);
  sample(next, scratch.some_next);
  split(element, form, scratch.some_base, scratch.some_next, scratch);
  const double times = static_cast<double>(base.size()) / static_cast<double>(scratch.some_base.size());
  double size = 0;
  for (std::size_t p = 0; p < element.bytes; ++p) {
    huffman::Counts counts{};
    huffman::histogram(plane(scratch, element, p).data(), plane(scratch, element, p).size(), counts);
    size += symbols::estimate(counts, false) * times + symbols::kHuffmanOverhead;
  }
  return size;
}

void encode_planes(const Element& element, DeltaForm form, std::span<const std::byte> base, std::span<const std::byte> next,
                   std::vector<std::byte>& out, EncodeScratch& scratch) {
  split(element, form, base, next, scratch);
  out.clear();
  for (std::size_t p = 0; p < element.bytes; ++p) symbols::put(out, plane(scratch, element, p), scratch.table);
}

Status decode_planes(const Element& element, DeltaForm form, std::span<const std::byte> stored, std::span<const std::byte> base,
                     std::span<std::byte> out, DecodeScratch& scratch) {
  const std::size_t elements = base.size() / element.bytes;
  scratch.symbols.resize(base.size());
  ByteReader in(stored);
  for (std::size_t p = 0; p < element.bytes; ++p) {
    const auto status = symbols::get(in, std::span(scratch.symbols).subspan(p * elements, elements), scratch.table);
    if (!status.ok()) return Error(Code::kCorrupt, cat("plane ", p, ' ', status.error().message()));
  }
  if (!in.finished()) return Error(Code::kCorrupt, cat(in.remaining(), " bytes are left over after plane ", element.bytes - 1));
  std::array<const std::uint8_t*, sizeof(std::uint64_t)> plane{};
  for (std::size_t p = 0; p < element.bytes; ++p) plane[p] = scratch.symbols.data() + p * elements;
  auto* const target = reinterpret_cast<std::uint8_t*>(out.data());
  if (form == DeltaForm::kFull && element.bytes == 1 && element.floating) {
    std::transform(scratch.symbols.begin(), scratch.symbols.end(), out.begin(), [](std::uint8_t b) { return std::byte{std::rotr(b, 1)}; });
    return {};
  }
  if (form == DeltaForm::kFull) {
    planes::merge(plane.data(), elements, element.bytes, element.floating, target);
    return {};
  }
  scratch.more_symbols.resize(base.size());
  planes::merge(plane.data(), elements, element.bytes, false, scratch.more_symbols.data());
  with_word(element.bytes, [&, floating = element.floating, words = std::as_bytes(std::span(scratch.more_symbols))](auto kind) {
    using U = decltype(kind);
    for (std::size_t i = 0; i < elements; ++i) store<U>(out.data(), i, result_of<U>(floating, form, load<U>(base.data(), i), load<U>(words.data(), i)));
  });
  return {};
}

}  // namespace paramwire::delta
