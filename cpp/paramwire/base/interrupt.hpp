// Waits that may end before their deadline because somebody asks: Ctrl-C in an interpreter above this library.
//
// While a WaitInterrupt lives, the waits of its thread inside this library (for sockets, links and turns) ask it when a signal woke them
// (EINTR) and at least every kInterruptLook; when it says true they end with kTimeout, as if their deadline had come, and so does every later
// wait of that thread until it is gone. What was under way is as after any time-out: its link is dropped, targets are written no more.
// A thread without one waits as it always did. Never asked while one of our locks is held. Not for code that reads memory only.
#pragma once

#include "paramwire/base/env.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace paramwire {

// Between two questions: a quarter of the 200 ms that a person takes for "at once", and 20 wake-ups a second cost nothing.
inline constexpr Micros kInterruptLook = 50'000;

class WaitInterrupt {
 public:
  // `asked` is called in this thread, often: it should cost little. It may wait itself, under a WaitInterrupt of its own.
  explicit WaitInterrupt(bool (*asked)()) noexcept;
  ~WaitInterrupt();
  WaitInterrupt(const WaitInterrupt&) = delete;
  WaitInterrupt& operator=(const WaitInterrupt&) = delete;

 private:
  friend bool wait_interrupted() noexcept;
  bool (*asked_)();
  WaitInterrupt* outer_;
  bool over_ = false;
};

// Whether this thread's waits are to end now.
bool wait_interrupted() noexcept;
// How long this thread may sleep of the `left` that it would: less when it has somebody to ask.
Micros wait_slice(Micros left) noexcept;

// std::condition_variable::wait_until that ends early as above. returns: what `ready` says at the end.
template <typename Ready>
bool wait_on(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Micros deadline, Ready ready) {
  while (!ready()) {
    const Micros now = steady_clock().now();
    if (now >= deadline) return false;
    const Micros left = wait_slice(deadline == kNever ? kNever : deadline - now);
    if (left == kNever) {
      changed.wait(lock, ready);
      return true;
    }
    if (changed.wait_until(lock, time_point(now + left), ready)) return true;
    lock.unlock();
    const bool over = wait_interrupted();
    lock.lock();
    if (over) return ready();
  }
  return true;
}

}  // namespace paramwire
