// A server's handlers without its edge: whole frames in, answers out. For tests of what a server says.
#pragma once

#include "paramwire/server/handlers.hpp"
#include "paramwire/store/memory_tier.hpp"
#include "support/frame_feed.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace paramwire::testing {

struct Answer {
  FrameHeader header{};
  Bytes meta;
  Bytes body;
  FrameType type() const { return static_cast<FrameType>(header.type); }
};

class HandlersRig : public ::testing::Test {
 protected:
  explicit HandlersRig(VerbsDoor* verbs = nullptr) {
    TierOptions tier;
    tier.arena_bytes = std::uint64_t{8} << 20;
    tier.limit_bytes = std::uint64_t{4} << 20;
    tier_ = *MemoryTier::open(MemoryTier::Backing::kPrivate, tier);
    coordinator_ = *open_coordinator("memory");
    BlockStoreOptions options;
    options.incarnation = {5, 6};
    options.epoch = coordinator_->epoch();
    options.publish_idle_max = 1000;
    store_ = std::make_unique<BlockStore>(*tier_, nullptr, options);
    HandlerOptions handler;
    handler.host_id = "host";
    handler.waits_max = 2;
    handler.verbs = verbs;
    handler.random = [this] { return Result<std::uint64_t>(++random_); };
    handlers_ = std::make_unique<Handlers>(*store_, *tier_, *coordinator_, nullptr, handler);
  }

  // Runs the bytes of whole frames through a parser and the handlers, as an edge does. False: the connection must close.
  bool feed(ServerSession& session, std::span<const std::byte> bytes, std::size_t step = 4096) {
    FrameParser parser;
    return testing::feed(parser, bytes, [&](FrameParser::Event event) { return testing::handle(*handlers_, session, parser, event, now_); }, step);
  }
  std::vector<Answer> answers(ServerSession& session) {
    std::vector<Answer> out;
    while (!session.outgoing.empty()) {
      const Outgoing& front = session.outgoing.front();
      Answer answer;
      std::memcpy(&answer.header, front.head.data(), sizeof answer.header);
      answer.meta.assign(front.head.begin() + sizeof answer.header, front.head.end());
      answer.body.assign(front.body.begin(), front.body.end());
      EXPECT_EQ(verify(answer.header), nullptr);
      EXPECT_EQ(answer.body.size(), answer.header.body_size);
      handlers_->sent(front, now_);
      session.outgoing.pop_front();
      out.push_back(std::move(answer));
    }
    return out;
  }
  Answer one(ServerSession& session) {
    auto all = answers(session);
    EXPECT_EQ(all.size(), 1U);
    return all.empty() ? Answer{} : std::move(all.front());
  }
  Answer ask(ServerSession& session, const Bytes& frame) {
    EXPECT_TRUE(feed(session, frame));
    return one(session);
  }
  Code error_of(const Answer& answer) {
    EXPECT_EQ(answer.type(), FrameType::kError);
    const auto message = ErrorMessage::decode(answer.meta);
    return message.ok() ? message->code : Code::kInternal;
  }
  ServerSession greeted(std::uint64_t connection = 1) {
    ServerSession session(connection, false);
    EXPECT_EQ(ask(session, HelloMessage{{1, 2}, 77}.encode(1)).type(), FrameType::kWelcome);
    return session;
  }
  PublishId start(ServerSession& session) {
    const auto answer = ask(session, PublishStartMessage{}.encode(10));
    EXPECT_EQ(answer.type(), FrameType::kPublishId);
    return PublishIdMessage::decode(answer.meta)->publish;
  }
  static Bytes put_frame(PublishId id, std::string_view tensor, std::uint64_t declared, const Bytes& body, std::uint64_t request = 20) {
    PutMessage put;
    put.publish = id;
    put.tensor = tensor;
    put.shape = Shape{declared};
    Bytes frame = put.encode(request, body.size());
    frame.insert(frame.end(), body.begin(), body.end());
    return frame;
  }
  Version publish(ServerSession& session, std::string_view tensor, const Bytes& body) {
    const PublishId id = start(session);
    EXPECT_EQ(ask(session, put_frame(id, tensor, body.size(), body)).type(), FrameType::kPutDone);
    const auto done = ask(session, PublishIdMessage{id, {}}.encode(FrameType::kFinish, 30));
    EXPECT_EQ(done.type(), FrameType::kPublished);
    return PublishedMessage::decode(done.meta)->version;
  }
  static Bytes bytes(std::size_t size, std::uint8_t fill) { return Bytes(size, std::byte{fill}); }

  std::unique_ptr<Tier> tier_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<BlockStore> store_;
  std::unique_ptr<Handlers> handlers_;
  Micros now_ = 0;
  std::uint64_t random_ = 0;
};

}  // namespace paramwire::testing
