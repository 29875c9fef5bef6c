// The server's side of RDMA reads: a queue pair for each client that asks, and its arenas registered region by region as clients need them.
//
// Nothing is posted and no completion ever comes: after the exchange the device alone answers. A queue pair lives as long as the control connection
// that asked for it; with it, the client's access ends. Regions are registered once a device, for reading only, and stay until the server closes:
// few and large, since each costs its pages' pinning once.
//
// Not thread-safe: called with the store's lock held, like the handlers. A region of 16 MiB takes the device a few milliseconds to pin.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/error.hpp"
#include "paramwire/net/verbs_device.hpp"
#include "paramwire/net/verbs_route.hpp"
#include "paramwire/server/server_stats.hpp"
#include "paramwire/store/tier.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paramwire {

class VerbsApi;

// Where VERBS_OPEN and VERBS_REGIONS are answered from. `connection` names the session.
class VerbsDoor {
 public:
  virtual ~VerbsDoor() = default;
  // `local`: the address that the connection reached; none over a unix socket.
  // errors: kUnavailable when no device here can be used; kNotFound when open.choice is past the last way to that end; kUnreachable when that
  //         way can't be had, where the next may be; kBackpressure naming the limit.
  virtual Result<VerbsReadyMessage> open(std::uint64_t connection, const VerbsOpenMessage& open, const std::optional<Gid>& local) = 0;
  // errors: kInvalid before open(); kNotFound when `tier` has no such bytes; as VerbsMemory::create.
  virtual Result<VerbsRegionListMessage> regions(std::uint64_t connection, const VerbsRegionsMessage& ask, const Tier& tier) = 0;
  virtual void close(std::uint64_t connection) noexcept = 0;
};

class VerbsEndpoint final : public VerbsDoor {
 public:
  // Looks for a usable port; devices are opened when a client first needs them.
  // errors: kUnavailable with the table of ports and the reason for each; kInvalid for a wish that names what is not there.
  static Result<std::unique_ptr<VerbsEndpoint>> create(std::shared_ptr<VerbsApi> api, VerbsWish wish);

  Result<VerbsReadyMessage> open(std::uint64_t connection, const VerbsOpenMessage& open, const std::optional<Gid>& local) override;
  Result<VerbsRegionListMessage> regions(std::uint64_t connection, const VerbsRegionsMessage& ask, const Tier& tier) override;
  void close(std::uint64_t connection) noexcept override;
  VerbsServerStats stats() const;

 private:
  struct Opened {
    std::shared_ptr<VerbsDevice> device;
    std::vector<std::byte> probe_bytes;          // with room to begin on a page
    std::unique_ptr<VerbsMemory> probe;
    std::vector<VerbsRegion> list;               // only grows: clients count it
    std::vector<std::unique_ptr<VerbsMemory>> memories;
    std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> registered;  // bytes of (arena, region)
  };
  struct Session {
    std::shared_ptr<Opened> opened;
    std::unique_ptr<VerbsQueue> queue;
  };
  VerbsEndpoint(std::shared_ptr<VerbsApi> api, VerbsWish wish) : api_(std::move(api)), wish_(std::move(wish)) {}
  Status look();
  Result<std::shared_ptr<Opened>> device(const std::string& name);
  Result<VerbsReadyMessage> answer(std::uint64_t connection, const VerbsOpenMessage& open, const std::optional<Gid>& local);
  Status add_region(Opened& opened, const ArenaInfo& arena, std::uint32_t index, std::uint64_t region);

  std::shared_ptr<VerbsApi> api_;
  VerbsWish wish_;
  std::vector<PortFacts> ports_;                  // as read
  Micros ports_read_ = 0;
  std::map<std::string, std::shared_ptr<Opened>> devices_;
  std::map<std::uint64_t, Session> sessions_;
  std::uint64_t opened_ = 0, refused_ = 0;
};

}  // namespace paramwire
