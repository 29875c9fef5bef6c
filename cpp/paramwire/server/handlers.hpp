// What a server answers: frames in, frames out. No socket, no thread, no clock inside: one frame can test a handler, and the
// simulation runs this very code.
//
// A ServerSession is one connection. The edge (server/server.cpp, or the simulation's network) feeds parsed frames and sends what
// comes back. Caller locks: one call at a time over all sessions, except body_received(), which touches only its session and
// its slot's payload and may run outside the lock.
#pragma once

#include "paramwire/base/stream_filter.hpp"
#include "paramwire/control/coordinator.hpp"
#include "paramwire/server/delta_maker.hpp"
#include "paramwire/server/udp_responder.hpp"
#include "paramwire/server/verbs_endpoint.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/wire/frame.hpp"
#include "paramwire/wire/message.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// One frame to send: `head` (header and meta), then `body`. The body is either owned, or a held slot of the store that must
// be handed back with Handlers::sent() once the bytes left (or the connection died).
struct Outgoing {
  Bytes head;
  std::span<const std::byte> body;
  std::shared_ptr<const Bytes> owned;        // keeps `body` when it is not a slot's
  std::optional<SlotIndex> held;
  int fd = -1;                               // travels beside the head (SCM_RIGHTS); stays the sender's property
};

// Gives descriptors to clients on the same host; nullptr where there is no such thing (TCP-only servers, the simulation).
class DescriptorSource {
 public:
  virtual ~DescriptorSource() = default;
  struct Pins {
    int fd = -1;
    std::uint32_t capacity = 0;  // words
  };
  // The pin table of the process at the other end of `connection`; the same one for every call of that connection.
  virtual Result<Pins> pins(std::uint64_t connection) = 0;
};

// Not "Session", which compute/backend.hpp has: libraries that hold both layers would take one's destructor for the other's.
class ServerSession {
 public:
  // `local`: a unix socket, over which descriptors can pass. `connection` names it to the DescriptorSource.
  ServerSession(std::uint64_t connection, bool local) : connection_(connection), local_(local) {}

  // Frames to send, in order. The edge takes from the front.
  std::deque<Outgoing> outgoing;
  bool greeted() const noexcept { return greeted_; }
  // The server's UDP port at the address that this connection reached; 0: none there.
  void set_udp_port(std::uint16_t port) noexcept { udp_port_ = port; }
  // The address of this host that the connection reached; none over a unix socket.
  void set_local_address(const std::optional<Gid>& address) noexcept { local_address_ = address; }
  std::uint32_t peer_pid() const noexcept { return peer_pid_; }

  // A key that this server and the client of this connection alone can derive (RFC 8446 7.5), other ones for each label and context;
  // nullopt on connections without TLS. The client's side: ControlLink::export_key.
  std::optional<ExportedKey> export_key(std::string_view label, std::span<const std::byte> context) const {
    return exporter ? exporter(label, context) : std::nullopt;
  }
  // Set by the edge, where there is one.
  std::function<std::optional<ExportedKey>(std::string_view label, std::span<const std::byte> context)> exporter;

 private:
  friend class Handlers;
  struct Put {
    PublishId publish;
    PutSlot slot;
    std::uint64_t request = 0;
    std::uint64_t at = 0;                       // bytes arrived
    std::uint64_t crc64 = 0;
    std::vector<std::uint32_t> extents;
  };
  struct Wait {
    std::uint64_t request = 0;
    SnapshotMessage snapshot;
    Micros deadline = 0;
  };
  std::uint64_t connection_;
  bool local_;
  bool greeted_ = false;
  std::uint32_t peer_pid_ = 0;
  std::optional<Put> put_;                      // whose body is arriving
  std::optional<Error> put_error_;              // of a put whose body is being dropped
  std::uint64_t put_request_ = 0;
  std::vector<Wait> waits_;
  std::uint16_t udp_port_ = 0;
  std::uint64_t udp_session_ = 0;               // 0: none was opened
  std::optional<Gid> local_address_;
  bool verbs_ = false;                          // a queue pair was asked for
};

struct HandlerOptions {
  std::string host_id;              // told to clients, see WelcomeMessage
  std::string unix_path;
  std::uint64_t put_bytes_max = std::uint64_t{1} << 40;  // one block; bounds what a header can ask for before allocation
  std::uint32_t waits_max = 64;     // per session: snapshots waited for at once
  Micros wait_max = 60 * kMicrosPerSecond;
  DatagramDoor* datagrams = nullptr;        // opens UDP sessions; nullptr: this server takes no datagrams
  std::string no_datagrams = "it was started without";  // why, for error texts
  VerbsDoor* verbs = nullptr;               // opens queue pairs; nullptr: this server can't be read by RDMA
  std::string no_verbs = "it was started without";
  DeltaMaker* deltas = nullptr;             // nullptr: this server makes none
  std::function<Result<std::uint64_t>()> random = system_random;  // for publish ids; the simulation brings its own
};

class Handlers {
 public:
  // All must outlive the handlers. `descriptors` may be nullptr.
  Handlers(BlockStore& store, Tier& tier, Coordinator& coordinator, DescriptorSource* descriptors, HandlerOptions options);

  // A frame's header and meta arrived. If it has a body, `target` says where it goes.
  // errors: the connection must be closed (after an ERROR frame that is already in session.outgoing).
  Status on_head(ServerSession& session, const FrameHeader& header, std::span<const std::byte> meta, FrameParser::BodyTarget& target, Micros now);
  // The next bytes of a PUT's body are in place. Runs the CRCs over them. Needs no lock.
  void on_body(ServerSession& session, std::span<const std::byte> part) noexcept;
  // Some of a PUT's body arrived since the last call: keeps its publish from being taken for idle. Call it while bodies
  // arrive, more often than publish_idle_max; under the lock.
  void on_progress(const ServerSession& session, Micros now);
  // The frame is over.
  Status on_end(ServerSession& session, const FrameHeader& header, Micros now);
  // The connection is gone: open puts are cancelled, held slots in `outgoing` let go. Leases and publishes live on until
  // their time is up, since the client may come back for them.
  void on_closed(ServerSession& session, Micros now);
  // `outgoing.held` may go.
  void sent(const Outgoing& outgoing, Micros now);
  // Answers waits that are met or over, for every session in `sessions`; call after finish and from time to time.
  void answer_waits(const std::vector<ServerSession*>& sessions, Micros now);
  void tick(Micros now) { store_.tick(now); }

  // Publishes of this very process take the same steps without frames.
  BlockStore& store() noexcept { return store_; }
  Result<Version> finish(PublishId id, Micros now);
  const HandlerOptions& options() const noexcept { return options_; }
  // True once after a version was committed: somebody must call answer_waits.
  bool take_published() noexcept { return std::exchange(published_, false); }

 private:
  Status dispatch(ServerSession& session, FrameType type, std::uint64_t request, std::span<const std::byte> meta, Micros now);
  void reply(ServerSession& session, Bytes head);
  void reply_error(ServerSession& session, std::uint64_t request, const Error& error);
  Status on_hello(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta);
  Status on_snapshot(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta, Micros now);
  Status answer_snapshot(ServerSession& session, std::uint64_t request, const SnapshotMessage& message, Micros now);
  Status on_get(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta, Micros now);
  Status on_deltas(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta, Micros now);
  Status on_arena(ServerSession& session, std::uint64_t request, std::span<const std::byte> meta);
  Status on_pins(ServerSession& session, std::uint64_t request);
  Status on_udp_open(ServerSession& session, std::uint64_t request);
  Status on_verbs(ServerSession& session, FrameType type, std::uint64_t request, std::span<const std::byte> meta);
  Status on_publish(ServerSession& session, FrameType type, std::uint64_t request, std::span<const std::byte> meta, Micros now);
  Result<PutSlot> begin_put(const PutMessage& put, std::uint64_t body_size, Micros now);
  void on_stat(ServerSession& session, std::uint64_t request);

  BlockStore& store_;
  Tier& tier_;
  Coordinator& coordinator_;
  DescriptorSource* descriptors_;
  HandlerOptions options_;
  bool published_ = false;
  std::uint64_t frames_ = 0;
  std::uint64_t gets_ = 0;
  std::uint64_t get_bytes_ = 0;
};

}  // namespace paramwire
