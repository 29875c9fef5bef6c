#include "paramwire/client/paths.hpp"

#include "paramwire/base/host_identity.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/shm_link.hpp"
#include "paramwire/net/tcp_link.hpp"
#include "paramwire/net/udp_link.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_link.hpp"

#include <algorithm>

namespace paramwire {

namespace {

// Threads of one client that may read at once: the fetch thread, two prefetch threads and a few callers. Each link is a connection at the
// server, or a mapping here.
constexpr std::size_t kLinksMax = 8;
// With "auto" a path that swallows datagrams costs connect this much: half of it is the wait for a first answer.
constexpr Micros kUdpTrial = kMicrosPerSecond;
// Room that udp needs for large fetches, as SO_RCVBUF counts: a window of 4 MiB and the kernel's own part. With less, tcp, whose buffers
// the kernel grows by itself, is faster over any path longer than a cable.
constexpr std::uint64_t kUdpBulkBuffer = std::uint64_t{8} << 20;

// With "auto", ways over RDMA that carry nothing cost connect this much: two of them, each noticed in two seconds.
constexpr Micros kVerbsTrial = 5 * kMicrosPerSecond;

constexpr std::array<std::string_view, kTransports> kNames = {"shm", "verbs", "udp", "tcp"};
constexpr std::array<Transport, kTransports> kInOrder = {Transport::kShm, Transport::kVerbs, Transport::kUdp, Transport::kTcp};

std::optional<Transport> transport_of(std::string_view name) {
  for (const Transport transport : kInOrder) {
    if (transport_name(transport) == name) return transport;
  }
  return std::nullopt;
}

}  // namespace

std::string_view transport_name(Transport transport) noexcept { return kNames[static_cast<std::size_t>(transport)]; }

Paths::Paths(const Endpoint& endpoint, const ClientOptions& options, const Caller& caller, std::function<Incarnation()> incarnation)
    : endpoint_(endpoint), options_(options), caller_(caller), incarnation_(std::move(incarnation)),
      credit_(std::make_shared<InboundCredit>(2 * std::uint64_t{kLinkReceiveBuffer})),
      verbs_(std::make_shared<VerbsNode>(VerbsWish{options.verbs_device, options.verbs_gid_index}, options.verbs_library ? options.verbs_library : [] { return VerbsLibrary::open(); })) {
  for (const Transport transport : kInOrder) {
    pools_[static_cast<std::size_t>(transport)] = std::make_unique<LinkPool>([this, transport](Micros until) { return open(transport, until); }, kLinksMax);
  }
}

Status Paths::check(const ClientOptions& options) {
  if (options.transport != "auto" && !transport_of(options.transport)) {
    return Error(Code::kInvalid, cat("unknown transport \"", options.transport, "\"; known: auto, shm, verbs, udp, tcp"));
  }
  if (!options.small_transport.empty() && options.small_transport != "same" && !transport_of(options.small_transport)) {
    return Error(Code::kInvalid, cat("unknown small_transport \"", options.small_transport, "\"; known: same, shm, verbs, udp, tcp"));
  }
  return {};
}

// ---------------------------------------------------------------- choice

void Paths::reject(Transport transport, const Error& error, bool failed) {
  // That it is not available is what the list says anyway.
  rejected_.push_back({std::string(transport_name(transport)), error.code() == Code::kUnavailable ? error.message() : error.to_string(), failed});
}

Status Paths::try_shm(const ServerFacts& facts, Micros deadline, bool& failed) {
  const bool by_unix = endpoint_.kind == Endpoint::Kind::kUnix;
  const std::string path = by_unix ? endpoint_.path : facts.unix_path;
  const bool same_host = by_unix || (!facts.host_id.empty() && facts.host_id == host_identity());
  failed = same_host;
  if (!same_host) return Error(Code::kUnavailable, "the server runs on another host, or in another network namespace");
  if (path.empty()) return Error(Code::kUnavailable, "the server has no unix socket: start it with listen \"unix:PATH\"");
  {
    const std::lock_guard lock(mutex_);
    local_ = Endpoint::unix_socket(path);
  }
  auto link = pool(Transport::kShm).borrow(deadline);
  return link.ok() ? Status() : std::move(link).error();
}

Status Paths::try_udp(Micros deadline, bool& failed) {
  auto link = pool(Transport::kUdp).borrow(deadline);
  // A server that has no such port says so, which is its owner's choice; anything else is a path that should work.
  failed = !link.ok() && link.error().code() != Code::kUnavailable;
  return link.ok() ? Status() : std::move(link).error();
}

Status Paths::try_verbs(Micros deadline, bool& failed) {
  // Before a connection is made for it: most hosts have no device. One that was named is counted on.
  const auto choices = verbs_->choices({});
  failed = !choices.ok() && choices.error().code() == Code::kInvalid;
  if (!choices.ok()) return choices.error();
  auto link = pool(Transport::kVerbs).borrow(deadline);
  // A server that has no device says so. Locked memory that is not enough, or a path that does not carry what both ends offer, is a failure.
  failed = !link.ok() && link.error().code() != Code::kUnavailable;
  return link.ok() ? Status() : std::move(link).error();
}

Status Paths::attempt(Transport transport, const ServerFacts& facts, Micros deadline) {
  const bool any = options_.transport == "auto";
  const auto within = [&](Micros trial) { return any ? std::min(deadline, steady_clock().now() + trial) : deadline; };
  bool failed = false;
  Status status;
  switch (transport) {
    case Transport::kShm: status = try_shm(facts, deadline, failed); break;
    case Transport::kVerbs: status = try_verbs(within(kVerbsTrial), failed); break;
    case Transport::kUdp: status = try_udp(within(kUdpTrial), failed); break;
    case Transport::kTcp: break;
  }
  works_[static_cast<std::size_t>(transport)] = status.ok();
  if (!status.ok()) reject(transport, status.error(), failed);
  return status;
}

// Room on the way to this host for a window of large fetches.
Status Paths::try_udp_bulk() {
  const std::uint64_t buffer = pool(Transport::kUdp).stats().datagram.receive_buffer_bytes;
  if (buffer >= kUdpBulkBuffer) return {};
  return Error(Code::kUnavailable, cat("for small fetches only: a socket here gets ", buffer, " bytes of receive buffer, large fetches need ", kUdpBulkBuffer,
                                       ": sysctl -w net.core.rmem_max=", kUdpBulkBuffer / 2));
}

Result<Transport> Paths::choose_bulk(const ServerFacts& facts, Micros deadline) {
  if (const auto pinned = transport_of(options_.transport)) {
    const Status status = attempt(*pinned, facts, deadline);
    if (status.ok()) return *pinned;
    // What the server or the network said goes to the caller as it is.
    if (*pinned != Transport::kShm && status.error().code() != Code::kUnavailable) return status.error();
    return unavailable("transport", options_.transport);
  }
  for (const Transport transport : kInOrder) {
    if (!attempt(transport, facts, deadline).ok()) continue;
    if (transport != Transport::kUdp) return transport;
    const Status room = try_udp_bulk();
    if (room.ok()) return transport;
    reject(transport, room.error(), false);
  }
  return Transport::kTcp;
}

Result<Transport> Paths::choose_small(const ServerFacts& facts, Micros deadline) {
  if (options_.small_transport.empty() || options_.small_transport == "same") {
    const bool beside = options_.small_transport.empty() && options_.transport == "auto" && bulk_ == Transport::kTcp && works_[static_cast<std::size_t>(Transport::kUdp)] == true;
    return beside ? Transport::kUdp : bulk_;
  }
  const Transport wanted = *transport_of(options_.small_transport);
  if (wanted == bulk_ || wanted == Transport::kTcp) return wanted;
  const std::optional<bool> works = works_[static_cast<std::size_t>(wanted)];
  if (works ? *works : attempt(wanted, facts, deadline).ok()) return wanted;
  return unavailable("small_transport", options_.small_transport);
}

Error Paths::unavailable(std::string_view option, std::string_view wanted) const {
  std::string why;
  for (const RejectedTransport& one : rejected_) why += cat(why.empty() ? "" : "; ", one.transport, ": ", one.reason);
  return Error(Code::kUnavailable, cat(option, " \"", wanted, "\" to ", endpoint_, " can't be had: ", why, "; tcp is there: use ", option, "=\"tcp\"",
                                       option == "transport" ? " or \"auto\"" : ""));
}

Status Paths::choose(const ServerFacts& facts, Micros deadline) {
  PARAMWIRE_TRY(bulk, choose_bulk(facts, deadline));
  bulk_ = bulk;
  PARAMWIRE_TRY(small, choose_small(facts, deadline));
  small_ = small;
  if (!options_.strict) return {};
  std::string failures;
  for (const RejectedTransport& one : rejected_) {
    if (one.failed) failures += cat(failures.empty() ? "" : "; ", one.transport, " to ", endpoint_, " should work and does not: ", one.reason);
  }
  if (failures.empty()) return {};
  return Error(Code::kUnavailable, cat("strict: ", failures, "; without strict, or with transport=\"", transport_name(bulk_), "\", it would be ", transport_name(bulk_)));
}

// ---------------------------------------------------------------- links

Result<std::unique_ptr<Link>> Paths::open(Transport transport, Micros deadline) const {
  switch (transport) {
    case Transport::kShm: return open_shm_alone(deadline);
    case Transport::kVerbs: {
      VerbsOptions options;
      options.omitted.crc = !options_.verify;
      options.busy_poll = options_.busy_poll;
      return VerbsLink::connect(endpoint_, caller_, incarnation_(), options, verbs_, deadline);
    }
    case Transport::kUdp: {
      UdpOptions options;
      options.omitted.crc = !options_.verify;
      options.busy_poll = options_.busy_poll;
      return UdpLink::connect(endpoint_, caller_, incarnation_(), options, credit_, deadline);
    }
    case Transport::kTcp: break;
  }
  OmittedReadChecks omitted;
  omitted.crc = !options_.verify;
  return TcpLink::connect(endpoint_, caller_, incarnation_(), omitted, deadline);
}

Result<std::unique_ptr<Link>> Paths::open_shm_alone(Micros deadline) const {
  ShmOptions options;
  options.omitted.crc = !options_.verify;
  options.drop_pages = options_.drop_view_pages;
  Endpoint local;
  {
    const std::lock_guard lock(mutex_);
    local = local_;
  }
  if (local.path.empty()) return Error(Code::kUnavailable, cat(endpoint_, ": the server that came back has no unix socket, and this client shares memory: connect again"));
  return ShmLink::connect(local, caller_, incarnation_(), options, deadline);
}

void Paths::renew(const ServerFacts& facts) {
  if (endpoint_.kind != Endpoint::Kind::kUnix && has(Transport::kShm)) {
    const std::lock_guard lock(mutex_);
    local_ = Endpoint::unix_socket(facts.unix_path);
  }
  for (const auto& pool : pools_) pool->renew();
}

void Paths::close() {
  for (const auto& pool : pools_) pool->close();
}

}  // namespace paramwire
