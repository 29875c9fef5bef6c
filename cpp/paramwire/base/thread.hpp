// Threads of the library.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/text.hpp"

#include <csignal>
#include <pthread.h>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace paramwire {

// A thread called `name` (at most 15 bytes, a constant) that no signal is delivered to: signals belong to the embedding program's threads.
// errors: kUnavailable when the system gives none (pthread_create(3): EAGAIN at RLIMIT_NPROC, or at a cgroup's pids.max).
template <typename Body>
Result<std::thread> start_thread(const char* name, Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  Status status;
  try {
    // By itself, before anything it does: its first span in a trace has the name. By us too, for who looks as soon as we return.
    thread = std::thread([name, body = std::forward<Body>(body)]() mutable {
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error& refused) {
    status = Error(Code::kUnavailable, cat("no thread \"", std::string_view(name), "\": ", std::string_view(refused.what()),
                                           "; raise the limit of processes (ulimit -u, or pids.max of the cgroup)"));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!status.ok()) return std::move(status).error();
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace paramwire
