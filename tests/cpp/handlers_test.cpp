// One frame in, frames out: no socket, no thread.
#include "support/handlers_rig.hpp"

#include "paramwire/base/crc.hpp"

#include <gtest/gtest.h>

namespace paramwire {
namespace {

using testing::Answer;

class HandlersTest : public testing::HandlersRig {};

TEST_F(HandlersTest, TheFirstFrameMustBeHello) {
  ServerSession session(1, false);
  EXPECT_FALSE(feed(session, encode_empty(FrameType::kStat, 9)));
  const auto answer = one(session);
  EXPECT_EQ(answer.header.request, 9U);
  EXPECT_EQ(error_of(answer), Code::kInvalid);
}

TEST_F(HandlersTest, WelcomeTellsIncarnationEpochAndThatNothingIsPublished) {
  ServerSession session(1, false);
  const auto answer = ask(session, HelloMessage{{1, 2}, 77}.encode(3));
  const auto welcome = WelcomeMessage::decode(answer.meta);
  ASSERT_TRUE(welcome.ok());
  EXPECT_EQ(welcome->incarnation, (Incarnation{5, 6}));
  EXPECT_EQ(welcome->epoch, store_->epoch());
  EXPECT_FALSE(welcome->newest);
  EXPECT_EQ(welcome->host_id, "host");
  EXPECT_EQ(session.peer_pid(), 77U);
}

TEST_F(HandlersTest, ABodyWhereNoneBelongsClosesTheConnectionWithAReason) {
  ServerSession session = greeted();
  Bytes frame;
  append_frame(frame, FrameType::kStat, 4, {}, 100);
  EXPECT_FALSE(feed(session, frame));
  EXPECT_EQ(error_of(one(session)), Code::kInvalid);
}

TEST_F(HandlersTest, FramesThatAreNotRequestsAreRefusedAndTheConnectionLives) {
  ServerSession session = greeted();
  for (const FrameType type : {FrameType::kWelcome, FrameType::kData, FrameType::kOk, static_cast<FrameType>(200)}) {
    EXPECT_EQ(error_of(ask(session, encode_empty(type, 4))), Code::kInvalid);
  }
  EXPECT_EQ(ask(session, encode_empty(FrameType::kStat, 5)).type(), FrameType::kStats);
}

TEST_F(HandlersTest, AMetaThatDoesNotDecodeClosesTheConnection) {
  for (const FrameType type : {FrameType::kSnapshot, FrameType::kGet, FrameType::kRenew, FrameType::kRelease, FrameType::kFinish, FrameType::kAbort,
                               FrameType::kAlias, FrameType::kRemove, FrameType::kPublishStart, FrameType::kArena, FrameType::kPut}) {
    ServerSession session = greeted();
    EXPECT_FALSE(feed(session, encode_empty(type, 4))) << frame_type_name(type);
    EXPECT_EQ(error_of(one(session)), Code::kCorrupt) << frame_type_name(type);
  }
}

TEST_F(HandlersTest, APublishOverFramesCanBeFetchedBackInAnyPieces) {
  ServerSession session = greeted();
  Bytes content(3 * kExtentBytes / 2);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 31 >> 3);
  const PublishId id = start(session);
  ASSERT_TRUE(feed(session, put_frame(id, "w", content.size(), content), 777));
  const auto done = PutDoneMessage::decode(one(session).meta);
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->crc64, crc64(content));
  const auto published = ask(session, PublishIdMessage{id, {}}.encode(FrameType::kFinish, 30));
  const Version version = PublishedMessage::decode(published.meta)->version;
  EXPECT_TRUE(handlers_->take_published());
  EXPECT_FALSE(handlers_->take_published());

  GetMessage get;
  get.block = block_id("w", Shard::whole());
  get.version = version;
  get.incarnation = {5, 6};
  get.range = {kExtentBytes, kExtentBytes / 2};
  get.extent_table = true;
  const auto answer = ask(session, get.encode(40));
  const auto data = DataMessage::decode(answer.meta);
  ASSERT_TRUE(data.ok());
  EXPECT_EQ(data->stored_size, content.size());
  EXPECT_EQ(data->extent_table.size(), 16U);
  EXPECT_TRUE(std::equal(answer.body.begin(), answer.body.end(), content.begin() + kExtentBytes));
  get.range.size += 1;
  EXPECT_EQ(error_of(ask(session, get.encode(41))), Code::kInvalid) << "one byte too far";
  get.range = {};
  get.incarnation = {5, 7};
  EXPECT_EQ(error_of(ask(session, get.encode(42))), Code::kStale);
}

TEST_F(HandlersTest, APutOfTheWrongSizeIsRefusedAfterItsBodyAndTheConnectionLives) {
  ServerSession session = greeted();
  const PublishId id = start(session);
  EXPECT_EQ(error_of(ask(session, put_frame(id, "w", 100, bytes(99, 1)))), Code::kInvalid);
  EXPECT_EQ(store_->stats().slots_in_use, 0U);
  EXPECT_EQ(ask(session, put_frame(id, "w", 100, bytes(100, 1))).type(), FrameType::kPutDone);
}

TEST_F(HandlersTest, AnErrorForAnUnknownPublishDropsTheBodyAndKeepsTheOrderOfAnswers) {
  ServerSession session = greeted();
  Bytes frames = put_frame({9, 9}, "w", 100'000, bytes(100'000, 1), 21);
  const Bytes stat = encode_empty(FrameType::kStat, 22);
  frames.insert(frames.end(), stat.begin(), stat.end());
  ASSERT_TRUE(feed(session, frames));
  const auto all = answers(session);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].header.request, 21U);
  EXPECT_EQ(error_of(all[0]), Code::kStale);
  EXPECT_EQ(all[1].type(), FrameType::kStats);
}

TEST_F(HandlersTest, AnEmptyBlockIsPutWithoutABody) {
  ServerSession session = greeted();
  const PublishId id = start(session);
  const auto answer = ask(session, put_frame(id, "empty", 0, {}));
  ASSERT_EQ(answer.type(), FrameType::kPutDone);
  EXPECT_EQ(PutDoneMessage::decode(answer.meta)->crc64, 0U);
}

TEST_F(HandlersTest, APublishAbortedWhileABodyArrivesAnswersStaleAndLeaksNothing) {
  ServerSession session = greeted(), other = greeted(2);
  const PublishId id = start(session);
  const Bytes frame = put_frame(id, "w", 10'000, bytes(10'000, 1));
  FrameParser parser;
  const auto half = [&](std::size_t from, std::size_t to) {
    const auto on_event = [&](FrameParser::Event event) { return testing::handle(*handlers_, session, parser, event, now_); };
    ASSERT_TRUE(testing::feed(parser, std::span(frame).subspan(from, to - from), on_event));
  };
  half(0, 5000);
  EXPECT_EQ(ask(other, PublishIdMessage{id, {}}.encode(FrameType::kAbort, 5)).type(), FrameType::kOk);
  half(5000, frame.size());
  EXPECT_EQ(error_of(one(session)), Code::kStale);
  EXPECT_EQ(store_->stats().slots_in_use, 0U);
}

TEST_F(HandlersTest, AConnectionThatDiesCancelsItsPutAndLetsItsAnswersGo) {
  ServerSession session = greeted();
  const Version v1 = publish(session, "w", bytes(1000, 1));
  GetMessage get;
  get.block = block_id("w", Shard::whole());
  get.version = v1;
  get.incarnation = {5, 6};
  get.range = {0, 1000};
  ASSERT_TRUE(feed(session, get.encode(40)));
  for (std::uint8_t i = 2; i < 6; ++i) {
    ServerSession other = greeted(i);
    publish(other, "w", bytes(1000, i));
  }
  EXPECT_EQ(store_->stats().slots_in_use, 4U) << "three retained, one in the answer that was not sent";
  EXPECT_EQ(session.outgoing.front().body[0], std::byte{1});
  const PublishId id = start(*std::make_unique<ServerSession>(greeted(9)));
  Bytes frame = put_frame(id, "x", 5000, bytes(5000, 1));
  frame.resize(frame.size() - 1);
  ASSERT_TRUE(feed(session, frame));
  handlers_->on_closed(session, now_);
  handlers_->tick(now_);
  EXPECT_EQ(store_->stats().slots_in_use, 3U);
  EXPECT_EQ(store_->stats().publishes_open, 1U) << "the publish waits for its client to come back";
}

TEST_F(HandlersTest, ProgressOfALongPutKeepsItsPublishOpen) {
  ServerSession session = greeted();
  const PublishId id = start(session);
  Bytes frame = put_frame(id, "x", 5000, bytes(5000, 1));
  frame.resize(frame.size() - 1);
  ASSERT_TRUE(feed(session, frame));
  for (now_ = 500; now_ <= 3000; now_ += 500) {
    handlers_->on_progress(session, now_);
    handlers_->tick(now_);
  }
  EXPECT_EQ(store_->stats().publishes_open, 1U);
  now_ += 1000;
  handlers_->tick(now_);
  EXPECT_EQ(store_->stats().publishes_open, 0U);
}

TEST_F(HandlersTest, SnapshotsAreDeltasOnlyForWhoProvesWhatItHolds) {
  ServerSession session = greeted();
  const Version v1 = publish(session, "a", bytes(100, 1));
  SnapshotMessage want;
  want.locators = true;
  const auto whole = ask(session, want.encode(50));
  const auto first = ManifestMessage::decode(whole.meta);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->locator_count, 1U);
  EXPECT_EQ(first->lease, 0U);
  const auto held = Manifest::apply_delta(nullptr, std::span(whole.body).first(static_cast<std::size_t>(first->stream_size)), [](std::size_t) { return 0U; });
  ASSERT_TRUE(held.ok()) << held.error().to_string();
  EXPECT_EQ(held->version(), v1);

  publish(session, "b", bytes(100, 2));
  want.held = v1;
  want.held_root = held->root();
  want.lease_ttl_ms = 10;
  const auto delta = ask(session, want.encode(51));
  const auto second = ManifestMessage::decode(delta.meta);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->locator_count, 1U) << "only what was added";
  EXPECT_NE(second->lease, 0U);
  EXPECT_EQ(second->lease_ttl_ms, 10U);
  const auto next = Manifest::apply_delta(&*held, std::span(delta.body).first(static_cast<std::size_t>(second->stream_size)), [](std::size_t) { return 0U; });
  ASSERT_TRUE(next.ok()) << next.error().to_string();
  EXPECT_EQ(next->entry_count(), 2U);
  want.held_root[0] ^= std::byte{1};
  EXPECT_EQ(ManifestMessage::decode(ask(session, want.encode(52)).meta)->locator_count, 2U) << "another root: everything";
}

TEST_F(HandlersTest, ASnapshotThatIsNotThereYetIsWaitedForOrTimesOut) {
  ServerSession waiting = greeted(), publisher = greeted(2);
  SnapshotMessage want;
  want.wait_ms = 1;
  for (const std::uint64_t request : {60U, 61U}) ASSERT_TRUE(feed(waiting, want.encode(request)));
  EXPECT_TRUE(waiting.outgoing.empty());
  EXPECT_EQ(error_of(ask(waiting, want.encode(62))), Code::kBackpressure) << "waits_max";
  handlers_->answer_waits({&waiting}, 999);
  EXPECT_TRUE(waiting.outgoing.empty());
  publish(publisher, "a", bytes(10, 1));
  handlers_->answer_waits({&waiting}, 999);
  EXPECT_EQ(answers(waiting).size(), 2U);
  want.want = Version{store_->epoch(), 9};
  ASSERT_TRUE(feed(waiting, want.encode(63)));
  handlers_->answer_waits({&waiting}, 1000);
  EXPECT_EQ(error_of(one(waiting)), Code::kStale);
}

TEST_F(HandlersTest, LeasesAreRenewedAndReleasedByFrames) {
  ServerSession session = greeted();
  publish(session, "a", bytes(10, 1));
  SnapshotMessage want;
  want.lease_ttl_ms = 5;
  const LeaseId lease = ManifestMessage::decode(ask(session, want.encode(70)).meta)->lease;
  EXPECT_EQ(ask(session, LeaseMessage{lease, 5}.encode(FrameType::kRenew, 71)).type(), FrameType::kOk);
  EXPECT_EQ(ask(session, LeaseMessage{lease, 0}.encode(FrameType::kRelease, 72)).type(), FrameType::kOk);
  EXPECT_EQ(ask(session, LeaseMessage{lease, 0}.encode(FrameType::kRelease, 73)).type(), FrameType::kOk) << "the wish is met";
  EXPECT_EQ(error_of(ask(session, LeaseMessage{lease, 5}.encode(FrameType::kRenew, 74))), Code::kStale);
}

TEST_F(HandlersTest, ArenasAndPinsNeedAUnixSocket) {
  ServerSession session = greeted();
  EXPECT_EQ(error_of(ask(session, ArenaMessage{}.encode(FrameType::kArena, 80))), Code::kUnavailable);
  EXPECT_EQ(error_of(ask(session, encode_empty(FrameType::kPins, 81))), Code::kUnavailable);
}

TEST_F(HandlersTest, NamesTravelThroughAliasAndRemove) {
  ServerSession session = greeted();
  const PublishId id = start(session);
  ASSERT_EQ(ask(session, put_frame(id, "a", 10, bytes(10, 1))).type(), FrameType::kPutDone);
  EXPECT_EQ(ask(session, NameMessage{id, "b", "a"}.encode(FrameType::kAlias, 90)).type(), FrameType::kOk);
  EXPECT_EQ(error_of(ask(session, NameMessage{id, "c", ""}.encode(FrameType::kRemove, 91))), Code::kNotFound);
  EXPECT_EQ(ask(session, NameMessage{id, "b", ""}.encode(FrameType::kRemove, 92)).type(), FrameType::kOk);
  EXPECT_EQ(ask(session, PublishIdMessage{id, {}}.encode(FrameType::kFinish, 93)).type(), FrameType::kPublished);
  EXPECT_EQ(store_->stats().blocks, 1U);
  EXPECT_EQ(ask(session, PublishIdMessage{id, {}}.encode(FrameType::kFinish, 94)).type(), FrameType::kPublished) << "the reply was lost";
}

}  // namespace
}  // namespace paramwire
