// The server's edge against clients that misbehave, stand still, or are too many.
#include "support/rig.hpp"

#include "paramwire/base/bytes.hpp"
#include "paramwire/net/tcp_link.hpp"
#include "paramwire/wire/frame.hpp"

#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

constexpr ClientId kClient{9, 10};

// A connection that can say anything.
class RawClient {
 public:
  explicit RawClient(const Endpoint& endpoint) : socket_(must(Socket::connect(endpoint, in_seconds(10)))) {}
  void hello() {
    send(HelloMessage{kClient, 1}.encode(1));
    EXPECT_EQ(answer().type, FrameType::kWelcome);
  }
  void send(std::span<const std::byte> bytes) { must(socket_.send_all(bytes, in_seconds(10))); }
  struct Answer {
    FrameType type = FrameType::kOk;
    std::uint64_t request = 0;
    Bytes meta;
    std::uint64_t body_size = 0;
  };
  Answer answer() {
    FrameHeader header{};
    must(socket_.receive_all(std::as_writable_bytes(std::span(&header, 1)), in_seconds(20)));
    Answer out{static_cast<FrameType>(header.type), header.request, Bytes(header.meta_size), header.body_size};
    must(socket_.receive_all(out.meta, in_seconds(20)));
    return out;
  }
  // The next thing is an ERROR with `code`, then the end of the connection.
  void expect_error_and_end(Code code) {
    const Answer error = answer();
    ASSERT_EQ(error.type, FrameType::kError);
    EXPECT_EQ(must(ErrorMessage::decode(error.meta)).code, code) << must(ErrorMessage::decode(error.meta)).text;
    expect_end();
  }
  void expect_end() {
    std::byte more{};
    EXPECT_EQ(socket_.receive({&more, 1}, in_seconds(20)).error().code(), Code::kUnreachable);
  }
  Socket& socket() { return socket_; }

 private:
  Socket socket_;
};

Bytes get_frame(const Rig& rig, std::string_view tensor, Version version, std::uint64_t size, std::uint64_t request) {
  GetMessage get;
  get.block = block_id(tensor, Shard::whole());
  get.version = version;
  get.incarnation = rig.server->incarnation();
  get.range = {0, size};
  return get.encode(request);
}

bool serves(const Rig& rig) { return ControlLink::connect(rig.unix_endpoint(), kClient, in_seconds(20)).ok(); }

TEST(Server, GarbageGetsOneErrorAndTheDoor) {
  Rig rig;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    RawClient client(seed % 2 == 0 ? rig.tcp_endpoint() : rig.unix_endpoint());
    client.send(random_bytes(4096, seed));
    client.expect_error_and_end(Code::kCorrupt);
  }
  EXPECT_EQ(must(rig.server->stats()).closed_for_protocol, 20U);
  EXPECT_TRUE(serves(rig));
}

TEST(Server, EveryFlippedBitOfAFrameIsRefused) {
  Rig rig;
  const Bytes hello = HelloMessage{kClient, 1}.encode(1);
  for (std::size_t bit = 0; bit < hello.size() * 8; bit += 7) {
    RawClient client(rig.unix_endpoint());
    Bytes frame = hello;
    frame[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    client.send(frame);
    client.expect_error_and_end(Code::kCorrupt);
  }
}

TEST(Server, DeclaredSizesBeyondTheLimitAreRefusedBeforeAnythingIsAllocated) {
  Rig rig;
  const auto header_with = [](FrameType type, std::uint32_t meta, std::uint64_t body) {
    FrameHeader header{};
    header.magic = kFrameMagic;
    header.protocol = kProtocolVersion;
    header.type = static_cast<std::uint8_t>(type);
    header.request = 7;
    header.meta_size = meta;
    header.body_size = body;
    header.header_crc = frame_header_crc(header);
    Bytes out(sizeof header);
    std::memcpy(out.data(), &header, sizeof header);
    return out;
  };
  {
    RawClient client(rig.tcp_endpoint());
    client.hello();
    client.send(header_with(FrameType::kSnapshot, kMaxMetaBytes + 1, 0));
    client.expect_error_and_end(Code::kCorrupt);
  }
  {
    RawClient client(rig.tcp_endpoint());
    client.hello();
    client.send(header_with(FrameType::kStat, 0, std::uint64_t{1} << 50));
    client.expect_error_and_end(Code::kInvalid);  // STAT has no body
  }
  const std::uint64_t before = must(rig.server->stats()).store.committed_bytes;
  RawClient client(rig.tcp_endpoint());
  client.hello();
  client.send(PublishStartMessage{}.encode(2));
  const auto id = must(PublishIdMessage::decode(client.answer().meta)).publish;
  PutMessage put;
  put.publish = id;
  put.tensor = "w";
  put.shape = Shape{std::uint64_t{1} << 47};
  client.send(put.encode(3, std::uint64_t{1} << 47));
  client.send(Bytes(1000));  // far less than was declared
  EXPECT_EQ(must(rig.server->stats()).store.committed_bytes, before);
  EXPECT_TRUE(serves(rig));
}

TEST(Server, AFirstFrameOtherThanHelloEndsTheConnection) {
  Rig rig;
  RawClient client(rig.tcp_endpoint());
  client.send(encode_empty(FrameType::kStat, 5));
  client.expect_error_and_end(Code::kInvalid);
}

TEST(Server, FramesInPiecesOfOneByteAreFramesAllTheSame) {
  Rig rig;
  RawClient client(rig.tcp_endpoint());
  for (const std::byte byte : HelloMessage{kClient, 1}.encode(1)) client.send({&byte, 1});
  EXPECT_EQ(client.answer().type, FrameType::kWelcome);
}

TEST(Server, AClientThatLeavesMidPutLeavesNoSlotBehind) {
  Rig rig;
  {
    RawClient client(rig.tcp_endpoint());
    client.hello();
    client.send(PublishStartMessage{}.encode(2));
    PutMessage put;
    put.publish = must(PublishIdMessage::decode(client.answer().meta)).publish;
    put.tensor = "w";
    put.shape = Shape{100'000};
    client.send(put.encode(3, 100'000));
    client.send(Bytes(50'000));
    client.send({});
    // Answered by the same loop: the half put was taken in before.
    const auto control = must(ControlLink::connect(rig.unix_endpoint(), kClient, in_seconds(10)));
    while (must(rig.server->stats()).store.slots_in_use == 0) ASSERT_TRUE(serves(rig));
  }
  while (must(rig.server->stats()).connections > 0) std::this_thread::yield();
  EXPECT_EQ(must(rig.server->stats()).store.slots_in_use, 0U);
}

// A reader that asks for much and takes nothing: its requests wait, the server's memory does not grow, others are served,
// and after the time limit its slots are free.
TEST(Server, AClientThatDoesNotReadIsDroppedAndItsSlotsAreFree) {
  ServerOptions options;
  options.send_timeout = 300'000;
  Rig rig(options);
  constexpr std::size_t kSize = std::size_t{4} << 20;
  const Version version = rig.publish({{"w", random_bytes(kSize, 1)}});
  RawClient client(rig.tcp_endpoint());
  client.hello();
  for (std::uint64_t i = 0; i < 200; ++i) client.send(get_frame(rig, "w", version, kSize, i + 2));
  for (std::uint64_t i = 2; i < 6; ++i) rig.publish({{"w", random_bytes(kSize, i)}});
  const auto link = must(TcpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), {}, in_seconds(10)));
  Bytes target(kSize);
  const Snapshot snapshot = rig.snapshot();
  BlockRead item = snapshot.read_of("w", {0, kSize}, target);
  link->read({&item, 1}, in_seconds(20));
  EXPECT_TRUE(item.result.ok());
  while (must(rig.server->stats()).closed_for_stall == 0) std::this_thread::yield();
  rig.publish({{"w", random_bytes(kSize, 7)}});
  EXPECT_LE(must(rig.server->stats()).store.superseded_slots, 2U);  // those of the two older retained versions
}

TEST(Server, AClientThatAsksForMoreThanIsQueuedGetsEveryByte) {
  Rig rig;
  constexpr std::size_t kSize = std::size_t{1} << 20;
  const Bytes bytes = random_bytes(kSize, 1);
  const Version version = rig.publish({{"w", bytes}});
  RawClient client(rig.unix_endpoint());  // whose buffers hold a fifth of a block
  client.hello();
  constexpr std::uint64_t kAsked = 100;  // more than the server queues for one client
  for (std::uint64_t i = 0; i < kAsked; ++i) client.send(get_frame(rig, "w", version, kSize, i + 2));
  for (std::uint64_t i = 0; i < kAsked; ++i) {
    const auto answer = client.answer();
    ASSERT_EQ(answer.type, FrameType::kData);
    ASSERT_EQ(answer.request, i + 2);
    Bytes body(kSize);
    must(client.socket().receive_all(body, in_seconds(30)));
    ASSERT_EQ(body, bytes);
  }
}

TEST(Server, OneConnectionTooManyIsToldWhyAndAPlaceThatIsFreedIsUsed) {
  ServerOptions options;
  options.connections_max = 2;
  Rig rig(options);
  auto first = must(ControlLink::connect(rig.tcp_endpoint(), kClient, in_seconds(10)));
  const auto second = must(ControlLink::connect(rig.unix_endpoint(), kClient, in_seconds(10)));
  for (const Endpoint& endpoint : rig.server->endpoints()) {
    const auto third = ControlLink::connect(endpoint, kClient, in_seconds(10));
    ASSERT_FALSE(third.ok());
    EXPECT_EQ(third.error().code(), Code::kBackpressure) << third.error().message();
  }
  EXPECT_EQ(must(rig.server->stats()).refused, 2U);
  first.reset();
  while (must(rig.server->stats()).connections > 1) std::this_thread::yield();
  EXPECT_TRUE(ControlLink::connect(rig.tcp_endpoint(), kClient, in_seconds(10)).ok());
}

TEST(Server, AnIdleServerStandsStill) {
  Rig rig;
  rig.publish({{"w", random_bytes(100, 1)}});
  ASSERT_TRUE(serves(rig));
  while (must(rig.server->stats()).connections > 0) std::this_thread::yield();
  // The turn after the last client left may still be due; then the loop must wait without end.
  std::uint64_t turns = must(rig.server->stats()).loop_turns;
  for (int quiet = 0; quiet < 3;) {
    pollfd nothing{-1, 0, 0};
    poll(&nothing, 1, 150);  // longer than the loop's tick: what is counted is turns, not time
    const std::uint64_t now = must(rig.server->stats()).loop_turns;
    quiet = now == turns ? quiet + 1 : 0;
    ASSERT_LT(now, 200U);
    turns = now;
  }
}

TEST(Server, ASnapshotThatIsWaitedForIsAnsweredByThePublish) {
  Rig rig;
  RawClient client(rig.tcp_endpoint());
  client.hello();
  SnapshotMessage ask;
  ask.wait_ms = 60'000;
  client.send(ask.encode(2));
  client.send(encode_empty(FrameType::kStat, 3));
  EXPECT_EQ(client.answer().request, 3U);  // the wait blocks nobody
  const Version version = rig.publish({{"w", random_bytes(100, 1)}});
  const auto answer = client.answer();
  EXPECT_EQ(answer.request, 2U);
  EXPECT_EQ(answer.type, FrameType::kManifest);
  static_cast<void>(version);
}

TEST(Server, CloseSendsWhatIsQueuedAndRefusesTheRest) {
  Rig rig;
  constexpr std::size_t kSize = std::size_t{24} << 20;
  const Bytes bytes = random_bytes(kSize, 1);
  const Version version = rig.publish({{"w", bytes}});
  RawClient client(rig.tcp_endpoint());
  client.hello();
  client.send(get_frame(rig, "w", version, kSize, 2));
  const auto head = client.answer();  // under way
  ASSERT_EQ(head.type, FrameType::kData);
  std::thread closing([&] { rig.server->close(20 * kMicrosPerSecond); });
  Bytes body(kSize);
  must(client.socket().receive_all(body, in_seconds(30)));
  EXPECT_EQ(body, bytes);
  client.expect_end();
  closing.join();
  EXPECT_FALSE(serves(rig));
  EXPECT_FALSE(std::filesystem::exists(rig.unix_endpoint().path));
}

TEST(Server, AClosedServersSocketFileAndPortAreFreeAndOptionsAreChecked) {
  TemporaryDirectory directory;
  ServerOptions options;
  options.listen = {cat("unix:", directory.path(), "/s")};
  for (int i = 0; i < 2; ++i) {
    auto server = must(Server::open(options));
    EXPECT_EQ(Server::open(options).error().code(), Code::kUnavailable);
  }
  options.listen = {"0.0.0.0:0"};
  EXPECT_EQ(Server::open(options).error().code(), Code::kInvalid);
  options.listen = {"host:"};
  EXPECT_EQ(Server::open(options).error().code(), Code::kInvalid);
  options.listen = {};
  options.tier = "punched cards";
  EXPECT_EQ(Server::open(options).error().code(), Code::kInvalid);
  options.tier = "memory";
  std::filesystem::permissions(directory.path(), std::filesystem::perms::all);
  options.unix_directory = directory.path();
  EXPECT_EQ(Server::open(options).error().code(), Code::kUnavailable);  // others could replace the socket
}

// ---------------------------------------------------------------- a server process that is stopped

struct ServerProcess {
  explicit ServerProcess(const std::string& path, ServerOptions options) {
    int ends[2] = {-1, -1};
    if (pipe(ends) != 0) return;
    pid = fork();
    if (pid == 0) {
      options.listen = {cat("unix:", path)};
      auto server = Server::open(options);
      if (server.ok()) {
        auto publish = (*server)->publish();
        const Bytes bytes(1000);
        if (publish.ok() && publish->put(BlockSpec{"w", DType::kU8, Shape{1000}, {}}, bytes).ok() && publish->finish().ok()) {
          static_cast<void>(!write(ends[1], "1", 1));
          for (;;) pause();
        }
      }
      _exit(1);
    }
    ::close(ends[1]);
    char byte = 0;
    ready = read(ends[0], &byte, 1) == 1;
    ::close(ends[0]);
  }
  ~ServerProcess() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  void stop() const {
    kill(pid, SIGSTOP);
    waitpid(pid, nullptr, WUNTRACED);
  }
  void go_on() const { kill(pid, SIGCONT); }
  pid_t pid = -1;
  bool ready = false;
};

LeaseId lease(ControlLink& control, std::uint32_t ttl_ms) {
  SnapshotMessage ask;
  ask.lease_ttl_ms = ttl_ms;
  const std::uint64_t request = control.next_request();
  return must(ManifestMessage::decode(must(control.call(ask.encode(request), request, FrameType::kManifest, in_seconds(10))).meta)).lease;
}

// Two leases of 300 ms, the server stopped for longer than that; one lease's renewal is already queued when it wakes. That one
// lives, the other has expired.
TEST(Server, AStoppedServerHandlesQueuedRenewalsBeforeItExpiresLeases) {
  TemporaryDirectory directory;
  const ServerProcess process(directory.path() + "/s", {});
  ASSERT_TRUE(process.ready);
  const Endpoint endpoint = Endpoint::unix_socket(directory.path() + "/s");
  const auto control = must(ControlLink::connect(endpoint, kClient, in_seconds(10)));
  RawClient renewer(endpoint);
  renewer.hello();
  const LeaseId kept = lease(*control, 300), lost = lease(*control, 300);
  process.stop();
  LeaseMessage renew;
  renew.lease = kept;
  renew.ttl_ms = 60'000;
  renewer.send(renew.encode(FrameType::kRenew, 5));
  pollfd nothing{-1, 0, 0};
  poll(&nothing, 1, 500);  // not a wait for something to happen: the leases must be over their time
  process.go_on();
  EXPECT_EQ(renewer.answer().type, FrameType::kOk);
  const auto leases = [&] {
    renewer.send(encode_empty(FrameType::kStat, 6));
    for (const auto& [name, value] : must(StatsMessage::decode(renewer.answer().meta)).values) {
      if (name == "leases") return value;
    }
    return std::uint64_t{0};
  };
  while (leases() != 1) std::this_thread::yield();  // the other expires at the tick after, whenever that comes
  renew.lease = lost;
  renewer.send(renew.encode(FrameType::kRenew, 7));
  EXPECT_EQ(must(ErrorMessage::decode(renewer.answer().meta)).code, Code::kStale);
  renew.lease = kept;
  renew.ttl_ms = 60'000;
  renewer.send(renew.encode(FrameType::kRenew, 7));
  EXPECT_EQ(renewer.answer().type, FrameType::kOk);
}

TEST(Server, AFrozenServerIsATimeoutOnEveryLinkAndTheLinkStaysBroken) {
  TemporaryDirectory directory;
  const ServerProcess process(directory.path() + "/s", {});
  ASSERT_TRUE(process.ready);
  const Endpoint endpoint = Endpoint::unix_socket(directory.path() + "/s");
  const auto control = must(ControlLink::connect(endpoint, kClient, in_seconds(10)));
  const auto link = must(TcpLink::connect(endpoint, kClient, control->facts().incarnation, {}, in_seconds(10)));
  process.stop();
  const std::uint64_t request = control->next_request();
  EXPECT_EQ(control->call(encode_empty(FrameType::kStat, request), request, steady_clock().now() + 30'000).error().code(), Code::kTimeout);
  ManifestEntry entry;
  entry.id = block_id("w", Shard::whole());
  entry.tensor = "w";
  entry.version = *control->facts().newest;
  entry.raw_size = entry.stored_size = 1000;
  Bytes target(1000);
  std::vector<BlockRead> batch(3, BlockRead{entry, {}, {0, 1000}, target, {}});
  link->read(batch, steady_clock().now() + 30'000);
  for (const BlockRead& item : batch) EXPECT_EQ(item.result.error().code(), Code::kTimeout);
  process.go_on();
  // The late answers are on their way: nobody may take them for others.
  const std::uint64_t next = control->next_request();
  const auto refused = control->call(encode_empty(FrameType::kStat, next), next, in_seconds(10));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kUnreachable);
  EXPECT_NE(refused.error().message().find("broken before"), std::string::npos);
  EXPECT_TRUE(link->broken());
  EXPECT_TRUE(ControlLink::connect(endpoint, kClient, in_seconds(20)).ok());
}

TEST(Server, AKilledServerIsUnreachable) {
  TemporaryDirectory directory;
  auto process = std::make_unique<ServerProcess>(directory.path() + "/s", ServerOptions{});
  ASSERT_TRUE(process->ready);
  const Endpoint endpoint = Endpoint::unix_socket(directory.path() + "/s");
  const auto control = must(ControlLink::connect(endpoint, kClient, in_seconds(10)));
  process.reset();
  const std::uint64_t request = control->next_request();
  EXPECT_EQ(control->call(encode_empty(FrameType::kStat, request), request, in_seconds(10)).error().code(), Code::kUnreachable);
  EXPECT_TRUE(control->broken());
}

}  // namespace
}  // namespace paramwire
