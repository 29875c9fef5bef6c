#include "paramwire/engine/engine.hpp"

#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/thread.hpp"
#include "paramwire/client/encoded_reads.hpp"
#include "paramwire/engine/streaming_engine.hpp"

#include <algorithm>
#include <sched.h>
#include <utility>

namespace paramwire {

namespace {

// Rows by data are fetched in batches of at most this many bytes, taken out of the budget: 64 embedding rows of 4 KiB hide a
// round trip, and a prompt rarely has more distinct tokens in one step. Longer rows (experts, of MiBs) come in twos: that hides
// the round trip, and more would take memory from what stays.
constexpr std::uint64_t kRowsBytes = StreamingEngine::kRowsBytes;
// Copies need a second transfer on its way while one is being received and checked; views have no transfer to hide.
constexpr unsigned kCopyThreads = 2;

double seconds(Micros span) { return static_cast<double>(span) / static_cast<double>(kMicrosPerSecond); }

// Cores that this process may run on (sched_getaffinity(2)).
std::uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<std::uint32_t>(std::max(1, CPU_COUNT(&set)));
}

// What the needs take whose rows the step's data choose.
struct RowsPlan {
  std::string tensor;             // with the longest row
  std::uint64_t longest = 0;      // bytes of it: the least that works
  std::uint64_t wanted = 0;       // bytes of the best batch
  std::uint64_t encoded_max = 0;  // bytes of the longest row that is stored encoded

  void add(const Need& need, bool encoded) {
    if (need.row_bytes > longest) {
      longest = need.row_bytes;
      tensor = need.tensor;
    }
    wanted = std::max(wanted, std::min(std::max(kRowsBytes, 2 * need.row_bytes), need.bytes()));
    if (encoded) encoded_max = std::max(encoded_max, need.row_bytes);
  }
  // Bytes of a batch when `room` are free. Of long rows: whole ones.
  std::uint64_t batch(std::uint64_t room) const {
    const std::uint64_t bytes = std::max(longest, std::min(wanted, room));
    return longest > kRowsBytes ? bytes - bytes % longest : bytes;
  }
};

}  // namespace

StreamingEngine::~StreamingEngine() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  session_.reset();  // before the memory that it copies from
}

Status StreamingEngine::open(std::shared_ptr<Snapshot> snapshot, const Graph& graph, const EngineOptions& options) {
  options_ = options;
  if (options_.versions < 1 || options_.versions > 2) return Error(Code::kInvalid, cat("versions is ", options_.versions, ", expected 1 or 2"));
  snapshot_ = std::move(snapshot);
  trace_ = snapshot_->client_options().trace.get();
  PARAMWIRE_CHECK(bind(graph));
  if (options_.open_backend != nullptr) {
    backend_ = options_.open_backend;
  } else if (options_.backend != "cpu") {  // whose threads follow from the plan
    PARAMWIRE_TRY(backend, open_backend(options_.backend, options_.backend_options));
    backend_ = std::move(backend);
  }
  device_ = backend_ != nullptr && backend_->own_memory();
  PARAMWIRE_CHECK(plan());
  PARAMWIRE_CHECK(open_session());
  PARAMWIRE_CHECK(choose_source());
  PARAMWIRE_CHECK(open_window());
  if (plan_.pieces.empty()) return {};
  for (unsigned i = 0; i < (views_ ? 1 : kCopyThreads); ++i) {
    PARAMWIRE_TRY(thread, start_thread("pw-prefetch", [this] { prefetch(); }));
    threads_.push_back(std::move(thread));
  }
  return {};
}

Status StreamingEngine::open_window() {
  const std::size_t count = plan_.pieces.size();
  resident_.resize(count);
  other_.resize(count);
  for (Identities& held : held_) held.resize(count);
  PARAMWIRE_TRY(identities, identities_of(*snapshot_));
  identities_ = std::move(identities);
  new_window({});
  if (device_) {
    PARAMWIRE_TRY(staging, backend_->allocate_staging(window_->ring_bytes()));
    staging_ = std::move(staging);
    ring_bytes_ = staging_->span();
    return open_beside();
  }
  if (views_ || window_->ring_bytes() == 0) return {};
  PARAMWIRE_TRY(ring, Buffer::allocate(static_cast<std::size_t>(window_->ring_bytes())));
  ring_ = std::move(ring);
  ring_bytes_ = ring_.span();
  return {};
}

void StreamingEngine::new_window(std::vector<bool> there) {
  if (window_ != nullptr) held_bytes_max_ = std::max(held_bytes_max_, window_->held_bytes_max());
  if (!device_) {
    window_ = std::make_unique<WalkWindow>(plan_, std::move(there));
    return;
  }
  std::uint64_t largest = 0;
  for (const Piece& piece : plan_.pieces) largest = std::max(largest, piece.bytes);
  window_ = std::make_unique<WalkWindow>(plan_, std::max(options_.staging_bytes, 2 * (largest + 64)), std::move(there));
}

Status StreamingEngine::bind(const Graph& graph) {
  std::vector<TensorInfo> tensors;
  for (const Parameter& parameter : graph.parameters()) {
    const auto entry = snapshot_->find(parameter.name);
    if (!entry.ok() && entry.error().code() != Code::kNotFound) return entry.error();
    if (entry.ok()) tensors.push_back({parameter.name, entry->dtype, entry->shape});
  }
  PARAMWIRE_TRY(binding, graph.bind(tensors));
  binding_ = std::make_unique<Binding>(std::move(binding));
  return {};
}

Status StreamingEngine::open_session() {
  if (backend_ == nullptr) {
    BackendOptions backend_options = options_.backend_options;
    if (backend_options.threads == 0) {
      const std::uint32_t cores = usable_cores();
      backend_options.threads = plan_.window_bytes > 0 && cores > 1 ? cores - 1 : cores;
    }
    PARAMWIRE_TRY(backend, open_backend(options_.backend, backend_options));
    backend_ = std::move(backend);
    stats_.threads = backend_options.threads;
  }
  SessionOptions session_options = options_.session;
  if (device_) {
    for (const Piece& piece : plan_.pieces) session_options.pieces.push_back({walk_needs_[piece.need], piece.row_begin, piece.row_end, piece.resident});
    session_options.window_bytes = plan_.window_bytes;
    session_options.resident_sets = options_.versions;
    for (const Piece& piece : plan_.pieces) {
      if (walk_encoded_) planes_bytes_ = std::max(planes_bytes_, piece.bytes);
    }
    session_options.planes_bytes = planes_bytes_;
    session_options.rows_bytes = rows_bytes_;
  }
  PARAMWIRE_TRY(session, backend_->open_session(*binding_, session_options));
  session_ = std::move(session);
  return {};
}

Status StreamingEngine::plan() {
  std::vector<WalkNeed> walk;
  RowsPlan rows;
  for (std::uint32_t i = 0; i < binding_->needs().size(); ++i) {
    const Need& need = binding_->needs()[i];
    PARAMWIRE_TRY(tensor, snapshot_->find(need.tensor));
    const bool encoded = tensor.codec != CodecId::kRaw;
    if (need.access == Access::kRowsByData) {
      rows.add(need, encoded);
      picks_experts_ |= is_expert(binding_->graph().ops()[need.op].kind);
      continue;
    }
    PARAMWIRE_TRY(cuts, snapshot_->row_cuts(need.tensor));
    walk_encoded_ |= encoded;
    const bool vector = binding_->graph().parameters()[need.parameter].shape.rank() == 1;
    cuts_.push_back(cuts);
    walk.push_back({need.tensor, need.rows, need.row_bytes, std::move(cuts), device_ && vector});
    walk_needs_.push_back(i);
  }
  PlanOptions options;
  // Embedding rows are decoded in what two walking fetches leave of theirs; an expert is a fetch of its own size.
  if (device_) {
    // Of the device's memory: what planes pass through, once for each set of what stays. The host decodes outside of the budget.
    for (const WalkNeed& need : walk) {
      const std::uint64_t piece = std::min(std::max(options.piece_bytes, need.row_bytes), need.rows * need.row_bytes);
      if (walk_encoded_) decoding_ = std::max(decoding_, options_.versions * piece);
    }
  } else {
    if (walk_encoded_) decoding_ = kCopyThreads * kDecodeBytes;
    if (rows.encoded_max > (walk_encoded_ ? kRowsBytes : 0)) decoding_ += kDecodeBytes;
  }
  options.resident_copies = options_.versions;
  const std::uint64_t walk_min = walk_budget_min(walk, options_.versions) + decoding_;
  if (options_.budget_bytes == 0) {
    rows_bytes_ = rows.batch(rows.wanted);
    std::uint64_t total = 0;
    for (const WalkNeed& need : walk) total += need.rows * need.row_bytes;
    options.budget_bytes = std::max(total * 2 * options_.versions, walk_min);
  } else if (options_.budget_bytes < rows.longest + walk_min) {
    return Error(Code::kInvalid, cat("a budget of ", options_.budget_bytes, " bytes does not hold two of the longest rows that this model streams and a row of ",
                                     rows.longest, " bytes of \"", rows.tensor, "\"", decoding_ > 0 ? ", beside what decodes them" : "", ": at least ",
                                     rows.longest + walk_min, " are needed"));
  } else {
    // Under a tight budget the batch of rows shrinks, not the pieces of the walk.
    rows_bytes_ = rows.batch((options_.budget_bytes - walk_min) / 2);
    options.budget_bytes = options_.budget_bytes - rows_bytes_ - decoding_;
  }
  if (device_) options.cut_bytes = kExtentBytes;
  PARAMWIRE_TRY(planned, plan_walk(walk, options));
  plan_ = std::move(planned);
  if (rows_bytes_ == 0) return {};
  if (device_) {
    PARAMWIRE_TRY(staging, backend_->allocate_staging(rows_bytes_));
    rows_staging_ = std::move(staging);
    rows_ = rows_staging_->span();
    return {};
  }
  PARAMWIRE_TRY(buffer, Buffer::allocate(static_cast<std::size_t>(rows_bytes_)));
  rows_buffer_ = std::move(buffer);
  rows_ = rows_buffer_.span();
  return {};
}

// Views are tried on the first piece: whether a transport gives them is its own answer.
Status StreamingEngine::choose_source() {
  if (options_.source == EngineOptions::Source::kCopy || plan_.pieces.empty()) return {};
  if (device_) {
    if (options_.source != EngineOptions::Source::kView) return {};
    return Error(Code::kUnavailable, "views lie in memory that is not page-locked, and a device copies from memory that is: take source \"copy\" or \"auto\"");
  }
  if (walk_encoded_) {
    if (options_.source != EngineOptions::Source::kView) return {};
    return Error(Code::kUnavailable, "this model is stored encoded, and views show stored bytes: take source \"copy\" or \"auto\"");
  }
  const Piece& piece = plan_.pieces.front();
  auto view = snapshot_->view(need_of(piece).tensor, part_of(need_of(piece), piece));
  if (view.ok()) {
    views_ = true;
    return {};
  }
  if (options_.source == EngineOptions::Source::kView || view.error().code() != Code::kUnavailable) return std::move(view).error();
  return {};
}

void StreamingEngine::fetch_piece(Snapshot& snapshot, const Piece& piece, std::span<std::byte> target, Arrival& arrival) const {
  const TraceSpan span(trace_, "piece", piece.bytes);
  const Need& need = need_of(piece);
  const Shard part = part_of(need, piece);
  if (views_) {
    auto view = snapshot.view(need.tensor, part);
    if (!view.ok()) {
      arrival.status = std::move(view).error();
      return;
    }
    arrival.view = std::move(*view);
    arrival.bytes = arrival.view.bytes();
    return;
  }
  if (piece.resident && !device_) {
    if (arrival.own.size() == 0) {
      auto own = Buffer::allocate(static_cast<std::size_t>(piece.bytes));
      if (!own.ok()) {
        arrival.status = std::move(own).error();
        return;
      }
      arrival.own = std::move(*own);
    }
    target = arrival.own.span();
  }
  FetchRequest request;
  request.tensor = need.tensor;
  request.part = part;
  request.target = target;
  if (device_) {
    request.checks = &arrival.checks;
    request.planes = &arrival.planes;
  }
  arrival.status = snapshot.fetch(std::span(&request, 1), CallOptions{options_.fetch_timeout});
  arrival.bytes = target;
}

WeightView StreamingEngine::weight_view(const Piece& piece, const Arrival& arrival) const {
  const Need& need = need_of(piece);
  WeightView view;
  view.tensor = need.tensor;
  view.dtype = need.dtype;
  view.row_begin = piece.row_begin;
  view.row_end = piece.row_end;
  view.data = arrival.bytes;
  view.checks = arrival.checks;
  view.planes = arrival.planes;
  return view;
}

// Releases the views that were computed with; the lock is open meanwhile. Views have one prefetch thread, so pieces are
// finished in walk order.
void StreamingEngine::let_go(std::unique_lock<std::mutex>& lock) {
  auto retired = std::move(retired_);
  retired_.clear();
  retired_bytes_ = 0;
  lock.unlock();
  std::vector<BlockView> views;
  for (auto& node : retired) views.push_back(std::move(node.mapped().view));
  release_views(views);
  lock.lock();
  for (const auto& node : retired) window_->finish(node.key());
}

void StreamingEngine::prefetch() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::optional<WalkWindow::Start> start;
    // Views are given up half a window at a time, or when nothing else is left to compute with.
    const auto must_let_go = [&] { return retired_bytes_ > 0 && (2 * retired_bytes_ >= window_->ring_bytes() || arrivals_.empty()); };
    changed_.wait(lock, [&] { return stop_ || (!paused_ && !walk_failed_ && (must_let_go() || (start = window_->start()).has_value())); });
    if (stop_) return;
    ++fetching_;
    if (!start) {
      let_go(lock);
      --fetching_;
      changed_.notify_all();
      continue;
    }
    const Piece& piece = window_->piece(start->position);
    Arrival& arrival = piece.resident && !device_ ? resident_[start->position % plan_.pieces.size()] : arrivals_[start->position];
    lock.unlock();
    const Micros began = steady_clock().now();
    std::span<std::byte> target;
    if (!views_ && (device_ || !piece.resident)) target = ring_bytes_.subspan(static_cast<std::size_t>(start->ring_offset), static_cast<std::size_t>(piece.bytes));
    fetch_piece(*snapshot_, piece, target, arrival);
    const Micros spent = steady_clock().now() - began;
    lock.lock();
    arrival.ready = true;
    stats_.fetch_seconds += seconds(spent);
    stats_.bytes_fetched += piece.bytes;
    ++stats_.pieces_fetched;
    if (!arrival.status.ok()) walk_failed_ = true;  // the walk is over: step() finds the error at this piece
    --fetching_;
    changed_.notify_all();
  }
}

Result<const Arrival*> StreamingEngine::await(std::uint64_t position) {
  const std::size_t index = position % plan_.pieces.size();
  const auto find = [&]() -> const Arrival* {
    if (plan_.pieces[index].resident && !device_) return resident_[index].ready ? &resident_[index] : nullptr;
    const auto it = arrivals_.find(position);
    return it != arrivals_.end() && it->second.ready ? &it->second : nullptr;
  };
  std::unique_lock lock(mutex_);
  const Arrival* arrival = find();
  // A piece that nobody has begun to fetch may want room in the ring that is still being copied from.
  while (arrival == nullptr && !walk_failed_ && !on_its_way_.empty() && !arrivals_.contains(position)) {
    lock.unlock();
    PARAMWIRE_CHECK(retire_one());
    lock.lock();
    arrival = find();
  }
  if (arrival == nullptr) {
    const TraceSpan span(trace_, "stall");
    const Micros began = steady_clock().now();
    const auto limit = std::chrono::microseconds(options_.fetch_timeout);
    changed_.wait_for(lock, limit, [&] { return (arrival = find()) != nullptr || walk_failed_; });
    stats_.stall_seconds += seconds(steady_clock().now() - began);
  }
  if (arrival == nullptr) {
    // Stopped by a failure: at another piece of the walk, which is the cause to report.
    for (const auto& [at, other] : arrivals_) {
      if (other.ready && !other.status.ok()) return other.status.error();
    }
    for (const Arrival& other : resident_) {
      if (other.ready && !other.status.ok()) return other.status.error();
    }
    const Need& need = binding_->needs()[walk_needs_[plan_.pieces[index].need]];
    return Error(Code::kTimeout, cat("rows ", plan_.pieces[index].row_begin, " to ", plan_.pieces[index].row_end, " of \"", need.tensor,
                                     "\" did not arrive within ", options_.fetch_timeout / 1000, " ms"));
  }
  if (!arrival->status.ok()) return arrival->status.error();
  return arrival;
}

// Gives the ring the room of what the device has copied.
void StreamingEngine::retire() {
  const std::uint64_t released = session_->released();
  {
    const std::lock_guard lock(mutex_);
    for (; !on_its_way_.empty() && on_its_way_.front().supplied <= released; on_its_way_.pop_front()) {
      arrivals_.erase(on_its_way_.front().position);
      window_->finish(on_its_way_.front().position);
    }
  }
  changed_.notify_all();
}

Status StreamingEngine::retire_one() {
  PARAMWIRE_CHECK(session_->release(on_its_way_.front().supplied));
  retire();
  return {};
}

Status StreamingEngine::supply_piece(const Pending& pending) {
  while (device_ && !window_->given(at_)) ++at_;  // the device has it
  const Piece& piece = window_->piece(at_);
  if (walk_needs_[piece.need] != pending.need || piece.row_begin != pending.next_row) {
    return Error(Code::kInternal, cat("the walk is at rows ", piece.row_begin, " of need ", walk_needs_[piece.need], ", the session at row ",
                                      pending.next_row, " of need ", pending.need));
  }
  PARAMWIRE_TRY(arrival, await(at_));
  const WeightView view = weight_view(piece, *arrival);
  const Micros began = steady_clock().now();
  const Status supplied = [&] {
    const TraceSpan span(trace_, "compute", piece.bytes);
    return session_->supply(view);
  }();
  const Micros spent = steady_clock().now() - began;
  {
    const std::lock_guard lock(mutex_);
    stats_.compute_seconds += seconds(spent);
    if (device_) {
      on_its_way_.push_back({at_, session_->supplied()});
    } else if (piece.resident || !views_) {
      if (!piece.resident) arrivals_.erase(at_);
      window_->finish(at_);
    } else {
      // Giving up a view's pages costs system calls: the prefetch thread does it, and only then counts its bytes as free.
      retired_.push_back(arrivals_.extract(at_));
      retired_bytes_ += piece.bytes;
    }
  }
  if (device_) retire();
  changed_.notify_all();
  ++at_;
  return supplied;
}

Status StreamingEngine::supply_rows(const Pending& pending, const Need& need) {
  // The session wants rows in ascending order; a batch of single rows is one pipelined fetch.
  const auto row_bytes = static_cast<std::size_t>(need.row_bytes);
  const std::size_t batch = std::min<std::size_t>(pending.rows.size(), static_cast<std::size_t>(rows_bytes_) / row_bytes);
  const std::vector<std::uint64_t> rows(pending.rows.begin(), pending.rows.begin() + static_cast<std::ptrdiff_t>(batch));
  std::vector<FetchRequest> requests(batch);
  for (std::size_t i = 0; i < batch; ++i) {
    requests[i].tensor = need.tensor;
    requests[i].part = Shard::rows(rows[i], rows[i] + 1);
    requests[i].target = rows_.subspan(i * row_bytes, row_bytes);
  }
  PARAMWIRE_CHECK(session_->release(rows_supplied_));  // the batch before is on the device
  const Micros began = steady_clock().now();
  PARAMWIRE_CHECK(snapshot_->fetch(requests, CallOptions{options_.fetch_timeout}));
  const Micros arrived = steady_clock().now();
  {
    const TraceSpan span(trace_, "compute", batch * need.row_bytes);
    for (std::size_t i = 0; i < batch; ++i) {
      WeightView view;
      view.tensor = need.tensor;
      view.dtype = need.dtype;
      view.row_begin = rows[i];
      view.row_end = rows[i] + 1;
      view.data = requests[i].target;
      PARAMWIRE_CHECK(session_->supply(view));
    }
  }
  rows_supplied_ = session_->supplied();
  const std::lock_guard lock(mutex_);
  stats_.stall_seconds += seconds(arrived - began);
  stats_.compute_seconds += seconds(steady_clock().now() - arrived);
  stats_.bytes_fetched += batch * need.row_bytes;
  return {};
}

Status StreamingEngine::run_step(std::span<const Token>) {
  while (const Pending* pending = session_->pending()) {
    const Need& need = binding_->needs()[pending->need];
    PARAMWIRE_CHECK(need.access == Access::kRowsByData ? supply_rows(*pending, need) : supply_piece(*pending));
  }
  return {};
}

Result<std::span<const float>> StreamingEngine::step(std::span<const Token> tokens) {
  if (failed_) return *failed_;
  const TraceSpan span(trace_, "step");
  PARAMWIRE_CHECK(session_->begin(tokens));  // a refused step leaves everything as it was
  if (Status run = run_step(tokens); !run.ok()) {
    // Half a walk is behind us and its pieces are gone: go on only from adopt().
    failed_ = run.error();
    set_held(false);
    session_->abandon();
    return std::move(run).error();
  }
  {
    const std::lock_guard lock(mutex_);
    ++stats_.steps;
    stats_.tokens += tokens.size();
  }
  auto logits = session_->finish();
  if (!logits.ok()) {
    failed_ = logits.error();
    session_->abandon();
  }
  set_held(logits.ok());
  if (device_ && logits.ok()) retire();  // every copy is done
  return logits;
}

EngineStats StreamingEngine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats out = stats_;
  out.held_bytes_max = std::max(held_bytes_max_, window_->held_bytes_max()) + (options_.versions - 1) * plan_.resident_bytes + rows_bytes_ + snapshot_->decode_memory_bytes();
  out.budget_bytes = options_.budget_bytes;
  out.walk_bytes = plan_.walk_bytes;
  out.resident_bytes = plan_.resident_bytes;
  out.source = views_ ? "view" : "copy";
  if (device_) {
    // What a device holds is fixed: pieces that stay, the slots of those that stream, and room for experts.
    out.held_bytes_max = options_.versions * (plan_.resident_bytes + planes_bytes_) + plan_.window_bytes + (picks_experts_ ? rows_bytes_ : 0);
    out.staging_bytes = window_->ring_bytes() + rows_.size() + (beside_ != nullptr ? beside_->span().size() : 0);
  }
  return out;
}

std::string StreamingEngine::description() const {
  return cat(backend_->description(), "; ", views_ ? "views" : "copies", " of ", plan_.pieces.size(), " pieces, ", human_bytes(plan_.resident_bytes),
             " of ", human_bytes(plan_.walk_bytes), " resident", options_.versions > 1 ? ", twice" : "", ", window ", human_bytes(plan_.window_bytes));
}

namespace {

// In the child of a fork an engine's threads are not there, and its locks are as they were: it is left alone, and left behind.
class GuardedEngine final : public Engine {
 public:
  explicit GuardedEngine(std::unique_ptr<StreamingEngine> engine) : engine_(std::move(engine)) {}
  ~GuardedEngine() override {
    if (fork_.in_child()) static_cast<void>(engine_.release());
  }
  Result<std::span<const float>> step(std::span<const Token> tokens) override {
    PARAMWIRE_CHECK(fork_.check("engine"));
    return engine_->step(tokens);
  }
  Status rewind(std::uint64_t position) override {
    PARAMWIRE_CHECK(fork_.check("engine"));
    return engine_->rewind(position);
  }
  Status adopt(std::shared_ptr<Snapshot> next) override {
    PARAMWIRE_CHECK(fork_.check("engine"));
    return engine_->adopt(std::move(next));
  }
  Status prepare(std::shared_ptr<Snapshot> next) override {
    PARAMWIRE_CHECK(fork_.check("engine"));
    return engine_->prepare(std::move(next));
  }
  std::uint64_t position() const override { return engine_->position(); }
  EngineStats stats() const override { return fork_.in_child() ? EngineStats() : engine_->stats(); }
  const Snapshot& snapshot() const override { return engine_->snapshot(); }
  std::string description() const override { return engine_->description(); }

 private:
  const ForkGuard fork_;
  std::unique_ptr<StreamingEngine> engine_;
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::open(std::shared_ptr<Snapshot> snapshot, const Graph& graph, const EngineOptions& options) {
  auto engine = std::make_unique<StreamingEngine>();
  PARAMWIRE_CHECK(engine->open(std::move(snapshot), graph, options));
  return std::unique_ptr<Engine>(std::make_unique<GuardedEngine>(std::move(engine)));
}

}  // namespace paramwire
