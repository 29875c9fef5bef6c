// The compute seam: a Backend runs a bound graph over weights that somebody else supplies, piece by piece.
//
// A backend holds no parameters. A Session holds the state of one computation: position, key/value cache, activations. One
// step looks like this (the engine's loop, without its prefetch):
//
//   session->begin(tokens);
//   while (const Pending* pending = session->pending()) {
//     view = the rows that `pending` names, or any first part of them;
//     session->supply(view);
//   }
//   logits = session->finish();
//
// The CPU backend computes before supply() returns: the buffer may be overwritten at once. A backend with memory of its own
// (own_memory()) copies and computes later: buffers are free again once released() has counted them, pieces that stay are
// asked for in the first step only, and finish() waits for all.
#pragma once

#include "paramwire/base/availability.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/extent_check.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/compute/graph.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// Rows [row_begin, row_end) of a tensor, packed row-major, little-endian, host. `data` is aligned to its element and
// read during supply() only.
struct WeightView {
  std::string_view tensor;
  DType dtype = DType::kF32;
  std::uint64_t row_begin = 0;
  std::uint64_t row_end = 0;
  std::span<const std::byte> data;
  // What extents of `data` must be, where nobody has summed them yet: contiguous, each of 64 KiB, the last of them may be shorter. For
  // backends with memory of their own, which compare them there; finish() tells. Others are given none; rows by data have neither these nor planes.
  std::span<const ExtentCheck> checks{};
  // Where the byte planes of elements are still apart, ascending: such a backend puts them together, before it compares. Others are given none.
  std::span<const PlanesApart> planes{};
};

// What the session waits for.
struct Pending {
  std::size_t need = 0;         // index into Binding::needs()
  std::uint64_t next_row = 0;   // kWhole: the next view begins here. kRowsByData: the next view must contain this row
  // kRowsByData: the distinct rows still wanted, ascending (the first is next_row): tokens, positions, or the experts that the
  // routing of this step picked, known only when the computation is here. A view may hold other rows too.
  // Valid until the next call on the session. Empty for kWhole.
  std::span<const std::uint64_t> rows;
};

// A piece of the walk over a graph's weights, as it will be supplied.
struct PieceLayout {
  std::size_t need = 0;  // index into Binding::needs(), of Access::kWhole
  std::uint64_t row_begin = 0;
  std::uint64_t row_end = 0;
  bool resident = false;  // stays, once supplied
};

struct SessionOptions {
  // Positions that the key/value cache can hold: 2 * caches * kv_heads * head_size * 4 bytes each, reserved at opening and
  // touched as positions come. Too small: begin() gives kBackpressure.
  std::uint64_t context_tokens = 2048;
  // Most tokens of one step. Activations take about 4 * (2 * width + 3 * ffn_width) bytes for each. Larger prompts are
  // given in several steps, with the same result; texts for bidirectional attention are not cut.
  std::uint64_t step_tokens = 256;
  // For backends with memory of their own, which place what comes once and for all: the pieces in walk order. Parameters of one
  // axis must stay. Empty: every need is one piece, and stays.
  std::vector<PieceLayout> pieces{};
  // Of that memory, for pieces that stream: two slots of half of it each. At least twice the largest such piece.
  std::uint64_t window_bytes = 0;
  // Sets of that memory for pieces that stay: with 2, stage() fills one while steps compute with the other.
  std::uint32_t resident_sets = 1;
  // Bytes of the largest view that may have WeightView::planes; 0: none has. Of memory of their own, such backends take as much again.
  std::uint64_t planes_bytes = 0;
  // Of that memory, for the experts that a routing picked: at least one of the largest. What it does not hold at once comes in batches, of half of it
  // where that holds one. 0: two of the largest.
  std::uint64_t rows_bytes = 0;
};

// threads: one at a time. Different sessions of a backend may run in different threads.
class Session {
 public:
  virtual ~Session() = default;

  // Start a step: `tokens` take the next positions.
  // errors: kInvalid: no tokens, more than step_tokens, an id outside the vocabulary, a step already running, a text longer
  //         than the graph's table of positions, or, where attention is bidirectional, a second step of a text;
  //         kBackpressure: the cache has no room for them.
  virtual Status begin(std::span<const Token> tokens) = 0;

  // What comes next; null when the step is complete, or none is running.
  virtual const Pending* pending() const noexcept = 0;

  // Views that supply() took, of which the first released() may be overwritten. The same for sessions that compute at once.
  virtual std::uint64_t supplied() const noexcept = 0;
  virtual std::uint64_t released() = 0;
  // Waits until released() is at least `count`, which is at most supplied(). errors: kUnavailable: the device failed.
  virtual Status release(std::uint64_t count) = 0;

  // Compute with `view`, which must name the pending tensor, its dtype, and rows from Pending::next_row on.
  // errors: kInvalid naming expected and actual; the step goes on and still waits for the same rows.
  virtual Status supply(const WeightView& view) = 0;

  // End the step. returns: float32 [output width], the one row of the graph's output (of a head: the last position's logits);
  // valid until the next begin().
  // errors: kInvalid naming the tensor that is still pending, or that no step is running; kCorrupt: extents of the step's weights
  //         are not what WeightView::checks said, naming the first: the step has no result, and position and cache are as before begin().
  virtual Result<std::span<const float>> finish() = 0;

  // Drop a running step: position and cache are as before begin(). Nothing to do when none runs.
  virtual void abandon() noexcept = 0;

  // Forget every position from `position` on. errors: kInvalid: beyond position(), or a step is running.
  virtual Status rewind(std::uint64_t position) = 0;

  // ---- Other weights of the same names, types and shapes, where a backend has memory of its own. Nothing is made anew for them: what was captured
  // computes with whatever lies in that memory. Elsewhere the default: kUnavailable. `piece`: an index into SessionOptions::pieces, of one that stays.

  // Between steps: the next step asks for these pieces again, and computes with what it is given. errors: kInvalid: no such piece, or a step is running
  virtual Status renew(std::span<const std::size_t> pieces);
  // With resident_sets of 2, beside steps that run in another thread, one of the three at a time: fills the set that no step computes with.
  // stage: from `view`, the whole piece, which must stay as it is until the next stage() or staged() has returned. Its checks are made on the device.
  // stage_same: as the piece is in the other set, of which a finished step computed. Pieces keep what they were given until they are given something else.
  // staged: waits for all of it. errors: kInvalid: a set of 1, a view that is not the piece, or a piece that was never staged, with its name;
  //         kCorrupt as finish(): the pieces that were staged since the last staged() are to be staged again; kUnavailable: the device
  virtual Status stage(std::size_t piece, const WeightView& view);
  virtual Status stage_same(std::size_t piece);
  virtual Status staged();
  // Between steps, after staged(): they compute with that set from here on. errors: kInvalid: nothing was staged, or a step is running
  virtual Status swap();

  // Tokens in the cache, without those of a running step.
  virtual std::uint64_t position() const noexcept = 0;

  virtual const Binding& binding() const noexcept = 0;
  // Heap bytes of activations, scratch and cache (the cache as reserved, not as touched).
  virtual std::uint64_t state_bytes() const noexcept = 0;
};

// Host memory that weights arrive in, 64-byte aligned.
class Staging {
 public:
  virtual ~Staging() = default;
  virtual std::span<std::byte> span() noexcept = 0;
};

struct BackendOptions {
  // Compute threads of the CPU backend, the calling one included; 0: as many as the cores that this process may run on.
  std::uint32_t threads = 0;
};

// threads: any. A session outlives its backend safely.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const noexcept = 0;
  // One line for people: implementation, library, kernels chosen, threads.
  virtual std::string description() const = 0;
  // errors: kInvalid: a zero option, or a binding that this backend can't run; kBackpressure: memory refused.
  virtual Result<std::unique_ptr<Session>> open_session(const Binding& binding, const SessionOptions& options) = 0;
  // Whether sessions keep pieces in memory of their own, which budgets are then about.
  virtual bool own_memory() const noexcept { return false; }
  // Memory that views are supplied from. For devices it is page-locked where the system allows.
  // errors: kBackpressure.
  virtual Result<std::unique_ptr<Staging>> allocate_staging(std::uint64_t size) = 0;
};

// What begin() and supply() refuse, the same words in every backend. check_step: everything of begin() but a running step.
Status check_step(const Graph& graph, const SessionOptions& options, std::uint64_t position, std::span<const Token> tokens);
Status check_view(const Binding& binding, const Pending& pending, const WeightView& view);

// One line for each backend, those that this build lacks included.
std::vector<Availability> available_backends();

// spec: "cpu", "cuda:N", or "cuda" for "cuda:0".
// errors: kInvalid: an unknown name, with the known ones; kUnavailable: it can't work here, naming library and kernel.
Result<std::unique_ptr<Backend>> open_backend(std::string_view spec, const BackendOptions& options);

}  // namespace paramwire
