#include "paramwire/compute/team.hpp"

#include "paramwire/base/text.hpp"

#include <pthread.h>
#include <unistd.h>

#include <system_error>

namespace paramwire {

namespace {

// Pauses before sleeping, about 25 microseconds on a core whose pause takes 140 cycles, a few on older ones. A decode step
// has hundreds of jobs with a few microseconds between them; waking from a futex takes 5 to 50. Too few: each job pays the
// wake-up. Too many: a core that others could use is burnt for that long after each step.
constexpr int kSpins = 512;

inline void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Result<std::unique_ptr<Team>> Team::start(std::uint32_t threads) {
  std::unique_ptr<Team> team(new Team());
  team->process_ = getpid();
  team->helpers_.reserve(threads > 0 ? threads - 1 : 0);
  for (std::uint32_t worker = 1; worker < threads; ++worker) {
    try {
      team->helpers_.emplace_back([raw = team.get(), worker] { raw->help(worker); });
    } catch (const std::system_error& error) {
      return Error(Code::kBackpressure, cat("compute thread ", worker, " of ", threads, " can't start: ", error.what(),
                                            "; ask for fewer threads or raise the process limit"));
    }
    pthread_setname_np(team->helpers_.back().native_handle(), "pw-compute");
  }
  return team;
}

Team::~Team() {
  if (getpid() != process_) {
    for (std::thread& helper : helpers_) helper.detach();  // joining threads of another process would wait for ever
    return;
  }
  closing_.store(true, std::memory_order_release);   // pairs with the acquire in help()
  state_.fetch_add(0x10000, std::memory_order_release);
  state_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

// Take one part and do it. False when none is left.
bool Team::work_one(std::uint32_t worker) {
  std::uint32_t state = state_.load(std::memory_order_acquire);
  do {
    if ((state & 0xffff) == 0) return false;
    // Acquire pairs with the release in run_erased(): the part belongs to the job whose call_ and context_ are read next,
    // and that job can't end before this part does.
  } while (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acquire));
  call_(context_, (state & 0xffff) - 1, worker);
  // Release pairs with the acquire in run_erased(): the caller sees what the parts wrote.
  if (unfinished_.fetch_sub(1, std::memory_order_release) == 1) unfinished_.notify_one();
  return true;
}

void Team::run_erased(std::uint32_t parts, Call call, void* context) {
  if (parts == 0) return;
  if (parts == 1 || helpers_.empty()) {
    // Worker 0 is the caller; the lock keeps its scratch memory its own.
    const std::lock_guard lock(one_job_);
    for (std::uint32_t part = 0; part < parts; ++part) call(context, part, 0);
    return;
  }
  const std::lock_guard lock(one_job_);
  call_ = call;
  context_ = context;
  unfinished_.store(parts, std::memory_order_relaxed);  // ordered by the release below
  const std::uint32_t job = (state_.load(std::memory_order_relaxed) & 0xffff0000) + 0x10000;
  state_.store(job | parts, std::memory_order_release);
  state_.notify_all();
  while (work_one(0)) {
  }
  for (int spin = 0; spin < kSpins && unfinished_.load(std::memory_order_acquire) != 0; ++spin) pause();
  for (std::uint32_t left = 0; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
    unfinished_.wait(left, std::memory_order_acquire);
  }
}

void Team::help(std::uint32_t worker) {
  while (!closing_.load(std::memory_order_acquire)) {
    while (work_one(worker)) {
    }
    std::uint32_t seen = state_.load(std::memory_order_acquire);
    for (int spin = 0; spin < kSpins && (seen & 0xffff) == 0; ++spin) {
      if (closing_.load(std::memory_order_acquire)) return;
      pause();
      seen = state_.load(std::memory_order_acquire);
    }
    if ((seen & 0xffff) == 0 && !closing_.load(std::memory_order_acquire)) state_.wait(seen, std::memory_order_acquire);
  }
}

}  // namespace paramwire
