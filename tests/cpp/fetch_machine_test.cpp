#include "paramwire/client/fetch_machine.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace paramwire {
namespace {

using Action = FetchMachine::Action;
using Event = FetchMachine::Event;
using Mode = FetchMachine::Mode;
using State = FetchMachine::State;

const Error kStale(Code::kStale, "it changed");

FetchMachine machine(Mode mode, Micros deadline = 1000) {
  FetchMachine::Options options;
  options.mode = mode;
  options.deadline = deadline;
  return FetchMachine(options);
}

// Brings a fresh machine into `state` by legal events.
FetchMachine in_state(State state) {
  auto m = machine(Mode::kNewest);
  if (state == State::kIdle) return m;
  static_cast<void>(m.step(0, Event::kBegin));
  switch (state) {
    case State::kReading: static_cast<void>(m.step(0, Event::kOpened)); break;
    case State::kOpeningLeased:
    case State::kReadingLeased:
      for (int i = 0; i < 3; ++i) {
        static_cast<void>(m.step(0, Event::kOpened));
        static_cast<void>(m.step(0, Event::kChanged, &kStale));
      }
      if (state == State::kReadingLeased) static_cast<void>(m.step(0, Event::kOpened));
      break;
    case State::kReconnecting: static_cast<void>(m.step(0, Event::kLost, &kStale)); break;
    case State::kDone:
      static_cast<void>(m.step(0, Event::kOpened));
      static_cast<void>(m.step(0, Event::kRead));
      break;
    case State::kFailed: static_cast<void>(m.step(0, Event::kError, &kStale)); break;
    default: break;
  }
  EXPECT_EQ(m.state(), state) << FetchMachine::name(m.state());
  return m;
}

TEST(FetchMachine, EveryStateTimesEveryEventGoesWhereTheTableSays) {
  using S = State;
  // Rows: states in order; columns: events begin, opened, read, changed, corrupt, lost, reconnected, restarted, error.
  const S table[FetchMachine::kStates][FetchMachine::kEvents] = {
      /* idle          */ {S::kOpening, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed},
      /* opening       */ {S::kFailed, S::kReading, S::kFailed, S::kFailed, S::kOpening, S::kReconnecting, S::kFailed, S::kFailed, S::kFailed},
      /* reading       */ {S::kFailed, S::kFailed, S::kDone, S::kOpening, S::kReading, S::kReconnecting, S::kFailed, S::kFailed, S::kFailed},
      /* opening-leased*/ {S::kFailed, S::kReadingLeased, S::kFailed, S::kFailed, S::kOpeningLeased, S::kReconnecting, S::kFailed, S::kFailed, S::kFailed},
      /* reading-leased*/ {S::kFailed, S::kFailed, S::kDone, S::kOpeningLeased, S::kReadingLeased, S::kReconnecting, S::kFailed, S::kFailed, S::kFailed},
      /* reconnecting  */ {S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kReconnecting, S::kOpening, S::kOpening, S::kFailed},
      /* done          */ {S::kDone, S::kDone, S::kDone, S::kDone, S::kDone, S::kDone, S::kDone, S::kDone, S::kDone},
      /* failed        */ {S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed, S::kFailed},
  };
  for (std::size_t s = 0; s < FetchMachine::kStates; ++s) {
    for (std::size_t e = 0; e < FetchMachine::kEvents; ++e) {
      auto m = in_state(static_cast<State>(s));
      static_cast<void>(m.step(0, static_cast<Event>(e), &kStale));
      EXPECT_EQ(m.state(), table[s][e]) << FetchMachine::name(static_cast<State>(s)) << " x " << FetchMachine::name(static_cast<Event>(e))
                                        << " gave " << FetchMachine::name(m.state());
    }
  }
}

TEST(FetchMachine, PastTheDeadlineEveryLiveStateFailsWithTimeout) {
  for (std::size_t s = 0; s < FetchMachine::kStates; ++s) {
    for (std::size_t e = 0; e < FetchMachine::kEvents; ++e) {
      auto m = in_state(static_cast<State>(s));
      if (m.state() == State::kDone || m.state() == State::kFailed) continue;
      const bool reading = m.state() == State::kReading || m.state() == State::kReadingLeased;
      const Action action = m.step(1000, static_cast<Event>(e), &kStale);
      if (static_cast<Event>(e) == Event::kRead && reading) {
        EXPECT_EQ(action, Action::kDone) << "bytes that are here are here";
      } else {
        ASSERT_EQ(action, Action::kFail);
        EXPECT_EQ(m.failure().code(), Code::kTimeout);
      }
    }
  }
}

TEST(FetchMachine, ASnapshotIsNeverMendedByAnotherVersion) {
  auto m = machine(Mode::kSnapshot);
  EXPECT_EQ(m.step(0, Event::kBegin), Action::kRead);
  EXPECT_EQ(m.step(0, Event::kChanged, &kStale), Action::kFail);
  EXPECT_EQ(m.failure().code(), Code::kStale);
  EXPECT_EQ(m.failure().message(), "it changed");

  auto r = machine(Mode::kSnapshot);
  static_cast<void>(r.step(0, Event::kBegin));
  EXPECT_EQ(r.step(0, Event::kLost, &kStale), Action::kReconnect);
  EXPECT_EQ(r.step(0, Event::kReconnected), Action::kRead) << "the same incarnation: go on where it was";
  EXPECT_EQ(r.step(0, Event::kLost, &kStale), Action::kReconnect);
  EXPECT_EQ(r.step(0, Event::kRestarted), Action::kFail);
  EXPECT_EQ(r.failure().code(), Code::kStale);
  EXPECT_NE(r.failure().message().find("restarted"), std::string::npos);
}

TEST(FetchMachine, TheNewestTakesALeaseAfterThreeChangesAndThenGivesUpInTheEnd) {
  auto m = machine(Mode::kNewest);
  std::vector<Action> actions{m.step(0, Event::kBegin)};
  for (int round = 0; round < 20 && actions.back() != Action::kFail; ++round) {
    static_cast<void>(m.step(0, Event::kOpened));
    actions.push_back(m.step(0, Event::kChanged, &kStale));
  }
  const std::vector<Action> expected = {Action::kOpen, Action::kOpen, Action::kOpen, Action::kOpenLeased, Action::kOpenLeased, Action::kOpenLeased,
                                        Action::kOpenLeased, Action::kFail};
  EXPECT_EQ(actions, expected);
  EXPECT_EQ(m.failure().code(), Code::kStale);
}

TEST(FetchMachine, OneCorruptReadIsRepeatedTheSecondIsTold) {
  const Error corrupt(Code::kCorrupt, "CRC");
  auto m = machine(Mode::kSnapshot);
  static_cast<void>(m.step(0, Event::kBegin));
  EXPECT_EQ(m.step(0, Event::kCorrupt, &corrupt), Action::kRead);
  EXPECT_EQ(m.step(0, Event::kCorrupt, &corrupt), Action::kFail);
  EXPECT_EQ(m.failure().code(), Code::kCorrupt);
}

TEST(FetchMachine, LinksThatBreakForeverEndTheFetch) {
  const Error lost(Code::kUnreachable, "reset by peer");
  auto m = machine(Mode::kNewest);
  static_cast<void>(m.step(0, Event::kBegin));
  int reconnects = 0;
  while (m.step(0, Event::kLost, &lost) == Action::kReconnect) {
    ++reconnects;
    static_cast<void>(m.step(0, Event::kReconnected));
  }
  EXPECT_EQ(reconnects, 2);
  EXPECT_EQ(m.failure().code(), Code::kUnreachable);
}

}  // namespace
}  // namespace paramwire
