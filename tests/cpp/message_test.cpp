// Every message: what decode() takes is exactly what encode() writes. Bytes are held by golden_test.cpp.
#include "paramwire/base/bytes.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/wire/message.hpp"
#include "paramwire/wire/delta_message.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <random>

namespace paramwire {
namespace {

constexpr std::uint64_t kRequest = 0x1122334455667788;

// A message's meta, and what becomes of other bytes in its place: encoded again, or the error.
struct Case {
  std::string name;
  Bytes meta;
  std::function<Result<Bytes>(std::span<const std::byte>)> again;
};

Bytes meta_of(const Bytes& frame) { return {frame.begin() + sizeof(FrameHeader), frame.end()}; }

template <typename Message, typename Encode>
Case make_case(std::string name, const Message& message, Encode encode) {
  return {std::move(name), meta_of(encode(message)), [encode](std::span<const std::byte> meta) -> Result<Bytes> {
            PARAMWIRE_TRY(decoded, Message::decode(meta));
            return meta_of(encode(decoded));
          }};
}

VerbsEnd verbs_end() {
  VerbsEnd end;
  for (std::size_t i = 0; i < end.gid.size(); ++i) end.gid.at(i) = static_cast<std::uint8_t>(i + 1);
  end.queue_pair = 0x010203;
  end.packet = 0x040506;
  end.mtu = 1024;
  end.lid = 0x0708;
  end.reads = 16;
  end.type = 1;
  return end;
}
VerbsRegionListMessage region_list(std::size_t count) {
  VerbsRegionListMessage out;
  for (std::size_t i = 0; i < count; ++i) {
    out.regions.push_back({static_cast<std::uint16_t>(i % 3), i * kRegionBytes, static_cast<std::uint32_t>(kRegionBytes - i), 0x7f0000000000 + i, static_cast<std::uint32_t>(2 * i + 1)});
  }
  return out;
}

std::vector<Case> all_messages() {
  const auto plain = [](const auto& m) { return m.encode(kRequest); };
  const auto typed = [](FrameType type) { return [type](const auto& m) { return m.encode(type, kRequest); }; };
  const Incarnation incarnation{0x0123456789abcdef, 0xfedcba9876543210};
  const PublishId publish{0xa0a1, 0xb0b1};
  const Version version{3, 17};
  Digest root{};
  root.fill(std::byte{0x5a});
  static const Bytes kTable(24, std::byte{7});
  return {
      make_case("HELLO", HelloMessage{{1, 2}, 4242}, plain),
      make_case("WELCOME", WelcomeMessage{incarnation, 3, version, 30'000, "host-a", "/run/pw.sock"}, plain),
      make_case("WELCOME none", WelcomeMessage{incarnation, 3, std::nullopt, 30'000, "", ""}, plain),
      make_case("ERROR", ErrorMessage{Code::kStale, "version 1.7 is gone"}, plain),
      make_case("SNAPSHOT", SnapshotMessage{version, Version{3, 16}, root, 10'000, 250, true}, plain),
      make_case("SNAPSHOT newest", SnapshotMessage{}, plain),
      make_case("MANIFEST", ManifestMessage{incarnation, 77, 10'000, 1234, 3}, plain),
      make_case("RENEW", LeaseMessage{77, 10'000}, typed(FrameType::kRenew)),
      make_case("GET", GetMessage{BlockId{5}, version, incarnation, {65536, 131072}, true}, plain),
      make_case("DATA", DataMessage{BlockId{5}, version, incarnation, 200'000, {65536, 131072}, kTable}, plain),
      make_case("DATA no table", DataMessage{BlockId{5}, version, incarnation, 10, {0, 10}, {}}, plain),
      make_case("DELTAS", DeltasMessage{incarnation, {{BlockId{5}, version, Version{3, 15}}, {BlockId{6}, version, Version{2, 900}}}}, plain),
      make_case("DELTAS none", DeltasMessage{incarnation, {}}, plain),
      make_case("DELTA_LIST", DeltaListMessage{{100, 0, kDeltaPending, 7}}, plain),
      make_case("DELTA_LIST none", DeltaListMessage{}, plain),
      make_case("ARENA_FD", ArenaMessage{2, 1 << 30}, typed(FrameType::kArenaFd)),
      make_case("PINS_FD", PinsMessage{4096}, plain),
      make_case("PUBLISH_START", PublishStartMessage{false, version}, plain),
      make_case("PUBLISH_START any", PublishStartMessage{}, plain),
      make_case("PUBLISH_ID", PublishIdMessage{publish, version}, typed(FrameType::kPublishId)),
      make_case("FINISH", PublishIdMessage{publish, {}}, typed(FrameType::kFinish)),
      make_case("PUT whole", PutMessage{publish, "a.weight", DType::kBF16, Shape{49152, 576}, Shard::whole()},
                [](const PutMessage& m) { return m.encode(kRequest, 9); }),
      make_case("PUT rows", PutMessage{publish, "a.weight", DType::kF32, Shape{8}, Shard::rows(2, 4)},
                [](const PutMessage& m) { return m.encode(kRequest, 9); }),
      make_case("PUT heads", PutMessage{publish, "a", DType::kI4, Shape{8, 2, 3}, Shard::head_range(4, 1, 2)},
                [](const PutMessage& m) { return m.encode(kRequest, 9); }),
      make_case("PUT_DONE", PutDoneMessage{BlockId{5}, 6}, plain),
      make_case("REMOVE", NameMessage{publish, "old", ""}, typed(FrameType::kRemove)),
      make_case("ALIAS", NameMessage{publish, "output.weight", "token_embd.weight"}, typed(FrameType::kAlias)),
      make_case("PUBLISHED", PublishedMessage{version}, plain),
      make_case("STATS", StatsMessage{{{"blocks_count", 272}, {"arena_bytes", 1 << 30}}}, plain),
      make_case("STATS none", StatsMessage{}, plain),
      make_case("VERBS_OPEN", VerbsOpenMessage{verbs_end(), 1}, plain),
      make_case("VERBS_READY", VerbsReadyMessage{verbs_end(), 0x7f0123456000, 0x1801, kVerbsProbeBytes}, plain),
      make_case("VERBS_REGIONS", VerbsRegionsMessage{17, true, 3, 1 << 30}, plain),
      make_case("VERBS_REGIONS unasked", VerbsRegionsMessage{17, false, 0, 0}, plain),
      make_case("VERBS_REGION_LIST", region_list(3), plain),
      make_case("VERBS_REGION_LIST none", VerbsRegionListMessage{true, {}}, plain),
  };
}

TEST(Message, DecodedAndEncodedAgainIsTheSame) {
  for (const Case& c : all_messages()) {
    const auto again = c.again(c.meta);
    ASSERT_TRUE(again.ok()) << c.name << ": " << again.error().to_string();
    EXPECT_EQ(*again, c.meta) << c.name;
  }
}

TEST(Message, EveryTruncationAndATrailingByteAreRefused) {
  for (const Case& c : all_messages()) {
    for (std::size_t size = 0; size < c.meta.size(); ++size) {
      const auto again = c.again(std::span(c.meta).first(size));
      ASSERT_FALSE(again.ok()) << c.name << " cut to " << size << " of " << c.meta.size() << " bytes";
      EXPECT_EQ(again.error().code(), Code::kCorrupt);
    }
    Bytes longer = c.meta;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(c.again(longer).ok()) << c.name << " with a byte more";
  }
}

// The frame's CRC catches damage; this is about a peer that means it. Whatever is taken is kept whole: no field is dropped,
// clipped or read in two ways.
TEST(Message, WhateverIsTakenIsWrittenBackUnchanged) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  std::mt19937_64 random(seed);
  std::size_t taken = 0;
  for (const Case& c : all_messages()) {
    const auto check = [&](const Bytes& bytes) {
      const auto again = c.again(bytes);
      if (again.ok()) {
        ++taken;
        EXPECT_EQ(*again, bytes) << c.name;
      } else {
        EXPECT_EQ(again.error().code(), Code::kCorrupt) << c.name;
      }
    };
    for (std::size_t bit = 0; bit < 8 * c.meta.size(); ++bit) {
      Bytes bytes = c.meta;
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      check(bytes);
    }
    for (int round = 0; round < 2000; ++round) {
      Bytes bytes = c.meta;
      if (bytes.empty() || round % 4 == 0) bytes.resize(random() % 120);
      for (std::uint64_t i = random() % 8; i > 0 && !bytes.empty(); --i) bytes[random() % bytes.size()] = static_cast<std::byte>(random() & 0xff);
      check(bytes);
    }
  }
  EXPECT_GT(taken, 1000U) << "most flips of ids and sizes are other valid messages";
}

template <typename Message, typename... Args>
std::string refusal(const Message& message, Args... args) {
  const auto decoded = Message::decode(meta_of(message.encode(args..., kRequest)));
  return decoded.ok() ? "accepted" : decoded.error().message();
}
std::string put_refusal(const PutMessage& message) {
  const auto decoded = PutMessage::decode(meta_of(message.encode(kRequest, 0)));
  return decoded.ok() ? "accepted" : decoded.error().message();
}

TEST(Message, ValuesOutsideTheirRangeAreRefusedNamingTheField) {
  const Version good{1, 1};
  EXPECT_NE(refusal(WelcomeMessage{{}, 0, {}, 1, "", ""}).find("epoch"), std::string::npos);
  EXPECT_NE(refusal(WelcomeMessage{{}, 1, Version{0, 5}, 1, "", ""}).find("version"), std::string::npos);
  EXPECT_NE(refusal(ErrorMessage{static_cast<Code>(0), ""}).find("code"), std::string::npos);
  EXPECT_NE(refusal(ErrorMessage{static_cast<Code>(11), ""}).find("code"), std::string::npos);
  Digest root{};
  root[31] = std::byte{1};
  EXPECT_NE(refusal(SnapshotMessage{{}, {}, root, 0, 0, false}).find("root"), std::string::npos);
  EXPECT_NE(refusal(ManifestMessage{{}, 0, 0, ~std::uint64_t{0}, 0}).find("size"), std::string::npos);
  EXPECT_NE(refusal(ManifestMessage{{}, 0, 0, 0, ~std::uint64_t{0}}).find("size"), std::string::npos);
  EXPECT_NE(refusal(GetMessage{BlockId{1}, Version{1, 0}, {}, {0, 1}, false}).find("version"), std::string::npos);
  EXPECT_NE(refusal(GetMessage{BlockId{1}, good, {}, {2, ~std::uint64_t{0}}, false}).find("range"), std::string::npos);
  EXPECT_NE(refusal(DataMessage{BlockId{1}, good, {}, 9, {5, 5}, {}}).find("range"), std::string::npos);
  EXPECT_NE(refusal(DataMessage{BlockId{1}, good, {}, 9, {~std::uint64_t{0}, 2}, {}}).find("range"), std::string::npos);
  const Bytes table(12);
  EXPECT_NE(refusal(DataMessage{BlockId{1}, good, {}, 9, {0, 9}, table}).find("length"), std::string::npos);
  EXPECT_NE(refusal(ArenaMessage{kArenaMax + 1, 0}, FrameType::kArena).find("arena"), std::string::npos);
  EXPECT_NE(refusal(PinsMessage{0}).find("capacity"), std::string::npos);
  EXPECT_NE(refusal(PublishIdMessage{{}, Version{0, 1}}, FrameType::kFinish).find("version"), std::string::npos);
  EXPECT_NE(refusal(PublishedMessage{Version{}}).find("version"), std::string::npos);
}

TEST(Message, PutRefusesUnknownCodesAndKeysWithTwoSpellings) {
  const PutMessage good{{1, 2}, "a", DType::kF32, Shape{8, 2}, Shard::rows(0, 4)};
  EXPECT_EQ(put_refusal(good), "accepted");
  const auto with = [&](auto change) {
    PutMessage m = good;
    change(m);
    return put_refusal(m);
  };
  EXPECT_NE(with([](PutMessage& m) { m.dtype = static_cast<DType>(0); }).find("dtype"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.dtype = static_cast<DType>(kDTypeMax + 1); }).find("dtype"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.shard.kind = static_cast<ShardKind>(3); }).find("shard kind"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.shard.heads = 2; }).find("shard"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.shard = {ShardKind::kWhole, 0, 0, 8}; }).find("shard"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.shard = {ShardKind::kHeads, 0, 0, 1}; }).find("shard"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.tensor = ""; }).find("name"), std::string::npos);
  EXPECT_NE(with([](PutMessage& m) { m.tensor = std::string_view("a\0b", 3); }).find("name"), std::string::npos);
  const std::string longest(kMaxNameBytes, 'x');
  EXPECT_EQ(with([&](PutMessage& m) { m.tensor = longest; }), "accepted");
  const std::string longer(kMaxNameBytes + 1, 'x');
  EXPECT_NE(with([&](PutMessage& m) { m.tensor = longer; }), "accepted");
}

TEST(Message, AnEndOfAnRdmaConnectionOutsideItsRangesIsRefusedNamingTheField) {
  const auto with = [](auto change) {
    VerbsEnd end = verbs_end();
    change(end);
    const std::string open = refusal(VerbsOpenMessage{end, 0}), ready = refusal(VerbsReadyMessage{end, 1, 2, 3});
    const std::size_t field = open.find("bad ");
    EXPECT_EQ(field == std::string::npos ? open : open.substr(field), field == std::string::npos ? ready : ready.substr(ready.find("bad "))) << "both messages have the same end";
    return open;
  };
  EXPECT_EQ(with([](VerbsEnd&) {}), "accepted");
  EXPECT_NE(with([](VerbsEnd& e) { e.queue_pair = 0; }).find("queue_pair"), std::string::npos);
  EXPECT_NE(with([](VerbsEnd& e) { e.queue_pair = 1 << 24; }).find("queue_pair"), std::string::npos);
  EXPECT_EQ(with([](VerbsEnd& e) { e.queue_pair = (1 << 24) - 1; }), "accepted");
  EXPECT_NE(with([](VerbsEnd& e) { e.packet = 1 << 24; }).find("packet"), std::string::npos);
  EXPECT_EQ(with([](VerbsEnd& e) { e.packet = (1 << 24) - 1; }), "accepted");
  EXPECT_EQ(with([](VerbsEnd& e) { e.packet = 0; }), "accepted");
  for (const int mtu : {0, 1, 128, 255, 257, 1023, 1500, 4095, 4097, 8192, 32768, 65535}) {
    EXPECT_NE(with([&](VerbsEnd& e) { e.mtu = static_cast<std::uint16_t>(mtu); }).find("mtu"), std::string::npos) << mtu;
  }
  for (const int mtu : {256, 512, 1024, 2048, 4096}) EXPECT_EQ(with([&](VerbsEnd& e) { e.mtu = static_cast<std::uint16_t>(mtu); }), "accepted") << mtu;
  EXPECT_NE(with([](VerbsEnd& e) { e.reads = 0; }).find("reads"), std::string::npos);
  EXPECT_EQ(with([](VerbsEnd& e) { e.reads = 255; }), "accepted");
  EXPECT_NE(with([](VerbsEnd& e) { e.type = 3; }).find("type"), std::string::npos);
  for (const int type : {0, 1, 2}) EXPECT_EQ(with([&](VerbsEnd& e) { e.type = static_cast<std::uint8_t>(type); }), "accepted") << type;
}

TEST(Message, AProbeOfNothingOrOfMoreThanTheProtocolAllowsIsRefused) {
  EXPECT_NE(refusal(VerbsReadyMessage{verbs_end(), 1, 2, 0}).find("probe_size"), std::string::npos);
  EXPECT_NE(refusal(VerbsReadyMessage{verbs_end(), 1, 2, kVerbsProbeBytes + 1}).find("probe_size"), std::string::npos);
  EXPECT_EQ(refusal(VerbsReadyMessage{verbs_end(), 1, 2, 1}), "accepted");
  EXPECT_EQ(refusal(VerbsReadyMessage{verbs_end(), ~std::uint64_t{0}, ~std::uint32_t{0}, kVerbsProbeBytes}), "accepted");
}

TEST(Message, AQuestionForRegionsHasOneSpelling) {
  const auto meta = [](std::uint8_t wanted, std::uint16_t arena, std::uint64_t offset) {
    Bytes out;
    ByteWriter writer(out);
    writer.put<std::uint32_t>(7);
    writer.put(wanted);
    writer.put(arena);
    writer.put(offset);
    return out;
  };
  const auto refused = [](const Bytes& bytes) {
    const auto decoded = VerbsRegionsMessage::decode(bytes);
    return decoded.ok() ? "accepted" : decoded.error().message();
  };
  EXPECT_NE(refused(meta(2, 0, 0)).find("wanted"), std::string::npos);
  EXPECT_NE(refused(meta(0, 1, 0)).find("arena"), std::string::npos);
  EXPECT_NE(refused(meta(0, 0, 1)).find("offset"), std::string::npos);
  EXPECT_EQ(refused(meta(0, 0, 0)), "accepted");
  EXPECT_EQ(refused(meta(1, 65535, ~std::uint64_t{0})), "accepted");
}

TEST(Message, AListOfRegionsThatNoServerCanHaveIsRefused) {
  const auto with = [](auto change) {
    VerbsRegionListMessage m = region_list(2);
    change(m.regions[1]);
    return refusal(m);
  };
  EXPECT_EQ(with([](VerbsRegion&) {}), "accepted");
  EXPECT_NE(with([](VerbsRegion& r) { r.offset += 1; }).find("region"), std::string::npos);
  EXPECT_NE(with([](VerbsRegion& r) { r.offset = kRegionBytes / 2; }).find("region"), std::string::npos);
  EXPECT_NE(with([](VerbsRegion& r) { r.size = 0; }).find("region"), std::string::npos);
  EXPECT_NE(with([](VerbsRegion& r) { r.size = kRegionBytes + 1; }).find("region"), std::string::npos);
  EXPECT_EQ(with([](VerbsRegion& r) { r.size = kRegionBytes; }), "accepted");
  EXPECT_EQ(with([](VerbsRegion& r) { r.size = 1; }), "accepted");
  Bytes complete = meta_of(region_list(2).encode(kRequest));
  complete[0] = std::byte{2};
  EXPECT_FALSE(VerbsRegionListMessage::decode(complete).ok());
}

TEST(Message, TheLongestListOfRegionsFitsAFrameAndOneMoreIsRefused) {
  const Bytes frame = region_list(kVerbsRegionsMax).encode(kRequest);
  ASSERT_LE(frame.size() - sizeof(FrameHeader), kMaxMetaBytes);
  EXPECT_TRUE(VerbsRegionListMessage::decode(meta_of(frame)).ok());
  EXPECT_NE(refusal(region_list(kVerbsRegionsMax + 1)).find("count"), std::string::npos);
  // 2^60 regions, of which none follows.
  Bytes promised = {std::byte{1}};
  ByteWriter(promised).varint(std::uint64_t{1} << 60);
  EXPECT_FALSE(VerbsRegionListMessage::decode(promised).ok());
}

TEST(Message, DeclaredSizesBeyondTheDataAreRefused) {
  // A text of 4096 bytes and 2^60 facts, of which nothing follows.
  Bytes error;
  ByteWriter(error).put<std::uint8_t>(3);
  ByteWriter(error).varint(4096);
  EXPECT_FALSE(ErrorMessage::decode(error).ok());
  for (const std::uint64_t count : {std::uint64_t{1} << 60, std::uint64_t{4096}}) {
    Bytes stats;
    ByteWriter(stats).varint(count);
    EXPECT_FALSE(StatsMessage::decode(stats).ok());
  }
}

TEST(Message, TheLongestExtentTableFitsAFrameAndOneRowMoreIsRefused) {
  const Bytes table(kMaxTableBytes);
  DataMessage m{BlockId{1}, {~std::uint32_t{0}, ~std::uint64_t{0}}, {}, ~std::uint64_t{0}, {0, 1}, table};
  const Bytes frame = m.encode(kRequest);
  ASSERT_LE(frame.size() - sizeof(FrameHeader), kMaxMetaBytes);
  EXPECT_TRUE(DataMessage::decode(meta_of(frame)).ok());
  const Bytes longer(kMaxTableBytes + sizeof(ExtentRow));
  m.extent_table = longer;
  EXPECT_FALSE(DataMessage::decode(meta_of(m.encode(kRequest))).ok());
}

TEST(Message, ALongErrorIsClippedBetweenUtf8Characters) {
  std::string text(16 * 1024 - 1, 'x');
  text += "\xc3\xa4\xc3\xa4";
  const Bytes meta = meta_of(ErrorMessage{Code::kInternal, text}.encode(1));
  const auto kept = ErrorMessage::decode(meta);
  ASSERT_TRUE(kept.ok());
  EXPECT_EQ(kept->text, std::string(16 * 1024 - 1, 'x'));
}

}  // namespace
}  // namespace paramwire
