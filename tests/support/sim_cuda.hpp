// A simulated CUDA device behind cuda::Driver, held to the rules of the CUDA Driver API manual and as unkind as they allow. For tests only.
//
// What it does that a GPU does rarely or never:
//   * Work runs as late as the rules allow (SimOrder::kLate): only when somebody waits or polls, then only what is waited for depends on (stream
//     order, cuStreamWaitEvent), and of that the newest first. A missing event wait is a wrong result at the first run, not once a week.
//   * The host can't touch device memory: its pages have no access but while device work runs. Fresh and freed memory is poison (kSimPoison),
//     addresses are never given twice, guards around each allocation are checked after each kernel. Built with AddressSanitizer, everything outside of
//     live allocations is also poisoned for it, so that the host-compiled bodies of kernels are held to each byte.
//   * Every call that the manual forbids, handle that is gone, context that is missing, leak, double free and use after free is a *failure*: a line of
//     text that begins with the name of the function (or of the work that ran), whatever the call returned. Failures that nobody took fail the
//     test when the simulation ends.
//
// Stricter than the manual on purpose: the default stream, streams that wait for it, and a stream used while another context than its own is
// current are failures; so is freeing memory that work uses that nobody has waited for (cuMemFree only "may" wait).
//
// Not simulated: time, bandwidth, two works at once (each runs whole, one after the other, with the simulation's lock held, in the thread that
// waits), external event nodes, graph updates, managed memory, peers. Where the processor has no protection keys, another thread's stray read of
// device memory goes unseen while device work runs.
//
// Sources: CUDA Driver API manual 13.0, sections "API synchronization behavior", "Stream Management", "Event Management", "Graph Management",
// "Memory Management", "Execution Control"; CUDA Programming Guide 13.0, "CUDA Graphs", "Creating a Graph Using Stream Capture".
//
// threads: any. One simulation at a time in a process: cuda::Driver holds plain functions, which act on the one that lives.
#pragma once

#include "paramwire/cuda/driver.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire::testing {

inline constexpr std::byte kSimPoison{0xCB};  // 0xCBCBCBCB is -26711958 as a float: neither 0 nor NaN, so that it is seen in results

enum class SimOrder : std::uint8_t {
  kLate,    // what is waited for, when it is waited for, newest first
  kEager,   // at once, in the call
  kGreedy,  // as kLate, but one stream runs as far as it gets before another does: the first made first (seed odd), or the last (even)
  kRandom,  // by seed: some ready work at each call, waits in any allowed order
};

struct SimRange {
  CUdeviceptr begin = 0;
  std::uint64_t bytes = 0;
};

struct SimLaunch {
  std::uint32_t grid[3] = {1, 1, 1};
  std::uint32_t block[3] = {1, 1, 1};
  std::uint32_t shared_bytes = 0;
  std::string_view kernel;
};

// Runs a launch on device memory: device pointers are usable here. `arguments`: the kernel's one parameter, as it was at cuLaunchKernel.
// returns: "", or what is wrong, as LaneExecutor::run: a failure, and the device is lost to CUDA_ERROR_LAUNCH_FAILED.
// Calls nothing of the driver and of the simulation but SimCuda::access. Threads that help it must be started by it: older ones have no access.
using SimKernelBody = std::function<std::string(const SimLaunch& launch, const void* arguments)>;

struct SimKernel {
  std::size_t argument_bytes = 0;
  SimKernelBody body;
  std::uint32_t threads_max = 1024;            // of a block: __launch_bounds__
  std::uint32_t shared_bytes_max = 48 * 1024;  // dynamic shared memory without CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
};

struct SimCudaOptions {
  int devices = 1;                           // 0: cuInit says CUDA_ERROR_NO_DEVICE
  std::uint64_t device_bytes = 256U << 20;   // of each device; more is CUDA_ERROR_OUT_OF_MEMORY
  std::uint64_t pinned_bytes = 64U << 20;    // of all cuMemHostAlloc
  SimOrder order = SimOrder::kLate;
  std::uint64_t seed = 1;                    // SimOrder::kRandom and kGreedy
  // A caller's work on the default stream, which a framework may name, is then as on a stream of its own (numbered 0): with streams that do not block it is
  // ordered by events alone. Otherwise any use of it is a failure.
  bool default_stream = false;
  std::uint32_t polls_not_ready = 2;         // how often a query says CUDA_ERROR_NOT_READY before it runs what it asks for
  int driver_version = 13000;
  int capability_major = 9, capability_minor = 0;
  std::map<CUdevice_attribute, int> attributes{};  // over those of sim_cuda_device.cpp
  std::map<std::string, SimKernel, std::less<>> kernels{};  // what cuLibraryGetKernel finds in any library
};

// One call of the driver, or one piece of work that ran.
struct SimEntry {
  std::string_view function;   // "cuLaunchKernel"; of work: "run"
  CUresult result = CUDA_SUCCESS;
  std::uint32_t thread = 0;    // of the process, from 1
  std::string_view name;       // of the kernel or body; of other work "copy to device", "copy to host", "copy", "fill", "graph", "record", "wait", "upload"
  std::uint32_t stream = 0;    // numbers count from 1 in the order of creation; 0: none
  std::uint32_t event = 0;
  std::uint64_t address = 0;   // device or pinned
  std::uint64_t bytes = 0;
  std::string to_string() const;  // "1 cuMemcpyHtoDAsync stream 2 0x7f... 64 B: CUDA_SUCCESS"
};

namespace sim {
class Sim;
}

class SimCuda {
 public:
  explicit SimCuda(SimCudaOptions options);
  // As finish(), with each failure that was not taken one of the running test.
  ~SimCuda();
  SimCuda(const SimCuda&) = delete;
  SimCuda& operator=(const SimCuda&) = delete;

  // May outlive the simulation: calls then give CUDA_ERROR_DEINITIALIZED.
  std::shared_ptr<const cuda::Driver> driver() const;

  // ---- faults

  // The nth call of `function` from now on (1: the next) gives `code`, once. It has no effect but where `function` frees, destroys, releases or
  // unloads: those act all the same, as the manual's "may also return error codes from previous, asynchronous launches" has it.
  void fail_call(std::string_view function, std::uint32_t nth, CUresult code);
  // The nth call of `function` from now on gives CUDA_SUCCESS and does nothing: a mutation of the program, for functions without outputs.
  void skip_call(std::string_view function, std::uint32_t nth);
  // From now on every call that needs the device gives `code`, and no work runs any more. Frees and destroys still act.
  void lose_device(CUresult code = CUDA_ERROR_ECC_UNCORRECTABLE, int device = 0);

  // ---- verdict

  std::vector<std::string> take_failures();
  // Ends the simulation: runs what is left of the work, then makes a failure of each allocation, stream, event, graph, executable graph, library, context
  // retain and current context that is left. Gives all failures that were not taken. Later calls of the driver give CUDA_ERROR_DEINITIALIZED.
  std::vector<std::string> finish();

  // ---- looking

  std::uint64_t calls(std::string_view function) const;  // how many so far, whatever they returned
  // The newest kLogEntries entries, oldest first.
  std::vector<SimEntry> log() const;
  void clear_log();
  static constexpr std::size_t kLogEntries = 1U << 18;  // 30 MB; older ones go, since a test looks at what it just did
  // Names of the work that ran, in order, of the log.
  std::vector<std::string> ran() const;
  struct Counters {
    std::uint64_t device_bytes = 0, device_bytes_peak = 0, allocations = 0, pinned_bytes = 0, pinned_bytes_peak = 0;
    std::uint64_t streams = 0, events = 0, graphs = 0, execs = 0, libraries = 0;  // that live
    std::uint64_t pending = 0, ran = 0;                                           // pieces of work, a graph launch is one
    std::uint64_t kernels = 0, copied_to_device = 0, copied_to_host = 0;          // that ran, in and out of graphs; bytes
  };
  Counters counters() const;
  // Bytes of device memory as work has left them; runs nothing. Failure and empty when they are not in one live allocation.
  std::vector<std::byte> peek(CUdeviceptr begin, std::uint64_t bytes) const;
  // Whether device memory is opened for the thread alone that runs work, by protection keys.
  bool protects_per_thread() const;
  // Runs all work that is pending, as if the device had been fast.
  void run_all();

  // ---- for other simulated libraries and for kernels

  // `body` as one piece of the stream's work, named in log and failures; legal under capture (it is replayed), with `touches` checked before it runs.
  CUresult enqueue(CUstream stream, std::string name, std::vector<SimRange> touches, std::function<void()> body);
  // A failure of such a library: "cublasLtMatmul: ...". Not in a body.
  void fail(const std::string& text);
  // Whether a kernel may touch these bytes; if not, it is a failure and the device is lost to CUDA_ERROR_ILLEGAL_ADDRESS, and the kernel
  // should return. In a body only.
  bool access(CUdeviceptr begin, std::uint64_t bytes) const;

 private:
  std::unique_ptr<sim::Sim> sim_;
};

}  // namespace paramwire::testing
