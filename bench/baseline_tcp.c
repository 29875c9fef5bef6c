#include "baseline_tcp.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>

/* What a client sends. Both ends run on one host, so the byte order is the host's. */
struct request {
  uint64_t offset;
  uint64_t size;
};

/* A socket's own time limit ends a call with EAGAIN. */
static int as_timeout(int error) { return error == EAGAIN ? ETIMEDOUT : error; }

/* 0, errno, or ECONNRESET when the peer closed before all came; *got tells how much did. */
static int receive_all(int fd, void *target, size_t size, size_t *got) {
  for (*got = 0; *got < size;) {
    const ssize_t part = recv(fd, (char *)target + *got, size - *got, 0);
    if (part > 0) {
      *got += (size_t)part;
    } else if (part == 0) {
      return ECONNRESET;
    } else if (errno != EINTR) {
      return as_timeout(errno);
    }
  }
  return 0;
}

static int send_all(int fd, const void *source, size_t size) {
  for (size_t sent = 0; sent < size;) {
    const ssize_t part = send(fd, (const char *)source + sent, size - sent, MSG_NOSIGNAL);
    if (part >= 0) {
      sent += (size_t)part;
    } else if (errno != EINTR) {
      return as_timeout(errno);
    }
  }
  return 0;
}

int baseline_tcp_options(int fd, uint32_t timeout_ms) {
  const int on = 1;
  const struct timeval limit = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) return errno;
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0) return errno;
  return setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0 ? 0 : errno;
}

int baseline_tcp_serve(int fd, const void *region, uint64_t region_size) {
  for (;;) {
    struct request wanted;
    size_t got = 0;
    int error = receive_all(fd, &wanted, sizeof wanted, &got);
    if (error == ECONNRESET && got == 0) return 0; /* closed between requests: the client is done */
    if (error != 0) return error;
    if (wanted.offset > region_size || wanted.size > region_size - wanted.offset) return ERANGE;
    error = send_all(fd, (const char *)region + wanted.offset, wanted.size);
    if (error != 0) return error;
  }
}

int baseline_tcp_fetch(int fd, uint64_t offset, void *target, uint64_t size) {
  const struct request wanted = {offset, size};
  size_t got = 0;
  const int error = send_all(fd, &wanted, sizeof wanted);
  return error != 0 ? error : receive_all(fd, target, size, &got);
}
