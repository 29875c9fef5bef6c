// The fake fabric keeps the rules of the specification: one test a rule. READs and queues are in fake_verbs_reads_test.cpp, faults on demand in fake_verbs_faults_test.cpp.
#include "support/raw_verbs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <sys/mman.h>

namespace paramwire::testing {
namespace {

bool mentions(const std::vector<std::string>& texts, std::string_view part) {
  return std::any_of(texts.begin(), texts.end(), [&](const std::string& text) { return text.find(part) != std::string::npos; });
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
    RawEnd end(fabric, "rx0");
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
  RawEnd end(fabric, "rx0");
  ASSERT_NE(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(fabric.close_device(end.context), EBUSY);
  EXPECT_EQ(fabric.dealloc_pd(end.pd), EBUSY);
  EXPECT_EQ(fabric.destroy_cq(end.cq), EBUSY);
  EXPECT_EQ(fabric.destroy_comp_channel(end.channel), EBUSY);
  EXPECT_EQ(fabric.breaches().size(), 4U);
}

TEST(FakeVerbs, DestroyingTwiceIsABreach) {
  FakeVerbs fabric(two_devices());
  RawEnd end(fabric, "rx0");
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
  RawEnd end(fabric, "rx0");
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
  RawEnd end(fabric, "rx0");
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
  RawEnd limited(fabric, "rx0"), free(fabric, "rx1");
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
  RawEnd end(fabric, "rx0");
  std::vector<std::byte> bytes(100);
  EXPECT_NE(end.share(bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_TRUE(mentions(fabric.breaches(), "more than this project needs"));
}

// ---------------------------------------------------------------- the state machine

TEST(FakeVerbs, EveryAttributeThatATransitionNeedsIsMissed) {
  FakeVerbs fabric(two_devices());
  RawEnd client(fabric, "rx0"), server(fabric, "rx1");
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
  needs_each(client.init_attributes(), RawEnd::kInit);
  needs_each(client.rtr_attributes(server), RawEnd::kRtr);
  needs_each(client.rts_attributes(), RawEnd::kRts);
  EXPECT_EQ(client.qp->state, IBV_QPS_RTS);
  EXPECT_TRUE(mentions(fabric.refusals(), "INIT to RTR lacks IBV_QP_DEST_QPN")) << fabric.refusals().back();
  EXPECT_TRUE(mentions(fabric.refusals(), "RTR to RTS lacks IBV_QP_TIMEOUT"));
}

TEST(FakeVerbs, StatesCannotBeSkipped) {
  FakeVerbs fabric(two_devices());
  RawEnd client(fabric, "rx0"), server(fabric, "rx1");
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
  RawEnd client(fabric, "rx0", {.mtu = IBV_MTU_1024}), server(fabric, "rx1");
  ibv_qp_attr wrong = client.init_attributes();
  wrong.port_num = 2;
  EXPECT_EQ(client.modify(wrong, RawEnd::kInit), EINVAL);
  ASSERT_EQ(client.to_init(), 0);

  const auto refused = [&](std::string_view what, const std::function<void(ibv_qp_attr&)>& spoil) {
    ibv_qp_attr attributes = client.qp->state == IBV_QPS_INIT ? client.rtr_attributes(server) : client.rts_attributes();
    spoil(attributes);
    EXPECT_EQ(client.modify(attributes, client.qp->state == IBV_QPS_INIT ? RawEnd::kRtr : RawEnd::kRts), EINVAL) << what;
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
  RawEnd client(fabric, "rx0"), server(fabric, "rx1");
  connect(client, server);
  EXPECT_TRUE(fabric.breaches().empty());
  const auto breach = [&](std::string_view what, const std::function<void(ibv_qp_attr&)>& spoil) {
    ASSERT_EQ(client.to_state(IBV_QPS_RESET), 0);
    ASSERT_EQ(client.to_init(), 0);
    ibv_qp_attr rtr = client.rtr_attributes(server), rts = client.rts_attributes();
    spoil(rtr);
    spoil(rts);
    EXPECT_EQ(client.modify(rtr, RawEnd::kRtr), 0);
    EXPECT_EQ(client.modify(rts, RawEnd::kRts), 0);
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

}  // namespace
}  // namespace paramwire::testing
