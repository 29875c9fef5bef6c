// The fake fabric keeps the rules of the specification: one test a rule. Faults on demand are in fake_verbs_faults_test.cpp.
#include "support/verbs_ends.hpp"

#include "paramwire/base/crc.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <functional>
#include <poll.h>
#include <sys/mman.h>
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

// ---------------------------------------------------------------- devices

TEST(FakeVerbs, DevicesPortsAndGidsAreThoseThatTheTestConfigured) {
  FakeFabric configuration = two_devices();
  configuration.devices[1].ports[0].mtu_active = 1024;
  configuration.devices[1].ports[0].message_max = 1 << 20;
  configuration.devices[1].ports[0].gids.push_back({5, ipv4_gid("10.9.0.2"), GidType::kRoceV1, 3});
  FakeVerbs fabric(configuration);
  EXPECT_EQ(*fabric.device_names(), (std::vector<std::string>{"rx0", "rx1"}));
  ibv_context* const context = fabric.open_device("rx1");
  ASSERT_NE(context, nullptr);
  EXPECT_GT(context->num_comp_vectors, 0);
  ibv_device_attr device{};
  ASSERT_EQ(fabric.query_device(context, &device), 0);
  EXPECT_EQ(device.max_qp_rd_atom, 128);
  EXPECT_EQ(device.phys_port_cnt, 1);
  ibv_port_attr port{};
  ASSERT_EQ(fabric.query_port(context, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.active_mtu, IBV_MTU_1024);
  EXPECT_EQ(port.max_mtu, IBV_MTU_4096);
  EXPECT_EQ(port.max_msg_sz, 1U << 20);
  EXPECT_EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
  EXPECT_EQ(port.gid_tbl_len, 6);
  EXPECT_EQ(fabric.query_port(context, 2, &port), EINVAL);
  ibv_gid_entry entries[8];
  ASSERT_EQ(fabric.query_gid_table(context, entries, 8), 3);
  EXPECT_EQ(entries[2].gid_index, 5U);
  EXPECT_EQ(entries[2].gid_type, static_cast<std::uint32_t>(IBV_GID_TYPE_ROCE_V1));
  EXPECT_EQ(entries[2].ndev_ifindex, 3U);
  EXPECT_EQ(entries[1].gid.raw[15], 2);
  EXPECT_EQ(fabric.query_gid_table(context, entries, 2), -EINVAL) << "a table too small is an error, not a part";
  EXPECT_EQ(fabric.open_device("rx7"), nullptr);
  EXPECT_EQ(errno, ENODEV);
  EXPECT_EQ(fabric.close_device(context), 0);
}

TEST(FakeVerbs, EveryObjectIsCountedUntilItIsDestroyed) {
  FakeVerbs fabric(two_devices());
  {
    std::vector<std::byte> bytes(10'000);
    VerbsEnd end(fabric, "rx0");
    ASSERT_NE(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
    const FakeLive live = fabric.live("rx0");
    EXPECT_EQ(live.contexts, 1);
    EXPECT_EQ(live.pds, 1);
    EXPECT_EQ(live.regions, 1);
    EXPECT_EQ(live.channels, 1);
    EXPECT_EQ(live.cqs, 1);
    EXPECT_EQ(live.qps, 1);
    EXPECT_GE(live.registered_bytes, bytes.size());
    EXPECT_EQ(live.registered_bytes % 4096, 0U);
    EXPECT_EQ(fabric.live("rx1"), FakeLive{});
    EXPECT_EQ(fabric.live(), live);
  }
  EXPECT_EQ(fabric.live(), FakeLive{});
  EXPECT_EQ(fabric.totals().registrations, 1U);
  EXPECT_TRUE(fabric.breaches().empty());
}

TEST(FakeVerbs, WhatIsStillUsedCannotBeDestroyed) {
  FakeVerbs fabric(two_devices());
  std::vector<std::byte> bytes(100);
  VerbsEnd end(fabric, "rx0");
  ASSERT_NE(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(fabric.close_device(end.context), EBUSY);
  EXPECT_EQ(fabric.dealloc_pd(end.pd), EBUSY);
  EXPECT_EQ(fabric.destroy_cq(end.cq), EBUSY);
  EXPECT_EQ(fabric.destroy_comp_channel(end.channel), EBUSY);
  EXPECT_EQ(fabric.breaches().size(), 4U);
}

TEST(FakeVerbs, DestroyingTwiceIsABreach) {
  FakeVerbs fabric(two_devices());
  VerbsEnd end(fabric, "rx0");
  ibv_pd* const pd = fabric.alloc_pd(end.context);
  EXPECT_EQ(fabric.dealloc_pd(pd), 0);
  EXPECT_EQ(fabric.dealloc_pd(pd), EINVAL);
  EXPECT_TRUE(mentions(fabric.breaches(), "destroyed already"));
}

TEST(FakeVerbs, LimitsOfTheDeviceHold) {
  FakeFabric configuration = two_devices();
  configuration.devices[0].qps_max = 1;
  configuration.devices[0].cqes_max = 100;
  configuration.devices[0].regions_max = 1;
  configuration.devices[0].sges_max = 4;
  FakeVerbs fabric(configuration);
  VerbsEnd end(fabric, "rx0");
  std::vector<std::byte> bytes(100);
  ASSERT_NE(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(fabric.create_cq(end.context, 101, nullptr), nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = end.cq;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = init.cap.max_send_sge = 1;
  EXPECT_EQ(fabric.create_qp(end.pd, &init), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  init.cap.max_send_sge = 5;
  EXPECT_EQ(fabric.create_qp(end.pd, &init), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

// ---------------------------------------------------------------- registration

TEST(FakeVerbs, OnlyMappedMemoryCanBeRegisteredAndOnlyWritableMemoryForWriting) {
  FakeVerbs fabric(two_devices());
  VerbsEnd end(fabric, "rx0");
  const std::size_t size = 3 * 4096;
  void* const pages = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ibv_mr* const region = fabric.reg_mr(end.pd, pages, size, IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->addr, pages);
  EXPECT_EQ(region->length, size);
  EXPECT_EQ(fabric.dereg_mr(region), 0);
  EXPECT_EQ(fabric.reg_mr(end.pd, pages, size, IBV_ACCESS_LOCAL_WRITE), nullptr);
  EXPECT_EQ(errno, EFAULT);
  munmap(static_cast<std::byte*>(pages) + 4096, 4096);  // a hole
  EXPECT_EQ(fabric.reg_mr(end.pd, pages, size, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(errno, EFAULT);
  EXPECT_EQ(fabric.reg_mr(end.pd, pages, 0, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(errno, EINVAL);
  munmap(pages, size);
}

TEST(FakeVerbs, RegisteredBytesStopAtTheLockLimitOfTheDevicesUser) {
  FakeFabric configuration = two_devices();
  configuration.devices[0].locked_bytes_max = 64 * 1024;
  FakeVerbs fabric(configuration);
  VerbsEnd limited(fabric, "rx0"), free(fabric, "rx1");
  std::vector<std::byte> bytes(80 * 1024), half(40 * 1024);
  EXPECT_EQ(limited.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_NE(free.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  ASSERT_NE(limited.share(half, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(limited.share(half, IBV_ACCESS_REMOTE_READ), nullptr) << "two of 40 KiB";
  limited.unshare(limited.regions[0]);
  EXPECT_NE(limited.share(half, IBV_ACCESS_REMOTE_READ), nullptr);
}

TEST(FakeVerbs, AccessBeyondReadingIsABreach) {
  FakeVerbs fabric(two_devices());
  VerbsEnd end(fabric, "rx0");
  std::vector<std::byte> bytes(100);
  EXPECT_NE(end.share(bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_TRUE(mentions(fabric.breaches(), "more than this project needs"));
}

// ---------------------------------------------------------------- the state machine

TEST(FakeVerbs, EveryAttributeThatATransitionNeedsIsMissed) {
  FakeVerbs fabric(two_devices());
  VerbsEnd client(fabric, "rx0"), server(fabric, "rx1");
  ASSERT_EQ(server.to_init(), 0);
  const auto needs_each = [&](const ibv_qp_attr& attributes, int mask) {
    for (int bit = 1; bit <= IBV_QP_DEST_QPN; bit <<= 1) {
      if ((mask & bit) == 0) continue;
      const std::size_t refused = fabric.refusals().size();
      EXPECT_EQ(client.modify(attributes, mask & ~bit), EINVAL) << "without bit " << bit;
      EXPECT_EQ(fabric.refusals().size(), refused + 1);
      EXPECT_EQ(client.modify(attributes, mask | IBV_QP_QKEY), EINVAL) << "a datagram's attribute";
    }
    EXPECT_EQ(client.modify(attributes, mask), 0);
  };
  needs_each(client.init_attributes(), VerbsEnd::kInit);
  needs_each(client.rtr_attributes(server), VerbsEnd::kRtr);
  needs_each(client.rts_attributes(), VerbsEnd::kRts);
  EXPECT_EQ(client.qp->state, IBV_QPS_RTS);
  EXPECT_TRUE(mentions(fabric.refusals(), "INIT to RTR lacks IBV_QP_DEST_QPN")) << fabric.refusals().back();
  EXPECT_TRUE(mentions(fabric.refusals(), "RTR to RTS lacks IBV_QP_TIMEOUT"));
}

TEST(FakeVerbs, StatesCannotBeSkipped) {
  FakeVerbs fabric(two_devices());
  VerbsEnd client(fabric, "rx0"), server(fabric, "rx1");
  EXPECT_EQ(client.to_rtr(server), EINVAL);
  EXPECT_EQ(client.to_rts(), EINVAL);
  ASSERT_EQ(client.to_init(), 0);
  EXPECT_EQ(client.to_rts(), EINVAL);
  EXPECT_TRUE(mentions(fabric.refusals(), "INIT to RTS is no transition"));
  EXPECT_EQ(client.to_state(IBV_QPS_ERR), 0);
  EXPECT_EQ(client.to_init(), EINVAL) << "only through RESET";
  EXPECT_EQ(client.to_state(IBV_QPS_RESET), 0);
  EXPECT_EQ(client.to_init(), 0);
}

TEST(FakeVerbs, ValuesOutsideTheDevicesLimitsAreRefused) {
  FakeFabric configuration = two_devices();
  configuration.devices[0].ports[0].mtu_active = 1024;
  configuration.devices[0].reads_max = 16;
  FakeVerbs fabric(configuration);
  VerbsEnd client(fabric, "rx0", {.mtu = IBV_MTU_1024}), server(fabric, "rx1");
  ibv_qp_attr wrong = client.init_attributes();
  wrong.port_num = 2;
  EXPECT_EQ(client.modify(wrong, VerbsEnd::kInit), EINVAL);
  ASSERT_EQ(client.to_init(), 0);

  const auto refused = [&](std::string_view what, const std::function<void(ibv_qp_attr&)>& spoil) {
    ibv_qp_attr attributes = client.qp->state == IBV_QPS_INIT ? client.rtr_attributes(server) : client.rts_attributes();
    spoil(attributes);
    EXPECT_EQ(client.modify(attributes, client.qp->state == IBV_QPS_INIT ? VerbsEnd::kRtr : VerbsEnd::kRts), EINVAL) << what;
    ASSERT_FALSE(fabric.refusals().empty());
    EXPECT_NE(fabric.refusals().back().find(what), std::string::npos) << fabric.refusals().back();
  };
  refused("path MTU 4096 over the port's active 1024", [](ibv_qp_attr& a) { a.path_mtu = IBV_MTU_4096; });
  refused("no queue pair can have the number 0", [](ibv_qp_attr& a) { a.dest_qp_num = 0; });
  refused("the port has no GID 9", [](ibv_qp_attr& a) { a.ah_attr.grh.sgid_index = 9; });
  refused("is_global", [](ibv_qp_attr& a) { a.ah_attr.is_global = 0; });
  refused("the target's GID is zero", [](ibv_qp_attr& a) { a.ah_attr.grh.dgid = {}; });
  refused("max_dest_rd_atomic 17 over the device's 16", [](ibv_qp_attr& a) { a.max_dest_rd_atomic = 17; });
  refused("leaves by port 2", [](ibv_qp_attr& a) { a.ah_attr.port_num = 2; });
  refused("over 24 bits", [](ibv_qp_attr& a) { a.rq_psn = 1 << 24; });
  ASSERT_EQ(client.to_rtr(server), 0);
  refused("max_rd_atomic 17 over the device's 16", [](ibv_qp_attr& a) { a.max_rd_atomic = 17; });
  refused("timeout 32", [](ibv_qp_attr& a) { a.timeout = 32; });
  refused("over 7", [](ibv_qp_attr& a) { a.retry_cnt = 8; });
  EXPECT_EQ(client.to_rts(), 0);
  EXPECT_EQ(fabric.modifies().back().error, 0);
  EXPECT_EQ(fabric.modifies().back().qp_num, client.qp->qp_num);
}

TEST(FakeVerbs, TimersThatWaitForEverOrNotAtAllAreBreaches) {
  FakeVerbs fabric(two_devices());
  VerbsEnd client(fabric, "rx0"), server(fabric, "rx1");
  connect(client, server);
  EXPECT_TRUE(fabric.breaches().empty());
  const auto breach = [&](std::string_view what, const std::function<void(ibv_qp_attr&)>& spoil) {
    ASSERT_EQ(client.to_state(IBV_QPS_RESET), 0);
    ASSERT_EQ(client.to_init(), 0);
    ibv_qp_attr rtr = client.rtr_attributes(server), rts = client.rts_attributes();
    spoil(rtr);
    spoil(rts);
    EXPECT_EQ(client.modify(rtr, VerbsEnd::kRtr), 0);
    EXPECT_EQ(client.modify(rts, VerbsEnd::kRts), 0);
    ASSERT_FALSE(fabric.breaches().empty()) << what;
    EXPECT_NE(fabric.breaches().back().find(what), std::string::npos) << fabric.breaches().back();
  };
  breach("rnr_retry 7", [](ibv_qp_attr& a) { a.rnr_retry = 7; });
  breach("rnr_retry 0", [](ibv_qp_attr& a) { a.rnr_retry = 0; });
  breach("min_rnr_timer 0", [](ibv_qp_attr& a) { a.min_rnr_timer = 0; });
  breach("timeout 0", [](ibv_qp_attr& a) { a.timeout = 0; });
  breach("retry_cnt 0", [](ibv_qp_attr& a) { a.retry_cnt = 0; });
  breach("retry_cnt 7", [](ibv_qp_attr& a) { a.retry_cnt = 7; });
}

// ---------------------------------------------------------------- READs

TEST(FakeVerbs, AReadMovesBytesIntoEveryPiece) {
  VerbsPair pair;
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
    VerbsPair pair(two_devices(), {.signal_all = all});
    for (std::uint64_t id = 1; id <= 4; ++id) ASSERT_EQ(pair.read(id * 64, 64, id, id == 4 ? unsigned{IBV_SEND_SIGNALED} : 0U), 0);
    const auto done = pair.client.completions(10, 10);
    ASSERT_EQ(done.size(), all ? 4U : 1U);
    EXPECT_EQ(done.back().wr_id, 4U);
    EXPECT_TRUE(pair.arrived(64, 256));
  }
}

TEST(FakeVerbs, DoorbellsAndTheirWorkRequestsAreCounted) {
  VerbsPair pair;
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
  VerbsPair pair;
  ibv_send_wr wr{}, *bad = nullptr;
  wr.opcode = IBV_WR_SEND;
  EXPECT_EQ(pair.fabric.post_send(pair.client.qp, &wr, &bad), EINVAL);
  EXPECT_EQ(bad, &wr);
  EXPECT_EQ(pair.fabric.breaches().size(), 1U);
  EXPECT_EQ(pair.fabric.totals().work_requests, 0U);
}

TEST(FakeVerbs, ReadsArePostedInReadyToSendOnly) {
  FakeVerbs fabric(two_devices());
  VerbsEnd client(fabric, "rx0"), server(fabric, "rx1");
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
  VerbsPair pair(configuration);
  ASSERT_EQ(pair.read(0, 8192), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  ASSERT_EQ(pair.read(0, 8193), 0);
  EXPECT_EQ(pair.status(), IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(pair.client.qp->state, IBV_QPS_ERR);
}

TEST(FakeVerbs, LocalMemoryMustBeRegisteredForWritingInTheDomainAndInBounds) {
  const auto status = [](const std::function<ibv_sge(VerbsPair&)>& piece) {
    VerbsPair pair;
    EXPECT_EQ(pair.client.read({piece(pair)}, address_of(pair.source.data()), pair.shared->rkey, 1), 0);
    const ibv_wc_status out = pair.status();
    EXPECT_TRUE(out == IBV_WC_SUCCESS || pair.untouched(0, pair.target.size()));
    return out;
  };
  EXPECT_EQ(status([](VerbsPair& pair) { return pair.piece(0, 100); }), IBV_WC_SUCCESS);
  EXPECT_EQ(status([](VerbsPair& pair) { return ibv_sge{address_of(pair.target.data()), 100, pair.local->rkey}; }), IBV_WC_LOC_PROT_ERR) << "a remote key";
  EXPECT_EQ(status([](VerbsPair& pair) { return ibv_sge{address_of(pair.target.data()), 100, 77}; }), IBV_WC_LOC_PROT_ERR) << "no key";
  EXPECT_EQ(status([](VerbsPair& pair) { return pair.piece(pair.target.size() - 99, 100); }), IBV_WC_LOC_PROT_ERR) << "one byte past the end";
  EXPECT_EQ(status([](VerbsPair& pair) { return ibv_sge{address_of(pair.target.data()) - 1, 100, pair.local->lkey}; }), IBV_WC_LOC_PROT_ERR) << "one byte before";
  EXPECT_EQ(status([](VerbsPair& pair) {
              ibv_mr* const read_only = pair.client.share(pair.target, IBV_ACCESS_REMOTE_READ);
              return ibv_sge{address_of(pair.target.data()), 100, read_only->lkey};
            }),
            IBV_WC_LOC_PROT_ERR) << "not for writing";
  EXPECT_EQ(status([](VerbsPair& pair) {
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
  const auto status = [](const std::function<Ask(VerbsPair&)>& ask) {
    VerbsPair pair;
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
  const auto at = [](VerbsPair& pair, std::size_t offset) { return address_of(pair.source.data()) + offset; };
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{at(pair, 0), pair.shared->rkey}; }), IBV_WC_SUCCESS);
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{at(pair, 0), pair.shared->lkey}; }), IBV_WC_REM_ACCESS_ERR) << "a local key";
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{at(pair, 0), 1}; }), IBV_WC_REM_ACCESS_ERR) << "no key";
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{at(pair, pair.source.size() - 99), pair.shared->rkey}; }), IBV_WC_REM_ACCESS_ERR) << "past the end";
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{~std::uint64_t{0} - 10, pair.shared->rkey}; }), IBV_WC_REM_ACCESS_ERR) << "an address that wraps";
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{at(pair, 0), pair.server.share(pair.source, IBV_ACCESS_LOCAL_WRITE)->rkey}; }), IBV_WC_REM_ACCESS_ERR)
      << "not for reading";
  EXPECT_EQ(status([&](VerbsPair& pair) { return Ask{at(pair, 0), pair.client.share(pair.source, IBV_ACCESS_REMOTE_READ)->rkey}; }), IBV_WC_REM_ACCESS_ERR)
      << "another domain";
  EXPECT_EQ(status([&](VerbsPair& pair) {
              const std::uint32_t key = pair.shared->rkey;
              pair.server.unshare(pair.shared);
              EXPECT_NE(pair.server.share(pair.source, IBV_ACCESS_REMOTE_READ)->rkey, key);
              return Ask{at(pair, 0), key};
            }),
            IBV_WC_REM_ACCESS_ERR) << "a key of an earlier registration of the same bytes";
}

TEST(FakeVerbs, AResponderThatAllowsNoReadsRefusesThem) {
  VerbsPair pair(two_devices(), {.access = 0});
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_EQ(pair.status(), IBV_WC_REM_INV_REQ_ERR);
}

TEST(FakeVerbs, MoreReadsAtOnceThanTheResponderHoldsAreRefused) {
  FakeVerbs fabric(two_devices());
  VerbsEnd client(fabric, "rx0", {.reads = 16}), server(fabric, "rx1", {.reads = 8});
  connect(client, server);
  std::vector<std::byte> source(64), target(64);
  ibv_mr* const shared = server.share(source, IBV_ACCESS_REMOTE_READ);
  ibv_mr* const local = client.share(target, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_EQ(client.read({{address_of(target.data()), 64, local->lkey}}, address_of(source.data()), shared->rkey, 1), 0);
  EXPECT_EQ(client.completions(1).at(0).status, IBV_WC_REM_INV_REQ_ERR);
}

TEST(FakeVerbs, AReadOfNoBytesNeedsAPeerButNoKey) {
  VerbsPair pair;
  ASSERT_EQ(pair.client.read({}, 12345, 99, 1), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  pair.server.destroy_qp();
  ASSERT_EQ(pair.client.read({}, 12345, 99, 2), 0);
  EXPECT_EQ(pair.status(), IBV_WC_RETRY_EXC_ERR);
}

TEST(FakeVerbs, AfterAFailureEverythingIsFlushedEvenUnsignalled) {
  VerbsPair pair;
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
  VerbsPair pair;
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
  VerbsPair pair(two_devices(), {.send_max = 4});
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
  VerbsPair pair(two_devices(), {.send_max = 2});
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
  VerbsPair pair(two_devices(), {.cq_entries = 2});
  for (std::uint64_t id = 1; id <= 3; ++id) ASSERT_EQ(pair.read(0, 64, id), 0);
  EXPECT_TRUE(mentions(pair.fabric.breaches(), "overran"));
  EXPECT_EQ(pair.client.completions(10, 10).size(), 2U);
}

TEST(FakeVerbs, AnEventComesForACompletionAfterTheQueueWasArmedAndForOneOnly) {
  VerbsPair pair;
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
  VerbsPair pair;
  ASSERT_EQ(pair.read(0, 64), 0);
  pair.client.destroy_qp();
  EXPECT_TRUE(pair.client.completions(1, 10).empty());
}

// ---------------------------------------------------------------- by a thread

TEST(FakeVerbs, AThreadOfTheFabricCarriesOutReadsAndWakesTheChannel) {
  VerbsPair pair(two_devices(Delivery::kThread));
  for (int round = 0; round < 100; ++round) {
    std::fill(pair.target.begin(), pair.target.end(), std::byte{0});
    ASSERT_EQ(pair.fabric.req_notify_cq(pair.client.cq), 0);
    ASSERT_EQ(pair.read(0, 4096, 1, 0), 0);
    ASSERT_EQ(pair.read(4096, 4096, 2), 0);
    ASSERT_EQ(pair.fabric.take_cq_event(pair.client.channel), 0);  // waits
    const auto done = pair.client.completions(1);
    ASSERT_EQ(done.size(), 1U);
    ASSERT_EQ(done[0].status, IBV_WC_SUCCESS);
    ASSERT_TRUE(pair.arrived(0, 8192));
  }
}

TEST(FakeVerbs, ReadsWhileAWriterRewritesAreNoRaceToASanitizer) {
  VerbsPair pair(two_devices(Delivery::kThread));
  std::thread writer([&] {
    for (std::uint64_t round = 0; round < 200; ++round) {
      const std::vector<std::byte> bytes(4096, static_cast<std::byte>(round));
      static_cast<void>(copy_crc64(pair.source.data(), bytes.data(), bytes.size()));
    }
  });
  for (int round = 0; round < 100; ++round) {
    ASSERT_EQ(pair.fabric.req_notify_cq(pair.client.cq), 0);
    ASSERT_EQ(pair.read(0, 4096), 0);
    ASSERT_EQ(pair.fabric.take_cq_event(pair.client.channel), 0);
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
        VerbsEnd client(fabric, "rx0"), server(fabric, "rx1");
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
