// A simulated server process: the real handlers and store over simulated memory.
#pragma once

#include "sim/world.hpp"

#include "paramwire/server/handlers.hpp"
#include "paramwire/store/arena_allocator.hpp"

#include <map>
#include <memory>
#include <set>
#include <utility>

namespace paramwire::sim {

// One arena of plain memory with a limit. Zeroed, so that a replay sees the same bytes.
class SimTier final : public Tier {
 public:
  explicit SimTier(std::uint64_t limit);
  Result<TierSpan> allocate(std::uint64_t size) override;
  void release(const TierSpan& span) override { allocator_.release(span.offset, span.size); }
  std::byte* at(std::uint32_t, std::uint64_t offset) noexcept override { return memory_.get() + offset; }
  std::uint32_t arena_count() const noexcept override { return 1; }
  ArenaInfo arena(std::uint32_t) const noexcept override { return {-1, limit_, memory_.get()}; }
  std::uint64_t used_bytes() const noexcept override { return allocator_.used_bytes(); }
  std::uint64_t committed_bytes() const noexcept override { return limit_; }
  std::uint64_t limit_bytes() const noexcept override { return limit_; }
  std::string_view name() const noexcept override { return "simulated"; }
  bool mappable() const noexcept override { return false; }
  std::string note() const override { return {}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::uint64_t limit_;
  ArenaAllocator allocator_;
  std::unique_ptr<std::byte, Free> memory_;
};

class SimServer final : public Endpoint, private PinSource, private Coordinator {
 public:
  SimServer(World& world, std::uint32_t epoch);

  void deliver(Connection& connection, std::span<const std::byte> bytes) override;
  void lost(Connection& connection) override;
  Micros frozen_until() const override { return frozen_until_; }

  bool alive() const { return alive_; }
  // `handover`: a proxy keeps the clients' connections, and will dial the next server itself.
  void kill(bool handover);
  void adopt(Connection& connection);
  void freeze(Micros time);
  void accept(Connection& connection);
  void datagram(std::uint32_t sender, const Bytes& bytes, bool forged);
  void tick();
  void published();  // after a local finish
  void watch();      // P4 and the coverage of transitions

  const Incarnation& incarnation() const { return incarnation_; }
  BlockStore& store() { return *store_; }
  Handlers& handlers() { return *handlers_; }
  Tier& tier() { return tier_; }
  // Slots with altered headers answer "changed" for ever: an excuse.
  bool header_flipped = false;

 private:
  struct Link {
    explicit Link(std::uint64_t id) : session(id, false) { session.set_udp_port(7411); }
    ServerSession session;
    FrameParser parser;
    std::size_t sent = 0;      // of the front of outgoing, head and body counted through
    bool sending = false;
  };
  void collect(std::vector<PinnedWord>& out) override;
  std::uint32_t epoch() const override { return epoch_; }
  std::optional<Version> newest() const override { return newest_; }
  std::array<std::byte, 32> root() const override { return root_; }
  Status commit(const std::optional<Version>& base, Version next, const std::array<std::byte, 32>& root) override;

  struct Answer;
  void answer(const std::shared_ptr<Answer>& answer);
  bool frames(Connection& connection, Link& link);
  Status head(Link& link);
  Bytes lie(const GetMessage& get);
  void send(Connection& connection);
  void flush();

  World& world_;
  Incarnation incarnation_;
  std::uint32_t epoch_;
  std::optional<Version> newest_;
  std::array<std::byte, 32> root_{};
  SimTier tier_;
  std::unique_ptr<BlockStore> store_;
  std::unique_ptr<UdpResponder> responder_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> answered_;  // session and sequence
  std::unique_ptr<Handlers> handlers_;
  std::map<std::uint64_t, std::pair<Connection*, std::unique_ptr<Link>>> links_;
  bool alive_ = true;
  Micros frozen_until_ = 0;
  StoreStats seen_;
};

}  // namespace paramwire::sim
