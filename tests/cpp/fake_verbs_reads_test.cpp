// READs, the send queue and completion queues of the fake fabric: one test a rule of the specification.
#include "support/raw_verbs.hpp"

#include "paramwire/base/crc.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <functional>
#include <poll.h>
#include <thread>

namespace paramwire::testing {
namespace {

bool mentions(const std::vector<std::string>& texts, std::string_view part) {
  return std::any_of(texts.begin(), texts.end(), [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

bool readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return poll(&one, 1, 0) == 1;
}

// ---------------------------------------------------------------- READs

TEST(FakeVerbs, AReadMovesBytesIntoEveryPiece) {
  RawPair pair;
  ASSERT_EQ(pair.client.read({pair.piece(7, 100), pair.piece(107, 0), pair.piece(107, 1000)}, address_of(pair.source.data() + 7), pair.shared->rkey, 42), 0);
  const auto done = pair.client.completions(1);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].wr_id, 42U);
  EXPECT_EQ(done[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(done[0].opcode, IBV_WC_RDMA_READ);
  EXPECT_EQ(done[0].byte_len, 1100U);
  EXPECT_EQ(done[0].qp_num, pair.client.qp->qp_num);
  EXPECT_TRUE(pair.arrived(7, 1100));
  EXPECT_TRUE(pair.untouched(1107, 100));
  EXPECT_EQ(pair.fabric.totals().read_bytes, 1100U);
}

TEST(FakeVerbs, OnlySignalledReadsCompleteUnlessTheQueuePairSignalsAll) {
  for (const bool all : {false, true}) {
    RawPair pair(two_devices(), {.signal_all = all});
    for (std::uint64_t id = 1; id <= 4; ++id) ASSERT_EQ(pair.read(id * 64, 64, id, id == 4 ? unsigned{IBV_SEND_SIGNALED} : 0U), 0);
    const auto done = pair.client.completions(10, 10);
    ASSERT_EQ(done.size(), all ? 4U : 1U);
    EXPECT_EQ(done.back().wr_id, 4U);
    EXPECT_TRUE(pair.arrived(64, 256));
  }
}

TEST(FakeVerbs, DoorbellsAndTheirWorkRequestsAreCounted) {
  RawPair pair;
  ibv_send_wr chain[3]{}, *bad = nullptr;
  ibv_sge pieces[3];
  for (std::size_t i = 0; i < 3; ++i) {
    pieces[i] = pair.piece(i * 64, 64);
    chain[i].sg_list = &pieces[i];
    chain[i].num_sge = 1;
    chain[i].opcode = IBV_WR_RDMA_READ;
    chain[i].wr.rdma = {address_of(pair.source.data() + i * 64), pair.shared->rkey};
    chain[i].next = i < 2 ? &chain[i + 1] : nullptr;
  }
  ASSERT_EQ(pair.fabric.post_send(pair.client.qp, chain, &bad), 0);
  ASSERT_EQ(pair.read(192, 64), 0);
  const FakeTotals totals = pair.fabric.totals();
  EXPECT_EQ(totals.doorbells, 2U);
  EXPECT_EQ(totals.work_requests, 4U);
  EXPECT_EQ(totals.doorbell_largest, 3U);
  EXPECT_EQ(totals.reads, 4U);
  EXPECT_TRUE(pair.arrived(0, 256));
}

TEST(FakeVerbs, OtherOpcodesAreRefusedAndABreach) {
  RawPair pair;
  ibv_send_wr wr{}, *bad = nullptr;
  wr.opcode = IBV_WR_SEND;
  EXPECT_EQ(pair.fabric.post_send(pair.client.qp, &wr, &bad), EINVAL);
  EXPECT_EQ(bad, &wr);
  EXPECT_EQ(pair.fabric.breaches().size(), 1U);
  EXPECT_EQ(pair.fabric.totals().work_requests, 0U);
}

TEST(FakeVerbs, ReadsArePostedInReadyToSendOnly) {
  FakeVerbs fabric(two_devices());
  RawEnd client(fabric, "rx0"), server(fabric, "rx1");
  ASSERT_EQ(client.to_init(), 0);
  EXPECT_EQ(client.read({}, 0, 0, 1), EINVAL);
  ASSERT_EQ(client.to_rtr(server), 0);
  EXPECT_EQ(client.read({}, 0, 0, 1), EINVAL);
  ASSERT_EQ(client.to_rts(), 0);
  EXPECT_EQ(client.read({}, 0, 0, 1), 0);
}

TEST(FakeVerbs, AReadLongerThanTheDevicesMessageFails) {
  FakeFabric configuration = two_devices();
  for (FakeDevice& device : configuration.devices) device.ports[0].message_max = 8192;
  RawPair pair(configuration);
  ASSERT_EQ(pair.read(0, 8192), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  ASSERT_EQ(pair.read(0, 8193), 0);
  EXPECT_EQ(pair.status(), IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(pair.client.qp->state, IBV_QPS_ERR);
}

TEST(FakeVerbs, LocalMemoryMustBeRegisteredForWritingInTheDomainAndInBounds) {
  const auto status = [](const std::function<ibv_sge(RawPair&)>& piece) {
    RawPair pair;
    EXPECT_EQ(pair.client.read({piece(pair)}, address_of(pair.source.data()), pair.shared->rkey, 1), 0);
    const ibv_wc_status out = pair.status();
    EXPECT_TRUE(out == IBV_WC_SUCCESS || pair.untouched(0, pair.target.size()));
    return out;
  };
  EXPECT_EQ(status([](RawPair& pair) { return pair.piece(0, 100); }), IBV_WC_SUCCESS);
  EXPECT_EQ(status([](RawPair& pair) { return ibv_sge{address_of(pair.target.data()), 100, pair.local->rkey}; }), IBV_WC_LOC_PROT_ERR) << "a remote key";
  EXPECT_EQ(status([](RawPair& pair) { return ibv_sge{address_of(pair.target.data()), 100, 77}; }), IBV_WC_LOC_PROT_ERR) << "no key";
  EXPECT_EQ(status([](RawPair& pair) { return pair.piece(pair.target.size() - 99, 100); }), IBV_WC_LOC_PROT_ERR) << "one byte past the end";
  EXPECT_EQ(status([](RawPair& pair) { return ibv_sge{address_of(pair.target.data()) - 1, 100, pair.local->lkey}; }), IBV_WC_LOC_PROT_ERR) << "one byte before";
  EXPECT_EQ(status([](RawPair& pair) {
              ibv_mr* const read_only = pair.client.share(pair.target, IBV_ACCESS_REMOTE_READ);
              return ibv_sge{address_of(pair.target.data()), 100, read_only->lkey};
            }),
            IBV_WC_LOC_PROT_ERR) << "not for writing";
  EXPECT_EQ(status([](RawPair& pair) {
              ibv_mr* const elsewhere = pair.server.share(pair.target, IBV_ACCESS_LOCAL_WRITE);
              return ibv_sge{address_of(pair.target.data()), 100, elsewhere->lkey};
            }),
            IBV_WC_LOC_PROT_ERR) << "another domain";
}

TEST(FakeVerbs, RemoteMemoryMustBeRegisteredForReadingInTheDomainAndInBounds) {
  struct Ask {
    std::uint64_t address;
    std::uint32_t key;
  };
  const auto status = [](const std::function<Ask(RawPair&)>& ask) {
    RawPair pair;
    const Ask asked = ask(pair);
    EXPECT_EQ(pair.client.read({pair.piece(0, 100)}, asked.address, asked.key, 1), 0);
    const ibv_wc_status out = pair.status();
    if (out != IBV_WC_SUCCESS) {
      EXPECT_TRUE(pair.untouched(0, 100));
      EXPECT_EQ(pair.client.qp->state, IBV_QPS_ERR);
      EXPECT_EQ(pair.server.qp->state, IBV_QPS_ERR) << "a refusal ends the responder too";
    }
    return out;
  };
  const auto at = [](RawPair& pair, std::size_t offset) { return address_of(pair.source.data()) + offset; };
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{at(pair, 0), pair.shared->rkey}; }), IBV_WC_SUCCESS);
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{at(pair, 0), pair.shared->lkey}; }), IBV_WC_REM_ACCESS_ERR) << "a local key";
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{at(pair, 0), 1}; }), IBV_WC_REM_ACCESS_ERR) << "no key";
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{at(pair, pair.source.size() - 99), pair.shared->rkey}; }), IBV_WC_REM_ACCESS_ERR) << "past the end";
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{~std::uint64_t{0} - 10, pair.shared->rkey}; }), IBV_WC_REM_ACCESS_ERR) << "an address that wraps";
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{at(pair, 0), pair.server.share(pair.source, IBV_ACCESS_LOCAL_WRITE)->rkey}; }), IBV_WC_REM_ACCESS_ERR)
      << "not for reading";
  EXPECT_EQ(status([&](RawPair& pair) { return Ask{at(pair, 0), pair.client.share(pair.source, IBV_ACCESS_REMOTE_READ)->rkey}; }), IBV_WC_REM_ACCESS_ERR)
      << "another domain";
  EXPECT_EQ(status([&](RawPair& pair) {
              const std::uint32_t key = pair.shared->rkey;
              pair.server.unshare(pair.shared);
              EXPECT_NE(pair.server.share(pair.source, IBV_ACCESS_REMOTE_READ)->rkey, key);
              return Ask{at(pair, 0), key};
            }),
            IBV_WC_REM_ACCESS_ERR) << "a key of an earlier registration of the same bytes";
}

TEST(FakeVerbs, AResponderThatAllowsNoReadsRefusesThem) {
  RawPair pair(two_devices(), {.access = 0});
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_EQ(pair.status(), IBV_WC_REM_INV_REQ_ERR);
}

TEST(FakeVerbs, MoreReadsAtOnceThanTheResponderHoldsAreRefused) {
  FakeVerbs fabric(two_devices());
  RawEnd client(fabric, "rx0", {.reads = 16}), server(fabric, "rx1", {.reads = 8});
  connect(client, server);
  std::vector<std::byte> source(64), target(64);
  ibv_mr* const shared = server.share(source, IBV_ACCESS_REMOTE_READ);
  ibv_mr* const local = client.share(target, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_EQ(client.read({{address_of(target.data()), 64, local->lkey}}, address_of(source.data()), shared->rkey, 1), 0);
  EXPECT_EQ(client.completions(1).at(0).status, IBV_WC_REM_INV_REQ_ERR);
}

TEST(FakeVerbs, AReadOfNoBytesNeedsAPeerButNoKey) {
  RawPair pair;
  ASSERT_EQ(pair.client.read({}, 12345, 99, 1), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  pair.server.destroy_qp();
  ASSERT_EQ(pair.client.read({}, 12345, 99, 2), 0);
  EXPECT_EQ(pair.status(), IBV_WC_RETRY_EXC_ERR);
}

TEST(FakeVerbs, AfterAFailureEverythingIsFlushedEvenUnsignalled) {
  RawPair pair;
  pair.fabric.freeze(true);
  ASSERT_EQ(pair.read(0, 64, 1, 0), 0);
  ASSERT_EQ(pair.client.read({pair.piece(64, 64)}, 0, 0, 2, 0), 0);  // no such key
  ASSERT_EQ(pair.read(128, 64, 3, 0), 0);
  ASSERT_EQ(pair.read(192, 64, 4), 0);
  pair.fabric.freeze(false);
  ASSERT_EQ(pair.read(256, 64, 5, 0), 0) << "posting in the error state works";
  const auto done = pair.client.completions(10, 10);
  ASSERT_EQ(done.size(), 4U) << "the first succeeded without a signal";
  EXPECT_EQ(done[0].wr_id, 2U);
  EXPECT_EQ(done[0].status, IBV_WC_REM_ACCESS_ERR);
  for (std::size_t i = 1; i < 4; ++i) {
    EXPECT_EQ(done[i].wr_id, i + 2);
    EXPECT_EQ(done[i].status, IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_TRUE(pair.arrived(0, 64));
  EXPECT_TRUE(pair.untouched(64, 1024));
}

TEST(FakeVerbs, AQueuePairInErrorCanBeSetUpAgain) {
  RawPair pair;
  pair.fabric.freeze(true);
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_EQ(pair.client.to_state(IBV_QPS_ERR), 0);
  EXPECT_EQ(pair.status(), IBV_WC_WR_FLUSH_ERR);
  pair.fabric.freeze(false);
  ASSERT_EQ(pair.client.to_state(IBV_QPS_RESET), 0);
  ASSERT_EQ(pair.server.to_state(IBV_QPS_RESET), 0);
  connect(pair.client, pair.server);
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
}

// ---------------------------------------------------------------- queues

TEST(FakeVerbs, APlaceInTheSendQueueIsFreeWhenALaterCompletionWasPolled) {
  RawPair pair(two_devices(), {.send_max = 4});
  for (std::uint64_t id = 1; id <= 3; ++id) ASSERT_EQ(pair.read(0, 64, id, 0), 0);
  ASSERT_EQ(pair.read(0, 64, 4), 0);
  EXPECT_EQ(pair.read(0, 64, 5), ENOMEM) << "all are done, none was polled";
  EXPECT_EQ(pair.client.completions(1).at(0).wr_id, 4U);
  for (std::uint64_t id = 5; id <= 8; ++id) ASSERT_EQ(pair.read(0, 64, id, 0), 0);
  EXPECT_EQ(pair.read(0, 64, 9), ENOMEM) << "unsignalled ones alone never make room";
  EXPECT_TRUE(pair.client.completions(1, 10).empty());
  EXPECT_EQ(pair.read(0, 64, 9), ENOMEM);
}

TEST(FakeVerbs, WorkRequestsBeforeTheOneThatFindsNoRoomArePosted) {
  RawPair pair(two_devices(), {.send_max = 2});
  ibv_send_wr chain[3]{}, *bad = nullptr;
  for (std::size_t i = 0; i < 3; ++i) {
    chain[i].opcode = IBV_WR_RDMA_READ;
    chain[i].send_flags = IBV_SEND_SIGNALED;
    chain[i].next = i < 2 ? &chain[i + 1] : nullptr;
  }
  EXPECT_EQ(pair.fabric.post_send(pair.client.qp, chain, &bad), ENOMEM);
  EXPECT_EQ(bad, &chain[2]);
  EXPECT_EQ(pair.client.completions(10, 10).size(), 2U);
}

TEST(FakeVerbs, ACompletionQueueThatOverrunsIsABreach) {
  RawPair pair(two_devices(), {.cq_entries = 2});
  for (std::uint64_t id = 1; id <= 3; ++id) ASSERT_EQ(pair.read(0, 64, id), 0);
  EXPECT_TRUE(mentions(pair.fabric.breaches(), "overran"));
  EXPECT_EQ(pair.client.completions(10, 10).size(), 2U);
}

TEST(FakeVerbs, AnEventComesForACompletionAfterTheQueueWasArmedAndForOneOnly) {
  RawPair pair;
  const int fd = pair.client.channel->fd;
  ASSERT_EQ(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_FALSE(readable(fd)) << "not armed";
  ASSERT_EQ(pair.fabric.req_notify_cq(pair.client.cq), 0);
  EXPECT_FALSE(readable(fd)) << "what completed before it was armed makes no event";
  EXPECT_EQ(pair.fabric.take_cq_event(pair.client.channel), EAGAIN);
  ASSERT_EQ(pair.read(0, 64), 0);
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_TRUE(readable(fd));
  EXPECT_EQ(pair.fabric.take_cq_event(pair.client.channel), 0);
  EXPECT_EQ(pair.fabric.take_cq_event(pair.client.channel), EAGAIN) << "one arming, one event";
  EXPECT_EQ(pair.client.completions(10, 10).size(), 3U);
}

TEST(FakeVerbs, CompletionsOfADestroyedQueuePairAreGone) {
  RawPair pair;
  ASSERT_EQ(pair.read(0, 64), 0);
  pair.client.destroy_qp();
  EXPECT_TRUE(pair.client.completions(1, 10).empty());
}

// ---------------------------------------------------------------- by a thread

TEST(FakeVerbs, AThreadOfTheFabricCarriesOutReadsAndWakesTheChannel) {
  RawPair pair(two_devices(Delivery::kThread));
  for (int round = 0; round < 100; ++round) {
    std::fill(pair.target.begin(), pair.target.end(), std::byte{0});
    ASSERT_EQ(pair.fabric.req_notify_cq(pair.client.cq), 0);
    ASSERT_EQ(pair.read(0, 4096, 1, 0), 0);
    ASSERT_EQ(pair.read(4096, 4096, 2), 0);
    ASSERT_EQ(pair.client.wait_event(), 0);
    const auto done = pair.client.completions(1);
    ASSERT_EQ(done.size(), 1U);
    ASSERT_EQ(done[0].status, IBV_WC_SUCCESS);
    ASSERT_TRUE(pair.arrived(0, 8192));
  }
}

TEST(FakeVerbs, ReadsWhileAWriterRewritesAreNoRaceToASanitizer) {
  RawPair pair(two_devices(Delivery::kThread));
  std::thread writer([&] {
    for (std::uint64_t round = 0; round < 200; ++round) {
      const std::vector<std::byte> bytes(4096, static_cast<std::byte>(round));
      static_cast<void>(copy_crc64(pair.source.data(), bytes.data(), bytes.size()));
    }
  });
  for (int round = 0; round < 100; ++round) {
    ASSERT_EQ(pair.fabric.req_notify_cq(pair.client.cq), 0);
    ASSERT_EQ(pair.read(0, 4096), 0);
    ASSERT_EQ(pair.client.wait_event(), 0);
    ASSERT_EQ(pair.status(), IBV_WC_SUCCESS);
  }
  writer.join();
}

TEST(FakeVerbs, ManyConnectionsAreMadeUsedAndDestroyedAtOnce) {
  FakeVerbs fabric(two_devices());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        RawEnd client(fabric, "rx0"), server(fabric, "rx1");
        connect(client, server);
        std::vector<std::byte> source(256, std::byte{7}), target(256);
        ibv_mr* const shared = server.share(source, IBV_ACCESS_REMOTE_READ);
        ibv_mr* const local = client.share(target, IBV_ACCESS_LOCAL_WRITE);
        EXPECT_EQ(client.read({{address_of(target.data()), 256, local->lkey}}, address_of(source.data()), shared->rkey, 1), 0);
        EXPECT_EQ(client.completions(1).size(), 1U);
        EXPECT_EQ(source, target);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fabric.live(), FakeLive{});
  EXPECT_TRUE(fabric.breaches().empty());
}

}  // namespace
}  // namespace paramwire::testing
