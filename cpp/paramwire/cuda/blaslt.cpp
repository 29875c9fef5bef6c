#include "paramwire/cuda/blaslt.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <bit>
#include <dlfcn.h>
#include <mutex>

namespace paramwire::cuda {

namespace {

constexpr std::uint64_t kWorkspaceBytes = std::uint64_t{32} << 20;

int type_of(DType dtype) { return dtype == DType::kBF16 ? lt::kBF16 : dtype == DType::kF16 ? lt::kF16 : lt::kF32; }

// The power of two that an address is a multiple of, at most 256, as its exponent.
std::uint32_t alignment_of(const void* address) {
  return std::min(8U, static_cast<std::uint32_t>(std::countr_zero(reinterpret_cast<std::uintptr_t>(address))));
}

}  // namespace

Result<std::shared_ptr<const BlasLtApi>> open_blaslt(const char* library) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const BlasLtApi>> known;
  const std::lock_guard lock(mutex);
  if (const auto it = known.find(library); it != known.end()) return it->second;
  // Where a framework has it loaded already, this gives that one.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return Error(Code::kUnavailable, cat("cuda: ", why != nullptr ? why : "cuBLASLt does not open", "; install it (pip install nvidia-cublas), or add its folder to LD_LIBRARY_PATH"));
  }
  auto api = std::make_shared<BlasLtApi>();
  std::string missing;
  const auto find = [&]<typename Function>(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));  // NOLINT: what dlsym(3) is for
    if (function == nullptr) missing = name;
  };
#define PARAMWIRE_FIND(name) find(#name, api->name)
  PARAMWIRE_FIND(cublasLtGetVersion);
  PARAMWIRE_FIND(cublasLtCreate);
  PARAMWIRE_FIND(cublasLtDestroy);
  PARAMWIRE_FIND(cublasLtMatmulDescCreate);
  PARAMWIRE_FIND(cublasLtMatmulDescDestroy);
  PARAMWIRE_FIND(cublasLtMatmulDescSetAttribute);
  PARAMWIRE_FIND(cublasLtMatrixLayoutCreate);
  PARAMWIRE_FIND(cublasLtMatrixLayoutDestroy);
  PARAMWIRE_FIND(cublasLtMatmulPreferenceCreate);
  PARAMWIRE_FIND(cublasLtMatmulPreferenceDestroy);
  PARAMWIRE_FIND(cublasLtMatmulPreferenceSetAttribute);
  PARAMWIRE_FIND(cublasLtMatmulAlgoGetHeuristic);
  PARAMWIRE_FIND(cublasLtMatmul);
#undef PARAMWIRE_FIND
  if (!missing.empty()) return Error(Code::kUnavailable, cat("cuda: ", library, " lacks ", missing, "; install cuBLAS 13"));
  known.emplace(library, api);  // and stays open: the library leaves threads behind
  return std::shared_ptr<const BlasLtApi>(std::move(api));
}

Result<std::unique_ptr<BlasLt>> BlasLt::create(DevicePtr device, std::shared_ptr<const BlasLtApi> api) {
  std::unique_ptr<BlasLt> out(new BlasLt(std::move(device), std::move(api)));
  PARAMWIRE_TRY(workspace, DeviceMemory::allocate(out->device_, kWorkspaceBytes, "the matrix products' workspace"));
  out->workspace_ = std::move(workspace);
  const Current current(*out->device_);
  PARAMWIRE_CHECK(current.status());
  if (const lt::Status status = out->api_->cublasLtCreate(&out->handle_); status != 0) {
    return Error(Code::kUnavailable, cat(out->device_->label(), ": cublasLtCreate gave status ", status, "; is there memory left for it?"));
  }
  return out;
}

BlasLt::~BlasLt() {
  if (handle_ == nullptr || device_->in_child()) return;
  const Current current(*device_);
  for (auto& [key, plan] : plans_) destroy(plan);
  api_->cublasLtDestroy(handle_);
}

void BlasLt::destroy(Plan& plan) const noexcept {
  if (plan.operation != nullptr) api_->cublasLtMatmulDescDestroy(plan.operation);
  for (lt::Object layout : {plan.weight, plan.x, plan.y}) {
    if (layout != nullptr) api_->cublasLtMatrixLayoutDestroy(layout);
  }
  plan = {};
}

std::string BlasLt::description() const {
  const std::size_t version = api_->cublasLtGetVersion();  // 130002 is 13.0.2
  return cat("cuBLASLt ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// cuBLAS is column-major: it sees W as [columns, rows] and transposes it, x as [columns, tokens], and y as [rows, tokens].
Status BlasLt::prepare(Plan& plan, const Product& product, const Key& key) const {
  const int type = type_of(product.dtype);
  const auto refuse = [&](std::string_view function, lt::Status status) {
    return Error(Code::kUnavailable, cat(device_->label(), ": ", function, " gave status ", status, " for a product of ", product.tokens, " tokens, ", product.rows, " by ", product.columns,
                                         " of ", dtype_name(product.dtype)));
  };
  if (const auto status = api_->cublasLtMatmulDescCreate(&plan.operation, lt::kCompute32F, lt::kF32); status != 0) return refuse("cublasLtMatmulDescCreate", status);
  const int transpose = lt::kTranspose;
  if (const auto status = api_->cublasLtMatmulDescSetAttribute(plan.operation, lt::kDescTransA, &transpose, sizeof transpose); status != 0) {
    return refuse("cublasLtMatmulDescSetAttribute", status);
  }
  const struct {
    lt::Object* layout;
    int type;
    std::uint64_t rows, columns, leading;
  } layouts[] = {{&plan.weight, type, product.columns, product.rows, product.columns},
                 {&plan.x, type, product.columns, product.tokens, product.columns},
                 {&plan.y, lt::kF32, product.rows, product.tokens, product.y_stride}};
  for (const auto& each : layouts) {
    const auto status = api_->cublasLtMatrixLayoutCreate(each.layout, each.type, each.rows, each.columns, static_cast<std::int64_t>(each.leading));
    if (status != 0) return refuse("cublasLtMatrixLayoutCreate", status);
  }
  lt::Object preference = nullptr;
  if (const auto status = api_->cublasLtMatmulPreferenceCreate(&preference); status != 0) return refuse("cublasLtMatmulPreferenceCreate", status);
  const std::uint64_t workspace = workspace_.size();
  const std::uint32_t weight = 1U << (key.alignments & 15U), x = 1U << (key.alignments >> 4 & 15U), y = 1U << (key.alignments >> 8);
  const struct {
    int attribute;
    const void* value;
    std::size_t size;
  } wishes[] = {{lt::kPreferWorkspaceBytes, &workspace, sizeof workspace}, {lt::kPreferAlignmentA, &weight, sizeof weight}, {lt::kPreferAlignmentB, &x, sizeof x},
                {lt::kPreferAlignmentC, &y, sizeof y},                     {lt::kPreferAlignmentD, &y, sizeof y}};
  lt::Status status = 0;
  for (const auto& wish : wishes) {
    if (status == 0) status = api_->cublasLtMatmulPreferenceSetAttribute(preference, wish.attribute, wish.value, wish.size);
  }
  int found = 0;
  if (status == 0) {
    status = api_->cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.weight, plan.x, plan.y, plan.y, preference, 1, &plan.chosen, &found);
  }
  api_->cublasLtMatmulPreferenceDestroy(preference);
  if (status != 0 || found == 0) return refuse("cublasLtMatmulAlgoGetHeuristic", status);
  return {};
}

Result<const BlasLt::Plan*> BlasLt::plan(const Product& product) {
  const std::uint32_t alignments = alignment_of(product.weight) | alignment_of(product.x) << 4 | alignment_of(product.y) << 8;
  const Key key{product.dtype, product.tokens, product.rows, product.columns, product.y_stride, alignments};
  if (const auto it = plans_.find(key); it != plans_.end()) return &it->second;
  Plan made;
  if (Status status = prepare(made, product, key); !status.ok()) {
    destroy(made);
    return std::move(status).error();
  }
  return &plans_.emplace(key, made).first->second;
}

Status BlasLt::multiply(const Product& product, const Stream& stream) {
  PARAMWIRE_TRY(plan, this->plan(product));
  const float one = 1, beta = product.accumulate ? 1 : 0;
  const auto status = api_->cublasLtMatmul(handle_, plan->operation, &one, product.weight, plan->weight, product.x, plan->x, &beta, product.y, plan->y, product.y, plan->y,
                                           &plan->chosen.algorithm, workspace_.at<void>(), static_cast<std::size_t>(workspace_.size()), stream.handle());
  if (status == 0) return {};
  return Error(Code::kUnavailable, cat(device_->label(), ": cublasLtMatmul gave status ", status, " for a product of ", product.tokens, " tokens, ", product.rows, " by ", product.columns, " of ",
                                       dtype_name(product.dtype)));
}

}  // namespace paramwire::cuda
