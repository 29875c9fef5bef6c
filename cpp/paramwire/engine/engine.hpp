// The engine: streams a snapshot's blocks through a graph under a memory budget.
//
// Prefetch threads go ahead of the computation in the graph's own order: into a ring of buffers (copy), or as zero-copy
// views (view, shm only). What the ring does not need keeps pieces resident, chosen once (client/planner.hpp). The engine
// holds no parameter beyond the budget; key/value cache and activations are the session's.
//
// Another version of the same model takes its place by adopt(): plan, memory and captured graphs stay.
//
// threads: one at a time, but for prepare() and stats().  Prefetch threads are named "pw-prefetch". In the child of a fork every call is kInvalid.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/compute/backend.hpp"
#include "paramwire/compute/graph.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace paramwire {

struct EngineOptions {
  // Most bytes of parameters held at any time: ring, resident pieces, live views, and rows by data (of embeddings, experts). 0: no
  // limit (all stay but rows by data, which are fetched as each step picks them).
  // On a device it is about the device's memory; what arrives goes through staging_bytes of the host's.
  std::uint64_t budget_bytes = 0;
  std::string backend = "cpu";  // as for open_backend()
  // Or one that is open already, which several engines may share; then `backend` and `backend_options` are not read.
  std::shared_ptr<Backend> open_backend;
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;  // at least two pieces of 4 MiB
  // Of the model that memory holds what stays of. 1: what another version changes is fetched in the next step after adopt(). 2: prepare() fetches it
  // beside the steps, so that adopt() moves no byte; what stays counts twice in the budget.
  std::uint32_t versions = 1;
  // threads = 0: all cores when every parameter stays, all but one when pieces stream, since what arrives needs a core too (two
  // cores that both compute leave each transfer to wait for a turn).
  BackendOptions backend_options;
  SessionOptions session;
  enum class Source : std::uint8_t { kAuto, kView, kCopy };
  Source source = Source::kAuto;  // kAuto: views where the transport gives them and their pages may stay, else copies
  Micros fetch_timeout = 30 * kMicrosPerSecond;  // of one piece; a step waits no longer for it
};

struct EngineStats {
  std::uint64_t steps = 0;
  std::uint64_t tokens = 0;            // given to step(): prompt and generated
  std::uint64_t bytes_fetched = 0;     // of parameters, copied or viewed, resident pieces once
  std::uint64_t pieces_fetched = 0;
  double stall_seconds = 0;            // step() waited for a piece
  double compute_seconds = 0;          // in the backend
  double fetch_seconds = 0;            // prefetch threads in fetch or view, summed over threads
  std::uint64_t held_bytes_max = 0;    // parameters held at once, at most, and what decodes them; <= budget
  std::uint64_t budget_bytes = 0;
  std::uint64_t walk_bytes = 0;        // parameters that one step reads, whatever its tokens
  std::uint64_t resident_bytes = 0;    // of them, kept, of one version
  std::uint64_t versions_adopted = 0;
  std::uint32_t threads = 0;           // that compute
  std::string source;                  // "view" or "copy"
  std::uint64_t staging_bytes = 0;     // of host memory that pieces pass through on their way to a device
};

class Engine {
 public:
  // Binds `graph` to the snapshot, opens backend and session, plans the walk and starts to prefetch.
  // errors: kInvalid when the snapshot does not fit the graph (all differences in one text) or the budget is too small
  //         (naming the one that would do); kUnavailable for the backend, or for Source::kView without views.
  static Result<std::unique_ptr<Engine>> open(std::shared_ptr<Snapshot> snapshot, const Graph& graph, const EngineOptions& options);
  virtual ~Engine() = default;

  // Computes `tokens` at the next positions. returns: float32 [output width], the graph's output (the last position's logits, or
  // what an encoder ends with), valid until the next step.
  // errors: the backend's (kInvalid, kBackpressure: the engine stays usable); a fetch's (kStale, kCorrupt, kTimeout,
  //         kUnreachable: no step works any more before adopt() of a snapshot that does).
  virtual Result<std::span<const float>> step(std::span<const Token> tokens) = 0;
  // Forgets positions from `position` on: 0 starts a new text.
  virtual Status rewind(std::uint64_t position) = 0;
  virtual std::uint64_t position() const = 0;

  // Goes on with `next`, another version of the same model, from the next step on: between steps, in their thread. What stays and has not changed is kept.
  // The cache keeps keys and values that the old weights made: rewind(0) for a text of the new ones alone.
  // errors: kInvalid: names, dtypes, shapes or cuts into blocks differ from what this engine was opened with, or something is encoded where nothing was, naming
  //         the first; a closed snapshot; kUnavailable: it computes on views, and `next` has none; with versions = 2 also those of prepare(). The
  //         engine is then as before.
  virtual Status adopt(std::shared_ptr<Snapshot> next) = 0;
  // Fetches what `next` changes of what stays into the memory of the second version, and checks it there; adopt(next) is then an exchange. In any one
  // thread, while another one makes steps. What streams is not fetched ahead. With versions = 1: looks whether `next` fits, and no more.
  // errors: as adopt(); a fetch's (kStale, kCorrupt, kTimeout, kUnreachable). The engine goes on as before, and prepare() may be called again.
  virtual Status prepare(std::shared_ptr<Snapshot> next) = 0;

  virtual EngineStats stats() const = 0;  // any thread
  virtual const Snapshot& snapshot() const = 0;  // of the next step
  virtual std::string description() const = 0;  // backend, threads, source, plan: one line
};

}  // namespace paramwire
