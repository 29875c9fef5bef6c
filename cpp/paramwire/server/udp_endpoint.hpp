// The server's UDP sockets, each with a thread ("pw-udp") that sleeps in its receive: GETs in by the batch, segments out straight from the
// slots they lie in.
//
// A slot is held from the look-up until its last segment left, as for tcp; the store's mutex is taken for look-ups and for letting go, never
// while something is sent. A client that asks for more than the path or the device takes loses it and asks again: nothing is queued here.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/udp_socket.hpp"
#include "paramwire/server/udp_responder.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

namespace paramwire {

struct ServerCore;

struct UdpEndpointOptions {
  bool busy_poll = false;  // spin on the sockets: a whole core each, and answers several times sooner
  int fail_gso = 0;        // for tests: the first two segmented sends of each socket fail with this errno
};

// Counted by the endpoint's threads, read by any.
struct UdpCounters {
  std::atomic<std::uint64_t> segments{0};       // DATA sent
  std::atomic<std::uint64_t> bytes{0};          // of payload
  std::atomic<std::uint64_t> dropped{0};        // segments that did not leave: buffer or device full
  std::atomic<std::uint64_t> too_long{0};       // longer than the path takes
  std::atomic<std::uint64_t> failed{0};         // other errors of sends
  std::atomic<std::uint64_t> gso_disabled{0};   // clients to whom segmented sends failed
  std::atomic<std::uint64_t> socket_drops{0};   // GETs that the kernel dropped at a full receive buffer
  std::atomic<std::uint64_t> busy_poll_us{0};
};

class UdpEndpoint {
 public:
  // One socket for each of `addresses` (port 0: any). errors: kUnavailable with errno and address.
  static Result<std::unique_ptr<UdpEndpoint>> open(std::shared_ptr<ServerCore> core, const std::vector<DatagramAddress>& addresses, const UdpEndpointOptions& options);
  ~UdpEndpoint() { stop(); }

  std::uint16_t port(std::size_t index) const noexcept { return doors_[index]->socket.local().port(); }
  // errors: kUnavailable when there are no threads.
  Status start();
  void stop();
  // For the child of a fork, where the threads are not.
  void disown() noexcept;
  const UdpCounters& counters() const noexcept { return counters_; }

 private:
  struct Job {
    UdpResponder::Question question;
    DatagramAddress to;
    BlockStore::Held held;
    bool found = false;
  };
  struct Door {
    explicit Door(DatagramSocket bound);
    DatagramSocket socket;
    DatagramBatch batch;
    std::vector<Job> jobs;
    std::vector<std::byte> stage;  // segments on their way out, side by side
    std::uint64_t drops = 0;  // counted so far
    std::thread thread;
  };
  UdpEndpoint(std::shared_ptr<ServerCore> core, const UdpEndpointOptions& options) : core_(std::move(core)), options_(options) {}
  void run(Door& door);
  // One batch. returns: how many datagrams there were.
  std::size_t serve(Door& door, DatagramSocket::Wait wait);
  void look_up(std::span<Job> jobs);
  void let_go(std::span<Job> jobs);
  void answer(Door& door, Job& job);
  bool send_segments(Door& door, const Job& job, SegmentWalk& walk);
  void send_status(DatagramSocket& socket, const DatagramAddress& to, const std::array<std::byte, kStatusBytes>& status);
  bool send_all(DatagramSocket& socket, const Job& job, std::span<DatagramSocket::Message> messages);
  bool send_pieces(DatagramSocket& socket, const Job& job, const DatagramSocket::Message& message);

  std::shared_ptr<ServerCore> core_;
  UdpEndpointOptions options_;
  std::vector<std::unique_ptr<Door>> doors_;
  std::atomic<bool> stop_{false};
  UdpCounters counters_;
};

}  // namespace paramwire
