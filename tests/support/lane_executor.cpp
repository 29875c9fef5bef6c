#include "support/lane_executor.hpp"

#include "paramwire/base/text.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define PARAMWIRE_FIBERS_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#define PARAMWIRE_FIBERS_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif

// -DPARAMWIRE_FIBERS_UCONTEXT: what other machines have, on this one.
#if defined(__x86_64__) && !defined(PARAMWIRE_FIBERS_UCONTEXT)
#define PARAMWIRE_FIBERS_X86 1
// System V ABI, "Registers": rbx, rbp and r12 to r15 belong to the caller, all others are lost at any call. MXCSR and the x87 control word
// are not switched, no body changes them. It ends by a ret, not by a jump: most fibers wait in the same place, so that the processor's stack
// of return addresses, which knows nothing of fibers, is right for the next one too.
extern "C" void paramwire_lane_switch(void** save, void* to);
asm(R"(
.text
.type paramwire_lane_switch, @function
.globl paramwire_lane_switch
.hidden paramwire_lane_switch
paramwire_lane_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size paramwire_lane_switch, . - paramwire_lane_switch
)");
// The first switch to a fiber pops its six registers and jumps here: the function is in r13, its argument in r12.
extern "C" void paramwire_lane_enter();
asm(R"(
.text
.type paramwire_lane_enter, @function
.globl paramwire_lane_enter
.hidden paramwire_lane_enter
paramwire_lane_enter:
  movq %r12, %rdi
  callq *%r13
  ud2
.size paramwire_lane_enter, . - paramwire_lane_enter
)");
#else
#include <ucontext.h>
#endif

namespace paramwire::testing {

namespace {

#if defined(PARAMWIRE_FIBERS_ASAN) || defined(PARAMWIRE_FIBERS_TSAN)
constexpr std::size_t kStackBytes = 256 * 1024;  // frames of instrumented code are several times as large
#else
constexpr std::size_t kStackBytes = 64 * 1024;  // bodies take hundreds of bytes: they have registers in mind
#endif
constexpr std::size_t kPageBytes = 4096;

// Stacks are whole pages apart, so their tops would share one set of the cache. 9 lines from one to the next spread them over all.
constexpr std::size_t kStackColourBytes = 9 * 64;
constexpr std::size_t kStackColours = 28;

struct Context {
#if defined(PARAMWIRE_FIBERS_X86)
  void* stack_pointer = nullptr;
#else
  ucontext_t context = {};
#endif
#if defined(PARAMWIRE_FIBERS_ASAN)
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  std::size_t stack_bytes = 0;
#endif
#if defined(PARAMWIRE_FIBERS_TSAN)
  void* fiber = nullptr;
#endif
};

struct Warp {
  LaneExecutor::WarpOperation operation = LaneExecutor::WarpOperation::kNone;
  std::uint32_t mask = 0;
  std::uint32_t arrived = 0;   // lanes that are in `operation`
  std::uint32_t finished = 0;  // lanes whose body has ended
  std::uint32_t parity = 0;    // a lane reads what it was given while others are in the next operation already, never in the one after it
  std::array<std::array<std::uint32_t, cuda::kWarp>, 2> values = {};
  std::array<std::uint32_t, cuda::kWarp> waiting = {};  // fibers
};

std::string_view name_of(LaneExecutor::WarpOperation operation) {
  switch (operation) {
    case LaneExecutor::WarpOperation::kXor: return "warp_xor";
    case LaneExecutor::WarpOperation::kSum: return "warp_sum";
    case LaneExecutor::WarpOperation::kMax: return "warp_max";
    case LaneExecutor::WarpOperation::kNone: break;
  }
  return "no warp operation";
}

// The tree of DeviceLane's butterfly: the same bits, since + and max give the same for (a, b) and (b, a).
template <typename Join>
std::uint32_t tree(const std::array<std::uint32_t, cuda::kWarp>& bits, Join join) {
  std::array<float, cuda::kWarp> values;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::bit_cast<float>(bits[i]);
  for (std::size_t mask = cuda::kWarp / 2; mask > 0; mask /= 2) {
    for (std::size_t i = 0; i < mask; ++i) values[i] = join(values[i], values[i + mask]);
  }
  return std::bit_cast<std::uint32_t>(values[0]);
}

}  // namespace

struct LaneExecutor::State {
  enum class Order { kByNumber, kAhead, kAny };

  explicit State(LaneExecutor& executor) : owner(executor) { fibers.reserve(kThreadsMax); }
  ~State() {
    release_fibers();
    if (shared_base != nullptr) {
      unpoison_shared();
      std::free(shared_base);
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  LaneExecutor& owner;
  std::string_view kernel;
  HostKernel body = nullptr;
  const void* args = nullptr;

  std::vector<Context> fibers;  // never reallocated: each is referred to from its own stack
  std::vector<std::byte*> stacks;
  std::vector<std::uint32_t> thread_of;  // which thread a fiber runs
  std::vector<std::uint32_t> free;       // fibers that run no thread
  Context main;
  std::uint32_t current = 0;
  std::uint64_t switched = 0;

  Order order = Order::kByNumber;
  std::uint64_t random = 0;
  std::vector<std::uint32_t> starts;  // threads in the order in which they start
  std::size_t started = 0;
  std::array<std::uint32_t, kThreadsMax> ready;  // fibers; the last is next, but for Order::kAny
  std::size_t ready_count = 0;
  std::uint32_t finished = 0;
  std::array<std::uint32_t, kThreadsMax> at_barrier;  // fibers
  std::uint32_t waiting = 0;                          // of them
  std::vector<Warp> warps;
  std::string fault;

  std::byte* shared_base = nullptr;
  std::size_t shared_capacity = 0;

  // ---- orders

  std::uint64_t next_random() {  // xorshift64: G. Marsaglia, "Xorshift RNGs", 2003
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  }

  std::size_t below(std::size_t bound) { return static_cast<std::size_t>((next_random() >> 16) % bound); }

  void shuffle(std::uint32_t* values, std::size_t count) {
    for (std::size_t i = count; i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

  bool has_ready() const { return ready_count > 0; }
  bool has_unstarted() const { return started < starts.size(); }

  std::uint32_t take_ready() {
    if (order == Order::kAny) std::swap(ready[ready_count - 1], ready[below(ready_count)]);
    return ready[--ready_count];
  }

  // Whether what runs next is a thread that has not begun. By number, and ahead: what has begun goes first.
  bool start_next() {
    if (!has_unstarted()) return false;
    if (!has_ready()) return true;
    return order == Order::kAny && (next_random() >> 20 & 1) != 0;
  }

  // ---- fibers

  void switch_to(Context& from, Context& to) {
    ++switched;
#if defined(PARAMWIRE_FIBERS_TSAN)
    __tsan_switch_to_fiber(to.fiber, 0);
#endif
#if defined(PARAMWIRE_FIBERS_ASAN)
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#if defined(PARAMWIRE_FIBERS_X86)
    paramwire_lane_switch(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
    arrived(from);
  }

  // On the stack of `context`, for the first time or again.
  void arrived([[maybe_unused]] Context& context) {
#if defined(PARAMWIRE_FIBERS_ASAN)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(context.fake_stack, &bottom, &bytes);
    if (main.stack_bottom == nullptr) {  // the first switch of a run comes from main
      main.stack_bottom = bottom;
      main.stack_bytes = bytes;
    }
#endif
  }

  void run_fiber(std::uint32_t self) {
    while (fault.empty()) {
      while (has_unstarted() && fault.empty()) {
        const std::uint32_t thread = starts[started++];
        thread_of[self] = thread;
        const HostLane lane(owner, thread);
        body(lane, args);
        finish(thread);
        if (!start_next()) break;
      }
      free.push_back(self);
      Context& next = fault.empty() && has_ready() ? fibers[current = take_ready()] : main;
      switch_to(fibers[self], next);
    }
    switch_to(fibers[self], main);
  }

  void finish(std::uint32_t thread) {
    ++finished;
    Warp& warp = warps[thread / cuda::kWarp];
    ++warp.finished;
    if (warp.arrived > 0) fail(thread, cat("ended while ", warp.arrived, " lanes of its warp wait in ", name_of(warp.operation)));
  }

  // Another fiber, or the block's end: main finds out why nothing is ready.
  void give_way() {
    const std::uint32_t self = current;
    if (!fault.empty()) {
      switch_to(fibers[self], main);
      return;
    }
    if (start_next()) {
      current = free.back();
      free.pop_back();
    } else if (has_ready()) {
      current = take_ready();
      if (current == self) return;
    } else {
      switch_to(fibers[self], main);
      return;
    }
    switch_to(fibers[self], fibers[current]);
  }

  void make_ready(const std::uint32_t* waited, std::size_t count) {
    for (std::size_t i = count; i > 0; --i) ready[ready_count++] = waited[i - 1];
  }

  // Of a body's doing, these two do not return to it: fibers of a block with a fault are thrown away.
  [[gnu::noinline, gnu::cold]] void fail_sync(std::uint32_t thread, const Warp& warp) {
    fail(thread, cat("is at a barrier while ", warp.arrived, " lanes of its warp wait in ", name_of(warp.operation)));
    give_way();
  }
  [[gnu::noinline, gnu::cold]] void fail_warp(std::uint32_t thread, const Warp& warp, WarpOperation operation, std::uint32_t mask) {
    if (mask >= cuda::kWarp) {
      fail(thread, cat("warp_xor of mask ", mask, ": a warp has 32 lanes"));
    } else if (warp.finished > 0) {
      fail(thread, cat("is in ", name_of(operation), ", but ", warp.finished, " lanes of its warp have ended"));
    } else {
      fail(thread, cat("is in ", name_of(operation), " of mask ", mask, " while lanes of its warp are in ", name_of(warp.operation),
                       " of mask ", warp.mask));
    }
    give_way();
  }

  [[gnu::noinline, gnu::cold]] void fail(std::uint32_t thread, std::string_view what) {
    if (fault.empty()) {
      fault = cat(kernel, ": block (", owner.block_[0], ", ", owner.block_[1], ", ", owner.block_[2], "), thread ", thread, ": ", what);
    }
  }

  void prepare_fiber(std::uint32_t fiber);
  void grow_fibers(std::uint32_t count);
  void release_fibers();
  static void enter(State* state);

  // ---- shared memory

  std::byte* shared_start() const { return shared_base + kGuardBytes; }

  void unpoison_shared() {
#if defined(PARAMWIRE_FIBERS_ASAN)
    __asan_unpoison_memory_region(shared_base, shared_capacity + 2 * kGuardBytes);
#endif
  }

  void prepare_shared(std::size_t size) {
    if (shared_base == nullptr || size > shared_capacity) {
      if (shared_base != nullptr) {
        unpoison_shared();
        std::free(shared_base);
      }
      shared_capacity = (std::max<std::size_t>(size, 4096) + 255) / 256 * 256;
      shared_base = static_cast<std::byte*>(std::aligned_alloc(256, shared_capacity + 2 * kGuardBytes));
      owner.shared_ = shared_start();
    }
    unpoison_shared();
    std::memset(shared_base, 0xc3, kGuardBytes);
    std::memset(shared_start() + size, 0xc3, kGuardBytes);
#if defined(PARAMWIRE_FIBERS_ASAN)
    __asan_poison_memory_region(shared_base, kGuardBytes);
    __asan_poison_memory_region(shared_start() + size, shared_capacity - size + kGuardBytes);
#endif
  }

  void check_shared(std::size_t size) {
#if !defined(PARAMWIRE_FIBERS_ASAN)
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (shared_start()[size + i] != std::byte{0xc3}) {
        fail(0, cat("shared memory was written ", i, " bytes past the launch's ", size, " bytes"));
        return;
      }
      if (shared_base[i] != std::byte{0xc3}) {
        fail(0, cat("shared memory was written ", kGuardBytes - i, " bytes before its start"));
        return;
      }
    }
#else
    static_cast<void>(size);
#endif
  }

  void run_block();
  std::string stuck() const;
};

void LaneExecutor::State::enter(State* state) {
  state->arrived(state->fibers[state->current]);
  state->run_fiber(state->current);
}

void LaneExecutor::State::prepare_fiber(std::uint32_t fiber) {
  Context& context = fibers[fiber];
  std::byte* top = stacks[fiber] + kStackBytes - (fiber % kStackColours) * kStackColourBytes;
#if defined(PARAMWIRE_FIBERS_ASAN)
  __asan_unpoison_memory_region(stacks[fiber], kStackBytes);
  context.fake_stack = nullptr;
  context.stack_bottom = stacks[fiber];
  context.stack_bytes = kStackBytes;
#endif
#if defined(PARAMWIRE_FIBERS_TSAN)
  if (context.fiber != nullptr) __tsan_destroy_fiber(context.fiber);
  context.fiber = __tsan_create_fiber(0);
#endif
#if defined(PARAMWIRE_FIBERS_X86)
  // At paramwire_lane_enter the stack is aligned to 16 bytes; its call then pushes the return address, as the ABI wants it.
  auto* frame = reinterpret_cast<void**>(top) - 9;
  frame[0] = nullptr;                                   // r15
  frame[1] = nullptr;                                   // r14
  frame[2] = reinterpret_cast<void*>(&State::enter);    // r13
  frame[3] = this;                                      // r12
  frame[4] = nullptr;                                   // rbx
  frame[5] = nullptr;                                   // rbp: the end of frames, for backtraces
  frame[6] = reinterpret_cast<void*>(&paramwire_lane_enter);
  context.stack_pointer = frame;
#else
  static_assert(sizeof(void*) == 8);
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stacks[fiber];
  context.context.uc_stack.ss_size = static_cast<std::size_t>(top - stacks[fiber]);
  context.context.uc_link = nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(this);
  using Entry = void (*)();
  const auto entry = [](unsigned high, unsigned low) { enter(reinterpret_cast<State*>(std::uintptr_t{high} << 32 | low)); };
  makecontext(&context.context, reinterpret_cast<Entry>(+entry), 2, static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
#endif
}

void LaneExecutor::State::grow_fibers(std::uint32_t count) {
  while (fibers.size() < count) {
    void* stack = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) {
      fault = cat(kernel, ": no memory for the stack of thread ", fibers.size());
      return;
    }
    ::mprotect(stack, kPageBytes, PROT_NONE);  // where it grows to
    stacks.push_back(static_cast<std::byte*>(stack));
    fibers.emplace_back();
    thread_of.push_back(0);
    const auto fiber = static_cast<std::uint32_t>(fibers.size() - 1);
    prepare_fiber(fiber);
    free.push_back(fiber);
  }
}

void LaneExecutor::State::release_fibers() {
  for (std::size_t fiber = 0; fiber < stacks.size(); ++fiber) {
#if defined(PARAMWIRE_FIBERS_TSAN)
    __tsan_destroy_fiber(fibers[fiber].fiber);
#endif
#if defined(PARAMWIRE_FIBERS_ASAN)
    __asan_unpoison_memory_region(stacks[fiber], kStackBytes);
#endif
    ::munmap(stacks[fiber], kStackBytes);
  }
  stacks.clear();
  fibers.clear();
  thread_of.clear();
  free.clear();
}

std::string LaneExecutor::State::stuck() const {
  for (std::size_t i = 0; i < warps.size(); ++i) {
    const Warp& warp = warps[i];
    if (warp.arrived == 0) continue;
    return cat("reached by ", warp.arrived, " of 32 lanes of warp ", i, ": ", name_of(warp.operation));
  }
  return cat("a barrier was reached by ", waiting, " of ", owner.launch_.threads, " threads, ", finished, " have ended");
}

void LaneExecutor::State::run_block() {
  const std::uint32_t threads = owner.launch_.threads;
  std::memset(shared_start(), 0xff, owner.launch_.shared_bytes);
  started = 0;
  finished = 0;
  ready_count = 0;
  waiting = 0;
  for (Warp& warp : warps) {
    warp.arrived = 0;
    warp.finished = 0;
  }
  if (order != Order::kByNumber) shuffle(starts.data(), starts.size());
  current = free.back();
  free.pop_back();
  switch_to(main, fibers[current]);
  if (fault.empty() && finished != threads) fail(starts[0], stuck());
  if (fault.empty()) check_shared(owner.launch_.shared_bytes);
}

LaneExecutor::LaneExecutor() : state_(std::make_unique<State>(*this)) {}
LaneExecutor::~LaneExecutor() = default;

std::uint64_t LaneExecutor::switches() const { return state_->switched; }

// The two that bodies call all the time: what goes wrong is told elsewhere, so that their frames stay small.
void LaneExecutor::sync(std::uint32_t thread) {
  State& state = *state_;
  const Warp& warp = state.warps[thread / cuda::kWarp];
  if (warp.arrived > 0) [[unlikely]] state.fail_sync(thread, warp);
  state.at_barrier[state.waiting++] = state.current;
  if (state.waiting == launch_.threads) {
    state.waiting = 0;
    // By number, the last goes on and the others follow in the order in which they came.
    const bool by_number = state.order == State::Order::kByNumber;
    state.make_ready(state.at_barrier.data(), launch_.threads - (by_number ? 1 : 0));
    if (by_number) return;
    state.shuffle(state.ready.data(), state.ready_count);
  }
  state.give_way();
}

std::uint32_t LaneExecutor::warp(std::uint32_t thread, WarpOperation operation, std::uint32_t bits, std::uint32_t mask) {
  State& state = *state_;
  Warp& warp = state.warps[thread / cuda::kWarp];
  const std::uint32_t lane = thread % cuda::kWarp;
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.mask = mask;
  }
  if (warp.operation != operation || warp.mask != mask || mask >= cuda::kWarp || warp.finished > 0) [[unlikely]] {
    state.fail_warp(thread, warp, operation, mask);
  }
  auto& values = warp.values[warp.parity];
  values[lane] = bits;
  warp.waiting[warp.arrived++] = state.current;
  if (warp.arrived < cuda::kWarp) {
    state.give_way();
  } else {
    if (operation == WarpOperation::kSum) values.fill(tree(values, [](float a, float b) { return a + b; }));
    if (operation == WarpOperation::kMax) values.fill(tree(values, [](float a, float b) { return std::fmax(a, b); }));
    warp.arrived = 0;
    warp.parity ^= 1;
    state.make_ready(warp.waiting.data(), cuda::kWarp - 1);  // the last goes on
  }
  return values[lane ^ mask];
}

std::string LaneExecutor::run(std::string_view kernel, const cuda::Launch& launch, HostKernel body, const void* args,
                              std::uint64_t seed) {
  State& state = *state_;
  const std::uint64_t blocks = std::uint64_t{launch.blocks[0]} * launch.blocks[1] * launch.blocks[2];
  if (launch.threads == 0 || launch.threads > kThreadsMax || launch.threads % cuda::kWarp != 0) {
    return cat(kernel, ": blocks of ", launch.threads, " threads; they are 32 to ", kThreadsMax, ", by whole warps");
  }
  // CUDA Programming Guide, "Compute Capabilities": a grid is at most 2^31 - 1 by 65535 by 65535 blocks.
  if (blocks == 0 || launch.blocks[0] > 0x7fffffffU || launch.blocks[1] > 65535 || launch.blocks[2] > 65535) {
    return cat(kernel, ": a grid of ", launch.blocks[0], " x ", launch.blocks[1], " x ", launch.blocks[2], " blocks");
  }
  if (launch.shared_bytes > kSharedBytesMax) {
    return cat(kernel, ": ", launch.shared_bytes, " bytes of shared memory; a launch has at most ", kSharedBytesMax);
  }
  launch_ = launch;
  state.kernel = kernel;
  state.body = body;
  state.args = args;
  state.fault.clear();
  state.order = seed == 0 ? State::Order::kByNumber : seed % 2 == 1 ? State::Order::kAhead : State::Order::kAny;
  state.random = seed * 0x9e3779b97f4a7c15U + 1;
  state.starts.resize(launch.threads);
  std::iota(state.starts.begin(), state.starts.end(), 0U);
  state.warps.resize(launch.threads / cuda::kWarp);
  state.grow_fibers(launch.threads);
  state.prepare_shared(launch.shared_bytes);
#if defined(PARAMWIRE_FIBERS_TSAN)
  state.main.fiber = __tsan_get_current_fiber();
#endif
#if defined(PARAMWIRE_FIBERS_ASAN)
  state.main.stack_bottom = nullptr;  // may be another thread than last time
#endif
  // Every other seed runs the blocks backwards: nothing may lean on which comes first.
  for (std::uint64_t i = 0; i < blocks && state.fault.empty(); ++i) {
    const std::uint64_t block = (seed / 2) % 2 == 0 ? i : blocks - 1 - i;
    block_[0] = static_cast<std::uint32_t>(block % launch.blocks[0]);
    block_[1] = static_cast<std::uint32_t>(block / launch.blocks[0] % launch.blocks[1]);
    block_[2] = static_cast<std::uint32_t>(block / launch.blocks[0] / launch.blocks[1]);
    state.run_block();
  }
  if (!state.fault.empty()) state.release_fibers();  // some are in the middle of a body
  return state.fault;
}

}  // namespace paramwire::testing
