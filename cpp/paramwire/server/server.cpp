#include "paramwire/server/server.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/host_identity.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/server/event_loop.hpp"
#include "paramwire/server/server_core.hpp"
#include "paramwire/server/udp_endpoint.hpp"

#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <pthread.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace paramwire {

// The loop and its thread. In the child of a fork the thread is not there: nothing is stopped or joined.
class Server::Thread {
 public:
  explicit Thread(std::unique_ptr<EventLoop> loop) : loop_(std::move(loop)) {}

  Status start() {
    // Signals belong to the embedding program's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    Status status;
    try {
      thread_ = std::thread([this] {
        pthread_setname_np(pthread_self(), "pw-server");
        loop_->run();
      });
    } catch (const std::system_error& refused) {
      status = Error(Code::kUnavailable, cat("no thread for the server: ", std::string_view(refused.what())));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return status;
  }
  void stop(Micros drain_deadline) {
    if (!thread_.joinable()) return;
    loop_->stop(drain_deadline);
    thread_.join();
  }
  void disown() noexcept {
    loop_->disown();
    // Not detach(): glibc has no such thread in the child, and std::thread throws its EINVAL.
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
  }

 private:
  std::unique_ptr<EventLoop> loop_;
  std::thread thread_;
};

namespace {

// A directory that only this user can enter. errors: kUnavailable naming what is wrong with it.
Status private_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return errno_error(Code::kUnavailable, cat("make directory ", path), errno);
  struct stat found{};
  if (::lstat(path.c_str(), &found) != 0) return errno_error(Code::kUnavailable, cat("directory ", path), errno);
  if (!S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() || (found.st_mode & 077) != 0) {
    return Error(Code::kUnavailable, cat(path, " is not a directory of user ", ::geteuid(), " with mode 0700: sockets in it could be replaced by others"));
  }
  return {};
}

Result<std::vector<Endpoint>> wanted_endpoints(const ServerOptions& options, const Incarnation& incarnation) {
  std::vector<Endpoint> out;
  for (const std::string& text : options.listen) {
    PARAMWIRE_TRY(endpoint, parse_endpoint(text));
    out.push_back(std::move(endpoint));
  }
  if (!options.listen.empty()) return out;
  if (!options.unix_directory.empty()) {
    PARAMWIRE_CHECK(private_directory(options.unix_directory));
    out.push_back(Endpoint::unix_socket(cat(options.unix_directory, "/pw-", hex64(incarnation.low), ".sock")));
  }
  out.push_back(Endpoint::tcp("127.0.0.1", 0));
  return out;
}

// Clients may run in another directory.
std::string absolute_path(const std::string& path) {
  std::error_code error;
  const auto absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.string();
}

}  // namespace

namespace {

// UDP ports of a server's listeners: of each tcp one its own, of unix ones that at 127.0.0.1.
struct UdpDoors {
  std::vector<DatagramAddress> addresses;
  std::vector<std::size_t> owners;  // the listener of each address
};

UdpDoors udp_doors(const std::vector<Listener>& listeners) {
  UdpDoors out;
  for (std::size_t i = 0; i < listeners.size(); ++i) {
    const auto address = DatagramAddress::local_of(listeners[i].fd());
    if (!address) continue;
    out.addresses.push_back(*address);
    out.owners.push_back(i);
  }
  return out;
}

std::vector<std::uint16_t> ports_of(const std::vector<Listener>& listeners, const UdpDoors& doors, const UdpEndpoint& endpoint) {
  std::vector<std::uint16_t> ports(listeners.size(), 0);
  std::uint16_t local = 0;
  for (std::size_t i = 0; i < doors.owners.size(); ++i) {
    ports[doors.owners[i]] = endpoint.port(i);
    if (local == 0 && (listeners[doors.owners[i]].endpoint().host == "127.0.0.1" || listeners[doors.owners[i]].endpoint().host == "0.0.0.0")) local = endpoint.port(i);
  }
  for (std::size_t i = 0; i < listeners.size(); ++i) {
    if (listeners[i].endpoint().kind == Endpoint::Kind::kUnix) ports[i] = local;
  }
  return ports;
}

// A pinned device must be there; "auto" says why there is none.
Status open_verbs(const ServerOptions& options, ServerCore& core, HandlerOptions& handlers, TierOptions& tier) {
  if (options.verbs == "off") return {};
  const bool any = options.verbs == "auto";
  auto library = options.verbs_library ? options.verbs_library() : VerbsLibrary::open();
  auto endpoint = library.ok() ? VerbsEndpoint::create(*library, {any ? "" : options.verbs, options.verbs_gid_index}) : Result<std::unique_ptr<VerbsEndpoint>>(library.error());
  if (!endpoint.ok()) {
    handlers.no_verbs = endpoint.error().message();
    return any && endpoint.error().code() != Code::kInvalid ? Status() : Status(std::move(endpoint).error());
  }
  core.verbs = std::move(*endpoint);
  handlers.verbs = core.verbs.get();
  tier.commit_bytes = std::max(tier.commit_bytes, kRegionBytes);
  return {};
}

}  // namespace

Server::Server() = default;

Result<std::unique_ptr<Server>> Server::open(const ServerOptions& options) {
  if (options.connections_max == 0) return Error(Code::kInvalid, "connections_max is 0: nobody could connect");
  std::unique_ptr<Server> server(new Server());
  PARAMWIRE_TRY(high, system_random());
  PARAMWIRE_TRY(low, system_random());
  server->incarnation_ = {high, low};

  PARAMWIRE_TRY(tls, open_tls(options.key_file, options.key, TlsEnd::kServer));
  PARAMWIRE_TRY(wanted, wanted_endpoints(options, server->incarnation_));
  HandlerOptions handler_options;
  std::vector<Listener> listeners;
  for (const Endpoint& endpoint : wanted) {
    PARAMWIRE_TRY(listener, Listener::open(endpoint, tls ? Reach::kAnywhere : Reach::kThisHost));
    server->endpoints_.push_back(listener.endpoint());
    if (endpoint.kind == Endpoint::Kind::kUnix && handler_options.unix_path.empty()) handler_options.unix_path = absolute_path(endpoint.path);
    listeners.push_back(std::move(listener));
  }
  handler_options.host_id = host_identity();
  handler_options.put_bytes_max = options.put_bytes_max;

  auto core = std::make_shared<ServerCore>();
  PARAMWIRE_TRY(coordinator, open_coordinator(options.coordinator, options.epoch_after));
  TierOptions tier_options = options.tier_options;
  PARAMWIRE_CHECK(open_verbs(options, *core, handler_options, tier_options));
  PARAMWIRE_TRY(tier, open_tier(options.tier, tier_options));
  server->epoch_ = coordinator->epoch();
  core->trace = options.trace;
  core->tls = std::move(tls);
  core->coordinator = std::move(coordinator);
  core->tier = std::move(tier);
  BlockStoreOptions store_options = options.store;
  store_options.incarnation = server->incarnation_;
  store_options.epoch = server->epoch_;
  core->store.emplace(*core->tier, &core->pins, store_options);
  LoopLimits limits{options.connections_max, options.send_timeout, options.receive_timeout, {}};
  if (options.udp) {
    const UdpDoors doors = udp_doors(listeners);
    PARAMWIRE_TRY(responder, UdpResponder::create(server->incarnation_, system_random));
    core->udp = std::move(responder);
    UdpEndpointOptions udp_options;
    udp_options.busy_poll = options.udp_busy_poll;
    udp_options.fail_gso = options.udp_fail_gso;
    auto endpoint = UdpEndpoint::open(core, doors.addresses, udp_options);
    if (endpoint.ok()) {
      limits.udp_ports = ports_of(listeners, doors, **endpoint);
      server->udp_ = std::move(*endpoint);
      handler_options.datagrams = core->udp.get();
    } else {
      handler_options.no_datagrams = endpoint.error().to_string();
    }
  }
  server->udp_ports_ = limits.udp_ports;
  server->udp_ports_.resize(listeners.size(), 0);
  if (options.deltas.bytes_max > 0) {
    core->deltas = std::make_unique<DeltaMaker>(core->mutex, *core->store, options.deltas);
    handler_options.deltas = core->deltas.get();
  }
  core->handlers.emplace(*core->store, *core->tier, *core->coordinator, &core->pins, std::move(handler_options));

  PARAMWIRE_TRY(loop, EventLoop::create(core, std::move(listeners), limits));
  server->core_ = std::move(core);
  server->thread_ = std::make_unique<Thread>(std::move(loop));
  PARAMWIRE_CHECK(server->thread_->start());
  if (server->udp_) PARAMWIRE_CHECK(server->udp_->start());
  return server;
}

Server::~Server() { close(0); }

void Server::close(Micros drain) {
  if (thread_ == nullptr) return;
  if (core_->guard.in_child()) {
    // The loop's thread and its locks stayed in the parent: let go of the objects without running their ends.
    thread_->disown();
    if (udp_) {
      udp_->disown();
      static_cast<void>(udp_.release());
    }
    static_cast<void>(thread_.release());
    static_cast<void>(new std::shared_ptr<ServerCore>(std::move(core_)));
    return;
  }
  thread_->stop(steady_clock().now() + drain);
  thread_.reset();
  if (udp_) udp_->stop();  // after the connections: what they were promised was still sent
  {
    const std::lock_guard lock(core_->mutex);
    core_->closed = true;  // from here on nobody finishes a publish
  }
  core_->deltas.reset();
}

Result<LocalPublish> Server::publish(bool any_base, const std::optional<Version>& base) {
  if (core_ == nullptr) return Error(Code::kInvalid, "server: handle used after fork");
  PARAMWIRE_CHECK(core_->guard.check("server"));
  PARAMWIRE_TRY(high, system_random());
  PARAMWIRE_TRY(low, system_random());
  const PublishId id{high, low};
  std::unique_lock lock(core_->mutex);
  if (core_->closed) return Error(Code::kUnreachable, "this server is closed");
  PARAMWIRE_TRY(version, core_->store->publish_start(id, any_base, base, steady_clock().now()));
  lock.unlock();
  core_->wake_loop();  // an idle publish must end some time
  return LocalPublish(core_, id, version);
}

std::optional<Version> Server::newest() const {
  if (core_ == nullptr || core_->guard.in_child()) return std::nullopt;
  const std::lock_guard lock(core_->mutex);
  return core_->store->newest();
}

Result<ServerStats> Server::stats() const {
  if (core_ == nullptr) return Error(Code::kInvalid, "server: handle used after fork");
  PARAMWIRE_CHECK(core_->guard.check("server"));
  ServerStats out;
  {
    const std::lock_guard lock(core_->mutex);
    out.store = core_->store->stats();
    out.pin_tables = core_->pins.tables();
    out.tier_note = core_->store->tier_note();
    if (core_->deltas) out.deltas = core_->deltas->stats();
    if (core_->verbs) out.verbs = core_->verbs->stats();
    out.no_verbs = core_->verbs ? std::string() : core_->handlers->options().no_verbs;
  }
  const LoopCounters& counters = core_->counters;
  out.connections = counters.connections;
  out.accepted = counters.accepted;
  out.refused = counters.refused;
  out.closed_for_protocol = counters.closed_for_protocol;
  out.closed_for_key = counters.closed_for_key;
  out.closed_for_stall = counters.closed_for_stall;
  out.loop_turns = counters.loop_turns;
  if (core_->udp) {
    const ResponderStats in = core_->udp->stats();
    out.udp = {in.sessions, in.received, in.malformed, in.unauthentic, in.replayed, in.answered, in.tokens, in.refused};
  }
  if (udp_) {
    const UdpCounters& sent = udp_->counters();
    out.udp.segments = sent.segments;
    out.udp.bytes = sent.bytes;
    out.udp.dropped = sent.dropped;
    out.udp.too_long = sent.too_long;
    out.udp.failed = sent.failed;
    out.udp.gso_disabled = sent.gso_disabled;
    out.udp.socket_drops = sent.socket_drops;
    out.udp.busy_poll_us = sent.busy_poll_us;
  }
  return out;
}

Result<NamedHistograms> Server::durations() const {
  if (core_ == nullptr) return Error(Code::kInvalid, "server: handle used after fork");
  PARAMWIRE_CHECK(core_->guard.check("server"));
  const ServerDurations& durations = core_->durations;
  return NamedHistograms{{"request", durations.request.snapshot()}, {"turn", durations.turn.snapshot()}, {"finish", durations.finish.snapshot()}};
}

// ---------------------------------------------------------------- LocalPublish

namespace {
Result<Version> timed_finish(ServerCore& core, PublishId id) {
  const Stopwatch watch(core.durations.finish);
  const TraceSpan span(core.trace.get(), "finish");
  return core.handlers->finish(id, steady_clock().now());
}
}  // namespace

LocalPublish::LocalPublish(LocalPublish&& other) noexcept = default;
LocalPublish& LocalPublish::operator=(LocalPublish&& other) noexcept {
  if (this != &other) {
    abort();
    core_ = std::move(other.core_);
    id_ = other.id_;
    version_ = other.version_;
  }
  return *this;
}
LocalPublish::~LocalPublish() { abort(); }

Status LocalPublish::usable() const {
  if (core_->closed) return Error(Code::kUnreachable, "the server of this publish is closed");
  return {};
}

Status LocalPublish::put(const BlockSpec& spec, std::span<const std::byte> bytes) {
  if (core_ == nullptr) return Error(Code::kInvalid, "this publish was finished or aborted");
  PARAMWIRE_CHECK(core_->guard.check("publish"));
  PARAMWIRE_TRY(size, block_bytes(spec.dtype, spec.shape, spec.shard));
  if (!stored_size_valid(spec.codec, size, bytes.size())) {
    return Error(Code::kInvalid, cat("tensor \"", spec.tensor, "\": ", dtype_name(spec.dtype), ' ', spec.shape, ' ', spec.shard, " has ", size,
                                     " bytes, ", bytes.size(), " were given"));
  }
  std::unique_lock lock(core_->mutex);
  PARAMWIRE_CHECK(usable());
  BlockSpec stored = spec;
  stored.stored_size = bytes.size();
  PARAMWIRE_TRY(put, core_->store->put_begin(id_, stored, steady_clock().now()));
  lock.unlock();
  extents_.assign(static_cast<std::size_t>(extent_count(bytes.size())), 0);
  const std::uint64_t crc = copy_crc64_extents(put.payload.data(), bytes.data(), bytes.size(), extents_);
  lock.lock();
  return core_->store->put_seal(id_, put, crc, extents_, steady_clock().now());
}

Status LocalPublish::remove(std::string_view tensor) {
  if (core_ == nullptr) return Error(Code::kInvalid, "this publish was finished or aborted");
  PARAMWIRE_CHECK(core_->guard.check("publish"));
  const std::lock_guard lock(core_->mutex);
  PARAMWIRE_CHECK(usable());
  return core_->store->remove(id_, tensor, steady_clock().now());
}

Status LocalPublish::alias(std::string_view tensor, std::string_view target) {
  if (core_ == nullptr) return Error(Code::kInvalid, "this publish was finished or aborted");
  PARAMWIRE_CHECK(core_->guard.check("publish"));
  const std::lock_guard lock(core_->mutex);
  PARAMWIRE_CHECK(usable());
  return core_->store->alias(id_, tensor, target, steady_clock().now());
}

Result<Version> LocalPublish::finish() {
  if (core_ == nullptr) return Error(Code::kInvalid, "this publish was aborted");
  PARAMWIRE_CHECK(core_->guard.check("publish"));
  std::unique_lock lock(core_->mutex);
  PARAMWIRE_CHECK(usable());
  PARAMWIRE_TRY(version, timed_finish(*core_, id_));
  lock.unlock();
  core_->wake_loop();  // somebody may wait for this version
  return version;
}

void LocalPublish::abort() noexcept {
  if (core_ == nullptr || core_->guard.in_child()) return;
  {
    const std::lock_guard lock(core_->mutex);
    core_->store->abort(id_);  // no effect on one that is finished
  }
  core_.reset();
}

}  // namespace paramwire
