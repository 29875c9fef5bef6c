// What a run of the simulation reached, counted; and what every full run must reach.
#pragma once

#include "paramwire/client/fetch_machine.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace paramwire::sim {

struct Coverage {
  std::array<std::array<std::uint64_t, FetchMachine::kEvents>, FetchMachine::kStates> fetch{};
  std::map<std::string, std::uint64_t> frames;   // handled by servers
  std::map<std::string, std::uint64_t> faults;   // injected
  std::map<std::string, std::uint64_t> store;    // transitions of blocks, versions, leases, publishes
  std::map<std::string, std::uint64_t> reads;    // how reads ended
  std::uint64_t checked_bytes = 0;
  std::uint64_t events = 0;

  void print() const;
  // Prints each member of the required lists that was never reached; true when there is none.
  bool complete() const;
};

}  // namespace paramwire::sim
