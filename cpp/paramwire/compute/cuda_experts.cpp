#include "paramwire/compute/cuda_experts.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <utility>

namespace paramwire {

namespace {

// By format: f32, bf16, f16.
constexpr cuda::Kernel kExpertGemv[] = {cuda::Kernel::k_expert_gemv_f32, cuda::Kernel::k_expert_gemv_bf16, cuda::Kernel::k_expert_gemv_f16};

std::size_t format_of(DType dtype) noexcept { return dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 1 : 2; }

}  // namespace

Status group_picks(std::span<const float> routing, std::uint32_t k, std::uint64_t experts, std::vector<std::uint64_t>& distinct, std::span<std::uint32_t> begin,
                   std::span<std::uint32_t> picks) {
  const std::size_t count = routing.size() / 2;
  const auto number = [&](std::size_t pick) { return routing[pick / k * 2 * k + pick % k]; };
  std::array<std::uint32_t, kExpertsMax> next{};  // of each expert: its picks, then where its next one goes
  for (std::size_t pick = 0; pick < count; ++pick) {
    const float expert = number(pick);
    if (!(expert >= 0 && expert < static_cast<float>(experts))) {
      return Error(Code::kInternal, cat("a routing came from the device with ", expert, " as pick ", pick % k, " of row ", pick / k, ", expected the number of one of ", experts, " experts"));
    }
    ++next[static_cast<std::size_t>(expert)];
  }
  distinct.clear();
  std::uint32_t at = 0;
  for (std::size_t expert = 0; expert < experts; ++expert) {
    if (next[expert] == 0) continue;
    begin[distinct.size()] = at;
    distinct.push_back(expert);
    at += std::exchange(next[expert], at);
  }
  begin[distinct.size()] = at;
  for (std::size_t pick = 0; pick < count; ++pick) picks[next[static_cast<std::size_t>(number(pick))]++] = static_cast<std::uint32_t>(pick);
  return {};
}

// ---------------------------------------------------------------- opening

Status CudaExperts::prepare() {
  PARAMWIRE_CHECK(place());
  if (routings_.empty()) return {};
  for (cuda::Event* event : {&routed_, &arrived_, &computed_[0], &computed_[1]}) {
    PARAMWIRE_TRY(made, cuda::Event::create(device_));
    *event = std::move(made);
  }
  return {};
}

Status CudaExperts::place() {
  const std::vector<Op>& ops = binding_.graph().ops();
  routing_of_.assign(ops.size(), UINT32_MAX);
  std::uint64_t values_bytes = 0, lists_bytes = 0, most_bytes = 0;
  const Need* largest = nullptr;
  for (const Need& need : binding_.needs()) {
    if (!is_expert(ops[need.op].kind)) continue;
    const std::uint32_t router = ops[need.op].inputs[1];
    const std::uint64_t rows = ops[router].last_only ? 1 : options_.step_tokens, picks = rows * ops[router].k, most = std::min(need.rows, picks);
    if (largest == nullptr || need.row_bytes > largest->row_bytes) largest = &need;
    most_bytes = std::max(most_bytes, most * need.row_bytes);
    if (routing_of_[router] != UINT32_MAX) continue;
    routing_of_[router] = static_cast<std::uint32_t>(routings_.size());
    Routing routing{.op = router, .rows_max = rows, .experts = need.rows, .values_at = values_bytes, .begin_at = lists_bytes, .picks_at = lists_bytes + 4 * (most + 1)};
    routing.distinct.reserve(static_cast<std::size_t>(most));
    values_bytes += 4 * 2 * picks;
    lists_bytes = routing.picks_at + 4 * picks;
    routings_.push_back(std::move(routing));
  }
  if (largest == nullptr) return {};
  if (options_.rows_bytes != 0 && options_.rows_bytes < largest->row_bytes) {
    return Error(Code::kInvalid, cat("cuda session: rows_bytes is ", options_.rows_bytes, ", expected at least the ", largest->row_bytes, " bytes of an expert of tensor '", largest->tensor, "'"));
  }
  // No more than two halves that hold all that a step can pick.
  const std::uint64_t bytes = std::min(options_.rows_bytes != 0 ? options_.rows_bytes : 2 * largest->row_bytes, 2 * most_bytes);
  half_bytes_ = bytes / 2 / 16 * 16;  // 16: what the kernels' loads want of an address
  if (half_bytes_ < largest->row_bytes) {
    halves_ = 1;
    half_bytes_ = bytes;
  }
  PARAMWIRE_TRY(experts, cuda::DeviceMemory::allocate(device_, halves_ * half_bytes_, "experts"));
  experts_ = std::move(experts);
  PARAMWIRE_TRY(lists, cuda::DeviceMemory::allocate(device_, lists_bytes, "lists of picks"));
  lists_ = std::move(lists);
  PARAMWIRE_TRY(picked, cuda::HostMemory::allocate(device_, values_bytes));
  picked_ = std::move(picked);
  PARAMWIRE_TRY(lists_host, cuda::HostMemory::allocate(device_, lists_bytes));
  lists_host_ = std::move(lists_host);
  return {};
}

// ---------------------------------------------------------------- the step

void CudaExperts::begin_step() noexcept {
  need_ = SIZE_MAX;
  batch_ = 0;
  used_ = {};
  for (Routing& routing : routings_) routing.known = false;
}

std::span<const std::uint64_t> CudaExperts::wanted() const noexcept {
  return std::span<const std::uint64_t>(routings_[routing_].distinct).subspan(taken_);
}

Result<bool> CudaExperts::begin(std::size_t need, const CudaEmitter& emitter, const cuda::Stream& compute) {
  const std::uint32_t index = routing_of_[binding_.graph().ops()[binding_.needs()[need].op].inputs[1]];
  Routing& routing = routings_[index];
  const bool waits = !routing.known;
  if (waits) {
    PARAMWIRE_CHECK(learn(routing, emitter, compute));
    used_ = {};
  }
  need_ = need;
  routing_ = index;
  taken_ = 0;
  return waits;
}

// The one wait for the device within a step: nobody else knows what to fetch.
Status CudaExperts::learn(Routing& routing, const CudaEmitter& emitter, const cuda::Stream& compute) {
  const std::uint32_t k = binding_.graph().ops()[routing.op].k;
  const std::uint64_t picks = std::uint64_t{emitter.rows_of(routing.op)} * k;
  const auto values = picked_.span().subspan(static_cast<std::size_t>(routing.values_at), static_cast<std::size_t>(4 * 2 * picks));
  PARAMWIRE_CHECK(compute.to_host(values, reinterpret_cast<CUdeviceptr>(emitter.value(routing.op))));
  PARAMWIRE_CHECK(compute.record(routed_));
  PARAMWIRE_CHECK(routed_.synchronize());
  const std::span<const float> floats(reinterpret_cast<const float*>(values.data()), static_cast<std::size_t>(2 * picks));
  const std::uint64_t most = std::min(routing.experts, routing.rows_max * k);
  PARAMWIRE_CHECK(group_picks(floats, k, routing.experts, routing.distinct, list(routing.begin_at, most + 1), list(routing.picks_at, picks)));
  const auto lists = lists_host_.span().subspan(static_cast<std::size_t>(routing.begin_at), static_cast<std::size_t>(routing.picks_at + 4 * picks - routing.begin_at));
  PARAMWIRE_CHECK(compute.to_device(lists_.address() + routing.begin_at, lists));
  routing.known = true;
  return {};
}

Status CudaExperts::take(const WeightView& view, const CudaEmitter& emitter, const cuda::Stream& copy, const cuda::Stream& compute) {
  const std::uint64_t bytes = binding_.needs()[need_].row_bytes;
  for (auto left = wanted(); !left.empty() && left.front() < view.row_end; left = wanted()) {
    if (batch_ == 0) {
      half_ = static_cast<unsigned>(batches_++ % halves_);
      if (used_[half_]) PARAMWIRE_CHECK(copy.wait(computed_[half_]));
    }
    const auto expert = view.data.subspan(static_cast<std::size_t>((left.front() - view.row_begin) * bytes), static_cast<std::size_t>(bytes));
    PARAMWIRE_CHECK(copy.to_device(experts_.address() + half_ * half_bytes_ + batch_ * bytes, expert));
    ++batch_;
    ++taken_;
    if ((batch_ + 1) * bytes > half_bytes_ || wanted().empty()) PARAMWIRE_CHECK(multiply(emitter, copy, compute));
  }
  return {};
}

// Products with the batch that has been copied: the last `batch_` of the experts taken.
Status CudaExperts::multiply(const CudaEmitter& emitter, const cuda::Stream& copy, const cuda::Stream& compute) {
  PARAMWIRE_CHECK(copy.record(arrived_));
  PARAMWIRE_CHECK(compute.wait(arrived_));
  const Need& need = binding_.needs()[need_];
  const Op& op = binding_.graph().ops()[need.op];
  const Shape& shape = binding_.graph().parameters()[need.parameter].shape;
  const Routing& routing = routings_[routing_];
  const std::size_t first = taken_ - static_cast<std::size_t>(batch_);
  const auto begin = list(routing.begin_at + 4 * first, batch_ + 1);
  const bool combine = op.kind == OpKind::kExpertCombine;
  cuda::ExpertArgs args{};
  args.weights = experts_.at<const void>(half_ * half_bytes_);
  args.begin = lists_.at<const std::uint32_t>(routing.begin_at + 4 * first);
  args.picks = lists_.at<const std::uint32_t>(routing.picks_at);
  args.x = emitter.value(op.inputs[0]);
  args.out = combine ? emitter.products() : emitter.value(need.op);
  args.experts = static_cast<std::uint32_t>(batch_);
  args.rows = static_cast<std::uint32_t>(shape[1]);
  args.columns = static_cast<std::uint32_t>(shape[2]);
  args.share = combine ? 1 : op.k;
  for (std::size_t i = 0; i < batch_; ++i) args.picks_max = std::max(args.picks_max, begin[i + 1] - begin[i]);
  PARAMWIRE_CHECK(module_->launch(compute, kExpertGemv[format_of(need.dtype)], cuda::expert_launch(args), args));
  PARAMWIRE_CHECK(compute.record(computed_[half_]));
  used_[half_] = true;
  batch_ = 0;
  return {};
}

}  // namespace paramwire
