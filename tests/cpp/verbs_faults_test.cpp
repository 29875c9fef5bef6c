// What a verbs link does when its device, its memory, its path or its server fails. Over the fake fabric.
#include "support/verbs_rig.hpp"

#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/text.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <thread>

namespace paramwire {
namespace {

using namespace testing;

// Frozen fabrics are waited for until this; where something else ends the wait, it never comes.
Micros soon() { return steady_clock().now() + 50'000; }

class VerbsFaultsTest : public VerbsRig {
 protected:
  // A model of one block, and the link to it.
  std::unique_ptr<Link> serve_and_connect(Delivery delivery, const VerbsOptions& options = {}) {
    serve(server_and_client(delivery));
    rig_->publish({{"w", bytes_}});
    snapshot_ = rig_->snapshot();
    return connect(options);
  }
  // A READ is under way: posted, and not carried out while the fabric is frozen.
  void wait_for_reads(std::uint64_t since) const {
    for (int i = 0; i < 1'000'000 && fabric_->totals().work_requests == since; ++i) std::this_thread::yield();
  }
  // Everything that a device had to do is done.
  void settle() {
    fabric_->freeze(false);
    ASSERT_EQ(must(read(*connect(), snapshot_, "w")), bytes_);
  }
  const Bytes bytes_ = random_bytes(3'000'000, 1);
  Snapshot snapshot_;
};

// ---------------------------------------------------------------- completions (CASES UP-09)

struct Named {
  ibv_wc_status status;
  const char* name;
};
constexpr Named kStatuses[] = {{IBV_WC_RETRY_EXC_ERR, "transport retry counter exceeded (status 12)"}, {IBV_WC_REM_ACCESS_ERR, "remote access error (status 10)"},
                               {IBV_WC_WR_FLUSH_ERR, "work request flushed error (status 5)"}, {IBV_WC_LOC_PROT_ERR, "local protection error (status 4)"},
                               {IBV_WC_REM_INV_REQ_ERR, "remote invalid request error (status 9)"}, {IBV_WC_RNR_RETRY_EXC_ERR, "RNR retry counter exceeded (status 13)"},
                               {IBV_WC_FATAL_ERR, "fatal error (status 19)"}, {IBV_WC_GENERAL_ERR, "error (status 21)"}};

TEST_F(VerbsFaultsTest, AFailedReadIsATypedErrorAtOnceWhicheverItIs) {
  for (const Delivery delivery : {Delivery::kAtPost, Delivery::kThread}) {
    for (const auto& [status, name] : kStatuses) {
      for (const std::uint64_t nth : {1U, 2U, 4U}) {  // the first slice, the second, the header
        SCOPED_TRACE(cat(name, " at READ ", nth));
        const auto link = serve_and_connect(delivery);
        fabric_->fail_read(nth, {status});
        const auto failed = read(*link, snapshot_, "w");
        ASSERT_FALSE(failed.ok());
        EXPECT_EQ(failed.error().code(), Code::kUnreachable);
        expect_words(failed.error().message(), {rig_->tcp_endpoint().to_string(), "RDMA READ of ", nth == 4 ? " 64 bytes" : " 1048576 bytes", "fake1 port 1 GID 1", name, ": "});
        EXPECT_TRUE(link->broken());
        EXPECT_EQ(link->stats().verbs.failures, 1U);
        EXPECT_EQ(link->stats().verbs.failed_status, static_cast<std::uint64_t>(status));
        EXPECT_EQ(link->stats().blocks_verified, 0U);
        EXPECT_EQ(fabric_->live("fake1").qps, 0) << "nothing can write into the target any more";
        const auto again = read(*link, snapshot_, "w");
        EXPECT_EQ(again.error().code(), Code::kUnreachable);
        expect_words(again.error().message(), {"broken before", name, "connect again"});
        EXPECT_EQ(must(read(*connect(), snapshot_, "w")), bytes_);
      }
    }
  }
}

TEST_F(VerbsFaultsTest, OfABatchTheFinishedStayAndAllOthersFailAtOnce) {
  serve();
  std::vector<std::pair<std::string, Bytes>> model;
  for (std::size_t i = 0; i < 300; ++i) model.emplace_back(cat("t", i), random_bytes(500, i));
  rig_->publish(model);
  snapshot_ = rig_->snapshot();
  const auto link = connect();
  std::vector<Bytes> targets(model.size(), Bytes(500));
  std::vector<BlockRead> batch;
  for (std::size_t i = 0; i < model.size(); ++i) batch.push_back(snapshot_.read_of(model[i].first, {0, 500}, targets[i]));
  fabric_->fail_read(400, {IBV_WC_REM_ACCESS_ERR});
  link->read(batch, in_seconds(30));
  std::size_t good = 0;
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (batch[i].result.ok()) {
      ++good;
      EXPECT_EQ(targets[i], model[i].second);
    } else {
      EXPECT_EQ(batch[i].result.error().code(), Code::kUnreachable);
    }
  }
  EXPECT_GT(good, 0U);
  EXPECT_LT(good, model.size());
  EXPECT_EQ(link->stats().blocks_verified, good);
}

TEST_F(VerbsFaultsTest, ABytesFlippedOnTheWayIsCorruptAndTheLinkStays) {
  const auto link = serve_and_connect(Delivery::kAtPost);
  FakeReadFault flipped;
  flipped.flip_at = 77;
  fabric_->fail_read(2, flipped);
  EXPECT_EQ(read(*link, snapshot_, "w").error().code(), Code::kCorrupt);
  fabric_->fail_read(4, flipped = {.flip_at = 3});  // in the header
  EXPECT_EQ(read(*link, snapshot_, "w").error().code(), Code::kStale);
  EXPECT_EQ(must(read(*link, snapshot_, "w")), bytes_);
  EXPECT_EQ(link->stats().corrupt, 1U);
  EXPECT_EQ(link->stats().changed, 1U);
}

TEST_F(VerbsFaultsTest, CallsThatFailInTheMiddleBreakTheLinkWithTheirName) {
  for (const auto& [call, name] : {std::pair(FakeCall::kPostSend, "ibv_post_send"), std::pair(FakeCall::kPollCq, "ibv_poll_cq"), std::pair(FakeCall::kReqNotify, "ibv_req_notify_cq")}) {
    SCOPED_TRACE(name);
    const auto link = serve_and_connect(Delivery::kThread);
    if (call == FakeCall::kReqNotify) fabric_->freeze(true);  // so that it comes to sleeping
    fabric_->fail(call, EIO, 1, 1, "fake1");
    const auto failed = read(*link, snapshot_, "w");
    ASSERT_FALSE(failed.ok());
    EXPECT_EQ(failed.error().code(), Code::kUnreachable);
    expect_words(failed.error().message(), {name, "fake1", rig_->tcp_endpoint().to_string()});
    EXPECT_TRUE(link->broken());
    settle();
  }
}

// ---------------------------------------------------------------- a frozen fabric

TEST_F(VerbsFaultsTest, TheDeadlineEndsAReadOfAFrozenFabricAndTheTargetIsLeftAlone) {
  for (const bool busy : {false, true}) {
    SCOPED_TRACE(busy);
    serve(server_and_client(Delivery::kThread));
    rig_->publish({{"w", bytes_}});
    snapshot_ = rig_->snapshot();
    const auto with = node();
    const auto link = connect({.busy_poll = busy}, with);
    Bytes target(bytes_.size(), std::byte{0x11});
    const std::uint64_t registration = must(with->add(target));
    fabric_->freeze(true);
    const Status late = read_into(*link, snapshot_, "w", {0, bytes_.size()}, target, soon());
    ASSERT_FALSE(late.ok());
    EXPECT_EQ(late.error().code(), Code::kTimeout);
    expect_words(late.error().message(), {rig_->tcp_endpoint().to_string(), "1 of 1 blocks to come by RDMA", "fake1", "3 READs under way"});
    EXPECT_EQ(fabric_->live("fake1").qps, 0);
    settle();
    EXPECT_EQ(target, Bytes(bytes_.size(), std::byte{0x11})) << "what was posted is never carried out";
    EXPECT_EQ(link->stats().verbs.sleeps > 0, !busy);
    with->remove(registration);
  }
}

TEST_F(VerbsFaultsTest, AReadThatBeganBeforeTheFreezeLeavesTheTargetAloneAfterwards) {
  const auto link = serve_and_connect(Delivery::kThread);
  const auto with = node();
  const auto direct = connect({}, with);
  Bytes target(bytes_.size(), std::byte{0x11});
  const std::uint64_t registration = must(with->add(target));
  std::atomic<std::uint64_t> left{2};  // the first slices arrive, the rest does not
  fabric_->before_read([&](const FakeRead&) {
    if (left.load() > 0 && --left == 0) fabric_->freeze(true);
  });
  EXPECT_EQ(read_into(*direct, snapshot_, "w", {0, bytes_.size()}, target, soon()).error().code(), Code::kTimeout);
  const Bytes after = target;
  fabric_->before_read(nullptr);
  settle();
  EXPECT_EQ(target, after);
  EXPECT_NE(target, bytes_);
  with->remove(registration);
}

TEST_F(VerbsFaultsTest, AConnectOverAFrozenFabricEndsAtItsDeadline) {
  serve(server_and_client(Delivery::kThread));
  fabric_->freeze(true);
  for (const bool busy : {false, true}) {
    const auto link = try_connect({.busy_poll = busy}, nullptr, soon());
    ASSERT_FALSE(link.ok());
    EXPECT_EQ(link.error().code(), Code::kTimeout);
    expect_words(link.error().message(), {rig_->tcp_endpoint().to_string(), "READ", "MTU 4096"});
    EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
  }
  EXPECT_EQ(server_queue_pairs(0), 0U);
}

std::atomic<int> questions_left{0};
bool ask_for_the_end() { return questions_left.fetch_sub(1) <= 1; }

TEST_F(VerbsFaultsTest, AnInterruptEndsTheWait) {
  for (const bool busy : {false, true}) {
    const auto link = serve_and_connect(Delivery::kThread, {.busy_poll = busy});
    fabric_->freeze(true);
    questions_left = 2;
    {
      const WaitInterrupt interrupt(&ask_for_the_end);
      Bytes target(bytes_.size());
      const Status ended = read_into(*link, snapshot_, "w", {0, bytes_.size()}, target, in_seconds(600));
      ASSERT_FALSE(ended.ok());
      EXPECT_EQ(ended.error().code(), Code::kTimeout);
      expect_words(ended.error().message(), {"interrupted"});
    }
    EXPECT_TRUE(link->broken());
    settle();
  }
}

TEST_F(VerbsFaultsTest, AServerThatClosesWhileReadsHangIsUnreachableAtOnce) {
  for (const bool busy : {false, true}) {
    const auto link = serve_and_connect(Delivery::kThread, {.busy_poll = busy});
    fabric_->freeze(true);
    const std::uint64_t posted = fabric_->totals().work_requests;
    std::thread closer([&] {
      wait_for_reads(posted);
      rig_->server->close(0);
    });
    Bytes target(bytes_.size());
    const Status lost = read_into(*link, snapshot_, "w", {0, bytes_.size()}, target, in_seconds(600));
    closer.join();
    ASSERT_FALSE(lost.ok());
    EXPECT_EQ(lost.error().code(), Code::kUnreachable);
    expect_words(lost.error().message(), {rig_->tcp_endpoint().to_string()});
    EXPECT_TRUE(link->broken());
  }
}

// A server that was killed says nothing: its device does not answer any more, which the client's own notices.
TEST_F(VerbsFaultsTest, AServerThatIsKilledIsNoticedByTheDevice) {
  const auto link = serve_and_connect(Delivery::kThread);
  fabric_->kill_owner("fake0");
  const auto lost = read(*link, snapshot_, "w");
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnreachable);
  expect_words(lost.error().message(), {"status 12"});
}

TEST_F(VerbsFaultsTest, AReadAfterTheServersEndNeedsNoAnswerOfIt) {
  const auto link = serve_and_connect(Delivery::kAtPost);
  rig_->server->close(0);
  const auto after = read(*link, snapshot_, "w");
  ASSERT_FALSE(after.ok()) << "its queue pair went with it";
  EXPECT_EQ(after.error().code(), Code::kUnreachable);
}

TEST_F(VerbsFaultsTest, ADevicePulledOutIsUnreachableAndItsObjectsCanBeGivenBack) {
  for (const char* device : {"fake0", "fake1"}) {
    const auto link = serve_and_connect(Delivery::kThread);
    fabric_->change(device, [](FakeDevice& each) { each.gone = true; });
    EXPECT_EQ(read(*link, snapshot_, "w").error().code(), Code::kUnreachable) << device;
    EXPECT_TRUE(link->broken());
    const auto again = try_connect();
    ASSERT_FALSE(again.ok());
    if (std::string_view(device) == "fake1") {
      EXPECT_EQ(again.error().code(), Code::kInvalid) << "the device that was asked for by name";
    } else {
      EXPECT_NE(again.error().code(), Code::kTimeout);
    }
    fabric_->change(device, [](FakeDevice& each) { each.gone = false; });
    EXPECT_EQ(must(read(*connect(), snapshot_, "w")), bytes_);
  }
}

// ---------------------------------------------------------------- what can't be made (CASES UP-05, UP-06)

TEST_F(VerbsFaultsTest, WhateverCallFailsWhileConnectingIsNamedAndNothingHalfMadeStays) {
  constexpr std::pair<FakeCall, const char*> kCalls[] = {
      {FakeCall::kAllocPd, "ibv_alloc_pd"}, {FakeCall::kRegMr, "ibv_reg_mr"}, {FakeCall::kCreateChannel, "ibv_create_comp_channel"}, {FakeCall::kCreateCq, "ibv_create_cq"},
      {FakeCall::kCreateQp, "ibv_create_qp"}, {FakeCall::kModifyToInit, "INIT"}, {FakeCall::kModifyToRtr, "RTR"}, {FakeCall::kModifyToRts, "RTS"}, {FakeCall::kOpenDevice, "ibv_open_device"}};
  serve();
  rig_->publish({{"w", bytes_}});
  snapshot_ = rig_->snapshot();
  for (const auto& [call, name] : kCalls) {
    for (const int error : {ENOMEM, EFAULT}) {
      SCOPED_TRACE(cat(name, " errno ", error));
      fabric_->fail(call, error, call == FakeCall::kOpenDevice ? 2 : 1, 1, "fake1");  // the first is for its tables
      const auto refused = try_connect();
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.error().code(), error == ENOMEM ? Code::kBackpressure : Code::kUnreachable) << refused.error().to_string();
      expect_words(refused.error().message(), {name, "fake1", error == ENOMEM ? "errno 12" : "errno 14"});
      EXPECT_EQ(refused.error().message().find("(0 bytes)"), std::string::npos) << refused.error().message();
      EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
      EXPECT_EQ(must(read(*connect(), snapshot_, "w")), bytes_);
    }
  }
  EXPECT_EQ(server_queue_pairs(0), 0U);
}

TEST_F(VerbsFaultsTest, ALimitOnLockedMemoryIsNamedWithWhatIsNeededAndHowToRaiseIt) {
  serve();
  fabric_->change("fake1", [](FakeDevice& device) { device.locked_bytes_max = 1 << 20; });
  const auto refused = try_connect();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  expect_words(refused.error().message(), {"ibv_reg_mr", "fake1", "4194304 bytes", "the limit on locked memory is", "ulimit -l unlimited", "--ulimit memlock=-1"});
  EXPECT_EQ(fabric_->live("fake1"), FakeLive{});
}

TEST_F(VerbsFaultsTest, MemoryThatTheServerCanNotRegisterIsItsErrorWithItsName) {
  for (const int error : {ENOMEM, EFAULT}) {
    serve();
    rig_->publish({{"w", bytes_}});
    snapshot_ = rig_->snapshot();
    fabric_->fail(FakeCall::kRegMr, error, 2, 1, "fake0");  // after its probe
    const auto refused = try_connect();
    ASSERT_FALSE(refused.ok());
    // Never kUnavailable, which would say that there is no RDMA here: going on without it would be no fallback.
    EXPECT_EQ(refused.error().code(), error == ENOMEM ? Code::kBackpressure : Code::kUnreachable) << refused.error().to_string();
    expect_words(refused.error().message(), {rig_->tcp_endpoint().to_string(), "fake0", "ibv_reg_mr"});
    EXPECT_EQ(server_queue_pairs(0), 0U);
    EXPECT_EQ(must(read(*connect(), snapshot_, "w")), bytes_);
  }
}

}  // namespace
}  // namespace paramwire
