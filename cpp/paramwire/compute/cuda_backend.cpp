#include "paramwire/compute/cuda_backend.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/cuda_probe.hpp"
#include "paramwire/compute/cuda_session.hpp"

#include <utility>

namespace paramwire {

namespace {

class PinnedStaging final : public Staging {
 public:
  explicit PinnedStaging(cuda::HostMemory memory) : memory_(std::move(memory)) {}
  std::span<std::byte> span() noexcept override { return memory_.span(); }

 private:
  cuda::HostMemory memory_;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}
  std::string_view name() const noexcept override { return "cuda"; }
  std::string description() const override {
    const cuda::DeviceFacts& facts = context_->device->facts();
    return cat(context_->device->label(), ": ", facts.name, ", ", human_bytes(facts.memory_bytes), ", compute capability ", facts.major, ".", facts.minor, ", ",
               context_->blas != nullptr ? std::string("cuBLASLt for prompts") : cat("prompts without cuBLASLt (", context_->blas_problem, ")"));
  }
  bool own_memory() const noexcept override { return true; }
  Result<std::unique_ptr<Session>> open_session(const Binding& binding, const SessionOptions& options) override { return CudaSession::open(context_, binding, options); }
  Result<std::unique_ptr<Staging>> allocate_staging(std::uint64_t size) override {
    PARAMWIRE_TRY(memory, cuda::HostMemory::allocate(context_->device, size));
    return std::unique_ptr<Staging>(std::make_unique<PinnedStaging>(std::move(memory)));
  }

 private:
  const std::shared_ptr<const CudaContext> context_;  // shared with sessions, which may outlive the backend
};

}  // namespace

Result<std::unique_ptr<Backend>> open_cuda_backend(std::shared_ptr<const cuda::Driver> driver, std::shared_ptr<const cuda::BlasLtApi> blas, std::string blas_problem, int ordinal) {
  auto context = std::make_shared<CudaContext>();
  PARAMWIRE_TRY(device, cuda::Device::open(std::move(driver), ordinal));
  context->device = std::move(device);
  PARAMWIRE_TRY(module, cuda::Module::load(context->device));
  context->module = std::move(module);
  context->blas = std::move(blas);
  context->blas_problem = std::move(blas_problem);
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(std::move(context)));
}

Result<std::unique_ptr<Backend>> open_cuda_backend(int ordinal) {
  auto driver = cuda::open_driver();
  if (!driver.ok()) {
    const Availability why = cuda_unavailable(look_for_cuda(""), true, driver.error().message());
    return Error(Code::kUnavailable, cat("cuda:", ordinal, ": ", why.reason, ". ", why.next));
  }
  auto blas = cuda::open_blaslt();
  if (!blas.ok()) return open_cuda_backend(std::move(*driver), nullptr, blas.error().message(), ordinal);
  return open_cuda_backend(std::move(*driver), std::move(*blas), {}, ordinal);
}

// Looks only: cuInit would make every child that this process forks later unable to use CUDA, and take a while.
Availability cuda_backend_available() {
  const CudaFacts facts = look_for_cuda("");
  const auto driver = cuda::open_driver();
  if (!driver.ok()) return cuda_unavailable(facts, true, driver.error().message());
  if (const Status version = cuda::check_version(**driver); !version.ok()) return cuda_unavailable(facts, true, version.error().message());
  if (facts.nodes.empty()) return cuda_unavailable(facts, true);
  const auto blas = cuda::open_blaslt();
  return {"cuda", true, cat(facts.nodes.front(), ", ", blas.ok() ? "cuBLASLt" : "prompts without cuBLASLt"), blas.ok() ? std::string() : blas.error().message()};
}

}  // namespace paramwire
