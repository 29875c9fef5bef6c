#include "support/sim_cuda.hpp"

#include "support/sim_cuda_state.hpp"

#include <cassert>
#include <cstring>
#include <gtest/gtest.h>

namespace paramwire::testing {

std::string SimEntry::to_string() const {
  const char* words = nullptr;
  cuda::Driver names;
  sim::fill_device_functions(names);
  static_cast<void>(names.cuGetErrorName(result, &words));
  std::string out = cat(thread, ' ', function);
  if (!name.empty()) out += cat(' ', name);
  if (stream != 0) out += cat(" stream ", stream);
  if (event != 0) out += cat(" event ", event);
  if (address != 0) out += cat(' ', sim::hex(address));
  if (bytes != 0) out += cat(' ', bytes, " B");
  if (words == nullptr) return out + cat(": ", static_cast<int>(result));
  return out + cat(": ", words);
}

SimCuda::SimCuda(SimCudaOptions options) : sim_(std::make_unique<sim::Sim>(std::move(options))) {
  assert(sim::current_sim() == nullptr && "one simulation at a time");
  sim::set_current_sim(sim_.get());
}

SimCuda::~SimCuda() {
  for (const std::string& failure : finish()) ADD_FAILURE() << failure;
}

std::shared_ptr<const cuda::Driver> SimCuda::driver() const {
  auto driver = std::make_shared<cuda::Driver>();
  sim::fill_device_functions(*driver);
  sim::fill_memory_functions(*driver);
  sim::fill_copy_functions(*driver);
  sim::fill_stream_functions(*driver);
  sim::fill_event_functions(*driver);
  sim::fill_capture_functions(*driver);
  sim::fill_graph_functions(*driver);
  sim::fill_kernel_functions(*driver);
  return driver;
}

void SimCuda::fail_call(std::string_view function, std::uint32_t nth, CUresult code) {
  const std::scoped_lock lock(sim_->mutex);
  sim_->faults.push_back({std::string(function), nth, code, false});
}

void SimCuda::skip_call(std::string_view function, std::uint32_t nth) {
  const std::scoped_lock lock(sim_->mutex);
  sim_->faults.push_back({std::string(function), nth, CUDA_SUCCESS, true});
}

void SimCuda::lose_device(CUresult code, int device) {
  const std::scoped_lock lock(sim_->mutex);
  sim_->devices.at(static_cast<std::size_t>(device)).lost = code;
}

std::vector<std::string> SimCuda::take_failures() {
  const std::scoped_lock lock(sim_->mutex);
  return std::exchange(sim_->failures, {});
}

std::vector<std::string> SimCuda::finish() {
  const std::scoped_lock lock(sim_->mutex);
  if (sim::current_sim() == sim_.get()) {
    sim_->ending = true;
    sim_->run_everything();
    sim_->leftovers();
    sim::set_current_sim(nullptr);
  }
  return std::exchange(sim_->failures, {});
}

std::uint64_t SimCuda::calls(std::string_view function) const {
  const std::scoped_lock lock(sim_->mutex);
  const auto found = sim_->calls.find(function);
  return found == sim_->calls.end() ? 0 : found->second;
}

std::vector<SimEntry> SimCuda::log() const {
  const std::scoped_lock lock(sim_->mutex);
  return {sim_->log.begin(), sim_->log.end()};
}

void SimCuda::clear_log() {
  const std::scoped_lock lock(sim_->mutex);
  sim_->log.clear();
}

std::vector<std::string> SimCuda::ran() const {
  std::vector<std::string> out;
  for (const SimEntry& entry : log()) {
    if (entry.function == "run") out.emplace_back(entry.name);
  }
  return out;
}

SimCuda::Counters SimCuda::counters() const {
  const std::scoped_lock lock(sim_->mutex);
  Counters out = sim_->counters;
  out.streams = sim_->streams.live.size();
  out.events = sim_->events.live.size();
  out.graphs = sim_->graphs.live.size();
  out.execs = sim_->execs.live.size();
  out.libraries = sim_->libraries.live.size();
  out.pending = sim_->pending.size();
  return out;
}

std::vector<std::byte> SimCuda::peek(CUdeviceptr begin, std::uint64_t bytes) const {
  const std::scoped_lock lock(sim_->mutex);
  sim_->function = "peek";
  const sim::Allocation* found = sim_->memory.map().around(begin);
  const std::string problem = sim_->memory.map().problem(begin, bytes, found != nullptr ? found->device : 0);
  if (!problem.empty()) sim_->fail(problem);
  sim_->function = {};
  if (!problem.empty()) return {};
  const sim::DeviceMemory::Open opened(sim_->memory);
  const auto* at = static_cast<const std::byte*>(sim::pointer_to(begin));
  return {at, at + bytes};
}

bool SimCuda::protects_per_thread() const { return sim_->memory.per_thread(); }

void SimCuda::run_all() {
  const std::scoped_lock lock(sim_->mutex);
  sim_->run_everything();
}

CUresult SimCuda::enqueue(CUstream stream_handle, std::string name, std::vector<SimRange> touches, std::function<void()> body) {
  return sim::call("enqueue", {}, [&](sim::Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    sim::Stream* stream = sim.stream_of(stream_handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    entry.name = *sim.body_names.insert(name).first;
    sim::Op op;
    op.kind = sim::OpKind::kBody;
    op.name = std::move(name);
    op.touches = std::move(touches);
    op.body = std::move(body);
    return sim.push(*stream, std::move(op));
  });
}

void SimCuda::fail(const std::string& text) {
  const std::scoped_lock lock(sim_->mutex);
  sim_->failures.push_back(text);
}

bool SimCuda::access(CUdeviceptr begin, std::uint64_t bytes) const {
  assert(sim_->running_device >= 0 && "only in a body");
  return sim_->check(begin, bytes, sim_->running_device);
}

}  // namespace paramwire::testing
