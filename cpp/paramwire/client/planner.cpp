#include "paramwire/client/planner.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

namespace paramwire {

namespace {

constexpr std::uint64_t kRingAlignment = 64;  // cache lines: pieces never share one
// What a piece may lose to whole extents: PlanOptions::cut_bytes.
constexpr std::uint64_t kCutShare = 8;

// Rows between two places where a tensor may be cut that has pieces of at most `rows_max`.
std::uint64_t cut_rows(std::uint64_t row_bytes, std::uint64_t rows_max, std::uint64_t cut_bytes) {
  if (cut_bytes == 0 || row_bytes == 0) return 1;
  const std::uint64_t step = cut_bytes / std::gcd(row_bytes, cut_bytes);
  return rows_max >= step && rows_max % step <= rows_max / kCutShare ? step : 1;
}

}  // namespace

std::uint64_t walk_budget_min(const std::vector<WalkNeed>& needs, std::uint32_t resident_copies) noexcept {
  std::uint64_t row_max = 0, kept = 0;
  for (const WalkNeed& need : needs) {
    if (need.keep) kept += need.rows * need.row_bytes;
    else row_max = std::max(row_max, need.rows == 0 ? 0 : need.row_bytes);
  }
  return resident_copies * kept + (row_max == 0 ? 0 : 2 * (row_max + kRingAlignment));
}

Result<WalkPlan> plan_walk(const std::vector<WalkNeed>& needs, const PlanOptions& options) {
  WalkPlan plan;
  std::uint64_t kept = 0;  // by needs that must stay
  for (const WalkNeed& need : needs) kept += need.keep ? need.rows * need.row_bytes : 0;
  const std::uint32_t copies = options.resident_copies;
  const std::uint64_t least = walk_budget_min(needs, copies);
  if (copies * kept > options.budget_bytes) {
    return Error(Code::kInvalid, cat("tensors of ", kept, " bytes must stay", copies > 1 ? cat(", ", copies, " times") : std::string(), ", and the budget is ", options.budget_bytes,
                                     ": at least ", least, " are needed"));
  }
  const std::uint64_t budget = options.budget_bytes - copies * kept;  // for all others
  const std::uint64_t piece_max = std::min(options.piece_bytes, budget / 2 > kRingAlignment ? budget / 2 - kRingAlignment : 0);
  std::uint64_t largest = 0;
  for (std::uint32_t n = 0; n < needs.size(); ++n) {
    const WalkNeed& need = needs[n];
    if (!need.keep && need.row_bytes > piece_max) {
      return Error(Code::kInvalid, cat("tensor \"", need.tensor, "\" has rows of ", need.row_bytes, " bytes; a budget of ", options.budget_bytes,
                                       " holds no two of them: at least ", least, " are needed"));
    }
    const std::uint64_t rows_max = need.row_bytes == 0 ? need.rows : std::max<std::uint64_t>(1, (need.keep ? options.piece_bytes : piece_max) / need.row_bytes);
    for (std::size_t c = 0; c < need.cuts.size(); ++c) {
      const std::uint64_t end = c + 1 < need.cuts.size() ? need.cuts[c + 1] : need.rows;
      const std::uint64_t rows = end - need.cuts[c];
      // Parts of equal size, so that no short rest costs a hand-over of its own. Counted in steps, the last of which may be a part of one.
      const std::uint64_t step = rows <= rows_max ? 1 : cut_rows(need.row_bytes, rows_max, options.cut_bytes);
      const std::uint64_t steps = (rows + step - 1) / step, steps_max = rows_max / step;
      const std::uint64_t parts = steps == 0 ? 0 : (steps + steps_max - 1) / steps_max;
      for (std::uint64_t p = 0; p < parts; ++p) {
        Piece piece;
        piece.need = n;
        piece.row_begin = need.cuts[c] + steps * p / parts * step;
        piece.row_end = need.cuts[c] + std::min(rows, steps * (p + 1) / parts * step);
        piece.bytes = (piece.row_end - piece.row_begin) * need.row_bytes;
        piece.resident = need.keep;
        largest = std::max(largest, need.keep ? 0 : piece.bytes);
        plan.walk_bytes += piece.bytes;
        plan.pieces.push_back(piece);
      }
    }
  }
  const bool all = copies * plan.walk_bytes <= options.budget_bytes;
  plan.window_bytes = all ? 0 : std::min(budget, std::max(options.window_bytes, 2 * (largest + kRingAlignment)));
  plan.resident_bytes = kept;
  const std::uint64_t room = (budget - plan.window_bytes) / copies, others = plan.walk_bytes - kept;
  // Spread over the walk (error diffusion), so that the transfers between two kept pieces stay even: keeping the front of
  // the walk would leave a long stretch in which every byte must stream.
  const double share = others == 0 ? 1.0 : static_cast<double>(room) / static_cast<double>(others);
  std::uint64_t seen = 0;
  for (Piece& piece : plan.pieces) {
    if (piece.resident) continue;
    seen += piece.bytes;
    const auto allowed = kept + std::min(room, static_cast<std::uint64_t>(share * static_cast<double>(seen)));
    if (all || plan.resident_bytes + piece.bytes <= allowed) {
      piece.resident = true;
      plan.resident_bytes += piece.bytes;
    }
  }
  return plan;
}

WalkWindow::WalkWindow(const WalkPlan& plan, std::vector<bool> there)
    : plan_(plan), through_ring_(false), there_(std::move(there)), ring_bytes_(plan.window_bytes / kRingAlignment * kRingAlignment) {
  for (std::size_t i = 0; i < there_.size(); ++i) held_ += there_[i] ? plan_.pieces[i].bytes : 0;
  held_max_ = held_;
}

WalkWindow::WalkWindow(const WalkPlan& plan, std::uint64_t ring_bytes, std::vector<bool> there)
    : plan_(plan), through_ring_(true), there_(std::move(there)), ring_bytes_(ring_bytes / kRingAlignment * kRingAlignment) {}

// Where `size` bytes fit behind the last span and before the first, without wrapping inside a piece.
std::optional<std::uint64_t> WalkWindow::reserve(std::uint64_t size) const {
  if (ring_.empty()) return size <= ring_bytes_ ? std::optional<std::uint64_t>(0) : std::nullopt;
  const std::uint64_t tail = ring_.front().offset;
  const std::uint64_t head = ring_.back().offset + ring_.back().size;
  if (ring_.back().offset >= tail) {
    if (ring_bytes_ - head >= size) return head;
    if (tail >= size) return 0;
    return std::nullopt;
  }
  return tail - head >= size ? std::optional(head) : std::nullopt;
}

std::optional<WalkWindow::Start> WalkWindow::start() {
  const std::size_t count = plan_.pieces.size();
  for (std::size_t skipped = 0; skipped < count; ++skipped) {
    const Piece& next = piece(next_);
    if (!given(next_)) {
      ++next_;
      continue;
    }
    Start start{next_, 0};
    if (in_ring(next)) {
      const std::uint64_t size = std::max(kRingAlignment, (next.bytes + kRingAlignment - 1) / kRingAlignment * kRingAlignment);
      const auto offset = reserve(size);
      if (!offset) return std::nullopt;
      ring_.push_back({next_, *offset, size});
      start.ring_offset = *offset;
    }
    held_ += next.bytes;
    held_max_ = std::max(held_max_, held_);
    ++next_;
    return start;
  }
  return std::nullopt;  // every piece is resident and was given
}

void WalkWindow::finish(std::uint64_t position) {
  if (!in_ring(piece(position)) || !given(position)) return;
  assert(!ring_.empty() && ring_.front().position == position);
  held_ -= piece(position).bytes;
  ring_.pop_front();
}

}  // namespace paramwire
