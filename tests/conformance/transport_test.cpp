// What every transport must do, whatever moves its bytes. A transport joins with one row in transports().
#include "support/fake_verbs.hpp"
#include "support/rig.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/net/shm_link.hpp"
#include "paramwire/net/tcp_link.hpp"
#include "paramwire/net/udp_link.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_link.hpp"
#include "paramwire/wire/frame.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

struct Transport {
  std::string name;
  // A link to the server of `rig` for blocks that its present incarnation promised.
  std::function<Result<std::unique_ptr<Link>>(const Rig&, const OmittedReadChecks&)> connect;
  // A link to whatever listens at a unix socket, for peers that misbehave.
  std::function<Result<std::unique_ptr<Link>>(const Endpoint&, Micros deadline)> connect_to;
  bool keyed = false;  // the server has a cluster key
  bool needs_device = false;  // a real RDMA device of this machine: skipped where there is none
  std::shared_ptr<VerbsApi> fabric{};  // that server and links use instead
};
std::ostream& operator<<(std::ostream& out, const Transport& transport) { return out << transport.name; }

constexpr ClientId kClient{3, 4};

const std::shared_ptr<const ClusterKey>& cluster_key() {
  static const auto key = [] {
    const Bytes bytes = random_bytes(kClusterKeyBytes, 1);
    return ClusterKey::from_bytes(std::span<const std::byte, kClusterKeyBytes>(bytes.data(), kClusterKeyBytes));
  }();
  return key;
}
Caller keyed_caller() { return {kClient, must(TlsContext::create(cluster_key()))}; }
std::shared_ptr<InboundCredit> credit(std::uint64_t bytes = 2 * kLinkReceiveBuffer) { return std::make_shared<InboundCredit>(bytes); }

std::shared_ptr<VerbsNode> devices_of_this_machine() {
  return std::make_shared<VerbsNode>(VerbsWish{}, [] { return VerbsLibrary::open(); });
}

// Two devices of one fabric, which are as good as a machine each.
std::shared_ptr<VerbsApi> fabric(Delivery delivery) {
  return std::make_shared<FakeVerbs>(FakeFabric{{FakeDevice::roce("fake0", "127.0.0.1"), FakeDevice::roce("fake1", "127.0.0.1")}, delivery});
}
Transport over_fabric(std::string name, const std::shared_ptr<VerbsApi>& fabric, const VerbsOptions& options) {
  const auto connect_to = [fabric, options](const Endpoint& endpoint, const Incarnation& incarnation, const OmittedReadChecks& omitted, Micros deadline) {
    VerbsOptions with = options;
    with.omitted = omitted;
    return VerbsLink::connect(endpoint, kClient, incarnation, with, std::make_shared<VerbsNode>(VerbsWish{"fake1", {}}, [fabric] { return fabric; }), deadline);
  };
  Transport out;
  out.name = std::move(name);
  out.connect = [connect_to](const Rig& rig, const OmittedReadChecks& omitted) { return connect_to(rig.tcp_endpoint(), rig.server->incarnation(), omitted, in_seconds(10)); };
  out.connect_to = [connect_to](const Endpoint& endpoint, Micros deadline) { return connect_to(endpoint, {}, {}, deadline); };
  out.fabric = fabric;
  return out;
}

const std::vector<Transport>& transports() {
  static const std::vector<Transport> all = {
      {"tcp", [](const Rig& rig, const OmittedReadChecks& omitted) { return TcpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), omitted, in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return TcpLink::connect(endpoint, kClient, {}, {}, deadline); }},
      {"tcp_with_a_key", [](const Rig& rig, const OmittedReadChecks& omitted) { return TcpLink::connect(rig.tcp_endpoint(), keyed_caller(), rig.server->incarnation(), omitted, in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return TcpLink::connect(endpoint, keyed_caller(), {}, {}, deadline); }, true},
      {"stream_over_unix", [](const Rig& rig, const OmittedReadChecks& omitted) { return TcpLink::connect(rig.unix_endpoint(), kClient, rig.server->incarnation(), omitted, in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return TcpLink::connect(endpoint, kClient, {}, {}, deadline); }},
      {"shm", [](const Rig& rig, const OmittedReadChecks& omitted) { return ShmLink::connect(rig.unix_endpoint(), kClient, rig.server->incarnation(), {omitted, false}, in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return ShmLink::connect(endpoint, kClient, {}, {}, deadline); }},
      {"shm_dropping_pages", [](const Rig& rig, const OmittedReadChecks& omitted) { return ShmLink::connect(rig.unix_endpoint(), kClient, rig.server->incarnation(), {omitted, true}, in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return ShmLink::connect(endpoint, kClient, {}, {}, deadline); }},
      {"udp", [](const Rig& rig, const OmittedReadChecks& omitted) { return UdpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), {.omitted = omitted}, credit(), in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return UdpLink::connect(endpoint, kClient, {}, {}, credit(), deadline); }},
      {"udp_with_a_key", [](const Rig& rig, const OmittedReadChecks& omitted) { return UdpLink::connect(rig.tcp_endpoint(), keyed_caller(), rig.server->incarnation(), {.omitted = omitted}, credit(), in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return UdpLink::connect(endpoint, keyed_caller(), {}, {}, credit(), deadline); }, true},
      {"udp_of_1448_byte_segments", [](const Rig& rig, const OmittedReadChecks& omitted) { return UdpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), {.omitted = omitted, .segment_size = 1448}, credit(), in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return UdpLink::connect(endpoint, kClient, {}, {}, credit(), deadline); }},
      {"udp_busy_over_unix", [](const Rig& rig, const OmittedReadChecks& omitted) { return UdpLink::connect(rig.unix_endpoint(), kClient, rig.server->incarnation(), {.omitted = omitted, .busy_poll = true}, credit(), in_seconds(10)); },
       [](const Endpoint& endpoint, Micros deadline) { return UdpLink::connect(endpoint, kClient, {}, {}, credit(), deadline); }},
      {"udp_losing_a_tenth", [](const Rig& rig, const OmittedReadChecks& omitted) {
         return UdpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(),
                                 {.omitted = omitted, .segment_size = 8192, .lose = [random = std::make_shared<Random>(7)](std::span<const std::byte>) { return random->chance(10); }},
                                 credit(std::uint64_t{256} << 10), in_seconds(10));
       },
       [](const Endpoint& endpoint, Micros deadline) { return UdpLink::connect(endpoint, kClient, {}, {}, credit(), deadline); }},
      over_fabric("verbs_on_a_fake_fabric", fabric(Delivery::kAtPost), {}),
      over_fabric("verbs_by_threads", fabric(Delivery::kThread), {}),
      over_fabric("verbs_by_threads_in_small_slices", fabric(Delivery::kThread), {.busy_poll = true, .slice = 8192, .staging = 65536}),
      {"verbs_on_a_device", [](const Rig& rig, const OmittedReadChecks& omitted) { return VerbsLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), {.omitted = omitted}, devices_of_this_machine(), in_seconds(20)); },
       [](const Endpoint& endpoint, Micros deadline) { return VerbsLink::connect(endpoint, kClient, {}, {}, devices_of_this_machine(), deadline); }, false, true},
      {"verbs_with_a_key_and_small_slices", [](const Rig& rig, const OmittedReadChecks& omitted) { return VerbsLink::connect(rig.tcp_endpoint(), keyed_caller(), rig.server->incarnation(), {.omitted = omitted, .busy_poll = true, .slice = 8192, .staging = 65536}, devices_of_this_machine(), in_seconds(20)); },
       [](const Endpoint& endpoint, Micros deadline) { return VerbsLink::connect(endpoint, keyed_caller(), {}, {}, devices_of_this_machine(), deadline); }, true, true},
  };
  return all;
}

class TransportTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    if (!GetParam().needs_device) return;
    const auto choices = devices_of_this_machine()->choices({});
    if (!choices.ok()) GTEST_SKIP() << choices.error().message();
  }

  std::unique_ptr<Link> connect(const OmittedReadChecks& omitted = {}) { return must(GetParam().connect(rig_, omitted)); }

  // Reads `range` of `tensor` and returns the bytes, or the failure.
  static Result<Bytes> read(Link& link, const Snapshot& snapshot, std::string_view tensor, ByteRange range) {
    Bytes target(static_cast<std::size_t>(range.size), std::byte{0xee});
    BlockRead item = snapshot.read_of(tensor, range, target);
    link.read({&item, 1}, in_seconds(30));
    if (!item.result.ok()) return item.result.error();
    return target;
  }

  static ServerOptions options() {
    ServerOptions out;
    if (GetParam().keyed) out.key = cluster_key();
    if (const auto fabric = GetParam().fabric) {
      out.verbs = "fake0";
      out.verbs_library = [fabric] { return fabric; };
    }
    return out;
  }

  Rig rig_{options()};
};

constexpr std::size_t kExtent = kExtentBytes;
const std::size_t kSizes[] = {0, 1, 2, 63, 64, 65, 4096, kExtent - 1, kExtent, kExtent + 1, 2 * kExtent, 5 * kExtent + 7, (std::size_t{3} << 20) + 5};

TEST_P(TransportTest, ReadsWholeBlocksOfEverySize) {
  std::vector<std::pair<std::string, Bytes>> model;
  for (const std::size_t size : kSizes) model.emplace_back(cat("t", size), random_bytes(size, size + 1));
  rig_.publish(model);
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  for (const auto& [name, bytes] : model) EXPECT_EQ(must(read(*link, snapshot, name, {0, bytes.size()})), bytes) << name;
  EXPECT_EQ(link->stats().reads, model.size());
  EXPECT_EQ(link->stats().blocks_verified, model.size());
}

TEST_P(TransportTest, ReadsEveryKindOfRange) {
  std::vector<std::pair<std::string, Bytes>> model;
  for (const std::size_t size : kSizes) model.emplace_back(cat("t", size), random_bytes(size, size + 1));
  rig_.publish(model);
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  Random random(11);
  for (const auto& [name, bytes] : model) {
    const std::size_t size = bytes.size();
    std::vector<ByteRange> ranges = {{0, 0}, {size, 0}, {0, size / 2}, {size / 2, size - size / 2}};
    for (const std::size_t edge : {kExtent, 2 * kExtent}) {
      for (const std::size_t begin : {edge - 1, edge, edge + 1}) {
        for (const std::size_t count : {std::size_t{1}, std::size_t{2}, kExtent - 1, kExtent, kExtent + 1, 2 * kExtent + 3}) {
          if (begin + count <= size) ranges.push_back({begin, count});
        }
      }
    }
    for (int i = 0; i < 20 && size > 0; ++i) {
      const std::uint64_t begin = random.below(size);
      ranges.push_back({begin, random.below(size - begin + 1)});
    }
    for (const ByteRange& range : ranges) {
      const auto got = read(*link, snapshot, name, range);
      ASSERT_TRUE(got.ok()) << name << " [" << range.offset << ", +" << range.size << "]: " << got.error().to_string();
      const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(range.offset);
      ASSERT_TRUE(std::equal(got->begin(), got->end(), begin)) << name << " [" << range.offset << ", +" << range.size << ']';
    }
  }
}

TEST_P(TransportTest, ReadsEveryDTypeAndShapeAndShard) {
  auto publish = must(rig_.server->publish());
  std::vector<std::pair<BlockId, Bytes>> model;
  const auto put = [&](std::string_view tensor, DType dtype, const Shape& shape, const Shard& shard) {
    Bytes bytes = random_bytes(static_cast<std::size_t>(must(block_bytes(dtype, shape, shard))), model.size());
    must(publish.put(BlockSpec{tensor, dtype, shape, shard}, bytes));
    model.emplace_back(block_id(tensor, shard), std::move(bytes));
  };
  for (std::uint16_t code = 1; code <= kDTypeMax; ++code) {
    const auto dtype = static_cast<DType>(code);
    put(cat("scalar.", dtype_name(dtype)), dtype, Shape{}, {});
    put(cat("empty.", dtype_name(dtype)), dtype, Shape{4, 0, 2}, {});
    put(cat("matrix.", dtype_name(dtype)), dtype, Shape{6, 10}, {});
  }
  put("rows", DType::kBF16, Shape{100, 7}, Shard::rows(0, 40));
  put("rows", DType::kBF16, Shape{100, 7}, Shard::rows(40, 100));
  put("heads", DType::kF32, Shape{12, 64, 2}, Shard::head_range(3, 1, 3));
  put("deep", DType::kU8, Shape{1, 2, 1, 3, 1, 2, 1, 2}, {});
  must(publish.finish());
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  for (const auto& [id, bytes] : model) {
    Bytes target(bytes.size());
    BlockRead item = snapshot.read_of(id, {0, bytes.size()}, target);
    link->read({&item, 1}, in_seconds(30));
    EXPECT_TRUE(item.result.ok()) << item.result.error().to_string();
    EXPECT_EQ(target, bytes) << item.entry.to_string();
  }
}

TEST_P(TransportTest, ReadsABatchLargerThanItsWindow) {
  std::vector<std::pair<std::string, Bytes>> model;
  for (std::size_t i = 0; i < 3000; ++i) model.emplace_back(cat("t", i), random_bytes(i % 97, i));
  for (std::size_t i = 0; i < 6; ++i) model.emplace_back(cat("large", i), random_bytes((std::size_t{9} << 20) + i, i));
  rig_.publish(model);
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  std::vector<Bytes> targets;
  std::vector<BlockRead> batch;
  for (const auto& [name, bytes] : model) {
    targets.emplace_back(bytes.size());
    batch.push_back(snapshot.read_of(name, {0, bytes.size()}, targets.back()));
  }
  link->read(batch, in_seconds(60));
  for (std::size_t i = 0; i < batch.size(); ++i) {
    ASSERT_TRUE(batch[i].result.ok()) << batch[i].result.error().to_string();
    ASSERT_EQ(targets[i], model[i].second) << model[i].first;
  }
  link->read({}, in_seconds(1));  // an empty batch is over at once
  EXPECT_FALSE(link->broken());
}

TEST_P(TransportTest, OneBadItemOfABatchLeavesTheOthersAlone) {
  rig_.publish({{"a", random_bytes(70000, 1)}, {"b", random_bytes(300, 2)}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  Bytes a(70000), b(300), c(10), d(5);
  std::vector<BlockRead> batch = {snapshot.read_of("a", {0, 70000}, a), snapshot.read_of("a", {69999, 10}, c),
                                  snapshot.read_of("a", {0, 6}, d), snapshot.read_of("b", {0, 300}, b)};
  batch[3].entry.crc64 ^= 1;
  batch.push_back(snapshot.read_of("b", {0, 300}, b));
  link->read(batch, in_seconds(30));
  EXPECT_TRUE(batch[0].result.ok());
  EXPECT_EQ(batch[1].result.error().code(), Code::kInvalid);  // past the end
  EXPECT_EQ(batch[2].result.error().code(), Code::kInvalid);  // target of another size
  EXPECT_EQ(batch[3].result.error().code(), Code::kCorrupt);
  EXPECT_TRUE(batch[4].result.ok());
  EXPECT_FALSE(link->broken());
  EXPECT_EQ(b, random_bytes(300, 2));
}

TEST_P(TransportTest, AManifestThatPromisesOtherBytesIsRefusedAsCorrupt) {
  rig_.publish({{"small", random_bytes(1000, 1)}, {"large", random_bytes(3 * kExtent + 9, 2)}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  const auto code = [&](std::string_view tensor, ByteRange range, auto spoil) {
    Bytes target(static_cast<std::size_t>(range.size));
    BlockRead item = snapshot.read_of(tensor, range, target);
    spoil(item.entry);
    link->read({&item, 1}, in_seconds(30));
    return item.result.ok() ? "ok" : code_name(item.result.error().code());
  };
  const auto crc = [](ManifestEntry& entry) { entry.crc64 ^= 1U << 20; };
  const auto table = [](ManifestEntry& entry) { entry.extent_table_crc ^= 1; };
  EXPECT_EQ(code("small", {0, 1000}, crc), "corrupt");
  EXPECT_EQ(code("small", {3, 5}, crc), "corrupt");
  EXPECT_EQ(code("large", {0, 3 * kExtent + 9}, crc), "corrupt");
  EXPECT_EQ(code("large", {5, kExtent}, table), "corrupt");
  EXPECT_EQ(code("large", {5, kExtent}, [](ManifestEntry&) {}), "ok");
  EXPECT_FALSE(link->broken());
}

TEST_P(TransportTest, AByteFlippedInTheArenaIsNeverHandedOut) {
  const Bytes small = random_bytes(1000, 1), large = random_bytes(3 * kExtent + 9, 2);
  rig_.publish({{"small", small}, {"large", large}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  std::byte* arena = Rig::arena_memory();
  ASSERT_NE(arena, nullptr);
  for (const auto& [name, at, size] : {std::tuple("small", std::size_t{999}, small.size()), std::tuple("large", kExtent + 17, large.size())}) {
    std::byte* const byte = arena + snapshot.locator(name).payload_offset + at;
    Rig::flip(byte);
    EXPECT_EQ(read(*link, snapshot, name, {0, size}).error().code(), Code::kCorrupt) << name;
    EXPECT_EQ(read(*link, snapshot, name, {at, 1}).error().code(), Code::kCorrupt) << name;
    Rig::flip(byte);
    EXPECT_TRUE(read(*link, snapshot, name, {0, size}).ok()) << name;
  }
  EXPECT_TRUE(read(*link, snapshot, "large", {0, 10}).ok());
  EXPECT_EQ(link->stats().corrupt, 4U);
}

TEST_P(TransportTest, AVersionThatIsGoneIsStaleAndTheNewOneReads) {
  rig_.publish({{"w", random_bytes(2 * kExtent, 1)}});
  const Snapshot old = rig_.snapshot();
  const auto link = connect();
  for (std::uint64_t i = 2; i <= 5; ++i) rig_.publish({{"w", random_bytes(2 * kExtent, i)}});  // retained: 3, 4, 5
  EXPECT_EQ(read(*link, old, "w", {0, 2 * kExtent}).error().code(), Code::kStale);
  EXPECT_EQ(read(*link, old, "w", {7, 9}).error().code(), Code::kStale);
  EXPECT_EQ(must(read(*link, rig_.snapshot(), "w", {0, 2 * kExtent})), random_bytes(2 * kExtent, 5));
  EXPECT_EQ(link->stats().changed, 2U);
}

TEST_P(TransportTest, WithoutTheCrcCheckACorruptBlockIsHandedOutAsAsked) {
  rig_.publish({{"w", random_bytes(1000, 1)}});
  Snapshot snapshot = rig_.snapshot();
  const auto link = connect({.crc = true});
  Bytes target(1000);
  BlockRead item = snapshot.read_of("w", {0, 1000}, target);
  item.entry.crc64 ^= 1;
  link->read({&item, 1}, in_seconds(30));
  EXPECT_TRUE(item.result.ok());
  EXPECT_EQ(link->stats().blocks_verified, 0U);
}

TEST_P(TransportTest, ALocatorOfAnotherTimeIsStaleOrUnused) {
  const Bytes bytes = random_bytes(100, 1);
  rig_.publish({{"w", bytes}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  using Spoil = void (*)(Locator&);
  const Spoil spoils[] = {
      [](Locator& l) { l.payload_offset = std::uint64_t{1} << 40; },  [](Locator& l) { l.payload_offset = ~std::uint64_t{0} - 50; },
      [](Locator& l) { l.arena = 9; },                                 [](Locator& l) { l.header_arena = 65535; },
      [](Locator& l) { l.header_offset = ~std::uint64_t{0} - 63; },    [](Locator& l) { l.header_offset += 8; },
      [](Locator& l) { l.header_offset += 64; },                       [](Locator& l) { l.seq += 2; },
  };
  for (const Spoil spoil : spoils) {
    Bytes target(100);
    BlockRead item = snapshot.read_of("w", {0, 100}, target);
    spoil(item.locator);
    link->read({&item, 1}, in_seconds(30));
    if (link->one_sided()) {
      ASSERT_FALSE(item.result.ok());
      EXPECT_EQ(item.result.error().code(), Code::kStale) << item.result.error().to_string();
    } else {
      EXPECT_TRUE(item.result.ok());
    }
  }
  EXPECT_EQ(must(read(*link, snapshot, "w", {0, 100})), bytes);
}

TEST_P(TransportTest, APeerThatNeverAnswersIsATimeout) {
  TemporaryDirectory directory;
  const auto listener = must(Listener::open(Endpoint::unix_socket(directory.path() + "/s")));
  const auto link = GetParam().connect_to(listener.endpoint(), steady_clock().now() + 20'000);
  ASSERT_FALSE(link.ok());
  EXPECT_EQ(link.error().code(), Code::kTimeout);
  EXPECT_NE(link.error().message().find(listener.endpoint().to_string()), std::string::npos);
}

TEST_P(TransportTest, AServerThatClosesIsUnreachableAndTheLinkStaysBroken) {
  rig_.publish({{"w", random_bytes(1000, 1)}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  rig_.server->close(0);
  const auto first = read(*link, snapshot, "w", {0, 1000});
  if (link->one_sided()) return;  // what is mapped may still be read; what is not is tested by its own transport
  ASSERT_FALSE(first.ok());
  EXPECT_EQ(first.error().code(), Code::kUnreachable);
  EXPECT_TRUE(link->broken());
  EXPECT_EQ(read(*link, snapshot, "w", {0, 1000}).error().code(), Code::kUnreachable);
}

// ---------------------------------------------------------------- extents that the caller checks

// What the list must be, by the words of BlockRead::checks: one extent after another of the block's bytes, those that begin and end in the range.
std::vector<ExtentCheck> whole_extents_of(const Bytes& block, ByteRange range) {
  std::vector<ExtentCheck> out;
  if (block.size() <= kExtent) return out;  // no table
  for (std::uint64_t begin = 0; begin < block.size(); begin += kExtent) {
    const std::uint64_t end = std::min<std::uint64_t>(begin + kExtent, block.size());
    if (begin < range.offset || end > range.offset + range.size) continue;
    const auto extent = std::span(block).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    out.push_back({begin - range.offset, static_cast<std::uint32_t>(extent.size()), crc32c(extent)});
  }
  return out;
}

struct Deferred {
  Bytes bytes;
  std::vector<ExtentCheck> checks;
};
Result<Deferred> read_deferring(Link& link, const Snapshot& snapshot, std::string_view tensor, ByteRange range, std::size_t extents) {
  Deferred out{Bytes(static_cast<std::size_t>(range.size), std::byte{0xee}), std::vector<ExtentCheck>(extents, ExtentCheck{1, 2, 3})};
  BlockRead item = snapshot.read_of(tensor, range, out.bytes);
  item.checks = out.checks;
  link.read({&item, 1}, in_seconds(30));
  if (!item.result.ok()) return item.result.error();
  return out;
}

TEST_P(TransportTest, ChecksAreOfExactlyTheExtentsThatLieWholeInTheRange) {
  std::vector<std::pair<std::string, Bytes>> model;
  for (const std::size_t size : kSizes) model.emplace_back(cat("t", size), random_bytes(size, size + 1));
  rig_.publish(model);
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  Random random(12);
  std::uint64_t deferred = 0, verified = 0;
  for (const auto& [name, bytes] : model) {
    const std::size_t size = bytes.size();
    std::vector<ByteRange> ranges = {{0, size}, {0, 0}, {size, 0}, {0, size / 2}, {size / 2, size - size / 2}};
    for (const std::size_t begin : {std::size_t{0}, std::size_t{1}, kExtent - 1, kExtent, kExtent + 1}) {
      for (const std::size_t end : {2 * kExtent - 1, 2 * kExtent, 2 * kExtent + 1, size - std::min<std::size_t>(size, 1), size}) {
        if (begin <= end && end <= size) ranges.push_back({begin, end - begin});
      }
    }
    for (int i = 0; i < 10 && size > 0; ++i) {
      const std::uint64_t begin = random.below(size);
      ranges.push_back({begin, random.below(size - begin + 1)});
    }
    // All in one batch, each third of them checked by the link beside those that are not.
    std::vector<Bytes> targets;
    std::vector<std::vector<ExtentCheck>> lists;
    std::vector<BlockRead> batch;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      targets.emplace_back(static_cast<std::size_t>(ranges[i].size), std::byte{0xee});
      lists.emplace_back(i % 3 == 2 ? 0 : whole_extents_of(bytes, ranges[i]).size());
    }
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      batch.push_back(snapshot.read_of(name, ranges[i], targets[i]));
      batch.back().checks = lists[i];
      deferred += lists[i].size();
      verified += lists[i].empty() ? 1U : 0U;
    }
    link->read(batch, in_seconds(60));
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const auto what = cat(name, " [", ranges[i].offset, ", +", ranges[i].size, "] of a batch, seed 12");
      ASSERT_TRUE(batch[i].result.ok()) << what << ": " << batch[i].result.error().to_string();
      ASSERT_TRUE(std::equal(targets[i].begin(), targets[i].end(), bytes.begin() + static_cast<std::ptrdiff_t>(ranges[i].offset))) << what;
      if (lists[i].empty()) continue;
      ASSERT_EQ(lists[i], whole_extents_of(bytes, ranges[i])) << what;
      must(verify_extents(targets[i], lists[i]));
    }
  }
  EXPECT_GT(deferred, 200U);
  EXPECT_EQ(link->stats().extents_deferred, deferred);
  EXPECT_EQ(link->stats().blocks_verified, verified);
}

TEST_P(TransportTest, AFlippedByteOfADeferredExtentIsFoundByItsCheckAndOneAtTheEdgeByTheLink) {
  const Bytes bytes = random_bytes(5 * kExtent + 9, 2);
  rig_.publish({{"w", bytes}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  std::byte* const payload = Rig::arena_memory() + snapshot.locator("w").payload_offset;
  const ByteRange whole{0, bytes.size()}, middle{100, 4 * kExtent};  // of which extents 1 to 3 are whole
  const auto read_of = [&](ByteRange range) { return read_deferring(*link, snapshot, "w", range, whole_extents_of(bytes, range).size()); };
  for (const std::size_t at : {std::size_t{0}, 2 * kExtent + 17, 5 * kExtent + 8}) {
    Rig::flip(payload + at);
    const auto got = must(read_of(whole));
    const Status found = verify_extents(got.bytes, got.checks);
    ASSERT_FALSE(found.ok()) << at;
    EXPECT_EQ(found.error().code(), Code::kCorrupt);
    EXPECT_NE(found.error().message().find(cat("at offset ", at / kExtent * kExtent, ':')), std::string::npos) << found.error().message();
    const auto part = read_of(middle);
    if (at == 2 * kExtent + 17) {
      EXPECT_FALSE(verify_extents(must(part).bytes, must(part).checks).ok());
    } else if (at == 0) {  // not wanted, but in an extent that is wanted in part
      ASSERT_FALSE(part.ok());
      EXPECT_EQ(part.error().code(), Code::kCorrupt);
    }
    Rig::flip(payload + at);
  }
  EXPECT_EQ(link->stats().corrupt, 1U);
  EXPECT_TRUE(verify_extents(must(read_of(middle)).bytes, must(read_of(middle)).checks).ok());
}

TEST_P(TransportTest, ChecksForAnotherNumberOfExtentsAreRefused) {
  const Bytes bytes = random_bytes(3 * kExtent, 2);
  rig_.publish({{"w", bytes}, {"small", random_bytes(kExtent, 3)}});
  const Snapshot snapshot = rig_.snapshot();
  const auto link = connect();
  for (const std::size_t extents : {std::size_t{1}, std::size_t{2}, std::size_t{4}}) {
    EXPECT_EQ(read_deferring(*link, snapshot, "w", {0, bytes.size()}, extents).error().code(), Code::kInvalid) << extents;
  }
  EXPECT_EQ(read_deferring(*link, snapshot, "w", {1, kExtent}, 1).error().code(), Code::kInvalid);
  EXPECT_EQ(read_deferring(*link, snapshot, "small", {0, kExtent}, 1).error().code(), Code::kInvalid) << "one extent has no table";
  EXPECT_EQ(must(read_deferring(*link, snapshot, "w", {0, bytes.size()}, 3)).bytes, bytes);
}

TEST_P(TransportTest, TheTableThatChecksComeFromIsCheckedWhateverIsOmitted) {
  const Bytes bytes = random_bytes(3 * kExtent + 9, 2);
  rig_.publish({{"w", bytes}});
  const Snapshot snapshot = rig_.snapshot();
  for (const bool omit : {false, true}) {
    const auto link = connect({.crc = omit});
    std::vector<ExtentCheck> checks(4);
    Bytes target(bytes.size());
    BlockRead item = snapshot.read_of("w", {0, bytes.size()}, target);
    item.checks = checks;
    item.entry.extent_table_crc ^= 1;
    link->read({&item, 1}, in_seconds(30));
    ASSERT_FALSE(item.result.ok()) << omit;
    EXPECT_EQ(item.result.error().code(), Code::kCorrupt);
    const auto got = must(read_deferring(*link, snapshot, "w", {0, bytes.size()}, 4));
    EXPECT_EQ(got.bytes, bytes);
    EXPECT_EQ(got.checks, whole_extents_of(bytes, {0, bytes.size()}));
    EXPECT_EQ(link->stats().extents_deferred, 4U);
    EXPECT_EQ(link->stats().blocks_verified, 0U);
  }
}

TEST_P(TransportTest, AChangedBlockIsRefusedThoughItsExtentsAreDeferred) {
  rig_.publish({{"w", random_bytes(2 * kExtent, 1)}});
  const Snapshot old = rig_.snapshot();
  const auto link = connect();
  for (std::uint64_t i = 2; i <= 5; ++i) rig_.publish({{"w", random_bytes(2 * kExtent, i)}});  // retained: 3, 4, 5
  EXPECT_EQ(read_deferring(*link, old, "w", {0, 2 * kExtent}, 2).error().code(), Code::kStale);
  Snapshot now = rig_.snapshot();
  EXPECT_EQ(must(read_deferring(*link, now, "w", {0, 2 * kExtent}, 2)).bytes, random_bytes(2 * kExtent, 5));
  if (!link->one_sided()) return;
  for (Locator& locator : now.locators) locator.seq += 2;
  EXPECT_EQ(read_deferring(*link, now, "w", {0, 2 * kExtent}, 2).error().code(), Code::kStale);
}

// Goal: what a writer does meanwhile is noticed without the CRC of the bytes. Method: one tensor, published over and over, read without a lease;
// a read that is not refused has the bytes and the checks of its own version.
TEST_P(TransportTest, NoTornReadOfDeferredExtentsIsAccepted) {
  constexpr std::uint64_t kPublishes = 60;
  const std::size_t size = 6 * kExtent + 77;
  rig_.publish({{"w", random_bytes(size, 1)}});
  const auto link = connect();
  std::atomic<bool> over{false};
  std::thread publisher([&] {
    for (std::uint64_t i = 2; i <= kPublishes; ++i) rig_.publish({{"w", random_bytes(size, i)}});
    over = true;
  });
  std::uint64_t accepted = 0;
  for (bool last = false; !last;) {
    last = over;
    const Snapshot snapshot = rig_.snapshot();
    const auto got = read_deferring(*link, snapshot, "w", {0, size}, 7);
    if (!got.ok()) {
      EXPECT_EQ(got.error().code(), Code::kStale) << got.error().to_string();
      continue;
    }
    ++accepted;
    must(verify_extents(got->bytes, got->checks));
    EXPECT_TRUE(got->bytes == random_bytes(size, snapshot.entry("w").version.counter));
  }
  publisher.join();
  EXPECT_GT(accepted, 0U);
}

INSTANTIATE_TEST_SUITE_P(All, TransportTest, ::testing::ValuesIn(transports()), [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace paramwire
