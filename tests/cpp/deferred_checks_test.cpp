// Extents whose CRCs the caller of a fetch compares itself: what is in its list, over blocks, retries and failures.
#include "support/rig.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/client/client.hpp"

#include <gtest/gtest.h>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kExtent = kExtentBytes;
const std::vector<ExtentCheck> kOld = {{1, 2, 3}, {4, 5, 6}};  // what is left in a list from a fetch before

// A tensor of bytes, cut in blocks at these rows.
struct Tensor {
  std::string name;
  std::uint64_t row_bytes = 0;
  std::vector<std::uint64_t> cuts;  // 0 and the number of rows included
  Bytes bytes;

  // By the words of FetchRequest::checks, for these rows of it.
  std::vector<ExtentCheck> expected(std::uint64_t row_begin, std::uint64_t row_end) const {
    std::vector<ExtentCheck> out;
    const std::uint64_t from = row_begin * row_bytes, to = row_end * row_bytes;
    for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
      const std::uint64_t block = cuts[c] * row_bytes, block_end = cuts[c + 1] * row_bytes;
      if (block_end - block <= kExtent) continue;
      for (std::uint64_t begin = block; begin < block_end; begin += kExtent) {
        const std::uint64_t size = std::min(kExtent, block_end - begin);
        if (begin < from || begin + size > to) continue;
        out.push_back({begin - from, static_cast<std::uint32_t>(size), crc32c(std::span(bytes).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)))});
      }
    }
    return out;
  }
  std::vector<ExtentCheck> expected() const { return expected(0, cuts.back()); }
};

Tensor tensor(std::string name, std::uint64_t row_bytes, std::vector<std::uint64_t> cuts, std::uint64_t seed) {
  Bytes bytes = random_bytes(static_cast<std::size_t>(row_bytes * cuts.back()), seed);
  return {std::move(name), row_bytes, std::move(cuts), std::move(bytes)};
}

class DeferredChecksTest : public ::testing::TestWithParam<const char*> {
 protected:
  void publish(std::initializer_list<const Tensor*> tensors) {
    auto publish = must(rig_->server->publish());
    for (const Tensor* each : tensors) {
      const Shape shape{each->cuts.back(), each->row_bytes};
      for (std::size_t c = 0; c + 1 < each->cuts.size(); ++c) {
        const Shard shard = each->cuts.size() == 2 ? Shard::whole() : Shard::rows(each->cuts[c], each->cuts[c + 1]);
        const auto begin = static_cast<std::size_t>(each->cuts[c] * each->row_bytes), end = static_cast<std::size_t>(each->cuts[c + 1] * each->row_bytes);
        must(publish.put(BlockSpec{each->name, DType::kU8, shape, shard}, std::span(each->bytes).subspan(begin, end - begin)));
      }
    }
    must(publish.finish());
  }
  std::shared_ptr<Client> connect(ClientOptions options = {}) const {
    options.transport = GetParam();
    return must(Client::connect(rig_->unix_endpoint().to_string(), options));
  }
  struct Fetch {
    Bytes target;
    std::vector<ExtentCheck> checks = kOld;
    FetchRequest request(const Tensor& tensor, std::uint64_t row_begin, std::uint64_t row_end) {
      target.assign(static_cast<std::size_t>((row_end - row_begin) * tensor.row_bytes), std::byte{0xee});
      FetchRequest out;
      out.tensor = tensor.name;
      out.part = Shard::rows(row_begin, row_end);
      out.target = target;
      out.checks = &checks;
      return out;
    }
    FetchRequest request(const Tensor& tensor) { return request(tensor, 0, tensor.cuts.back()); }
  };

  TemporaryDirectory directory_;
  std::unique_ptr<Rig> rig_ = std::make_unique<Rig>();
};

TEST_P(DeferredChecksTest, TheListIsOfTheWholeExtentsOfEveryBlockThatThePartTouches) {
  // Blocks of 100, 1 (less than an extent), 13 (2 extents less 3072 bytes: the last one short) and 186 rows.
  const Tensor cut = tensor("cut", 9856, {0, 100, 101, 114, 300}, 1);
  const Tensor whole = tensor("whole", 4096, {0, 80}, 2);
  publish({&cut, &whole});
  for (const bool verify : {true, false}) {
    ClientOptions options;
    options.verify = verify;
    const auto client = connect(options);
    const auto snapshot = must(client->snapshot(SnapshotOptions{}));
    std::vector<std::pair<std::uint64_t, std::uint64_t>> parts = {{0, 300}, {0, 100}, {100, 101}, {101, 114}, {99, 115}, {7, 21}, {0, 6}};
    Random random(5);
    for (int i = 0; i < 20; ++i) {
      const std::uint64_t begin = random.below(300);
      parts.emplace_back(begin, begin + 1 + random.below(300 - begin));
    }
    std::uint64_t deferred = 0;
    for (const auto& [begin, end] : parts) {
      SCOPED_TRACE(cat("rows ", begin, " to ", end, " verify ", verify, ", seed 5"));
      Fetch first, second;
      std::vector<FetchRequest> requests = {first.request(cut, begin, end), second.request(whole)};
      must(snapshot->fetch(requests));
      const auto from = cut.bytes.begin() + static_cast<std::ptrdiff_t>(begin * cut.row_bytes);
      ASSERT_TRUE(std::equal(first.target.begin(), first.target.end(), from));
      ASSERT_EQ(second.target, whole.bytes);
      ASSERT_EQ(first.checks, cut.expected(begin, end));
      ASSERT_EQ(second.checks, whole.expected());
      must(verify_extents(first.target, first.checks));
      must(verify_extents(second.target, second.checks));
      deferred += first.checks.size() + second.checks.size();
    }
    EXPECT_EQ(client->stats().link.extents_deferred, deferred);
    const std::uint64_t verified = client->stats().link.blocks_verified;
    EXPECT_TRUE(verify || verified == 0);
    Fetch third;
    FetchRequest plain = third.request(whole);
    plain.checks = nullptr;
    must(snapshot->fetch({&plain, 1}));
    EXPECT_EQ(client->stats().link.extents_deferred, deferred) << "without a list nothing is left to the caller";
    EXPECT_EQ(client->stats().link.blocks_verified, verified + (verify ? 1 : 0));
    EXPECT_EQ(third.checks, kOld);
  }
}

TEST_P(DeferredChecksTest, EncodedBlocksAreDecodedAndCheckedHereAndGiveNoEntry) {
  const auto client = connect();
  Bytes raw(2 * 300'000);
  for (std::size_t i = 0; i < raw.size(); i += 2) raw[i + 1] = std::byte{0x3f};  // bf16, easily encoded
  PublishOptions options;
  options.codec.codec = CodecId::kPlanes;
  auto publisher = must(client->publish(options));
  must(publisher->put("w", DType::kBF16, Shape{300'000}, {}, raw));
  must(publisher->finish());
  Bytes target(raw.size());
  std::vector<ExtentCheck> checks = kOld;
  FetchRequest request;
  request.tensor = "w";
  request.target = target;
  request.checks = &checks;
  must(client->fetch({&request, 1}));
  ASSERT_GT(client->stats().encoded_bytes, 0U);
  EXPECT_EQ(target, raw);
  EXPECT_TRUE(checks.empty());
  EXPECT_EQ(client->stats().link.extents_deferred, 0U);
}

TEST_P(DeferredChecksTest, BytesThatAreWrongAreFoundByTheCallerAndEdgesByTheFetch) {
  const Tensor good = tensor("good", 4096, {0, 80}, 1);
  const Tensor bad = tensor("bad", 4096, {0, 80}, 2);
  publish({&good, &bad});
  const auto client = connect();
  const auto snapshot = must(client->snapshot(SnapshotOptions{}));
  std::byte* const byte = Rig::arena_memory() + rig_->snapshot().locator("bad").payload_offset + kExtent + 5;
  Rig::flip(byte);
  Fetch first, second;
  std::vector<FetchRequest> requests = {first.request(good), second.request(bad)};
  must(snapshot->fetch(requests));
  must(verify_extents(first.target, first.checks));
  EXPECT_EQ(second.checks, bad.expected());
  const Status found = verify_extents(second.target, second.checks);
  ASSERT_FALSE(found.ok());
  EXPECT_NE(found.error().message().find(cat("at offset ", kExtent, ':')), std::string::npos) << found.error().message();
  EXPECT_EQ(client->stats().retries, 0U);

  // Row 17 begins in that extent: it is wanted in part. The fetch reads twice, and then says so.
  requests = {first.request(good), second.request(bad, 17, 80)};
  first.checks = second.checks = kOld;
  const Status refused = snapshot->fetch(requests);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kCorrupt);
  EXPECT_EQ(client->stats().retries, 2U);
  EXPECT_TRUE(requests[0].result.ok());
  EXPECT_EQ(first.checks, good.expected()) << "its own request did not fail";
  EXPECT_TRUE(second.checks.empty());
  Rig::flip(byte);
  must(snapshot->fetch(requests));
  EXPECT_EQ(first.checks, good.expected());
  EXPECT_EQ(second.checks, bad.expected(17, 80));
}

TEST_P(DeferredChecksTest, ARequestThatFailsLeavesItsListEmpty) {
  const Tensor w = tensor("w", 4096, {0, 80}, 1);
  publish({&w});
  const auto client = connect();
  SnapshotOptions unleased;
  unleased.lease = false;
  const auto snapshot = must(client->snapshot(unleased));
  Fetch good, unknown, small;
  std::vector<FetchRequest> requests = {good.request(w), unknown.request(w), small.request(w)};
  requests[1].tensor = "nothing";
  requests[2].target = requests[2].target.first(4096);
  EXPECT_FALSE(snapshot->fetch(requests).ok());
  EXPECT_TRUE(requests[0].result.ok());
  EXPECT_EQ(good.checks, w.expected());
  EXPECT_TRUE(unknown.checks.empty());
  EXPECT_TRUE(small.checks.empty());

  Fetch late;
  FetchRequest request = late.request(w);
  EXPECT_EQ(snapshot->fetch({&request, 1}, CallOptions{0}).error().code(), Code::kTimeout);
  EXPECT_TRUE(late.checks.empty());
  for (std::uint64_t i = 0; i < 5; ++i) {
    const Tensor other = tensor("w", 4096, {0, 80}, 10 + i);
    publish({&other});
  }
  late.checks = kOld;
  EXPECT_EQ(snapshot->fetch({&request, 1}).error().code(), Code::kStale);
  EXPECT_TRUE(late.checks.empty());
}

// A server that restarts between two fetches: the second begins on a link that is lost, and ends with the new server's blocks.
TEST_P(DeferredChecksTest, AFetchThatBeginsAnewBeginsItsListAnew) {
  const std::string state = cat("memory:", directory_.path(), "/state");
  const auto start = [&](std::vector<std::string> listen) {
    ServerOptions options;
    options.coordinator = state;
    options.unix_directory = directory_.path();
    options.listen = std::move(listen);
    return std::make_unique<Rig>(options);
  };
  rig_ = start({cat("unix:", directory_.path(), "/s"), "tcp://127.0.0.1:0"});
  std::vector<std::string> listen;
  for (const Endpoint& endpoint : rig_->server->endpoints()) listen.push_back(endpoint.to_string());
  const Tensor before = tensor("w", 4096, {0, 40, 80}, 1);
  publish({&before});
  const auto client = connect();
  Fetch fetch;
  FetchRequest request = fetch.request(before);
  must(client->fetch({&request, 1}));
  EXPECT_EQ(fetch.checks, before.expected());

  rig_.reset();
  rig_ = start(listen);
  const Tensor after = tensor("w", 4096, {0, 80}, 2);
  publish({&after});
  must(client->fetch({&request, 1}));
  EXPECT_GT(client->stats().retries + client->stats().reconnects, 0U);
  EXPECT_EQ(fetch.target, after.bytes);
  EXPECT_EQ(fetch.checks, after.expected());
  must(verify_extents(fetch.target, fetch.checks));
}

TEST_P(DeferredChecksTest, ATicketFillsTheListsOfItsRequests) {
  const Tensor w = tensor("w", 4096, {0, 80}, 1);
  publish({&w});
  const auto client = connect();
  const auto snapshot = must(client->snapshot(SnapshotOptions{}));
  std::vector<Fetch> fetches(4);
  std::vector<Ticket> tickets;
  for (Fetch& fetch : fetches) tickets.push_back(must(snapshot->fetch_async({fetch.request(w)})));
  for (std::size_t i = 0; i < fetches.size(); ++i) {
    must(tickets[i].wait());
    EXPECT_EQ(fetches[i].target, w.bytes);
    EXPECT_EQ(fetches[i].checks, w.expected());
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, DeferredChecksTest, ::testing::Values("shm", "tcp", "udp"), [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace paramwire
