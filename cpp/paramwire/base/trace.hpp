// Spans of this process, to be looked at in Perfetto (https://ui.perfetto.dev) or chrome://tracing.
//
// Nothing is recorded unless a Trace is handed to the options of a client or a server; without one a span costs a branch. Memory is
// taken once: events beyond it are counted and dropped. Times are CLOCK_MONOTONIC, so that files of several processes of one
// host fit together.
// Format: Trace Event Format, JSON object form, "X" (complete) and "M" (metadata) events (Google, 2016).
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/metrics.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace paramwire {

// Any thread.
class Trace {
 public:
  // 40 bytes an event. errors: kInvalid for 0 events or more than 2^27; kBackpressure when there is no memory.
  static Result<std::shared_ptr<Trace>> create(std::size_t events_max);

  // `name` must be a literal. `bytes`: what the span moved, 0: not said. Called by the thread that did it.
  void add(const char* name, std::int64_t begin_ns, std::int64_t end_ns, std::uint64_t bytes) noexcept;
  // The spans so far, as a JSON document; spans go on meanwhile.
  std::string json() const;
  std::uint64_t recorded() const noexcept;
  std::uint64_t dropped() const noexcept;

 private:
  struct Event {
    std::atomic<const char*> name{nullptr};  // stored last, with release: the others are whole once it is seen
    std::int64_t begin_ns = 0;
    std::int64_t duration_ns = 0;
    std::uint64_t bytes = 0;
    std::int32_t thread = 0;
  };
  explicit Trace(std::size_t events_max);
  std::int32_t this_thread() noexcept;

  const std::uint64_t serial_;          // of this process's traces: an address may come again
  std::vector<Event> events_;
  std::atomic<std::uint64_t> next_{0};  // may pass the end: what is beyond was dropped
  mutable std::mutex mutex_;
  std::map<std::int32_t, std::string> threads_;  // names, by kernel thread id
};

// One span, from its making to its end. No clock is read without a trace.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, const char* name, std::uint64_t bytes = 0) noexcept : trace_(trace), name_(name), bytes_(bytes) {
    if (trace_ != nullptr) begin_ = monotonic_ns();
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->add(name_, begin_, monotonic_ns(), bytes_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  void set_bytes(std::uint64_t bytes) noexcept { bytes_ = bytes; }

 private:
  Trace* trace_;
  const char* name_;
  std::uint64_t bytes_;
  std::int64_t begin_ = 0;
};

}  // namespace paramwire
