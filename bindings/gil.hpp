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

// Takes the GIL in a thread that may or may not have it, and may be one that Python has never seen.
class GilTaken {
 public:
  GilTaken() noexcept {
    try {
      state_ = PyGILState_Ensure();
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  ~GilTaken() { PyGILState_Release(state_); }
  GilTaken(const GilTaken&) = delete;
  GilTaken& operator=(const GilTaken&) = delete;

 private:
  PyGILState_STATE state_{};
};

// Whether Py_Finalize has begun: from then on only its own thread gets the GIL.
inline bool interpreter_ends() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Runs `work`, which touches no Python object, without the GIL.
template <typename Work>
auto without_gil(Work&& work) {
  const GilReleased released;
  return std::forward<Work>(work)();
}

}  // namespace paramwire::bindings
