// Lossless deltas of one block: the bytes that bring one version of it to another. Layout: wire/FORMAT.md, "Deltas".
//
// A delta names its base (version and CRC-64 of the raw bytes) and its result (CRC-64 of the raw bytes), so that it is refused on
// any other base, and a result that is not bit for bit the one that was encoded is never handed over. Blocks are coded in pieces of
// 1 MiB of raw bytes, each in the form that is smallest for it, so that a block is decoded in parallel and in bounded memory.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace paramwire {

// Raw bytes of a piece, the last of a block may be shorter. Bounds what a thread needs beside base and result (kDeltaScratchBytes).
// Smaller pieces pay more for their code tables, of about 100 B each: 0.2 % of a delta 20 times smaller than its block; larger
// ones leave threads idle on blocks of a few MiB.
inline constexpr std::uint64_t kDeltaPieceBytes = std::uint64_t{1} << 20;
// What a thread allocates at most while it encodes or applies, in bytes.
inline constexpr std::uint64_t kDeltaScratchBytes = 16 * kDeltaPieceBytes;
inline constexpr std::size_t kDeltaHeaderBytes = 64;

// How a piece is stored; for a whole delta the form of its changed pieces, where they agree. Codes are stored: never renumber.
enum class DeltaForm : std::uint8_t {
  kSame = 0,    // nothing changed: no bytes
  kFull = 1,    // the result's byte planes: the base is of no help
  kXor = 2,     // byte planes of base xor result
  kSteps = 3,   // byte planes of every element's step, in units of the last place
  kSparse = 4,  // the changed elements' distances from one another, and their steps; by the size of their base
  kMixed = 5,   // of a delta only: its changed pieces have several of these
};
// "same", "full", "xor", "steps", "sparse", "mixed"; "unknown" outside the table.
std::string_view delta_form_name(DeltaForm form) noexcept;

struct DeltaBase {
  Version version;  // both parts non-zero
};

// For measurements; what it says by itself makes the smallest deltas.
struct DeltaTuning {
  std::optional<DeltaForm> only;  // every changed piece in this form: kFull, kXor, kSteps or kSparse. None: the smallest
  unsigned classes = 16;          // 1 to 16: into how many classes, by the exponent of their base, a sparse piece may divide its elements
};

// What a delta says of itself.
struct DeltaInfo {
  DeltaForm form = DeltaForm::kSame;
  DType dtype = DType::kU8;
  std::uint64_t raw_size = 0;      // bytes of base and of result
  std::uint64_t delta_size = 0;    // bytes of the delta, header included
  Version base_version;
  std::uint64_t base_crc64 = 0;    // CRC-64/XZ of the base's raw bytes
  std::uint64_t result_crc64 = 0;  // CRC-64/XZ of the result's raw bytes
};

struct DeltaApplied {
  bool applied = false;  // false: the base was the result already (a delta that came twice, or changes nothing)
};

// The delta that brings `base` to `next`, two versions of one block of `dtype`. The same bytes for any number of threads.
//
// base, next:  raw bytes, row-major, of the same size, whole elements; unchanged during the call
// base_is:     what `base` is called; who applies the delta must hold that version
// threads:     that work at once, the caller's own among them; 0 is taken as 1. Fewer where the system gives no more
// errors:      kInvalid for sizes that differ or are no whole elements, a version that is none, a tuning outside its bounds
// threads:     any
// source:      the step of two floats in units of the last place: B. Dawson, "Comparing Floating Point Numbers" (2012)
Result<std::vector<std::byte>> encode_delta(DType dtype, std::span<const std::byte> base, const DeltaBase& base_is,
                                            std::span<const std::byte> next, unsigned threads,
                                            const DeltaTuning& tuning = {});

// Reads what a delta says of itself, and checks its header, table and size, but not the CRCs of its pieces.
// errors: kCorrupt, naming the field.    threads: any.
Result<DeltaInfo> read_delta(std::span<const std::byte> delta);

// Writes to `out` what `delta` makes of `base`.
//
// dtype:         of the block, as its manifest says
// base:          raw bytes that the caller holds
// base_version:  which version they are, if that is known: then it must be the delta's base version, too
// out:           base.size() bytes: `base` itself, or memory that does not overlap it
// returns:       applied = false when `base` is the result already: it is copied, or left as it is. Whatever its version is called
// errors:        kInvalid:  dtype or size differ from the delta's, `out` overlaps `base` in part
//                kStale:    another base, by version or CRC, both are named: fetch the block in full
//                kCorrupt:  the delta is damaged, or what came out has another CRC-64 than the delta names (names piece and stream)
//                After kInvalid and kStale, and after kCorrupt of a damaged delta, nothing was written. `out` beside `base` is undefined
//                only when the CRC of the result failed. `out` that is `base` is then unchanged, too: pieces are decoded twice, first to
//                prove the result, then into place. So a block is its base or its result, never a part of each, as long as nobody
//                else writes to it and the process lives.
// memory:        threads x kDeltaScratchBytes, whatever the delta says
// threads:       any; as encode_delta
Result<DeltaApplied> apply_delta(std::span<const std::byte> delta, DType dtype, std::span<const std::byte> base,
                                 const std::optional<Version>& base_version, std::span<std::byte> out, unsigned threads);

}  // namespace paramwire
