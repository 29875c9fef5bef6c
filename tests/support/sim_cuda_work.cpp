// When work of the simulated device runs, in which order, and what it does.
#include "support/sim_cuda_state.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::testing::sim {

namespace {

constexpr std::uint64_t kWorkNs = 1000;  // of the simulated clock that cuEventElapsedTime reads; any time that is not 0

bool overlaps(std::uint64_t a, std::uint64_t a_bytes, std::uint64_t b, std::uint64_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

// Eight-byte words of a kernel's arguments: pointers among them are told by lying in memory of the simulation.
template <typename Visit>
void each_word(const std::vector<std::byte>& arguments, const Visit& visit) {
  for (std::size_t at = 0; at + sizeof(std::uint64_t) <= arguments.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, arguments.data() + at, sizeof word);
    visit(at, word);
  }
}

bool uses(const Op& op, std::uint64_t begin, std::uint64_t bytes) {
  bool out = false;
  switch (op.kind) {
    case OpKind::kToDevice:
    case OpKind::kToHost:
    case OpKind::kCopy:
    case OpKind::kFill:
      out = overlaps(op.target, op.bytes, begin, bytes) || overlaps(op.source, op.bytes, begin, bytes);
      break;
    case OpKind::kKernel:
      each_word(op.held, [&](std::size_t, std::uint64_t word) { out = out || (word >= begin && word < begin + bytes); });
      break;
    case OpKind::kBody:
      for (const SimRange& range : op.touches) out = out || overlaps(range.begin, range.bytes, begin, bytes);
      break;
    case OpKind::kGraph:
      for (const Node& node : *op.nodes) out = out || uses(*node.op, begin, bytes);
      break;
    case OpKind::kRecord:
    case OpKind::kWait:
    case OpKind::kUpload:
      break;
  }
  return out;
}

bool runs_kernel_of(const Op& op, Id library) {
  if (op.kind == OpKind::kKernel) return op.library == library;
  if (op.kind != OpKind::kGraph) return false;
  return std::any_of(op.nodes->begin(), op.nodes->end(), [&](const Node& node) { return runs_kernel_of(*node.op, library); });
}

// Of a lost device nothing runs any more, so that nothing is in use.
template <typename Matches>
std::string names_of(const Sim& sim, const Matches& matches) {
  constexpr std::size_t kNamesMax = 3;  // more would only make the line long
  std::string out;
  std::size_t count = 0;
  for (const auto& [serial, work] : sim.pending) {
    if (sim.lost_of(work.device) != CUDA_SUCCESS || !matches(work)) continue;
    if (count++ < kNamesMax) out += cat(count == 1 ? "" : ", ", *work.op, " on stream ", work.stream);
  }
  if (count > kNamesMax) out += cat(" and ", count - kNamesMax, " more");
  return out;
}

}  // namespace

std::string_view Op::log_name() const {
  switch (kind) {
    case OpKind::kToDevice: return "copy to device";
    case OpKind::kToHost: return "copy to host";
    case OpKind::kCopy: return "copy";
    case OpKind::kFill: return "fill";
    case OpKind::kKernel: return launch.kernel;
    case OpKind::kBody: return name;
    case OpKind::kGraph: return "graph";
    case OpKind::kRecord: return "record";
    case OpKind::kWait: return "wait";
    case OpKind::kUpload: return "upload";
  }
  return "";
}

std::string Op::to_string() const {
  if (kind == OpKind::kKernel) return cat("kernel ", launch.kernel);
  if (bytes == 0) return std::string(log_name());
  return cat(log_name(), " of ", bytes, " B to ", hex(target));
}

CUresult Sim::push(Stream& stream, Op op, std::vector<Serial> after) {
  if (stream.capture != 0) return add_node(stream, std::move(op));
  if (is_pending(stream.last)) after.push_back(stream.last);
  const Serial mine = ++serial;
  pending.emplace(mine, Work{std::make_shared<const Op>(std::move(op)), stream.device, stream.number, std::move(after)});
  stream.last = mine;
  if (options.order == SimOrder::kEager) run_up_to(mine);
  return CUDA_SUCCESS;
}

// Of things 0 .. n-1, each after others: an order that the option allows.
std::vector<std::size_t> Sim::order_of(const std::vector<std::vector<std::size_t>>& after, const std::vector<std::uint32_t>& of_streams) {
  std::vector<std::size_t> blockers(after.size());
  std::vector<std::vector<std::size_t>> next(after.size());
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < after.size(); ++i) {
    blockers[i] = after[i].size();
    for (const std::size_t before : after[i]) next[before].push_back(i);
    if (blockers[i] == 0) ready.push_back(i);
  }
  std::vector<std::size_t> out;
  while (!ready.empty()) {
    auto pick = ready.begin();
    if (options.order == SimOrder::kLate) pick = std::max_element(ready.begin(), ready.end());
    if (options.order == SimOrder::kEager) pick = std::min_element(ready.begin(), ready.end());
    if (options.order == SimOrder::kGreedy) {
      pick = std::min_element(ready.begin(), ready.end(), [&](std::size_t a, std::size_t b) {
        if (of_streams.empty() || of_streams[a] == of_streams[b]) return a < b;
        return (of_streams[a] < of_streams[b]) == (options.seed % 2 != 0);
      });
    }
    if (options.order == SimOrder::kRandom) pick += static_cast<std::ptrdiff_t>(random() % ready.size());
    const std::size_t chosen = *pick;
    ready.erase(pick);
    out.push_back(chosen);
    for (const std::size_t i : next[chosen]) {
      if (--blockers[i] == 0) ready.push_back(i);
    }
  }
  return out;
}

void Sim::run_up_to(Serial target) {
  std::set<Serial> needed;
  std::vector<Serial> open{target};
  while (!open.empty()) {
    const Serial at = open.back();
    open.pop_back();
    const auto found = pending.find(at);
    if (found == pending.end() || !needed.insert(at).second) continue;
    open.insert(open.end(), found->second.after.begin(), found->second.after.end());
  }
  if (needed.empty()) return;
  const std::vector<Serial> serials(needed.begin(), needed.end());
  std::vector<std::vector<std::size_t>> after(serials.size());
  std::vector<std::uint32_t> of_streams;
  for (std::size_t i = 0; i < serials.size(); ++i) {
    of_streams.push_back(pending.at(serials[i]).stream);
    for (const Serial before : pending.at(serials[i]).after) {
      const auto at = std::lower_bound(serials.begin(), serials.end(), before);
      if (at != serials.end() && *at == before) after[i].push_back(static_cast<std::size_t>(at - serials.begin()));
    }
  }
  const DeviceMemory::Open opened(memory);
  for (const std::size_t i : order_of(after, of_streams)) run(serials[i]);
}

void Sim::run_everything() {
  while (!pending.empty()) run_up_to(pending.rbegin()->first);
}

void Sim::run_some() {
  if (pending.empty() || random() % 2 == 0) return;
  const std::uint64_t count = random() % 3 + 1;
  for (std::uint64_t i = 0; i < count && !pending.empty(); ++i) {
    auto at = pending.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random() % pending.size()));
    run_up_to(at->first);
  }
}

void Sim::run(Serial at) {
  const Work work = std::move(pending.extract(at).mapped());
  ++counters.ran;
  perform(*work.op, work.device, work.stream);
}

void Sim::lose(int device, CUresult code, const std::string& text) {
  const std::string_view caller = function;
  function = running;
  fail(text);
  function = caller;
  CUresult& lost = devices[static_cast<std::size_t>(device)].lost;
  if (lost == CUDA_SUCCESS) lost = code;
}

bool Sim::check(std::uint64_t begin, std::uint64_t bytes, int device) {
  const std::string problem = memory.map().problem(begin, bytes, device);
  if (!problem.empty()) lose(device, CUDA_ERROR_ILLEGAL_ADDRESS, problem);
  return problem.empty();
}

// The host's side of a copy, when it runs: pinned memory may have been freed since; of pageable memory nothing is known.
bool Sim::check_host(const Op& op, std::uint64_t begin) {
  const std::string problem = op.pinned ? pinned.map().problem(begin, op.bytes, 0) : "";
  if (!problem.empty()) lose(running_device, CUDA_ERROR_ILLEGAL_ADDRESS, cat("pinned memory: ", problem));
  return problem.empty();
}

void Sim::perform(const Op& op, int device, std::uint32_t stream) {
  if (lost_of(device) != CUDA_SUCCESS) return;
  clock_ns += kWorkNs;
  running_device = device;
  running = op.to_string();
  SimEntry entry;
  entry.function = "run";
  entry.thread = thread_number();
  entry.stream = stream;
  entry.address = op.target;
  entry.bytes = op.bytes;
  // Names of bodies live as long as their work; the log keeps its own.
  entry.name = op.kind == OpKind::kBody ? std::string_view(*body_names.insert(op.name).first) : op.log_name();
  note(entry);
  switch (op.kind) {
    case OpKind::kToDevice:
    case OpKind::kToHost:
    case OpKind::kCopy:
    case OpKind::kFill:
      perform_copy(op, device);
      break;
    case OpKind::kKernel:
      perform_kernel(op, device);
      break;
    case OpKind::kBody:
      if (std::all_of(op.touches.begin(), op.touches.end(), [&](const SimRange& range) { return check(range.begin, range.bytes, device); })) op.body();
      break;
    case OpKind::kGraph: {
      std::vector<std::vector<std::size_t>> after;
      for (const Node& node : *op.nodes) after.push_back(node.after);
      for (const std::size_t i : order_of(after)) perform(*(*op.nodes)[i].op, device, stream);
      break;
    }
    case OpKind::kRecord:
      if (const auto found = events.live.find(op.event); found != events.live.end()) found->second.time_ns = clock_ns;
      break;
    case OpKind::kWait:
    case OpKind::kUpload:
      break;
  }
  running_device = -1;
}

void Sim::perform_copy(const Op& op, int device) {
  const auto bytes = static_cast<std::size_t>(op.bytes);
  switch (op.kind) {
    case OpKind::kToDevice:
      if (!check(op.target, op.bytes, device) || !check_host(op, op.source)) return;
      if (ending && !op.pinned && op.held.empty()) return;
      std::memcpy(pointer_to(op.target), op.held.empty() ? pointer_to(op.source) : op.held.data(), bytes);
      counters.copied_to_device += op.bytes;
      break;
    case OpKind::kToHost:
      if (!check(op.source, op.bytes, device) || !check_host(op, op.target)) return;
      if (ending && !op.pinned) return;
      std::memcpy(pointer_to(op.target), pointer_to(op.source), bytes);
      counters.copied_to_host += op.bytes;
      break;
    case OpKind::kCopy:
      if (!check(op.source, op.bytes, device) || !check(op.target, op.bytes, device)) return;
      // cuMemcpyDtoD: source and target that overlap are not defined.
      if (overlaps(op.source, op.bytes, op.target, op.bytes)) return lose(device, CUDA_ERROR_ILLEGAL_ADDRESS, "source and target overlap");
      std::memcpy(pointer_to(op.target), pointer_to(op.source), bytes);
      break;
    default:
      if (!check(op.target, op.bytes, device)) return;
      std::memset(pointer_to(op.target), op.value, bytes);
      break;
  }
}

void Sim::perform_kernel(const Op& op, int device) {
  bool right = libraries.live.contains(op.library);
  if (!right) lose(device, CUDA_ERROR_LAUNCH_FAILED, "its library was unloaded");
  each_word(op.held, [&](std::size_t at, std::uint64_t word) {
    if (!right) return;
    std::string problem;
    if (memory.reserved(word)) problem = memory.map().problem(word, 0, device);
    if (const Allocation* host = pinned.map().around(word); host != nullptr) problem = pinned.map().problem(word, 0, device);
    right = problem.empty();
    if (!right) lose(device, CUDA_ERROR_ILLEGAL_ADDRESS, cat("the pointer at byte ", at, " of its arguments: ", problem));
  });
  if (!right) return;
  const std::string wrong = op.kernel->body(op.launch, op.held.data());
  ++counters.kernels;
  if (!wrong.empty()) lose(device, CUDA_ERROR_LAUNCH_FAILED, wrong);
  if (const std::string broken = memory.broken_guard(); !broken.empty()) lose(device, CUDA_ERROR_ILLEGAL_ADDRESS, broken);
}

std::string Sim::pending_users(std::uint64_t begin, std::uint64_t bytes) const {
  return names_of(*this, [&](const Work& work) { return uses(*work.op, begin, bytes); });
}

std::string Sim::pending_kernels_of(Id library) const {
  return names_of(*this, [&](const Work& work) { return runs_kernel_of(*work.op, library); });
}

std::string Sim::pending_on(int device) const {
  return names_of(*this, [&](const Work& work) {
    const OpKind kind = work.op->kind;
    return work.device == device && kind != OpKind::kRecord && kind != OpKind::kWait && kind != OpKind::kUpload;
  });
}

}  // namespace paramwire::testing::sim
