// A server with a cluster key, from outside: who is served, who is told what, and that strangers cost little and end soon.
#include "support/rig.hpp"

#include "paramwire/client/client.hpp"
#include "paramwire/net/publish_link.hpp"
#include "paramwire/net/tcp_link.hpp"
#include "paramwire/net/tls.hpp"
#include "paramwire/server/connection.hpp"

#include <gtest/gtest.h>

#include <poll.h>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

constexpr ClientId kClient{11, 12};

std::shared_ptr<const ClusterKey> key_of(std::uint64_t seed) {
  const Bytes bytes = random_bytes(kClusterKeyBytes, seed);
  return ClusterKey::from_bytes(std::span<const std::byte, kClusterKeyBytes>(bytes.data(), kClusterKeyBytes));
}
Caller caller_with(std::uint64_t seed) { return {kClient, must(TlsContext::create(key_of(seed)))}; }
ServerOptions keyed(std::uint64_t seed) {
  ServerOptions options;
  options.key = key_of(seed);
  return options;
}

std::uint64_t closed_for_key(const Rig& rig) { return must(rig.server->stats()).closed_for_key; }
std::uint64_t open_connections(const Rig& rig) { return must(rig.server->stats()).connections; }
template <typename Is>
void wait_until(Is is) {
  const Micros end = in_seconds(60);
  while (!is() && steady_clock().now() < end) std::this_thread::yield();
  EXPECT_TRUE(is());
}

TEST(Auth, EveryKindOfLinkCarriesTheKeyOverTcpAndNeedsNoneOverUnix) {
  Rig rig(keyed(1));
  const Bytes bytes = random_bytes(std::size_t{9} << 20, 2);
  const Caller caller = caller_with(1);
  const auto publish = must(PublishLink::start(rig.tcp_endpoint(), caller, true, std::nullopt, in_seconds(10)));
  must(publish->put({"w", DType::kU8, Shape{bytes.size()}, {}}, bytes, in_seconds(30)));
  must(publish->finish(in_seconds(30)));
  EXPECT_EQ(closed_for_key(rig), 0U);

  const testing::Snapshot snapshot = rig.snapshot();  // over the unix socket, without a key
  for (const Endpoint& endpoint : rig.server->endpoints()) {
    const auto control = must(ControlLink::connect(endpoint, caller, in_seconds(10)));
    EXPECT_EQ(control->export_key("EXPORTER-x", {}).has_value(), endpoint.kind == Endpoint::Kind::kTcp);
    const auto link = must(TcpLink::connect(endpoint, caller, rig.server->incarnation(), {}, in_seconds(10)));
    Bytes got(bytes.size());
    BlockRead item = snapshot.read_of("w", {0, got.size()}, got);
    link->read({&item, 1}, in_seconds(30));
    must(item.result);
    EXPECT_EQ(got, bytes);
  }
}

// What a handler of the server derives for a connection is what its client derives.
TEST(Auth, TheSessionExportsTheClientsKey) {
  auto pair = must(socket_pair());
  must(caller_with(1).tls->accept(pair.second));
  ServerCore core;
  Connection connection(1, std::move(pair.second), false, steady_clock().now());
  Status status;
  std::thread client([&] { status = caller_with(1).tls->connect(pair.first, in_seconds(60)); });
  const Bytes context = random_bytes(16, 5);
  const auto exported = [&] { return connection.session().export_key("EXPORTER-paramwire-udp", context); };
  EXPECT_EQ(exported(), std::nullopt);
  const Micros end = in_seconds(60);
  while (!exported() && steady_clock().now() < end) {
    must(connection.serve(core, std::uint64_t{1} << 20, steady_clock().now()));
    pollfd entry{connection.fd(), POLLIN, 0};
    ::poll(&entry, 1, 10);
  }
  client.join();
  must(status);
  ASSERT_TRUE(exported().has_value());
  EXPECT_EQ(exported(), pair.first.export_key("EXPORTER-paramwire-udp", context));
  EXPECT_EQ(ServerSession(2, false).export_key("EXPORTER-paramwire-udp", context), std::nullopt);
}

// Thousands of small questions in one send: they leave the kernel in a few receives, and no event tells the server of the rest.
TEST(Auth, QuestionsThatLeftTheKernelTogetherAreAllAnswered) {
  Rig rig(keyed(1));
  rig.publish({{"w", random_bytes(std::size_t{1} << 20, 3)}});
  const testing::Snapshot snapshot = rig.snapshot();
  auto greeted = must(connect_and_greet(rig.tcp_endpoint(), caller_with(1), in_seconds(10)));
  GetMessage get;
  get.block = block_id("w", Shard::whole());
  get.version = snapshot.entry("w").version;
  get.incarnation = rig.server->incarnation();
  get.range = {0, 7};
  constexpr std::uint64_t kQuestions = 60'000;  // 5.6 MB: more than the server takes from one connection in one turn
  Bytes questions;
  for (std::uint64_t i = 1; i <= kQuestions; ++i) {
    const Bytes one = get.encode(i);
    questions.insert(questions.end(), one.begin(), one.end());
  }
  std::thread sender([&] { must(greeted.socket.send_all(questions, in_seconds(60))); });
  FrameParser parser;
  std::uint64_t answers = 0;
  Bytes target(7);
  while (answers < kQuestions) {
    auto event = must(parser.next());
    if (event == FrameParser::Event::kNeedBytes) {
      parser.received(must(greeted.socket.receive(parser.receive_space(), in_seconds(60))));
    } else if (event == FrameParser::Event::kHead) {
      ASSERT_EQ(static_cast<FrameType>(parser.header().type), FrameType::kData);
      parser.set_body(FrameParser::BodyTarget{{std::span(target)}, 0});
    } else if (event == FrameParser::Event::kEnd) {
      ASSERT_EQ(parser.header().request, ++answers);
    }
  }
  sender.join();
}

TEST(Auth, AClientWithoutAKeyIsToldToBringOne) {
  Rig rig(keyed(1));
  const auto expect = [&](const Error& error) {
    EXPECT_EQ(error.code(), Code::kDenied) << error.to_string();
    EXPECT_NE(error.message().find(rig.tcp_endpoint().to_string()), std::string::npos) << error.message();
    EXPECT_NE(error.message().find("key=FILE"), std::string::npos) << error.message();
  };
  expect(ControlLink::connect(rig.tcp_endpoint(), kClient, in_seconds(10)).error());
  expect(TcpLink::connect(rig.tcp_endpoint(), kClient, rig.server->incarnation(), {}, in_seconds(10)).error());
  expect(PublishLink::start(rig.tcp_endpoint(), kClient, true, std::nullopt, in_seconds(10)).error());
  expect(Client::connect(rig.tcp_endpoint().to_string(), {}).error());
  EXPECT_EQ(closed_for_key(rig), 4U);
  EXPECT_EQ(must(rig.server->stats()).closed_for_protocol, 0U);
}

TEST(Auth, AnotherKeyIsDeniedAndCounted) {
  Rig rig(keyed(1));
  const auto refused = ControlLink::connect(rig.tcp_endpoint(), caller_with(2), in_seconds(10));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kDenied) << refused.error().message();
  EXPECT_NE(refused.error().message().find("show-id"), std::string::npos) << refused.error().message();
  wait_until([&] { return closed_for_key(rig) == 1; });
}

TEST(Auth, AKeyedClientDoesNotTalkToAServerWithoutAKey) {
  Rig rig;
  const auto refused = ControlLink::connect(rig.tcp_endpoint(), caller_with(1), in_seconds(10));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kDenied) << refused.error().message();
  EXPECT_NE(refused.error().message().find("--key"), std::string::npos) << refused.error().message();
  must(ControlLink::connect(rig.unix_endpoint(), caller_with(1), in_seconds(10)));  // a file with mode 0600 has proved enough
}

TEST(Auth, GarbageEndsAndIsCounted) {
  Rig rig(keyed(1));
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Bytes garbage = random_bytes(4096, seed);
    // Half of it begins as TLS does: a handshake record of 512 bytes with nonsense inside.
    const unsigned char head[] = {0x16, 3, 1, 2, 0};
    if (seed % 2 == 0) std::memcpy(garbage.data(), head, sizeof head);
    else garbage[0] = std::byte{0xee};
    auto socket = must(Socket::connect(rig.tcp_endpoint(), in_seconds(10)));
    must(socket.send_all(garbage, in_seconds(10)));
    socket.shutdown_send();
    Bytes answer(64);
    Result<std::size_t> end = std::size_t{1};
    std::size_t heard = 0;
    while (end.ok()) {
      end = socket.receive(answer, in_seconds(20));
      if (end.ok()) heard += *end;
    }
    EXPECT_EQ(end.error().code(), Code::kUnreachable);
    EXPECT_LE(heard, 7U);  // at most an alert
  }
  wait_until([&] { return closed_for_key(rig) == 20; });
  wait_until([&] { return open_connections(rig) == 0; });
  must(ControlLink::connect(rig.tcp_endpoint(), caller_with(1), in_seconds(10)));
}

// Nothing, a first byte, and half a handshake: each holds a connection for the time that a client may take to say HELLO, and no longer.
TEST(Auth, SilenceAndHalfAHandshakeEndWithTheTimeForHello) {
  ServerOptions options = keyed(1);
  options.send_timeout = 100'000;
  Rig rig(options);
  Bytes hello(4096);
  {
    auto pair = must(socket_pair());
    EXPECT_FALSE(caller_with(1).tls->connect(pair.first, steady_clock().now()).ok());
    hello.resize(must(pair.second.receive(hello, in_seconds(20))));
  }
  std::vector<Socket> sockets;
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, hello.size() / 2, hello.size()}) {
    sockets.push_back(must(Socket::connect(rig.tcp_endpoint(), in_seconds(10))));
    must(sockets.back().send_all(std::span(hello).first(size), in_seconds(10)));
  }
  // Counted when it is found, closed a moment later.
  wait_until([&] { return must(rig.server->stats()).closed_for_stall == sockets.size() && open_connections(rig) == 0; });
  EXPECT_EQ(closed_for_key(rig), 0U);
}

TEST(Auth, SilentStrangersDoNotKeepAClientOut) {
  ServerOptions options = keyed(1);
  options.connections_max = 4;
  options.send_timeout = 600 * kMicrosPerSecond;
  Rig rig(options);
  std::vector<Socket> strangers;
  for (std::uint64_t i = 0; i < 10; ++i) strangers.push_back(must(Socket::connect(rig.tcp_endpoint(), in_seconds(10))));
  std::vector<std::unique_ptr<ControlLink>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(must(ControlLink::connect(rig.tcp_endpoint(), caller_with(1), in_seconds(10))));
  EXPECT_EQ(closed_for_key(rig), 10U);  // each stranger made room
  EXPECT_EQ(must(rig.server->stats()).refused, 0U);
  EXPECT_EQ(ControlLink::connect(rig.tcp_endpoint(), caller_with(1), in_seconds(10)).error().code(), Code::kBackpressure);
  for (const auto& client : clients) EXPECT_FALSE(client->broken());
}

// One connection too many costs the server no handshake; the client hears of it in the only words that it can understand by then.
TEST(Auth, AServerThatIsFullSaysSoBeforeTheHandshake) {
  ServerOptions options = keyed(1);
  options.connections_max = 1;
  Rig rig(options);
  const auto first = must(ControlLink::connect(rig.tcp_endpoint(), caller_with(1), in_seconds(10)));
  const auto second = ControlLink::connect(rig.tcp_endpoint(), caller_with(1), in_seconds(10));
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), Code::kBackpressure) << second.error().message();
  EXPECT_NE(second.error().message().find("connections_max"), std::string::npos);
}

TEST(Auth, OtherAddressesThanLoopbackNeedAKey) {
  ServerOptions options;
  for (const char* address : {"tcp://0.0.0.0:0", "tcp://[::]:0"}) {
    options.listen = {address};
    options.key = nullptr;
    const auto refused = Server::open(options);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Code::kInvalid);
    EXPECT_NE(refused.error().message().find("paramwire key new"), std::string::npos) << refused.error().message();
  }
  options.listen = {"tcp://0.0.0.0:0"};
  options.key = key_of(1);
  const auto server = must(Server::open(options));
  const Endpoint here = Endpoint::tcp("127.0.0.1", server->endpoints()[0].port);
  must(ControlLink::connect(here, caller_with(1), in_seconds(10)));
  EXPECT_EQ(ControlLink::connect(here, kClient, in_seconds(10)).error().code(), Code::kDenied);
}

TEST(Auth, AServerWithABadKeyFileListensNowhere) {
  const TemporaryDirectory directory;
  ServerOptions options;
  options.key_file = directory.path() + "/k";
  options.listen = {"unix:" + directory.path() + "/s"};
  EXPECT_EQ(Server::open(options).error().code(), Code::kNotFound);
  must(ClusterKey::create(options.key_file));
  std::filesystem::permissions(options.key_file, std::filesystem::perms::others_read, std::filesystem::perm_options::add);
  EXPECT_EQ(Server::open(options).error().code(), Code::kDenied);
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/s"));
}

// The whole client: a key in its options reaches control, data and publishes, and survives a reconnection.
TEST(Auth, AClientFetchesAndPublishesWithTheKey) {
  Rig rig(keyed(1));
  ClientOptions options;
  options.transport = "tcp";
  options.key = key_of(1);
  const auto client = must(Client::connect(rig.tcp_endpoint().to_string(), options));
  const Bytes bytes = random_bytes(300'000, 4);
  const auto publish = must(client->publish({}));
  must(publish->put("w", DType::kU8, Shape{bytes.size()}, Shard::whole(), bytes));
  must(publish->finish());
  Bytes got(bytes.size());
  FetchRequest want;
  want.tensor = "w";
  want.target = got;
  must(client->fetch(std::span(&want, 1)));
  EXPECT_EQ(got, bytes);
  EXPECT_EQ(closed_for_key(rig), 0U);
}

}  // namespace
}  // namespace paramwire
