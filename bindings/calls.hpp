// Calls that wait for another process, so that Ctrl-C ends the waiting.
//
// Python runs signal handlers in the main thread only, and only between bytecodes: a core call that waits there would keep a
// KeyboardInterrupt for up to its deadline. So the main thread
//   * makes a call that is short but for waiting itself, and the core's waits look for signals (`answering_signals`); or
//   * hands a call that may keep a core busy for long to a worker thread and looks for signals while it waits (`interruptible`): the
//     two thread switches cost 10 to 30 us. Interrupted, it goes on in its worker until it is done or its deadline passes; what it
//     works with is kept until then.
// Every other thread calls directly.
#pragma once

#include "gil.hpp"

#include "paramwire/base/interrupt.hpp"

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
// Runs the handlers of signals that came. returns: whether one raised, with its exception set, or forked and this is the child. Without the
// GIL; the main thread.
bool signal_raised();
// Runs `work` in a worker. GIL held; returns at once.
std::shared_ptr<Job> start_job(std::function<void()> work);
// Waits until `job` is done; throws the exception of a signal handler, after which `keep` is kept until the job is done. GIL held.
void await_job(const std::shared_ptr<Job>& job, py::object keep);
// Drops what finished calls kept. GIL held.
void drop_finished();
// Keeps `keep` until `done` says true; looked at by the next calls. GIL held.
void keep_until(std::function<bool()> done, py::object keep);

// Runs `work` without the GIL in this thread and returns what it returns. A signal handler's exception ends its waits and is thrown.
template <typename Work>
auto answering_signals(Work&& work) {
  if (!in_main_thread()) return without_gil(work);
  auto value = without_gil([&] {
    const WaitInterrupt interrupt(&signal_raised);
    return work();
  });
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

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
