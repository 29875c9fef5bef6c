// Both ends of the plain programs (baseline_tcp.h, baseline_udp.h) on loopback, for C++ benchmarks: the server's sockets with a
// thread each, and a client by name. Functions give an errno, 0 when all is well.
#pragma once

#include "baseline_tcp.h"
#include "baseline_udp.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <netinet/in.h>
#include <string_view>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire_bench {

inline constexpr std::string_view kPlainTcp = "plain tcp";
inline constexpr std::string_view kPlainUdpSegments = "plain udp, segments";
inline constexpr std::string_view kPlainUdpDatagrams = "plain udp, 64 KiB datagrams";
// A server that is frozen or dead ends a fetch after so long.
inline constexpr std::uint32_t kPlainTimeoutMs = 60'000;

struct PlainPorts {
  std::uint16_t tcp = 0, udp = 0;
};

// A socket bound to a free port of 127.0.0.1, or connected to `port` there; -1 with errno.
inline int plain_socket(int type, std::uint16_t& port) {
  const int fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || (port != 0 ? connect(fd, generic, size) : bind(fd, generic, size)) != 0) return -1;
  if (port != 0) return fd;
  if (getsockname(fd, generic, &size) != 0) return -1;
  port = ntohs(address.sin_port);
  return fd;
}

// Answers plain clients with bytes of `region` until the process ends, which must be by _exit(): the threads are detached.
inline int serve_plain(const std::byte* region, std::size_t size, PlainPorts& ports) {
  const int listener = plain_socket(SOCK_STREAM, ports.tcp);
  if (listener < 0 || listen(listener, 16) != 0) return errno;
  const int datagrams = plain_socket(SOCK_DGRAM, ports.udp);
  if (datagrams < 0) return errno;
  std::thread([listener, region, size] {
    for (;;) {
      const int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) return;
      if (baseline_tcp_options(client, 0) == 0) baseline_tcp_serve(client, region, size);
      close(client);
    }
  }).detach();
  std::thread([datagrams, region, size] { baseline_udp_serve(datagrams, region, size); }).detach();
  return 0;
}

class PlainClient {
 public:
  PlainClient() = default;
  ~PlainClient() {
    if (fd_ >= 0) close(fd_);
  }
  PlainClient(const PlainClient&) = delete;
  PlainClient& operator=(const PlainClient&) = delete;

  // name: one of the three above
  int open(std::string_view name, PlainPorts ports) {
    tcp_ = name == kPlainTcp;
    fd_ = plain_socket(tcp_ ? SOCK_STREAM : SOCK_DGRAM, tcp_ ? ports.tcp : ports.udp);
    if (fd_ < 0) return errno;
    return tcp_ ? baseline_tcp_options(fd_, kPlainTimeoutMs) : baseline_udp_open(&udp_, fd_, name == kPlainUdpSegments, 0);
  }
  int fetch(std::uint64_t offset, std::byte* target, std::size_t size) {
    return tcp_ ? baseline_tcp_fetch(fd_, offset, target, size) : baseline_udp_fetch(&udp_, offset, target, size, kPlainTimeoutMs);
  }

 private:
  int fd_ = -1;
  bool tcp_ = true;
  baseline_udp_client udp_{};
};

// What a transport is measured against over sockets, each in a record of its own.
inline std::vector<std::string_view> plain_programs(std::string_view transport) {
  if (transport == "udp") return {kPlainUdpSegments, kPlainUdpDatagrams};
  return {kPlainTcp};
}

}  // namespace paramwire_bench
