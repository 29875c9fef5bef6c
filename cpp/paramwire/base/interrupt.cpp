#include "paramwire/base/interrupt.hpp"

namespace paramwire {

namespace {

thread_local WaitInterrupt* current = nullptr;

}  // namespace

WaitInterrupt::WaitInterrupt(bool (*asked)()) noexcept : asked_(asked), outer_(current) { current = this; }

WaitInterrupt::~WaitInterrupt() { current = outer_; }

bool wait_interrupted() noexcept {
  WaitInterrupt* const mine = current;  // who is asked may have others meanwhile
  if (mine == nullptr) return false;
  if (!mine->over_) mine->over_ = mine->asked_();
  return mine->over_;
}

Micros wait_slice(Micros left) noexcept { return current == nullptr ? left : std::min(left, kInterruptLook); }

}  // namespace paramwire
