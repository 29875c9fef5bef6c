// What a fetch does next: a state machine with no thread, clock or socket inside. The client executes its actions on real
// links, the simulation on simulated ones.
//
//   of a snapshot:  read -> done; a change means that the snapshot's version is gone (kStale), never a newer block.
//   of the newest:  open (no lease) -> read -> done; on a change open again, and after `changes_max` changes take a lease,
//                   under which nothing changes: so a fetch ends, however fast somebody publishes.
//   both:           a lost link is re-opened; a restarted server ends a snapshot fetch and not a fetch of the newest.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"

#include <cstdint>
#include <optional>
#include <string_view>

namespace paramwire {

class FetchMachine {
 public:
  enum class Mode : std::uint8_t { kSnapshot, kNewest };
  enum class State : std::uint8_t { kIdle, kOpening, kReading, kOpeningLeased, kReadingLeased, kReconnecting, kDone, kFailed };
  enum class Action : std::uint8_t { kOpen, kOpenLeased, kRead, kReconnect, kDone, kFail };
  enum class Event : std::uint8_t {
    kBegin,         // start
    kOpened,        // the manifest is here, whole and checked
    kRead,          // every block arrived, verified
    kChanged,       // some block changed or is gone (kStale)
    kCorrupt,       // some block failed its CRC though nothing changed
    kLost,          // the link broke
    kReconnected,   // a new link to the same incarnation
    kRestarted,     // a new link to another incarnation
    kError,         // anything that a retry cannot mend: `error` says what
  };
  struct Options {
    Mode mode = Mode::kSnapshot;
    Micros deadline = kNever;
    std::uint32_t changes_max = 3;     // optimistic rounds before a lease is taken: each costs a whole read
    std::uint32_t corrupt_max = 2;     // reads of corrupt bytes before giving up: one repeat tells a bad wire from a bad store
    std::uint32_t reconnects_max = 2;
  };
  static constexpr std::size_t kStates = 8;
  static constexpr std::size_t kEvents = 9;

  explicit FetchMachine(const Options& options) : options_(options) {}

  // The next action. `error` comes with every event but kBegin, kOpened, kRead, kReconnected and kRestarted, and is what the
  // fetch fails with if it cannot go on. Past the deadline every step fails with kTimeout.
  Action step(Micros now, Event event, const Error* error = nullptr);

  State state() const noexcept { return state_; }
  const Error& failure() const noexcept { return *failure_; }  // after kFail
  std::uint32_t retries() const noexcept { return changes_ + corruptions_ + reconnects_; }
  std::uint32_t changes() const noexcept { return changes_; }

  static std::string_view name(State state) noexcept;
  static std::string_view name(Event event) noexcept;

 private:
  Action fail(Error error);
  Action go(State state, Action action);
  Action on_changed(const Error& error);
  Action on_lost(const Error& error);

  Options options_;
  State state_ = State::kIdle;
  std::uint32_t changes_ = 0;
  std::uint32_t corruptions_ = 0;
  std::uint32_t reconnects_ = 0;
  std::optional<Error> failure_;
};

}  // namespace paramwire
