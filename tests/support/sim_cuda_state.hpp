// What the simulated device (sim_cuda.hpp) remembers, and the steps that its functions share. Private to tests/support/sim_cuda_*.cpp.
//
// One lock for everything; each function of the driver is a lambda that call() runs with it held.
#pragma once

#include "paramwire/base/text.hpp"
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_memory.hpp"

#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace paramwire::testing::sim {

using Serial = std::uint64_t;  // of a piece of work, from 1 in the order of the calls; 0: none
using Id = std::uint64_t;      // a handle's value; never given twice, never an address. 0: none

struct Op;

// A captured graph, fixed when its capture ends. Nodes come after those that they depend on.
struct Node {
  std::shared_ptr<const Op> op;
  std::vector<std::size_t> after;
};
using Nodes = std::vector<Node>;

enum class OpKind : std::uint8_t { kToDevice, kToHost, kCopy, kFill, kKernel, kBody, kGraph, kRecord, kWait, kUpload };

// What one piece of work does, with everything that was fixed at the call.
struct Op {
  OpKind kind = OpKind::kWait;
  std::uint64_t target = 0, source = 0, bytes = 0;  // copies and fills: device addresses, or host ones where the kind says so
  bool pinned = false;                              // the host side of a copy was pinned memory at the call
  std::vector<std::byte> held;                      // the pageable source, or the kernel's arguments, as they were at the call
  unsigned char value = 0;                          // kFill
  const SimKernel* kernel = nullptr;
  SimLaunch launch;
  Id library = 0;  // of the kernel
  std::string name;                                 // kKernel, kBody
  std::vector<SimRange> touches;                    // kBody
  std::function<void()> body;                       // kBody
  std::shared_ptr<const Nodes> nodes;               // kGraph
  Id event = 0;                                     // kRecord
  std::string_view log_name() const;
  std::string to_string() const;  // "kernel pw_x", "copy to device of 64 B to 0x..."
};

struct Work {
  std::shared_ptr<const Op> op;
  int device = 0;
  std::uint32_t stream = 0;   // its number
  std::vector<Serial> after;  // may have been done since
};

struct Context {
  std::uint32_t number = 0;
  int device = 0;
};

struct Stream {
  std::uint32_t number = 0;
  Id context = 0;
  int device = 0;
  Serial last = 0;          // work that was pushed last
  std::uint32_t polls = 0;  // that said CUDA_ERROR_NOT_READY since the last that did not
  Id capture = 0;
  std::vector<std::size_t> frontier{};  // nodes of the capture that the next one comes after
};

struct Event {
  std::uint32_t number = 0;
  Id context = 0;
  unsigned flags = 0;
  bool recorded = false;  // ever, outside of captures
  Serial work = 0;        // of its last record
  std::uint64_t time_ns = 0;
  std::uint32_t polls = 0;
  Id capture = 0;  // that it was last recorded in
  std::vector<std::size_t> frontier{};
};

struct Capture {
  std::uint32_t number = 0;
  Id origin = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::uint32_t thread = 0;
  bool invalid = false;
  Nodes nodes;
};

struct Graph {
  std::uint32_t number = 0;
  std::shared_ptr<const Nodes> nodes;
};

struct Exec {
  std::uint32_t number = 0;
  Id context = 0;
  std::shared_ptr<const Nodes> nodes;
  Serial last = 0;  // launch or upload: the next comes after it
};

struct Library {
  std::uint32_t number = 0;
};

struct Kernel {
  std::uint32_t number = 0;
  Id library = 0;
  std::string_view name;
  const SimKernel* kernel = nullptr;
};

struct Thread {
  std::vector<Id> contexts;  // the current one is the last
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

struct Device {
  CUresult lost = CUDA_SUCCESS;
  Id context = 0;  // the primary one, while it is retained
  std::uint32_t retains = 0;
  std::uint64_t used = 0;  // bytes
  Stream default_stream{};
};

// Handles of one kind.
template <typename Object>
struct Table {
  explicit Table(std::string_view what_, std::string_view maker_) : what(what_), maker(maker_) {}
  std::string_view what;   // "stream"
  std::string_view maker;  // "cuStreamCreate", which leftovers are named after
  std::map<Id, Object> live;
  std::uint32_t made = 0;
};

// What a function needs before it starts. Sections "Error handling" and "Context Management" of the manual.
struct Needs {
  bool initialised = true;
  bool context = true;    // one is current, and not released
  bool device = true;     // fails when the current context's device is lost
  bool safe = true;       // false: "potentially unsafe" in the sense of cuThreadExchangeStreamCaptureMode
  bool destroys = false;  // acts although it gives an error (SimCuda::fail_call)
  bool waits = false;     // gives errors of the work that it waited for
};

struct Fault {
  std::string function;
  std::uint32_t calls_left = 0;
  CUresult code = CUDA_SUCCESS;
  bool skip = false;
};

class Sim {
 public:
  explicit Sim(SimCudaOptions options);

  std::mutex mutex;
  SimCudaOptions options;
  bool initialised = false;
  std::mt19937_64 random;
  std::vector<Device> devices;
  std::map<std::uint32_t, Thread> threads;
  DeviceMemory memory;
  PinnedMemory pinned;
  std::uint64_t pinned_used = 0;

  Table<Context> contexts{"context", "cuDevicePrimaryCtxRetain"};
  Table<Stream> streams{"stream", "cuStreamCreate"};
  Table<Event> events{"event", "cuEventCreate"};
  Table<Graph> graphs{"graph", "cuStreamEndCapture"};
  Table<Exec> execs{"executable graph", "cuGraphInstantiate"};
  Table<Library> libraries{"library", "cuLibraryLoadData"};
  Table<Kernel> kernels{"kernel", "cuLibraryGetKernel"};
  std::map<Id, Capture> captures;
  std::uint32_t captures_made = 0;

  std::map<Serial, Work> pending;
  Serial serial = 0;
  std::uint64_t clock_ns = 0;
  SimCuda::Counters counters;
  std::string_view function;  // the call that runs now
  bool ending = false;        // work runs to be checked; pageable memory may be gone

  std::vector<std::string> failures;
  std::deque<SimEntry> log;
  std::map<std::string, std::uint64_t, std::less<>> calls;
  std::vector<Fault> faults;

  // ---- sim_cuda_call.cpp
  void fail(const std::string& text);  // "<function>: <text>"
  CUresult forbid(CUresult code, const std::string& text);  // fail(), and the code to return
  void note(const SimEntry& entry);
  Thread& thread();
  static std::uint32_t thread_number();
  const Context* current_context();  // nullptr: none
  Id current_id();
  CUresult conflict_with_capture();
  const Fault* next_fault(std::string_view name);

  template <typename Object>
  Id give(Table<Object>& table, Object object) {
    object.number = ++table.made;
    const Id id = new_id(table.what, object.number);
    table.live.emplace(id, std::move(object));
    return id;
  }
  template <typename Object>
  Object* look_up(Table<Object>& table, const void* handle) {
    const auto found = table.live.find(address_of(handle));
    if (found != table.live.end()) return &found->second;
    unknown_handle(table.what, address_of(handle));
    return nullptr;
  }
  // One that may be used with the current context, or nullptr with `code` set. Streams: also the default stream is refused.
  Stream* stream_of(CUstream handle, CUresult& code);

  // ---- sim_cuda_work.cpp
  CUresult push(Stream& stream, Op op, std::vector<Serial> after = {});  // into the capture where there is one
  void run_up_to(Serial target);
  void run_everything();
  void run_some();  // SimOrder::kRandom
  bool is_pending(Serial work) const { return pending.contains(work); }
  // Of pending work, the names of up to three pieces that use [begin, begin + bytes); empty when none does.
  std::string pending_users(std::uint64_t begin, std::uint64_t bytes) const;
  std::string pending_kernels_of(Id library) const;
  std::string pending_on(int device) const;  // but for records and waits, which touch nothing
  void lose(int device, CUresult code, const std::string& text);
  CUresult lost_of(int device) const { return devices[static_cast<std::size_t>(device)].lost; }
  bool check(std::uint64_t begin, std::uint64_t bytes, int device);  // of work that runs: false has lost the device

  int running_device = -1;  // of the op that runs now; -1: none
  std::string running;      // its name
  std::set<std::string> body_names;

  // ---- sim_cuda_capture.cpp
  void invalidate(Id capture);
  void end_capture(Id capture);
  CUresult refuse_capturing(const Stream& stream, std::string_view doing);
  CUresult add_node(Stream& stream, Op op);
  CUresult wait_for_captured(Stream& stream, const Event& event);

  void leftovers();

 private:
  Id new_id(std::string_view what, std::uint32_t number);
  void unknown_handle(std::string_view what, Id handle);
  // of_streams: of each thing, for SimOrder::kGreedy; empty where they have none
  std::vector<std::size_t> order_of(const std::vector<std::vector<std::size_t>>& after, const std::vector<std::uint32_t>& of_streams = {});
  void run(Serial serial);
  void perform(const Op& op, int device, std::uint32_t stream);
  void perform_copy(const Op& op, int device);
  void perform_kernel(const Op& op, int device);
  bool check_host(const Op& op, std::uint64_t begin);

  std::map<Id, std::string> names_;  // "stream 3", of every handle that was given
};

// The simulation that lives, or nullptr. Set and cleared by SimCuda.
Sim* current_sim() noexcept;
void set_current_sim(Sim* sim) noexcept;

// ---- one call of the driver

// Steps before the body; CUDA_SUCCESS lets it run. `acts`: whether the body runs although there is an error.
CUresult enter(Sim& sim, const Needs& needs, SimEntry& entry, bool& acts, bool& skips);
CUresult leave(Sim& sim, const Needs& needs, SimEntry& entry, CUresult result);

// body: CUresult(Sim&, SimEntry&)
template <typename Body>
CUresult call(std::string_view function, const Needs& needs, const Body& body) {
  Sim* sim = current_sim();
  if (sim == nullptr) return CUDA_ERROR_DEINITIALIZED;
  const std::scoped_lock lock(sim->mutex);
  SimEntry entry;
  entry.function = function;
  entry.thread = Sim::thread_number();
  sim->function = function;
  bool acts = true;
  bool skips = false;
  CUresult result = enter(*sim, needs, entry, acts, skips);
  if (acts && !skips) {
    const CUresult own = body(*sim, entry);
    if (result == CUDA_SUCCESS) result = own;
  }
  return leave(*sim, needs, entry, result);
}

// Members of cuda::Driver, one file a kind.
void fill_device_functions(cuda::Driver& driver);
void fill_memory_functions(cuda::Driver& driver);
void fill_copy_functions(cuda::Driver& driver);
void fill_stream_functions(cuda::Driver& driver);
void fill_event_functions(cuda::Driver& driver);
void fill_capture_functions(cuda::Driver& driver);
void fill_graph_functions(cuda::Driver& driver);
void fill_kernel_functions(cuda::Driver& driver);

}  // namespace paramwire::testing::sim
