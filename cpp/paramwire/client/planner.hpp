// The plan of a cyclic walk over parameters under a memory budget: which pieces, in which order, which of them stay. Pure.
//
// The order of a graph is static, so what comes next is known, and so is the best use of the memory that prefetch does not
// need: on a cyclic walk the optimal (Belady) policy keeps a fixed set and lets the rest stream by, hit rate = kept / all;
// LRU, LFU and S3-FIFO hit nothing when the walk exceeds the cache. Source: L. A. Belady, "A study of replacement algorithms
// for a virtual-storage computer", IBM Systems Journal 5(2), 1966; figures in DESIGN section 6.
#pragma once

#include "paramwire/base/error.hpp"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace paramwire {

// One visit of the walk: all rows of a tensor, in order.
struct WalkNeed {
  std::string tensor;
  std::uint64_t rows = 0;
  std::uint64_t row_bytes = 0;
  std::vector<std::uint64_t> cuts;  // first rows of the tensor's blocks, ascending, 0 included
  bool keep = false;                // must stay
};

struct Piece {
  std::uint32_t need = 0;        // index into the needs
  std::uint64_t row_begin = 0;
  std::uint64_t row_end = 0;
  std::uint64_t bytes = 0;
  bool resident = false;         // fetched once and kept
};

struct WalkPlan {
  std::vector<Piece> pieces;     // in walk order
  std::uint64_t window_bytes = 0;    // for pieces that stream by: at least two of the largest
  std::uint64_t resident_bytes = 0;  // of the pieces that stay, one copy of each; window + copies * resident <= budget
  std::uint64_t walk_bytes = 0;      // of all pieces
};

struct PlanOptions {
  std::uint64_t budget_bytes = 0;
  // Largest piece: a compute call that waits for less than this cannot start. 4 MiB is 0.25 ms of memory traffic, far more
  // than a hand-over costs (20 us), and 16 of them fit into the smallest useful window.
  std::uint64_t piece_bytes = std::uint64_t{4} << 20;
  // What streaming needs to hide one transfer behind one computation; beyond this, memory keeps pieces instead.
  std::uint64_t window_bytes = std::uint64_t{16} << 20;
  // Where a block is cut into pieces: at rows whose first byte lies a multiple of this behind the block's first, so that pieces hold whole extents
  // (kExtentBytes), whose CRCs their consumer can check (FetchRequest::checks). Only in tensors where the largest piece becomes at most an eighth smaller
  // by it: cut anywhere, a piece has two extents that are fetched for a part and checked on the host, which is less than what a hand-over more would
  // cost. 0: anywhere.
  std::uint64_t cut_bytes = 0;
  // How often the budget holds what stays: 2 leaves room for the next version of it beside the one in use.
  std::uint32_t resident_copies = 1;
};

// The smallest budget that plan_walk accepts for these needs: what must stay, and two pieces of the longest row of the others, each
// with what its alignment in the ring may cost. 0 when nothing is walked.
std::uint64_t walk_budget_min(const std::vector<WalkNeed>& needs, std::uint32_t resident_copies = 1) noexcept;

// Pieces never cross a cut: each is a whole block or a range of one.
// errors: kInvalid when the budget is below walk_budget_min(), naming the tensor and the budget that would do.
Result<WalkPlan> plan_walk(const std::vector<WalkNeed>& needs, const PlanOptions& options);

// Which piece to fetch next, when, and where to: the walk goes round and round, and streaming pieces share a ring of
// `window_bytes`, so that at any time some are being computed with while the next arrive (with two pieces: a double
// buffer). Pieces are finished in walk order. Pure; caller locks.
class WalkWindow {
 public:
  // there: by piece, or empty: those that stay and are there already, which no round gives. Others that stay are given in the first round.
  explicit WalkWindow(const WalkPlan& plan, std::vector<bool> there = {});
  // For consumers that keep pieces in memory of their own: every piece comes through a ring of `ring_bytes` (at least two of the
  // largest piece), those that stay once.
  WalkWindow(const WalkPlan& plan, std::uint64_t ring_bytes, std::vector<bool> there = {});

  struct Start {
    std::uint64_t position = 0;    // in the endless walk; its piece is position % pieces.size()
    std::uint64_t ring_offset = 0; // of its bytes in the ring, 64-byte aligned; unused by views, and by pieces kept elsewhere
  };
  // The next piece to fetch, if it fits now. Resident pieces are given in the first round only, whatever the ring holds, or never.
  std::optional<Start> start();
  // The consumer is done with the piece at `position`. No-op for resident pieces that are not in the ring.
  void finish(std::uint64_t position);
  // Whether the walk has bytes at `position`: not those of a piece that stays, after the first round or if it was there before.
  bool given(std::uint64_t position) const noexcept {
    if (!piece(position).resident) return true;
    return position < plan_.pieces.size() && !(position < there_.size() && there_[static_cast<std::size_t>(position)]);
  }

  std::uint64_t ring_bytes() const noexcept { return ring_bytes_; }
  std::uint64_t held_bytes() const noexcept { return held_; }
  std::uint64_t held_bytes_max() const noexcept { return held_max_; }
  const Piece& piece(std::uint64_t position) const noexcept { return plan_.pieces[position % plan_.pieces.size()]; }

 private:
  struct Span {
    std::uint64_t position = 0, offset = 0, size = 0;
  };
  std::optional<std::uint64_t> reserve(std::uint64_t size) const;

  bool in_ring(const Piece& piece) const noexcept { return through_ring_ || !piece.resident; }

  const WalkPlan& plan_;
  const bool through_ring_;
  const std::vector<bool> there_;
  std::uint64_t ring_bytes_ = 0;
  std::uint64_t next_ = 0;
  std::deque<Span> ring_;        // in walk order
  std::uint64_t held_ = 0;       // bytes of pieces started and not finished, resident ones included
  std::uint64_t held_max_ = 0;
};

}  // namespace paramwire
