// The one place where the GIL is given up and taken back.
//
// A thread that waits for the GIL while the interpreter ends is killed by CPython (before 3.14) with pthread_exit, whose
// unwinding would run destructors that touch Python without the GIL, or meet a noexcept frame and abort the process. Such a
// thread stays where it is instead, and ends with the process; CPython 3.14 does the same (gh-87135).
#pragma once

#include <pybind11/pybind11.h>

#include <cxxabi.h>
#include <unistd.h>
#include <utility>

namespace paramwire::bindings {

class GilReleased {
 public:
  GilReleased() noexcept : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// Runs `work`, which touches no Python object, without the GIL.
template <typename Work>
auto without_gil(Work&& work) {
  const GilReleased released;
  return std::forward<Work>(work)();
}

}  // namespace paramwire::bindings
