// What a server answers to clients that want to read it by RDMA: the messages through its handlers, the regions from its arenas.
#include "paramwire/server/verbs_endpoint.hpp"

#include "paramwire/base/text.hpp"
#include "support/fake_verbs.hpp"
#include "support/handlers_rig.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <sys/mman.h>

namespace paramwire {
namespace {

using testing::Answer;
using testing::FakeCall;
using testing::FakeDevice;
using testing::FakeFabric;
using testing::FakeLive;
using testing::FakePort;
using testing::FakeVerbs;

VerbsOpenMessage open_message(std::uint16_t mtu = 4096, std::uint8_t reads = 16, std::uint8_t choice = 0) {
  VerbsOpenMessage out;
  out.end.gid = testing::ipv4_gid("127.0.0.1");
  out.end.queue_pair = 0x777;
  out.end.packet = 5;
  out.end.mtu = mtu;
  out.end.reads = reads;
  out.choice = choice;
  return out;
}

struct Fabric {
  std::shared_ptr<FakeVerbs> fabric = std::make_shared<FakeVerbs>(FakeFabric{{FakeDevice::roce("fake0", "127.0.0.1")}});
  std::unique_ptr<VerbsEndpoint> endpoint = *VerbsEndpoint::create(fabric, {});
};

// ---------------------------------------------------------------- through the handlers

class VerbsHandlersTest : private Fabric, public testing::HandlersRig {  // the endpoint outlives the handlers
 protected:
  VerbsHandlersTest() : HandlersRig(endpoint.get()) {}
  ~VerbsHandlersTest() override { EXPECT_EQ(fabric->breaches(), std::vector<std::string>{}); }
  std::string text_of(const Answer& answer) {
    const auto message = ErrorMessage::decode(answer.meta);
    return message.ok() ? std::string(message->text) : "no ERROR";
  }
  FakeVerbs& nic() { return *fabric; }
};

class NoVerbsHandlersTest : public testing::HandlersRig {};

TEST_F(NoVerbsHandlersTest, AServerWithoutRdmaSaysWhyAndTheConnectionLives) {
  ServerSession session = greeted();
  for (const Bytes& frame : {open_message().encode(5), VerbsRegionsMessage{}.encode(6)}) {
    const auto answer = ask(session, frame);
    EXPECT_EQ(error_of(answer), Code::kUnavailable);
    EXPECT_NE(ErrorMessage::decode(answer.meta)->text.find("can't be read by RDMA: it was started without"), std::string::npos);
  }
  EXPECT_EQ(ask(session, encode_empty(FrameType::kStat, 7)).type(), FrameType::kStats);
}

TEST_F(VerbsHandlersTest, RegionsBeforeAQueuePairAreRefusedAndTheConnectionLives) {
  ServerSession session = greeted();
  const auto answer = ask(session, VerbsRegionsMessage{}.encode(6));
  EXPECT_EQ(error_of(answer), Code::kInvalid);
  EXPECT_NE(text_of(answer).find("VERBS_REGIONS before VERBS_OPEN"), std::string::npos);
  EXPECT_EQ(ask(session, open_message().encode(7)).type(), FrameType::kVerbsReady);
  EXPECT_EQ(ask(session, VerbsRegionsMessage{}.encode(8)).type(), FrameType::kVerbsRegionList);
  handlers_->on_closed(session, now_);
}

TEST_F(VerbsHandlersTest, AMetaThatDoesNotDecodeClosesTheConnection) {
  VerbsOpenMessage wrong = open_message();
  wrong.end.mtu = 1500;
  VerbsRegionsMessage two_spellings;
  two_spellings.arena = 1;
  for (const Bytes& frame : {encode_empty(FrameType::kVerbsOpen, 4), encode_empty(FrameType::kVerbsRegions, 4), wrong.encode(4), two_spellings.encode(4)}) {
    ServerSession session = greeted();
    EXPECT_FALSE(feed(session, frame));
    EXPECT_EQ(error_of(one(session)), Code::kCorrupt);
  }
  EXPECT_EQ(nic().live().qps, 0);
}

TEST_F(VerbsHandlersTest, AnswersOfServersAreNoQuestions) {
  ServerSession session = greeted();
  VerbsReadyMessage ready;
  ready.end = open_message().end;
  ready.probe_size = 1;
  EXPECT_EQ(error_of(ask(session, ready.encode(4))), Code::kInvalid);
  EXPECT_EQ(error_of(ask(session, VerbsRegionListMessage{}.encode(5))), Code::kInvalid);
}

TEST_F(VerbsHandlersTest, BothEndsAgreeOnTheSmallerMtuAndTheFewerReads) {
  nic().change("fake0", [](FakeDevice& device) { device.reads_max = 8; });
  for (const auto& [mtu, reads, agreed_mtu, agreed_reads] : {std::tuple(1024, 16, 1024, 8), std::tuple(4096, 3, 4096, 3), std::tuple(256, 255, 256, 8)}) {
    ServerSession session = greeted();
    const auto answer = ask(session, open_message(static_cast<std::uint16_t>(mtu), static_cast<std::uint8_t>(reads)).encode(5));
    const auto ready = VerbsReadyMessage::decode(answer.meta);
    ASSERT_TRUE(ready.ok());
    EXPECT_EQ(ready->end.mtu, agreed_mtu);
    EXPECT_EQ(ready->end.reads, agreed_reads);
    EXPECT_EQ(ready->end.gid, testing::ipv4_gid("127.0.0.1"));
    EXPECT_EQ(nic().modifies().back().attributes.max_rd_atomic, agreed_reads);
    handlers_->on_closed(session, now_);
  }
}

TEST_F(VerbsHandlersTest, TheProbeIsThereToBeReadByteByByte) {
  ServerSession session = greeted();
  const auto ready = VerbsReadyMessage::decode(ask(session, open_message().encode(5)).meta);
  ASSERT_TRUE(ready.ok());
  EXPECT_EQ(ready->probe_size, kVerbsProbeBytes);
  EXPECT_NE(ready->probe_key, 0U);
  EXPECT_EQ(ready->probe_address % 4096, 0U);
  const auto* probe = reinterpret_cast<const std::byte*>(ready->probe_address);
  for (std::uint32_t i = 0; i < ready->probe_size; ++i) ASSERT_EQ(probe[i], verbs_probe_byte(i)) << i;
  handlers_->on_closed(session, now_);
}

TEST_F(VerbsHandlersTest, AQueuePairEndsWithItsConnectionAndASecondOneReplacesTheFirst) {
  ServerSession one = greeted(1), other = greeted(2);
  EXPECT_EQ(ask(one, open_message().encode(5)).type(), FrameType::kVerbsReady);
  EXPECT_EQ(ask(one, open_message().encode(6)).type(), FrameType::kVerbsReady);
  EXPECT_EQ(nic().live().qps, 1);
  EXPECT_EQ(ask(other, open_message().encode(7)).type(), FrameType::kVerbsReady);
  EXPECT_EQ(nic().live().qps, 2);
  handlers_->on_closed(one, now_);
  EXPECT_EQ(nic().live().qps, 1);
  handlers_->on_closed(one, now_);  // no harm
  handlers_->on_closed(other, now_);
  EXPECT_EQ(nic().live().qps, 0);
  EXPECT_EQ(nic().live().cqs, 0);
  EXPECT_EQ(nic().live().channels, 0) << "nothing completes on this side, so nobody waits for it";
}

TEST_F(VerbsHandlersTest, AWayPastTheLastIsNotFoundAndALateQuestionForRegionsToo) {
  ServerSession session = greeted();
  const auto answer = ask(session, open_message(4096, 16, 1).encode(5));
  EXPECT_EQ(error_of(answer), Code::kNotFound);
  EXPECT_NE(text_of(answer).find("has 1 ways to GID 127.0.0.1"), std::string::npos) << text_of(answer);
  EXPECT_EQ(ask(session, open_message().encode(6)).type(), FrameType::kVerbsReady);
  VerbsRegionsMessage regions;
  regions.wanted = true;
  regions.arena = 9;
  EXPECT_EQ(error_of(ask(session, regions.encode(7))), Code::kNotFound);
  handlers_->on_closed(session, now_);
}

// ---------------------------------------------------------------- regions

// Arenas as a test wants them.
class TableTier final : public Tier {
 public:
  std::vector<ArenaInfo> arenas;
  Result<TierSpan> allocate(std::uint64_t) override { return Error(Code::kBackpressure, "a table"); }
  void release(const TierSpan&) override {}
  std::byte* at(std::uint32_t index, std::uint64_t offset) noexcept override { return arenas[index].base + offset; }
  std::uint32_t arena_count() const noexcept override { return static_cast<std::uint32_t>(arenas.size()); }
  ArenaInfo arena(std::uint32_t index) const noexcept override { return arenas[index]; }
  std::uint64_t used_bytes() const noexcept override { return 0; }
  std::uint64_t committed_bytes() const noexcept override { return 0; }
  std::uint64_t limit_bytes() const noexcept override { return 0; }
  std::string_view name() const noexcept override { return "table"; }
  bool mappable() const noexcept override { return false; }
  std::string note() const override { return {}; }
};

class VerbsRegionsTest : public ::testing::Test, private Fabric {
 protected:
  static constexpr std::uint64_t kMapped = 8 * kRegionBytes;
  VerbsRegionsTest() {
    memory_ = static_cast<std::byte*>(mmap(nullptr, kMapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    EXPECT_NE(memory_, MAP_FAILED);
    EXPECT_TRUE(endpoint->open(1, open_message(), {}).ok());
  }
  ~VerbsRegionsTest() override {
    endpoint.reset();
    EXPECT_EQ(fabric->live(), FakeLive{});
    EXPECT_EQ(fabric->breaches(), std::vector<std::string>{});
    munmap(memory_, kMapped);
  }
  void arena(std::uint64_t committed) {
    ArenaInfo info;
    info.size = kMapped;
    info.base = memory_;
    info.committed = committed;
    tier_.arenas.push_back(info);
  }
  Result<VerbsRegionListMessage> ask(std::uint32_t known) { return endpoint->regions(1, {known, false, 0, 0}, tier_); }
  Result<VerbsRegionListMessage> want(std::uint32_t known, std::uint16_t index, std::uint64_t offset) { return endpoint->regions(1, {known, true, index, offset}, tier_); }
  // All questions until the list is complete. returns: how many
  int learn(std::vector<VerbsRegion>& out) {
    for (int questions = 1; questions < 10'000; ++questions) {
      const auto list = ask(static_cast<std::uint32_t>(out.size()));
      if (!list.ok()) {
        ADD_FAILURE() << list.error().to_string();
        return questions;
      }
      out.insert(out.end(), list->regions.begin(), list->regions.end());
      if (list->complete) return questions;
    }
    ADD_FAILURE() << "never complete";
    return 0;
  }
  FakeVerbs& nic() { return *fabric; }
  VerbsEndpoint& server() { return *endpoint; }

  std::byte* memory_ = nullptr;
  TableTier tier_;
};

TEST_F(VerbsRegionsTest, NothingToReadIsACompleteListOfNothing) {
  EXPECT_TRUE(ask(0)->complete);
  EXPECT_TRUE(ask(0)->regions.empty());
  arena(0);
  EXPECT_TRUE(ask(0)->complete) << "address space without pages";
  EXPECT_EQ(want(0, 0, 0).error().code(), Code::kNotFound);
}

TEST_F(VerbsRegionsTest, EveryCommittedByteIsInOneRegionAndAQuestionRegistersTwoAtMost) {
  arena(2 * kRegionBytes + 5 * 4096);
  arena(kRegionBytes);
  std::vector<VerbsRegion> all;
  EXPECT_EQ(learn(all), 2);
  ASSERT_EQ(all.size(), 4U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(all[i].arena, 0);
    EXPECT_EQ(all[i].offset, i * kRegionBytes);
    EXPECT_EQ(all[i].size, i < 2 ? kRegionBytes : 5 * 4096);
    EXPECT_EQ(all[i].address, reinterpret_cast<std::uintptr_t>(memory_ + i * kRegionBytes));
  }
  EXPECT_EQ(all[3].arena, 1);
  EXPECT_EQ(server().stats().regions, 4U);
  EXPECT_EQ(server().stats().region_bytes, 3 * kRegionBytes + 5 * 4096);
  std::vector<VerbsRegion> again;
  EXPECT_EQ(learn(again), 1) << "they stay registered";
  EXPECT_EQ(again, all);
  EXPECT_EQ(nic().totals().registrations, 5U) << "four and the probe";
}

TEST_F(VerbsRegionsTest, ClientsShareWhatIsRegistered) {
  arena(3 * kRegionBytes);
  std::vector<VerbsRegion> first;
  learn(first);
  const auto registrations = nic().totals().registrations;
  for (std::uint64_t connection = 2; connection < 22; ++connection) {
    ASSERT_TRUE(server().open(connection, open_message(), {}).ok());
    const auto list = server().regions(connection, {}, tier_);
    ASSERT_TRUE(list.ok());
    EXPECT_TRUE(list->complete);
    EXPECT_EQ(list->regions, first);
    server().close(connection);
  }
  EXPECT_EQ(nic().totals().registrations, registrations);
  EXPECT_EQ(nic().live().qps, 1);
}

TEST_F(VerbsRegionsTest, AWantedRegionIsRegisteredBeforeOthersAndNothingElseIs) {
  arena(5 * kRegionBytes);
  const auto list = want(0, 0, 3 * kRegionBytes + 17);
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->regions.size(), 1U);
  EXPECT_EQ(list->regions[0].offset, 3 * kRegionBytes);
  EXPECT_FALSE(list->complete);
  EXPECT_EQ(want(1, 0, 5 * kRegionBytes).error().code(), Code::kNotFound) << "the first byte that is not there";
  EXPECT_EQ(want(1, 1, 0).error().code(), Code::kNotFound);
  EXPECT_EQ(want(1, 0, ~std::uint64_t{0}).error().code(), Code::kNotFound);
  EXPECT_TRUE(want(1, 0, 5 * kRegionBytes - 1).ok());
}

TEST_F(VerbsRegionsTest, ARegionThatGrewIsListedAgainAndTheShorterOneStays) {
  arena(1 << 20);
  std::vector<VerbsRegion> all;
  learn(all);
  ASSERT_EQ(all.size(), 1U);
  tier_.arenas[0].committed = 3 << 20;
  EXPECT_EQ(learn(all), 1);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].size, 1U << 20);
  EXPECT_EQ(all[1].size, 3U << 20);
  EXPECT_NE(all[0].key, all[1].key);
  EXPECT_EQ(nic().live().regions, 3) << "readers may be at it under the first key";
  tier_.arenas[0].committed = kRegionBytes + 4096;
  const auto list = want(2, 0, (4 << 20) - 1);
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->regions.size(), 1U);
  EXPECT_EQ(list->regions[0].size, kRegionBytes);
}

TEST_F(VerbsRegionsTest, AListLongerThanAnAnswerComesInPieces) {
  constexpr std::size_t kArenas = kVerbsRegionsMax + 10;
  for (std::size_t i = 0; i < kArenas; ++i) arena(4096);
  std::vector<VerbsRegion> all;
  learn(all);
  ASSERT_EQ(all.size(), kArenas);
  const auto first = ask(0);
  EXPECT_EQ(first->regions.size(), kVerbsRegionsMax);
  EXPECT_FALSE(first->complete);
  const auto rest = ask(kVerbsRegionsMax);
  EXPECT_EQ(rest->regions.size(), 10U);
  EXPECT_TRUE(rest->complete);
  EXPECT_TRUE(ask(~std::uint32_t{0})->regions.empty()) << "a client that knows more than there is";
}

TEST_F(VerbsRegionsTest, ARegionThatCanNotBeRegisteredIsTheServersErrorAndComesLaterIfItCan) {
  arena(2 * kRegionBytes);
  nic().fail(FakeCall::kRegMr, ENOMEM, 2);
  const auto refused = ask(0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure);
  for (const char* word : {"fake0", "16777216", "ulimit -l"}) EXPECT_NE(refused.error().message().find(word), std::string::npos) << refused.error().message();
  std::vector<VerbsRegion> all;
  learn(all);
  ASSERT_EQ(all.size(), 2U) << "what was registered before the failure, and what was not";
  EXPECT_EQ(all[0].offset, 0U);
  EXPECT_EQ(all[1].offset, kRegionBytes);
}

TEST_F(VerbsRegionsTest, AnotherConnectionHasNoRegions) {
  arena(kRegionBytes);
  EXPECT_EQ(server().regions(2, {}, tier_).error().code(), Code::kInvalid);
  server().close(1);
  EXPECT_EQ(ask(0).error().code(), Code::kInvalid);
}

// ---------------------------------------------------------------- devices

TEST(VerbsEndpoint, WithoutAUsablePortThereIsNoneAndTheTableSaysWhy) {
  FakeFabric configuration{{FakeDevice::roce("fake0", "127.0.0.1")}};
  configuration.devices[0].ports[0].state = IBV_PORT_DOWN;
  const auto fabric = std::make_shared<FakeVerbs>(configuration);
  const auto down = VerbsEndpoint::create(fabric, {});
  ASSERT_FALSE(down.ok());
  EXPECT_EQ(down.error().code(), Code::kUnavailable);
  EXPECT_NE(down.error().message().find("the port is DOWN"), std::string::npos) << down.error().message();
  EXPECT_EQ(VerbsEndpoint::create(fabric, {"mlx5_0", {}}).error().code(), Code::kInvalid);
  EXPECT_EQ(VerbsEndpoint::create(std::make_shared<FakeVerbs>(FakeFabric{}), {}).error().code(), Code::kUnavailable);
  EXPECT_EQ(fabric->live(), FakeLive{});
}

TEST(VerbsEndpoint, WhateverCallFailsNothingHalfMadeStays) {
  for (const FakeCall call : {FakeCall::kOpenDevice, FakeCall::kAllocPd, FakeCall::kRegMr, FakeCall::kCreateCq, FakeCall::kCreateQp, FakeCall::kModifyToInit, FakeCall::kModifyToRtr,
                              FakeCall::kModifyToRts}) {
    for (const int error : {ENOMEM, EIO}) {
      SCOPED_TRACE(cat("call ", static_cast<int>(call), " errno ", error));
      const auto fabric = std::make_shared<FakeVerbs>(FakeFabric{{FakeDevice::roce("fake0", "127.0.0.1")}});
      auto endpoint = *VerbsEndpoint::create(fabric, {});
      const bool limit = error == ENOMEM;
      fabric->fail(call, error, 1, limit ? 1 : 100);  // once more is tried what is no limit
      const auto refused = endpoint->open(1, open_message(), {});
      fabric->fail_no_more();
      ASSERT_FALSE(refused.ok());
      // Locked memory is a limit. All else is of this way to the client, which may have a better one, or of the device.
      const Code wanted = limit ? Code::kBackpressure : call == FakeCall::kOpenDevice ? Code::kUnavailable : Code::kUnreachable;
      EXPECT_EQ(refused.error().code(), wanted) << refused.error().to_string();
      EXPECT_NE(refused.error().message().find("fake0"), std::string::npos) << refused.error().message();
      EXPECT_EQ(fabric->live().qps, 0);
      EXPECT_EQ(fabric->live().cqs, 0);
      EXPECT_EQ(endpoint->stats().refused, 1U);
      ASSERT_TRUE(endpoint->open(1, open_message(), {}).ok()) << "the next one works";
      EXPECT_EQ(fabric->live().qps, 1);
      endpoint.reset();
      EXPECT_EQ(fabric->live(), FakeLive{});
      EXPECT_EQ(fabric->breaches(), std::vector<std::string>{});
    }
  }
}

TEST(VerbsEndpoint, ADeviceThatWasResetIsOpenedAnewWhileOldClientsKeepTheirs) {
  const auto fabric = std::make_shared<FakeVerbs>(FakeFabric{{FakeDevice::roce("fake0", "127.0.0.1")}});
  auto endpoint = *VerbsEndpoint::create(fabric, {});
  ASSERT_TRUE(endpoint->open(1, open_message(), {}).ok());
  fabric->fail(FakeCall::kCreateQp, EIO);
  ASSERT_TRUE(endpoint->open(2, open_message(), {}).ok());
  EXPECT_EQ(fabric->live().contexts, 2);
  endpoint->close(1);
  EXPECT_EQ(fabric->live().contexts, 1) << "the old one goes with its last client";
}

}  // namespace
}  // namespace paramwire
