// cuBLASLt for the simulated device: matrix products in plain loops, as work of the stream, legal under capture; as much of the library as
// cuda/blaslt.hpp calls.
//
// Held to: handles and objects that live, types and sizes that fit, the workspace that the algorithm asked for, the alignment that the preference
// promised (an algorithm is chosen for that alignment, so a pointer of less is a misaligned access on a GPU). Each break is a failure of the SimCuda. The
// workspace is overwritten by every product, and C is not read when beta is 0 (NaN in it stays away).
//
// Source: cuBLAS 13.0 manual, "Using the cuBLASLt API": cublasLtMatmul(), cublasLtMatmulAlgoGetHeuristic(), cublasLtMatmulPreferenceAttributes_t.
//
// threads: any. One at a time in a process, as SimCuda, which must outlive it.
#pragma once

#include "paramwire/cuda/blaslt.hpp"
#include "support/sim_cuda.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace paramwire::testing {

class SimBlasLt {
 public:
  explicit SimBlasLt(SimCuda& sim);
  // What is left (handles, descriptors, layouts, preferences) is a failure each.
  ~SimBlasLt();
  SimBlasLt(const SimBlasLt&) = delete;
  SimBlasLt& operator=(const SimBlasLt&) = delete;

  std::shared_ptr<const cuda::BlasLtApi> api() const;
  // The nth call of `function` from now on gives `status`, once, without effect.
  void fail_call(std::string_view function, std::uint32_t nth, cuda::lt::Status status);
  std::uint64_t products() const;  // that were enqueued or captured

  // For the functions of the table.
  struct Calls;

 private:
  struct Handle {};
  struct Operation {
    bool transpose_a = false, transpose_b = false;
  };
  struct Layout {
    int type = 0;
    std::uint64_t rows = 0, columns = 0, leading = 0;
  };
  struct Preference {
    std::uint64_t workspace_bytes = 0;
    std::uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C and D; the manual's default
  };
  using Object = std::variant<Handle, Operation, Layout, Preference>;

  cuda::lt::Status refuse(cuda::lt::Status status, const std::string& text);
  void* give(Object object);
  template <typename T>
  T* find(void* object, std::string_view what);
  cuda::lt::Status drop(void* object);
  std::string misfit(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d) const;

  struct Fault {
    std::string function;
    std::uint32_t calls_left = 0;
    cuda::lt::Status status = 0;
  };

  SimCuda& sim_;
  mutable std::mutex mutex_;
  std::string_view function_;
  std::vector<std::pair<bool, Object>> objects_;  // whether it lives; numbers count from 1
  std::vector<Fault> faults_;
  std::uint64_t products_ = 0;
};

}  // namespace paramwire::testing
