#include "paramwire/client/paths.hpp"

#include "paramwire/base/host_identity.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/shm_link.hpp"
#include "paramwire/net/tcp_link.hpp"
#include "paramwire/net/udp_link.hpp"

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

bool known(std::string_view name) { return name == "shm" || name == "udp" || name == "tcp"; }

Transport transport_of(std::string_view name) { return name == "shm" ? Transport::kShm : name == "udp" ? Transport::kUdp : Transport::kTcp; }

}  // namespace

std::string_view transport_name(Transport transport) noexcept {
  return transport == Transport::kShm ? "shm" : transport == Transport::kUdp ? "udp" : "tcp";
}

Paths::Paths(const Endpoint& endpoint, const ClientOptions& options, const Caller& caller, std::function<Incarnation()> incarnation)
    : endpoint_(endpoint), options_(options), caller_(caller), incarnation_(std::move(incarnation)),
      credit_(std::make_shared<InboundCredit>(2 * std::uint64_t{kLinkReceiveBuffer})) {
  for (const Transport transport : {Transport::kShm, Transport::kUdp, Transport::kTcp}) {
    pools_[static_cast<std::size_t>(transport)] = std::make_unique<LinkPool>([this, transport](Micros until) { return open(transport, until); }, kLinksMax);
  }
}

Status Paths::check(const ClientOptions& options) {
  if (options.transport != "auto" && !known(options.transport)) {
    return Error(Code::kInvalid, cat("unknown transport \"", options.transport, "\"; known: auto, shm, udp, tcp"));
  }
  if (!options.small_transport.empty() && options.small_transport != "same" && !known(options.small_transport)) {
    return Error(Code::kInvalid, cat("unknown small_transport \"", options.small_transport, "\"; known: same, shm, udp, tcp"));
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

Result<Transport> Paths::choose_bulk(const ServerFacts& facts, Micros deadline) {
  const bool any = options_.transport == "auto";
  bool failed = false;
  if (any || options_.transport == "shm") {
    const Status status = try_shm(facts, deadline, failed);
    shm_works_ = status.ok();
    if (status.ok()) return Transport::kShm;
    reject(Transport::kShm, status.error(), failed);
  }
  if (any || options_.transport == "udp") {
    const Micros until = any ? std::min(deadline, steady_clock().now() + kUdpTrial) : deadline;
    const Status status = try_udp(until, failed);
    udp_works_ = status.ok();
    if (status.ok()) {
      const std::uint64_t buffer = pool(Transport::kUdp).stats().datagram.receive_buffer_bytes;
      if (!any || buffer >= kUdpBulkBuffer) return Transport::kUdp;
      reject(Transport::kUdp, Error(Code::kUnavailable, cat("for small fetches only: a socket here gets ", buffer, " bytes of receive buffer, large fetches need ",
                                                            kUdpBulkBuffer, ": sysctl -w net.core.rmem_max=", kUdpBulkBuffer / 2)), false);
    } else {
      // Pinned, what the server or the network said goes to the caller as it is.
      if (!any && status.error().code() != Code::kUnavailable) return status.error();
      reject(Transport::kUdp, status.error(), failed);
    }
  }
  if (any || options_.transport == "tcp") return Transport::kTcp;
  return unavailable("transport", options_.transport);
}

Result<Transport> Paths::choose_small(const ServerFacts& facts, Micros deadline) {
  if (options_.small_transport.empty() || options_.small_transport == "same") {
    const bool beside = options_.small_transport.empty() && options_.transport == "auto" && bulk_ == Transport::kTcp && udp_works_ == true;
    return beside ? Transport::kUdp : bulk_;
  }
  const Transport wanted = transport_of(options_.small_transport);
  if (wanted == bulk_ || wanted == Transport::kTcp) return wanted;
  std::optional<bool>& works = wanted == Transport::kShm ? shm_works_ : udp_works_;
  if (!works) {
    bool failed = false;
    const Status status = wanted == Transport::kShm ? try_shm(facts, deadline, failed) : try_udp(deadline, failed);
    works = status.ok();
    if (!status.ok()) reject(wanted, status.error(), failed);
  }
  if (!*works) return unavailable("small_transport", options_.small_transport);
  return wanted;
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
