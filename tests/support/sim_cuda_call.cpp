// The steps before and after each call of the simulated driver: faults, lost devices, contexts, capture rules, handles, the log.
#include "support/sim_cuda_state.hpp"

#include <atomic>

namespace paramwire::testing::sim {

namespace {

std::atomic<Sim*> the_sim{nullptr};

// Handles look like addresses that no process has (bit 62 is set, so they are not canonical on x86-64 nor on AArch64): following one crashes.
constexpr Id kFirstHandle = (Id{1} << 62) + 0x100;
constexpr Id kHandleStep = 0x10;

}  // namespace

Sim* current_sim() noexcept { return the_sim.load(std::memory_order_acquire); }
void set_current_sim(Sim* sim) noexcept { the_sim.store(sim, std::memory_order_release); }

// Eight times the memory, since no address is given twice: a program that opens and closes eight times in one simulation.
Sim::Sim(SimCudaOptions options_)
    : options(std::move(options_)), random(options.seed), devices(static_cast<std::size_t>(options.devices)),
      memory(options.device_bytes * static_cast<std::uint64_t>(options.devices) * 8 + (16U << 20)) {}

void Sim::fail(const std::string& text) { failures.push_back(cat(function.empty() ? "simulation" : function, ": ", text)); }

CUresult Sim::forbid(CUresult code, const std::string& text) {
  fail(text);
  return code;
}

void Sim::note(const SimEntry& entry) {
  if (log.size() == SimCuda::kLogEntries) log.pop_front();
  log.push_back(entry);
}

std::uint32_t Sim::thread_number() {
  static std::atomic<std::uint32_t> numbers{0};
  thread_local const std::uint32_t number = numbers.fetch_add(1, std::memory_order_relaxed) + 1;
  return number;
}

Thread& Sim::thread() { return threads[thread_number()]; }

Id Sim::current_id() {
  const Thread& self = thread();
  return self.contexts.empty() ? 0 : self.contexts.back();
}

const Context* Sim::current_context() {
  const auto found = contexts.live.find(current_id());
  return found == contexts.live.end() ? nullptr : &found->second;
}

Id Sim::new_id(std::string_view what, std::uint32_t number) {
  const Id id = kFirstHandle + kHandleStep * names_.size();
  names_[id] = cat(what, ' ', number);
  return id;
}

void Sim::unknown_handle(std::string_view what, Id handle) {
  const auto known = names_.find(handle);
  if (known == names_.end()) {
    fail(cat(hex(handle), " is no ", what, " of this simulation"));
  } else if (known->second.starts_with(cat(what, ' '))) {
    fail(cat("use of ", known->second, " after it was destroyed"));
  } else {
    fail(cat(known->second, " is no ", what));
  }
}

Stream* Sim::stream_of(CUstream handle, CUresult& code) {
  // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are 1 and 2.
  if (const Context* context = current_context(); address_of(handle) <= 2 && options.default_stream && context != nullptr) {
    Stream& stream = devices[static_cast<std::size_t>(context->device)].default_stream;
    stream.context = current_id();
    stream.device = context->device;
    return &stream;
  }
  if (address_of(handle) <= 2) {
    code = forbid(CUDA_ERROR_INVALID_HANDLE, "use of the default stream, which orders work with every blocking stream of the process");
    return nullptr;
  }
  Stream* stream = look_up(streams, handle);
  if (stream == nullptr) {
    code = CUDA_ERROR_INVALID_HANDLE;
    return nullptr;
  }
  if (stream->context != current_id()) {
    code = forbid(CUDA_ERROR_INVALID_CONTEXT, cat("stream ", stream->number, " is of another context than the one that is current"));
    return nullptr;
  }
  return stream;
}

// cuThreadExchangeStreamCaptureMode, the three modes; the guide's "Invalidation": what is refused invalidates the capture.
CUresult Sim::conflict_with_capture() {
  const CUstreamCaptureMode mode = thread().mode;
  const std::uint32_t self = thread_number();
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  std::string met;
  for (auto& [id, capture] : captures) {
    const bool own = capture.thread == self && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool others = mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.thread != self && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!own && !others) continue;
    capture.invalid = true;
    met = cat("capture ", capture.number, own ? " of this thread" : " of another thread, and this thread's mode is global");
  }
  return met.empty() ? CUDA_SUCCESS : forbid(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cat("is unsafe during ", met));
}

const Fault* Sim::next_fault(std::string_view name) {
  const Fault* out = nullptr;
  for (Fault& fault : faults) {
    if (fault.calls_left > 0 && fault.function == name && --fault.calls_left == 0) out = &fault;
  }
  return out;
}

CUresult enter(Sim& sim, const Needs& needs, SimEntry& entry, bool& acts, bool& skips) {
  const auto counted = sim.calls.find(entry.function);
  if (counted == sim.calls.end()) {
    sim.calls.emplace(entry.function, 1);
  } else {
    ++counted->second;
  }
  acts = needs.destroys;
  if (const Fault* fault = sim.next_fault(entry.function); fault != nullptr) {
    skips = fault->skip;
    return fault->code;
  }
  acts = false;
  if (needs.initialised && !sim.initialised) return sim.forbid(CUDA_ERROR_NOT_INITIALIZED, "cuInit was not called");
  if (needs.context) {
    if (sim.current_id() == 0) return sim.forbid(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
    if (sim.current_context() == nullptr) return sim.forbid(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the current context was released");
  }
  if (const Context* context = sim.current_context(); needs.device && context != nullptr && sim.lost_of(context->device) != CUDA_SUCCESS) {
    acts = needs.destroys;
    return sim.lost_of(context->device);
  }
  if (!needs.safe) {
    const CUresult conflict = sim.conflict_with_capture();
    if (conflict != CUDA_SUCCESS) return conflict;
  }
  acts = true;
  return CUDA_SUCCESS;
}

CUresult leave(Sim& sim, const Needs& needs, SimEntry& entry, CUresult result) {
  if (sim.options.order == SimOrder::kRandom) sim.run_some();
  if (needs.waits && result == CUDA_SUCCESS) {
    if (const Context* context = sim.current_context(); context != nullptr) result = sim.lost_of(context->device);
  }
  entry.result = result;
  sim.note(entry);
  sim.function = {};
  return result;
}

void Sim::leftovers() {
  const auto each = [&](const auto& table) {
    for (const auto& [id, object] : table.live) {
      static_cast<void>(id);
      failures.push_back(cat(table.maker, ": ", table.what, ' ', object.number, " is left"));
    }
  };
  memory.map().each_live([&](const Allocation& left) { failures.push_back(cat("cuMemAlloc: ", left, " is left")); });
  pinned.map().each_live([&](const Allocation& left) { failures.push_back(cat("cuMemHostAlloc: ", left, " is left")); });
  each(streams);
  each(events);
  each(graphs);
  each(execs);
  each(libraries);
  for (const auto& [id, capture] : captures) failures.push_back(cat("cuStreamBeginCapture: capture ", capture.number, " was not ended"));
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].retains > 0) failures.push_back(cat("cuDevicePrimaryCtxRetain: ", devices[i].retains, " retains of device ", i, " are left"));
  }
  for (const auto& [number, left] : threads) {
    if (!left.contexts.empty()) failures.push_back(cat("cuCtxPushCurrent: ", left.contexts.size(), " contexts are left current in thread ", number));
  }
}

}  // namespace paramwire::testing::sim
