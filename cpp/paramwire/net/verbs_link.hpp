// Blocks by RDMA READ out of a server's registered arenas ("verbs"): the edge around net/one_sided_reader. The server's process does nothing for a
// read, and need not even be awake.
//
// A link has a control connection of its own, over which the queue pairs are exchanged and regions asked for, and which its queue pair at the server
// lives by. Its reads need that connection only for regions it has not heard of: those that the server had when the link was made are known.
#pragma once

#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/one_sided_reader.hpp"
#include "paramwire/net/transport.hpp"
#include "paramwire/net/verbs_node.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace paramwire {

struct VerbsOptions {
  OmittedReadChecks omitted{};
  // Spin on the completions instead of sleeping.
  bool busy_poll = false;
  std::uint32_t slice = 1 << 20;   // bytes of one READ at most; the device's max_msg_sz where that is less
  std::uint32_t staging = 4 << 20; // bytes, registered, of each link: what goes through it is bounded by it
};

class VerbsLink final : public Link {
 public:
  // Tries the ways to the server one after another, each with a READ of more than one packet, until one works.
  // errors: as connect_and_greet; kStale when another incarnation answers; kUnavailable when there is no device, on either side; kUnreachable when
  //         no way between them works, with each that was tried; kBackpressure naming RLIMIT_MEMLOCK.
  static Result<std::unique_ptr<Link>> connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation, const VerbsOptions& options,
                                               std::shared_ptr<VerbsNode> node, Micros deadline);
  ~VerbsLink() override;

  std::string_view transport() const noexcept override { return "verbs"; }
  bool one_sided() const noexcept override { return true; }
  void read(std::span<BlockRead> batch, Micros deadline) override;
  bool broken() const noexcept override { return broken_.load(std::memory_order_acquire); }
  Result<BlockView> view(const ManifestEntry& entry, const Locator& locator, ByteRange range) override;
  LinkStats stats() const override;

 private:
  class Memory;
  struct Staging;
  struct Place {                       // of a region
    std::uint64_t address = 0;
    std::uint32_t key = 0;
    std::uint32_t size = 0;            // 0: not known
  };

  VerbsLink(GreetedSocket greeted, std::shared_ptr<VerbsNode> node, const VerbsOptions& options);
  Status open_path(Micros deadline);
  Status try_path(const VerbsChoice& choice, std::uint8_t at_server, Micros deadline);
  Status probe(const VerbsReadyMessage& ready, Micros deadline);
  Status learn(Micros deadline);
  Result<VerbsRegionListMessage> ask_regions(const VerbsRegionsMessage& what, Micros deadline);
  const Place* place(std::uint16_t arena, std::uint64_t offset) const noexcept;
  Status run(std::size_t count, Micros deadline);
  Status post(std::span<const RemoteRead> reads);
  Result<std::size_t> take();
  Status wait(Micros deadline);
  Status check_control();
  void fail(const Status& status);

  ForkGuard guard_;
  Socket control_;
  std::shared_ptr<VerbsNode> node_;
  VerbsOptions options_;
  std::unique_ptr<Staging> staging_;   // before the queue: whatever may still write goes first
  std::shared_ptr<VerbsDevice> device_;
  std::unique_ptr<VerbsQueue> queue_;
  std::unique_ptr<OneSidedReader> reader_;
  std::unordered_map<std::uint64_t, Place> places_;  // by arena (upper 16 bits) and region: memory for those that were named, whatever their offsets
  std::uint32_t regions_known_ = 0;
  std::uint64_t requests_ = 0;                  // asked over the control connection
  Status control_lost_;                         // while a region was asked for
  std::vector<std::shared_ptr<const VerbsMemory>> targets_;  // registered targets of the batch under way
  std::vector<RemoteRead> reads_;
  std::vector<VerbsRead> posting_;
  std::atomic<bool> broken_{false};
  std::string broken_by_;
  Micros deadline_ = 0;                         // of the read under way
  Micros now_ = 0;                              // when the clock was looked at last
  Micros looked_ = 0;                           // while spinning: whether somebody asks for the end of it
  LinkStats stats_;
};

}  // namespace paramwire
