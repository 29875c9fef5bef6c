#include "paramwire/codec/delta_piece.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/codec/delta_kernels.hpp"

namespace paramwire::delta {

Element element_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF16: return {2, true, 10, 0x1f};
    case DType::kBF16: return {2, true, 7, 0xff};
    case DType::kF32:
    case DType::kC64: return {4, true, 23, 0xff};
    case DType::kF64:
    case DType::kC128: return {8, true, 52, 0x7ff};
    case DType::kF8E4M3: return {1, true, 3, 0xf};
    case DType::kF8E5M2: return {1, true, 2, 0x1f};
    default: return {std::max(dtype_bits(dtype) / 8, 1U)};
  }
}

namespace {

// Whether planes could take fewer bytes than a sparse piece of `sparse_size`, before any is looked at.
bool planes_can_be_smaller(const Element& element, std::span<const std::byte> next, std::size_t changed, std::size_t sparse_size) noexcept {
  const std::size_t elements = next.size() / element.bytes;
  // With one element in sixteen changed or fewer, a sparse piece is smaller whatever the steps are (0.34 bits of place and 8 of step a byte,
  // times a sixteenth).
  if (changed <= elements / 16) return false;
  // A plane takes a bit a byte at least, unless all its bytes are the same. Not all planes can be so where some elements changed and others did not (xor,
  // steps), or the result has two different elements (full).
  const bool all_same = changed == elements || std::memcmp(next.data(), next.data() + element.bytes, next.size() - element.bytes) == 0;
  return all_same || sparse_size > elements / 8;
}

}  // namespace

Piece encode_piece(const Element& element, std::span<const std::byte> base, std::span<const std::byte> next, const DeltaTuning& tuning,
                   EncodeScratch& scratch) {
  Piece piece;
  const std::size_t elements = base.size() / element.bytes;
  scratch.changed.resize(words_of(elements));
  const std::size_t changed = find_changes(element, base, next, scratch.changed.data());
  if (changed == 0) return piece;
  constexpr DeltaForm kPlanes[] = {DeltaForm::kSteps, DeltaForm::kXor, DeltaForm::kFull};
  if (!tuning.only || *tuning.only == DeltaForm::kSparse) {
    piece.form = DeltaForm::kSparse;
    encode_sparse(element, base, next, changed, tuning.classes, piece.bytes, scratch);
  }
  if (tuning.only ? *tuning.only != DeltaForm::kSparse : planes_can_be_smaller(element, next, changed, piece.bytes.size())) {
    double least = piece.form == DeltaForm::kSame ? 0 : static_cast<double>(piece.bytes.size());
    DeltaForm best = piece.form;
    for (const DeltaForm form : kPlanes) {
      if (tuning.only && *tuning.only != form) continue;
      const double size = tuning.only ? 0 : estimate_planes(element, form, base, next, scratch);
      if (best == DeltaForm::kSame || size < least) {
        best = form;
        least = size;
      }
    }
    if (best != piece.form) {
      piece.form = best;
      encode_planes(element, best, base, next, piece.bytes, scratch);
    }
  }
  // Nothing that a form could meet makes a delta larger than its block by more than this.
  if (piece.bytes.size() > piece_bound(base.size())) {
    piece.form = DeltaForm::kFull;
    encode_planes(element, piece.form, base, next, piece.bytes, scratch);
  }
  return piece;
}

Status decode_piece(const Element& element, DeltaForm form, std::span<const std::byte> stored, std::span<const std::byte> base, std::span<std::byte> out,
                    DecodeScratch& scratch) {
  switch (form) {
    case DeltaForm::kSame:
      if (out.data() != base.data()) std::memcpy(out.data(), base.data(), base.size());
      return {};
    case DeltaForm::kFull:
    case DeltaForm::kXor:
    case DeltaForm::kSteps: return decode_planes(element, form, stored, base, out, scratch);
    case DeltaForm::kSparse: return decode_sparse(element, stored, base, out, scratch);
    case DeltaForm::kMixed: break;
  }
  return Error(Code::kCorrupt, cat("has form ", static_cast<unsigned>(form), ", which is none"));
}

}  // namespace paramwire::delta
