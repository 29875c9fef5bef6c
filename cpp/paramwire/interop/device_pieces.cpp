#include "paramwire/interop/device_pieces.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/client/planner.hpp"

#include <algorithm>

namespace paramwire {

namespace {

constexpr std::uint64_t kAlignment = 64;  // cache lines: pieces never share one
// Of one fetch: as many tensors as keep a thread busy for 10 ms where they are tiny.
constexpr std::size_t kGroupPieces = 1024;

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Ranges of rows of one tensor that is larger than a half.
Result<std::vector<DevicePiece>> cut(const Snapshot& snapshot, const DeviceFetch& want, std::size_t index, std::uint64_t half_bytes) {
  PARAMWIRE_TRY(entry, snapshot.find(want.tensor));
  PARAMWIRE_TRY(rows, shard_rows(entry.shape, want.part));
  PARAMWIRE_TRY(cuts, snapshot.row_cuts(want.tensor));
  const std::uint64_t count = rows.second - rows.first;
  if (entry.shape.rank() == 0 || count == 0) return Error(Code::kInternal, cat("tensor \"", want.tensor, "\" has ", want.target.bytes, " bytes and no rows"));
  // Rows of 4-bit types with an odd length: two of them are whole bytes, and no block is cut between.
  const std::uint64_t row_bits = entry.shape.elements() / entry.shape[0] * dtype_bits(entry.dtype);
  const std::uint64_t step = row_bits % 8 == 0 ? 1 : 2;
  WalkNeed need{.tensor = std::string(want.tensor), .rows = (count + step - 1) / step, .row_bytes = row_bits * step / 8, .cuts = {0}, .keep = false};
  for (const std::uint64_t row : cuts) {
    if (row > rows.first && row < rows.second) need.cuts.push_back((row - rows.first) / step);
  }
  // The planner's pieces are at most half of the budget, less what alignment may cost; rows that are larger become pieces of their own.
  const std::uint64_t largest = std::max(half_bytes, need.row_bytes);
  PARAMWIRE_TRY(plan, plan_walk({need}, {.budget_bytes = 2 * (largest + kAlignment), .piece_bytes = largest, .window_bytes = 0, .cut_bytes = kExtentBytes}));
  std::vector<DevicePiece> out;
  for (const Piece& piece : plan.pieces) {
    const std::uint64_t begin = piece.row_begin * step, end = std::min(count, piece.row_end * step);
    const std::uint64_t from = begin * row_bits / 8, to = (end * row_bits + 7) / 8;
    out.push_back({.wanted = index, .part = Shard::rows(rows.first + begin, rows.first + end), .target_offset = from, .bytes = to - from});
  }
  return out;
}

}  // namespace

Result<std::vector<std::vector<DevicePiece>>> plan_device_pieces(const Snapshot& snapshot, std::span<const DeviceFetch> wanted, std::uint64_t half_bytes) {
  std::vector<std::vector<DevicePiece>> groups;
  std::uint64_t used = half_bytes;  // of the last group's half: the first piece begins one
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const DeviceFetch& want = wanted[i];
    PARAMWIRE_TRY(layout, snapshot.layout(want.tensor, want.part));
    if (layout.bytes != want.target.bytes) {
      return Error(Code::kInvalid, cat("tensor \"", want.tensor, "\": ", want.part, " is ", dtype_name(layout.dtype), ' ', layout.shape, " of ", layout.bytes, " bytes, and its target has ",
                                       want.target.bytes));
    }
    if (layout.bytes == 0) continue;
    std::vector<DevicePiece> pieces = {{.wanted = i, .part = want.part, .target_offset = 0, .bytes = layout.bytes}};
    if (layout.bytes > half_bytes) {
      PARAMWIRE_TRY(made, cut(snapshot, want, i, half_bytes));
      pieces = std::move(made);
    }
    for (DevicePiece& piece : pieces) {
      if (piece.bytes > half_bytes - std::min(used, half_bytes) || groups.back().size() == kGroupPieces) {
        groups.emplace_back();
        used = 0;
      }
      piece.half_offset = used;
      used = aligned(used + piece.bytes);
      groups.back().push_back(piece);
    }
  }
  return groups;
}

}  // namespace paramwire
