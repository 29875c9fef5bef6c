#include "paramwire/base/interrupt.hpp"

#include <cassert>

namespace paramwire {

namespace {

thread_local WaitInterrupt* current = nullptr;

}  // namespace

WaitInterrupt::WaitInterrupt(bool (*asked)()) noexcept : asked_(asked) {
  assert(current == nullptr);
  current = this;
}

WaitInterrupt::~WaitInterrupt() { current = nullptr; }

bool wait_interrupted() noexcept {
  if (current == nullptr) return false;
  if (!current->over_) current->over_ = current->asked_();
  return current->over_;
}

Micros wait_slice(Micros left) noexcept { return current == nullptr ? left : std::min(left, kInterruptLook); }

}  // namespace paramwire
