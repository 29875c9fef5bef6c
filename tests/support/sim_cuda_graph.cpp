// Sections "Graph Management", "Library Management" and "Execution Control".
#include "support/sim_cuda_state.hpp"

#include <algorithm>

namespace paramwire::testing::sim {

namespace {

constexpr Needs kNoContext{.context = false};

CUresult sim_cuGraphInstantiate(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  return call("cuGraphInstantiate", {.safe = false}, [&](Sim& sim, SimEntry&) {
    const Graph* graph = sim.look_up(sim.graphs, handle);
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (flags != 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "flags that the simulation does not have");
    *out = static_cast<CUgraphExec>(pointer_to(sim.give(sim.execs, Exec{.context = sim.current_id(), .nodes = graph->nodes})));
    return CUDA_SUCCESS;
  });
}

// Launches and uploads: "ordered behind both any previous work in hStream and any previous launches of hGraphExec".
CUresult push_exec(Sim& sim, SimEntry& entry, CUgraphExec exec_handle, CUstream stream_handle, OpKind kind) {
  CUresult code = CUDA_SUCCESS;
  Stream* stream = sim.stream_of(stream_handle, code);
  if (stream == nullptr) return code;
  entry.stream = stream->number;
  Exec* exec = sim.look_up(sim.execs, exec_handle);
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (exec->context != stream->context) {
    return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("executable graph ", exec->number, " and stream ", stream->number, " are of different contexts"));
  }
  const bool captured = stream->capture != 0;
  if (captured && kind == OpKind::kUpload) return sim.refuse_capturing(*stream, "uploading in");
  Op op;
  op.kind = kind;
  if (kind == OpKind::kGraph) op.nodes = exec->nodes;
  std::vector<Serial> after;
  if (sim.is_pending(exec->last)) after.push_back(exec->last);
  code = sim.push(*stream, std::move(op), std::move(after));
  if (!captured) exec->last = stream->last;
  return code;
}

CUresult sim_cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return call("cuGraphLaunch", {}, [&](Sim& sim, SimEntry& entry) { return push_exec(sim, entry, exec, stream, OpKind::kGraph); });
}

CUresult sim_cuGraphUpload(CUgraphExec exec, CUstream stream) {
  return call("cuGraphUpload", {.safe = false}, [&](Sim& sim, SimEntry& entry) { return push_exec(sim, entry, exec, stream, OpKind::kUpload); });
}

CUresult sim_cuGraphExecDestroy(CUgraphExec handle) {
  return call("cuGraphExecDestroy", {.context = false, .safe = false, .destroys = true}, [&](Sim& sim, SimEntry&) {
    if (sim.look_up(sim.execs, handle) == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // Launches that are pending keep the nodes: "it will not be terminated, but rather freed asynchronously on completion".
    sim.execs.live.erase(address_of(handle));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuGraphDestroy(CUgraph handle) {
  return call("cuGraphDestroy", {.context = false, .destroys = true}, [&](Sim& sim, SimEntry&) {
    if (sim.look_up(sim.graphs, handle) == nullptr) return CUDA_ERROR_INVALID_VALUE;
    sim.graphs.live.erase(address_of(handle));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuLibraryLoadData(CUlibrary* out, const void* code, CUjit_option*, void**, unsigned jit_options, CUlibraryOption*, void**,
                               unsigned library_options) {
  return call("cuLibraryLoadData", {.context = false, .safe = false}, [&](Sim& sim, SimEntry&) {
    if (code == nullptr) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "no code");
    if (jit_options != 0 || library_options != 0) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "options: the simulation has none");
    *out = static_cast<CUlibrary>(pointer_to(sim.give(sim.libraries, Library{})));
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuLibraryUnload(CUlibrary handle) {
  return call("cuLibraryUnload", {.context = false, .safe = false, .destroys = true}, [&](Sim& sim, SimEntry&) {
    const Library* library = sim.look_up(sim.libraries, handle);
    if (library == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Id id = address_of(handle);
    if (const std::string users = sim.pending_kernels_of(id); !users.empty()) sim.fail(cat("its kernels are in work that nobody waited for: ", users));
    std::erase_if(sim.kernels.live, [&](const auto& entry) { return entry.second.library == id; });
    sim.libraries.live.erase(id);
    return CUDA_SUCCESS;
  });
}

CUresult sim_cuLibraryGetKernel(CUkernel* out, CUlibrary handle, const char* name) {
  return call("cuLibraryGetKernel", kNoContext, [&](Sim& sim, SimEntry& entry) {
    if (sim.look_up(sim.libraries, handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const auto found = sim.options.kernels.find(std::string_view(name));
    if (found == sim.options.kernels.end()) return CUDA_ERROR_NOT_FOUND;
    entry.name = found->first;
    for (const auto& [id, kernel] : sim.kernels.live) {
      if (kernel.library != address_of(handle) || kernel.name != found->first) continue;
      *out = static_cast<CUkernel>(pointer_to(id));
      return CUDA_SUCCESS;
    }
    const Id id = sim.give(sim.kernels, Kernel{.library = address_of(handle), .name = found->first, .kernel = &found->second});
    *out = static_cast<CUkernel>(pointer_to(id));
    return CUDA_SUCCESS;
  });
}

// Loads the kernel into the current context; the handle it gives is as good as the kernel's own, which cuLaunchKernel takes too.
CUresult sim_cuKernelGetFunction(CUfunction* out, CUkernel handle) {
  return call("cuKernelGetFunction", {}, [&](Sim& sim, SimEntry& entry) {
    const Kernel* kernel = sim.look_up(sim.kernels, handle);
    if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.name = kernel->name;
    *out = reinterpret_cast<CUfunction>(handle);
    return CUDA_SUCCESS;
  });
}

// Programming guide, "Compute Capabilities", table "Technical Specifications per Compute Capability": the same from 5.0 on.
CUresult check_launch(Sim& sim, const SimLaunch& launch, const SimKernel& kernel) {
  constexpr std::uint64_t kGridMax[3] = {0x7FFFFFFF, 65535, 65535};
  constexpr std::uint64_t kBlockMax[3] = {1024, 1024, 64};
  std::uint64_t threads = 1;
  for (std::size_t i = 0; i < 3; ++i) {
    if (launch.grid[i] == 0 || launch.grid[i] > kGridMax[i]) {
      return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("kernel ", launch.kernel, ": ", launch.grid[i], " blocks along axis ", i, ", 1 to ", kGridMax[i], " is allowed"));
    }
    if (launch.block[i] == 0 || launch.block[i] > kBlockMax[i]) {
      return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("kernel ", launch.kernel, ": ", launch.block[i], " threads along axis ", i, ", 1 to ", kBlockMax[i], " is allowed"));
    }
    threads *= launch.block[i];
  }
  if (threads > 1024) return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("kernel ", launch.kernel, ": blocks of ", threads, " threads, 1024 is the most"));
  if (threads > kernel.threads_max) {
    return sim.forbid(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                      cat("kernel ", launch.kernel, ": blocks of ", threads, " threads, it was compiled for ", kernel.threads_max));
  }
  if (launch.shared_bytes > kernel.shared_bytes_max) {
    return sim.forbid(CUDA_ERROR_INVALID_VALUE,
                      cat("kernel ", launch.kernel, ": ", launch.shared_bytes, " B of shared memory, ", kernel.shared_bytes_max, " is allowed"));
  }
  return CUDA_SUCCESS;
}

CUresult sim_cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                            unsigned shared_bytes, CUstream handle, void** parameters, void** extra) {
  return call("cuLaunchKernel", {}, [&](Sim& sim, SimEntry& entry) {
    CUresult code = CUDA_SUCCESS;
    Stream* stream = sim.stream_of(handle, code);
    if (stream == nullptr) return code;
    entry.stream = stream->number;
    const Kernel* kernel = sim.look_up(sim.kernels, function);
    if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    entry.name = kernel->name;
    const std::size_t argument_bytes = kernel->kernel->argument_bytes;
    if (extra != nullptr) return sim.forbid(CUDA_ERROR_INVALID_VALUE, "`extra`: the simulation takes kernelParams");
    if (argument_bytes > 0 && (parameters == nullptr || parameters[0] == nullptr)) {
      return sim.forbid(CUDA_ERROR_INVALID_VALUE, cat("kernel ", kernel->name, ": no arguments"));
    }
    Op op;
    op.kind = OpKind::kKernel;
    op.launch = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, kernel->name};
    op.kernel = kernel->kernel;
    op.library = kernel->library;
    code = check_launch(sim, op.launch, *op.kernel);
    if (code != CUDA_SUCCESS) return code;
    if (argument_bytes > 0) {
      const auto* begin = static_cast<const std::byte*>(parameters[0]);
      op.held.assign(begin, begin + argument_bytes);
    }
    return sim.push(*stream, std::move(op));
  });
}

}  // namespace

void fill_graph_functions(cuda::Driver& driver) {
  driver.cuGraphInstantiate = sim_cuGraphInstantiate;
  driver.cuGraphLaunch = sim_cuGraphLaunch;
  driver.cuGraphUpload = sim_cuGraphUpload;
  driver.cuGraphExecDestroy = sim_cuGraphExecDestroy;
  driver.cuGraphDestroy = sim_cuGraphDestroy;
}

void fill_kernel_functions(cuda::Driver& driver) {
  driver.cuLibraryLoadData = sim_cuLibraryLoadData;
  driver.cuLibraryUnload = sim_cuLibraryUnload;
  driver.cuLibraryGetKernel = sim_cuLibraryGetKernel;
  driver.cuKernelGetFunction = sim_cuKernelGetFunction;
  driver.cuLaunchKernel = sim_cuLaunchKernel;
}

}  // namespace paramwire::testing::sim
