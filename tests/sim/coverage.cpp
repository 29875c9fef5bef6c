#include "sim/coverage.hpp"

#include <cstdio>
#include <utility>

namespace paramwire::sim {

namespace {

using State = FetchMachine::State;
using Event = FetchMachine::Event;

// Transitions that a full run must take; the others are misuse, which unit tests try.
constexpr std::pair<State, Event> kFetch[] = {
    {State::kIdle, Event::kBegin},
    {State::kOpening, Event::kOpened}, {State::kOpening, Event::kCorrupt}, {State::kOpening, Event::kLost}, {State::kOpening, Event::kError},
    {State::kReading, Event::kRead}, {State::kReading, Event::kChanged}, {State::kReading, Event::kCorrupt}, {State::kReading, Event::kLost},
    {State::kOpeningLeased, Event::kOpened}, {State::kOpeningLeased, Event::kLost},
    {State::kReadingLeased, Event::kRead}, {State::kReadingLeased, Event::kLost}, {State::kReadingLeased, Event::kCorrupt}, {State::kReadingLeased, Event::kChanged},
    {State::kReconnecting, Event::kReconnected}, {State::kReconnecting, Event::kRestarted}, {State::kReconnecting, Event::kLost}};

constexpr const char* kFrames[] = {"HELLO", "SNAPSHOT", "RENEW", "RELEASE", "GET", "UDP_OPEN", "PUBLISH_START", "PUT", "REMOVE", "ALIAS", "FINISH", "ABORT"};

constexpr const char* kFaults[] = {"connection lost", "server frozen", "server killed", "client frozen", "client killed", "publisher frozen", "publisher killed",
                                   "publisher gone mid-put", "publisher falls silent", "reader stalls between two lines", "bit flipped in transit",
                                   "bit flipped in a payload", "bit flipped in an extent table", "bit flipped in a slot header", "proxy: other version",
                                   "datagrams: lost", "datagrams: repeated",
                                   "datagrams: bit flipped", "datagrams: forged", "datagrams: cut off for a while", "proxy: other incarnation", "proxy: connections handed to the restarted server", "restart with the same epoch"};

constexpr const char* kStore[] = {"published", "publish refused", "publish refused: base", "publish aborted", "publish expired", "finish repeated", "put refused",
                                  "put came out altered", "tensor removed", "alias made", "slot superseded", "slot reclaimed", "slot quarantined",
                                  "slot left quarantine", "lease granted", "lease expired", "lease revoked", "version kept by lease"};

constexpr const char* kReads[] = {"one-sided whole: ok", "one-sided range: ok", "stream whole: ok", "stream range: ok", "one-sided whole: stale", "stream whole: stale",
                                  "one-sided whole: corrupt", "stream whole: corrupt", "one-sided range: corrupt", "stream range: corrupt", "datagrams whole: ok",
                                  "datagrams range: ok", "datagrams whole: stale", "datagrams range: stale", "datagrams whole: corrupt", "datagrams range: corrupt", "view given",
                                  "view refused: stale", "view refused: corrupt", "manifest refused", "manifest of another incarnation", "fetch failed: timeout", "fetch failed: unreachable",
                                  "fetch failed: stale", "fetch failed: corrupt", "frame refused by client"};

void list(const char* title, const std::map<std::string, std::uint64_t>& counts) {
  std::printf("%s\n", title);
  for (const auto& [name, count] : counts) std::printf("  %-44s %12llu\n", name.c_str(), static_cast<unsigned long long>(count));
}

template <std::size_t N>
bool reached(const char* title, const char* const (&names)[N], const std::map<std::string, std::uint64_t>& counts) {
  bool all = true;
  for (const char* name : names) {
    if (counts.contains(name)) continue;
    std::printf("NOT REACHED: %s: %s\n", title, name);
    all = false;
  }
  return all;
}

}  // namespace

void Coverage::print() const {
  std::printf("fetch machine, state x event\n  %-16s", "");
  for (std::size_t e = 0; e < FetchMachine::kEvents; ++e) std::printf("%12s", std::string(FetchMachine::name(static_cast<Event>(e))).c_str());
  std::printf("\n");
  for (std::size_t s = 0; s < FetchMachine::kStates; ++s) {
    std::printf("  %-16s", std::string(FetchMachine::name(static_cast<State>(s))).c_str());
    for (const std::uint64_t count : fetch[s]) std::printf("%12llu", static_cast<unsigned long long>(count));
    std::printf("\n");
  }
  list("frames handled by servers", frames);
  list("faults injected", faults);
  list("store", store);
  list("reads", reads);
  std::printf("%llu bytes accepted by readers and compared, %llu events\n", static_cast<unsigned long long>(checked_bytes), static_cast<unsigned long long>(events));
}

bool Coverage::complete() const {
  bool all = true;
  for (const auto& [state, event] : kFetch) {
    if (fetch[static_cast<std::size_t>(state)][static_cast<std::size_t>(event)] > 0) continue;
    std::printf("NOT REACHED: fetch machine: %s x %s\n", std::string(FetchMachine::name(state)).c_str(), std::string(FetchMachine::name(event)).c_str());
    all = false;
  }
  all = reached("frame", kFrames, frames) && all;
  all = reached("fault", kFaults, faults) && all;
  all = reached("store", kStore, store) && all;
  return reached("reads", kReads, reads) && all;
}

}  // namespace paramwire::sim
