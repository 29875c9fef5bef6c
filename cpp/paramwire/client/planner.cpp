#include "paramwire/client/planner.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cassert>

namespace paramwire {

namespace {
constexpr std::uint64_t kRingAlignment = 64;  // cache lines: pieces never share one
}

std::uint64_t walk_budget_min(const std::vector<WalkNeed>& needs) noexcept {
  std::uint64_t row_max = 0;
  for (const WalkNeed& need : needs) row_max = std::max(row_max, need.rows == 0 ? 0 : need.row_bytes);
  return row_max == 0 ? 0 : 2 * (row_max + kRingAlignment);
}

Result<WalkPlan> plan_walk(const std::vector<WalkNeed>& needs, const PlanOptions& options) {
  WalkPlan plan;
  const std::uint64_t piece_max = std::min(options.piece_bytes, options.budget_bytes / 2 > kRingAlignment ? options.budget_bytes / 2 - kRingAlignment : 0);
  std::uint64_t largest = 0;
  for (std::uint32_t n = 0; n < needs.size(); ++n) {
    const WalkNeed& need = needs[n];
    if (need.row_bytes > piece_max) {
      return Error(Code::kInvalid, cat("tensor \"", need.tensor, "\" has rows of ", need.row_bytes, " bytes; a budget of ", options.budget_bytes,
                                       " holds no two of them: at least ", walk_budget_min(needs), " are needed"));
    }
    const std::uint64_t rows_max = need.row_bytes == 0 ? need.rows : piece_max / need.row_bytes;
    for (std::size_t c = 0; c < need.cuts.size(); ++c) {
      const std::uint64_t end = c + 1 < need.cuts.size() ? need.cuts[c + 1] : need.rows;
      const std::uint64_t rows = end - need.cuts[c];
      // Parts of equal size, so that no short rest costs a hand-over of its own.
      const std::uint64_t parts = rows == 0 ? 0 : (rows + rows_max - 1) / rows_max;
      for (std::uint64_t p = 0; p < parts; ++p) {
        Piece piece;
        piece.need = n;
        piece.row_begin = need.cuts[c] + rows * p / parts;
        piece.row_end = need.cuts[c] + rows * (p + 1) / parts;
        piece.bytes = (piece.row_end - piece.row_begin) * need.row_bytes;
        largest = std::max(largest, piece.bytes);
        plan.walk_bytes += piece.bytes;
        plan.pieces.push_back(piece);
      }
    }
  }
  plan.window_bytes = std::min(options.budget_bytes, std::max(options.window_bytes, 2 * (largest + kRingAlignment)));
  if (plan.walk_bytes <= options.budget_bytes) plan.window_bytes = 0;  // everything stays
  const std::uint64_t room = options.budget_bytes - plan.window_bytes;
  // Spread over the walk (error diffusion), so that the transfers between two kept pieces stay even: keeping the front of
  // the walk would leave a long stretch in which every byte must stream.
  std::uint64_t seen = 0;
  for (Piece& piece : plan.pieces) {
    seen += piece.bytes;
    const double share = plan.walk_bytes == 0 ? 1.0 : static_cast<double>(room) / static_cast<double>(plan.walk_bytes);
    const auto allowed = std::min(room, static_cast<std::uint64_t>(share * static_cast<double>(seen)));
    const bool all = plan.walk_bytes <= options.budget_bytes;
    if (all || plan.resident_bytes + piece.bytes <= allowed) {
      piece.resident = true;
      plan.resident_bytes += piece.bytes;
    }
  }
  return plan;
}

WalkWindow::WalkWindow(const WalkPlan& plan) : plan_(plan), ring_bytes_(plan.window_bytes / kRingAlignment * kRingAlignment) {}

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
    if (next.resident && next_ >= count) {  // there since the first round
      ++next_;
      continue;
    }
    Start start{next_, 0};
    if (!next.resident) {
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
  if (piece(position).resident) return;
  assert(!ring_.empty() && ring_.front().position == position);
  held_ -= piece(position).bytes;
  ring_.pop_front();
}

}  // namespace paramwire
