// Bodies of integrity_args.hpp that decode: byte planes to elements, exclusive or, steps, sparse changes. All bit for bit their CPU twins.
#pragma once

#include "paramwire/cuda/kernels/elementwise_bodies.hpp"
#include "paramwire/cuda/kernels/integrity_args.hpp"

namespace paramwire::cuda {

// ---------------------------------------------------------------- byte planes: four elements a thread

// Bytes [4 i, 4 i + 4) of a plane, as a word. Planes begin anywhere: an unaligned word is cut out of the two aligned ones that hold it, as
// long as these lie within the plane.
PARAMWIRE_BODY std::uint32_t plane_word(const MergePiece& piece, std::uint32_t p, std::uint64_t i) {
  const std::uint8_t* plane = piece.plane[p];
  if (plane == nullptr) return piece.constant[p] * 0x01010101U;
  const std::uint8_t* at = plane + 4 * i;
  const auto off = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(at) % 4);
  if (off == 0) return *reinterpret_cast<const std::uint32_t*>(at);
  if (i == 0 || 4 * i + 8 > piece.count) {
    return at[0] | std::uint32_t{at[1]} << 8 | std::uint32_t{at[2]} << 16 | std::uint32_t{at[3]} << 24;
  }
  const auto* words = reinterpret_cast<const std::uint32_t*>(at - off);
  return words[0] >> 8 * off | words[1] << (32 - 8 * off);
}

PARAMWIRE_BODY std::uint32_t byte_of(std::uint32_t word, std::uint32_t index) { return word >> 8 * index & 0xff; }

template <typename Word>
PARAMWIRE_BODY Word turn_back(Word word, bool rotate) {
  return rotate ? static_cast<Word>(word >> 1 | word << (8 * sizeof(Word) - 1)) : word;
}

template <typename Word, typename Lane>
PARAMWIRE_BODY void merge_body(const Lane& lane, const MergeArgs& args) {
  constexpr std::uint32_t kWidth = sizeof(Word);
  const bool rotate = args.rotate != 0;
  for (std::uint32_t number = lane.block_y(); number < args.pieces_count; number += lane.blocks_y()) {
    const MergePiece piece = args.pieces[number];  // in registers: what is stored below might else be a part of it
    auto* out = static_cast<Word*>(piece.out);
    const std::uint64_t fours = aligned_to(piece.out, kWidth) ? piece.count / 4 : 0;
    for (std::uint64_t i = first_of_grid(lane); i < fours; i += stride_of_grid(lane)) {
      Word a = 0, b = 0, c = 0, d = 0;
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t p = 0; p < kWidth; ++p) {
        const std::uint32_t four = plane_word(piece, p, i);
        a = static_cast<Word>(a | static_cast<Word>(byte_of(four, 0)) << 8 * p);
        b = static_cast<Word>(b | static_cast<Word>(byte_of(four, 1)) << 8 * p);
        c = static_cast<Word>(c | static_cast<Word>(byte_of(four, 2)) << 8 * p);
        d = static_cast<Word>(d | static_cast<Word>(byte_of(four, 3)) << 8 * p);
      }
      out[4 * i] = turn_back(a, rotate);
      out[4 * i + 1] = turn_back(b, rotate);
      out[4 * i + 2] = turn_back(c, rotate);
      out[4 * i + 3] = turn_back(d, rotate);
    }
    auto* bytes = static_cast<std::uint8_t*>(piece.out);
    for (std::uint64_t i = 4 * fours + first_of_grid(lane); i < piece.count; i += stride_of_grid(lane)) {
      Word word = 0;
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t p = 0; p < kWidth; ++p) {
        const std::uint8_t byte = piece.plane[p] == nullptr ? piece.constant[p] : piece.plane[p][i];
        word = static_cast<Word>(word | static_cast<Word>(byte) << 8 * p);
      }
      word = turn_back(word, rotate);
      PARAMWIRE_UNROLL(8)
      for (std::uint32_t p = 0; p < kWidth; ++p) bytes[i * kWidth + p] = static_cast<std::uint8_t>(word >> 8 * p);
    }
  }
}

// ---------------------------------------------------------------- deltas

template <typename Lane>
PARAMWIRE_BODY void xor_body(const Lane& lane, const XorArgs& args) {
  const std::uint64_t packs = aligned_to(args.base, 16) && aligned_to(args.change, 16) && aligned_to(args.out, 16) ? args.size / 16 : 0;
  for (std::uint64_t i = first_of_grid(lane); i < packs; i += stride_of_grid(lane)) {
    const Pack base = load_pack(static_cast<const Pack*>(args.base) + i), change = load_pack_once(static_cast<const Pack*>(args.change) + i);
    store_pack(static_cast<Pack*>(args.out) + i, {base.a ^ change.a, base.b ^ change.b, base.c ^ change.c, base.d ^ change.d});
  }
  const auto* base = static_cast<const std::uint8_t*>(args.base);
  const auto* change = static_cast<const std::uint8_t*>(args.change);
  for (std::uint64_t i = 16 * packs + first_of_grid(lane); i < args.size; i += stride_of_grid(lane)) {
    static_cast<std::uint8_t*>(args.out)[i] = static_cast<std::uint8_t>(base[i] ^ change[i]);
  }
}

// codec/delta_piece.hpp, ordered() and after_step(), which say why.
template <typename Word>
PARAMWIRE_BODY Word ordered_word(Word bits) {
  const auto negative = static_cast<Word>(Word{0} - static_cast<Word>(bits >> (8 * sizeof(Word) - 1)));
  return static_cast<Word>(bits ^ (negative & static_cast<Word>(static_cast<Word>(~Word{0}) >> 1)));
}
template <typename Word>
PARAMWIRE_BODY Word step_word(Word from, Word step, bool floating) {
  if (floating) from = ordered_word(from);
  const auto negative = static_cast<Word>(Word{0} - static_cast<Word>(step & 1));
  const auto moved = static_cast<Word>(from + static_cast<Word>(static_cast<Word>(step >> 1) ^ negative));
  return floating ? ordered_word(moved) : moved;
}

template <typename Word, typename Lane>
PARAMWIRE_BODY void steps_body(const Lane& lane, const StepsArgs& args) {
  const auto* base = static_cast<const Word*>(args.base);
  const auto* steps = static_cast<const Word*>(args.steps);
  PARAMWIRE_UNROLL(4)
  for (std::uint64_t i = first_of_grid(lane); i < args.count; i += stride_of_grid(lane)) {
    static_cast<Word*>(args.out)[i] = step_word(base[i], steps[i], args.floating != 0);
  }
}

template <typename Word, typename Lane>
PARAMWIRE_BODY void sparse_body(const Lane& lane, const SparseArgs& args) {
  auto* target = static_cast<Word*>(args.target);
  const auto* values = static_cast<const Word*>(args.values);
  for (std::uint64_t i = first_of_grid(lane); i < args.count; i += stride_of_grid(lane)) {
    const std::uint32_t at = args.index[i];
    if (at >= args.elements) continue;
    target[at] = args.is_steps != 0 ? step_word(target[at], values[i], args.floating != 0) : values[i];
  }
}

}  // namespace paramwire::cuda
