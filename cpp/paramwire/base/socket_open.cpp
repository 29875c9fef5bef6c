// How sockets come to be: names resolved, connections made, listeners bound.
#include "paramwire/base/interrupt.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/base/text.hpp"

#include <arpa/inet.h>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {

namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage); }
  const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage); }

  bool loopback() const {
    if (family() == AF_INET) return ntohl(v4().sin_addr.s_addr) >> 24 == 127;
    const in6_addr& a = v6().sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&a)) return a.s6_addr[12] == 127;
    return IN6_IS_ADDR_LOOPBACK(&a);
  }
};

// What getaddrinfo found, shared with the thread that asks: who waits may leave at its deadline.
struct Lookup {
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
  int error = 0;
  int error_number = 0;
  std::vector<Address> found;
};

void look_up(Lookup& lookup, const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  const std::lock_guard lock(lookup.mutex);
  lookup.error = error;
  lookup.error_number = errno;
  for (const addrinfo* i = list; error == 0 && i != nullptr; i = i->ai_next) {
    Address address;
    std::memcpy(&address.storage, i->ai_addr, i->ai_addrlen);
    address.size = i->ai_addrlen;
    lookup.found.push_back(address);
  }
  if (list != nullptr) freeaddrinfo(list);
  lookup.finished = true;
  lookup.done.notify_all();
}

bool numeric(const std::string& host) {
  in_addr v4{};
  return host.find(':') != std::string::npos || inet_pton(AF_INET, host.c_str(), &v4) == 1;
}

// getaddrinfo has no deadline of its own, and a dead name server costs it half a minute. So names are looked up in a thread
// of their own, which is left behind when the deadline passes first; it touches nothing but `lookup`.
Result<std::vector<Address>> resolve(const Endpoint& endpoint, Micros deadline) {
  const auto lookup = std::make_shared<Lookup>();
  if (numeric(endpoint.host)) {
    look_up(*lookup, endpoint.host, endpoint.port, AI_NUMERICHOST);
  } else {
    try {
      std::thread([lookup, host = endpoint.host, port = endpoint.port] { look_up(*lookup, host, port, 0); }).detach();
    } catch (const std::system_error& refused) {
      return Error(Code::kUnavailable, cat("no thread to look up ", endpoint, ": ", std::string_view(refused.what())));
    }
    std::unique_lock lock(lookup->mutex);
    if (!wait_on(lookup->done, lock, deadline, [&] { return lookup->finished; })) {
      return Error(Code::kTimeout, cat(endpoint, ": the deadline passed while looking up the name"));
    }
  }
  const std::lock_guard lock(lookup->mutex);
  if (lookup->error == 0 && !lookup->found.empty()) return lookup->found;
  if (lookup->error == EAI_SYSTEM) return errno_error(Code::kUnreachable, cat(endpoint, ": looking up the name"), lookup->error_number);
  return Error(Code::kUnreachable, cat(endpoint, ": ", std::string_view(gai_strerror(lookup->error))));
}

Result<Address> unix_address(const std::string& path) {
  Address address;
  auto& un = reinterpret_cast<sockaddr_un&>(address.storage);
  if (path.empty() || path.size() >= sizeof un.sun_path) {
    return Error(Code::kInvalid, cat("unix:", path, ": a socket path has 1 to ", sizeof un.sun_path - 1, " bytes, this one ", path.size()));
  }
  un.sun_family = AF_UNIX;
  std::memcpy(un.sun_path, path.data(), path.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  return address;
}

Error address_error(Code code, const std::string& what, const Address& address, int error) {
  if (address.family() != AF_UNIX && address.loopback() && (error == ENETUNREACH || error == EADDRNOTAVAIL || error == EHOSTUNREACH || error == EINVAL)) {
    if (const std::string name = loopback_down(); !name.empty()) {
      return errno_error(Code::kUnavailable, cat(what, ": the loopback interface ", name, " is down in this network namespace; run \"ip link set ", name, " up\""), error);
    }
  }
  return errno_error(code, what, error);
}

Error connect_error(const std::string& peer, const Address& address, int error) {
  const Error plain = address_error(Code::kUnreachable, cat(peer, ": connect"), address, error);
  if (error != ENOENT && error != ECONNREFUSED) return plain;
  return Error(plain.code(), cat(plain.message(), "; nobody listens there: start the server, or take the address that `paramwire serve` printed"));
}

Result<Socket> connect_address(const Address& address, const std::string& peer, Micros deadline) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno_error(Code::kUnavailable, cat(peer, ": socket"), errno);
  Socket out(std::move(fd), peer);
  for (;;) {
    if (::connect(out.fd(), address.get(), address.size) == 0) return out;
    if (errno == EINTR) continue;  // non-blocking: nothing is under way yet, or EALREADY follows
    if (errno == EAGAIN) {         // unix(7): the listener's backlog is full; there is nothing to poll for
      if (steady_clock().now() >= deadline || wait_interrupted()) return Error(Code::kTimeout, cat(peer, ": its queue of connections stayed full until the deadline"));
      timespec pause{0, 1'000'000};
      ppoll(nullptr, 0, &pause, nullptr);
      continue;
    }
    if (errno == EISCONN) return out;
    if (errno != EINPROGRESS && errno != EALREADY) return connect_error(peer, address, errno);
    break;
  }
  PARAMWIRE_CHECK(out.wait(POLLOUT, deadline));
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(out.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return connect_error(peer, address, error);
  return out;
}

}  // namespace

Result<Socket> Socket::connect(const Endpoint& endpoint, Micros deadline) {
  const std::string peer = endpoint.to_string();
  if (endpoint.kind == Endpoint::Kind::kUnix) {
    PARAMWIRE_TRY(address, unix_address(endpoint.path));
    return connect_address(address, peer, deadline);
  }
  if (endpoint.port == 0) return Error(Code::kInvalid, cat(peer, ": nobody can be reached at port 0; name the port that the server printed"));
  PARAMWIRE_TRY(addresses, resolve(endpoint, deadline));
  Result<Socket> last = Error(Code::kUnreachable, peer);
  for (const Address& address : addresses) {  // "localhost" is often two addresses of which one listens
    last = connect_address(address, peer, deadline);
    if (last.ok()) break;
  }
  return last;
}

// ---------------------------------------------------------------- listeners

Result<Listener> Listener::open(const Endpoint& endpoint, Reach reach) {
  return endpoint.kind == Endpoint::Kind::kUnix ? open_unix(endpoint) : open_tcp(endpoint, reach);
}

Result<Listener> Listener::open_tcp(const Endpoint& endpoint, Reach reach) {
  PARAMWIRE_TRY(addresses, resolve(endpoint, steady_clock().now() + 5 * kMicrosPerSecond));
  for (const Address& address : addresses) {
    if (address.loopback() || reach == Reach::kAnywhere) continue;
    return Error(Code::kInvalid, cat("listen on ", endpoint, ": that is no loopback address, and without a cluster key only loopback and unix sockets are served; make a key with \"paramwire key new\" and give it to the server and its clients (--key FILE, key=FILE), or listen on 127.0.0.1"));
  }
  const Address& address = addresses.front();
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno_error(Code::kUnavailable, cat("listen on ", endpoint, ": socket"), errno);
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // a restarted server gets its port back from TIME_WAIT
  if (::bind(fd.get(), address.get(), address.size) != 0) return address_error(Code::kUnavailable, cat("listen on ", endpoint, ": bind"), address, errno);
  if (::listen(fd.get(), SOMAXCONN) != 0) return address_error(Code::kUnavailable, cat("listen on ", endpoint), address, errno);
  Address bound;
  bound.size = sizeof bound.storage;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.size) != 0) {
    return errno_error(Code::kUnavailable, cat("listen on ", endpoint, ": getsockname"), errno);
  }
  const std::uint16_t port = ntohs(bound.family() == AF_INET ? bound.v4().sin_port : bound.v6().sin6_port);
  return Listener(std::move(fd), Endpoint::tcp(endpoint.host, port));
}

Result<Listener> Listener::open_unix(const Endpoint& endpoint) {
  PARAMWIRE_TRY(address, unix_address(endpoint.path));
  const auto failed = [&](std::string_view step) { return errno_error(Code::kUnavailable, cat("listen on ", endpoint, ": ", step), errno); };
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed("socket");
  if (::bind(fd.get(), address.get(), address.size) != 0) {
    if (errno != EADDRINUSE) return failed("bind");
    struct stat found{};
    if (::lstat(endpoint.path.c_str(), &found) != 0 || !S_ISSOCK(found.st_mode)) {
      return Error(Code::kUnavailable, cat("listen on ", endpoint, ": a file that is no socket is in the way; choose another path or move it"));
    }
    const auto answer = connect_address(address, endpoint.to_string(), steady_clock().now() + kMicrosPerSecond);
    const Fd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const bool refused = !answer.ok() && ::connect(probe.get(), address.get(), address.size) != 0 && errno == ECONNREFUSED;
    if (!refused) return Error(Code::kUnavailable, cat("listen on ", endpoint, ": another server answers there; choose another path or end it"));
    if (::unlink(endpoint.path.c_str()) != 0 || ::bind(fd.get(), address.get(), address.size) != 0) return failed("replace a stale socket file");
  }
  Listener out(std::move(fd), endpoint);
  struct stat made{};
  if (::stat(endpoint.path.c_str(), &made) == 0) out.inode_ = made.st_ino;
  // Before listen(): nobody can connect while the file has the umask's mode.
  if (::chmod(endpoint.path.c_str(), 0600) != 0) return failed("chmod");
  if (::listen(out.fd_.get(), SOMAXCONN) != 0) return failed("listen");
  return out;
}

Result<std::optional<Socket>> Listener::try_accept() {
  for (;;) {
    const int fd = ::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      Socket socket(Fd(fd), cat("client ", ++accepted_, " of ", endpoint_));
      return std::optional(std::move(socket));
    }
    switch (errno) {
      case EAGAIN: return std::optional<Socket>();
      case EINTR:
      case ECONNABORTED:  // that client left before its turn
      case EPROTO: continue;
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM: return errno_error(Code::kBackpressure, cat(endpoint_, ": accept"), errno);
      default: return errno_error(Code::kUnavailable, cat(endpoint_, ": accept"), errno);
    }
  }
}

void Listener::close() noexcept {
  if (!fd_.valid()) return;
  fd_.reset();
  struct stat found{};
  if (inode_ != 0 && ::lstat(endpoint_.path.c_str(), &found) == 0 && found.st_ino == inode_) ::unlink(endpoint_.path.c_str());
}

}  // namespace paramwire
