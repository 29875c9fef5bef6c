#include "paramwire/server/event_loop.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/net/verbs_address.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

namespace paramwire {

namespace {

// Keys of epoll events: listeners count down from the top, the wake-up is 0, connections count up from 1.
constexpr std::uint64_t kWakeKey = 0;
constexpr std::uint64_t kListenerKey = std::uint64_t{1} << 63;

constexpr Micros kTick = 100'000;
// A tick walks every superseded slot; with a million of them that is tens of milliseconds. It gets at most this share of time.
constexpr Micros kTickShare = 20;

// Bytes received from one connection before others get their turn.
constexpr std::uint64_t kReceiveBudget = std::uint64_t{2} << 20;

}  // namespace

void ServerCore::wake_loop() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake.get(), &one, sizeof one));  // full counter: the loop is awake anyway
}

Result<std::unique_ptr<EventLoop>> EventLoop::create(std::shared_ptr<ServerCore> core, std::vector<Listener> listeners, const LoopLimits& limits) {
  std::unique_ptr<EventLoop> loop(new EventLoop(std::move(core), std::move(listeners), limits));
  loop->epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_.valid()) return errno_error(Code::kUnavailable, "epoll_create1", errno);
  loop->core_->wake = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->core_->wake.valid()) return errno_error(Code::kUnavailable, "eventfd", errno);
  PARAMWIRE_CHECK(loop->watch(loop->core_->wake.get(), kWakeKey, EPOLLIN, EPOLL_CTL_ADD));
  for (std::size_t i = 0; i < loop->listeners_.size(); ++i) {
    PARAMWIRE_CHECK(loop->watch(loop->listeners_[i].fd(), kListenerKey + i, EPOLLIN, EPOLL_CTL_ADD));
  }
  return loop;
}

Status EventLoop::watch(int fd, std::uint64_t key, std::uint32_t events, int operation) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(epoll_.get(), operation, fd, &event) != 0) return errno_error(Code::kUnavailable, "epoll_ctl", errno);
  return {};
}

void EventLoop::stop(Micros drain_deadline) noexcept {
  drain_deadline_ = drain_deadline;
  stop_ = true;
  core_->wake_loop();
}

void EventLoop::disown() noexcept {
  for (Listener& listener : listeners_) listener.disown();
}

int EventLoop::wait_ms(Micros now) const noexcept {
  Micros until = kNever;
  if (tick_wanted_ || accept_paused_ || !connections_.empty()) until = next_tick_;
  if (draining_) until = std::min(drain_deadline_.load(), now + kTick);  // nothing ticks any more
  if (until == kNever) return -1;
  return static_cast<int>(std::clamp<Micros>((until - now + 999) / 1000, 0, 60'000));
}

void EventLoop::run() {
  std::array<epoll_event, 64> events;
  Micros now = steady_clock().now();
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), again_.empty() ? wait_ms(now) : 0);
    ++core_->counters.loop_turns;
    now = steady_clock().now();
    const Stopwatch watch(core_->durations.turn);
    const TraceSpan span(core_->trace.get(), "turn");
    for (int i = 0; i < count; ++i) handle(events[static_cast<std::size_t>(i)].data.u64, now);
    serve_again(now);
    if (stop_ && !draining_) drain(now);
    if (draining_) {
      if (connections_.empty() || now >= drain_deadline_) break;
      continue;
    }
    answer_waits(now, false);
    if (now >= next_tick_) tick(now);
  }
  while (!connections_.empty()) drop(connections_.begin()->first, now);
}

void EventLoop::handle(std::uint64_t key, Micros now) {
  if (key == kWakeKey) {
    std::uint64_t count = 0;
    static_cast<void>(!::read(core_->wake.get(), &count, sizeof count));
    next_tick_ = std::min(next_tick_, now + kTick);
    tick_wanted_ = true;
    return;
  }
  if (key >= kListenerKey) return accept_all(static_cast<std::size_t>(key - kListenerKey), now);
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;  // dropped earlier in this turn
  Connection& connection = *found->second;
  const Status status = draining_ ? connection.flush(*core_, now) : connection.serve(*core_, kReceiveBudget, now);
  settle(connection, status, now);
}

// Drops what is over and asks epoll for what the rest waits for.
void EventLoop::settle(Connection& connection, const Status& status, Micros now) {
  const bool done = draining_ && !connection.wants_output();
  if (!status.ok() || done || connection.over(now)) return drop(connection.id(), now);
  const std::uint32_t input = connection.wants_input() && !draining_ ? std::uint32_t{EPOLLIN} : 0U;
  if (!draining_ && !connection.in_again && connection.has_more()) {
    connection.in_again = true;
    again_.push_back(connection.id());
  }
  const std::uint32_t interest = input | (connection.needs_room() ? std::uint32_t{EPOLLOUT} : 0U);
  if (interest == connection.interest) return;
  connection.interest = interest;
  if (!watch(connection.fd(), connection.id(), interest, EPOLL_CTL_MOD).ok()) drop(connection.id(), now);
}

void EventLoop::serve_again(Micros now) {
  for (const std::uint64_t id : std::exchange(again_, {})) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    Connection& connection = *found->second;
    connection.in_again = false;
    if (!draining_) settle(connection, connection.serve(*core_, kReceiveBudget, now), now);
  }
}

void EventLoop::drop(std::uint64_t id, Micros now) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  found->second->dismiss(*core_, now);
  connections_.erase(found);  // closing the descriptor takes it out of epoll
  core_->counters.connections = connections_.size();
  tick_wanted_ = true;  // a short-lived client may leave a lease, a publish or a pin table that no tick has seen yet
}

// ---------------------------------------------------------------- accept

void EventLoop::accept_all(std::size_t index, Micros now) {
  Listener& listener = listeners_[index];
  for (;;) {
    auto socket = listener.try_accept();
    if (!socket.ok()) {
      // Out of descriptors: the listener would stay readable and the loop would spin. Look again at the next tick.
      accept_paused_ = true;
      next_tick_ = std::min(next_tick_, now + kTick);
      for (std::size_t i = 0; i < listeners_.size(); ++i) {
        static_cast<void>(watch(listeners_[i].fd(), kListenerKey + i, 0, EPOLL_CTL_MOD));
      }
      return;
    }
    if (!*socket) return;
    admit(std::move(**socket), index, now);
  }
}

// Who has not proved the key must not keep others out by being many and silent: the longest about it goes.
void EventLoop::make_room(Micros now) {
  std::uint64_t oldest = 0;
  for (const auto& [id, connection] : connections_) {
    if (connection->shaking_hands() && (oldest == 0 || id < oldest)) oldest = id;
  }
  if (oldest == 0) return;
  ++core_->counters.closed_for_key;
  drop(oldest, now);
}

void EventLoop::admit(Socket socket, std::size_t listener, Micros now) {
  const bool local = listeners_[listener].endpoint().kind == Endpoint::Kind::kUnix;
  if (!local && core_->tls && !core_->tls->accept(socket).ok()) return;  // no memory for a connection object: the peer sees a closed connection
  const std::uint64_t id = ++last_id_;
  auto connection = std::make_unique<Connection>(id, std::move(socket), local, now);
  Connection& added = *connection;
  if (listener < limits_.udp_ports.size()) added.session().set_udp_port(limits_.udp_ports[listener]);
  added.session().set_local_address(gid_of(DatagramAddress::local_of(added.fd())));
  if (connections_.size() >= limits_.connections_max && core_->tls) make_room(now);
  const bool full = connections_.size() >= limits_.connections_max;
  if (full) {
    ++core_->counters.refused;
    added.refuse(Error(Code::kBackpressure, cat("this server has ", connections_.size(), " connections, its limit (connections_max): close some, or raise it")));
    static_cast<void>(added.flush(*core_, now));
    return;
  }
  added.interest = EPOLLIN;
  if (!watch(added.fd(), id, EPOLLIN, EPOLL_CTL_ADD).ok()) return;
  if (local) {
    const std::lock_guard lock(core_->mutex);
    core_->pins.add_connection(id, added.fd());
  }
  connections_.emplace(id, std::move(connection));
  ++core_->counters.accepted;
  core_->counters.connections = connections_.size();
  if (next_tick_ < now) next_tick_ = now + kTick;
}

// ---------------------------------------------------------------- time

// Everything that had arrived by `now`: new connections, and the bytes that the kernel holds for the old ones.
void EventLoop::serve_all_waiting(Micros now) {
  for (std::size_t i = 0; i < listeners_.size() && !accept_paused_; ++i) accept_all(i, now);
  std::vector<std::uint64_t> ids;
  ids.reserve(connections_.size());
  for (const auto& [id, connection] : connections_) ids.push_back(id);
  for (const std::uint64_t id : ids) {
    Connection& connection = *connections_.at(id);
    settle(connection, connection.serve(*core_, connection.bytes_waiting(), now), now);
  }
}

void EventLoop::answer_waits(Micros now, bool always) {
  {
    const std::lock_guard lock(core_->mutex);
    if (!core_->handlers->take_published() && !always) return;
    std::vector<ServerSession*> sessions;
    sessions.reserve(connections_.size());
    for (const auto& [id, connection] : connections_) sessions.push_back(&connection->session());
    core_->handlers->answer_waits(sessions, now);
  }
  std::vector<std::uint64_t> answered;
  for (const auto& [id, connection] : connections_) {
    if (connection->wants_output() && (connection->interest & EPOLLOUT) == 0) answered.push_back(id);
  }
  for (const std::uint64_t id : answered) {
    Connection& connection = *connections_.at(id);
    settle(connection, connection.flush(*core_, now), now);
  }
}

void EventLoop::tick(Micros now) {
  if (accept_paused_) {
    accept_paused_ = false;
    for (std::size_t i = 0; i < listeners_.size(); ++i) {
      static_cast<void>(watch(listeners_[i].fd(), kListenerKey + i, EPOLLIN, EPOLL_CTL_MOD));
    }
  }
  serve_all_waiting(now);
  {
    const std::lock_guard lock(core_->mutex);
    core_->handlers->tick(now);
    core_->pins.drop_dead();
    const StoreStats stats = core_->store->stats();
    tick_wanted_ = stats.leases > 0 || stats.publishes_open > 0 || stats.quarantined_slots > 0 || core_->pins.tables() > 0;
  }
  answer_waits(now, true);
  check_stalls(now);
  const Micros after = steady_clock().now();
  next_tick_ = after + std::max(kTick, kTickShare * (after - now));
}

void EventLoop::check_stalls(Micros now) {
  std::vector<std::uint64_t> suspects;
  for (const auto& [id, connection] : connections_) {
    if (connection->over(now) || connection->stalled(now, limits_.send_timeout, limits_.receive_timeout)) suspects.push_back(id);
  }
  for (const std::uint64_t id : suspects) {
    // Once more: if it was this server that stood still, the peer has made room meanwhile.
    Connection& connection = *connections_.at(id);
    const Status status = connection.flush(*core_, now);
    if (status.ok() && !connection.over(now) && !connection.stalled(now, limits_.send_timeout, limits_.receive_timeout)) {
      settle(connection, status, now);
      continue;
    }
    if (!connection.over(now)) ++core_->counters.closed_for_stall;
    drop(id, now);
  }
}

// ---------------------------------------------------------------- end

// No new work: listeners close, nothing is read. What is queued is still sent.
void EventLoop::drain(Micros now) {
  draining_ = true;
  for (Listener& listener : listeners_) listener.close();
  std::vector<std::uint64_t> ids;
  for (const auto& [id, connection] : connections_) ids.push_back(id);
  for (const std::uint64_t id : ids) {
    Connection& connection = *connections_.at(id);
    connection.finish_sending();
    settle(connection, connection.flush(*core_, now), now);
  }
}

}  // namespace paramwire
