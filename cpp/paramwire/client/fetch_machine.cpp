#include "paramwire/client/fetch_machine.hpp"

#include "paramwire/base/text.hpp"

#include <array>

namespace paramwire {

std::string_view FetchMachine::name(State state) noexcept {
  static constexpr std::array<std::string_view, kStates> kNames = {"idle", "opening", "reading", "opening-leased", "reading-leased", "reconnecting", "done", "failed"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string_view FetchMachine::name(Event event) noexcept {
  static constexpr std::array<std::string_view, kEvents> kNames = {"begin", "opened", "read", "changed", "corrupt", "lost", "reconnected", "restarted", "error"};
  return kNames[static_cast<std::size_t>(event)];
}

FetchMachine::Action FetchMachine::fail(Error error) {
  failure_ = std::move(error);
  return go(State::kFailed, Action::kFail);
}

FetchMachine::Action FetchMachine::go(State state, Action action) {
  state_ = state;
  return action;
}

FetchMachine::Action FetchMachine::on_changed(const Error& error) {
  ++changes_;
  // A snapshot stands for one version: its blocks can't be replaced by newer ones.
  if (options_.mode == Mode::kSnapshot) return fail(error);
  if (state_ == State::kReadingLeased) {
    // The lease ended under us (revoked for room, or its time ran out on a slow link): one more lease is as good as the last.
    if (changes_ > 2 * options_.changes_max) return fail(error);
    return go(State::kOpeningLeased, Action::kOpenLeased);
  }
  if (changes_ >= options_.changes_max) return go(State::kOpeningLeased, Action::kOpenLeased);
  return go(State::kOpening, Action::kOpen);
}

FetchMachine::Action FetchMachine::on_lost(const Error& error) {
  if (reconnects_ == options_.reconnects_max) return fail(error);
  ++reconnects_;
  return go(State::kReconnecting, Action::kReconnect);
}

FetchMachine::Action FetchMachine::step(Micros now, Event event, const Error* error) {
  if (state_ == State::kDone) return Action::kDone;
  if (state_ == State::kFailed) return Action::kFail;
  const bool reading = state_ == State::kReading || state_ == State::kReadingLeased;
  if (event == Event::kRead && reading) return go(State::kDone, Action::kDone);  // bytes that are here are here, deadline or not
  if (now >= options_.deadline) {
    const std::string last = error ? cat("; last: ", error->message()) : std::string();
    return fail(Error(Code::kTimeout, cat("the deadline passed while ", name(state_), " after ", retries(), " retries", last)));
  }
  const Error unknown(Code::kInternal, cat("fetch event ", name(event), " in state ", name(state_)));
  const Error& cause = error ? *error : unknown;
  switch (event) {
    case Event::kBegin:
      if (state_ != State::kIdle) break;
      return options_.mode == Mode::kSnapshot ? go(State::kReading, Action::kRead) : go(State::kOpening, Action::kOpen);
    case Event::kOpened:
      if (state_ == State::kOpening) return go(State::kReading, Action::kRead);
      if (state_ == State::kOpeningLeased) return go(State::kReadingLeased, Action::kRead);
      break;
    case Event::kChanged:
      if (reading) return on_changed(cause);
      return fail(cause);  // an open that is refused as stale: the version asked for is not to be had
    case Event::kCorrupt:
      if (++corruptions_ >= options_.corrupt_max) return fail(cause);
      if (reading) return go(state_, Action::kRead);
      if (state_ == State::kOpening) return go(state_, Action::kOpen);
      if (state_ == State::kOpeningLeased) return go(state_, Action::kOpenLeased);
      break;
    case Event::kLost:
      if (state_ == State::kIdle) break;  // nothing was asked of a link yet
      return on_lost(cause);
    case Event::kReconnected:
      if (state_ != State::kReconnecting) break;
      return options_.mode == Mode::kSnapshot ? go(State::kReading, Action::kRead) : go(State::kOpening, Action::kOpen);
    case Event::kRestarted:
      if (state_ != State::kReconnecting) break;
      if (options_.mode == Mode::kNewest) return go(State::kOpening, Action::kOpen);
      return fail(Error(Code::kStale, "the server restarted: the snapshot is gone with the incarnation that made it, take a new one"));
    case Event::kRead: break;
    case Event::kError: return fail(cause);
  }
  return fail(unknown);
}

}  // namespace paramwire
