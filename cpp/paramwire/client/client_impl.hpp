// Inside of the client: one control link, the ways that bytes come (client/paths), the newest manifest, and two threads.
//
// threads: "pw-renew" renews leases, "pw-fetch" runs tickets; both started when first needed and ended by close(). One that
// waits for a server that does not answer is left to its deadline: it holds this object until then. No lock is held while the
// network is waited for, except the control link's own.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/client/encoded_reads.hpp"
#include "paramwire/client/fetch_machine.hpp"
#include "paramwire/client/held_manifest.hpp"
#include "paramwire/client/paths.hpp"
#include "paramwire/net/control_link.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace paramwire {

// Tickets that may wait: each holds its caller's buffers, so a bound keeps a runaway producer from holding all memory.
inline constexpr std::size_t kTicketsMax = 1024;

struct Snapshot::State {
  std::shared_ptr<ClientImpl> client;
  std::shared_ptr<const HeldManifest> held;
  LeaseId lease = 0;
  std::atomic<Micros> lease_deadline{0};  // on the client's clock, counted from when the grant was asked for
  std::atomic<bool> lease_lost{false};
  std::atomic<bool> closed{false};
};

struct Ticket::State {
  std::vector<FetchRequest> requests;
  std::shared_ptr<Snapshot::State> snapshot;
  Micros submitted = 0;
  Micros deadline = 0;
  mutable std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
  Micros completed = 0;
  Status result;
};

class ClientImpl : public std::enable_shared_from_this<ClientImpl> {
 public:
  ClientImpl(Endpoint endpoint, const ClientOptions& options, Caller caller);
  ~ClientImpl() { close(); }

  // First connection and choice of the transport.
  Status open(Micros deadline);
  void close();
  Status check_usable() const;
  Micros deadline(const std::optional<Micros>& timeout) const;

  struct Opened {
    std::shared_ptr<const HeldManifest> held;
    LeaseId lease = 0;
    Micros lease_deadline = 0;
  };
  Result<Opened> open_snapshot(const std::optional<Version>& want, Micros lease_ttl, Micros wait, Micros deadline);
  void release_lease(LeaseId lease, const Incarnation& incarnation) noexcept;
  // errors: kUnavailable when there is no thread to renew it.
  Status watch_lease(const std::shared_ptr<Snapshot::State>& snapshot);

  // The loop around a FetchMachine. `held` is replaced when the machine opens another snapshot.
  Status fetch(FetchMachine::Mode mode, std::shared_ptr<const HeldManifest>& held, std::span<FetchRequest> requests, Micros deadline);
  Result<Ticket> submit(std::shared_ptr<Snapshot::State> snapshot, std::vector<FetchRequest> requests, Micros deadline);
  Result<BlockView> view(const HeldManifest& held, const BlockRead& what);
  Result<ControlLink::Answer> call(const std::function<Bytes(std::uint64_t request)>& encode, FrameType expected, Micros deadline);

  const std::shared_ptr<VerbsNode>& verbs() const noexcept { return paths_.verbs(); }
  ClientStats stats() const;
  std::uint64_t decode_memory_bytes() const { return decode_benches_.bytes(); }
  NamedHistograms durations() const;
  Incarnation incarnation() const;
  const Endpoint& endpoint() const noexcept { return endpoint_; }
  const Caller& caller() const noexcept { return caller_; }
  const ClientOptions& options() const noexcept { return options_; }

 private:
  std::shared_ptr<ControlLink> control() const;
  // A new control link. returns: whether the incarnation is the one seen before.
  Result<bool> reconnect(const std::shared_ptr<ControlLink>& broken, Micros deadline);
  Result<bool> reconnect_alone(const std::shared_ptr<ControlLink>& broken, Micros deadline);
  // A thread of this client, named, that keeps it and says when it is over.
  // errors: kUnavailable when the system gives none.
  Result<std::thread> start_loop(const char* name, void (ClientImpl::*loop)(), bool& running);
  // Of those that one request became: gives each read its part of the request's list; and when all are read, makes offsets count from the request's target.
  static void defer_checks(const FetchRequest& request, std::span<BlockRead> reads);
  static void place_checks(const FetchRequest& request, std::span<const BlockRead> reads) noexcept;
  // As Link::read(), with ranges and targets of raw bytes.
  void read_raw(Link& link, std::span<BlockRead> batch, Micros deadline);
  FetchMachine::Event read_round(const HeldManifest& held, std::span<FetchRequest> requests, Micros deadline, std::optional<Error>& error);
  void renew_loop();
  Micros renew_due(Micros now);
  void fetch_loop();

  const Endpoint endpoint_;
  const ClientOptions options_;
  const Caller caller_;
  const ForkGuard fork_;
  Trace* const trace_;                             // of options_, or nullptr
  Histogram fetch_ns_, view_ns_, snapshot_ns_, control_ns_;
  std::atomic<bool> closed_{false};

  mutable std::mutex mutex_;                       // everything down to the pool
  std::shared_ptr<ControlLink> control_;
  Incarnation incarnation_;
  std::shared_ptr<const HeldManifest> newest_;     // base of deltas
  ClientStats counters_;
  std::condition_variable reconnect_turn_;
  bool reconnecting_ = false;                      // one reconnection at a time,
  std::thread::id reconnecting_in_;                // in this thread

  Paths paths_;
  ChunkIndexes chunk_indexes_;
  DecodeBenches decode_benches_;
  DecodeCounts decoded_;
  mutable std::mutex view_mutex_;                          // the one link that gives views, so that each block is verified once
  std::unique_ptr<Link> view_link_;
  LinkStats view_dropped_;                         // of earlier ones
  Incarnation view_incarnation_;

  std::mutex renew_mutex_;
  std::condition_variable renew_wake_;
  std::vector<std::weak_ptr<Snapshot::State>> leased_;
  std::thread renew_thread_;

  std::mutex tickets_mutex_;
  std::condition_variable tickets_wake_;
  std::deque<std::shared_ptr<Ticket::State>> tickets_;
  std::thread fetch_thread_;

  std::mutex threads_mutex_;
  std::condition_variable threads_ended_;
  bool renew_running_ = false;
  bool fetch_running_ = false;
};

}  // namespace paramwire
