// Sections "Stream Management" (without capture) and "Event Management".
#include "support/sim_cuda_state.hpp"

namespace paramwire::testing::sim {

namespace {

constexpr Needs kWaits{.safe = false, .waits = true};
constexpr Needs kDestroys{.destroys = true};

CUresult sim_cuStreamCreate(CUstream* out, unsigned flags) {
  return call("cuStreamCreate", {}, [&](Sim& sim, SimEntry& entry) {
    if ((flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "flags that do not exist");
    if (flags != CU_STREAM_NON_BLOCKING) sim.fail("without CU_STREAM_NON_BLOCKING: the stream would wait for whatever uses the default stream");
    const Id id = sim.give(sim.streams, Stream{.context = sim.current_id(), .device = sim.current_context()->device});
    entry.stream = sim.streams.made;
    *out = static_cast<CUstream>(pointer_to(id));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuStreamDestroy(CUstream handle) {
  return call("cuStreamDestroy", kDestroys, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    if (stream->number == 0) return sim.forbid(CUDA_ERROR_INVALID_HANDLE, "the default stream can't be destroyed");
    if (stream->capture != 0) code = sim.refuse_capturing(*stream, "destroying");
    // Its pending work stays: "released automatically once the device has completed all work".
    sim.streams.live.erase(address_of(handle));
    return code;
  });
}

CUresult sim_cuStreamSynchronize(CUstream handle) {
  return call("cuStreamSynchronize", kWaits, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    if (stream->capture != 0) return sim.refuse_capturing(*stream, "waiting for");
    sim.run_up_to(stream->last);
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuStreamQuery(CUstream handle) {
  return call("cuStreamQuery", kWaits, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    if (stream->capture != 0) return sim.refuse_capturing(*stream, "querying");
    if (sim.is_pending(stream->last) && stream->polls++ < sim.options.polls_not_ready) return CUDA_ERROR_NOT_READY;
    stream->polls = 0;
    sim.run_up_to(stream->last);
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned flags) {
  return call("cuStreamWaitEvent", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(stream_handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    const Event* event = sim.look_up(sim.events, event_handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.event = event->number;
    if (flags != CU_EVENT_WAIT_DEFAULT) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "flags: the simulation has no external event nodes");
    if (event->capture != 0) return sim.wait_for_captured(*stream, *event);
    if (stream->capture != 0) {
      sim.invalidate(stream->capture);
      return sim.forbid(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                        cat("stream ", stream->number, " is being captured, and event ", event->number, " was not recorded in that capture"));
    }
    // As the event is now: a later record does not change what was waited for, one that never was is nothing to wait for.
    if (!sim.is_pending(event->work)) return CUDA_SUCCESS;
    Op op;
    op.kind = OpKind::kWait;
    return sim.push(*stream, std::move(op), {event->work});
  });
}

CUresult sim_cuEventCreate(CUevent* out, unsigned flags) {
  return call("cuEventCreate", {}, [&](Sim& sim, SimEntry& entry) {
    constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if ((flags & ~kKnown) != 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "flags that the simulation does not have");
    const Id id = sim.give(sim.events, Event{.context = sim.current_id(), .flags = flags});
    entry.event = sim.events.made;
    *out = static_cast<CUevent>(pointer_to(id));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuEventDestroy(CUevent handle) {
  return call("cuEventDestroy", kDestroys, [&](Sim& sim, SimEntry& entry) {
    const Event* event = sim.look_up(sim.events, handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.event = event->number;
    sim.events.live.erase(address_of(handle));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuEventRecord(CUevent event_handle, CUstream stream_handle) {
  return call("cuEventRecord", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(stream_handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    Event* event = sim.look_up(sim.events, event_handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.event = event->number;
    if (event->context != stream->context) {
      return sim.forbid(CUDA_ERROR_INVALID_HANDLE, cat("event ", event->number, " and stream ", stream->number, " are of different contexts"));
    }
    if (stream->capture != 0) {
      if (sim.captures.at(stream->capture).invalid) return sim.refuse_capturing(*stream, "recording in");
      event->capture = stream->capture;
      event->frontier = stream->frontier;
      return CUDA_SUCCESS;
    }
    Op op;
    op.kind = OpKind::kRecord;
    op.event = address_of(event_handle);
    code = sim.push(*stream, std::move(op));
    event->recorded = true;
    event->capture = 0;
    event->work = stream->last;
    event->polls = 0;
    return code;
  });
}

// A captured event is not work that runs: the guide's "Prohibited and Unhandled Operations".
CUresult refuse_captured(Sim& sim, const Event& event, std::string_view doing) {
  sim.invalidate(event.capture);
  return sim.forbid(CUDA_ERROR_CAPTURED_EVENT, cat(doing, " event ", event.number, ", which was last recorded in a capture"));
}

CUresult sim_cuEventQuery(CUevent handle) {
  return call("cuEventQuery", kWaits, [&](Sim& sim, SimEntry& entry) {
    Event* event = sim.look_up(sim.events, handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.event = event->number;
    if (event->capture != 0) return refuse_captured(sim, *event, "querying");
    if (sim.is_pending(event->work) && event->polls++ < sim.options.polls_not_ready) return CUDA_ERROR_NOT_READY;
    sim.run_up_to(event->work);
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuEventSynchronize(CUevent handle) {
  return call("cuEventSynchronize", kWaits, [&](Sim& sim, SimEntry& entry) {
    const Event* event = sim.look_up(sim.events, handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.event = event->number;
    if (event->capture != 0) return refuse_captured(sim, *event, "waiting for");
    sim.run_up_to(event->work);
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuEventElapsedTime(float* out, CUevent from_handle, CUevent to_handle) {
  return call("cuEventElapsedTime", {}, [&](Sim& sim, SimEntry&) {
    const Event* from = sim.look_up(sim.events, from_handle);
    const Event* to = sim.look_up(sim.events, to_handle);
    if (from == nullptr || to == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    for (const Event* event : {from, to}) {
      if ((event->flags & CU_EVENT_DISABLE_TIMING) != 0) return sim.forbid(CUDA_ERROR_INVALID_HANDLE, cat("event ", event->number, " keeps no time"));
      if (!event->recorded) return sim.forbid(CUDA_ERROR_INVALID_HANDLE, cat("event ", event->number, " was never recorded"));
    }
    if (sim.is_pending(from->work) || sim.is_pending(to->work)) return CUDA_ERROR_NOT_READY;
    *out = static_cast<float>(static_cast<double>(to->time_ns) - static_cast<double>(from->time_ns)) / 1e6F;
    return CUDA_SUCCESS;
  });
}

}  // namespace

void fill_stream_functions(cuda::Driver& driver) {
  driver.cuStreamCreate = sim_cuStreamCreate;
  driver.cuStreamDestroy = sim_cuStreamDestroy;
  driver.cuStreamSynchronize = sim_cuStreamSynchronize;
  driver.cuStreamQuery = sim_cuStreamQuery;
  driver.cuStreamWaitEvent = sim_cuStreamWaitEvent;
}

void fill_event_functions(cuda::Driver& driver) {
  driver.cuEventCreate = sim_cuEventCreate;
  driver.cuEventDestroy = sim_cuEventDestroy;
  driver.cuEventRecord = sim_cuEventRecord;
  driver.cuEventQuery = sim_cuEventQuery;
  driver.cuEventSynchronize = sim_cuEventSynchronize;
  driver.cuEventElapsedTime = sim_cuEventElapsedTime;
}

}  // namespace paramwire::testing::sim
