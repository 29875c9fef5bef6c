// TLS with the cluster key over real sockets: who gets in, that every byte arrives or an error says why, and what strangers see.
#include "support/rig.hpp"

#include "paramwire/base/socket.hpp"
#include "paramwire/net/tls.hpp"

#include <gtest/gtest.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

std::shared_ptr<const ClusterKey> key_of(std::uint64_t seed) {
  const Bytes bytes = random_bytes(kClusterKeyBytes, seed);
  return ClusterKey::from_bytes(std::span<const std::byte, kClusterKeyBytes>(bytes.data(), kClusterKeyBytes));
}
std::shared_ptr<const TlsContext> context_of(std::uint64_t seed, std::uint64_t records_per_key = kRecordsPerKey) {
  return must(TlsContext::create(key_of(seed), TlsEnd::kBoth, records_per_key));
}

// The server's handshake, to its end.
Status shake_hands(Socket& server) {
  while (!server.filter()->ready()) {
    PARAMWIRE_CHECK(server.try_receive({}));
    if (server.filter()->ready()) break;
    PARAMWIRE_CHECK(server.wait(POLLIN, in_seconds(20)));
  }
  return {};
}

struct Ends {
  Socket client;
  Socket server;
  Status client_status;
  Status server_status;
};

Ends meet(const std::shared_ptr<const TlsContext>& client, const std::shared_ptr<const TlsContext>& server) {
  auto pair = must(socket_pair());
  Ends ends{std::move(pair.first), std::move(pair.second), {}, {}};
  must(server->accept(ends.server));
  std::thread other([&] {
    ends.server_status = shake_hands(ends.server);
    if (!ends.server_status.ok()) ends.server.shutdown_send();
  });
  ends.client_status = client->connect(ends.client, in_seconds(20));
  other.join();
  return ends;
}

Ends connected(std::uint64_t records_per_key = kRecordsPerKey) {
  Ends ends = meet(context_of(1), context_of(1, records_per_key));
  must(ends.client_status);
  must(ends.server_status);
  return ends;
}

// Sends `bytes` in pieces of seeded sizes, as several parts a call.
void send_in_pieces(Socket& socket, std::span<const std::byte> bytes, std::uint64_t seed) {
  Random random(seed);
  while (!bytes.empty()) {
    std::vector<iovec> parts;
    std::size_t offered = 0;
    for (std::uint64_t i = 0; i <= random.below(4); ++i) {
      const std::size_t size = std::min<std::size_t>(bytes.size() - offered, random.below(2) == 0 ? random.below(200) : random.below(60'000));
      parts.push_back({const_cast<std::byte*>(bytes.data() + offered), size});
      offered += size;
    }
    if (offered == 0) continue;
    while (offered > 0) {
      const auto sent = must(socket.try_send(parts));
      if (!sent) {
        must(socket.wait(POLLOUT, in_seconds(20)));
        continue;
      }
      offered -= *sent;
      bytes = bytes.subspan(*sent);
      std::size_t gone = *sent;
      std::erase_if(parts, [&](iovec& part) {
        const std::size_t here = std::min(gone, part.iov_len);
        gone -= here;
        part.iov_base = static_cast<std::byte*>(part.iov_base) + here;
        part.iov_len -= here;
        return part.iov_len == 0;
      });
    }
  }
}

void receive_in_pieces(Socket& socket, std::span<std::byte> into, std::uint64_t seed) {
  Random random(seed);
  while (!into.empty()) {
    const std::size_t size = std::min<std::size_t>(into.size(), 1 + (random.below(2) == 0 ? random.below(10) : random.below(100'000)));
    into = into.subspan(must(socket.receive(into.first(size), in_seconds(20))));
  }
}

// Both directions at once, each end with a thread that reads and one that writes, through buffers so small that nearly every call is
// short, with a new key every 16 records.
TEST(Tls, MovesEveryByteBothWaysThroughShortCountsAndNewKeys) {
  Ends ends = connected(16);
  const int small = 1;  // raised to the kernel's minimum
  for (const Socket* socket : {&ends.client, &ends.server}) setsockopt(socket->fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
  const Bytes up = random_bytes(std::size_t{3} << 20, 5);
  const Bytes down = random_bytes(std::size_t{3} << 20, 6);
  Bytes up_got(up.size());
  Bytes down_got(down.size());
  std::thread threads[] = {std::thread([&] { send_in_pieces(ends.client, up, 7); }), std::thread([&] { receive_in_pieces(ends.server, up_got, 8); }),
                           std::thread([&] { send_in_pieces(ends.server, down, 9); }), std::thread([&] { receive_in_pieces(ends.client, down_got, 10); })};
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(up_got, up);
  EXPECT_EQ(down_got, down);
}

// Many records fit in one receive from the kernel: who waits for the rest must be told of what left it already.
TEST(Tls, BytesThatLeftTheKernelAreFoundByWaiting) {
  Ends ends = connected();
  const Bytes bytes = random_bytes(3000, 11);
  for (std::size_t i = 0; i < bytes.size(); i += 30) must(ends.server.send_all(std::span(bytes).subspan(i, 30), in_seconds(20)));
  Bytes got(bytes.size());
  for (std::byte& byte : got) must(ends.client.receive_all({&byte, 1}, in_seconds(20)));
  EXPECT_EQ(got, bytes);
  EXPECT_FALSE(ends.client.filter()->holds_input());
  EXPECT_EQ(ends.client.wait(POLLIN, steady_clock().now()).error().code(), Code::kTimeout);
}

// A record that is half on its way goes on from wherever the same bytes lie next.
TEST(Tls, ARecordHalfOnItsWayMayMove) {
  Ends ends = connected();
  const Bytes bytes = random_bytes(std::size_t{4} << 20, 12);
  std::size_t sent = 0;
  bool waited = false;
  Bytes got;
  while (got.size() < bytes.size()) {
    Bytes moved(bytes.begin() + static_cast<std::ptrdiff_t>(sent), bytes.end());
    const iovec part{moved.data(), moved.size()};
    const auto n = moved.empty() ? std::optional<std::size_t>() : must(ends.client.try_send({&part, 1}));
    if (n) {
      sent += *n;
      continue;
    }
    waited = true;
    Bytes some(50'000);
    some.resize(must(ends.server.receive(some, in_seconds(20))));
    got.insert(got.end(), some.begin(), some.end());
  }
  EXPECT_TRUE(waited);
  EXPECT_EQ(got, bytes);
}

TEST(Tls, AnotherKeyIsDeniedOnBothSides) {
  const auto client = context_of(1);
  Ends ends = meet(client, context_of(2));
  ASSERT_FALSE(ends.client_status.ok());
  EXPECT_EQ(ends.client_status.error().code(), Code::kDenied);
  EXPECT_NE(ends.client_status.error().message().find(client->key().id()), std::string::npos) << ends.client_status.error().message();
  ASSERT_FALSE(ends.server_status.ok());
  EXPECT_EQ(ends.server_status.error().code(), Code::kDenied) << ends.server_status.error().message();
  std::byte byte{};
  EXPECT_FALSE(ends.server.try_receive({&byte, 1}).ok());
}

TEST(Tls, ExportedKeysAreTheSameAtBothEndsAndNowhereElse) {
  Ends one = connected();
  Ends two = connected();
  const Bytes context = random_bytes(16, 13);
  const auto key = one.client.export_key("EXPORTER-paramwire-udp", context);
  ASSERT_TRUE(key.has_value());
  EXPECT_EQ(one.server.export_key("EXPORTER-paramwire-udp", context), key);
  EXPECT_EQ(one.client.export_key("EXPORTER-paramwire-udp", context), key);
  EXPECT_NE(one.client.export_key("EXPORTER-paramwire-other", context), key);
  EXPECT_NE(one.client.export_key("EXPORTER-paramwire-udp", {}), key);
  EXPECT_NE(two.client.export_key("EXPORTER-paramwire-udp", context), key);
  const auto plain = must(socket_pair());
  EXPECT_EQ(plain.first.export_key("EXPORTER-paramwire-udp", context), std::nullopt);
}

// ---------------------------------------------------------------- ends

TEST(Tls, ACloseIsToldFromACut) {
  for (const bool cut : {false, true}) {
    Ends ends = connected();
    const Bytes bytes = random_bytes(100'000, 14);
    must(ends.server.send_all(bytes, in_seconds(20)));
    if (cut) ::shutdown(ends.server.fd(), SHUT_RDWR);
    else ends.server.shutdown();
    Bytes got(bytes.size());
    must(ends.client.receive_all(got, in_seconds(20)));
    EXPECT_EQ(got, bytes);
    std::byte byte{};
    const auto end = ends.client.receive({&byte, 1}, in_seconds(20));
    ASSERT_FALSE(end.ok());
    EXPECT_EQ(end.error().code(), Code::kUnreachable);
    EXPECT_EQ(end.error().message().find("without a TLS close") != std::string::npos, cut) << end.error().message();
  }
}

// Half a record, then the end: what the attacker let through is given out only in whole, authentic records.
TEST(Tls, ARecordCutInHalfIsAnErrorAndNoData) {
  auto tapped = must(socket_pair());   // client and the one in the middle
  auto beyond = must(socket_pair());   // the one in the middle and the server
  const auto context = context_of(1);
  must(context->accept(beyond.second));
  std::atomic<bool> done{false};
  const auto pass = [&](const Socket& from, const Socket& to) {
    std::array<std::byte, 4096> some;
    pollfd entry{from.fd(), POLLIN, 0};
    if (::poll(&entry, 1, 10) <= 0) return;
    const auto n = ::recv(from.fd(), some.data(), some.size(), MSG_DONTWAIT);
    if (n <= 0) return;
    EXPECT_EQ(::send(to.fd(), some.data(), static_cast<std::size_t>(n), MSG_NOSIGNAL), n);
  };
  std::thread up([&] { while (!done) pass(tapped.second, beyond.first); });
  std::thread down([&] { while (!done) pass(beyond.first, tapped.second); });
  Status served;
  std::thread server([&] { served = shake_hands(beyond.second); });
  must(context->connect(tapped.first, in_seconds(20)));
  server.join();
  done = true;
  up.join();
  down.join();
  must(served);
  const Bytes bytes = random_bytes(20'000, 15);  // two records
  must(beyond.second.send_all(bytes, in_seconds(20)));
  Bytes records(30'000);
  records.resize(static_cast<std::size_t>(::recv(beyond.first.fd(), records.data(), records.size(), 0)));
  ASSERT_GT(records.size(), bytes.size());
  must(tapped.second.send_all(std::span(records).first(records.size() - 1), in_seconds(20)));
  ::shutdown(tapped.second.fd(), SHUT_RDWR);
  Bytes got(bytes.size());
  const Status status = tapped.first.receive_all(got, in_seconds(20));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Code::kUnreachable) << status.error().message();
}

TEST(Tls, AForgedRecordIsCorruptAndNothingFollowsIt) {
  Ends ends = connected();
  const Bytes bytes = random_bytes(1000, 16);
  must(ends.server.send_all(bytes, in_seconds(20)));
  Bytes forged(5 + 64, std::byte{0x5a});
  const unsigned char head[] = {0x17, 3, 3, 0, 64};
  std::memcpy(forged.data(), head, sizeof head);
  ASSERT_EQ(::send(ends.server.fd(), forged.data(), forged.size(), MSG_NOSIGNAL), static_cast<ssize_t>(forged.size()));
  must(ends.server.send_all(bytes, in_seconds(20)));
  Bytes got(bytes.size());
  must(ends.client.receive_all(got, in_seconds(20)));
  EXPECT_EQ(got, bytes);
  for (int i = 0; i < 3; ++i) {
    const auto end = ends.client.receive(got, in_seconds(20));
    ASSERT_FALSE(end.ok());
    EXPECT_EQ(end.error().code(), Code::kCorrupt) << end.error().message();
  }
}

TEST(Tls, ShutdownWakesAThreadThatWaits) {
  Ends ends = connected();
  std::atomic<bool> waiting{false};
  std::thread waiter([&] {
    std::byte byte{};
    waiting = true;
    EXPECT_EQ(ends.client.receive({&byte, 1}, in_seconds(60)).error().code(), Code::kUnreachable);
  });
  while (!waiting) std::this_thread::yield();
  ends.client.shutdown();
  waiter.join();
  EXPECT_EQ(ends.client.send_all(random_bytes(8, 1), in_seconds(20)).error().code(), Code::kUnreachable);
}

TEST(Tls, NoDescriptorGoesThrough) {
  Ends ends = connected();
  std::byte byte{};
  const iovec part{&byte, 1};
  EXPECT_EQ(ends.client.try_send({&part, 1}, 0).error().code(), Code::kInvalid);
}

// ---------------------------------------------------------------- strangers

// What a peer says in place of a handshake, and what the client makes of it.
TEST(Tls, AClientTellsWhatItMetInPlaceOfAKeyedServer) {
  ErrorMessage refusal;
  refusal.code = Code::kCorrupt;
  refusal.text = "frame refused";
  const Bytes frame = refusal.encode(0);
  const Bytes http = [] {
    const std::string_view text = "HTTP/1.1 400 Bad Request\r\n\r\n";
    Bytes out(text.size());
    std::memcpy(out.data(), text.data(), text.size());
    return out;
  }();
  struct Row {
    Bytes says;
    bool ends;
    Code code;
    const char* text;
  };
  const Row rows[] = {{frame, false, Code::kDenied, "speaks without TLS"},
                      {http, false, Code::kCorrupt, "is that a paramwire server"},
                      {{}, true, Code::kUnreachable, "closed the connection in the TLS handshake"},
                      {{}, false, Code::kTimeout, "TLS handshake"}};
  for (const Row& row : rows) {
    auto pair = must(socket_pair());
    must(pair.second.send_all(row.says, in_seconds(20)));
    if (row.ends) ::shutdown(pair.second.fd(), SHUT_WR);
    const Status status = context_of(1)->connect(pair.first, row.code == Code::kTimeout ? steady_clock().now() + 10'000 : in_seconds(20));
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code(), row.code) << status.error().message();
    EXPECT_NE(status.error().message().find(row.text), std::string::npos) << status.error().message();
  }
}

TEST(Tls, AClientWithoutAKeyIsSeenByItsFirstByte) {
  auto pair = must(socket_pair());
  must(context_of(1)->accept(pair.second));
  must(pair.first.send_all(HelloMessage{{1, 2}, 1}.encode(0), in_seconds(20)));
  const auto status = shake_hands(pair.second);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Code::kDenied);
  EXPECT_TRUE(pair.second.filter()->peer_is_plain());
  pair.second.set_filter(nullptr);
  std::byte byte{};
  EXPECT_EQ(must(pair.first.try_receive({&byte, 1})), std::nullopt);  // no alert that a frame parser would stumble over
}

// The first flight of a client, as it lies on the wire.
Bytes client_hello(std::uint64_t seed) {
  auto pair = must(socket_pair());
  EXPECT_EQ(context_of(seed)->connect(pair.first, steady_clock().now()).error().code(), Code::kTimeout);
  Bytes hello(4096);
  hello.resize(must(pair.second.receive(hello, in_seconds(20))));
  return hello;
}

// Every byte of a good first flight turned over, and the flight cut at every length: no handshake succeeds, nothing hangs.
TEST(Tls, NoDamagedHandshakeSucceeds) {
  const Bytes hello = client_hello(1);
  const auto server = context_of(1);
  for (std::size_t i = 0; i < 2 * hello.size(); ++i) {
    auto pair = must(socket_pair());
    must(server->accept(pair.second));
    Bytes sent = hello;
    if (i < hello.size()) sent[i] ^= std::byte{0x10};
    else sent.resize(i - hello.size());
    must(pair.first.send_all(sent, in_seconds(20)));
    pair.first.shutdown_send();
    const Status status = shake_hands(pair.second);
    ASSERT_FALSE(status.ok()) << "at " << i;
    const Code code = status.error().code();
    EXPECT_TRUE(code == Code::kDenied || code == Code::kCorrupt || code == Code::kUnreachable) << "at " << i << ": " << status.error().to_string();
    EXPECT_EQ(pair.second.export_key("EXPORTER-x", {}), std::nullopt);
  }
}

// A recorded first flight gets no further than the server's answer: without the key, the client's Finished can't follow.
TEST(Tls, ARecordedHandshakeOpensNothing) {
  const Bytes hello = client_hello(1);
  auto pair = must(socket_pair());
  must(context_of(1)->accept(pair.second));
  must(pair.first.send_all(hello, in_seconds(20)));
  must(pair.first.send_all(hello, in_seconds(20)));
  EXPECT_FALSE(shake_hands(pair.second).ok());
}

// OpenSSL itself as the other side, without our settings.
class Stranger {
 public:
  explicit Stranger(const SSL_METHOD* method) : context_(SSL_CTX_new(method)) {}
  ~Stranger() {
    SSL_free(ssl_);
    SSL_CTX_free(context_);
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  SSL_CTX* context() const { return context_; }

  void self_signed() {
    EVP_PKEY* key = EVP_EC_gen("P-256");
    X509* certificate = X509_new();
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
    X509_set_pubkey(certificate, key);
    X509_sign(certificate, key, EVP_sha256());
    ASSERT_EQ(SSL_CTX_use_certificate(context_, certificate), 1);
    ASSERT_EQ(SSL_CTX_use_PrivateKey(context_, key), 1);
    X509_free(certificate);
    EVP_PKEY_free(key);
  }
  // Blocking, to its end; whether it succeeded.
  bool shake_hands(const Socket& socket, bool server) {
    const int flags = fcntl(socket.fd(), F_GETFL);
    fcntl(socket.fd(), F_SETFL, flags & ~O_NONBLOCK);
    ssl_ = SSL_new(context_);
    SSL_set_fd(ssl_, socket.fd());
    const bool ok = (server ? SSL_accept(ssl_) : SSL_connect(ssl_)) == 1;
    ERR_clear_error();
    return ok;
  }

 private:
  SSL_CTX* context_;
  SSL* ssl_ = nullptr;
};

TEST(Tls, AServerThatShowsACertificateIsDenied) {
  Stranger stranger(TLS_server_method());
  stranger.self_signed();
  auto pair = must(socket_pair());
  std::thread server([&] { EXPECT_FALSE(stranger.shake_hands(pair.second, true)); });
  const Status status = context_of(1)->connect(pair.first, in_seconds(20));
  pair.first.shutdown();
  server.join();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Code::kDenied) << status.error().message();
  EXPECT_NE(status.error().message().find("certificate"), std::string::npos) << status.error().message();
}

const Bytes& stranger_key() {
  static const Bytes bytes = random_bytes(kClusterKeyBytes, 1);
  return bytes;
}

// The right key by the callback that `openssl s_client -psk` uses.
unsigned int give_key(SSL*, const char*, char* identity, unsigned int identity_size, unsigned char* key, unsigned int key_size) {
  const std::string_view name = "paramwire";
  if (name.size() >= identity_size || stranger_key().size() > key_size) return 0;
  std::memcpy(identity, name.data(), name.size() + 1);
  std::memcpy(key, stranger_key().data(), stranger_key().size());
  return static_cast<unsigned int>(stranger_key().size());
}
unsigned int give_key_as_somebody(SSL* ssl, const char* hint, char* identity, unsigned int identity_size, unsigned char* key, unsigned int key_size) {
  const unsigned int size = give_key(ssl, hint, identity, identity_size, key, key_size);
  identity[0] = 'P';
  return size;
}

TEST(Tls, OnlyTheSuiteTheModeAndTheIdentityOfTheFormatGetIn) {
  struct Row {
    const char* what;
    void (*set)(SSL_CTX*);
    bool good;
  };
  const Row rows[] = {
      {"the key", [](SSL_CTX* c) { SSL_CTX_set_psk_client_callback(c, &give_key); }, true},
      {"no key", [](SSL_CTX*) {}, false},
      {"another identity", [](SSL_CTX* c) { SSL_CTX_set_psk_client_callback(c, &give_key_as_somebody); }, false},
      {"another suite",
       [](SSL_CTX* c) {
         SSL_CTX_set_psk_client_callback(c, &give_key);
         SSL_CTX_set_ciphersuites(c, "TLS_CHACHA20_POLY1305_SHA256");
       },
       false},
      {"TLS 1.2",
       [](SSL_CTX* c) {
         SSL_CTX_set_psk_client_callback(c, &give_key);
         SSL_CTX_set_max_proto_version(c, TLS1_2_VERSION);
       },
       false},
      {"no group in common",
       [](SSL_CTX* c) {
         SSL_CTX_set_psk_client_callback(c, &give_key);
         SSL_CTX_set1_groups_list(c, "P-384");
       },
       false},
  };
  for (const Row& row : rows) {
    Stranger stranger(TLS_client_method());
    row.set(stranger.context());
    auto pair = must(socket_pair());
    must(context_of(1)->accept(pair.second));
    Status status;
    std::thread server([&] {
      status = shake_hands(pair.second);
      if (!status.ok()) pair.second.shutdown_send();
    });
    EXPECT_EQ(stranger.shake_hands(pair.first, false), row.good) << row.what;
    server.join();
    EXPECT_EQ(status.ok(), row.good) << row.what;
  }
}

TEST(Tls, OptionsTakeOneKeyFromOneSource) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/k";
  const auto key = must(ClusterKey::create(path));
  EXPECT_EQ(must(open_tls("", nullptr, TlsEnd::kClient)), nullptr);
  const auto client = must(open_tls(path, nullptr, TlsEnd::kClient));
  const auto server = must(open_tls("", key, TlsEnd::kServer));
  EXPECT_EQ(client->key().id(), key->id());
  EXPECT_EQ(server->key().id(), key->id());
  EXPECT_EQ(open_tls(path, key, TlsEnd::kClient).error().code(), Code::kInvalid);
  EXPECT_EQ(open_tls(path + "x", nullptr, TlsEnd::kClient).error().code(), Code::kNotFound);
  auto pair = must(socket_pair());
  EXPECT_EQ(server->connect(pair.first, in_seconds(20)).error().code(), Code::kInternal);
  EXPECT_EQ(client->accept(pair.second).error().code(), Code::kInternal);
  const Ends ends = meet(client, server);
  must(ends.client_status);
  must(ends.server_status);
}

}  // namespace
}  // namespace paramwire
