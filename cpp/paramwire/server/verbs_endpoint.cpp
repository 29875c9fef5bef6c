#include "paramwire/server/verbs_endpoint.hpp"

#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_ports.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

namespace paramwire {

namespace {

constexpr std::size_t kPage = 4096;
// Regions that one question without a wish makes the server register: two of 16 MiB hold the loop for less than 10 ms.
constexpr std::size_t kRegisteredAtOnce = 2;

// A device that can't be opened, or a path that the kernel refuses, is not the lack of one: the client has other ways to ask for.
Error of_this_way(Error error) { return error.code() == Code::kUnavailable ? Error(Code::kUnreachable, error.message()) : std::move(error); }

// How long ports and GIDs may have been read ago: reading opens every device, some of which take tens of milliseconds, with the store locked.
// Clients that come together, with several links each, share one reading. What became wrong meanwhile is noticed, and read again.
constexpr Micros kPortsAge = kMicrosPerSecond;

std::uint64_t committed_of(const ArenaInfo& arena, std::uint64_t region) noexcept {
  const std::uint64_t begin = region * kRegionBytes;
  return arena.committed <= begin ? 0 : std::min(kRegionBytes, arena.committed - begin);
}

}  // namespace

Result<std::unique_ptr<VerbsEndpoint>> VerbsEndpoint::create(std::shared_ptr<VerbsApi> api, VerbsWish wish) {
  std::unique_ptr<VerbsEndpoint> endpoint(new VerbsEndpoint(std::move(api), std::move(wish)));
  PARAMWIRE_CHECK(endpoint->look());
  PARAMWIRE_CHECK(rank_choices(endpoint->ports_, {}, endpoint->wish_));
  return endpoint;
}

Status VerbsEndpoint::look() {
  PARAMWIRE_TRY(ports, read_ports(*api_));
  ports_ = std::move(ports);
  ports_read_ = steady_clock().now();
  return {};
}

Result<std::shared_ptr<VerbsEndpoint::Opened>> VerbsEndpoint::device(const std::string& name) {
  if (const auto known = devices_.find(name); known != devices_.end()) return known->second;
  auto opened = std::make_shared<Opened>();
  PARAMWIRE_TRY(device, VerbsDevice::open(api_, name));
  opened->device = std::move(device);
  opened->probe_bytes.resize(kVerbsProbeBytes + kPage);
  void* begin = opened->probe_bytes.data();
  std::size_t room = opened->probe_bytes.size();
  std::align(kPage, kVerbsProbeBytes, begin, room);
  const std::span<std::byte> probe(static_cast<std::byte*>(begin), kVerbsProbeBytes);
  for (std::uint32_t i = 0; i < kVerbsProbeBytes; ++i) probe[i] = verbs_probe_byte(i);
  PARAMWIRE_TRY(memory, VerbsMemory::create(opened->device, probe, VerbsMemory::Access::kRemoteRead));
  opened->probe = std::move(memory);
  devices_[name] = opened;
  return opened;
}

Result<VerbsReadyMessage> VerbsEndpoint::answer(std::uint64_t connection, const VerbsOpenMessage& open, const std::optional<Gid>& local) {
  sessions_.erase(connection);
  VerbsPeer peer;
  peer.gid = open.end.gid;
  peer.type = static_cast<GidType>(open.end.type);
  peer.source = route_source(open.end.gid);
  if (!peer.source) peer.source = local;
  PARAMWIRE_TRY(choices, rank_choices(ports_, peer, wish_));
  if (open.choice >= choices.size()) {
    return Error(Code::kNotFound, cat("this server has ", choices.size(), " ways to GID ", to_string(open.end.gid), ", number ", unsigned{open.choice}, " was asked for"));
  }
  const VerbsChoice& choice = choices[open.choice];
  auto opening = device(choice.device);
  if (!opening.ok()) return of_this_way(opening.error());
  auto opened = std::move(*opening);
  VerbsQueue::Options wanted;
  wanted.depth = 0;
  wanted.reads = open.end.reads;
  auto made = VerbsQueue::create(opened->device, choice, wanted);
  if (!made.ok()) {
    // A device that was reset, or taken out and put back, is another one: the next client opens it anew.
    if (made.error().code() == Code::kUnavailable) devices_.erase(choice.device);
    return of_this_way(made.error());
  }
  auto queue = std::move(*made);
  VerbsReadyMessage ready;
  ready.end = queue->end();
  ready.end.mtu = std::min(ready.end.mtu, open.end.mtu);
  ready.end.reads = std::min(ready.end.reads, open.end.reads);
  ready.probe_address = reinterpret_cast<std::uintptr_t>(opened->probe->bytes().data());
  ready.probe_key = opened->probe->remote_key();
  ready.probe_size = kVerbsProbeBytes;
  VerbsEnd remote = open.end;
  remote.mtu = ready.end.mtu;
  remote.reads = ready.end.reads;
  if (const Status connected = queue->connect(remote); !connected.ok()) return of_this_way(connected.error());
  sessions_[connection] = {std::move(opened), std::move(queue)};
  return ready;
}

Result<VerbsReadyMessage> VerbsEndpoint::open(std::uint64_t connection, const VerbsOpenMessage& open, const std::optional<Gid>& local) {
  // A second way is asked for where the first did not work, and what does not work may have changed.
  VerbsOpenMessage asked = open;
  const bool fresh = steady_clock().now() - ports_read_ >= kPortsAge || asked.choice > 0;
  if (fresh) {
    const std::string before = to_string(ports_);
    PARAMWIRE_CHECK(look());
    // Chosen from a table that was wrong (a GID that moved to another index can be used and leads nowhere): what stands there now was not tried.
    if (asked.choice > 0 && to_string(ports_) != before) --asked.choice;
  }
  auto ready = answer(connection, asked, local);
  if (!ready.ok() && !fresh && ready.error().code() != Code::kBackpressure) {
    PARAMWIRE_CHECK(look());
    ready = answer(connection, asked, local);
  }
  ++(ready.ok() ? opened_ : refused_);
  return ready;
}

Status VerbsEndpoint::add_region(Opened& opened, const ArenaInfo& arena, std::uint32_t index, std::uint64_t region) {
  const std::uint64_t size = committed_of(arena, region);
  const std::span<std::byte> bytes(arena.base + region * kRegionBytes, static_cast<std::size_t>(size));
  PARAMWIRE_TRY(memory, VerbsMemory::create(opened.device, bytes, VerbsMemory::Access::kRemoteRead));
  VerbsRegion entry;
  entry.arena = static_cast<std::uint16_t>(index);
  entry.offset = region * kRegionBytes;
  entry.size = static_cast<std::uint32_t>(size);
  entry.address = reinterpret_cast<std::uintptr_t>(bytes.data());
  entry.key = memory->remote_key();
  opened.list.push_back(entry);
  opened.memories.push_back(std::move(memory));
  opened.registered[{index, region}] = size;
  return {};
}

Result<VerbsRegionListMessage> VerbsEndpoint::regions(std::uint64_t connection, const VerbsRegionsMessage& ask, const Tier& tier) {
  const auto session = sessions_.find(connection);
  if (session == sessions_.end()) return Error(Code::kInvalid, "VERBS_REGIONS before VERBS_OPEN");
  Opened& opened = *session->second.opened;
  const auto have = [&](std::uint32_t arena, std::uint64_t region) {
    const auto found = opened.registered.find({arena, region});
    return found == opened.registered.end() ? 0 : found->second;
  };
  VerbsRegionListMessage out;
  if (ask.wanted) {
    const std::uint64_t region = ask.offset / kRegionBytes;
    if (ask.arena >= tier.arena_count() || ask.offset >= tier.arena(ask.arena).committed) {
      return Error(Code::kNotFound, cat("byte ", ask.offset, " of arena ", ask.arena, " of ", tier.arena_count()));
    }
    if (have(ask.arena, region) <= ask.offset % kRegionBytes) PARAMWIRE_CHECK(add_region(opened, tier.arena(ask.arena), ask.arena, region));
  }
  out.complete = true;
  std::size_t budget = ask.wanted ? 0 : kRegisteredAtOnce;
  for (std::uint32_t i = 0; i < tier.arena_count() && out.complete; ++i) {
    const ArenaInfo arena = tier.arena(i);
    for (std::uint64_t region = 0; region * kRegionBytes < arena.committed && out.complete; ++region) {
      if (have(i, region) == committed_of(arena, region)) continue;
      if (budget == 0) {
        out.complete = false;
      } else {
        --budget;
        PARAMWIRE_CHECK(add_region(opened, arena, i, region));
      }
    }
  }
  const std::size_t known = std::min<std::size_t>(ask.known, opened.list.size());
  const std::size_t count = std::min(opened.list.size() - known, kVerbsRegionsMax);
  const auto first = opened.list.begin() + static_cast<std::ptrdiff_t>(known);
  out.regions.assign(first, first + static_cast<std::ptrdiff_t>(count));
  if (known + count < opened.list.size()) out.complete = false;
  return out;
}

void VerbsEndpoint::close(std::uint64_t connection) noexcept { sessions_.erase(connection); }

VerbsServerStats VerbsEndpoint::stats() const {
  VerbsServerStats out;
  out.devices = devices_.size();
  out.queue_pairs = sessions_.size();
  out.opened = opened_;
  out.refused = refused_;
  for (const auto& [name, opened] : devices_) {
    out.regions += opened->memories.size();
    for (const auto& memory : opened->memories) out.region_bytes += memory->bytes().size();
  }
  return out;
}

}  // namespace paramwire
