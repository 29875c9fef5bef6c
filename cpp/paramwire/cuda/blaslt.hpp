// Matrix products by cuBLASLt, opened at run time.
//
// The few declarations that are needed stand here, so that a build needs no header of a library of 500 MB; their values are those of the cuBLAS
// manual, and `make gpu-check` compares them with <cublasLt.h> where one is installed.
//
// threads: a BlasLt by one thread at a time; different ones in different threads.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"
#include "paramwire/cuda/device.hpp"

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

namespace paramwire::cuda {

namespace lt {

using Status = int;  // cublasStatus_t: 0 is success
using Handle = void*;
using Object = void*;  // descriptor, layout or preference
struct Algorithm {     // cublasLtMatmulAlgo_t
  std::uint64_t data[8];
};
struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
inline constexpr int kF32 = 0, kF16 = 2, kBF16 = 14;                  // cudaDataType
inline constexpr int kCompute32F = 68;                                // cublasComputeType_t
inline constexpr int kDescTransA = 3;                                 // cublasLtMatmulDescAttributes_t
inline constexpr int kTranspose = 1;                                  // cublasOperation_t
inline constexpr int kPreferWorkspaceBytes = 1;                       // cublasLtMatmulPreferenceAttributes_t
inline constexpr int kPreferAlignmentA = 5, kPreferAlignmentB = 6, kPreferAlignmentC = 7, kPreferAlignmentD = 8;

}  // namespace lt

// The functions of libcublasLt that are called, with the arguments of the manual.
struct BlasLtApi {
  std::size_t (*cublasLtGetVersion)() = nullptr;
  lt::Status (*cublasLtCreate)(lt::Handle*) = nullptr;
  lt::Status (*cublasLtDestroy)(lt::Handle) = nullptr;
  lt::Status (*cublasLtMatmulDescCreate)(lt::Object*, int compute_type, int scale_type) = nullptr;
  lt::Status (*cublasLtMatmulDescDestroy)(lt::Object) = nullptr;
  lt::Status (*cublasLtMatmulDescSetAttribute)(lt::Object, int attribute, const void* value, std::size_t size) = nullptr;
  lt::Status (*cublasLtMatrixLayoutCreate)(lt::Object*, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t leading) = nullptr;
  lt::Status (*cublasLtMatrixLayoutDestroy)(lt::Object) = nullptr;
  lt::Status (*cublasLtMatmulPreferenceCreate)(lt::Object*) = nullptr;
  lt::Status (*cublasLtMatmulPreferenceDestroy)(lt::Object) = nullptr;
  lt::Status (*cublasLtMatmulPreferenceSetAttribute)(lt::Object, int attribute, const void* value, std::size_t size) = nullptr;
  lt::Status (*cublasLtMatmulAlgoGetHeuristic)(lt::Handle, lt::Object operation, lt::Object a, lt::Object b, lt::Object c, lt::Object d, lt::Object preference,
                                               int wanted, lt::Heuristic* results, int* found) = nullptr;
  lt::Status (*cublasLtMatmul)(lt::Handle, lt::Object operation, const void* alpha, const void* a, lt::Object a_layout, const void* b, lt::Object b_layout,
                               const void* beta, const void* c, lt::Object c_layout, void* d, lt::Object d_layout, const lt::Algorithm* algorithm,
                               void* workspace, std::size_t workspace_bytes, CUstream stream) = nullptr;
};

// errors: kUnavailable with the loader's words and what to install. Cached; any thread.
Result<std::shared_ptr<const BlasLtApi>> open_blaslt(const char* library = "libcublasLt.so.13");

// y[t][r] (+)= sum over c of weight[r][c] * x[t][c], float32 accumulation; all pointers are device addresses.
struct Product {
  DType dtype = DType::kBF16;  // of weight and x: kBF16, kF16 or kF32
  const void* weight = nullptr;  // [rows, columns], packed
  const void* x = nullptr;       // [tokens, columns], packed
  float* y = nullptr;            // [tokens, y_stride]
  std::uint64_t tokens = 0, rows = 0, columns = 0, y_stride = 0;
  bool accumulate = false;
};

class BlasLt {
 public:
  // Allocates a workspace of 32 MiB, what cuBLAS takes on Hopper. errors: kUnavailable; kBackpressure.
  static Result<std::unique_ptr<BlasLt>> create(DevicePtr device, std::shared_ptr<const BlasLtApi> api);
  ~BlasLt();
  BlasLt(const BlasLt&) = delete;
  BlasLt& operator=(const BlasLt&) = delete;

  // Enqueues it; may be captured. The algorithm for a size is asked for once.
  // errors: kUnavailable: the library has none for these sizes, or refuses, naming them and its status
  Status multiply(const Product& product, const Stream& stream);
  std::string description() const;  // "cuBLASLt 13.0.2"

 private:
  struct Key {
    DType dtype;
    std::uint64_t tokens, rows, columns, y_stride;
    std::uint32_t alignments;  // of weight, x and y: 4 bits each
    auto operator<=>(const Key&) const = default;
  };
  struct Plan {
    lt::Object operation = nullptr, weight = nullptr, x = nullptr, y = nullptr;
    lt::Heuristic chosen{};
  };
  BlasLt(DevicePtr device, std::shared_ptr<const BlasLtApi> api) : device_(std::move(device)), api_(std::move(api)) {}
  Result<const Plan*> plan(const Product& product);
  Status prepare(Plan& plan, const Product& product, const Key& key) const;
  void destroy(Plan& plan) const noexcept;

  const DevicePtr device_;
  const std::shared_ptr<const BlasLtApi> api_;
  lt::Handle handle_ = nullptr;
  DeviceMemory workspace_;
  std::map<Key, Plan> plans_;
};

}  // namespace paramwire::cuda
