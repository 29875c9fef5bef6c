// What a test can do to the fake fabric: failing calls and READs, silent peers, devices that change, lines in random order.
#include "support/raw_verbs.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <set>

namespace paramwire::testing {
namespace {

// ---------------------------------------------------------------- failing calls

TEST(FakeVerbsFaults, TheNthCallFailsWithItsErrno) {
  FakeVerbs fabric(two_devices());
  RawEnd end(fabric, "rx0");
  std::vector<std::byte> bytes(100);
  fabric.fail(FakeCall::kRegMr, ENOMEM, 2, 2);
  EXPECT_NE(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  for (int i = 0; i < 2; ++i) {
    errno = 0;
    EXPECT_EQ(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
    EXPECT_EQ(errno, ENOMEM);
  }
  EXPECT_NE(end.share(bytes, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(fabric.totals().registrations, 2U);
}

TEST(FakeVerbsFaults, EveryCallThatMakesSomethingCanFail) {
  FakeVerbs fabric(two_devices());
  RawEnd end(fabric, "rx0"), peer(fabric, "rx1");
  std::vector<std::byte> bytes(100);
  const auto fails = [&](FakeCall call, int error, const std::function<bool()>& succeeds) {
    fabric.fail(call, error);
    errno = 0;
    EXPECT_FALSE(succeeds()) << "call " << static_cast<int>(call);
    EXPECT_EQ(errno, error) << "call " << static_cast<int>(call);
  };
  const auto returned = [](int error) { return errno = error, error == 0; };
  fails(FakeCall::kOpenDevice, EPERM, [&] { return fabric.open_device("rx0") != nullptr; });
  fails(FakeCall::kAllocPd, ENOMEM, [&] { return fabric.alloc_pd(end.context) != nullptr; });
  fails(FakeCall::kCreateChannel, EMFILE, [&] { return fabric.create_comp_channel(end.context) != nullptr; });
  fails(FakeCall::kCreateCq, ENOMEM, [&] { return fabric.create_cq(end.context, 1, nullptr) != nullptr; });
  fails(FakeCall::kCreateQp, ENOMEM, [&] {
    ibv_qp_init_attr init{};
    return fabric.create_qp(end.pd, &init) != nullptr;
  });
  fails(FakeCall::kReqNotify, EIO, [&] { return returned(fabric.req_notify_cq(end.cq)); });
  fails(FakeCall::kPollCq, EIO, [&] { ibv_wc wc; return returned(-fabric.poll_cq(end.cq, 1, &wc)); });
  fails(FakeCall::kQueryDevice, EIO, [&] { ibv_device_attr attributes; return returned(fabric.query_device(end.context, &attributes)); });
  fails(FakeCall::kQueryPort, EIO, [&] { ibv_port_attr attributes; return returned(fabric.query_port(end.context, 1, &attributes)); });
  fails(FakeCall::kQueryGids, EOPNOTSUPP, [&] { ibv_gid_entry entry; return returned(static_cast<int>(-fabric.query_gid_table(end.context, &entry, 1))); });
  fails(FakeCall::kModifyToInit, EINVAL, [&] { return returned(end.to_init()); });
  ASSERT_EQ(end.to_init(), 0);
  fails(FakeCall::kModifyToRtr, ETIMEDOUT, [&] { return returned(end.to_rtr(peer)); });
  EXPECT_EQ(fabric.modifies().back().error, ETIMEDOUT);
  ASSERT_EQ(end.to_rtr(peer), 0);
  fails(FakeCall::kModifyToRts, EINVAL, [&] { return returned(end.to_rts()); });
  ASSERT_EQ(end.to_rts(), 0);
  fails(FakeCall::kPostSend, ENOMEM, [&] { return returned(end.read({}, 0, 0, 1)); });
  EXPECT_EQ(end.read({}, 0, 0, 1), 0);
  fabric.fail(FakeCall::kDeviceNames, ENOSYS);
  EXPECT_EQ(fabric.device_names().error().code(), Code::kUnavailable);
  EXPECT_TRUE(fabric.refusals().empty()) << "failures on demand are no refusals";
}

TEST(FakeVerbsFaults, AFailureCanBeOfOneDevice) {
  FakeVerbs fabric(two_devices());
  fabric.fail(FakeCall::kOpenDevice, EPERM, 1, 1, "rx1");
  ibv_context* const context = fabric.open_device("rx0");
  EXPECT_NE(context, nullptr);
  EXPECT_EQ(fabric.open_device("rx1"), nullptr);
  EXPECT_EQ(fabric.close_device(context), 0);
}

// ---------------------------------------------------------------- failing READs

TEST(FakeVerbsFaults, TheNthReadCompletesAsAskedWithSomeOfItsBytes) {
  RawPair pair;
  pair.fabric.fail_read(2, {IBV_WC_RETRY_EXC_ERR, 100});
  ASSERT_EQ(pair.read(0, 1000), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  ASSERT_EQ(pair.read(1000, 1000), 0);
  EXPECT_EQ(pair.status(), IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(pair.arrived(1000, 100));
  EXPECT_TRUE(pair.untouched(1100, 900));
  ASSERT_EQ(pair.read(2000, 1000), 0);
  EXPECT_EQ(pair.status(), IBV_WC_WR_FLUSH_ERR);
}

TEST(FakeVerbsFaults, AnUnsignalledReadThatFailsIsReported) {
  RawPair pair;
  pair.fabric.fail_read(1, {IBV_WC_REM_ACCESS_ERR, 0});
  ASSERT_EQ(pair.read(0, 64, 7, 0), 0);
  const auto done = pair.client.completions(1);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].wr_id, 7U);
  EXPECT_EQ(done[0].status, IBV_WC_REM_ACCESS_ERR);
}

TEST(FakeVerbsFaults, ASuccessfulReadCanBringAWrongBit) {
  for (const Delivery delivery : {Delivery::kAtPost, Delivery::kLines}) {
    RawPair pair(two_devices(delivery));
    pair.fabric.fail_read(1, {.flip_at = 130});
    ASSERT_EQ(pair.client.read({pair.piece(0, 100), pair.piece(100, 900)}, address_of(pair.source.data()), pair.shared->rkey, 1), 0);
    EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
    EXPECT_FALSE(pair.arrived(130, 1));
    EXPECT_TRUE(pair.arrived(0, 130) && pair.arrived(131, 869));
  }
}

// ---------------------------------------------------------------- peers that do not answer

TEST(FakeVerbsFaults, AReadWhoseOtherEndIsNotThereTimesOut) {
  const auto status = [](const std::function<void(RawPair&)>& spoil) {
    RawPair pair;
    spoil(pair);
    EXPECT_EQ(pair.read(0, 64), 0);
    return pair.status();
  };
  EXPECT_EQ(status([](RawPair&) {}), IBV_WC_SUCCESS);
  EXPECT_EQ(status([](RawPair& pair) { pair.server.destroy_qp(); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { EXPECT_EQ(pair.server.to_state(IBV_QPS_ERR), 0); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) {
              EXPECT_EQ(pair.server.to_state(IBV_QPS_RESET), 0);
              EXPECT_EQ(pair.server.to_init(), 0);
            }),
            IBV_WC_RETRY_EXC_ERR) << "not yet ready to receive";
  EXPECT_EQ(status([](RawPair& pair) { pair.fabric.kill_owner("rx1"); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { pair.fabric.change("rx1", [](FakeDevice& device) { device.ports[0].state = IBV_PORT_DOWN; }); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { pair.fabric.change("rx0", [](FakeDevice& device) { device.ports[0].state = IBV_PORT_DOWN; }); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { pair.fabric.change("rx1", [](FakeDevice& device) { device.ports[0].gids.pop_back(); }); }), IBV_WC_RETRY_EXC_ERR);
}

TEST(FakeVerbsFaults, TwoEndsThatDoNotNameEachOtherNeverMeet) {
  const auto status = [](const std::function<void(ibv_qp_attr&)>& spoil) {
    FakeVerbs fabric(two_devices());
    RawEnd client(fabric, "rx0"), server(fabric, "rx1"), other(fabric, "rx1");
    EXPECT_EQ(client.to_init() + server.to_init() + client.to_rtr(server), 0);
    ibv_qp_attr rtr = server.rtr_attributes(client);
    spoil(rtr);
    EXPECT_EQ(server.modify(rtr, RawEnd::kRtr), 0);
    EXPECT_EQ(client.to_rts(), 0);
    EXPECT_EQ(client.read({}, 0, 0, 1), 0);
    return client.completions(1).at(0).status;
  };
  EXPECT_EQ(status([](ibv_qp_attr&) {}), IBV_WC_SUCCESS) << "a responder need not be ready to send";
  EXPECT_EQ(status([](ibv_qp_attr& a) { ++a.dest_qp_num; }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](ibv_qp_attr& a) { ++a.rq_psn; }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](ibv_qp_attr& a) { a.ah_attr.grh.dgid.raw[15] ^= 1; }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](ibv_qp_attr& a) { a.ah_attr.grh.sgid_index = 0; }), IBV_WC_RETRY_EXC_ERR) << "answers from another address";
}

TEST(FakeVerbsFaults, AnMtuThatOneEndCannotTakeFailsReadsOfMoreThanOnePacket) {
  FakeFabric configuration = two_devices();
  configuration.devices[1].ports[0].mtu_active = 1024;
  FakeVerbs fabric(configuration);
  RawEnd client(fabric, "rx0", {.mtu = IBV_MTU_4096}), server(fabric, "rx1", {.mtu = IBV_MTU_1024});
  connect(client, server);
  std::vector<std::byte> source(4096, std::byte{1}), target(4096);
  ibv_mr* const shared = server.share(source, IBV_ACCESS_REMOTE_READ);
  ibv_mr* const local = client.share(target, IBV_ACCESS_LOCAL_WRITE);
  const auto read = [&](std::uint32_t size) {
    EXPECT_EQ(client.read({{address_of(target.data()), size, local->lkey}}, address_of(source.data()), shared->rkey, 1), 0);
    return client.completions(1).at(0).status;
  };
  EXPECT_EQ(read(1024), IBV_WC_SUCCESS);
  EXPECT_EQ(read(1025), IBV_WC_RETRY_EXC_ERR);
}

TEST(FakeVerbsFaults, BothEndsAtTheSmallerMtuPassEverything) {
  FakeFabric configuration = two_devices();
  configuration.devices[1].ports[0].mtu_active = 1024;
  RawPair pair(configuration, {.mtu = IBV_MTU_1024});
  ASSERT_EQ(pair.read(0, 65536), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
}

TEST(FakeVerbsFaults, HeldTimeoutsWaitAndAPeerThatComesBackAnswers) {
  RawPair pair;
  const auto set_state = [&](ibv_port_state state) { pair.fabric.change("rx1", [&](FakeDevice& device) { device.ports[0].state = state; }); };
  pair.fabric.hold_timeouts(true);
  set_state(IBV_PORT_DOWN);
  ASSERT_EQ(pair.read(0, 64, 1), 0);
  ASSERT_EQ(pair.read(64, 64, 2), 0);
  EXPECT_TRUE(pair.client.completions(1, 10).empty());
  set_state(IBV_PORT_ACTIVE);
  const auto done = pair.client.completions(2, 10);
  ASSERT_EQ(done.size(), 2U);
  EXPECT_EQ(done[1].status, IBV_WC_SUCCESS);

  set_state(IBV_PORT_DOWN);
  ASSERT_EQ(pair.read(128, 64, 3), 0);
  EXPECT_TRUE(pair.client.completions(1, 10).empty());
  pair.fabric.hold_timeouts(false);
  EXPECT_EQ(pair.status(), IBV_WC_RETRY_EXC_ERR);
}

TEST(FakeVerbsFaults, WhatAKilledProcessLeftIsVoidAndWhatComesAfterItLives) {
  RawPair pair;
  const std::uint32_t stale = pair.shared->rkey;
  pair.fabric.kill_owner("rx1");
  RawEnd client(pair.fabric, "rx0"), server(pair.fabric, "rx1");
  connect(client, server);
  ibv_mr* const local = client.share(pair.target, IBV_ACCESS_LOCAL_WRITE);
  ibv_mr* const shared = server.share(pair.source, IBV_ACCESS_REMOTE_READ);
  const ibv_sge piece{address_of(pair.target.data()), 64, local->lkey};
  ASSERT_EQ(client.read({piece}, address_of(pair.source.data()), shared->rkey, 1), 0);
  EXPECT_EQ(client.completions(1).at(0).status, IBV_WC_SUCCESS);
  ASSERT_EQ(client.read({piece}, address_of(pair.source.data()), stale, 2), 0);
  EXPECT_EQ(client.completions(1).at(0).status, IBV_WC_REM_ACCESS_ERR);
}

TEST(FakeVerbsFaults, AFrozenFabricTakesReadsAndMovesNothing) {
  for (const Delivery delivery : {Delivery::kAtPost, Delivery::kLines}) {
    RawPair pair(two_devices(delivery));
    pair.fabric.freeze(true);
    ASSERT_EQ(pair.read(0, 4096), 0);
    EXPECT_TRUE(pair.client.completions(1, 100).empty());
    EXPECT_TRUE(pair.untouched(0, 4096));
    pair.fabric.freeze(false);
    EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
    EXPECT_TRUE(pair.arrived(0, 4096));
  }
}

TEST(FakeVerbsFaults, AHookRunsBeforeEachReadAndMayChangeWhatItReads) {
  RawPair pair;
  std::vector<FakeRead> seen;
  pair.fabric.before_read([&](const FakeRead& read) {
    seen.push_back(read);
    if (read.number == 2) {
      pair.source[64] = std::byte{0x5a};
      pair.fabric.change("rx1", [](FakeDevice& device) { device.ports[0].message_max = 1; });
    }
  });
  ASSERT_EQ(pair.read(0, 64), 0);
  ASSERT_EQ(pair.read(64, 64), 0);
  EXPECT_EQ(pair.client.completions(2).size(), 2U);
  EXPECT_EQ(pair.target[64], std::byte{0x5a});
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[1].device, "rx0");
  EXPECT_EQ(seen[1].size, 64U);
  EXPECT_EQ(seen[1].remote_address, address_of(pair.source.data() + 64));
}

// ---------------------------------------------------------------- devices that change

TEST(FakeVerbsFaults, ADeviceThatIsGoneFlushesAndLetsItselfBeCleanedUp) {
  RawPair pair;
  pair.fabric.freeze(true);
  ASSERT_EQ(pair.read(0, 64), 0);
  pair.fabric.change("rx0", [](FakeDevice& device) { device.gone = true; });
  EXPECT_EQ(pair.status(), IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair.read(0, 64), EIO);
  EXPECT_EQ(*pair.fabric.device_names(), (std::vector<std::string>{"rx1"}));
  EXPECT_EQ(pair.fabric.open_device("rx0"), nullptr);
  EXPECT_EQ(errno, ENODEV);
  EXPECT_EQ(pair.client.share(pair.target, IBV_ACCESS_LOCAL_WRITE), nullptr);
  EXPECT_EQ(errno, EIO);
  pair.client.close();
  EXPECT_EQ(pair.fabric.live("rx0"), FakeLive{});
}

TEST(FakeVerbsFaults, GidsThatMoveLeaveConnectionsAndChangeWhatNewOnesFind) {
  RawPair pair;
  pair.fabric.change("rx1", [](FakeDevice& device) { std::swap(device.ports[0].gids[0].index, device.ports[0].gids[1].index); });
  ASSERT_EQ(pair.read(0, 64), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  RawEnd client(pair.fabric, "rx0"), server(pair.fabric, "rx1", {.gid_index = 0});
  connect(client, server);
  ASSERT_EQ(client.read({}, 0, 0, 1), 0);
  EXPECT_EQ(client.completions(1).at(0).status, IBV_WC_SUCCESS);
}

TEST(FakeVerbsFaults, InfiniBandPortsAreReachedByTheirLid) {
  FakeFabric configuration = two_devices();
  for (std::size_t i = 0; i < 2; ++i) {
    configuration.devices[i].ports[0].ethernet = false;
    configuration.devices[i].ports[0].lid = static_cast<std::uint16_t>(11 + i);
  }
  FakeVerbs fabric(configuration);
  RawEnd client(fabric, "rx0"), server(fabric, "rx1");
  const auto to_rtr = [](RawEnd& end, RawEnd& peer, std::uint16_t lid) {
    ibv_qp_attr rtr = end.rtr_attributes(peer);
    rtr.ah_attr.is_global = 0;
    rtr.ah_attr.dlid = lid;
    return end.modify(rtr, RawEnd::kRtr);
  };
  ASSERT_EQ(client.to_init() + server.to_init(), 0);
  EXPECT_EQ(to_rtr(client, server, 0), EINVAL);
  ASSERT_EQ(to_rtr(client, server, 12), 0);
  ASSERT_EQ(to_rtr(server, client, 11), 0);
  ASSERT_EQ(client.to_rts(), 0);
  ASSERT_EQ(client.read({}, 0, 0, 1), 0);
  EXPECT_EQ(client.completions(1).at(0).status, IBV_WC_SUCCESS);
}

// ---------------------------------------------------------------- lines in random order

// The order in which lines of the target changed.
std::vector<std::size_t> order_of_lines(std::uint64_t seed, std::uint8_t reads, unsigned flags = 0) {
  RawPair pair(two_devices(Delivery::kLines, seed), {.reads = reads});
  std::vector<std::size_t> order;
  std::set<std::size_t> seen;
  const auto look = [&] {
    for (std::size_t line = 0; line < 8; ++line) {
      if (!pair.untouched(line * 64, 64) && seen.insert(line).second) order.push_back(line);
    }
  };
  pair.fabric.on_line(look);
  EXPECT_EQ(pair.read(0, 256, 1), 0);
  EXPECT_EQ(pair.read(256, 256, 2, IBV_SEND_SIGNALED | flags), 0);
  const auto done = pair.client.completions(2);
  look();
  EXPECT_EQ(done.size(), 2U);
  EXPECT_EQ(done.at(0).wr_id, 1U) << "completions come in order whatever the lines do";
  EXPECT_TRUE(pair.arrived(0, 512));
  return order;
}

bool first_read_came_first(const std::vector<std::size_t>& order) {
  for (std::size_t i = 0; i < 4; ++i) {
    if (order.at(i) >= 4) return false;
  }
  return true;
}

TEST(FakeVerbsLines, ComeInAnyOrderAcrossTheReadsUnderWay) {
  std::set<std::vector<std::size_t>> orders;
  int interleaved = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    const auto order = order_of_lines(seed, 16);
    ASSERT_EQ(order.size(), 8U);
    interleaved += first_read_came_first(order) ? 0 : 1;
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 95U);
  EXPECT_GT(interleaved, 90);
}

TEST(FakeVerbsLines, AreTheSameForTheSameSeed) { EXPECT_EQ(order_of_lines(7, 16), order_of_lines(7, 16)); }

TEST(FakeVerbsLines, OfAReadThatMustWaitForItsTurnComeAfterThoseBeforeIt) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    EXPECT_TRUE(first_read_came_first(order_of_lines(seed, 1))) << "one READ at a time";
    EXPECT_TRUE(first_read_came_first(order_of_lines(seed, 16, IBV_SEND_FENCE))) << "a fence";
  }
}

TEST(FakeVerbsLines, AWriterStepsBetweenTwoLinesAndIsSeenHalfway) {
  int torn = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    RawPair pair(two_devices(Delivery::kLines, seed));
    int steps = 0;
    pair.fabric.on_line([&] {
      if (++steps == 4) std::fill(pair.source.begin(), pair.source.begin() + 512, std::byte{0xee});
    });
    ASSERT_EQ(pair.read(0, 512), 0);
    ASSERT_EQ(pair.status(), IBV_WC_SUCCESS);
    EXPECT_EQ(steps, 8);
    std::size_t fresh = 0;
    for (std::size_t line = 0; line < 8; ++line) fresh += pair.target[line * 64] == std::byte{0xee} ? 1U : 0U;
    EXPECT_EQ(fresh, 5U);
    torn += fresh > 0 && fresh < 8 ? 1 : 0;
  }
  EXPECT_EQ(torn, 20);
}

TEST(FakeVerbsLines, FollowTheLinesOfRemoteMemory) {
  RawPair pair(two_devices(Delivery::kLines));
  int lines = 0;
  pair.fabric.on_line([&] { ++lines; });
  const std::size_t ahead = 64 - address_of(pair.source.data()) % 64;  // to the next line's begin
  ASSERT_EQ(pair.read(ahead + 60, 8), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  EXPECT_EQ(lines, 2);
  ASSERT_EQ(pair.read(ahead, 64), 0);
  EXPECT_EQ(pair.status(), IBV_WC_SUCCESS);
  EXPECT_EQ(lines, 3);
  EXPECT_TRUE(pair.arrived(ahead, 68));
}

TEST(FakeVerbsLines, MemoryOrPeerThatGoesMidwayFailsTheRead) {
  const auto status = [](const std::function<void(RawPair&)>& spoil) {
    RawPair pair(two_devices(Delivery::kLines));
    EXPECT_EQ(pair.read(0, 8192, 1), 0);
    EXPECT_EQ(pair.read(8192, 64, 2, 0), 0);
    EXPECT_TRUE(pair.client.completions(1, 1).empty()) << "some lines moved";
    spoil(pair);
    const auto done = pair.client.completions(2);
    EXPECT_EQ(done.size(), 2U);
    EXPECT_EQ(done.back().status, IBV_WC_WR_FLUSH_ERR);
    return done.front().status;
  };
  EXPECT_EQ(status([](RawPair& pair) { pair.server.unshare(pair.shared); }), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(status([](RawPair& pair) { pair.client.unshare(pair.local); }), IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(status([](RawPair& pair) { pair.server.destroy_qp(); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { EXPECT_EQ(pair.server.to_state(IBV_QPS_ERR), 0); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { pair.fabric.kill_owner("rx1"); }), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(status([](RawPair& pair) { EXPECT_EQ(pair.client.to_state(IBV_QPS_ERR), 0); }), IBV_WC_WR_FLUSH_ERR);
}

TEST(FakeVerbsLines, AWaitForAnEventIsOverAtOnceWhileReadsAreUnderWay) {
  RawPair pair(two_devices(Delivery::kLines));
  ASSERT_EQ(pair.read(0, 4096), 0);
  std::vector<ibv_wc> done;
  for (int waits = 0; done.empty() && waits < 10'000; ++waits) {
    ASSERT_EQ(pair.fabric.req_notify_cq(pair.client.cq), 0);
    done = pair.client.completions(1, 1);
    ASSERT_TRUE(!done.empty() || pair.fabric.take_cq_event(pair.client.channel) == 0);
  }
  EXPECT_EQ(done.size(), 1U);
}

}  // namespace
}  // namespace paramwire::testing
