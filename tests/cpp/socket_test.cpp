#include "paramwire/base/endpoint.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {
namespace {

Micros in_seconds(Micros seconds) { return steady_clock().now() + seconds * kMicrosPerSecond; }

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "pw-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

// Runs `body` in a forked child; its return value is the child's exit status.
template <typename Body>
int in_child(Body body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Endpoint, AcceptsEveryFormAndPrintsWhatParsesBack) {
  struct Row {
    const char* text;
    Endpoint endpoint;
  };
  const Row rows[] = {
      {"[::1]:7000", Endpoint::tcp("::1", 7000)},
      {"::1", Endpoint::tcp("::1", kDefaultPort)},
      {"[::1]", Endpoint::tcp("::1", kDefaultPort)},
      {"[fe80::1%lo]:7", Endpoint::tcp("fe80::1%lo", 7)},
      {"host:7", Endpoint::tcp("host", 7)},
      {"host", Endpoint::tcp("host", kDefaultPort)},
      {"tcp://host-1.example_x:65535", Endpoint::tcp("host-1.example_x", 65535)},
      {"tcp://127.0.0.1:0", Endpoint::tcp("127.0.0.1", 0)},
      {"::ffff:127.0.0.1", Endpoint::tcp("::ffff:127.0.0.1", kDefaultPort)},
      {"unix:/run/x.sock", Endpoint::unix_socket("/run/x.sock")},
      {"unix:relative:with:colons", Endpoint::unix_socket("relative:with:colons")},
  };
  for (const Row& row : rows) {
    const auto parsed = parse_endpoint(row.text);
    ASSERT_TRUE(parsed.ok()) << row.text << ": " << parsed.error().to_string();
    EXPECT_EQ(*parsed, row.endpoint) << row.text;
    EXPECT_EQ(*parse_endpoint(parsed->to_string()), row.endpoint) << parsed->to_string();
  }
}

TEST(Endpoint, RefusesWithThePositionOfTheFault) {
  struct Row {
    std::string text;
    std::size_t position;
  };
  const Row rows[] = {
      {"", 0}, {":7", 0}, {"host:", 5}, {"host:65536", 5}, {"host:7x", 6}, {"host:-1", 5}, {"[::1", 4}, {"[::1]7", 5}, {"[::1]:", 6},
      {"[1.2.3.4]:7", 1}, {"1.2.3", 5}, {"1.2.3.4.5:7", 9}, {"256.1.1.1", 9}, {"::1%", 4}, {":::1", 0}, {"ho st:7", 2}, {"tcp://", 6},
      {"tcp://host:", 11}, {"http://host:80", 0}, {"host/7", 4}, {"unix:", 5}, {std::string("unix:/a\0b", 9), 7}, {"unix:/" + std::string(200, 'x'), 112},
      {"host:99999999999999999999", 5},
  };
  for (const Row& row : rows) {
    const auto parsed = parse_endpoint(row.text);
    ASSERT_FALSE(parsed.ok()) << row.text;
    EXPECT_EQ(parsed.error().code(), Code::kInvalid);
    EXPECT_NE(parsed.error().message().find(cat("at position ", row.position, ':')), std::string::npos) << parsed.error().message();
  }
}

// Short counts: a send buffer of a few KiB makes every send partial, a reader that takes 1 to 4096 bytes makes every receive
// partial, and a signal without SA_RESTART interrupts both sides all the time (UP-33).
TEST(Socket, MovesEveryByteThroughShortCountsAndSignals) {
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {};
  sigaction(SIGUSR1, &action, &before);
  auto pair = *socket_pair();
  const int small = 1;  // raised to the kernel's minimum
  setsockopt(pair.first.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);

  std::vector<std::byte> sent(std::size_t{1} << 20);
  Random random(7);
  for (auto& byte : sent) byte = static_cast<std::byte>(random.next());
  std::vector<std::byte> received(sent.size());
  std::atomic<bool> over{false};
  std::thread sender([&] { EXPECT_TRUE(pair.first.send_all(sent, in_seconds(60)).ok()); });
  const pthread_t reader = pthread_self();
  std::thread signals([&] {
    while (!over) {
      pthread_kill(reader, SIGUSR1);
      std::this_thread::yield();
    }
  });
  std::size_t at = 0;
  while (at < received.size()) {
    const std::size_t want = std::min<std::size_t>(1 + random.below(4096), received.size() - at);
    const auto n = pair.second.receive(std::span(received).subspan(at, want), in_seconds(60));
    ASSERT_TRUE(n.ok()) << n.error().to_string();
    at += *n;
  }
  over = true;
  signals.join();
  sender.join();
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(sent, received);
}

TEST(Socket, ReceiveEndsAtTheDeadlineAndNamesThePeer) {
  auto pair = *socket_pair();
  std::byte byte{};
  const auto n = pair.first.receive({&byte, 1}, steady_clock().now());
  ASSERT_FALSE(n.ok());
  EXPECT_EQ(n.error().code(), Code::kTimeout);
  EXPECT_NE(n.error().message().find("socket pair"), std::string::npos);
}

TEST(Socket, SendToAClosedPeerIsAnErrorAndNoSignal) {
  auto pair = *socket_pair();
  pair.second.close();
  const std::byte byte{};
  EXPECT_EQ(pair.first.send_all({&byte, 1}, in_seconds(5)).error().code(), Code::kUnreachable);
  std::byte got{};
  EXPECT_EQ(pair.first.receive({&got, 1}, in_seconds(5)).error().code(), Code::kUnreachable);
}

TEST(Socket, ADescriptorTravelsWithItsByte) {
  auto pair = *socket_pair();
  const Fd memory(memfd_create("pw-test", MFD_CLOEXEC));
  ASSERT_EQ(write(memory.get(), "theta", 5), 5);
  std::byte byte{42};
  const iovec part{&byte, 1};
  ASSERT_TRUE(pair.first.try_send({&part, 1}, memory.get()).ok());
  std::byte got{};
  Fd arrived;
  ASSERT_TRUE(pair.second.try_receive({&got, 1}, arrived).ok());
  ASSERT_TRUE(arrived.valid());
  char text[6] = {};
  EXPECT_EQ(pread(arrived.get(), text, 5, 0), 5);
  EXPECT_STREQ(text, "theta");
}

TEST(Listener, AdvertisesThePortReallyBoundAndAccepts) {
  for (const char* text : {"tcp://127.0.0.1:0", "tcp://localhost:0", "[::1]:0"}) {
    auto listener = Listener::open(*parse_endpoint(text));
    if (!listener.ok() && text[0] == '[') continue;  // a host without IPv6
    ASSERT_TRUE(listener.ok()) << listener.error().to_string();
    EXPECT_NE(listener->endpoint().port, 0);
    auto client = Socket::connect(listener->endpoint(), in_seconds(10));
    ASSERT_TRUE(client.ok()) << client.error().to_string();
    auto accepted = listener->try_accept();
    ASSERT_TRUE(accepted.ok() && accepted->has_value());
    EXPECT_FALSE(listener->try_accept()->has_value());
  }
}

TEST(Listener, RefusesAddressesThatAreNotLoopback) {
  for (const char* text : {"0.0.0.0:0", "[::]:0", "10.1.2.3:0", "[::ffff:10.0.0.1]:0"}) {
    const auto listener = Listener::open(*parse_endpoint(text));
    ASSERT_FALSE(listener.ok()) << text;
    EXPECT_EQ(listener.error().code(), Code::kInvalid);
    EXPECT_NE(listener.error().message().find("only loopback and unix sockets"), std::string::npos);
  }
}

TEST(Listener, NamesThePortThatIsTaken) {
  auto first = *Listener::open(Endpoint::tcp("127.0.0.1", 0));
  const auto second = Listener::open(first.endpoint());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), Code::kUnavailable);
  EXPECT_NE(second.error().message().find(first.endpoint().to_string()), std::string::npos);
}

TEST(Listener, ReplacesAStaleSocketFileOnlyWhenNobodyAnswers) {
  TemporaryDirectory directory;
  const Endpoint endpoint = Endpoint::unix_socket(directory / "s");
  {
    auto living = Listener::open(endpoint);
    ASSERT_TRUE(living.ok());
    EXPECT_EQ(std::filesystem::status(endpoint.path).permissions(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    EXPECT_EQ(Listener::open(endpoint).error().code(), Code::kUnavailable);
    EXPECT_TRUE(Socket::connect(endpoint, in_seconds(5)).ok());
    living->disown();  // as after SIGKILL: the file stays
  }
  ASSERT_TRUE(std::filesystem::exists(endpoint.path));
  EXPECT_EQ(Socket::connect(endpoint, in_seconds(5)).error().code(), Code::kUnreachable);
  {
    auto next = Listener::open(endpoint);
    ASSERT_TRUE(next.ok()) << next.error().to_string();
  }
  EXPECT_FALSE(std::filesystem::exists(endpoint.path));
  std::ofstream(endpoint.path) << "precious";
  EXPECT_EQ(Listener::open(endpoint).error().code(), Code::kUnavailable);
  EXPECT_TRUE(std::filesystem::exists(endpoint.path));
}

TEST(Socket, ConnectErrorsNameThePeerAndTheReason) {
  auto gone = Listener::open(Endpoint::tcp("127.0.0.1", 0))->endpoint();
  auto refused = Socket::connect(gone, in_seconds(5));
  EXPECT_EQ(refused.error().code(), Code::kUnreachable);
  EXPECT_NE(refused.error().message().find(gone.to_string()), std::string::npos);
  EXPECT_EQ(Socket::connect(Endpoint::tcp("127.0.0.1", 0), in_seconds(5)).error().code(), Code::kInvalid);
  EXPECT_EQ(Socket::connect(Endpoint::unix_socket("/nonexistent/x"), in_seconds(5)).error().code(), Code::kUnreachable);
}

TEST(Socket, AFreshNetworkNamespaceIsNamedByItsDownInterface) {
  constexpr int kNoNamespace = 77;
  const int status = in_child([] {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && unshare(CLONE_NEWNET) != 0) return kNoNamespace;
    const auto client = Socket::connect(Endpoint::tcp("127.0.0.1", 7411), in_seconds(1));
    if (client.ok() || client.error().code() != Code::kUnavailable) return 1;
    if (client.error().message().find("interface lo is down") == std::string::npos) return 2;
    return loopback_down() == "lo" ? 0 : 3;
  });
  if (status == kNoNamespace) GTEST_SKIP() << "no permission to make a network namespace";
  EXPECT_EQ(status, 0);
}

// Whoever asks for the end of this thread's waits: `asked` counts the questions.
std::atomic<int> asked{0};
std::atomic<int> yes_from{0};
bool ask() { return ++asked >= yes_from; }

TEST(Interrupt, WaitsEndBeforeTheirDeadlineAndStayEnded) {
  auto pair = *socket_pair();
  std::mutex mutex;
  std::condition_variable changed;
  asked = 0;
  yes_from = 2;
  {
    const WaitInterrupt interrupt(&ask);
    std::byte byte{};
    const auto got = pair.first.receive({&byte, 1}, in_seconds(60));
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.error().code(), Code::kTimeout);
    EXPECT_NE(got.error().message().find("interrupted"), std::string::npos) << got.error().message();
    EXPECT_EQ(asked, 2);
    std::unique_lock lock(mutex);
    EXPECT_FALSE(wait_on(changed, lock, in_seconds(60), [] { return false; }));
    EXPECT_TRUE(lock.owns_lock());
    EXPECT_EQ(asked, 2) << "once it said so nobody is asked again";
  }
  EXPECT_FALSE(wait_interrupted());
  std::unique_lock lock(mutex);
  EXPECT_FALSE(wait_on(changed, lock, steady_clock().now() + 1000, [] { return false; }));
  EXPECT_TRUE(wait_on(changed, lock, 0, [] { return true; }));
}

TEST(Interrupt, IsTheThreadsOwnAndAsksWithNoLockHeld) {
  std::mutex mutex;
  std::condition_variable changed;
  bool ready = false;
  static std::mutex* taken = nullptr;
  static std::atomic<bool> questioned = false;
  taken = &mutex;
  std::thread setter;
  {
    const WaitInterrupt interrupt([] {
      const std::lock_guard free(*taken);  // would never return if the wait held it
      questioned = true;
      return false;
    });
    setter = std::thread([&] {
      EXPECT_FALSE(wait_interrupted());
      EXPECT_EQ(wait_slice(kNever), kNever);
      while (!questioned) std::this_thread::yield();
      const std::lock_guard lock(mutex);
      ready = true;
      changed.notify_one();
    });
    std::unique_lock lock(mutex);
    EXPECT_TRUE(wait_on(changed, lock, kNever, [&] { return ready; }));
  }
  setter.join();
}

TEST(ForkGuard, KnowsTheChildAndOnlyTheChild) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.in_child());
  EXPECT_EQ(in_child([&] {
              const ForkGuard own;
              return guard.in_child() && guard.check("link").error().message().find("handle used after fork") != std::string::npos && !own.in_child() ? 0 : 1;
            }), 0);
  EXPECT_TRUE(guard.check("link").ok());
}

}  // namespace
}  // namespace paramwire
