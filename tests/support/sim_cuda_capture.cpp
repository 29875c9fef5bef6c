// Stream capture: section "Stream Management" of the manual, and the programming guide's "Creating a Graph Using Stream Capture" ("Cross-stream
// Dependencies and Events", "Prohibited and Unhandled Operations", "Invalidation").
#include "support/sim_cuda_state.hpp"

#include <algorithm>

namespace paramwire::testing::sim {

void Sim::invalidate(Id capture) {
  if (const auto found = captures.find(capture); found != captures.end()) found->second.invalid = true;
}

void Sim::end_capture(Id capture) {
  const auto leave = [&](Stream& stream) {
    if (stream.capture != capture) return;
    stream.capture = 0;
    stream.frontier.clear();
  };
  for (auto& [id, stream] : streams.live) leave(stream);
  for (Device& device : devices) leave(device.default_stream);
  captures.erase(capture);
}

// "further use of any streams which are being captured ... is invalid and will return an error, until stream capture is ended"
CUresult Sim::refuse_capturing(const Stream& stream, std::string_view doing) {
  Capture& capture = captures.at(stream.capture);
  const CUresult code = capture.invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::string_view why = capture.invalid ? ", which is invalid already" : "";
  capture.invalid = true;
  return forbid(code, cat(doing, " stream ", stream.number, " while it is in capture ", capture.number, why));
}

CUresult Sim::add_node(Stream& stream, Op op) {
  Capture& capture = captures.at(stream.capture);
  if (capture.invalid) return refuse_capturing(stream, "use of");
  capture.nodes.push_back({std::make_shared<const Op>(std::move(op)), stream.frontier});
  stream.frontier = {capture.nodes.size() - 1};
  return CUDA_SUCCESS;
}

CUresult Sim::wait_for_captured(Stream& stream, const Event& event) {
  const auto found = captures.find(event.capture);
  if (found == captures.end()) {
    invalidate(stream.capture);
    return forbid(CUDA_ERROR_CAPTURED_EVENT, cat("event ", event.number, " was last recorded in a capture that has ended"));
  }
  if (stream.capture != 0 && stream.capture != event.capture) {
    invalidate(stream.capture);
    invalidate(event.capture);
    return forbid(CUDA_ERROR_STREAM_CAPTURE_MERGE, cat("stream ", stream.number, " and event ", event.number, " are in different captures"));
  }
  if (found->second.invalid) {
    return forbid(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cat("event ", event.number, " is in capture ", found->second.number, ", which is invalid"));
  }
  // A stream that was not in the capture joins it; what it was given before stays outside ("implicit in-stream ordering").
  stream.capture = event.capture;
  for (const std::size_t node : event.frontier) {
    if (std::find(stream.frontier.begin(), stream.frontier.end(), node) == stream.frontier.end()) stream.frontier.push_back(node);
  }
  return CUDA_SUCCESS;
}

namespace {

CUresult sim_cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* out) {
  return call("cuStreamIsCapturing", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    const Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    const auto found = sim.captures.find(stream->capture);
    *out = found == sim.captures.end()   ? CU_STREAM_CAPTURE_STATUS_NONE
           : found->second.invalid       ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  return call("cuStreamBeginCapture", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    if (stream->number == 0) return sim.forbid(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream can't be captured");
    if (stream->capture != 0) return sim.forbid(CUDA_ERROR_ILLEGAL_STATE, cat("stream ", stream->number, " is being captured already"));
    Capture capture;
    capture.number = ++sim.captures_made;
    capture.origin = address_of(handle);
    capture.mode = mode;
    capture.thread = Sim::thread_number();
    // Captures have no handle: their numbers are theirs alone.
    stream->capture = capture.number;
    sim.captures.emplace(capture.number, std::move(capture));
    return CUDA_SUCCESS;
  });
}

// Whether every node is one that the origin's next node would come after.
bool joined(const Nodes& nodes, const std::vector<std::size_t>& frontier) {
  std::vector<bool> before(nodes.size());
  std::vector<std::size_t> open = frontier;
  while (!open.empty()) {
    const std::size_t at = open.back();
    open.pop_back();
    if (before[at]) continue;
    before[at] = true;
    open.insert(open.end(), nodes[at].after.begin(), nodes[at].after.end());
  }
  return std::find(before.begin(), before.end(), false) == before.end();
}

CUresult sim_cuStreamEndCapture(CUstream handle, CUgraph* out) {
  return call("cuStreamEndCapture", {.destroys = true}, [&](Sim& sim, SimEntry& entry) {
    *out = nullptr;
    CUresult code = CUDA_SUCCESS;
    const Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    if (stream->capture == 0) return sim.forbid(CUDA_ERROR_ILLEGAL_STATE, cat("stream ", stream->number, " is not being captured"));
    const Id id = stream->capture;
    Capture& capture = sim.captures.at(id);
    if (capture.origin != address_of(handle)) {
      capture.invalid = true;
      return sim.forbid(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cat("capture ", capture.number, " began in another stream than ", stream->number));
    }
    if (capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture.thread != Sim::thread_number()) {
      return sim.forbid(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cat("capture ", capture.number, " began in another thread"));
    }
    // What made it invalid is a failure already.
    if (capture.invalid) code = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (code == CUDA_SUCCESS && !joined(capture.nodes, stream->frontier)) {
      code = sim.forbid(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cat("a stream that joined capture ", capture.number, " was not waited for"));
    }
    auto nodes = std::make_shared<const Nodes>(std::move(capture.nodes));
    sim.end_capture(id);
    if (code != CUDA_SUCCESS) return code;
    *out = static_cast<CUgraph>(pointer_to(sim.give(sim.graphs, Graph{.nodes = std::move(nodes)})));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return call("cuThreadExchangeStreamCaptureMode", {.context = false, .device = false}, [&](Sim& sim, SimEntry&) {
    if (*mode != CU_STREAM_CAPTURE_MODE_GLOBAL && *mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && *mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
      return sim.forbid(CUDA_ERROR_INVALID_VALUE, "no such mode");
    }
    std::swap(*mode, sim.thread().mode);
    return CUDA_SUCCESS;
  });
}

}  // namespace

void fill_capture_functions(cuda::Driver& driver) {
  driver.cuStreamIsCapturing = sim_cuStreamIsCapturing;
  driver.cuStreamBeginCapture = sim_cuStreamBeginCapture;
  driver.cuStreamEndCapture = sim_cuStreamEndCapture;
  driver.cuThreadExchangeStreamCaptureMode = sim_cuThreadExchangeStreamCaptureMode;
}

}  // namespace paramwire::testing::sim
