// A parameter server in this process: listens, serves, and lets its own process publish without a socket.
//
//   PARAMWIRE_TRY(server, Server::open({}));
//   PARAMWIRE_TRY(publish, server->publish());
//   publish.put({.tensor = "w", .dtype = DType::kF32, .shape = {2, 3}}, bytes);
//   PARAMWIRE_TRY(version, publish.finish());
//   server->endpoints()  -> "tcp://127.0.0.1:40123"
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/base/metrics.hpp"
#include "paramwire/base/trace.hpp"
#include "paramwire/net/cluster_key.hpp"
#include "paramwire/server/server_stats.hpp"
#include "paramwire/store/block_store.hpp"
#include "paramwire/store/tier.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

struct ServerCore;
class UdpEndpoint;
class VerbsApi;

struct ServerOptions {
  // Addresses, as parse_endpoint takes them; port 0 is any free one. Empty: tcp://127.0.0.1:0, and a unix socket in
  // `unix_directory` if that is set. Only loopback and unix sockets are served without a cluster key.
  std::vector<std::string> listen;
  // The cluster key: a file that ClusterKey::load takes, or a loaded key; not both. With it every TCP connection is TLS 1.3 and proves
  // the key (net/tls.hpp), whatever its address; unix sockets are as without, open to this user alone.
  std::string key_file;
  std::shared_ptr<const ClusterKey> key;
  // Made with mode 0700 if it is not there; must belong to this user and be closed to others. Keep it short: a socket path
  // has at most 107 bytes.
  std::string unix_directory;
  // Takes GETs by UDP at every tcp address, on the same port number where that is free.
  bool udp = true;
  bool udp_busy_poll = false;         // the UDP thread spins: a whole core for several times lower latency
  int udp_fail_gso = 0;               // for tests: the first two segmented sends fail with this errno
  // Read by RDMA: "auto": where there is a device that can; "off"; or a device, "rx0", or with its port "rx0:1", without which open() fails.
  std::string verbs = "auto";
  std::optional<std::uint32_t> verbs_gid_index;  // of that device's port; none: chosen for each client by its address
  std::function<Result<std::shared_ptr<VerbsApi>>()> verbs_library = nullptr;  // for tests: another provider
  std::string tier = "memory";
  TierOptions tier_options;
  std::string coordinator = "memory";
  std::uint32_t epoch_after = 0;      // the server's epoch is above this one: of the checkpoint that it is restored from
  BlockStoreOptions store;            // incarnation and epoch are set by open()
  DeltaOptions deltas;                // between versions, for clients that hold older ones
  std::uint64_t put_bytes_max = std::uint64_t{1} << 40;
  // Each costs about 70 KiB and a descriptor.
  std::uint32_t connections_max = 1024;
  // A client that takes no byte of what waits for it (or does not say HELLO) for so long is dropped: while it stands still,
  // the slots being sent to it can't be reused. Too short, and a client that swaps or is debugged loses its connection.
  Micros send_timeout = 10 * kMicrosPerSecond;
  // A client that stops in the middle of a put for so long is dropped: the put holds a slot.
  Micros receive_timeout = 30 * kMicrosPerSecond;
  std::shared_ptr<Trace> trace;       // spans of this server; none: nothing is recorded
};

// A publish of the server's own process. One thread; several publishes may run side by side. Move-only; the destructor
// aborts what was not finished. May outlive the server, whose memory it keeps; calls then give kUnreachable.
class LocalPublish {
 public:
  LocalPublish(LocalPublish&& other) noexcept;
  LocalPublish& operator=(LocalPublish&& other) noexcept;
  ~LocalPublish();

  Version version() const noexcept { return version_; }  // that finish will commit
  // Copies `bytes`, the stored ones, into the store. errors: kInvalid when they do not fit the spec; as BlockStore::put_begin.
  Status put(const BlockSpec& spec, std::span<const std::byte> bytes);
  Status remove(std::string_view tensor);
  Status alias(std::string_view tensor, std::string_view target);
  // errors: as BlockStore::finish. Repeated after success it gives the same version.
  Result<Version> finish();
  void abort() noexcept;

 private:
  friend class Server;
  LocalPublish(std::shared_ptr<ServerCore> core, PublishId id, Version version) : core_(std::move(core)), id_(id), version_(version) {}
  Status usable() const;  // lock held

  std::shared_ptr<ServerCore> core_;
  PublishId id_;
  Version version_;
  std::vector<std::uint32_t> extents_;
};

class Server {
 public:
  // Opens coordinator, tier and store, draws the incarnation, listens, and starts the thread ("pw-server").
  // errors: kInvalid for options that can't be meant; kUnavailable with the system's reason. Nothing is left behind.
  static Result<std::unique_ptr<Server>> open(const ServerOptions& options);
  ~Server();  // close(0)
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Really bound, in the order asked for.
  const std::vector<Endpoint>& endpoints() const noexcept { return endpoints_; }
  // UDP port of each endpoint, 0 where there is none.
  const std::vector<std::uint16_t>& udp_ports() const noexcept { return udp_ports_; }
  const Incarnation& incarnation() const noexcept { return incarnation_; }
  std::uint32_t epoch() const noexcept { return epoch_; }

  // On top of the newest version, whatever it is; or (any_base false) only if `base` is the newest (none: nothing yet).
  // errors: as BlockStore::publish_start; kUnreachable after close; kInvalid in the child of a fork. Any thread.
  Result<LocalPublish> publish(bool any_base = true, const std::optional<Version>& base = std::nullopt);
  std::optional<Version> newest() const;
  Result<ServerStats> stats() const;
  // How long things took, in ns: "request" (a frame's handling, with the store locked), "turn" (of the event loop: what others
  // wait), "finish" (a publish becomes visible, with the store locked). errors: as stats().
  Result<NamedHistograms> durations() const;
  // Takes no new work, sends what is queued for up to `drain` microseconds, then ends. Idempotent. One thread.
  void close(Micros drain);

 private:
  class Thread;
  Server();

  std::shared_ptr<ServerCore> core_;
  std::unique_ptr<Thread> thread_;
  std::unique_ptr<UdpEndpoint> udp_;
  std::vector<Endpoint> endpoints_;
  std::vector<std::uint16_t> udp_ports_;
  Incarnation incarnation_;
  std::uint32_t epoch_ = 0;
};

}  // namespace paramwire
