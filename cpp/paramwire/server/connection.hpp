// One client connection of the event loop: bytes in, frames to the handlers, frames out. The loop's thread only.
//
// Bounded: with more than a limit queued for sending, nothing is parsed or received, so a client that asks faster than it
// reads meets TCP's back-pressure instead of our memory.
#pragma once

#include "paramwire/base/socket.hpp"
#include "paramwire/server/handlers.hpp"
#include "paramwire/server/server_core.hpp"
#include "paramwire/wire/frame.hpp"

#include <cstdint>
#include <mutex>

namespace paramwire {

class Connection {
 public:
  Connection(std::uint64_t id, Socket socket, bool local, Micros now);

  std::uint64_t id() const noexcept { return id_; }
  int fd() const noexcept { return socket_.fd(); }
  bool local() const noexcept { return local_; }
  ServerSession& session() noexcept { return session_; }

  // Parses, receives at most about `budget` bytes, and sends, until none of these goes on.
  // errors: the connection is over (the peer left, or a system call failed): drop it.
  Status serve(ServerCore& core, std::uint64_t budget, Micros now);
  // Sends what can be sent without waiting. errors: as serve.
  Status flush(ServerCore& core, Micros now);
  // Takes nothing more; what is queued is still sent, then the connection ends. `error`: sent first.
  void refuse(const Error& error);
  void finish_sending() noexcept { ending_ = true; }
  // Puts and held slots are let go.
  void dismiss(ServerCore& core, Micros now);

  bool wants_input() const noexcept { return ending_ || !queue_full(); }
  bool wants_output() const noexcept { return !session_.outgoing.empty(); }
  bool ending() const noexcept { return ending_; }
  // The peer has not proved the cluster key yet.
  bool shaking_hands() const noexcept { return socket_.filter() != nullptr && !socket_.filter()->ready(); }
  // epoll must tell of room in the socket: frames wait, or receiving needs to send first (TLS).
  bool needs_room() const noexcept { return wants_output() || (socket_.filter() != nullptr && socket_.filter()->input_needs_room()); }
  // There is input that left the kernel already, so that no event will tell of it: serve again.
  bool has_more() const noexcept { return !ending_ && !queue_full() && socket_.filter() != nullptr && socket_.filter()->holds_input(); }
  // Everything was said and the peer has hung up too, or had its second to do so.
  bool over(Micros now) const noexcept { return hung_up_ || (shut_ && now >= linger_until_); }
  bool stalled(Micros now, Micros send_timeout, Micros receive_timeout) const noexcept;
  // At least the bytes that arrived before now and were not parsed: those in the kernel, and what the filter may hold.
  std::uint64_t bytes_waiting() const noexcept;

  std::uint32_t interest = 0;  // epoll events asked for; the loop's
  bool in_again = false;       // is on the loop's list of those to be served without an event; the loop's

 private:
  bool queue_full() const noexcept;
  void account() noexcept;
  Status parse(ServerCore& core, Micros now);
  Status on_event(FrameParser::Event event, ServerCore& core, std::unique_lock<std::mutex>& lock, Micros now);
  Result<std::size_t> send_some(int descriptor);
  void consume(std::size_t sent, ServerCore& core, Micros now);
  Status discard(Micros now);
  Status on_lost(Error error, ServerCore& core, Micros now);

  std::uint64_t id_;
  Socket socket_;
  bool local_;
  ServerSession session_;
  FrameParser parser_;
  bool fresh_ = false;         // the parser got bytes that it has not used up
  bool in_frame_ = false;      // a head came, its end did not
  bool ending_ = false;
  bool shut_ = false;
  bool hung_up_ = false;
  std::uint64_t front_sent_ = 0;    // bytes of the front frame that are gone
  std::uint64_t queued_bytes_ = 0;
  std::size_t accounted_ = 0;       // frames of the queue that queued_bytes_ counts
  Micros opened_;
  Micros sent_at_;                  // last time that a byte left, or that the queue was empty
  Micros progress_at_ = 0;  // the store heard of the put under way
  Micros received_at_;
  Micros linger_until_ = 0;
};

}  // namespace paramwire
