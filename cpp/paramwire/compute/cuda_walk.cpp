#include "paramwire/compute/cuda_walk.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>

namespace paramwire {

namespace {

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kCudaAlignment - 1) / kCudaAlignment * kCudaAlignment; }

bool is_vector(const Binding& binding, const Need& need) { return binding.graph().parameters()[need.parameter].shape.rank() == 1; }

class Planner {
 public:
  Planner(const Binding& binding, std::uint64_t slot_bytes, CudaWalk& walk) : binding_(binding), slot_bytes_(slot_bytes), walk_(walk) {}

  Status take(std::span<const PieceLayout> pieces) {
    walk_.vector_piece.assign(binding_.needs().size(), SIZE_MAX);
    std::size_t next = 0;
    for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
      if (binding_.needs()[need].access != Access::kWhole) continue;
      PARAMWIRE_CHECK(take_need(need, pieces, next));
    }
    if (next == pieces.size()) return {};
    return Error(Code::kInvalid, cat("cuda session: piece ", next, " is of need ", pieces[next].need, "; the graph needs no more after ", next, " pieces"));
  }

  // Operations in graph order; a segment ends where the next window begins, and where experts are read.
  void cut() {
    std::size_t piece = 0, need = 0;
    walk_.segments.emplace_back();
    const std::vector<Op>& ops = binding_.graph().ops();
    for (std::uint32_t op = 0; op < ops.size(); ++op) {
      bool matrix = false;
      for (std::size_t i = 0; i < ops[op].parameters.size(); ++i, ++need) {
        const Need& read = binding_.needs()[need];
        if (is_expert(ops[op].kind)) cut_experts(need, piece);
        if (read.access != Access::kWhole) continue;
        matrix = !is_vector(binding_, read);
        while (piece < walk_.pieces.size() && walk_.pieces[piece].layout.need == need) {
          reach(piece);
          if (matrix) add_rows(op, piece);
          ++piece;
        }
      }
      // Of an expert_combine that is the sum, behind its products.
      if (!matrix && ops[op].kind != OpKind::kExpertMatmul) walk_.actions.push_back({.op = op});
      close();
    }
  }

 private:
  Status take_need(std::size_t index, std::span<const PieceLayout> pieces, std::size_t& next) {
    const Need& need = binding_.needs()[index];
    const auto refuse = [&](std::string_view what) {
      return Error(Code::kInvalid, cat("cuda session: piece ", next, " is ", what, "; expected rows of tensor '", need.tensor, "'"));
    };
    for (std::uint64_t row = 0; row < need.rows; ++next) {
      if (next == pieces.size()) return refuse("missing");
      const PieceLayout& given = pieces[next];
      if (given.need != index || given.row_begin != row || given.row_end <= row || given.row_end > need.rows) {
        return refuse(cat("rows ", given.row_begin, " to ", given.row_end, " of need ", given.need));
      }
      if (is_vector(binding_, need)) {
        if (!given.resident) return refuse("a part of a vector that would stream");
        if (row == 0) walk_.vector_piece[index] = next;
      }
      CudaPiece piece{.layout = given, .bytes = (given.row_end - row) * need.row_bytes};
      PARAMWIRE_CHECK(place(piece, row > 0));
      walk_.pieces.push_back(piece);
      row = given.row_end;
    }
    return {};
  }

  // follows: rows of the same need come right before this piece
  Status place(CudaPiece& piece, bool follows) {
    if (piece.layout.resident) {
      // Runs of rows lie packed, so that one launch computes with all of them.
      const bool joins = follows && walk_.pieces.back().layout.resident;
      piece.offset = joins ? resident_end_ : aligned(resident_end_);
      resident_end_ = piece.offset + piece.bytes;
      walk_.resident_bytes = aligned(resident_end_);
      return {};
    }
    if (piece.bytes > slot_bytes_) {
      return Error(Code::kInvalid, cat("cuda session: a piece of ", piece.bytes, " bytes, and a slot of ", slot_bytes_));
    }
    if (walk_.windows == 0 || window_end_ + piece.bytes > slot_bytes_) {
      ++walk_.windows;
      window_end_ = 0;
    }
    piece.window = walk_.windows - 1;
    piece.offset = window_end_;
    walk_.slot_bytes = std::max(walk_.slot_bytes, piece.offset + piece.bytes);
    window_end_ = aligned(piece.offset + piece.bytes);
    return {};
  }

  // A segment for what need `need` picks, and the next one open behind it. next_piece: the first that is still to be read
  void cut_experts(std::size_t need, std::size_t next_piece) {
    const CudaSegment& open = walk_.segments.back();
    if (open.action_begin < walk_.actions.size() || open.piece_begin < next_piece) begin_segment(next_piece);
    walk_.segments.back().experts = need;
    begin_segment(next_piece);
  }

  void begin_segment(std::size_t piece) {
    close();
    walk_.segments.push_back({.action_begin = walk_.actions.size(), .action_end = walk_.actions.size(), .piece_begin = piece, .piece_end = piece});
  }

  // The piece is read from here on: a new segment where it begins a window that is not the open segment's.
  void reach(std::size_t index) {
    CudaPiece& piece = walk_.pieces[index];
    CudaSegment* open = &walk_.segments.back();
    if (!piece.layout.resident) {
      if (open->streams && open->window != piece.window) {
        begin_segment(index);
        open = &walk_.segments.back();
      }
      open->streams = true;
      open->window = piece.window;
    }
    piece.segment = static_cast<std::uint32_t>(walk_.segments.size() - 1);
    open->piece_end = index + 1;
  }

  void add_rows(std::uint32_t op, std::size_t index) {
    const PieceLayout& layout = walk_.pieces[index].layout;
    if (!walk_.actions.empty() && walk_.actions.size() > walk_.segments.back().action_begin) {
      CudaAction& last = walk_.actions.back();
      const bool run = last.matrix && last.op == op && last.row_end == layout.row_begin && layout.resident && walk_.pieces[last.piece].layout.resident &&
                       walk_.pieces[index - 1].layout.resident;
      if (run) {
        last.row_end = layout.row_end;
        return;
      }
    }
    walk_.actions.push_back({.op = op, .matrix = true, .piece = index, .row_begin = layout.row_begin, .row_end = layout.row_end});
  }

  void close() { walk_.segments.back().action_end = walk_.actions.size(); }

  const Binding& binding_;
  const std::uint64_t slot_bytes_;
  CudaWalk& walk_;
  std::uint64_t resident_end_ = 0, window_end_ = 0;
};

}  // namespace

Result<CudaWalk> plan_cuda_walk(const Binding& binding, std::span<const PieceLayout> pieces, std::uint64_t slot_bytes) {
  CudaWalk walk;
  Planner planner(binding, slot_bytes, walk);
  PARAMWIRE_CHECK(planner.take(pieces));
  planner.cut();
  return walk;
}

}  // namespace paramwire
