// Arguments and launches of the kernels that check and decode what arrives: CRCs, byte planes, deltas. Contracts of crc_bodies.hpp and
// decode_bodies.hpp.
//
// Pointers are device addresses of any alignment, unless said otherwise. What changes from version to version (expected CRCs, verdicts,
// descriptions of pieces) lies in device memory, so that a captured graph can be replayed. Results have the bits of their CPU twins in
// base/crc and codec/.
#pragma once

#include "paramwire/cuda/kernels/compute_args.hpp"

#include <cstdint>

namespace paramwire::cuda {

// What checks say of a window: read before a step's result leaves. Begins with all bytes 0xff, so that one memset readies it for all checks.
struct Verdict {
  std::uint32_t bad_less_one;  // how many were wrong, less one, modulo 2^32
  std::uint32_t lowest;        // the lowest number among them
};
constexpr std::uint32_t bad_count(const Verdict& verdict) { return verdict.bad_less_one + 1; }

// crc32c_extents: CRC-32C of each extent of `size` bytes against expected[i]; extents are extent_bytes long, the last may be shorter.
// An extent that differs is counted in the verdict, as number first + i. Twin: base/crc.hpp, crc32c.
// A block an extent, 128 threads, words of 4 bytes one beside the other: about 16 B a clock and multiprocessor.
struct Crc32cArgs {
  const void* data;
  std::uint64_t size;
  const std::uint32_t* expected;  // aligned to 4: [ceil(size / extent_bytes)]
  Verdict* verdict;               // aligned to 4
  std::uint32_t extent_bytes;     // kExtentBytes, or any other number from 1 up
  std::uint32_t first;
};
Launch crc32c_extents_launch(const Crc32cArgs& args);

// generation: compares what weights lie in a set of memory with what the step was told, and leaves the number that it found where they differ. It runs
// first and last in a step: whoever fills the set meanwhile has changed its number before (to 0, which no step wants), and so is found.
struct GenerationArgs {
  const std::uint32_t* number;  // aligned to 4: of the set
  StepState* state;
};
Launch generation_launch(const GenerationArgs& args);

// CRC-64/XZ of `size` bytes, any, against *expected: crc64_strips leaves the remainders of equal strips, crc64_join (on the same stream, with
// the same arguments) adds them up, compares, and counts the payload as number `index` where it differs. Twin: base/crc.hpp, crc64.
struct Crc64Args {
  const void* data;
  std::uint64_t size;
  const std::uint64_t* expected;  // aligned to 8
  std::uint64_t* remainders;      // aligned to 8: [kCrc64StripsMax], scratch from one kernel to the other
  std::uint64_t* crc;             // aligned to 8, or nullptr: where the CRC goes
  Verdict* verdict;               // aligned to 4; nullptr: nothing is compared
  std::uint32_t index;
};
inline constexpr std::uint32_t kCrc64StripsMax = 2048;
Launch crc64_strips_launch(const Crc64Args& args);
Launch crc64_join_launch(const Crc64Args& args);

// merge_<w>: `width` w byte planes to elements, for the pieces of a block at once. A plane is raw bytes somewhere, or one byte all over.
// Twin: codec/plane_kernels.hpp, merge; codec/byteplane.hpp says which dtypes turn. merge_1 copies.
struct MergePiece {
  const std::uint8_t* plane[8];  // of them `width`; nullptr: constant
  std::uint8_t constant[8];
  void* out;                     // count * width bytes
  std::uint32_t count;           // elements
  std::uint32_t unused;
};
static_assert(sizeof(MergePiece) == 88);
struct MergeArgs {
  const MergePiece* pieces;  // aligned to 8: [pieces_count]
  std::uint32_t pieces_count;
  std::uint32_t count_max;   // of the largest piece; shapes the grid, right whatever it is
  std::uint32_t rotate;      // 1: elements are turned right by one bit, which puts a float's sign back
};
Launch merge_launch(const MergeArgs& args);

// xor_apply: out = base ^ change, bytes. out may be base. Twin: delta form kXor.
struct XorArgs {
  const void* base;
  const void* change;
  void* out;
  std::uint64_t size;
};
Launch xor_launch(const XorArgs& args);

// steps_<w>: out[i] = base[i] after steps[i]: 0, -1, 1, -2, ... units in the last place are steps 0, 1, 2, 3, ... modulo the word; of floats,
// words are first put in the order of their values. out may be base. Aligned to the element. Twin: codec/delta_piece.hpp, after_step.
struct StepsArgs {
  const void* base;
  const void* steps;
  void* out;
  std::uint64_t count;
  std::uint32_t floating;  // 1: sign and magnitude
};
Launch steps_launch(const StepsArgs& args);

// sparse_<w>: target[index[i]] takes step values[i] (as steps_<w>), or becomes values[i]. Indices ascend, without duplicates; those that
// reach beyond `elements` are dropped: who decodes them on the host has refused them. Aligned to the element, indices to 4.
struct SparseArgs {
  void* target;
  const std::uint32_t* index;
  const void* values;
  std::uint64_t count;     // of changes
  std::uint64_t elements;  // of target
  std::uint32_t is_steps;  // 1: steps, 0: values
  std::uint32_t floating;  // with steps: sign and magnitude
};
Launch sparse_launch(const SparseArgs& args);

}  // namespace paramwire::cuda
