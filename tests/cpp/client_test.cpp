// The client against a real server in this process, over every transport.
#include "paramwire/base/text.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/server/server.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

namespace paramwire {
namespace {

constexpr Micros kSecond = kMicrosPerSecond;

std::vector<std::byte> pattern(std::size_t size, std::uint64_t seed) {
  std::vector<std::byte> out(size);
  Random random(seed);
  for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random.next();
    std::memcpy(out.data() + at, &word, std::min(size - at, sizeof word));
  }
  return out;
}

class ClientTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    directory_ = (std::filesystem::temp_directory_path() / "paramwire-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(directory_.data()), nullptr);
    server_ = start();
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }
  std::unique_ptr<Server> start(std::vector<std::string> listen = {}) {
    ServerOptions options;
    options.unix_directory = directory_;
    options.listen = std::move(listen);
    options.coordinator = cat("memory:", directory_, "/state");
    options.tier_options.arena_bytes = std::uint64_t{64} << 20;
    auto server = Server::open(options);
    EXPECT_TRUE(server.ok()) << server.error().to_string();
    return server.ok() ? std::move(*server) : nullptr;
  }
  std::shared_ptr<Client> connect(ClientOptions options = {}) {
    options.transport = GetParam();
    auto client = Client::connect(server_->endpoints().front().to_string(), options);
    EXPECT_TRUE(client.ok()) << client.error().to_string();
    return client.ok() ? *client : nullptr;
  }
  Version publish(const std::vector<std::pair<BlockSpec, std::vector<std::byte>>>& blocks) {
    auto publish = server_->publish();
    EXPECT_TRUE(publish.ok()) << publish.error().to_string();
    for (const auto& [spec, bytes] : blocks) {
      const Status put = publish->put(spec, bytes);
      EXPECT_TRUE(put.ok()) << put.error().to_string();
    }
    auto version = publish->finish();
    EXPECT_TRUE(version.ok()) << version.error().to_string();
    return version.ok() ? *version : Version{};
  }
  static Result<std::vector<std::byte>> fetch(Snapshot& snapshot, std::string_view tensor, Shard part = {}) {
    PARAMWIRE_TRY(layout, snapshot.layout(tensor, part));
    std::vector<std::byte> out(layout.bytes);
    FetchRequest request;
    request.tensor = tensor;
    request.part = part;
    request.target = out;
    PARAMWIRE_CHECK(snapshot.fetch(std::span(&request, 1)));
    return out;
  }

  std::string directory_;
  std::unique_ptr<Server> server_;
};

BlockSpec spec(std::string_view tensor, Shape shape, Shard shard = {}) { return {tensor, DType::kU8, shape, shard}; }

TEST_P(ClientTest, FetchesWholeTensorsAndRowRangesAcrossBlocks) {
  const auto all = pattern(300 * 1000, 1);
  publish({{spec("w", {300, 1000}, Shard::rows(0, 100)), {all.begin(), all.begin() + 100'000}},
           {spec("w", {300, 1000}, Shard::rows(100, 300)), {all.begin() + 100'000, all.end()}},
           {spec("small", {5}), pattern(5, 2)}});
  const auto client = connect();
  const auto snapshot = *client->snapshot({});
  EXPECT_EQ(*fetch(*snapshot, "w"), all);
  EXPECT_EQ(*fetch(*snapshot, "small"), pattern(5, 2));
  for (const auto& [begin, end] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{{0, 1}, {99, 101}, {50, 250}, {299, 300}, {100, 300}}) {
    const std::vector<std::byte> want(all.begin() + static_cast<std::ptrdiff_t>(begin * 1000), all.begin() + static_cast<std::ptrdiff_t>(end * 1000));
    EXPECT_EQ(*fetch(*snapshot, "w", Shard::rows(begin, end)), want) << begin << ' ' << end;
  }
  const std::vector<std::byte> heads(all.begin() + 75'000, all.begin() + 225'000);
  EXPECT_EQ(*fetch(*snapshot, "w", Shard::head_range(4, 1, 3)), heads);
  EXPECT_EQ(client->stats().transport, GetParam());
  EXPECT_GT(client->stats().link.blocks_verified, 0U);
}

TEST_P(ClientTest, ASnapshotKeepsItsVersionWhileNewerOnesArePublished) {
  const Version first = publish({{spec("a", {1000}), pattern(1000, 1)}, {spec("b", {200'000}), pattern(200'000, 2)}});
  const auto client = connect();
  const auto snapshot = *client->snapshot({});
  for (std::uint64_t i = 0; i < 6; ++i) publish({{spec("a", {1000}), pattern(1000, 10 + i)}, {spec("b", {200'000}), pattern(200'000, 20 + i)}});
  EXPECT_EQ(snapshot->version(), first);
  EXPECT_EQ(*fetch(*snapshot, "a"), pattern(1000, 1));
  EXPECT_EQ(*fetch(*snapshot, "b"), pattern(200'000, 2));
  const auto newest = *client->snapshot({});
  EXPECT_EQ(*fetch(*newest, "b"), pattern(200'000, 25));
  const auto stats = *server_->stats();
  EXPECT_EQ(stats.store.versions_readable, 4U);  // three, and the leased one
  snapshot->close();
  EXPECT_EQ(fetch(*snapshot, "a").error().code(), Code::kInvalid);
}

TEST_P(ClientTest, AnUnleasedSnapshotEndsInStaleWhenItsBlocksAreGone) {
  publish({{spec("a", {70'000}), pattern(70'000, 1)}});
  const auto client = connect();
  SnapshotOptions options;
  options.lease = false;
  const auto snapshot = *client->snapshot(options);
  for (std::uint64_t i = 0; i < 5; ++i) publish({{spec("a", {70'000}), pattern(70'000, 10 + i)}});
  const auto result = fetch(*snapshot, "a");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), Code::kStale);
  std::vector<std::byte> out(70'000);
  FetchRequest request;
  request.tensor = "a";
  request.target = out;
  const auto version = client->fetch(std::span(&request, 1));
  ASSERT_TRUE(version.ok()) << version.error().to_string();
  EXPECT_EQ(version->counter, 6U);
  EXPECT_EQ(out, pattern(70'000, 14));
}

TEST_P(ClientTest, TiedTensorsAreStoredOnceAndFollowTheirTarget) {
  auto publisher = *server_->publish();
  ASSERT_TRUE(publisher.put(spec("embed", {64}), pattern(64, 1)).ok());
  ASSERT_TRUE(publisher.alias("head", "embed").ok());
  ASSERT_TRUE(publisher.finish().ok());
  const auto client = connect();
  EXPECT_EQ(*fetch(**client->snapshot({}), "head"), pattern(64, 1));
  publish({{spec("embed", {64}), pattern(64, 2)}});
  const auto second = *client->snapshot({});
  EXPECT_EQ(*fetch(*second, "head"), pattern(64, 2));
  EXPECT_EQ(second->find("head")->alias_of, "embed");
  publish({{spec("head", {64}), pattern(64, 3)}});  // untied
  const auto third = *client->snapshot({});
  EXPECT_EQ(*fetch(*third, "head"), pattern(64, 3));
  EXPECT_EQ(*fetch(*third, "embed"), pattern(64, 2));
  EXPECT_EQ(third->find("head")->alias_of, "");
}

TEST_P(ClientTest, RemotePublishesCommitWholeAndRefuseAnOldBase) {
  const auto client = connect();
  auto first = *client->publish({});
  const auto bytes = pattern(3 << 20, 7);
  ASSERT_TRUE(first->put("big", DType::kU8, {3, 1 << 20}, {}, bytes).ok());
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(first->put(cat("tiny.", i), DType::kF32, {}, {}, std::span(bytes).first(4)).ok());
  EXPECT_EQ(client->snapshot({}).error().code(), Code::kNotFound);  // not visible yet
  const auto version = first->finish();
  ASSERT_TRUE(version.ok()) << version.error().to_string();
  EXPECT_EQ(*first->finish(), *version);
  EXPECT_EQ(*fetch(**client->snapshot({}), "big"), bytes);

  PublishOptions fenced;
  fenced.any_base = false;
  fenced.base = *version;
  auto slow = *client->publish(fenced);
  auto fast = *client->publish(fenced);
  ASSERT_TRUE(slow->put("big", DType::kU8, {1}, {}, std::span(bytes).first(1)).ok());
  ASSERT_TRUE(fast->put("other", DType::kU8, {1}, {}, std::span(bytes).first(1)).ok());
  ASSERT_TRUE(fast->finish().ok());
  EXPECT_EQ(slow->finish().error().code(), Code::kStale);
  EXPECT_EQ(client->publish(fenced).error().code(), Code::kStale);
  EXPECT_EQ(*fetch(**client->snapshot({}), "big"), bytes);
}

TEST_P(ClientTest, ARestartedServerEndsSnapshotsAndServesNewOnes) {
  const std::string address = server_->endpoints().front().to_string();
  publish({{spec("a", {100}), pattern(100, 1)}});
  const auto client = connect();
  const auto before = *client->snapshot({});
  std::vector<std::string> listen;
  for (const Endpoint& endpoint : server_->endpoints()) listen.push_back(endpoint.to_string());
  server_.reset();
  server_ = start(listen);
  publish({{spec("a", {100}), pattern(100, 2)}});
  const auto gone = fetch(*before, "a");
  if (gone.ok()) {  // memory that was shared before outlives its server: the bytes are the old snapshot's own
    EXPECT_STREQ(GetParam(), "shm");
    EXPECT_EQ(*gone, pattern(100, 1));
  } else {
    EXPECT_EQ(gone.error().code(), Code::kStale) << gone.error().to_string();
  }
  const auto after = client->snapshot({});
  ASSERT_TRUE(after.ok()) << after.error().to_string();
  EXPECT_GT((*after)->version(), before->version());
  EXPECT_EQ((*after)->version().counter, before->version().counter);  // the same count, told apart by the epoch
  EXPECT_EQ(*fetch(**after, "a"), pattern(100, 2));
  EXPECT_EQ(client->stats().restarts_seen, 1U);
}

TEST_P(ClientTest, AClosedServerGivesUnreachableWithinTheDeadline) {
  publish({{spec("a", {100'000}), pattern(100'000, 1)}});
  const auto client = connect();
  const auto snapshot = *client->snapshot({});
  server_.reset();
  SnapshotOptions options;
  options.timeout = kSecond;
  const auto refused = client->snapshot(options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kUnreachable) << refused.error().to_string();
}

TEST_P(ClientTest, WaitingForAVersionEndsWhenItIsPublishedOrTheTimeIsOver) {
  const auto client = connect();
  SnapshotOptions options;
  options.wait = 20'000;
  EXPECT_EQ(client->snapshot(options).error().code(), Code::kNotFound);
  options.wait = 20 * kSecond;
  std::thread publisher([this] { publish({{spec("a", {10}), pattern(10, 1)}}); });
  const auto snapshot = client->snapshot(options);
  publisher.join();
  ASSERT_TRUE(snapshot.ok()) << snapshot.error().to_string();
  options.version = Version{(*snapshot)->version().epoch, 9};
  options.wait = 20'000;
  EXPECT_EQ(client->snapshot(options).error().code(), Code::kStale);
}

TEST_P(ClientTest, TicketsRunBesideTheCallerAndReportTheirOwnErrors) {
  const auto bytes = pattern(1 << 20, 3);
  publish({{spec("a", {1 << 20}), bytes}});
  const auto client = connect();
  const auto snapshot = *client->snapshot({});
  std::vector<std::vector<std::byte>> targets(8, std::vector<std::byte>(1 << 20));
  std::vector<Ticket> tickets;
  for (auto& target : targets) {
    FetchRequest request;
    request.tensor = "a";
    request.target = target;
    tickets.push_back(*snapshot->fetch_async({request}));
  }
  FetchRequest wrong;
  wrong.tensor = "nothing";
  Ticket bad = *snapshot->fetch_async({wrong});
  for (Ticket& ticket : tickets) EXPECT_TRUE(ticket.wait().ok());
  for (const auto& target : targets) EXPECT_EQ(target, bytes);
  EXPECT_EQ(bad.wait().error().code(), Code::kNotFound);
}

TEST_P(ClientTest, StatsAreSafeToReadWhileFetchesRunAndNeverFall) {
  const auto bytes = pattern(100'000, 3);
  publish({{spec("a", {100'000}), bytes}});
  const auto client = connect();
  const auto snapshot = *client->snapshot({});
  constexpr int kFetches = 50;
  std::atomic<int> running{2};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      for (int i = 0; i < kFetches; ++i) EXPECT_EQ(*fetch(*snapshot, "a"), bytes);
      if (GetParam() == std::string_view("shm")) {
        for (int i = 0; i < kFetches; ++i) EXPECT_TRUE(snapshot->view("a").ok());
      }
      --running;
    });
  }
  ClientStats last;
  while (running > 0) {
    const ClientStats now = client->stats();
    EXPECT_GE(now.link.reads, last.link.reads);
    EXPECT_GE(now.link.bytes, last.link.bytes);
    EXPECT_GE(now.link.views, last.link.views);
    last = now;
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(client->stats().link.reads, 2U * kFetches);
  EXPECT_EQ(client->stats().link.bytes, 2U * kFetches * bytes.size());
}

TEST_P(ClientTest, ClosingWhileOthersCallGivesThemAnErrorAndLeavesNoThread) {
  publish({{spec("a", {1000}), pattern(1000, 1)}});
  for (int round = 0; round < 10; ++round) {
    const auto client = connect();
    std::vector<std::thread> callers;
    for (int c = 0; c < 2; ++c) {
      callers.emplace_back([&] {
        for (;;) {
          auto snapshot = client->snapshot({});
          if (!snapshot.ok()) return;
          std::vector<std::byte> out(1000);
          FetchRequest request;
          request.tensor = "a";
          request.target = out;
          auto ticket = (*snapshot)->fetch_async({request});
          if (ticket.ok()) static_cast<void>(ticket->wait().ok());
        }
      });
    }
    client->close();
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(client->snapshot({}).error().code(), Code::kInvalid);
  }
}

TEST_P(ClientTest, ABlockLargeEnoughForTwoThreadsArrivesWhole) {
  const auto bytes = pattern((std::size_t{33} << 20) + 4097, 5);
  publish({{spec("a", {bytes.size()}), bytes}});
  const auto client = connect();
  const auto fetched = fetch(**client->snapshot({}), "a");
  ASSERT_TRUE(fetched.ok()) << fetched.error().to_string();
  EXPECT_TRUE(*fetched == bytes);
}

TEST_P(ClientTest, ErrorsNameTheTensorBothSizesAndNearNames) {
  publish({{spec("model.layers.0.weight", {16, 4}), pattern(64, 1)}});
  const auto client = connect();
  const auto snapshot = *client->snapshot({});
  const auto missing = fetch(*snapshot, "layers.0.weight");
  EXPECT_EQ(missing.error().code(), Code::kNotFound);
  EXPECT_NE(missing.error().message().find("model.layers.0.weight"), std::string::npos);
  std::vector<std::byte> out(10);
  FetchRequest request;
  request.tensor = "model.layers.0.weight";
  request.target = out;
  const Status size = snapshot->fetch(std::span(&request, 1));
  EXPECT_EQ(size.error().code(), Code::kInvalid);
  EXPECT_NE(size.error().message().find("64"), std::string::npos);
  EXPECT_NE(size.error().message().find("10"), std::string::npos);
  EXPECT_EQ(fetch(*snapshot, "model.layers.0.weight", Shard::rows(8, 17)).error().code(), Code::kInvalid);
}

TEST_P(ClientTest, AManifestOfManyTensorsArrivesAsADeltaAfterTheFirst) {
  std::vector<std::pair<BlockSpec, std::vector<std::byte>>> blocks;
  std::vector<std::string> names;
  for (int i = 0; i < 3000; ++i) names.push_back(cat("layer.", i, ".weight"));
  for (const std::string& name : names) blocks.emplace_back(spec(name, {8}), pattern(8, 1));
  publish(blocks);
  const auto client = connect();
  const auto first = *client->snapshot({});
  const std::uint64_t whole = client->stats().manifest_bytes;
  publish({{spec(names[17], {8}), pattern(8, 2)}});
  const auto second = *client->snapshot({});
  EXPECT_LT(client->stats().manifest_bytes - whole, 1000U);
  EXPECT_EQ(*fetch(*second, names[17]), pattern(8, 2));
  EXPECT_EQ(*fetch(*second, names[18]), pattern(8, 1));
  EXPECT_EQ(second->tensors().size(), 3000U);
}

INSTANTIATE_TEST_SUITE_P(Transports, ClientTest, ::testing::Values("shm", "tcp"), [](const auto& param) { return std::string(param.param); });

TEST(Client, AnUnknownTransportOrAddressIsRefusedWithWhatIsKnown) {
  ClientOptions options;
  options.transport = "pigeon";
  const auto transport = Client::connect("127.0.0.1:1", options);
  EXPECT_EQ(transport.error().code(), Code::kInvalid);
  EXPECT_NE(transport.error().message().find("shm"), std::string::npos);
  EXPECT_EQ(Client::connect("127.0.0.1:99999", {}).error().code(), Code::kInvalid);
}

}  // namespace
}  // namespace paramwire
