#include "paramwire/compute/cuda_session.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace paramwire {

using cuda::Current;

// ---------------------------------------------------------------- opening

Result<std::unique_ptr<Session>> CudaSession::open(std::shared_ptr<const CudaContext> context, const Binding& binding, const SessionOptions& options) {
  if (options.context_tokens == 0 || options.step_tokens == 0) {
    return Error(Code::kInvalid, cat("cuda session: context_tokens is ", options.context_tokens, ", step_tokens is ", options.step_tokens, ", expected both above 0"));
  }
  std::unique_ptr<CudaSession> session(new CudaSession(std::move(context), binding, options));
  const Current current(*session->context_->device);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(session->prepare());
  return std::unique_ptr<Session>(std::move(session));
}

Status CudaSession::prepare() {
  if (options_.pieces.empty()) {
    for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
      const Need& each = binding_.needs()[need];
      if (each.access == Access::kWhole) options_.pieces.push_back({need, 0, each.rows, true});
    }
  }
  PARAMWIRE_TRY(walk, plan_cuda_walk(binding_, options_.pieces, options_.window_bytes / 2));
  walk_ = std::move(walk);
  PARAMWIRE_CHECK(allocate());
  return capture();
}

Status CudaSession::allocate() {
  const cuda::DevicePtr& device = context_->device;
  PARAMWIRE_TRY(copy, cuda::Stream::create(device));
  copy_ = std::move(copy);
  PARAMWIRE_TRY(compute, cuda::Stream::create(device));
  compute_ = std::move(compute);
  std::vector<cuda::Event*> events = {&arrived_, &done_, &computed_[0], &computed_[1]};
  for (cuda::Event& event : copied_) events.push_back(&event);
  for (cuda::Event* event : events) {
    PARAMWIRE_TRY(made, cuda::Event::create(device));
    *event = std::move(made);
  }
  std::unique_ptr<cuda::BlasLt> blas;
  if (context_->blas != nullptr) {
    PARAMWIRE_TRY(made, cuda::BlasLt::create(device, context_->blas));
    blas = std::move(made);
  }
  sets_ = std::make_unique<CudaSets>(device, binding_, walk_);
  PARAMWIRE_CHECK(sets_->open(options_, context_->module, compute_));
  PARAMWIRE_TRY(slots, cuda::DeviceMemory::allocate(device, 2 * walk_.slot_bytes, "the slots of weights that stream"));
  slots_ = std::move(slots);
  emitter_ = std::make_unique<CudaEmitter>(device, context_->module, std::move(blas), binding_, options_);
  PARAMWIRE_CHECK(emitter_->prepare(compute_));
  experts_ = std::make_unique<CudaExperts>(device, context_->module, binding_, options_);
  PARAMWIRE_CHECK(experts_->prepare());

  PARAMWIRE_CHECK(planes_.open(device, context_->module, options_.planes_bytes, kInFlight));
  PARAMWIRE_CHECK(checks_.open(device, context_->module, walk_, kInFlight));

  std::uint64_t row_bytes = 0;
  for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
    const Need& each = binding_.needs()[need];
    if (each.access != Access::kRowsByData || is_expert(binding_.graph().ops()[each.op].kind)) continue;
    rows_needs_.push_back(need);
    row_bytes += options_.step_tokens * each.row_bytes;
  }
  const struct {
    cuda::HostMemory* memory;
    std::uint64_t bytes;
  } wanted[] = {{&upload_, emitter_->state_bytes()}, {&rows_, row_bytes}, {&logits_, 4 * binding_.output_width()}, {&met_, sizeof cuda::StepState::met}};
  for (const auto& each : wanted) {
    PARAMWIRE_TRY(memory, cuda::HostMemory::allocate(device, each.bytes));
    *each.memory = std::move(memory);
  }
  tokens_.reserve(options_.step_tokens);
  wanted_rows_.reserve(options_.step_tokens);
  return {};
}

// Every segment, for one token and for each place that its weights may lie in. Nothing is run.
Status CudaSession::capture() {
  graphs_.resize(walk_.segments.size());
  for (std::size_t i = 0; i < walk_.segments.size(); ++i) {
    if (walk_.segments[i].reads_experts()) continue;
    for (unsigned set = 0; set < sets_->count(); ++set) {
      for (unsigned slot = 0; slot < (walk_.segments[i].streams ? 2U : 1U); ++slot) {
        emitter_->begin_step(1);
        PARAMWIRE_TRY(graph, compute_.capture([&] { return emit(i, set, slot); }));
        PARAMWIRE_CHECK(compute_.upload(graph));
        graphs_[i][set][slot] = std::move(graph);
      }
    }
  }
  return {};
}

// The first kernel and the last of a step look at the generation of the weights that stay.
Status CudaSession::emit(std::size_t index, unsigned set, unsigned slot) {
  const cuda::GenerationArgs generation{.number = sets_->number(set), .state = emitter_->step_state()};
  const auto check = [&] { return context_->module->launch(compute_, cuda::Kernel::k_generation, cuda::generation_launch(generation), generation); };
  if (index == 0) PARAMWIRE_CHECK(check());
  const CudaWeights weights{.resident = sets_->address(set), .slot = slots_.address() + slot * walk_.slot_bytes};
  PARAMWIRE_CHECK(emitter_->emit(walk_, walk_.segments[index], weights, compute_));
  if (index + 1 == walk_.segments.size()) PARAMWIRE_CHECK(check());
  return {};
}

CudaSession::~CudaSession() { wait(); }

// For all that was enqueued: it reads host memory and slots.
void CudaSession::wait() noexcept {
  const Current current(*context_->device);
  if (!current.status().ok()) return;
  // What failed is of no interest any more, and streams that were never made wait for nothing.
  if (copy_.handle() != nullptr) static_cast<void>(copy_.synchronize());
  if (compute_.handle() != nullptr) static_cast<void>(compute_.synchronize());
}

// ---------------------------------------------------------------- the step

Status CudaSession::begin(std::span<const Token> tokens) {
  if (running_) return Error(Code::kInvalid, "begin: a step is running; finish() or abandon() it first");
  PARAMWIRE_CHECK(check_step(binding_.graph(), options_, position_, tokens));
  PARAMWIRE_CHECK(context_->device->check_process());
  tokens_.assign(tokens.begin(), tokens.end());
  running_ = true;
  rows_need_ = 0;
  want_rows();
  next_piece_ = 0;
  next_segment_ = 0;
  fresh_pieces_ = false;
  slot_used_ = {};  // whoever ended the last step waited for all of it
  emitter_->begin_step(static_cast<std::uint32_t>(tokens_.size()));
  experts_->begin_step();
  const Current current(*context_->device);
  Status started = current.status();
  if (started.ok()) started = checks_.begin(copy_);
  if (started.ok()) started = sets_->write_number(compute_);
  if (started.ok()) started = advance();
  if (!started.ok()) abandon();
  return started;
}

// The row of its table that the embedding of rows_need_ takes for token `index`.
std::uint64_t CudaSession::table_row(std::size_t index) const noexcept {
  switch (binding_.graph().ops()[binding_.needs()[rows_needs_[rows_need_]].op].rows_by) {
    case RowsBy::kToken: return tokens_[index];
    case RowsBy::kPosition: return position_ + index;
    case RowsBy::kFirst: break;
  }
  return 0;
}

void CudaSession::want_rows() {
  rows_taken_ = 0;
  wanted_rows_.clear();
  if (rows_need_ == rows_needs_.size()) return;
  for (std::size_t i = 0; i < tokens_.size(); ++i) wanted_rows_.push_back(table_row(i));
  std::sort(wanted_rows_.begin(), wanted_rows_.end());
  wanted_rows_.erase(std::unique(wanted_rows_.begin(), wanted_rows_.end()), wanted_rows_.end());
}

// What is pending: embedding rows first, since tokens and positions name them; then pieces in walk order, without those that are there. Experts
// come between (advance()).
void CudaSession::await() {
  if (rows_need_ < rows_needs_.size()) {
    waiting_ = true;
    pending_ = {.need = rows_needs_[rows_need_], .next_row = wanted_rows_[rows_taken_], .rows = std::span<const std::uint64_t>(wanted_rows_).subspan(rows_taken_)};
    return;
  }
  while (next_piece_ < walk_.pieces.size() && sets_->there(next_piece_)) ++next_piece_;
  waiting_ = next_piece_ < walk_.pieces.size();
  if (!waiting_) return;
  const PieceLayout& layout = walk_.pieces[next_piece_].layout;
  pending_ = {.need = layout.need, .next_row = layout.row_begin, .rows = {}};
}

Status CudaSession::supply(const WeightView& view) {
  if (!waiting_) {
    return Error(Code::kInvalid, cat("supply of tensor '", view.tensor, "': nothing is pending; ", running_ ? "finish() the step" : "begin() a step first"));
  }
  PARAMWIRE_CHECK(check_view(binding_, pending_, view));
  const Current current(*context_->device);
  PARAMWIRE_CHECK(current.status());
  if (pending_.rows.empty()) {
    PARAMWIRE_CHECK(supply_piece(view));
  } else {
    if (!view.checks.empty() || !view.planes.empty()) {
      return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': rows by data come summed and whole; given ", view.checks.size(), " checks, ", view.planes.size(), " parts in planes"));
    }
    PARAMWIRE_CHECK(rows_need_ < rows_needs_.size() ? supply_rows(view) : supply_experts(view));
  }
  return advance();
}

// Rows are few: they are gathered here, so that the view is free at once, and go to the device with the step's state.
Status CudaSession::supply_rows(const WeightView& view) {
  const std::uint64_t row_bytes = binding_.needs()[pending_.need].row_bytes;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < rows_need_; ++i) at += options_.step_tokens * binding_.needs()[rows_needs_[i]].row_bytes;
  for (; rows_taken_ < wanted_rows_.size() && wanted_rows_[rows_taken_] < view.row_end; ++rows_taken_) {
    std::memcpy(rows_.data() + at + rows_taken_ * row_bytes, view.data.data() + (wanted_rows_[rows_taken_] - view.row_begin) * row_bytes, static_cast<std::size_t>(row_bytes));
  }
  if (rows_taken_ < wanted_rows_.size()) return {};
  PARAMWIRE_CHECK(compute_.to_device(emitter_->rows(pending_.need), rows_.span().subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(rows_taken_ * row_bytes))));
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const auto row = std::lower_bound(wanted_rows_.begin(), wanted_rows_.end(), table_row(i));
    const auto index = static_cast<std::uint32_t>(row - wanted_rows_.begin());
    std::memcpy(upload_.data() + sizeof(cuda::StepState) + 4 * (rows_need_ * options_.step_tokens + i), &index, sizeof index);
  }
  ++rows_need_;
  want_rows();
  if (rows_need_ < rows_needs_.size()) return {};
  // Position and rows, where the kernels of every segment read them.
  const cuda::StepState state{.position = static_cast<std::uint32_t>(position_), .tokens = static_cast<std::uint32_t>(tokens_.size()), .generation = sets_->generation(), .met = cuda::kNoGeneration};
  std::memcpy(upload_.data(), &state, sizeof state);
  return compute_.to_device(emitter_->state(), upload_.span());
}

// Copied from where they lie, as pieces are.
Status CudaSession::supply_experts(const WeightView& view) {
  if (supplied_ - released_ == kInFlight) PARAMWIRE_CHECK(release(released_ + 1));
  PARAMWIRE_CHECK(experts_->take(view, *emitter_, copy_, compute_));
  PARAMWIRE_CHECK(copy_.record(copied_[supplied_ % kInFlight]));
  ++supplied_;
  if (experts_->wanted().empty()) ++next_segment_;
  return {};
}

Status CudaSession::supply_piece(const WeightView& view) {
  const CudaPiece& piece = walk_.pieces[next_piece_];
  if (view.row_end != piece.layout.row_end) {
    return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': given rows [", view.row_begin, ", ", view.row_end, "), expected the piece to ", piece.layout.row_end));
  }
  if (supplied_ - released_ == kInFlight) PARAMWIRE_CHECK(release(released_ + 1));
  CUdeviceptr at = sets_->address(sets_->current()) + piece.offset;
  if (!piece.layout.resident) {
    if (piece.offset == 0) {  // begins its window
      slot_ = static_cast<unsigned>(windows_begun_++ % 2);
      if (slot_used_[slot_]) PARAMWIRE_CHECK(copy_.wait(computed_[slot_]));
    }
    at = slots_.address() + slot_ * walk_.slot_bytes + piece.offset;
  }
  PARAMWIRE_CHECK(planes_.copy(copy_, view, at, supplied_));
  PARAMWIRE_CHECK(checks_.enqueue(copy_, view, at, next_piece_, supplied_));
  PARAMWIRE_CHECK(copy_.record(copied_[supplied_ % kInFlight]));
  ++supplied_;
  fresh_pieces_ = true;
  if (piece.layout.resident) sets_->set_there(next_piece_, true);
  ++next_piece_;
  return {};
}

// What the kernels found of the step's weights; after its end.
Status CudaSession::verdict() {
  Status verdict = checks_.verdict(binding_, walk_, "this step's weights");
  if (!verdict.ok()) {
    checks_.for_each_piece([&](std::size_t piece) { sets_->set_there(piece, false); });  // what stays is asked for again
    return verdict;
  }
  std::uint32_t met = 0;
  std::memcpy(&met, met_.data(), sizeof met);
  if (met == cuda::kNoGeneration) return {};
  return Error(Code::kInternal, cat(context_->device->label(), ": a step over generation ", sets_->generation(), " of the weights met generation ", met,
                                    " (0: they were being replaced); report this as a bug"));
}

// Launches every segment whose pieces have all been supplied, up to one that reads experts.
Status CudaSession::advance() {
  await();
  if (rows_need_ < rows_needs_.size()) return {};
  for (; next_segment_ < walk_.segments.size(); ++next_segment_) {
    const CudaSegment& segment = walk_.segments[next_segment_];
    if (segment.reads_experts()) return await_experts(segment.experts);
    if (waiting_ && next_piece_ < segment.piece_end) return {};
    PARAMWIRE_CHECK(run_segment(segment));
  }
  return {};
}

// All segments before it have been launched, the router among them.
Status CudaSession::await_experts(std::size_t need) {
  if (experts_->need() != need) {
    PARAMWIRE_TRY(waited, experts_->begin(need, *emitter_, compute_));
    if (waited) slot_used_ = {};
  }
  waiting_ = true;
  pending_ = {.need = need, .next_row = experts_->wanted().front(), .rows = experts_->wanted()};
  return {};
}

Status CudaSession::run_segment(const CudaSegment& segment) {
  if (fresh_pieces_) {
    PARAMWIRE_CHECK(copy_.record(arrived_));
    PARAMWIRE_CHECK(compute_.wait(arrived_));
    fresh_pieces_ = false;
  }
  const unsigned slot = segment.streams ? slot_ : 0;
  if (tokens_.size() == 1) {
    PARAMWIRE_CHECK(compute_.launch(graphs_[next_segment_][sets_->current()][slot]));
  } else {
    PARAMWIRE_CHECK(emit(next_segment_, sets_->current(), slot));
  }
  if (!segment.streams) return {};
  slot_used_[slot] = true;
  return compute_.record(computed_[slot]);
}

std::uint64_t CudaSession::released() {
  while (released_ < supplied_) {
    const auto done = copied_[released_ % kInFlight].done();
    if (!done.ok() || !*done) break;  // a failed device is told by release() or finish()
    ++released_;
  }
  return released_;
}

Status CudaSession::release(std::uint64_t count) {
  if (count > supplied_) return Error(Code::kInvalid, cat("release of ", count, " views, of ", supplied_, " supplied"));
  if (count <= released_) return {};
  PARAMWIRE_CHECK(copied_[(count - 1) % kInFlight].synchronize());
  released_ = count;
  return {};
}

Result<std::span<const float>> CudaSession::finish() {
  if (!running_) return Error(Code::kInvalid, "finish: no step is running; begin() one first");
  if (waiting_) {
    return Error(Code::kInvalid, cat("finish: tensor '", binding_.needs()[pending_.need].tensor, "' is still pending from row ", pending_.next_row, " on; supply() it"));
  }
  const Current current(*context_->device);
  PARAMWIRE_CHECK(current.status());
  PARAMWIRE_CHECK(compute_.to_host(logits_.span(), emitter_->output()));
  PARAMWIRE_CHECK(compute_.to_host(met_.span(), emitter_->state() + offsetof(cuda::StepState, met)));
  PARAMWIRE_CHECK(checks_.read(compute_));
  PARAMWIRE_CHECK(compute_.record(done_));
  PARAMWIRE_CHECK(done_.synchronize());
  running_ = false;
  PARAMWIRE_CHECK(verdict());
  position_ += tokens_.size();
  return std::span<const float>(reinterpret_cast<const float*>(logits_.data()), static_cast<std::size_t>(binding_.output_width()));
}

void CudaSession::abandon() noexcept {
  // Keys and values of the step lie behind position_: the next step overwrites them before it reads them.
  if (running_) wait();
  running_ = false;
  waiting_ = false;
}

Status CudaSession::renew(std::span<const std::size_t> pieces) {
  if (running_) return Error(Code::kInvalid, "renew: a step is running; finish() or abandon() it first");
  return sets_->renew(pieces);
}

Status CudaSession::swap() {
  if (running_) return Error(Code::kInvalid, "swap: a step is running; finish() or abandon() it first");
  return sets_->swap();
}

Status CudaSession::rewind(std::uint64_t position) {
  if (running_) return Error(Code::kInvalid, "rewind: a step is running; finish() or abandon() it first");
  if (position > position_) return Error(Code::kInvalid, cat("rewind to ", position, ", expected at most the position ", position_));
  position_ = position;
  return {};
}

}  // namespace paramwire
