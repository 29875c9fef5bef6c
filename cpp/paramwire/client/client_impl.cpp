#include "paramwire/client/client_impl.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/thread.hpp"
#include "paramwire/net/block_read.hpp"
#include "paramwire/wire/message.hpp"

#include <algorithm>
#include <cassert>
#include <chrono>

namespace paramwire {

namespace {

// A lease is renewed when a third of its time is over: two renewals may be lost before it ends.
constexpr Micros kRenewParts = 3;
// close() waits for the server no longer than this: leases end by themselves.
constexpr Micros kGoodbye = kMicrosPerSecond / 5;

FetchMachine::Event event_of(Code code) {
  switch (code) {
    case Code::kStale: return FetchMachine::Event::kChanged;
    case Code::kCorrupt: return FetchMachine::Event::kCorrupt;
    case Code::kUnreachable: return FetchMachine::Event::kLost;
    default: return FetchMachine::Event::kError;
  }
}

// Of several failures, the one that decides what happens next: a broken link before a change, a change before bad bytes.
int weight(Code code) {
  switch (code) {
    case Code::kUnreachable: return 4;
    case Code::kTimeout: return 3;
    case Code::kStale: return 2;
    case Code::kCorrupt: return 1;
    default: return 5;
  }
}

std::uint64_t bytes_of(std::span<const BlockRead> batch) {
  std::uint64_t bytes = 0;
  for (const BlockRead& item : batch) bytes += item.range.size;
  return bytes;
}

}  // namespace

ClientImpl::ClientImpl(Endpoint endpoint, const ClientOptions& options, Caller caller)
    : endpoint_(std::move(endpoint)), options_(options), caller_(std::move(caller)), trace_(options_.trace.get()),
      paths_(endpoint_, options_, caller_, [this] { return incarnation(); }) {}

Status ClientImpl::check_usable() const {
  PARAMWIRE_CHECK(fork_.check("client"));
  if (closed_) return Error(Code::kInvalid, cat("the client of ", endpoint_.to_string(), " is closed"));
  return {};
}

Micros ClientImpl::deadline(const std::optional<Micros>& timeout) const {
  const Micros now = steady_clock().now();
  const Micros span = timeout.value_or(options_.timeout);
  return span > kNever - now ? kNever : now + span;
}

// ---------------------------------------------------------------- connection

Status ClientImpl::open(Micros until) {
  PARAMWIRE_TRY(control, ControlLink::connect(endpoint_, caller_, until));
  {
    const std::lock_guard lock(mutex_);
    control_ = std::move(control);
    incarnation_ = control_->facts().incarnation;
    counters_.newest = control_->facts().newest;
  }
  return paths_.choose(control_->facts(), until);
}

std::shared_ptr<ControlLink> ClientImpl::control() const {
  const std::lock_guard lock(mutex_);
  return control_;
}

Incarnation ClientImpl::incarnation() const {
  const std::lock_guard lock(mutex_);
  return incarnation_;
}

Result<bool> ClientImpl::reconnect(const std::shared_ptr<ControlLink>& broken, Micros until) {
  const TraceSpan span(trace_, "reconnect");
  {
    std::unique_lock lock(mutex_);
    if (reconnecting_ && reconnecting_in_ == std::this_thread::get_id()) {
      return Error(Code::kInvalid, cat(endpoint_, ": this thread is connecting to it already, inside another call (a signal handler?): use a client of its own here"));
    }
    if (!wait_on(reconnect_turn_, lock, until, [this] { return !reconnecting_; })) {
      return Error(Code::kTimeout, cat(endpoint_, ": another thread was still connecting to it at the deadline"));
    }
    reconnecting_ = true;
    reconnecting_in_ = std::this_thread::get_id();
  }
  auto same = reconnect_alone(broken, until);
  const std::lock_guard lock(mutex_);
  reconnecting_ = false;
  reconnect_turn_.notify_one();
  return same;
}

Result<bool> ClientImpl::reconnect_alone(const std::shared_ptr<ControlLink>& broken, Micros until) {
  const Incarnation before = incarnation();
  if (auto current = control(); current != broken && !current->broken()) return true;  // somebody else was faster
  auto fresh = ControlLink::connect(endpoint_, caller_, until);
  if (!fresh.ok()) return std::move(fresh).error();
  const ServerFacts fresh_facts = (*fresh)->facts();
  const Incarnation now = fresh_facts.incarnation;
  {
    const std::lock_guard lock(mutex_);
    control_ = std::move(*fresh);
    incarnation_ = now;
    ++counters_.reconnects;
    if (now != before) {
      ++counters_.restarts_seen;
      newest_.reset();  // manifests of another incarnation are no base for deltas
    }
  }
  paths_.renew(fresh_facts);
  return now == before;
}

Result<ControlLink::Answer> ClientImpl::call(const std::function<Bytes(std::uint64_t)>& encode, FrameType expected, Micros until) {
  const Stopwatch watch(control_ns_);
  for (;;) {
    auto link = control();
    if (link->broken()) {
      PARAMWIRE_CHECK(reconnect(link, until));
      link = control();
    }
    const std::uint64_t request = link->next_request();
    const Bytes frame = encode(request);
    bool sent = false;
    auto answer = link->call(frame, request, expected, until, &sent);
    // Broken by another thread's call (which was interrupted, say) while this one waited for its turn: nothing was asked yet.
    if (answer.ok() || sent || answer.error().code() != Code::kUnreachable || steady_clock().now() >= until) return answer;
  }
}

// ---------------------------------------------------------------- snapshots

Result<ClientImpl::Opened> ClientImpl::open_snapshot(const std::optional<Version>& want, Micros lease_ttl, Micros wait, Micros until) {
  const Stopwatch watch(snapshot_ns_);
  const TraceSpan traced(trace_, "snapshot");
  std::shared_ptr<const HeldManifest> base;
  {
    const std::lock_guard lock(mutex_);
    base = newest_;
  }
  SnapshotMessage message;
  message.want = want;
  if (base) {
    message.held = base->manifest().version();
    message.held_root = base->manifest().root();
  }
  const auto milliseconds = [](Micros span) { return static_cast<std::uint32_t>(std::clamp<Micros>(span / 1000, 0, 0xffffffff)); };
  message.lease_ttl_ms = milliseconds(lease_ttl);
  message.wait_ms = milliseconds(std::min(wait, until - steady_clock().now()));
  message.locators = paths_.has(Transport::kShm) || paths_.has(Transport::kVerbs);
  const Micros sent = steady_clock().now();
  PARAMWIRE_TRY(answer, call([&](std::uint64_t request) { return message.encode(request); }, FrameType::kManifest, until));
  PARAMWIRE_TRY(head, ManifestMessage::decode(answer.meta));
  if (head.incarnation != incarnation()) return Error(Code::kUnreachable, "the server restarted while a snapshot was opened");
  if (answer.body.size() != head.stream_size + head.locator_count * kLocatorBytes) {
    return Error(Code::kCorrupt, cat("MANIFEST brings ", answer.body.size(), " bytes, its parts are ", head.stream_size, " and ", head.locator_count, " locators"));
  }
  const std::span<const std::byte> body(answer.body);
  std::vector<Locator> locators;
  locators.reserve(static_cast<std::size_t>(head.locator_count));
  for (std::uint64_t i = 0; i < head.locator_count; ++i) {
    const auto at = static_cast<std::size_t>(head.stream_size + i * kLocatorBytes);
    locators.push_back(read_locator(body.subspan(at).first<kLocatorBytes>()));
  }
  const LocatorTable& known = base ? base->locators() : LocatorTable();
  const std::uint32_t first = known.size();
  auto manifest = Manifest::apply_delta(base ? &base->manifest() : nullptr, body.first(static_cast<std::size_t>(head.stream_size)),
                                        [first](std::size_t i) { return first + static_cast<std::uint32_t>(i); });
  if (!manifest.ok()) {
    // Whatever this client holds does not fit what the server sends: the next try starts from nothing.
    const std::lock_guard lock(mutex_);
    newest_.reset();
    return std::move(manifest).error();
  }
  // A full stream names every block anew: what was known before is not pointed at any more.
  const bool from_base = message.held.has_value() && head.locator_count < manifest->entry_count();
  const LocatorTable table = (message.locators || from_base ? known : LocatorTable()).with(std::move(locators));
  Opened opened;
  opened.held = std::make_shared<const HeldManifest>(std::move(*manifest), table, head.incarnation);
  opened.lease = head.lease;
  opened.lease_deadline = sent + static_cast<Micros>(head.lease_ttl_ms) * 1000;
  const std::lock_guard lock(mutex_);
  ++counters_.snapshots;
  counters_.manifest_bytes += answer.body.size();
  const auto& version = opened.held->manifest().version();
  if (head.incarnation == incarnation_ && (!newest_ || newest_->manifest().version() < version)) newest_ = opened.held;
  if (!counters_.newest || *counters_.newest < *version) counters_.newest = version;
  return opened;
}

void ClientImpl::release_lease(LeaseId lease, const Incarnation& made_by) noexcept {
  if (lease == 0 || !fork_.check("lease").ok() || made_by != incarnation() || control()->broken()) return;
  LeaseMessage message;
  message.lease = lease;
  // An answer that does not come is no loss: the lease ends by its time.
  static_cast<void>(call([&](std::uint64_t request) { return message.encode(FrameType::kRelease, request); }, FrameType::kOk,
                         steady_clock().now() + kGoodbye).ok());
}

Status ClientImpl::watch_lease(const std::shared_ptr<Snapshot::State>& snapshot) {
  const std::lock_guard lock(renew_mutex_);
  // Asked under the lock that close() takes after it closed: a thread started later would be nobody's to end.
  if (closed_) return {};
  if (!renew_thread_.joinable()) {
    PARAMWIRE_TRY(thread, start_loop("pw-renew", &ClientImpl::renew_loop, renew_running_));
    renew_thread_ = std::move(thread);
  }
  leased_.push_back(snapshot);
  renew_wake_.notify_one();
  return {};
}

// Renews what is due; returns when the next renewal is.
Micros ClientImpl::renew_due(Micros now) {
  std::vector<std::shared_ptr<Snapshot::State>> living;
  {
    const std::lock_guard lock(renew_mutex_);
    std::erase_if(leased_, [&](const std::weak_ptr<Snapshot::State>& weak) {
      auto snapshot = weak.lock();
      if (!snapshot || snapshot->closed || snapshot->lease_lost) return true;
      living.push_back(std::move(snapshot));
      return false;
    });
  }
  const Micros early = options_.lease_ttl - options_.lease_ttl / kRenewParts;
  Micros next = kNever;
  for (const auto& snapshot : living) {
    const Micros lease_end = snapshot->lease_deadline;
    if (lease_end - early <= now) {
      LeaseMessage message;
      message.lease = snapshot->lease;
      message.ttl_ms = static_cast<std::uint32_t>(options_.lease_ttl / 1000);
      const TraceSpan span(trace_, "renew");
      const Micros sent = steady_clock().now();
      const auto answer = call([&](std::uint64_t request) { return message.encode(FrameType::kRenew, request); }, FrameType::kOk, lease_end);
      const bool same_server = snapshot->held->incarnation() == incarnation();
      if (answer.ok() && same_server) {
        snapshot->lease_deadline = sent + options_.lease_ttl;
      } else if (!same_server || (!answer.ok() && answer.error().code() == Code::kStale) || steady_clock().now() >= lease_end) {
        snapshot->lease_lost = true;
        const std::lock_guard lock(mutex_);
        ++counters_.leases_lost;
        continue;
      }
    }
    // After a failed renewal: again in a tenth of the time, until the lease is over.
    next = std::min(next, std::max(snapshot->lease_deadline - early, steady_clock().now() + options_.lease_ttl / 10));
  }
  return next;
}

void ClientImpl::renew_loop() {
  std::unique_lock lock(renew_mutex_);
  while (!closed_) {
    lock.unlock();
    const Micros next = renew_due(steady_clock().now());
    lock.lock();
    if (closed_) return;
    if (next == kNever) {
      renew_wake_.wait(lock, [this] { return closed_ || !leased_.empty(); });
    } else {
      renew_wake_.wait_until(lock, time_point(next), [this] { return closed_.load(); });
    }
  }
}

// ---------------------------------------------------------------- fetch

namespace {

// Blocks whose list of CRCs the caller can have: those that are not decoded here, or not wholly, and whose table DATA can carry.
std::size_t extents_to_defer(const FetchRequest& request, const BlockRead& read) {
  if (read.entry.codec == CodecId::kPlanes) return request.planes == nullptr ? 0 : whole_chunks(read);
  if (read.entry.codec != CodecId::kRaw || extent_count(read.entry.stored_size) * sizeof(ExtentRow) > kMaxTableBytes) return 0;
  return static_cast<std::size_t>(extent_count(whole_extents(read.entry.stored_size, read.range).size));
}

void clear_lists(const FetchRequest& request) {
  if (request.checks != nullptr) request.checks->clear();
  if (request.planes != nullptr) request.planes->clear();
}

}  // namespace

void ClientImpl::defer_checks(const FetchRequest& request, std::span<BlockRead> reads) {
  if (request.checks == nullptr) return;
  std::size_t all = 0;
  for (const BlockRead& read : reads) all += extents_to_defer(request, read);
  request.checks->assign(all, {});  // before the parts: it may move
  if (request.planes != nullptr) request.planes->assign(all, {});
  std::size_t at = 0;
  for (BlockRead& read : reads) {
    const std::size_t count = extents_to_defer(request, read);
    read.checks = std::span(*request.checks).subspan(at, count);
    if (read.entry.codec == CodecId::kPlanes && request.planes != nullptr) read.planes = std::span(*request.planes).subspan(at, count);
    at += count;
  }
}

void ClientImpl::place_checks(const FetchRequest& request, std::span<const BlockRead> reads) noexcept {
  for (const BlockRead& read : reads) {
    const auto begin = static_cast<std::uint64_t>(read.target.data() - request.target.data());
    for (ExtentCheck& check : read.checks) check.offset += begin;
    for (PlanesApart& planes : read.planes) planes.offset += begin;
  }
  if (request.planes != nullptr) std::erase_if(*request.planes, [](const PlanesApart& planes) { return planes.size == 0; });
}

void ClientImpl::read_raw(Link& link, std::span<BlockRead> batch, Micros until) {
  std::vector<BlockRead*> encoded;
  for (BlockRead& read : batch) {
    if (read.entry.codec != CodecId::kRaw) encoded.push_back(&read);
  }
  if (encoded.empty()) return link.read(batch, until);
  if (encoded.size() < batch.size()) {
    std::vector<BlockRead> plain;
    for (const BlockRead& read : batch) {
      if (read.entry.codec == CodecId::kRaw) plain.push_back(read);
    }
    link.read(plain, until);
    auto done = plain.begin();
    for (BlockRead& read : batch) {
      if (read.entry.codec == CodecId::kRaw) read.result = std::move((done++)->result);
    }
  }
  const std::uint32_t threads = options_.decode_threads.value_or(std::clamp(std::thread::hardware_concurrency(), 2U, 5U) - 1);
  read_encoded(link, encoded, chunk_indexes_, decode_benches_, threads, decoded_, until);
}

FetchMachine::Event ClientImpl::read_round(const HeldManifest& held, std::span<FetchRequest> requests, Micros until, std::optional<Error>& error) {
  std::vector<BlockRead> batch;
  std::vector<std::pair<std::size_t, std::size_t>> owners;  // request and its first item
  for (std::size_t i = 0; i < requests.size(); ++i) {
    FetchRequest& request = requests[i];
    if (request.done) continue;
    const std::size_t first = batch.size();
    request.result = request.block ? held.plan(*request.block, request.target, batch) : held.plan(request.tensor, request.part, request.target, batch);
    if (!request.result.ok()) {
      request.done = true;  // a wrong call stays wrong
      batch.resize(first);
      continue;
    }
    defer_checks(request, std::span(batch).subspan(first));
    owners.emplace_back(i, first);
  }
  if (batch.empty() && owners.empty()) return FetchMachine::Event::kRead;
  // Versions of two incarnations may have equal numbers: only the one that made this manifest can be asked for its blocks.
  if (held.incarnation() != incarnation()) {
    error = Error(Code::kStale, "the server restarted: the snapshot is gone with the incarnation that made it, take a new one");
    return FetchMachine::Event::kChanged;
  }
  const std::uint64_t bytes = bytes_of(batch);
  auto link = paths_.borrow(bytes, until);
  if (!link.ok()) {
    error = std::move(link).error();
    return event_of(error->code());
  }
  {
    const TraceSpan span(trace_, "read", bytes);
    read_raw(**link, batch, until);
  }
  for (std::size_t o = 0; o < owners.size(); ++o) {
    FetchRequest& request = requests[owners[o].first];
    const std::size_t end = o + 1 < owners.size() ? owners[o + 1].second : batch.size();
    request.done = true;
    for (std::size_t i = owners[o].second; i < end; ++i) {
      if (batch[i].result.ok()) continue;
      request.done = false;
      request.result = batch[i].result.error();
      // A block that the manifest promised and the server does not know: it is of a version that is gone.
      if (request.result.error().code() == Code::kNotFound) request.result = Error(Code::kStale, request.result.error().message());
      if (!error || weight(request.result.error().code()) > weight(error->code())) error = request.result.error();
      break;
    }
    if (request.done) place_checks(request, std::span(batch).subspan(owners[o].second, end - owners[o].second));
  }
  return error ? event_of(error->code()) : FetchMachine::Event::kRead;
}

Status ClientImpl::fetch(FetchMachine::Mode mode, std::shared_ptr<const HeldManifest>& held, std::span<FetchRequest> requests, Micros until) {
  const Stopwatch watch(fetch_ns_);
  const TraceSpan span(trace_, "fetch");
  FetchMachine::Options machine_options;
  machine_options.mode = mode;
  machine_options.deadline = until;
  FetchMachine machine(machine_options);
  for (FetchRequest& request : requests) {
    request.done = false;
    clear_lists(request);
  }
  LeaseId lease = 0;
  std::optional<Error> error;
  auto event = FetchMachine::Event::kBegin;
  auto action = FetchMachine::Action::kRead;
  while (true) {
    action = machine.step(steady_clock().now(), event, error ? &*error : nullptr);
    if (action == FetchMachine::Action::kDone || action == FetchMachine::Action::kFail) break;
    error.reset();
    if (action == FetchMachine::Action::kRead) {
      event = read_round(*held, requests, until, error);
      continue;
    }
    if (action == FetchMachine::Action::kReconnect) {
      const Incarnation made_by = held ? held->incarnation() : incarnation();
      auto same = reconnect(control(), until);
      if (same.ok()) {
        event = incarnation() == made_by ? FetchMachine::Event::kReconnected : FetchMachine::Event::kRestarted;
      } else {
        error = std::move(same).error();
        event = event_of(error->code());
      }
      continue;
    }
    const Micros ttl = action == FetchMachine::Action::kOpenLeased ? options_.lease_ttl : 0;
    auto opened = open_snapshot(std::nullopt, ttl, 0, until);
    if (!opened.ok()) {
      error = std::move(opened).error();
      event = event_of(error->code());
      continue;
    }
    const bool moved = !held || held->manifest().version() != opened->held->manifest().version() || held->incarnation() != opened->held->incarnation();
    if (moved) {  // all of one version: what came from the older one is read again
      for (FetchRequest& request : requests) request.done = false;
    }
    if (lease != 0) release_lease(lease, held->incarnation());
    held = opened->held;
    lease = opened->lease;
    event = FetchMachine::Event::kOpened;
  }
  if (lease != 0) release_lease(lease, held->incarnation());
  if (machine.retries() > 0) {
    const std::lock_guard lock(mutex_);
    counters_.retries += machine.retries();
  }
  if (action == FetchMachine::Action::kFail) {
    for (FetchRequest& request : requests) {
      if (request.done) continue;
      request.result = machine.failure();
      clear_lists(request);
    }
    return machine.failure();
  }
  for (const FetchRequest& request : requests) {
    if (!request.result.ok()) return request.result;
  }
  return {};
}

Result<BlockView> ClientImpl::view(const HeldManifest& held, const BlockRead& what) {
  const Stopwatch watch(view_ns_);
  const TraceSpan span(trace_, "view", what.range.size);
  if (!paths_.has(Transport::kShm)) {
    const auto& rejected = paths_.rejected();
    const std::string why = !rejected.empty() && rejected.front().transport == "shm" ? cat(" (shm: ", rejected.front().reason, ")") : std::string();
    return Error(Code::kUnavailable, cat("views need shared memory, this client's transport is ", transport_name(paths_.bulk()), why, ": fetch instead"));
  }
  const std::lock_guard lock(view_mutex_);
  PARAMWIRE_CHECK(check_usable());  // again: a link opened after close() would stay
  if (!view_link_ || view_link_->broken() || view_incarnation_ != held.incarnation()) {
    if (held.incarnation() != incarnation()) return Error(Code::kStale, "the server restarted: the snapshot is gone with the incarnation that made it, take a new one");
    PARAMWIRE_TRY(link, paths_.open_shm_alone(deadline({})));
    if (view_link_) view_dropped_ = view_dropped_ + view_link_->stats();
    view_link_ = std::move(link);
    view_incarnation_ = held.incarnation();
  }
  return view_link_->view(what.entry, what.locator, what.range);
}

// ---------------------------------------------------------------- tickets

Result<Ticket> ClientImpl::submit(std::shared_ptr<Snapshot::State> snapshot, std::vector<FetchRequest> requests, Micros until) {
  auto state = std::make_shared<Ticket::State>();
  state->requests = std::move(requests);
  state->snapshot = std::move(snapshot);
  state->submitted = steady_clock().now();
  state->deadline = until;
  const std::lock_guard lock(tickets_mutex_);
  if (closed_) return Error(Code::kInvalid, "the client is closed");
  if (tickets_.size() >= kTicketsMax) {
    return Error(Code::kBackpressure, cat(tickets_.size(), " tickets wait for the fetch thread, the limit: wait for some of them"));
  }
  if (!fetch_thread_.joinable()) {
    PARAMWIRE_TRY(thread, start_loop("pw-fetch", &ClientImpl::fetch_loop, fetch_running_));
    fetch_thread_ = std::move(thread);
  }
  tickets_.push_back(state);
  tickets_wake_.notify_one();
  return Ticket(std::move(state));
}

void ClientImpl::fetch_loop() {
  std::unique_lock lock(tickets_mutex_);
  for (;;) {
    tickets_wake_.wait(lock, [this] { return closed_ || !tickets_.empty(); });
    if (tickets_.empty()) return;  // closed, and nobody waits any more
    const auto ticket = std::move(tickets_.front());
    tickets_.pop_front();
    lock.unlock();
    Status result = closed_ ? Status(Error(Code::kInvalid, "the client was closed before the fetch began")) : Status();
    if (result.ok()) {
      auto held = ticket->snapshot->held;
      result = fetch(FetchMachine::Mode::kSnapshot, held, ticket->requests, ticket->deadline);
    }
    ticket->snapshot.reset();
    {
      const std::lock_guard done(ticket->mutex);
      ticket->result = std::move(result);
      ticket->completed = steady_clock().now();
      ticket->done = true;
    }
    ticket->finished.notify_all();
    lock.lock();
  }
}

// ---------------------------------------------------------------- end

Result<std::thread> ClientImpl::start_loop(const char* name, void (ClientImpl::*loop)(), bool& running) {
  {
    const std::lock_guard lock(threads_mutex_);
    running = true;
  }
  auto thread = start_thread(name, [self = shared_from_this(), loop, &running] {
    (self.get()->*loop)();
    const std::lock_guard lock(self->threads_mutex_);
    running = false;
    self->threads_ended_.notify_all();
  });
  if (!thread.ok()) {
    const std::lock_guard lock(threads_mutex_);
    running = false;
  }
  return thread;
}

void ClientImpl::close() {
  if (fork_.in_child()) {
    // Threads and sockets are the parent's. A thread that is not in this process can be neither joined nor detached (glibc
    // answers EINVAL, which std::thread throws): its handle is left behind.
    for (std::thread* thread : {&renew_thread_, &fetch_thread_}) {
      if (thread->joinable()) static_cast<void>(new std::thread(std::move(*thread)));
    }
    return;
  }
  if (closed_.exchange(true)) return;
  if (auto link = control()) link->close();  // wakes a renewal that waits for an answer
  // Connections end here and not with the last handle: whoever keeps a closed client would cost the server its connections, and
  // this process its mappings. Views keep what they need.
  paths_.close();
  if (const std::unique_lock lock(view_mutex_, std::try_to_lock); lock.owns_lock() && view_link_) {  // else it waits for the server
    view_dropped_ = view_dropped_ + view_link_->stats();
    view_link_.reset();
  }
  {
    const std::lock_guard lock(renew_mutex_);
    renew_wake_.notify_all();
  }
  {
    const std::lock_guard lock(tickets_mutex_);
    tickets_wake_.notify_all();
  }
  // A fetch or a renewal that waits for a frozen server ends by its own deadline, which may be long: nobody waits for that, an
  // interpreter that exits least of all.
  const auto until = time_point(steady_clock().now() + kGoodbye);
  std::unique_lock lock(threads_mutex_);
  threads_ended_.wait_until(lock, until, [this] { return !renew_running_ && !fetch_running_; });
  for (const auto& [thread, running] : {std::pair(&renew_thread_, renew_running_), std::pair(&fetch_thread_, fetch_running_)}) {
    if (!thread->joinable()) continue;
    if (running) {
      thread->detach();
    } else {
      lock.unlock();  // its last step is to let go of this lock
      thread->join();
      lock.lock();
    }
  }
}

ClientStats ClientImpl::stats() const {
  LinkStats views;
  {
    const std::lock_guard lock(view_mutex_);
    views = view_dropped_;
    if (view_link_) views = views + view_link_->stats();
  }
  ClientStats out;
  {
    const std::lock_guard lock(mutex_);
    out = counters_;
  }
  out.encoded_bytes = decoded_.stored_bytes;
  out.decoded_bytes = decoded_.raw_bytes;
  out.decode_memory_bytes = decode_benches_.bytes();
  out.transport = transport_name(paths_.bulk());
  out.small_transport = transport_name(paths_.small());
  out.rejected = paths_.rejected();
  for (const Transport transport : {Transport::kShm, Transport::kVerbs, Transport::kUdp, Transport::kTcp}) {
    if (!paths_.has(transport)) continue;
    LinkStats link = paths_.stats(transport);
    if (transport == Transport::kShm) link = link + views;
    out.link = out.link + link;
    out.by_transport.emplace_back(transport_name(transport), link);
  }
  return out;
}

NamedHistograms ClientImpl::durations() const {
  return {{"fetch", fetch_ns_.snapshot()}, {"view", view_ns_.snapshot()}, {"snapshot", snapshot_ns_.snapshot()}, {"control", control_ns_.snapshot()}};
}

}  // namespace paramwire
