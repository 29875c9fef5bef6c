// Control and tcp links against servers that lie, break off, or fall silent in the middle.
#include "support/rig.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/net/control_link.hpp"
#include "paramwire/net/tcp_link.hpp"
#include "paramwire/wire/frame.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <optional>
#include <poll.h>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

constexpr ClientId kClient{11, 12};
constexpr Incarnation kIncarnation{77, 78};
constexpr std::size_t kSize = 100'000;

// A server of one connection. It answers HELLO, and every other frame with what `script` makes of it; nullopt closes. It keeps
// the connection open until the peer leaves otherwise.
class ScriptedServer {
 public:
  using Script = std::function<std::optional<Bytes>(const FrameHeader& header)>;
  explicit ScriptedServer(Script script) : listener_(must(Listener::open(Endpoint::unix_socket(directory_.path() + "/s")))), script_(std::move(script)) {
    thread_ = std::thread([this] { run(); });
  }
  ~ScriptedServer() {
    over_ = true;
    thread_.join();
  }
  const Endpoint& endpoint() const { return listener_.endpoint(); }

  static Bytes welcome(std::uint64_t request) {
    WelcomeMessage message;
    message.incarnation = kIncarnation;
    message.epoch = 1;
    return message.encode(request);
  }

 private:
  void run() {
    std::optional<Socket> client;
    while (!client && !over_) {
      auto accepted = listener_.try_accept();
      if (accepted.ok() && *accepted) client = std::move(**accepted);
      else std::this_thread::yield();
    }
    FrameHeader header{};
    Bytes rest;
    while (client && client->receive_all(std::as_writable_bytes(std::span(&header, 1)), in_seconds(30)).ok()) {
      rest.resize(header.meta_size);
      if (!client->receive_all(rest, in_seconds(30)).ok()) return;
      const bool hello = static_cast<FrameType>(header.type) == FrameType::kHello;
      const auto answer = hello ? std::optional(welcome(header.request)) : script_(header);
      if (!answer || !client->send_all(*answer, in_seconds(30)).ok()) return;
    }
  }

  TemporaryDirectory directory_;
  Listener listener_;
  Script script_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

ManifestEntry entry_of(const Bytes& bytes) {
  ManifestEntry entry;
  entry.id = block_id("w", Shard::whole());
  entry.tensor = "w";
  entry.version = {1, 1};
  entry.raw_size = entry.stored_size = bytes.size();
  entry.crc64 = crc64(bytes);
  return entry;
}

// DATA as an honest server would send it, for `spoil` to change.
Bytes data_frame(std::uint64_t request, const Bytes& bytes, const std::function<void(DataMessage&)>& spoil = {}) {
  DataMessage data;
  data.block = block_id("w", Shard::whole());
  data.version = {1, 1};
  data.incarnation = kIncarnation;
  data.stored_size = bytes.size();
  data.range = {0, bytes.size()};
  if (spoil) spoil(data);
  return data.encode(request);
}

struct ReadOutcome {
  Status status;
  bool broken = false;
  Bytes target;
};
ReadOutcome read_from(ScriptedServer::Script script, const Bytes& bytes, Micros deadline = in_seconds(20)) {
  const ScriptedServer server(std::move(script));
  const auto link = must(TcpLink::connect(server.endpoint(), kClient, kIncarnation, {}, in_seconds(10)));
  ReadOutcome out;
  out.target.resize(bytes.size());
  BlockRead item{entry_of(bytes), {}, {0, bytes.size()}, out.target, {}};
  link->read({&item, 1}, deadline);
  out.status = item.result;
  out.broken = link->broken();
  return out;
}

TEST(TcpLink, AnHonestAnswerOfTheScriptIsTaken) {
  const Bytes bytes = random_bytes(kSize, 1);
  const auto out = read_from([&](const FrameHeader& header) {
    Bytes frame = data_frame(header.request, bytes);
    frame.insert(frame.end(), bytes.begin(), bytes.end());
    return std::optional(frame);
  }, bytes);
  EXPECT_TRUE(out.status.ok()) << out.status.error().to_string();
  EXPECT_EQ(out.target, bytes);
}

TEST(TcpLink, AServerThatClosesMidBlockIsUnreachable) {
  const Bytes bytes = random_bytes(kSize, 1);
  for (const std::size_t sent : {std::size_t{0}, std::size_t{1}, kSize / 2, kSize - 1}) {
    bool first = true;
    // The half answer goes out with the first question; the second is never answered.
    const ScriptedServer server([&](const FrameHeader& header) -> std::optional<Bytes> {
      if (!std::exchange(first, false)) return std::nullopt;
      Bytes frame = data_frame(header.request, bytes);
      frame.insert(frame.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(sent));
      return frame;
    });
    const auto link = must(TcpLink::connect(server.endpoint(), kClient, kIncarnation, {}, in_seconds(10)));
    Bytes a(kSize), b(kSize);
    std::vector<BlockRead> batch = {{entry_of(bytes), {}, {0, kSize}, a, {}}, {entry_of(bytes), {}, {0, kSize}, b, {}}};
    link->read(batch, in_seconds(20));
    for (const BlockRead& item : batch) {
      ASSERT_FALSE(item.result.ok());
      EXPECT_EQ(item.result.error().code(), Code::kUnreachable) << item.result.error().to_string();
    }
    EXPECT_TRUE(link->broken());
  }
}

TEST(TcpLink, AServerThatFallsSilentMidBlockIsATimeout) {
  const Bytes bytes = random_bytes(kSize, 1);
  const auto out = read_from([&](const FrameHeader& header) { return std::optional(data_frame(header.request, bytes)); }, bytes, steady_clock().now() + 50'000);
  EXPECT_EQ(out.status.error().code(), Code::kTimeout);
  EXPECT_TRUE(out.broken);
}

TEST(TcpLink, LiesInTheAnswerAreNeverTakenForTheBlock) {
  const Bytes bytes = random_bytes(kSize, 1);
  struct Row {
    const char* name;
    Code code;
    bool broken;
    std::function<void(DataMessage&)> spoil;
  };
  const Row rows[] = {
      {"other block", Code::kStale, false, [](DataMessage& d) { d.block.value ^= 1; }},
      {"other counter", Code::kStale, false, [](DataMessage& d) { d.version.counter = 2; }},
      {"other epoch", Code::kStale, false, [](DataMessage& d) { d.version.epoch = 2; }},
      {"other incarnation", Code::kStale, false, [](DataMessage& d) { d.incarnation.low ^= 1; }},
      {"other stored size", Code::kStale, false, [](DataMessage& d) { d.stored_size += 1; }},
      {"other range", Code::kStale, false, [](DataMessage& d) { d.range = {1, d.range.size - 1}; }},
      {"range past the block", Code::kCorrupt, true, [](DataMessage& d) { d.range.size += 1; }},
  };
  for (const Row& row : rows) {
    const auto out = read_from([&](const FrameHeader& header) {
      Bytes frame = data_frame(header.request, bytes, row.spoil);
      FrameHeader sent{};
      std::memcpy(&sent, frame.data(), sizeof sent);
      frame.resize(frame.size() + static_cast<std::size_t>(sent.body_size));
      return std::optional(frame);
    }, bytes);
    ASSERT_FALSE(out.status.ok()) << row.name;
    EXPECT_EQ(out.status.error().code(), row.code) << row.name << ": " << out.status.error().to_string();
    EXPECT_EQ(out.broken, row.broken) << row.name;
    EXPECT_EQ(out.target, Bytes(kSize)) << row.name;  // not one byte of it
  }
}

TEST(TcpLink, AnswersToOtherQuestionsBreakTheLink) {
  const Bytes bytes = random_bytes(kSize, 1);
  const std::function<Bytes(std::uint64_t)> answers[] = {
      [&](std::uint64_t request) { return data_frame(request + 1, bytes); },
      [](std::uint64_t request) { return encode_empty(FrameType::kOk, request); },
      [](std::uint64_t request) { return ScriptedServer::welcome(request); },
      [](std::uint64_t) { return random_bytes(500, 3); },
  };
  for (const auto& answer : answers) {
    const auto out = read_from([&](const FrameHeader& header) { return std::optional(answer(header.request)); }, bytes);
    EXPECT_EQ(out.status.error().code(), Code::kCorrupt) << out.status.error().to_string();
    EXPECT_TRUE(out.broken);
  }
}

TEST(TcpLink, AnotherIncarnationIsStaleAtConnect) {
  const ScriptedServer server([](const FrameHeader&) { return std::nullopt; });
  EXPECT_EQ(TcpLink::connect(server.endpoint(), kClient, {1, 1}, {}, in_seconds(10)).error().code(), Code::kStale);
}

// ---------------------------------------------------------------- control link

Result<ControlLink::Answer> ask(ScriptedServer::Script script, bool* broken = nullptr) {
  const ScriptedServer server(std::move(script));
  const auto link = must(ControlLink::connect(server.endpoint(), kClient, in_seconds(10)));
  const std::uint64_t request = link->next_request();
  auto answer = link->call(encode_empty(FrameType::kStat, request), request, FrameType::kStats, in_seconds(20));
  if (broken != nullptr) *broken = link->broken();
  const std::string text = answer.ok() ? server.endpoint().to_string() : answer.error().message();
  EXPECT_NE(text.find(server.endpoint().to_string()), std::string::npos) << text;
  return answer;
}

// An answer whose header announces `body` bytes.
Bytes stats_with_body(std::uint64_t request, std::uint64_t body) {
  Bytes out;
  append_frame(out, FrameType::kStats, request, {}, body);
  return out;
}

TEST(ControlLink, BodiesArriveWholeAndOverTheLimitAreRefused) {
  constexpr std::size_t kBody = (std::size_t{5} << 20) + 3;
  const Bytes body = random_bytes(kBody, 1);
  const auto answer = ask([&](const FrameHeader& header) {
    Bytes frame = stats_with_body(header.request, kBody);
    frame.insert(frame.end(), body.begin(), body.end());
    return std::optional(frame);
  });
  EXPECT_EQ(must(Result<Bytes>(answer.ok() ? Result<Bytes>(answer->body) : Result<Bytes>(answer.error()))), body);
  EXPECT_EQ(ask([](const FrameHeader& header) { return std::optional(stats_with_body(header.request, (std::uint64_t{1} << 30) + 1)); }).error().code(), Code::kCorrupt);
}

TEST(ControlLink, ADeclaredGigabyteThatNeverComesCostsNoMemory) {
  const auto resident_pages = [] {
    std::ifstream statm("/proc/self/statm");
    std::uint64_t size = 0, resident = 0;
    statm >> size >> resident;
    return resident;
  };
  const std::uint64_t before = resident_pages();
  bool first = true;
  const ScriptedServer server([&](const FrameHeader& header) -> std::optional<Bytes> {
    if (!std::exchange(first, false)) return std::nullopt;
    return stats_with_body(header.request, std::uint64_t{1} << 30);
  });
  const auto link = must(ControlLink::connect(server.endpoint(), kClient, in_seconds(10)));
  const std::uint64_t request = link->next_request();
  const auto answer = link->call(encode_empty(FrameType::kStat, request), request, steady_clock().now() + 50'000);
  EXPECT_EQ(answer.error().code(), Code::kTimeout);
  EXPECT_LT(resident_pages() - std::min(before, resident_pages()), (std::uint64_t{64} << 20) / 4096);
}

TEST(ControlLink, AnErrorIsTheServersWithItsNameAndTheLinkGoesOn) {
  bool broken = true;
  const auto answer = ask([](const FrameHeader& header) {
    ErrorMessage message;
    message.code = Code::kStale;
    message.text = "that version is gone";
    return std::optional(message.encode(header.request));
  }, &broken);
  EXPECT_EQ(answer.error().code(), Code::kStale);
  EXPECT_NE(answer.error().message().find(": that version is gone"), std::string::npos);
  EXPECT_FALSE(broken);
}

TEST(ControlLink, AnswersThatCannotBeTrustedBreakIt) {
  const std::function<std::optional<Bytes>(std::uint64_t)> answers[] = {
      [](std::uint64_t request) { return std::optional(encode_empty(FrameType::kStats, request + 1)); },
      [](std::uint64_t) { return std::optional(random_bytes(100, 1)); },
      [](std::uint64_t request) {
        Bytes frame = ScriptedServer::welcome(request);
        frame.back() ^= std::byte{1};
        return std::optional(frame);
      },
  };
  for (const auto& answer : answers) {
    bool broken = false;
    EXPECT_EQ(ask([&](const FrameHeader& header) { return answer(header.request); }, &broken).error().code(), Code::kCorrupt);
    EXPECT_TRUE(broken);
  }
  bool broken = false;
  EXPECT_EQ(ask([](const FrameHeader&) { return std::nullopt; }, &broken).error().code(), Code::kUnreachable);
  EXPECT_TRUE(broken);
}

// Three calls behind one that fails: each must hear of it at once. One that is not woken would end with kTimeout, at its deadline.
TEST(ControlLink, EveryCallThatWaitsItsTurnHearsOfTheBreak) {
  std::atomic<bool> asked{false};
  std::atomic<bool> hang_up{false};
  const ScriptedServer server([&](const FrameHeader&) -> std::optional<Bytes> {
    asked = true;
    while (!hang_up) std::this_thread::yield();
    return std::nullopt;
  });
  const auto link = must(ControlLink::connect(server.endpoint(), kClient, in_seconds(10)));
  std::atomic<int> calling{0};
  const auto call = [&](Micros deadline) {
    const std::uint64_t request = link->next_request();
    const Bytes frame = encode_empty(FrameType::kStat, request);
    ++calling;
    EXPECT_EQ(link->call(frame, request, deadline).error().code(), Code::kUnreachable);
  };
  std::vector<std::thread> callers;
  callers.emplace_back(call, in_seconds(60));
  while (!asked) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) callers.emplace_back(call, in_seconds(20));
  while (calling < 4) std::this_thread::yield();
  hang_up = true;
  for (std::thread& caller : callers) caller.join();
}

TEST(ControlLink, CloseWakesACallThatWaits) {
  std::atomic<bool> asked{false};
  const ScriptedServer server([&](const FrameHeader&) {
    asked = true;
    return std::optional(Bytes());
  });
  const auto link = must(ControlLink::connect(server.endpoint(), kClient, in_seconds(10)));
  std::thread caller([&] {
    const std::uint64_t request = link->next_request();
    EXPECT_EQ(link->call(encode_empty(FrameType::kStat, request), request, in_seconds(60)).error().code(), Code::kUnreachable);
  });
  while (!asked) std::this_thread::yield();
  link->close();
  caller.join();
}

}  // namespace
}  // namespace paramwire
