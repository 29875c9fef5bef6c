#include "paramwire/compute/cpu_backend.hpp"

#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/compute/blas.hpp"
#include "paramwire/compute/cpu_session.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

namespace paramwire {

namespace {

constexpr std::uint32_t kThreadsMax = 256;

// Cores that this process may run on; 1 when the system doesn't say.
std::uint32_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) > 0) return static_cast<std::uint32_t>(CPU_COUNT(&cores));
  return std::max(1U, std::thread::hardware_concurrency());
}

// Sizes of the check: odd, with tails after every vector width and several steps of each, and large enough that a BLAS
// takes its blocked path. About a million products: below 2 ms.
constexpr std::size_t kCheckTokens = 13, kCheckRows = 71, kCheckColumns = 331;

struct CheckData {
  std::vector<float> x = std::vector<float>(kCheckTokens * kCheckColumns);
  std::vector<float> weights = std::vector<float>(kCheckRows * kCheckColumns);
  std::vector<double> right = std::vector<double>(kCheckTokens * kCheckRows), bound = right;

  CheckData() {
    Random random(1);
    // Multiples of 1/64 in [-1, 1): exact in bf16, f16 and f32, so every format has the same right answer.
    for (float& value : x) value = static_cast<float>(static_cast<int>(random.below(128)) - 64) / 64.0F;
    for (float& value : weights) value = static_cast<float>(static_cast<int>(random.below(128)) - 64) / 64.0F;
    for (std::size_t token = 0; token < kCheckTokens; ++token) {
      for (std::size_t row = 0; row < kCheckRows; ++row) {
        double sum = 0, magnitude = 0;
        for (std::size_t column = 0; column < kCheckColumns; ++column) {
          const double product = static_cast<double>(x[token * kCheckColumns + column]) * static_cast<double>(weights[row * kCheckColumns + column]);
          sum += product;
          magnitude += std::fabs(product);
        }
        // |error| <= n u sum |x w| for float32 sums in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
        right[token * kCheckRows + row] = sum;
        bound[token * kCheckRows + row] = kCheckColumns * 0x1p-24 * magnitude + 1e-30;
      }
    }
  }

  Status compare(const std::vector<float>& actual, std::string_view what) const {
    for (std::size_t i = 0; i < right.size(); ++i) {
      if (!(std::fabs(static_cast<double>(actual[i]) - right[i]) <= bound[i])) {
        return Error(Code::kUnavailable, cat("cpu backend: ", what, " multiplies wrongly on this processor: token ", i / kCheckRows,
                                             ", row ", i % kCheckRows, " is ", actual[i], ", expected ", right[i],
                                             "; use another build of the library"));
      }
    }
    return {};
  }
};

// `weights` stored in `dtype`; exact for the values of CheckData.
std::vector<std::byte> stored(const std::vector<float>& weights, DType dtype) {
  std::vector<std::byte> out(weights.size() * dtype_bits(dtype) / 8);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(weights[i]);
    std::uint32_t value = bits;
    std::size_t size = 4;
    if (dtype == DType::kBF16) {
      value = bits >> 16;
      size = 2;
    } else if (dtype == DType::kF16) {
      // Normal halves only: the values are 0 or between 2^-6 and 1. Exponent from bias 127 to 15, fraction from 23 to 10 bits.
      value = (bits & 0x7fffffffU) == 0 ? 0 : ((bits >> 16) & 0x8000U) | ((((bits >> 23) & 0xffU) - 112) << 10) | ((bits >> 13) & 0x3ffU);
      size = 2;
    }
    for (std::size_t byte = 0; byte < size; ++byte) out[i * size + byte] = static_cast<std::byte>((value >> (8 * byte)) & 0xff);
  }
  return out;
}

}  // namespace

Status check_cpu_products(const kernels::Set& set) {
  const CheckData data;
  std::vector<float> actual(data.right.size());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const std::vector<std::byte> bytes = stored(data.weights, dtype);
    const std::size_t format = kernels::format_index(dtype);
    const kernels::Rows rows{bytes.data(), kCheckRows, kCheckColumns, kCheckColumns * dtype_bits(dtype) / 8};
    set.dot_rows[format](rows, data.x.data(), kCheckColumns, kCheckTokens, actual.data(), kCheckRows, false);
    PARAMWIRE_CHECK(data.compare(actual, cat(set.name, " dot kernel, ", dtype_name(dtype))));
    std::vector<float> wide(data.weights.size());
    set.widen[format](bytes.data(), wide.data(), wide.size());
    blas::multiply(kCheckTokens, kCheckRows, kCheckColumns, data.x.data(), kCheckColumns, wide.data(), kCheckColumns, actual.data(),
                   kCheckRows, false);
    PARAMWIRE_CHECK(data.compare(actual, cat(blas::description(), " behind the ", set.name, " widening of ", dtype_name(dtype))));
  }
  return {};
}

namespace {

class HeapStaging final : public Staging {
 public:
  explicit HeapStaging(Buffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> span() noexcept override { return buffer_.span(); }

 private:
  Buffer buffer_;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::shared_ptr<CpuContext> context) : context_(std::move(context)) {}
  std::string_view name() const noexcept override { return "cpu"; }
  std::string description() const override {
    return cat("cpu: ", context_->team->threads(), " threads, ", context_->kernels->name, " dot kernels, ", blas::description());
  }
  Result<std::unique_ptr<Session>> open_session(const Binding& binding, const SessionOptions& options) override {
    return CpuSession::open(context_, binding, options);
  }
  Result<std::unique_ptr<Staging>> allocate_staging(std::uint64_t size) override {
    PARAMWIRE_TRY(buffer, Buffer::allocate(static_cast<std::size_t>(size)));
    return std::unique_ptr<Staging>(std::make_unique<HeapStaging>(std::move(buffer)));
  }

 private:
  const std::shared_ptr<CpuContext> context_;  // shared with sessions, which may outlive the backend
};

}  // namespace

Result<std::unique_ptr<Backend>> open_cpu_backend(const BackendOptions& options) {
  if (options.threads > kThreadsMax) {
    return Error(Code::kInvalid, cat("cpu backend: threads is ", options.threads, ", expected at most ", kThreadsMax));
  }
  auto context = std::make_shared<CpuContext>();
  context->kernels = kernels::usable_sets().front();
  PARAMWIRE_CHECK(check_cpu_products(*context->kernels));
  PARAMWIRE_TRY(team, Team::start(options.threads != 0 ? options.threads : std::min(usable_cores(), kThreadsMax)));
  context->team = std::move(team);
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(std::move(context)));
}

Availability cpu_backend_available() {
  const kernels::Set& set = *kernels::usable_sets().front();
  const Status status = check_cpu_products(set);
  if (!status.ok()) return {"cpu", false, status.error().message()};
  return {"cpu", true, cat(set.name, " dot kernels, ", blas::description())};
}

}  // namespace paramwire
