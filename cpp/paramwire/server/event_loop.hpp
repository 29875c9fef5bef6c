// The server's one thread: epoll over listeners, connections and a wake-up. Every decision is the handlers'.
//
// Leases and idle publishes are looked at ten times a second while there is anything to look at, always after every request
// that had arrived by then: a server that was stopped for a minute must not expire what its clients renewed in time.
#pragma once

#include "paramwire/base/socket.hpp"
#include "paramwire/server/connection.hpp"
#include "paramwire/server/server_core.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace paramwire {

struct LoopLimits {
  std::uint32_t connections_max = 0;
  Micros send_timeout = 0;     // see ServerOptions
  Micros receive_timeout = 0;
  std::vector<std::uint16_t> udp_ports;  // told to clients of each listener, in their order; 0 or missing: none
};

class EventLoop {
 public:
  // errors: kUnavailable when epoll or a registration fails.
  static Result<std::unique_ptr<EventLoop>> create(std::shared_ptr<ServerCore> core, std::vector<Listener> listeners, const LoopLimits& limits);

  // Until stop(), and until what is queued by then is sent or the drain deadline passed. The loop's thread.
  void run();
  // Any thread; idempotent. The listeners close at once.
  void stop(Micros drain_deadline) noexcept;
  // For the child of a fork: socket files are the parent's.
  void disown() noexcept;
  const std::vector<Listener>& listeners() const noexcept { return listeners_; }

 private:
  EventLoop(std::shared_ptr<ServerCore> core, std::vector<Listener> listeners, const LoopLimits& limits)
      : core_(std::move(core)), listeners_(std::move(listeners)), limits_(limits) {}
  Status watch(int fd, std::uint64_t key, std::uint32_t events, int operation);
  int wait_ms(Micros now) const noexcept;
  void handle(std::uint64_t key, Micros now);
  void accept_all(std::size_t listener, Micros now);
  void admit(Socket socket, std::size_t listener, Micros now);
  void make_room(Micros now);
  void settle(Connection& connection, const Status& status, Micros now);
  void serve_again(Micros now);
  void drop(std::uint64_t id, Micros now);
  void serve_all_waiting(Micros now);
  void answer_waits(Micros now, bool always);
  void tick(Micros now);
  void check_stalls(Micros now);
  void drain(Micros now);

  std::shared_ptr<ServerCore> core_;
  std::vector<Listener> listeners_;
  LoopLimits limits_;
  Fd epoll_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::uint64_t last_id_ = 0;
  std::vector<std::uint64_t> again_;  // connections whose input left the kernel and was not served: their turn comes without an event
  bool accept_paused_ = false;
  bool tick_wanted_ = false;       // leases, publishes, quarantined slots, or clients
  Micros next_tick_ = 0;
  bool draining_ = false;
  std::atomic<bool> stop_{false};
  std::atomic<Micros> drain_deadline_{0};
};

}  // namespace paramwire
