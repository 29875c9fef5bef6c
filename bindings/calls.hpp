// Calls that wait for another process, so that Ctrl-C ends the waiting.
//
// Python runs signal handlers in the main thread only, and only between bytecodes: a core call that waits there would keep a
// KeyboardInterrupt for up to its deadline. So the main thread hands such a call to a worker thread and looks for signals
// while it waits. An interrupted call goes on in its worker until it is done or its deadline passes; what it works with is
// kept until then. Every other thread calls directly.
#pragma once

#include "gil.hpp"

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>

namespace paramwire::bindings {

namespace py = pybind11;

class Job;

// Whether this is the thread that gets KeyboardInterrupt.
bool in_main_thread() noexcept;
// Runs `work` in a worker. GIL held; returns at once.
std::shared_ptr<Job> start_job(std::function<void()> work);
// Waits until `job` is done; throws the exception of a signal handler, after which `keep` is kept until the job is done. GIL held.
void await_job(const std::shared_ptr<Job>& job, py::object keep);
// Drops what finished calls kept. GIL held.
void drop_finished();
// Keeps `keep` until `done` says true; looked at by the next calls. GIL held.
void keep_until(std::function<bool()> done, py::object keep);

// Runs `work` without the GIL and returns what it returns. `work` owns all that it touches, or `keep` does: it may still run
// after this call was interrupted.
template <typename Work>
auto interruptible(Work work, py::object keep = py::none()) {
  using Value = std::invoke_result_t<Work>;
  if (!in_main_thread()) return without_gil(work);
  auto value = std::make_shared<std::optional<Value>>();
  const auto job = start_job([value, work = std::move(work)]() mutable { value->emplace(work()); });
  await_job(job, std::move(keep));
  return std::move(**value);
}

}  // namespace paramwire::bindings
