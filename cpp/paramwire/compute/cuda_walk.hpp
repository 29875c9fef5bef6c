// Where every piece of the weights lies on the device, and which of them a launch needs: pure, made once when a session is opened.
//
// Pieces that stay have fixed places. Pieces that stream are grouped, in walk order, into windows, and a window is copied into one of two
// slots: even and odd. A segment is what can be computed once a window is there: all computation from the first operation that reads it up to
// the first that reads the next window. So a segment's addresses depend on nothing but the slot, and two captured graphs serve it for ever.
//
// Experts are known only when the computation has come to their router. So the graph is also cut before and behind each read of experts, which is a segment
// of its own: a window's pieces may then be read by several segments.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/graph.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace paramwire {

struct CudaPiece {
  PieceLayout layout;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;    // in the resident memory, or in the window's slot; kCudaAlignment
  std::uint32_t window = 0;    // of pieces that stream
  std::uint32_t segment = 0;   // that reads it
};

// One launch or a few: an operation, or the part of one that a run of rows makes.
struct CudaAction {
  std::uint32_t op = 0;
  // Matrices: rows [row_begin, row_end) lie packed from `piece` on (pieces that stay and follow one another are one run).
  bool matrix = false;
  std::size_t piece = 0;
  std::uint64_t row_begin = 0, row_end = 0;
};

struct CudaSegment {
  std::size_t action_begin = 0, action_end = 0;
  std::size_t piece_begin = 0, piece_end = 0;  // pieces in walk order
  bool streams = false;                        // it reads pieces of a window
  std::uint32_t window = 0;
  std::size_t experts = SIZE_MAX;              // no actions and no pieces: the products of the experts that this need picks
  bool reads_experts() const noexcept { return experts != SIZE_MAX; }
};

struct CudaWalk {
  std::vector<CudaPiece> pieces;      // in walk order
  std::vector<CudaAction> actions;    // in graph order
  std::vector<CudaSegment> segments;  // at least one
  std::vector<std::size_t> vector_piece;  // by need: first piece of a bias or norm weight (always resident, contiguous); else SIZE_MAX
  std::uint64_t resident_bytes = 0;   // of the device memory for pieces that stay, alignment included
  std::uint64_t slot_bytes = 0;       // of one slot
  std::uint32_t windows = 0;
};

// What kernels and copies want of an address, in bytes: 16-byte loads, and no two pieces in one line of the L2 cache.
inline constexpr std::uint64_t kCudaAlignment = 256;

// pieces:     in walk order: all rows of all Access::kWhole needs, each need's in order. Vectors (rank 1) must be resident
// slot_bytes: at most this for a window
// errors:     kInvalid: pieces that are not that walk, naming the first that is not; a piece larger than a slot
Result<CudaWalk> plan_cuda_walk(const Binding& binding, std::span<const PieceLayout> pieces, std::uint64_t slot_bytes);

}  // namespace paramwire
