// Team: a fork-join group of threads for one backend. Jobs are cut into parts; whoever is free takes the next one.
//
// A child of fork() may destroy a Team that it inherited (nothing is waited for), not run jobs with it.
//
// The caller works too and never waits for a helper that has not started: on a busy machine a job takes at most what the
// caller alone would need, plus one part. Helpers spin for kSpins pauses after a job, then sleep on a futex.
#pragma once

#include "paramwire/base/error.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace paramwire {

class Team {
 public:
  // Most parts of one job: they are counted in half of a 32-bit word.
  static constexpr std::uint32_t kPartsMax = 0xffff;

  // `threads` counts the caller; 1 starts none. Threads are named "pw-compute". errors: kBackpressure when one can't start.
  static Result<std::unique_ptr<Team>> start(std::uint32_t threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::uint32_t threads() const noexcept { return static_cast<std::uint32_t>(helpers_.size()) + 1; }

  // Call body(part, worker) once for each part in [0, parts), parts <= kPartsMax, and return when all are done. `worker` is
  // below threads() and no two running parts share one: index scratch memory by it. The body must not throw or run jobs.
  // threads: any; jobs of different callers run one after the other.
  template <typename Body>
  void run(std::uint32_t parts, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased(parts, [](void* context, std::uint32_t part, std::uint32_t worker) { (*static_cast<Plain*>(context))(part, worker); },
               &body);
  }

 private:
  using Call = void (*)(void* context, std::uint32_t part, std::uint32_t worker);
  Team() = default;
  void run_erased(std::uint32_t parts, Call call, void* context);
  bool work_one(std::uint32_t worker);
  void help(std::uint32_t worker);

  std::mutex one_job_;
  Call call_ = nullptr;        // written under one_job_ before state_ is released, read after state_ is acquired
  void* context_ = nullptr;
  // High half: job number, so that a sleeper sees a change. Low half: parts that nobody has taken yet.
  std::atomic<std::uint32_t> state_{0};
  std::atomic<std::uint32_t> unfinished_{0};
  std::atomic<bool> closing_{false};
  std::vector<std::thread> helpers_;
  int process_ = 0;  // where the helpers live: a forked child has this object, but not its threads
};

}  // namespace paramwire
