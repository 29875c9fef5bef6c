#include "support/sim_cublaslt.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/cuda/kernels/numbers.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstring>

namespace paramwire::testing {

namespace lt = cuda::lt;

namespace {

constexpr lt::Status kSuccess = 0, kNotInitialised = 1, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15;  // cublasStatus_t
constexpr int kDescTransB = 4;                                         // cublasLtMatmulDescAttributes_t, as kDescTransA
constexpr std::uint64_t kAlgorithmTag = 0x73696d2d6d61746dU;           // "sim-matm": an algorithm that this made
// Of the workspace that was offered a product takes this much, so that every program has to give it, and give it whole.
constexpr std::uint64_t kWorkspaceMax = 64 * 1024;
constexpr std::size_t kHandleStep = 0x10;
constexpr std::uint64_t kFirstHandle = (std::uint64_t{1} << 62) + (std::uint64_t{1} << 40);  // as sim_cuda_call.cpp's, and none of those

std::atomic<SimBlasLt*> the_library{nullptr};

std::uint64_t bits(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

struct Matrix {
  const void* begin = nullptr;
  int type = 0;
  std::uint64_t leading = 0;
  bool transposed = false;
  // Element (i, j) of op(matrix), column-major.
  float get(std::uint64_t i, std::uint64_t j) const {
    const std::uint64_t at = transposed ? j + i * leading : i + j * leading;
    if (type == lt::kF32) return static_cast<const float*>(begin)[at];
    return type == lt::kBF16 ? cuda::Bf16::get(begin, at) : cuda::F16::get(begin, at);
  }
};

std::uint64_t element_bytes(int type) { return type == lt::kF32 ? 4 : 2; }

std::uint64_t span_bytes(int type, std::uint64_t rows, std::uint64_t columns, std::uint64_t leading) {
  return rows == 0 || columns == 0 ? 0 : ((columns - 1) * leading + rows) * element_bytes(type);
}

float dot(const float* left, const float* right, std::size_t count) {
  constexpr std::size_t kLanes = 8;  // sums side by side, which the compiler makes vector instructions of
  float sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += left[i + lane] * right[i + lane];
  }
  for (; i < count; ++i) sums[0] += left[i] * right[i];
  float out = 0;
  for (const float sum : sums) out += sum;
  return out;
}

struct Sum {
  Matrix a, b;
  const float* c = nullptr;
  float* d = nullptr;
  std::uint64_t rows = 0, columns = 0, inner = 0, c_leading = 0, d_leading = 0;
  float alpha = 0, beta = 0;
};

void multiply(const Sum& sum) {
  const auto inner = static_cast<std::size_t>(sum.inner);
  std::vector<float> left(inner);
  std::vector<float> right(inner * static_cast<std::size_t>(sum.columns));
  for (std::uint64_t n = 0; n < sum.columns; ++n) {
    for (std::uint64_t k = 0; k < sum.inner; ++k) right[static_cast<std::size_t>(n * sum.inner + k)] = sum.b.get(k, n);
  }
  for (std::uint64_t m = 0; m < sum.rows; ++m) {
    for (std::uint64_t k = 0; k < sum.inner; ++k) left[static_cast<std::size_t>(k)] = sum.a.get(m, k);
    for (std::uint64_t n = 0; n < sum.columns; ++n) {
      const float product = sum.alpha * dot(left.data(), right.data() + static_cast<std::size_t>(n) * inner, inner);
      sum.d[m + n * sum.d_leading] = sum.beta == 0 ? product : product + sum.beta * sum.c[m + n * sum.c_leading];
    }
  }
}

}  // namespace

SimBlasLt::SimBlasLt(SimCuda& sim) : sim_(sim) {
  assert(the_library.load() == nullptr && "one at a time");
  the_library.store(this);
}

SimBlasLt::~SimBlasLt() {
  the_library.store(nullptr);
  static constexpr std::string_view kMakers[] = {"cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate", "cublasLtMatmulPreferenceCreate"};
  for (std::size_t i = 0; i < objects_.size(); ++i) {
    if (objects_[i].first) sim_.fail(cat(kMakers[objects_[i].second.index()], ": object ", i + 1, " is left"));
  }
}

void SimBlasLt::fail_call(std::string_view function, std::uint32_t nth, lt::Status status) {
  const std::scoped_lock lock(mutex_);
  faults_.push_back({std::string(function), nth, status});
}

std::uint64_t SimBlasLt::products() const {
  const std::scoped_lock lock(mutex_);
  return products_;
}

lt::Status SimBlasLt::refuse(lt::Status status, const std::string& text) {
  sim_.fail(cat(function_, ": ", text));
  return status;
}

void* SimBlasLt::give(Object object) {
  objects_.emplace_back(true, std::move(object));
  return reinterpret_cast<void*>(kFirstHandle + (objects_.size() - 1) * kHandleStep);  // NOLINT(performance-no-int-to-ptr)
}

template <typename T>
T* SimBlasLt::find(void* object, std::string_view what) {
  const std::uint64_t at = (bits(object) - kFirstHandle) / kHandleStep;
  if (bits(object) < kFirstHandle || at >= objects_.size()) {
    refuse(kInvalidValue, cat("the ", what, " is no object of this library"));
    return nullptr;
  }
  auto& [lives, held] = objects_[static_cast<std::size_t>(at)];
  T* out = std::get_if<T>(&held);
  if (out == nullptr || !lives) {
    refuse(kInvalidValue, cat("object ", at + 1, out == nullptr ? " is no " : " was destroyed, used as ", what));
    return nullptr;
  }
  return out;
}

lt::Status SimBlasLt::drop(void* object) {
  objects_[static_cast<std::size_t>((bits(object) - kFirstHandle) / kHandleStep)].first = false;
  return kSuccess;
}

std::string SimBlasLt::misfit(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d) const {
  if (a.type != b.type || c.type != lt::kF32 || d.type != lt::kF32) return cat("types ", a.type, ", ", b.type, ", ", c.type, " and ", d.type, " are not multiplied");
  const std::uint64_t rows = operation.transpose_a ? a.columns : a.rows, inner = operation.transpose_a ? a.rows : a.columns;
  const std::uint64_t b_inner = operation.transpose_b ? b.columns : b.rows, columns = operation.transpose_b ? b.rows : b.columns;
  if (inner != b_inner) return cat("A has ", inner, " and B ", b_inner, " along the inner axis");
  for (const Layout* out : {&c, &d}) {
    if (out->rows != rows || out->columns != columns) return cat("the result is ", rows, " by ", columns, ", C or D ", out->rows, " by ", out->columns);
  }
  return "";
}

// One function of the table each.
struct SimBlasLt::Calls {
  template <typename Body>
  static lt::Status call(std::string_view function, const Body& body) {
    SimBlasLt* self = the_library.load();
    if (self == nullptr) return kNotInitialised;
    const std::scoped_lock lock(self->mutex_);
    self->function_ = function;
    for (Fault& fault : self->faults_) {
      if (fault.calls_left > 0 && fault.function == function && --fault.calls_left == 0) return fault.status;
    }
    return body(*self);
  }

  static std::size_t version() { return 130002; }
  static lt::Status create(lt::Handle* out) {
    return call("cublasLtCreate", [&](SimBlasLt& self) {
      *out = self.give(Handle{});
      return kSuccess;
    });
  }
  template <typename T>
  static lt::Status destroy(std::string_view function, void* object) {
    return call(function, [&](SimBlasLt& self) { return self.find<T>(object, "object to destroy") == nullptr ? kInvalidValue : self.drop(object); });
  }
  static lt::Status destroy_handle(lt::Handle handle) { return destroy<Handle>("cublasLtDestroy", handle); }
  static lt::Status destroy_operation(lt::Object object) { return destroy<Operation>("cublasLtMatmulDescDestroy", object); }
  static lt::Status destroy_layout(lt::Object object) { return destroy<Layout>("cublasLtMatrixLayoutDestroy", object); }
  static lt::Status destroy_preference(lt::Object object) { return destroy<Preference>("cublasLtMatmulPreferenceDestroy", object); }

  static lt::Status create_operation(lt::Object* out, int compute_type, int scale_type) {
    return call("cublasLtMatmulDescCreate", [&](SimBlasLt& self) {
      if (compute_type != lt::kCompute32F || scale_type != lt::kF32) return self.refuse(kNotSupported, "only sums and scales of float32");
      *out = self.give(Operation{});
      return kSuccess;
    });
  }
  static lt::Status set_operation(lt::Object object, int attribute, const void* value, std::size_t size) {
    return call("cublasLtMatmulDescSetAttribute", [&](SimBlasLt& self) {
      Operation* operation = self.find<Operation>(object, "operation");
      if (operation == nullptr) return kInvalidValue;
      int transpose = 0;
      if ((attribute != lt::kDescTransA && attribute != kDescTransB) || size != sizeof transpose) return self.refuse(kInvalidValue, cat("attribute ", attribute));
      std::memcpy(&transpose, value, sizeof transpose);
      (attribute == lt::kDescTransA ? operation->transpose_a : operation->transpose_b) = transpose == lt::kTranspose;
      return kSuccess;
    });
  }
  static lt::Status create_layout(lt::Object* out, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t leading) {
    return call("cublasLtMatrixLayoutCreate", [&](SimBlasLt& self) {
      if (type != lt::kF32 && type != lt::kF16 && type != lt::kBF16) return self.refuse(kNotSupported, cat("type ", type));
      if (rows == 0 || columns == 0 || leading < 0 || static_cast<std::uint64_t>(leading) < rows) {
        return self.refuse(kInvalidValue, cat(rows, " by ", columns, ", columns ", leading, " apart"));
      }
      *out = self.give(Layout{type, rows, columns, static_cast<std::uint64_t>(leading)});
      return kSuccess;
    });
  }
  static lt::Status create_preference(lt::Object* out) {
    return call("cublasLtMatmulPreferenceCreate", [&](SimBlasLt& self) {
      *out = self.give(Preference{});
      return kSuccess;
    });
  }
  static lt::Status set_preference(lt::Object object, int attribute, const void* value, std::size_t size) {
    return call("cublasLtMatmulPreferenceSetAttribute", [&](SimBlasLt& self) {
      Preference* preference = self.find<Preference>(object, "preference");
      if (preference == nullptr) return kInvalidValue;
      if (attribute == lt::kPreferWorkspaceBytes && size == sizeof preference->workspace_bytes) {
        std::memcpy(&preference->workspace_bytes, value, size);
      } else if (attribute >= lt::kPreferAlignmentA && attribute <= lt::kPreferAlignmentD && size == sizeof preference->alignments[0]) {
        std::memcpy(&preference->alignments[attribute - lt::kPreferAlignmentA], value, size);
      } else {
        return self.refuse(kInvalidValue, cat("attribute ", attribute, " of ", size, " B"));
      }
      return kSuccess;
    });
  }

  static lt::Status choose(lt::Handle handle, lt::Object operation_object, lt::Object a_object, lt::Object b_object, lt::Object c_object, lt::Object d_object,
                           lt::Object preference_object, int wanted, lt::Heuristic* results, int* found) {
    return call("cublasLtMatmulAlgoGetHeuristic", [&](SimBlasLt& self) {
      *found = 0;
      const Operation* operation = self.find<Operation>(operation_object, "operation");
      const Layout* layouts[4] = {};
      void* objects[] = {a_object, b_object, c_object, d_object};
      for (std::size_t i = 0; i < 4; ++i) layouts[i] = self.find<Layout>(objects[i], "layout");
      const Preference* preference = self.find<Preference>(preference_object, "preference");
      if (self.find<Handle>(handle, "handle") == nullptr || operation == nullptr || preference == nullptr) return kInvalidValue;
      for (const Layout* layout : layouts) {
        if (layout == nullptr) return kInvalidValue;
      }
      if (wanted < 1) return self.refuse(kInvalidValue, "no algorithm is wanted");
      const std::string wrong = self.misfit(*operation, *layouts[0], *layouts[1], *layouts[2], *layouts[3]);
      if (!wrong.empty()) return self.refuse(kNotSupported, wrong);
      lt::Heuristic& result = results[0];
      result = {};
      result.workspace_bytes = static_cast<std::size_t>(std::min(preference->workspace_bytes, kWorkspaceMax));
      result.algorithm.data[0] = kAlgorithmTag;
      result.algorithm.data[1] = result.workspace_bytes;
      for (std::size_t i = 0; i < 4; ++i) result.algorithm.data[2 + i] = preference->alignments[i];
      *found = 1;
      return kSuccess;
    });
  }

  static lt::Status multiply(lt::Handle handle, lt::Object operation_object, const void* alpha, const void* a, lt::Object a_object, const void* b, lt::Object b_object,
                             const void* beta, const void* c, lt::Object c_object, void* d, lt::Object d_object, const lt::Algorithm* algorithm, void* workspace,
                             std::size_t workspace_bytes, CUstream stream) {
    return call("cublasLtMatmul", [&](SimBlasLt& self) {
      const Operation* operation = self.find<Operation>(operation_object, "operation");
      const Layout* layouts[4] = {};
      void* objects[] = {a_object, b_object, c_object, d_object};
      for (std::size_t i = 0; i < 4; ++i) {
        layouts[i] = self.find<Layout>(objects[i], "layout");
        if (layouts[i] == nullptr) return kInvalidValue;
      }
      if (self.find<Handle>(handle, "handle") == nullptr || operation == nullptr) return kInvalidValue;
      const std::string wrong = self.misfit(*operation, *layouts[0], *layouts[1], *layouts[2], *layouts[3]);
      if (!wrong.empty()) return self.refuse(kInvalidValue, wrong);
      if (algorithm == nullptr || algorithm->data[0] != kAlgorithmTag) return self.refuse(kInvalidValue, "the algorithm is none that this library chose");
      const std::uint64_t needed = algorithm->data[1];
      if (workspace_bytes < needed) return self.refuse(kInvalidValue, cat("a workspace of ", workspace_bytes, " B for an algorithm of ", needed, " B"));
      const void* pointers[] = {a, b, c, d};
      for (std::size_t i = 0; i < 4; ++i) {
        if (bits(pointers[i]) % algorithm->data[2 + i] == 0) continue;
        return self.refuse(kExecutionFailed, cat("matrix ", "ABCD"[i], " is not aligned to the ", algorithm->data[2 + i], " B that its algorithm was chosen for"));
      }
      Sum sum;
      sum.a = {a, layouts[0]->type, layouts[0]->leading, operation->transpose_a};
      sum.b = {b, layouts[1]->type, layouts[1]->leading, operation->transpose_b};
      sum.c = static_cast<const float*>(c);
      sum.d = static_cast<float*>(d);
      sum.rows = layouts[3]->rows;
      sum.columns = layouts[3]->columns;
      sum.inner = operation->transpose_a ? layouts[0]->rows : layouts[0]->columns;
      sum.c_leading = layouts[2]->leading;
      sum.d_leading = layouts[3]->leading;
      std::memcpy(&sum.alpha, alpha, sizeof sum.alpha);  // CUBLASLT_POINTER_MODE_HOST, the default: read at the call
      std::memcpy(&sum.beta, beta, sizeof sum.beta);
      std::vector<SimRange> touches;
      for (std::size_t i = 0; i < 4; ++i) {
        touches.push_back({bits(pointers[i]), span_bytes(layouts[i]->type, layouts[i]->rows, layouts[i]->columns, layouts[i]->leading)});
      }
      if (needed > 0) touches.push_back({bits(workspace), needed});
      ++self.products_;
      const CUresult pushed = self.sim_.enqueue(stream, "matmul", std::move(touches), [sum, workspace, needed] {
        if (needed > 0) std::memset(workspace, std::to_integer<int>(kSimPoison), static_cast<std::size_t>(needed));
        testing::multiply(sum);
      });
      return pushed == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
    });
  }
};

std::shared_ptr<const cuda::BlasLtApi> SimBlasLt::api() const {
  auto api = std::make_shared<cuda::BlasLtApi>();
  api->cublasLtGetVersion = Calls::version;
  api->cublasLtCreate = Calls::create;
  api->cublasLtDestroy = Calls::destroy_handle;
  api->cublasLtMatmulDescCreate = Calls::create_operation;
  api->cublasLtMatmulDescDestroy = Calls::destroy_operation;
  api->cublasLtMatmulDescSetAttribute = Calls::set_operation;
  api->cublasLtMatrixLayoutCreate = Calls::create_layout;
  api->cublasLtMatrixLayoutDestroy = Calls::destroy_layout;
  api->cublasLtMatmulPreferenceCreate = Calls::create_preference;
  api->cublasLtMatmulPreferenceDestroy = Calls::destroy_preference;
  api->cublasLtMatmulPreferenceSetAttribute = Calls::set_preference;
  api->cublasLtMatmulAlgoGetHeuristic = Calls::choose;
  api->cublasLtMatmul = Calls::multiply;
  return api;
}

}  // namespace paramwire::testing
