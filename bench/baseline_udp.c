#define _GNU_SOURCE /* sendmmsg, recvmmsg */
#include "baseline_udp.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif

enum {
  /* Bytes of a chunk. With its header it fits into the largest datagram of IPv4 (65507), and is no whole number of segments: the short
   * one at the end keeps the kernel from joining a chunk to the next. */
  kChunkBytes = 63 * 1024,
  /* What UDP and IP put before the payload. */
  kHeadersIpv4 = 28,
  kHeadersIpv6 = 48,
  /* Frames of Ethernet, which segments are cut for where the route takes more than any network has: on loopback, whose 65536 IPv4 tells
   * as the 65535 that its packets have at most. */
  kFrameBytes = 1500,
  kLoopbackMtu = 65535,
  /* No route is narrower (RFC 791). */
  kSegmentMin = 576 - kHeadersIpv4,
  /* Most chunks on the way, and most requests that the server takes at once: 1 MiB keeps the pipe of a loopback full. */
  kWindowMax = 16,
  /* Receive and send buffer asked for; the kernel gives what net.core.rmem_max allows. */
  kBufferBytes = 4 << 20,
  /* Silence after which the chunks on the way count as lost, far above the time in which an idle machine schedules a server; it doubles
   * with each retry that brings nothing, as a busy machine takes longer and must not get more to do, up to kSilenceDoublings times. */
  kSilenceMs = 20,
  kSilenceDoublings = 5,
  /* Retries without a new byte after which the server counts as dead: 5 s of silence. */
  kRetriesMax = 12,
  /* How long a server goes on polling after a request that asks for it: the pause between two of a ping-pong is far shorter. */
  kSpinMs = 5,
  /* Polls between two looks at the clock. */
  kSpinTurns = 64,
  kSpin = 1u, /* a flag of requests */
};

/* Both ends run on hosts of one byte order. */
struct request {
  uint64_t offset;
  uint32_t size;
  uint32_t tag;
  uint16_t segment;
  uint16_t flags;
  uint32_t magic; /* what else reaches the port is ignored */
};
struct header {
  uint64_t offset;
  uint32_t size;
  uint32_t tag;
};
enum { kMagic = 0x70775542 };

static uint64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void set_buffers(int fd) {
  const int bytes = kBufferBytes;
  /* The kernel clamps them without a word; what came of it is read back where it matters. */
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

/* ---------------------------------------------------------------- client */

int baseline_udp_open(struct baseline_udp_client *client, int fd, int segmented, int spin) {
  struct sockaddr_storage address;
  socklen_t size = sizeof address;
  if (getsockname(fd, (struct sockaddr *)&address, &size) != 0) return errno;
  const int v6 = address.ss_family == AF_INET6, on = 1;
  int mtu = 0;
  size = sizeof mtu;
  if ((v6 ? getsockopt(fd, IPPROTO_IPV6, IPV6_MTU, &mtu, &size) : getsockopt(fd, IPPROTO_IP, IP_MTU, &mtu, &size)) != 0) return errno;
  if (mtu >= kLoopbackMtu) mtu = kFrameBytes;
  const int segment = mtu - (v6 ? kHeadersIpv6 : kHeadersIpv4);
  if (segmented) {
    /* Sending is the server's; asking here tells whether this kernel can. A segment size of 0 turns it off again. */
    const int off = 0;
    if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment) != 0) return errno;
    if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &off, sizeof off) != 0) return errno;
    if (setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on) != 0) return errno;
  }
  set_buffers(fd);
  int buffer = 0;
  size = sizeof buffer;
  if (getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, &size) != 0) return errno;
  const struct timeval silence = {.tv_sec = 0, .tv_usec = kSilenceMs * 1000};
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &silence, sizeof silence) != 0) return errno;
  memset(client, 0, sizeof *client);
  client->fd = fd;
  client->segment = segmented ? (uint32_t)segment : 0;
  client->spin = spin;
  client->receive_buffer_bytes = (uint32_t)buffer;
  /* The kernel charges a packet more than its payload, up to twice as much for one of 1472 bytes. */
  const int fits = buffer / (2 * kChunkBytes);
  client->window = (uint32_t)(fits < 1 ? 1 : fits > kWindowMax ? kWindowMax : fits);
  return 0;
}

static uint64_t datagrams(const struct baseline_udp_client *client, uint64_t bytes) {
  const uint64_t chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
  return client->segment == 0 ? chunks : (bytes + chunks * sizeof(struct header) + client->segment - 1) / client->segment;
}

/* 0, EAGAIN for silence, or errno */
static int ask(struct baseline_udp_client *client, uint64_t offset, uint32_t size) {
  const struct request wanted = {offset, size, client->tag, (uint16_t)client->segment, client->spin ? kSpin : 0, kMagic};
  while (send(client->fd, &wanted, sizeof wanted, 0) < 0) {
    if (errno == ENOBUFS) return EAGAIN;
    if (errno != EINTR) return errno;
  }
  return 0;
}

/* Bytes of the next message, in the header and then at `target`; or -1 and errno, EAGAIN when none came until `silent_at`. */
static ssize_t next_message(struct baseline_udp_client *client, struct header *head, void *target, size_t room, uint64_t silent_at) {
  struct iovec parts[2] = {{head, sizeof *head}, {target, room}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  for (unsigned turn = 1;; ++turn) {
    const ssize_t got = recvmsg(client->fd, &message, client->spin ? MSG_DONTWAIT : 0);
    if (got >= 0) {
      if (message.msg_flags & MSG_TRUNC) return 0; /* longer than what was asked for: no answer of ours */
      return got;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return -1;
    if ((!client->spin || turn % kSpinTurns == 0) && now_ms() >= silent_at) {
      errno = EAGAIN;
      return -1;
    }
  }
}

int baseline_udp_fetch(struct baseline_udp_client *client, uint64_t offset, void *target, uint64_t size, uint32_t timeout_ms) {
  uint64_t now = now_ms(), done = 0, asked = 0; /* `done` and `asked` are bytes */
  const uint64_t deadline = now + timeout_ms;
  int fruitless = 0;
  ++client->tag;
  for (; done < size; now = now_ms()) {
    if (now >= deadline) return ETIMEDOUT;
    int error = 0;
    while (error == 0 && asked < size && asked - done < (uint64_t)client->window * kChunkBytes) {
      const uint32_t part = size - asked < kChunkBytes ? (uint32_t)(size - asked) : kChunkBytes;
      error = ask(client, offset + asked, part);
      if (error == 0) asked += part;
    }
    if (error != 0 && error != EAGAIN) return error;
    const uint64_t wanted = size - done < kChunkBytes ? size - done : kChunkBytes;
    struct header head = {0, 0, 0};
    const uint64_t silent_at = now + ((uint64_t)kSilenceMs << (fruitless < kSilenceDoublings ? fruitless : kSilenceDoublings));
    const ssize_t got = next_message(client, &head, (char *)target + done, wanted, silent_at < deadline ? silent_at : deadline);
    if (got < 0 && errno != EAGAIN) return errno;
    if (got >= (ssize_t)sizeof head && head.tag != client->tag) {
      client->late_datagrams += datagrams(client, (uint64_t)got - sizeof head);
      continue;
    }
    if (got >= 0 && (size_t)got == sizeof head + head.size && head.size == wanted && head.offset == offset + done) {
      done += head.size;
      fruitless = 0;
      continue;
    }
    /* Silence, or a gap: on one path, what was jumped over is lost. All that is on the way is asked for again. */
    if (++fruitless > kRetriesMax) return ETIMEDOUT;
    ++client->retries;
    ++client->tag;
    client->lost_datagrams += datagrams(client, asked - done);
    asked = done;
  }
  return 0;
}

/* ---------------------------------------------------------------- server */

struct batch {
  struct request wanted[kWindowMax];
  struct header heads[kWindowMax];
  struct sockaddr_storage peers[kWindowMax];
  struct iovec in[kWindowMax];
  struct iovec out[kWindowMax][2];
  struct mmsghdr received[kWindowMax];
  struct mmsghdr answers[kWindowMax];
  /* The size of segments, for answers that have more than one. */
  union {
    size_t aligned;
    char bytes[CMSG_SPACE(sizeof(uint16_t))];
  } controls[kWindowMax];
};

static void prepare(struct batch *batch) {
  memset(batch, 0, sizeof *batch);
  for (int i = 0; i < kWindowMax; ++i) {
    batch->in[i] = (struct iovec){&batch->wanted[i], sizeof batch->wanted[i]};
    batch->received[i].msg_hdr.msg_iov = &batch->in[i];
    batch->received[i].msg_hdr.msg_iovlen = 1;
    batch->received[i].msg_hdr.msg_name = &batch->peers[i];
  }
}

/* Makes answer `at` to request `i`; 0 when it is none that can be answered. */
static int make_answer(struct batch *batch, int i, unsigned at, const char *region, uint64_t region_size) {
  const struct request *wanted = &batch->wanted[i];
  if (batch->received[i].msg_len != sizeof *wanted || wanted->magic != kMagic || wanted->size > kChunkBytes) return 0;
  if (wanted->offset > region_size || wanted->size > region_size - wanted->offset) return 0;
  if (wanted->segment != 0 && wanted->segment < kSegmentMin) return 0;
  batch->heads[at] = (struct header){wanted->offset, wanted->size, wanted->tag};
  batch->out[at][0] = (struct iovec){&batch->heads[at], sizeof batch->heads[at]};
  /* sendmsg(2) only reads; iovec has no const. */
  batch->out[at][1] = (struct iovec){(void *)(uintptr_t)(region + wanted->offset), wanted->size};
  struct msghdr *message = &batch->answers[at].msg_hdr;
  *message = (struct msghdr){.msg_name = &batch->peers[i], .msg_namelen = batch->received[i].msg_hdr.msg_namelen, .msg_iov = batch->out[at], .msg_iovlen = 2};
  if (wanted->segment != 0 && sizeof(struct header) + wanted->size > wanted->segment) {
    message->msg_control = batch->controls[at].bytes;
    message->msg_controllen = sizeof batch->controls[at].bytes;
    struct cmsghdr *control = CMSG_FIRSTHDR(message);
    control->cmsg_level = IPPROTO_UDP;
    control->cmsg_type = UDP_SEGMENT;
    control->cmsg_len = CMSG_LEN(sizeof wanted->segment);
    memcpy(CMSG_DATA(control), &wanted->segment, sizeof wanted->segment);
  }
  return 1;
}

int baseline_udp_serve(int fd, const void *region, uint64_t region_size) {
  struct batch batch;
  prepare(&batch);
  set_buffers(fd);
  uint64_t spin_until = 0;
  for (unsigned turn = 1;; ++turn) {
    for (int i = 0; i < kWindowMax; ++i) batch.received[i].msg_hdr.msg_namelen = sizeof batch.peers[i];
    const int got = recvmmsg(fd, batch.received, kWindowMax, spin_until != 0 ? MSG_DONTWAIT : MSG_WAITFORONE, NULL);
    if (got < 0) {
      if (errno == EAGAIN) {
        if (turn % kSpinTurns == 0 && now_ms() >= spin_until) spin_until = 0;
      } else if (errno != EINTR && errno != ECONNREFUSED) { /* a client that is gone says so by ICMP */
        return errno;
      }
      continue;
    }
    if (got > 0 && batch.received[0].msg_len == 0 && batch.received[0].msg_hdr.msg_namelen == 0) return 0; /* shut down */
    unsigned count = 0;
    int spin = 0;
    for (int i = 0; i < got; ++i) {
      if (!make_answer(&batch, i, count, region, region_size)) continue;
      ++count;
      spin |= batch.wanted[i].flags & kSpin;
    }
    spin_until = spin ? now_ms() + kSpinMs : 0;
    for (unsigned sent = 0; sent < count;) {
      const int part = sendmmsg(fd, batch.answers + sent, count - sent, 0);
      /* An answer that can't be sent is lost: its client asks again. */
      sent += part > 0 ? (unsigned)part : errno == EINTR ? 0 : 1;
    }
  }
}
