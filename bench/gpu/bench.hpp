// What the benchmarks for a GPU share: a device, sizes, clocks, and the figures that come out.
//
// Timing: a few runs to warm up, then several, of which the median counts; a figure and its baseline in one run of the program, one after the
// other. Device time is between two events of one stream; cost on the host is the clock of the calling thread (CPU time) or the monotonic clock
// (rates). Every benchmark checks its answers, and says so in `correct`.
//
// On the simulated device figures are 0 and without ratio: it has no speed, and its answers alone are of interest.
#pragma once

#include "gpu/bed.hpp"
#include "gpu/world.hpp"

#include "paramwire/base/error.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::gpu {

struct Figure {
  std::string name;
  double value = 0;
  std::string unit;
  std::string baseline{};                        // what it is compared with; "" with nothing
  std::optional<double> baseline_value{};        // in `unit`
  std::optional<double> target{};                // costs (us): of value, at most; rates: of the ratio to the baseline, at least
  bool correct = false;

  bool is_cost() const { return unit == "us"; }
  // How many times as good as the baseline: of rates value / baseline, of costs baseline / value.
  std::optional<double> ratio() const {
    if (!baseline_value || value == 0 || *baseline_value == 0) return {};
    return is_cost() ? *baseline_value / value : value / *baseline_value;
  }
};

class Bench {
 public:
  Bench(const World& on, Bed device, bool in_a_hurry) : world(on), bed(std::move(device)), quick(in_a_hurry) {}

  const World& world;
  const Bed bed;
  const bool quick;

  // One of three sizes: on the simulated device, in a quick run, in a whole one.
  template <typename T>
  T size(T simulated, T small, T whole) const {
    return world.simulated ? simulated : quick ? small : whole;
  }
  int repetitions() const { return size(1, 5, 15); }

  void add(Figure figure) {
    if (world.simulated) {
      figure.value = 0;
      figure.baseline_value.reset();
    }
    figures_.push_back(std::move(figure));
  }
  const std::vector<Figure>& figures() const { return figures_; }

  // Seconds that the device takes for what `enqueue` puts into the stream, by the median.
  Result<double> device_seconds(const std::function<Status()>& enqueue);
  // Bytes read and written in a second by a copy on the device: what a kernel bound by memory can reach.
  Result<double> copy_bandwidth();
  static constexpr const char* kCopyBaseline = "device copy, bytes read and written";

 private:
  std::vector<Figure> figures_;
  std::optional<double> copy_bandwidth_;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

inline double wall_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
// CPU time of the calling thread: clock_gettime(2).
inline double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}
inline double gigabytes(double bytes, double seconds) { return seconds > 0 ? bytes / seconds * 1e-9 : 0; }

Status bench_crc(Bench& bench);
Status bench_decode(Bench& bench);
Status bench_gemv(Bench& bench);
Status bench_attention(Bench& bench);
Status bench_graph(Bench& bench);
Status bench_host_to_device(Bench& bench);
Status bench_generation(Bench& bench);

}  // namespace paramwire::gpu
