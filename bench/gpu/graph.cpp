// What a step costs the calling thread: a swap of weights and the launch of a graph, beside as many launches one by one.
//
// A swap is what a session does when a window's weights lie in the other slot: the computation waits for the event of their arrival, the graph that
// was captured for that slot is launched, and an event is recorded behind it. CPU time of the calling thread, by clock_gettime(2).
#include "bench.hpp"

#include "gpu/case_make.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/cuda/kernels/compute_args.hpp"

#include <array>

namespace paramwire::gpu {

using namespace cuda;

namespace {

// Adds the weight of a slot to a sum, `nodes` times: small whole numbers, so that the sum is exact.
class Steps {
 public:
  static Result<Steps> make(Bench& bench, int nodes) {
    Steps out(bench, nodes);
    PARAMWIRE_CHECK(out.prepare());
    return out;
  }
  // Median CPU time of a step, in microseconds.
  Result<double> swap_and_launch() {
    return microseconds([&](unsigned slot) -> Status {
      PARAMWIRE_CHECK(bench_.bed.stream.wait(arrived_));
      PARAMWIRE_CHECK(bench_.bed.stream.launch(graphs_[slot]));
      return bench_.bed.stream.record(computed_[slot]);
    });
  }
  Result<double> eager() {
    return microseconds([&](unsigned slot) { return enqueue(slot); });
  }
  // Whether the sum is what all steps so far make it.
  Result<bool> right() const {
    PARAMWIRE_TRY(sum, bench_.bed.download_as<float>(sum_, 1));
    return static_cast<double>(sum[0]) == wanted_;
  }

 private:
  Steps(Bench& bench, int nodes) : bench_(bench), nodes_(nodes) {}

  Status prepare() {
    const Bed& bed = bench_.bed;
    PARAMWIRE_TRY(sum, bed.upload(bytes_of<float>({0})));
    sum_ = std::move(sum);
    PARAMWIRE_TRY(weights, bed.upload(bytes_of<float>({1, 2})));
    weights_ = std::move(weights);
    PARAMWIRE_TRY(copies, Stream::create(bed.device));
    copies_ = std::move(copies);
    for (Event* event : {&arrived_, &computed_[0], &computed_[1]}) {
      PARAMWIRE_TRY(made, Event::create(bed.device));
      *event = std::move(made);
    }
    for (unsigned slot = 0; slot < 2; ++slot) {
      PARAMWIRE_TRY(graph, bed.stream.capture([&] { return enqueue(slot); }));
      graphs_[slot] = std::move(graph);
    }
    return {};
  }
  Status enqueue(unsigned slot) const {
    const PairArgs args{.left = sum_.at<const float>(), .right = weights_.at<const float>(4 * slot), .out = sum_.at<float>(), .out16 = nullptr, .half = Half::kNone, .count = 1};
    for (int i = 0; i < nodes_; ++i) PARAMWIRE_CHECK(bench_.bed.module->launch(bench_.bed.stream, Kernel::k_add, pair_launch(args), args));
    return {};
  }
  template <typename Step>
  Result<double> microseconds(const Step& step) {
    const int warm_up = bench_.world.simulated ? 1 : 20, steps = bench_.size(4, 100, 400);
    std::vector<double> seconds;
    for (int i = 0; i < warm_up + steps; ++i) {
      const unsigned slot = static_cast<unsigned>(i) % 2;
      // The other slot's weights arrive.
      PARAMWIRE_CHECK(copies_.record(arrived_));
      const double begin = thread_seconds();
      PARAMWIRE_CHECK(step(slot));
      const double end = thread_seconds();
      PARAMWIRE_CHECK(bench_.bed.stream.synchronize());  // so that no queue is full, which would be the device's time
      wanted_ += (slot + 1.0) * nodes_;
      if (i >= warm_up) seconds.push_back(end - begin);
    }
    return median(std::move(seconds)) * 1e6;
  }

  Bench& bench_;
  int nodes_;
  DeviceMemory sum_, weights_;
  Stream copies_;
  Event arrived_;
  std::array<Event, 2> computed_;
  std::array<GraphExec, 2> graphs_;
  double wanted_ = 0;
};

}  // namespace

Status bench_graph(Bench& bench) {
  const Current current(*bench.bed.device);
  PARAMWIRE_CHECK(current.status());
  // Of the slowest number of nodes: "whatever the number of nodes" is the promise.
  Figure worst{.name = "swap_launch", .unit = "us", .target = 5.0, .correct = true};
  for (const int nodes : {10, 100, 1000}) {
    PARAMWIRE_TRY(steps, Steps::make(bench, nodes));
    PARAMWIRE_TRY(graph, steps.swap_and_launch());
    PARAMWIRE_TRY(eager, steps.eager());
    PARAMWIRE_TRY(correct, steps.right());
    Figure figure{.name = cat("swap_launch_", nodes), .value = graph, .unit = "us", .baseline = cat(nodes, " launches one by one"), .baseline_value = eager, .target = 5.0, .correct = correct};
    worst.correct = worst.correct && correct;
    if (figure.value >= worst.value) {
      worst.value = figure.value;
      worst.baseline = figure.baseline;
      worst.baseline_value = figure.baseline_value;
    }
    bench.add(std::move(figure));
  }
  bench.add(std::move(worst));
  return {};
}

}  // namespace paramwire::gpu
