// A server and links to it over one fake RDMA fabric: the server on device fake0, links on fake1, as if each were a machine of its own. When a test is
// over, nothing that was made on a device may be left, and nothing may have been done that the specification or this project forbids.
#pragma once

#include "support/fake_verbs.hpp"
#include "support/rig.hpp"

#include "paramwire/client/client.hpp"
#include "paramwire/net/verbs_link.hpp"
#include "paramwire/net/verbs_node.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::testing {

inline constexpr ClientId kVerbsClient{3, 4};

inline FakeFabric server_and_client(Delivery delivery = Delivery::kAtPost) {
  return {{FakeDevice::roce("fake0", "127.0.0.1"), FakeDevice::roce("fake1", "127.0.0.1")}, delivery};
}

class VerbsRig : public ::testing::Test {
 protected:
  using Snapshot = testing::Snapshot;  // and not a client's

  void serve(FakeFabric configuration = server_and_client(), ServerOptions options = {}) {
    rig_.reset();
    fabric_ = std::make_shared<FakeVerbs>(std::move(configuration));
    start_server(std::move(options));
  }
  // On the fabric that is there.
  void start_server(ServerOptions options = {}) {
    options.udp = false;
    if (options.verbs == "auto") options.verbs = "fake0";
    options.verbs_library = library();
    rig_ = std::make_unique<Rig>(std::move(options));
  }
  std::function<Result<std::shared_ptr<VerbsApi>>()> library() const {
    return [fabric = fabric_]() -> Result<std::shared_ptr<VerbsApi>> { return std::shared_ptr<VerbsApi>(fabric); };
  }
  std::shared_ptr<VerbsNode> node(VerbsWish wish = {"fake1", {}}) const { return std::make_shared<VerbsNode>(std::move(wish), library()); }

  Result<std::unique_ptr<Link>> try_connect(const VerbsOptions& options = {}, std::shared_ptr<VerbsNode> with = nullptr, Micros deadline = in_seconds(20)) const {
    return VerbsLink::connect(rig_->tcp_endpoint(), kVerbsClient, rig_->server->incarnation(), options, with ? std::move(with) : node(), deadline);
  }
  std::unique_ptr<Link> connect(const VerbsOptions& options = {}, std::shared_ptr<VerbsNode> with = nullptr) const { return must(try_connect(options, std::move(with))); }
  std::shared_ptr<Client> client(ClientOptions options = {}) const {
    if (options.transport == "auto") options.transport = "verbs";
    options.verbs_device = "fake1";
    options.verbs_library = library();
    return must(Client::connect(rig_->tcp_endpoint().to_string(), options));
  }

  static Status read_into(Link& link, const Snapshot& snapshot, std::string_view tensor, ByteRange range, std::span<std::byte> target, Micros deadline = in_seconds(30)) {
    BlockRead item = snapshot.read_of(tensor, range, target);
    link.read({&item, 1}, deadline);
    return item.result;
  }
  static Result<Bytes> read(Link& link, const Snapshot& snapshot, std::string_view tensor, ByteRange range) {
    Bytes target(static_cast<std::size_t>(range.size), std::byte{0xee});
    PARAMWIRE_CHECK(read_into(link, snapshot, tensor, range, target));
    return target;
  }
  static Result<Bytes> read(Link& link, const Snapshot& snapshot, std::string_view tensor) { return read(link, snapshot, tensor, {0, snapshot.entry(tensor).raw_size}); }

  // Whether `text` has all of `words`.
  static void expect_words(const std::string& text, std::initializer_list<std::string_view> words) {
    for (const std::string_view word : words) EXPECT_NE(text.find(word), std::string::npos) << '"' << word << "\" is not in: " << text;
  }
  // Queue pairs at the server, once `wanted` of them are left: it hears of a closed connection in its own time.
  std::uint64_t server_queue_pairs(std::uint64_t wanted) const {
    for (int i = 0; i < 10'000 && must(rig_->server->stats()).verbs.queue_pairs != wanted; ++i) rig_->round_trip();
    return must(rig_->server->stats()).verbs.queue_pairs;
  }

  void TearDown() override {
    rig_.reset();
    if (fabric_ == nullptr) return;
    EXPECT_EQ(fabric_->live(), FakeLive{}) << fabric_->live().qps << " queue pairs, " << fabric_->live().regions << " regions and " << fabric_->live().contexts << " contexts are left";
    EXPECT_EQ(fabric_->breaches(), std::vector<std::string>{});
    if (!refusals_expected_) {
      EXPECT_EQ(fabric_->refusals(), std::vector<std::string>{});
    }
    check_modifies();
  }
  // CASES UP-10, over every change of a queue pair that the test made.
  void check_modifies() const {
    for (const FakeModify& modify : fabric_->modifies()) {
      const auto within = [&](int bit, int value, int least, int most) { return (modify.mask & bit) == 0 || (value >= least && value <= most); };
      EXPECT_TRUE(within(IBV_QP_RNR_RETRY, modify.attributes.rnr_retry, 1, 6)) << int{modify.attributes.rnr_retry};
      EXPECT_TRUE(within(IBV_QP_MIN_RNR_TIMER, modify.attributes.min_rnr_timer, 10, 14)) << int{modify.attributes.min_rnr_timer};
      EXPECT_TRUE(within(IBV_QP_TIMEOUT, modify.attributes.timeout, 1, 31)) << int{modify.attributes.timeout};
      EXPECT_TRUE(within(IBV_QP_RETRY_CNT, modify.attributes.retry_cnt, 1, 6)) << int{modify.attributes.retry_cnt};
    }
  }

  bool refusals_expected_ = false;  // the test makes the specification be broken
  std::shared_ptr<FakeVerbs> fabric_;
  std::unique_ptr<Rig> rig_;
};

}  // namespace paramwire::testing
