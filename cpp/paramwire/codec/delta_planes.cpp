// Byte planes of a piece: plane p holds byte p of every word, lowest first, each in its smallest form.
#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_piece.hpp"

namespace paramwire::delta {
namespace {

// Floats have their sign moved below their mantissa for kFull, so that the highest plane has whole exponents (f32, bf16) only.
template <typename U>
U full_word(bool floating, U next) noexcept {
  return floating ? static_cast<U>(static_cast<U>(next << 1) | static_cast<U>(next >> (8 * sizeof(U) - 1))) : next;
}
template <typename U>
U from_full_word(bool floating, U word) noexcept {
  return floating ? static_cast<U>(static_cast<U>(word >> 1) | static_cast<U>(word << (8 * sizeof(U) - 1))) : word;
}

template <typename U>
U word_of(const Element& element, DeltaForm form, U base, U next) noexcept {
  if (form == DeltaForm::kFull) return full_word<U>(element.floating, next);
  if (form == DeltaForm::kXor) return static_cast<U>(base ^ next);
  return element.floating ? step_between<U>(ordered(base), ordered(next)) : step_between<U>(base, next);
}

// Which of the forms is smallest shows in a quarter of a piece as well: 1 KiB of each 4 KiB, so that every row of most matrices has its share.
constexpr std::size_t kSampleBytes = 1024;
constexpr std::size_t kSampleEvery = 4 * kSampleBytes;

// Splits the words that `form` makes of a piece into planes in scratch.symbols.
void split(const Element& element, DeltaForm form, std::span<const std::byte> base, std::span<const std::byte> next, EncodeScratch& scratch) {
  scratch.symbols.resize(base.size());
  with_word(element.bytes, [&](auto kind) {
    using U = decltype(kind);
    const std::size_t elements = base.size() / sizeof(U);
    std::uint8_t* const planes = scratch.symbols.data();
    const Element local = element;
    for (std::size_t i = 0; i < elements; ++i) {
      const U word = word_of<U>(local, form, load<U>(base.data(), i), load<U>(next.data(), i));
      for (std::size_t p = 0; p < sizeof(U); ++p) planes[p * elements + i] = static_cast<std::uint8_t>(word >> (8 * p));
    }
  });
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
  with_word(element.bytes, [&](auto kind) {
    using U = decltype(kind);
    const std::uint8_t* const planes = scratch.symbols.data();
    const bool floating = element.floating;
    const auto each = [&](auto&& result) {
      for (std::size_t i = 0; i < elements; ++i) {
        U word = 0;
        for (std::size_t p = 0; p < sizeof(U); ++p) word = static_cast<U>(word | static_cast<U>(static_cast<U>(planes[p * elements + i]) << (8 * p)));
        store<U>(out.data(), i, result(i, word));
      }
    };
    if (form == DeltaForm::kFull) return each([&](std::size_t, U word) { return from_full_word<U>(floating, word); });
    if (form == DeltaForm::kXor) return each([&](std::size_t i, U word) { return static_cast<U>(word ^ load<U>(base.data(), i)); });
    if (floating) return each([&](std::size_t i, U word) { return ordered<U>(after_step<U>(ordered<U>(load<U>(base.data(), i)), word)); });
    return each([&](std::size_t i, U word) { return after_step<U>(load<U>(base.data(), i), word); });
  });
  return {};
}

}  // namespace paramwire::delta
