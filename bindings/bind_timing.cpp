// Timing without the interpreter between the calls, for benchmarks.
#include "calls.hpp"
#include "client.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::bindings {

namespace {

py::array time_fetches(const PySnapshot& snapshot, const std::vector<std::string>& names, const py::list& outs, double seconds) {
  if (names.empty() || names.size() != outs.size()) raise_invalid(cat("time_fetches: ", names.size(), " names and ", outs.size(), " targets"));
  std::vector<std::unique_ptr<Target>> targets;
  std::vector<FetchRequest> requests(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    targets.push_back(std::make_unique<Target>(outs[i]));
    if (targets.back()->scattered()) raise_invalid(cat("time_fetches: ", targets.back()->describe(), " is not one run of memory"));
    requests[i].tensor = names[i];
    requests[i].target = targets.back()->bytes();
  }
  const std::chrono::nanoseconds limit(micros_required(seconds, "seconds") * 1000);
  std::vector<std::int64_t> times;
  check(answering_signals([&]() -> Status {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (auto now = begin; now - begin < limit || times.empty();) {
      PARAMWIRE_CHECK(snapshot.core()->fetch({&requests[times.size() % requests.size()], 1}));
      const auto after = Clock::now();
      times.push_back(std::chrono::nanoseconds(after - now).count());
      now = after;
    }
    return {};
  }));
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(times.size()), times.data());
}

}  // namespace

void bind_timing(py::module_& module) {
  module.def("time_fetches", &time_fetches, py::arg("snapshot"), py::arg("names"), py::arg("outs"), py::arg("seconds"));
}

}  // namespace paramwire::bindings
