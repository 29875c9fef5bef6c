// The client machine of the UDP path, driven packet by packet.
#include "support/datagram_rig.hpp"

namespace paramwire {
namespace {

using namespace testing;

TEST(Reliable, ReadsBlocksAndRangesOfEverySizeInSegmentsOfEverySize) {
  for (const std::uint32_t segment : {64U, 1000U, 1448U, 65000U}) {
    DatagramRig rig(segment);
    rig.start();
    rig.introduce();
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{65}, std::size_t{65536}, std::size_t{65537}, std::size_t{300'001}}) {
      const PublishedBlock& block = rig.publish(cat("b", size), random_bytes(size, size));
      EXPECT_EQ(must(rig.read(block)), block.bytes) << segment << ' ' << size;
      for (int i = 0; i < 12; ++i) {
        const std::uint64_t begin = rig.random.below(size + 1);
        const ByteRange range{begin, rig.random.below(size - begin + 1)};
        const Bytes got = must(rig.read(block, range));
        EXPECT_TRUE(std::equal(got.begin(), got.end(), block.bytes.begin() + static_cast<std::ptrdiff_t>(begin))) << segment << ' ' << size << ' ' << begin << '+' << range.size;
      }
    }
    EXPECT_EQ(rig.credit->used(), 0U);
    EXPECT_EQ(rig.reader->stats().duplicates, 0U);
    EXPECT_EQ(rig.reader->stats().segments_lost, 0U);
  }
}

TEST(Reliable, LossReorderingRepetitionAndDamageChangeNoByteAndNothingHereIsAskedAgain) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(cat("seed ", seed));
    DatagramRig rig(static_cast<std::uint32_t>(64 + seed * 37));
    rig.random = Random(seed);
    rig.start();
    rig.shuffle = 30;
    Bytes last;
    rig.to_server = [&](Bytes& get) {
      if (rig.random.chance(10)) get[rig.random.below(get.size())] ^= std::byte{4};
      return !rig.random.chance(15);
    };
    rig.to_client = [&](Bytes& datagram) {
      if (rig.random.chance(5)) last = datagram;
      if (rig.random.chance(5) && !last.empty()) rig.wire.push_back({rig.now, last});
      if (rig.random.chance(5)) datagram[rig.random.below(std::min<std::size_t>(datagram.size(), kDataHeaderBytes))] ^= std::byte{1};  // headers: payloads are the CRC's
      return !rig.random.chance(15);
    };
    std::vector<Bytes> targets;
    std::vector<BlockRead> batch;
    std::vector<const PublishedBlock*> owners;
    for (std::uint64_t i = 0; i < 40; ++i) {
      const PublishedBlock& block = rig.publish(cat("b", i), random_bytes(i % 4 == 0 ? 150'000 + i : i * 9, i));
      owners.push_back(&block);
    }
    for (const PublishedBlock* block : owners) {
      targets.emplace_back(block->bytes.size());
      batch.push_back(DatagramRig::read_of(*block, {0, block->bytes.size()}, targets.back()));
    }
    rig.run(batch);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      ASSERT_TRUE(batch[i].result.ok()) << batch[i].result.error().to_string();
      ASSERT_EQ(targets[i], owners[i]->bytes);
    }
    EXPECT_EQ(rig.asked_for_what_is_here, 0U);
    EXPECT_EQ(rig.credit->used(), 0U);
    EXPECT_GT(rig.reader->stats().segments_lost, 0U);
    EXPECT_GT(rig.reader->stats().refused, 0U);
  }
}

TEST(Reliable, AFifthLostCostsAtMostThreeFifthsMore) {
  for (const std::uint32_t percent : {1U, 20U}) {
    DatagramRig rig(1448);
    rig.start();
    rig.to_client = [&](Bytes&) { return !rig.random.chance(percent); };
    const PublishedBlock& block = rig.publish("b", random_bytes(4 << 20, 1));
    EXPECT_EQ(must(rig.read(block)), block.bytes);
    EXPECT_LT(static_cast<double>(rig.data_bytes), (percent == 1 ? 1.03 : 1.6) * static_cast<double>(block.bytes.size())) << percent;
  }
}

TEST(Reliable, APayloadThatWasDamagedIsCorruptForThatBlockOnly) {
  DatagramRig rig;
  rig.start();
  const PublishedBlock& a = rig.publish("a", random_bytes(5000, 1));
  const PublishedBlock& b = rig.publish("b", random_bytes(5000, 2));
  int damaged = 0;
  rig.to_client = [&](Bytes& datagram) {
    if (datagram.size() > kDataHeaderBytes + 100 && damaged++ == 2) datagram.back() ^= std::byte{1};
    return true;
  };
  Bytes ta(5000), tb(5000);
  std::vector<BlockRead> batch = {DatagramRig::read_of(a, {0, 5000}, ta), DatagramRig::read_of(b, {0, 5000}, tb)};
  rig.run(batch);
  EXPECT_EQ(batch[0].result.error().code(), Code::kCorrupt);
  EXPECT_TRUE(batch[1].result.ok());
}

TEST(Reliable, ForgedDatagramsChangeNothing) {
  DatagramRig rig;
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(20'000, 1));
  const Bytes garbage = random_bytes(1024, 99);
  std::uint64_t request = 0;
  int forged = 0;
  const auto forge = [&](std::uint64_t of, const Asked& asked, std::uint32_t segment, std::size_t size) {
    Bytes out(kDataHeaderBytes);
    encode_data_header(out.data(), {static_cast<std::uint16_t>(size), of, segment}, AskedCrc(asked));
    out.insert(out.end(), garbage.begin(), garbage.begin() + static_cast<std::ptrdiff_t>(size));
    rig.reader->on_datagram(rig.now, out);
    ++forged;
  };
  rig.to_client = [&](Bytes& datagram) {
    if (datagram_kind(datagram) == DatagramKind::kData) request = read_data(datagram)->request;
    if (request == 0) return true;
    const Asked right{kIncarnation, block.entry.id, kVersion, BlockPart::kStored};
    Asked other = right;
    forge(request + 1, right, 3, 1024);   // a stream that is not open
    other.incarnation.low += 1;
    forge(request, other, 3, 1024);       // who sees the path, but another server start
    other = right;
    other.version.counter += 1;
    forge(request, other, 3, 1024);
    other = right;
    other.block.value += 1;
    forge(request, other, 3, 1024);
    other = right;
    other.part = BlockPart::kExtentTable;
    forge(request, other, 3, 1024);
    forge(request, right, 20, 1024);      // past the end
    forge(request, right, 19, 1024);      // the last one is shorter
    forge(request, right, 3, 100);
    for (const StatusCode code : {StatusCode::kStale, StatusCode::kInvalid, StatusCode::kToken, StatusCode::kBackpressure}) {
      const auto status = DatagramStatus{code, request, 1000, {5, 6}}.encode(SipKey{1, 2});
      rig.reader->on_datagram(rig.now, status);
    }
    rig.reader->on_datagram(rig.now, {});
    rig.reader->on_datagram(rig.now, std::span(garbage).first(30));
    Bytes cut = datagram, longer = datagram;
    cut.pop_back();
    longer.push_back(std::byte{0});
    rig.reader->on_datagram(rig.now, cut);
    rig.reader->on_datagram(rig.now, longer);
    return true;
  };
  rig.introduce();
  EXPECT_EQ(must(rig.read(block)), block.bytes);
  EXPECT_GT(forged, 100);
  EXPECT_GT(rig.reader->stats().forged, 0U);
  EXPECT_EQ(rig.reader->stats().segments_lost, 0U);
}

TEST(Reliable, AnAuthenticStaleEndsItsBlockAndNoOther) {
  DatagramRig rig;
  rig.start();
  PublishedBlock& gone = rig.publish("gone", random_bytes(5000, 1));
  const PublishedBlock& there = rig.publish("there", random_bytes(5000, 2));
  Bytes tg(5000), tt(5000);
  std::vector<BlockRead> batch = {DatagramRig::read_of(gone, {0, 5000}, tg), DatagramRig::read_of(there, {0, 5000}, tt)};
  gone.entry.version.counter += 1;
  rig.run(batch);
  ASSERT_FALSE(batch[0].result.ok());
  EXPECT_EQ(batch[0].result.error().code(), Code::kStale);
  EXPECT_TRUE(batch[1].result.ok());
  EXPECT_EQ(tt, there.bytes);
}

TEST(Reliable, AnotherIncarnationIsStale) {
  DatagramRig rig;
  rig.options.incarnation.low += 1;
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(5000, 1));
  EXPECT_EQ(rig.read(block).error().code(), Code::kStale);
}

TEST(Reliable, AnIntroductionBringsTheTokenAndIsRepeatedUntilThen) {
  DatagramRig rig;
  rig.start();
  int lost = 0;
  rig.to_server = [&](Bytes&) { return ++lost > 3; };
  rig.introduce();
  EXPECT_EQ(rig.gets, 4U);
  rig.to_server = nullptr;
  const PublishedBlock& block = rig.publish("b", random_bytes(500, 1));
  EXPECT_EQ(must(rig.read(block)), block.bytes);
  EXPECT_EQ(rig.gets, 5U);  // no more tokens asked for
}

TEST(Reliable, ANewAddressCostsOneRoundTripAndNoBlock) {
  DatagramRig rig;
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(200'000, 1));
  std::uint64_t seen = 0;
  rig.to_client = [&](Bytes& datagram) {
    if (datagram_kind(datagram) == DatagramKind::kData && ++seen == 40) rig.address[3] = std::byte{9};  // as a NAT does it
    return true;
  };
  EXPECT_EQ(must(rig.read(block)), block.bytes);
  EXPECT_GE(rig.responder->stats().tokens, 2U);
}

TEST(Reliable, ABackpressureStatusIsHeeded) {
  DatagramRig rig;
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(500, 1));
  bool refused = false;
  Micros until = 0;
  rig.to_client = [&](Bytes& datagram) {
    if (const auto data = read_data(datagram); data && !refused) {
      refused = true;
      const auto status = DatagramStatus{StatusCode::kBackpressure, data->request, 3000, {}}.encode(rig.options.key);
      datagram.assign(status.begin(), status.end());
      until = rig.now + 3000;
    }
    return true;
  };
  EXPECT_EQ(must(rig.read(block)), block.bytes);
  EXPECT_GE(rig.now, until);
}

TEST(Reliable, SilenceIsAnsweredMoreAndMoreRarelyAndAbandonTellsWhy) {
  DatagramRig rig;
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(4 << 20, 1));
  Bytes target(block.bytes.size());
  BlockRead item = DatagramRig::read_of(block, {0, target.size()}, target);
  rig.to_server = [](Bytes&) { return false; };
  const Micros start = rig.now;
  rig.reader->begin({&item, 1}, rig.now);
  while (rig.now < start + 10 * kMicrosPerSecond) ASSERT_TRUE(rig.turn());
  EXPECT_LT(rig.gets, 40U);
  EXPECT_GT(rig.reader->stats().timeouts, 3U);
  rig.reader->abandon(Error(Code::kTimeout, "enough"));
  EXPECT_TRUE(rig.reader->done());
  EXPECT_EQ(item.result.error().code(), Code::kTimeout);
  EXPECT_EQ(rig.credit->used(), 0U);
}

TEST(Reliable, WhatComesAfterAbandonIsNotWritten) {
  DatagramRig rig;
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(5000, 1));
  Bytes target(5000, std::byte{0xee});
  BlockRead item = DatagramRig::read_of(block, {0, 5000}, target);
  std::vector<Bytes> late;
  rig.to_client = [&](Bytes& datagram) {
    if (datagram_kind(datagram) == DatagramKind::kData) late.push_back(datagram);
    return datagram_kind(datagram) != DatagramKind::kData;
  };
  rig.reader->begin({&item, 1}, rig.now);
  for (int i = 0; i < 12; ++i) rig.turn();
  ASSERT_FALSE(late.empty());
  rig.reader->abandon(Error(Code::kTimeout, "enough"));
  for (const Bytes& datagram : late) rig.reader->on_datagram(rig.now, datagram);
  EXPECT_EQ(target, Bytes(5000, std::byte{0xee}));
}

// CASES UP-39: large datagrams vanish without a word.
TEST(Reliable, APathThatCarriesLessIsFoundAndWhatIsHereStays) {
  for (const std::uint64_t from : {std::uint64_t{0}, std::uint64_t{50}}) {
    DatagramRig rig(8000);
    rig.options.segment_floor = 524;
    rig.start();
    std::uint64_t seen = 0;
    rig.to_client = [&](Bytes& datagram) { return seen++ < from || datagram.size() <= 1280 - 28; };
    const PublishedBlock& block = rig.publish("b", random_bytes(1 << 20, 1));
    EXPECT_EQ(must(rig.read(block)), block.bytes) << from;
    EXPECT_EQ(rig.reader->segment_size(), 1208U);
    EXPECT_GE(rig.reader->stats().size_steps, 1U);
    // Even so, what had come in large pieces was not fetched again in small ones.
    EXPECT_LT(rig.reader->stats().segment_bytes, block.bytes.size() + 2 * 8000);
  }
}

TEST(Reliable, AServerThatWasFrozenFindsTheSizeAsItWas) {
  DatagramRig rig(8000);
  rig.start();
  const Micros thaws = rig.now + 3 * kMicrosPerSecond;
  rig.to_server = [&](Bytes&) { return rig.now > thaws; };
  const PublishedBlock& block = rig.publish("b", random_bytes(1 << 20, 1));
  EXPECT_EQ(must(rig.read(block)), block.bytes);
  EXPECT_EQ(rig.asked_for_what_is_here, 0U);
}

TEST(Reliable, WhatIsUnderWayNeverExceedsTheCredit) {
  DatagramRig rig(1448, 64 << 10);
  rig.start();
  const PublishedBlock& block = rig.publish("b", random_bytes(2 << 20, 1));
  std::uint64_t most = 0;
  rig.to_client = [&](Bytes&) {
    most = std::max(most, rig.credit->used());
    return true;
  };
  EXPECT_EQ(must(rig.read(block)), block.bytes);
  EXPECT_LE(most, 64U << 10);
  EXPECT_GT(most, 32U << 10);
}

TEST(Reliable, ALinkWithoutRoomStillGetsOneSegment) {
  DatagramRig rig(1448, 64 << 10);
  rig.start();
  rig.credit->take(64 << 10);  // all of it is another link's
  const PublishedBlock& block = rig.publish("b", random_bytes(20'000, 1));
  EXPECT_EQ(must(rig.read(block)), block.bytes);
}

TEST(Reliable, AnEmptyBatchIsDoneAtOnce) {
  DatagramRig rig;
  rig.start();
  rig.reader->begin({}, rig.now);
  EXPECT_TRUE(rig.reader->done());
}

// ---------------------------------------------------------------- the window

TEST(PullWindow, DoublesWhileTheDelayIsLowAndShrinksWhenItIsNot) {
  PullWindow window(1500, 64 << 20);
  Micros now = 0;
  const auto answer = [&](Micros later, Micros took) {
    now += later;
    window.on_answer(now, now - took, true);
  };
  for (int i = 0; i < 6; ++i) answer(800, 400);
  const std::uint64_t grown = window.bytes();
  EXPECT_GE(grown, 8 * PullWindow::kFirstWindow);
  answer(20'000, 20'000);
  EXPECT_EQ(window.bytes(), grown);  // once may be the scheduler
  answer(20'000, 20'000);
  EXPECT_LT(window.bytes(), grown * 6 / 10);
  EXPECT_GE(window.bytes(), grown / 2);
  answer(10, 20'000);
  EXPECT_GE(window.bytes(), grown / 2);  // once a round: this one was asked for before it began
}

TEST(PullWindow, GrowsNoFurtherThanAFastPathOfItsRoundTripHolds) {
  for (const auto& [round_trip, most] : {std::pair<Micros, std::uint64_t>{40, 1 << 20}, {300, 3'000'000}, {5000, 8 << 20}}) {
    PullWindow window(1500, 8 << 20);
    Micros now = 0;
    for (int i = 0; i < 200; ++i) {
      now += 2 * round_trip;
      window.on_answer(now, now - round_trip, true);
    }
    EXPECT_EQ(window.bytes(), most) << round_trip;
  }
}

// What was asked for a moment before `now`: of ten parts, `lost` did not come.
void settle(PullWindow& window, Micros now, std::uint64_t cost, int lost, int of = 10) {
  for (int i = 0; i < of; ++i) window.on_settled(now, now - 1, cost, i * lost / of != (i + 1) * lost / of);
}

TEST(PullWindow, AFewLossesAreNoCongestionManyAre) {
  PullWindow window(1500, 64 << 20);
  window.on_answer(200, 100, false);
  const std::uint64_t before = window.bytes();
  for (Micros now = 1000; now < 100'000; now += 1000) settle(window, now, 2000, 4);
  EXPECT_EQ(window.bytes(), before);
  for (Micros now = 200'000; now < 220'000; now += 1000) settle(window, now, 2000, 7);
  EXPECT_LT(window.bytes(), before);
}

TEST(PullWindow, LossesCountHoweverManyRoundTripsTheyLieApart) {
  constexpr std::uint64_t kCost = 10'208;  // three at a time into a queue that holds one
  PullWindow window(kCost, 64 << 20);
  window.on_answer(1000, 950, true);
  for (Micros now = 2000; now < 200'000; now += 1500) settle(window, now, kCost, 2, 3);
  EXPECT_EQ(window.bytes(), 4 * kCost);
}

TEST(PullWindow, LossesOfOneWindowCutOnce) {
  PullWindow window(1500, 64 << 20);
  window.on_answer(200, 100, false);
  const std::uint64_t before = window.bytes();
  for (int i = 0; i < 100; ++i) window.on_settled(1000, 900, before / 100, true);
  EXPECT_EQ(window.bytes(), before / 10 * 7);
}

TEST(PullWindow, LossThatGoesOnTakesTheLeastWindowDownToFourDatagramsAndRoundsWithoutItBringItBack) {
  constexpr std::uint64_t kCost = 2700;
  PullWindow window(kCost, 64 << 20);
  Micros now = 1000;
  window.on_answer(now, now - 100, true);
  for (int round = 0; round < 500; ++round) settle(window, now += 1000, kCost, 10);
  EXPECT_EQ(window.bytes(), 4 * kCost);
  for (int round = 0; round < 20; ++round) {
    now += 1000;
    window.on_answer(now, now - 100, true);
    settle(window, now, kCost, 0, 100);
  }
  EXPECT_GT(window.bytes(), PullWindow::kLeastWindow);
  for (int round = 0; round < 2; ++round) {  // delay alone takes it to the least window again, no lower
    for (int i = 0; i < 40; ++i) window.on_answer(now + 50'000, now, false), now += 50'000;
  }
  EXPECT_EQ(window.bytes(), PullWindow::kLeastWindow);
}

TEST(PullWindow, AWindowThatNobodyFilledDoesNotGrow) {
  PullWindow window(1500, 64 << 20);
  for (Micros now = 1000; now < 100'000; now += 1000) window.on_answer(now, now - 100, false);
  EXPECT_EQ(window.bytes(), PullWindow::kFirstWindow);
}

}  // namespace
}  // namespace paramwire
