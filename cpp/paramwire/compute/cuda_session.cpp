#include "paramwire/compute/cuda_session.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
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
  there_.assign(walk_.pieces.size(), false);
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
  PARAMWIRE_TRY(resident, cuda::DeviceMemory::allocate(device, walk_.resident_bytes, "weights that stay"));
  resident_ = std::move(resident);
  PARAMWIRE_TRY(slots, cuda::DeviceMemory::allocate(device, 2 * walk_.slot_bytes, "the slots of weights that stream"));
  slots_ = std::move(slots);
  emitter_ = std::make_unique<CudaEmitter>(device, context_->module, std::move(blas), binding_, options_);
  PARAMWIRE_CHECK(emitter_->prepare(compute_));

  for (const CudaPiece& piece : walk_.pieces) extents_max_ = std::max(extents_max_, piece.bytes / kExtentBytes + 1);
  PARAMWIRE_TRY(expected, cuda::DeviceMemory::allocate(device, kInFlight * 4 * extents_max_, "expected checksums"));
  expected_ = std::move(expected);
  PARAMWIRE_TRY(verdict, cuda::DeviceMemory::allocate(device, sizeof(cuda::Verdict), "the checks' verdict"));
  verdict_ = std::move(verdict);
  checked_.reserve(walk_.pieces.size());

  std::uint64_t row_bytes = 0;
  for (std::size_t need = 0; need < binding_.needs().size(); ++need) {
    if (binding_.needs()[need].access != Access::kRowsByData) continue;
    rows_needs_.push_back(need);
    row_bytes += options_.step_tokens * binding_.needs()[need].row_bytes;
  }
  const struct {
    cuda::HostMemory* memory;
    std::uint64_t bytes;
  } wanted[] = {{&upload_, emitter_->state_bytes()}, {&rows_, row_bytes}, {&logits_, 4 * binding_.output_width()},
                {&expected_host_, kInFlight * 4 * extents_max_}, {&verdict_host_, sizeof(cuda::Verdict)}};
  for (const auto& each : wanted) {
    PARAMWIRE_TRY(memory, cuda::HostMemory::allocate(device, each.bytes));
    *each.memory = std::move(memory);
  }
  tokens_.reserve(options_.step_tokens);
  wanted_rows_.reserve(options_.step_tokens);
  return {};
}

CudaWeights CudaSession::weights(unsigned slot) const noexcept {
  return {.resident = resident_.address(), .slot = slots_.address() + slot * walk_.slot_bytes};
}

// Every segment, for one token and for each slot that its window may lie in. Nothing is run.
Status CudaSession::capture() {
  graphs_.resize(walk_.segments.size());
  for (std::size_t i = 0; i < walk_.segments.size(); ++i) {
    const CudaSegment& segment = walk_.segments[i];
    if (segment.action_begin == segment.action_end) continue;  // a segment may hold nothing but pieces of vectors
    for (unsigned slot = 0; slot < (segment.streams ? 2U : 1U); ++slot) {
      emitter_->begin_step(1);
      PARAMWIRE_TRY(graph, compute_.capture([&] { return emitter_->emit(walk_, segment, weights(slot), compute_); }));
      graphs_[i][slot] = std::move(graph);
    }
  }
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
  checked_.clear();
  extents_checked_ = 0;
  const Current current(*context_->device);
  Status started = current.status();
  if (started.ok()) started = copy_.fill(verdict_.address(), std::byte{0xff}, verdict_.size());
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

// What is pending: rows first, since tokens and positions name them; then pieces in walk order, without those that are there.
void CudaSession::await() {
  if (rows_need_ < rows_needs_.size()) {
    waiting_ = true;
    pending_ = {.need = rows_needs_[rows_need_], .next_row = wanted_rows_[rows_taken_], .rows = std::span<const std::uint64_t>(wanted_rows_).subspan(rows_taken_)};
    return;
  }
  while (next_piece_ < walk_.pieces.size() && there_[next_piece_]) ++next_piece_;
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
  PARAMWIRE_CHECK(pending_.rows.empty() ? supply_piece(view) : supply_rows(view));
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
  const cuda::StepState state{.position = static_cast<std::uint32_t>(position_), .tokens = static_cast<std::uint32_t>(tokens_.size())};
  std::memcpy(upload_.data(), &state, sizeof state);
  return compute_.to_device(emitter_->state(), upload_.span());
}

Status CudaSession::supply_piece(const WeightView& view) {
  const CudaPiece& piece = walk_.pieces[next_piece_];
  if (view.row_end != piece.layout.row_end) {
    return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': given rows [", view.row_begin, ", ", view.row_end, "), expected the piece to ", piece.layout.row_end));
  }
  if (supplied_ - released_ == kInFlight) PARAMWIRE_CHECK(release(released_ + 1));
  CUdeviceptr at = resident_.address() + piece.offset;
  if (!piece.layout.resident) {
    if (piece.offset == 0) {  // begins its window
      slot_ = static_cast<unsigned>(windows_begun_++ % 2);
      if (slot_used_[slot_]) PARAMWIRE_CHECK(copy_.wait(computed_[slot_]));
    }
    at = slots_.address() + slot_ * walk_.slot_bytes + piece.offset;
  }
  PARAMWIRE_CHECK(copy_.to_device(at, view.data));
  if (!view.checks.empty()) PARAMWIRE_CHECK(check_on_device(view, at));
  PARAMWIRE_CHECK(copy_.record(copied_[supplied_ % kInFlight]));
  ++supplied_;
  fresh_pieces_ = true;
  there_[next_piece_] = piece.layout.resident;
  ++next_piece_;
  return {};
}

// Compares what has been copied to `at` with what it must be, behind the copy.
Status CudaSession::check_on_device(const WeightView& view, CUdeviceptr at) {
  const std::uint64_t begin = view.checks.front().offset;
  for (std::size_t i = 0; i < view.checks.size(); ++i) {
    const ExtentCheck& check = view.checks[i];
    const bool last = i + 1 == view.checks.size();
    if (check.offset != begin + i * kExtentBytes || (last ? check.size == 0 || check.size > kExtentBytes : check.size != kExtentBytes) || check.offset + check.size > view.data.size() ||
        i >= extents_max_) {
      return Error(Code::kInvalid, cat("supply for tensor '", view.tensor, "': check ", i, " is of ", check.size, " bytes at ", check.offset, ", expected extents of ", kExtentBytes,
                                       " one behind the other, within ", view.data.size(), " bytes"));
    }
  }
  const std::uint64_t place = supplied_ % kInFlight * 4 * extents_max_, bytes = 4 * view.checks.size();
  const auto expected = expected_host_.span().subspan(static_cast<std::size_t>(place), static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < view.checks.size(); ++i) std::memcpy(expected.data() + 4 * i, &view.checks[i].crc32c, 4);
  PARAMWIRE_CHECK(copy_.to_device(expected_.address() + place, expected));
  const cuda::Crc32cArgs args{.data = reinterpret_cast<const void*>(at + begin),  // NOLINT: a device address
                              .size = view.checks.back().offset + view.checks.back().size - begin,
                              .expected = expected_.at<const std::uint32_t>(place),
                              .verdict = verdict_.at<cuda::Verdict>(),
                              .extent_bytes = static_cast<std::uint32_t>(kExtentBytes),
                              .first = extents_checked_};
  PARAMWIRE_CHECK(context_->module->launch(copy_, cuda::Kernel::k_crc32c_extents, cuda::crc32c_extents_launch(args), args));
  checked_.push_back({extents_checked_, next_piece_, begin});
  extents_checked_ += static_cast<std::uint32_t>(view.checks.size());
  return {};
}

// What the checks of the step came to; after its end.
Status CudaSession::verdict() {
  cuda::Verdict verdict{};
  std::memcpy(&verdict, verdict_host_.data(), sizeof verdict);
  const std::uint32_t bad = cuda::bad_count(verdict);
  if (bad == 0) return {};
  const auto behind = std::upper_bound(checked_.begin(), checked_.end(), verdict.lowest, [](std::uint32_t lowest, const Checked& each) { return lowest < each.first; });
  const Checked& first = *(behind - 1);
  const PieceLayout& layout = walk_.pieces[first.piece].layout;
  for (const Checked& each : checked_) there_[each.piece] = false;  // what stays is asked for again
  return Error(Code::kCorrupt, cat(context_->device->label(), ": ", bad, " of ", extents_checked_, " extents of this step's weights are not what the server sealed; the first is at byte ",
                                   first.offset + (verdict.lowest - first.first) * kExtentBytes, " of rows ", layout.row_begin, " to ", layout.row_end, " of tensor '",
                                   binding_.needs()[layout.need].tensor, "'. Fetch them again, from another replica if there is one"));
}

// Launches every segment whose pieces have all been supplied.
Status CudaSession::advance() {
  await();
  if (rows_need_ < rows_needs_.size()) return {};
  for (; next_segment_ < walk_.segments.size(); ++next_segment_) {
    const CudaSegment& segment = walk_.segments[next_segment_];
    if (waiting_ && next_piece_ < segment.piece_end) return {};
    PARAMWIRE_CHECK(run_segment(segment));
  }
  return {};
}

Status CudaSession::run_segment(const CudaSegment& segment) {
  if (fresh_pieces_) {
    PARAMWIRE_CHECK(copy_.record(arrived_));
    PARAMWIRE_CHECK(compute_.wait(arrived_));
    fresh_pieces_ = false;
  }
  const unsigned slot = segment.streams ? slot_ : 0;
  if (segment.action_begin != segment.action_end) {
    if (tokens_.size() == 1) {
      PARAMWIRE_CHECK(compute_.launch(graphs_[next_segment_][slot]));
    } else {
      PARAMWIRE_CHECK(emitter_->emit(walk_, segment, weights(slot), compute_));
    }
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
  PARAMWIRE_CHECK(compute_.to_host(verdict_host_.span(), verdict_.address()));
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

Status CudaSession::rewind(std::uint64_t position) {
  if (running_) return Error(Code::kInvalid, "rewind: a step is running; finish() or abandon() it first");
  if (position > position_) return Error(Code::kInvalid, cat("rewind to ", position, ", expected at most the position ", position_));
  position_ = position;
  return {};
}

}  // namespace paramwire
