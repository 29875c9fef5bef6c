// What a seam can offer on this machine: one line for each implementation, found by looking, never guessed from names.
#pragma once

#include <string>

namespace paramwire {

struct Availability {
  std::string name;
  bool usable = false;
  std::string reason;  // usable: what it would use, may be empty; else why not
  std::string next{};  // what to type, or to do, next; empty where there is nothing to mend
};

}  // namespace paramwire
