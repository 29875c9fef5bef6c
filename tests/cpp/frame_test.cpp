// Slot headers and frames: what is refused, and the parser over any split of a stream.
#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/wire/block_header.hpp"
#include "paramwire/wire/message.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace paramwire {
namespace {

using Event = FrameParser::Event;
using Random = std::mt19937_64;

SlotHeader good_slot() {
  SlotHeader header{2, 7, 100, 100, 0x1234, 0x5678, 3, 0, 0, static_cast<std::uint16_t>(DType::kU8), 0};
  header.header_crc = slot_header_crc(header);
  return header;
}

TEST(SlotHeader, EverySingleBitFlipIsRefused) {
  const SlotHeader good = good_slot();
  ASSERT_EQ(verify(good), nullptr);
  for (std::size_t bit = 0; bit < 8 * sizeof good; ++bit) {
    SlotHeader bad = good;
    auto bytes = std::as_writable_bytes(std::span(&bad, 1));
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(verify(bad), nullptr) << "bit " << bit;
  }
}

TEST(SlotHeader, ValuesThatNoWriterSealsAreRefusedByName) {
  const auto reason = [](auto change) {
    SlotHeader header = good_slot();
    change(header);
    header.header_crc = slot_header_crc(header);
    const char* text = verify(header);
    return std::string(text ? text : "accepted");
  };
  EXPECT_EQ(reason([](SlotHeader& h) { h.seq = 3; }), "seq odd");
  EXPECT_EQ(reason([](SlotHeader& h) { h.seq = 0; }), "seq zero");
  EXPECT_EQ(reason([](SlotHeader& h) { h.block = 0; }), "block zero");
  EXPECT_EQ(reason([](SlotHeader& h) { h.epoch = 0; }), "version zero");
  EXPECT_EQ(reason([](SlotHeader& h) { h.version_counter = 0; }), "version zero");
  EXPECT_EQ(reason([](SlotHeader& h) { h.dtype = 0; }), "dtype");
  EXPECT_EQ(reason([](SlotHeader& h) { h.dtype = kDTypeMax + 1; }), "dtype");
  EXPECT_EQ(reason([](SlotHeader& h) { h.codec = kCodecMax + 1; }), "codec");
  EXPECT_EQ(reason([](SlotHeader& h) { h.stored_size -= 1; }), "stored size") << "raw";
  EXPECT_EQ(reason([](SlotHeader& h) { h.codec = 1; }), "stored size") << "encoded, and no smaller";
  EXPECT_EQ(reason([](SlotHeader& h) { h.codec = 1, h.stored_size = 0; }), "stored size");
  EXPECT_EQ(reason([](SlotHeader& h) { h.codec = 1, h.stored_size -= 1; }), "accepted");
}

// ---------------------------------------------------------------- the parser

struct Frame {
  FrameType type;
  std::uint64_t request;
  Bytes meta;
  Bytes body;
  bool operator==(const Frame&) const = default;
};

Bytes random_bytes(Random& random, std::size_t size) {
  Bytes bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

Bytes stream_of(const std::vector<Frame>& frames) {
  Bytes stream;
  for (const Frame& f : frames) {
    append_frame(stream, f.type, f.request, f.meta, f.body.size());
    stream.insert(stream.end(), f.body.begin(), f.body.end());
  }
  return stream;
}

// Reads frames with a FrameParser; bodies go to parts cut at random, the rest of each is discarded.
class Reader {
 public:
  explicit Reader(std::uint64_t seed) : random_(seed) {}

  // Takes all events that are there. The error ends the stream.
  Status drain() {
    for (;;) {
      PARAMWIRE_TRY(event, parser_.next());
      switch (event) {
        case Event::kNeedBytes: return {};
        case Event::kHead: head(); break;
        case Event::kBody: body(); break;
        case Event::kEnd: end(); break;
      }
    }
  }
  // Gives the parser all of `piece`, in as many receives as it wants.
  Status give(std::span<const std::byte> piece) {
    while (!piece.empty()) {
      const auto space = parser_.receive_space();
      EXPECT_FALSE(space.empty());
      EXPECT_LE(space.size(), FrameParser::kReceiveStep);
      if (space.empty()) return Error(Code::kInternal, "no space");
      const std::size_t n = std::min(space.size(), piece.size());
      std::memcpy(space.data(), piece.data(), n);
      parser_.received(n);
      piece = piece.subspan(n);
      PARAMWIRE_CHECK(drain());
    }
    return {};
  }

  FrameParser parser_;
  std::vector<Frame> frames;
  std::vector<std::uint64_t> discarded;  // bytes at the end of each body

 private:
  void head() {
    EXPECT_EQ(verify(parser_.header()), nullptr);
    const FrameHeader& h = parser_.header();
    frames.push_back({static_cast<FrameType>(h.type), h.request, {parser_.meta().begin(), parser_.meta().end()}, {}});
    discarded.push_back(0);
    if (h.body_size == 0) return;
    // A body that the header alone declares is never believed for an allocation: over 16 MiB all is discarded.
    const std::uint64_t kept = h.body_size > (1 << 24) ? 0 : random_() % 4 == 0 ? random_() % (h.body_size + 1) : h.body_size;
    kept_.assign(static_cast<std::size_t>(kept), std::byte{});
    seen_ = 0;
    std::size_t a = static_cast<std::size_t>(random_() % (kept + 1));
    std::size_t b = static_cast<std::size_t>(random_() % (kept + 1));
    if (a > b) std::swap(a, b);
    const std::span all(kept_);
    parser_.set_body({{all.first(a), all.subspan(a, b - a), all.subspan(b)}, h.body_size - kept});
    discarded.back() = h.body_size - kept;
  }
  void body() {
    const auto part = parser_.body_part();
    EXPECT_FALSE(part.empty());
    EXPECT_EQ(part.data(), kept_.data() + seen_) << "parts must come in order, without gap or repetition";
    seen_ += part.size();
  }
  void end() {
    if (parser_.header().body_size == 0) return;
    EXPECT_EQ(seen_, kept_.size());
    frames.back().body = kept_;
  }

  Random random_;
  Bytes kept_;
  std::size_t seen_ = 0;
};

std::vector<Frame> sample_frames(Random& random) {
  std::vector<Frame> frames;
  for (const std::size_t body : {std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{5000}, std::size_t{70'000},
                                 std::size_t{600'000}, std::size_t{0}, std::size_t{3}}) {
    frames.push_back({FrameType::kData, random(), random_bytes(random, random() % 300), random_bytes(random, body)});
  }
  frames.push_back({FrameType::kStats, random(), random_bytes(random, kMaxMetaBytes), {}});
  frames.push_back({FrameType::kOk, 1, {}, {}});
  return frames;
}

void expect_frames(const Reader& reader, const std::vector<Frame>& frames) {
  ASSERT_EQ(reader.frames.size(), frames.size());
  for (std::size_t i = 0; i < frames.size(); ++i) {
    Frame want = frames[i];
    want.body.resize(want.body.size() - static_cast<std::size_t>(reader.discarded[i]));
    EXPECT_EQ(reader.frames[i], want) << "frame " << i;
  }
}

TEST(FrameParser, AnySplitOfAStreamGivesTheSameFrames) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  Random random(seed);
  const std::vector<Frame> frames = sample_frames(random);
  const Bytes stream = stream_of(frames);
  for (const std::size_t largest : {7UL, 1000UL, 40'000UL, 400'000UL, 4'000'000UL}) {
    Reader reader(random());
    for (std::size_t at = 0; at < stream.size();) {
      const std::size_t n = std::min(stream.size() - at, 1 + random() % largest);
      ASSERT_TRUE(reader.give(std::span(stream).subspan(at, n)).ok());
      at += n;
    }
    expect_frames(reader, frames);
  }
}

TEST(FrameParser, EverySplitInTwoOfTwoSmallFramesGivesBoth) {
  Random random(1);
  const std::vector<Frame> frames = {{FrameType::kGet, 5, random_bytes(random, 9), random_bytes(random, 11)},
                                     {FrameType::kOk, 6, {}, {}}};
  const Bytes stream = stream_of(frames);
  for (std::size_t cut = 0; cut <= stream.size(); ++cut) {
    Reader reader(cut);
    ASSERT_TRUE(reader.give(std::span(stream).first(cut)).ok());
    ASSERT_TRUE(reader.give(std::span(stream).subspan(cut)).ok());
    expect_frames(reader, frames);
  }
}

TEST(FrameParser, EverySingleBitFlipOfHeaderOrMetaIsRefused) {
  Random random(2);
  const Bytes good = stream_of({{FrameType::kGet, 77, random_bytes(random, 61), {}}});
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    Reader reader(bit);
    const Status status = reader.give(bad);
    ASSERT_FALSE(status.ok()) << "bit " << bit;
    EXPECT_EQ(status.error().code(), Code::kCorrupt);
    EXPECT_TRUE(reader.frames.empty());
    EXPECT_FALSE(reader.drain().ok()) << "the error must stay";
  }
}

FrameHeader header_with(auto change) {
  FrameHeader header{kFrameMagic, kProtocolVersion, static_cast<std::uint8_t>(FrameType::kOk), 0, 1, 0, 0, 0, 0, 0};
  change(header);
  header.header_crc = frame_header_crc(header);
  return header;
}

TEST(FrameHeader, ValuesOutsideTheProtocolAreRefusedByName) {
  const auto reason = [](auto change) { return std::string_view(verify(header_with(change))); };
  EXPECT_EQ(verify(header_with([](FrameHeader&) {})), nullptr);
  EXPECT_EQ(reason([](FrameHeader& h) { h.magic ^= 1; }), "magic");
  EXPECT_EQ(reason([](FrameHeader& h) { h.protocol = 2; }), "protocol");
  EXPECT_EQ(reason([](FrameHeader& h) { h.flags = 1; }), "flags or reserved not zero");
  EXPECT_EQ(reason([](FrameHeader& h) { h.reserved = 1; }), "flags or reserved not zero");
  EXPECT_EQ(reason([](FrameHeader& h) { h.meta_size = kMaxMetaBytes + 1; }), "meta size over limit");
}

TEST(FrameParser, ABodyWithoutAFittingTargetIsAnErrorAndNeverWrites) {
  const Bytes stream = stream_of({{FrameType::kPut, 1, {}, Bytes(40)}});
  Bytes target(100);
  const auto refused = [&](auto set) {
    FrameParser parser;
    std::memcpy(parser.receive_space().data(), stream.data(), stream.size());
    parser.received(stream.size());
    EXPECT_EQ(*parser.next(), Event::kHead);
    set(parser);
    const auto event = parser.next();
    return !event.ok() && event.error().code() == Code::kInternal;
  };
  EXPECT_TRUE(refused([](FrameParser&) {}));
  EXPECT_TRUE(refused([&](FrameParser& p) { p.set_body({{std::span(target).first(39)}, 0}); }));
  EXPECT_TRUE(refused([&](FrameParser& p) { p.set_body({{std::span(target).first(40)}, 1}); }));
  // 100 bytes and a discard of -60: the sum wraps to 40.
  EXPECT_TRUE(refused([&](FrameParser& p) { p.set_body({{std::span(target)}, ~std::uint64_t{59}}); }));
}

TEST(FrameParser, AskingForSpaceTwiceTellsNoPartTwice) {
  // A receive that brings nothing (EAGAIN) between two parts of a body.
  Random random(3);
  const Bytes body = random_bytes(random, 100'000);
  const Bytes stream = stream_of({{FrameType::kPut, 1, {}, body}});
  FrameParser parser;
  std::memcpy(parser.receive_space().data(), stream.data(), sizeof(FrameHeader));
  parser.received(sizeof(FrameHeader));
  ASSERT_EQ(*parser.next(), Event::kHead);
  Bytes target(body.size());
  parser.set_body({{std::span(target)}, 0});
  ASSERT_EQ(*parser.next(), Event::kNeedBytes);
  std::memcpy(parser.receive_space().data(), body.data(), 10);
  parser.received(10);
  ASSERT_EQ(*parser.next(), Event::kBody);
  ASSERT_EQ(*parser.next(), Event::kNeedBytes);
  static_cast<void>(parser.receive_space());
  ASSERT_EQ(*parser.next(), Event::kNeedBytes);
  std::memcpy(parser.receive_space().data(), body.data() + 10, body.size() - 10);
  parser.received(body.size() - 10);
  ASSERT_EQ(*parser.next(), Event::kBody);
  EXPECT_EQ(parser.body_part().size(), body.size() - 10);
  ASSERT_EQ(*parser.next(), Event::kEnd);
  EXPECT_EQ(target, body);
}

TEST(FrameParser, BytesReceivedBeforeTheEventsAreTakenAreKept) {
  Random random(4);
  std::vector<Frame> frames;
  for (std::uint64_t i = 0; i < 3000; ++i) frames.push_back({FrameType::kOk, i, {}, {}});
  const Bytes stream = stream_of(frames);
  FrameParser parser;
  std::uint64_t next_request = 0;
  for (std::size_t at = 0; at < stream.size() || next_request < frames.size();) {
    const auto space = parser.receive_space();
    const std::size_t n = std::min(space.size(), stream.size() - at);
    if (n > 0) std::memcpy(space.data(), stream.data() + at, n);
    if (n > 0) parser.received(n);
    at += n;
    // One frame a turn: the buffer runs full and must hold what was not asked for.
    ASSERT_EQ(*parser.next(), Event::kHead);
    EXPECT_EQ(parser.header().request, next_request++);
    ASSERT_EQ(*parser.next(), Event::kEnd);
  }
}

TEST(FrameParser, RandomBytesAndDamagedStreamsNeverCrashOrGiveADamagedHead) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(cat("seed ", seed));
  Random random(seed);
  const std::vector<Frame> frames = {{FrameType::kPut, 1, random_bytes(random, 50), random_bytes(random, 100)},
                                     {FrameType::kGet, 2, random_bytes(random, 20), {}},
                                     {FrameType::kPut, 3, {}, random_bytes(random, 3000)}};
  const Bytes good = stream_of(frames);
  for (int round = 0; round < 3000; ++round) {
    Bytes bytes = good;
    if (round % 3 == 0) bytes = random_bytes(random, random() % 500);
    for (std::uint64_t i = 1 + random() % 4; i > 0 && !bytes.empty(); --i) {
      const auto at = static_cast<std::size_t>(random() % bytes.size());
      if (random() % 3 == 0) bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
      else bytes[at] = static_cast<std::byte>(random() & 0xff);
    }
    if (round % 5 == 0) {  // a header that is right about its own CRC, and wrong in all else
      FrameHeader header = header_with([&](FrameHeader& h) {
        h.meta_size = static_cast<std::uint32_t>(random() % (2 * kMaxMetaBytes));
        h.body_size = random();
      });
      const auto raw = std::as_bytes(std::span(&header, 1));
      bytes.insert(bytes.begin(), raw.begin(), raw.end());
    }
    Reader reader(random());
    const Status status = reader.give(bytes);
    if (!status.ok()) {
      EXPECT_EQ(status.error().code(), Code::kCorrupt);
    }
    for (const Frame& got : reader.frames) {
      EXPECT_TRUE(got.meta.empty() || std::ranges::any_of(frames, [&](const Frame& sent) {
        return sent.type == got.type && sent.request == got.request && sent.meta == got.meta;
      }));
    }
  }
}

}  // namespace
}  // namespace paramwire
