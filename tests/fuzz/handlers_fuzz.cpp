// A server's handlers with a client that sends anything after HELLO: every answer is a whole frame, what was published stays, and nothing that a
// client had made on an RDMA device outlives its connection.
#include "fuzz.hpp"

#include "paramwire/server/handlers.hpp"
#include "paramwire/store/memory_tier.hpp"
#include "support/fake_verbs.hpp"
#include "support/frame_feed.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

namespace paramwire::fuzz {
namespace {

// The real endpoint over a fake fabric, made when the first input asks for it: most never do.
class Door final : public VerbsDoor {
 public:
  Result<VerbsReadyMessage> open(std::uint64_t connection, const VerbsOpenMessage& open, const std::optional<Gid>& local) override {
    return endpoint().open(connection, open, local);
  }
  Result<VerbsRegionListMessage> regions(std::uint64_t connection, const VerbsRegionsMessage& ask, const Tier& tier) override {
    return endpoint().regions(connection, ask, tier);
  }
  void close(std::uint64_t connection) noexcept override { endpoint().close(connection); }
  void check() const {
    if (fabric_ == nullptr) return;
    require(fabric_->live().qps == 0, "a queue pair ends with its connection");
    require(fabric_->breaches().empty(), "the fabric is used as it may be");
  }

 private:
  VerbsEndpoint& endpoint() {
    if (endpoint_ == nullptr) {
      fabric_ = std::make_shared<testing::FakeVerbs>(testing::FakeFabric{{testing::FakeDevice::roce("fake0", "127.0.0.1")}});
      endpoint_ = *VerbsEndpoint::create(fabric_, {});
    }
    return *endpoint_;
  }
  std::shared_ptr<testing::FakeVerbs> fabric_;
  std::unique_ptr<VerbsEndpoint> endpoint_;
};

struct World {
  std::unique_ptr<Tier> tier;
  Door door;  // before the tier whose memory it has registered is gone
  std::unique_ptr<Coordinator> coordinator;
  std::unique_ptr<BlockStore> store;
  std::unique_ptr<Handlers> handlers;
  std::uint64_t random = 0;
  Micros now = 1;
};

World make() {
  World world;
  TierOptions tier;
  tier.arena_bytes = std::uint64_t{8} << 20;
  tier.limit_bytes = std::uint64_t{1} << 20;
  world.tier = *MemoryTier::open(MemoryTier::Backing::kPrivate, tier);
  world.coordinator = *open_coordinator("memory");
  BlockStoreOptions options;
  options.incarnation = {5, 6};
  options.epoch = world.coordinator->epoch();
  world.store = std::make_unique<BlockStore>(*world.tier, nullptr, options);
  return world;
}

void check_answers(World& world, ServerSession& session) {
  while (!session.outgoing.empty()) {
    const Outgoing& front = session.outgoing.front();
    FrameHeader header{};
    require(front.head.size() >= sizeof header, "an answer has a header");
    std::memcpy(&header, front.head.data(), sizeof header);
    require(verify(header) == nullptr, "an answer's header is right");
    require(header.meta_size == front.head.size() - sizeof header && header.body_size == front.body.size(), "an answer is whole");
    world.handlers->sent(front, world.now);
    session.outgoing.pop_front();
  }
}

// False: the connection must close.
bool feed(World& world, ServerSession& session, FrameParser& parser, std::span<const std::byte> bytes) {
  return testing::feed(parser, bytes, [&](FrameParser::Event event) {
    if (!testing::handle(*world.handlers, session, parser, event, ++world.now)) return false;
    check_answers(world, session);
    return true;
  });
}

}  // namespace

void run(std::span<const std::byte> input) {
  World world = make();
  HandlerOptions options;
  options.random = [&world] { return Result<std::uint64_t>(++world.random); };
  options.put_bytes_max = 1 << 16;
  options.verbs = &world.door;
  world.handlers = std::make_unique<Handlers>(*world.store, *world.tier, *world.coordinator, nullptr, options);
  ServerSession session(1, false);
  FrameParser parser;
  HelloMessage hello;
  hello.client = {1, 2};
  require(feed(world, session, parser, hello.encode(1)), "HELLO is taken");
  // The fuzzer can't make CRCs: the input is a list of {type, meta size u16, body size u16, meta, body}, framed here.
  while (input.size() >= 5) {
    const auto type = static_cast<FrameType>(input[0]);
    std::uint16_t meta_size = 0, body_size = 0;
    std::memcpy(&meta_size, input.data() + 1, 2);
    std::memcpy(&body_size, input.data() + 3, 2);
    input = input.subspan(5);
    const auto meta = input.first(std::min<std::size_t>(meta_size, input.size()));
    input = input.subspan(meta.size());
    const auto body = input.first(std::min<std::size_t>(body_size, input.size()));
    input = input.subspan(body.size());
    Bytes frame;
    append_frame(frame, type, 2, meta, body.size());
    frame.insert(frame.end(), body.begin(), body.end());
    if (!feed(world, session, parser, frame)) break;
  }
  world.handlers->on_closed(session, ++world.now);
  world.handlers->tick(world.now += 1000 * kMicrosPerSecond);
  const StoreStats stats = world.store->stats();
  require(stats.publishes_open == 0, "a publish that nobody goes on with ends");
  world.door.check();
}

}  // namespace paramwire::fuzz
