/* The plain UDP fetch that paramwire's udp transport is measured against: a client that asks for chunks of a region and keeps a
 * window of them on the way, a server that keeps nothing about its clients, no check of the bytes. One chunk is one datagram of up to
 * 64 KiB, or one train of segments that the kernel cuts and joins (UDP_SEGMENT and UDP_GRO: linux, Documentation/networking, udp(7)).
 * Whoever calls opens the sockets, IPv4 or IPv6; the client's is connected to the server's.
 *
 * It is as fast as a plain program gets, and no more than that: a chunk has one header, so the segments of a train are taken to
 * arrive in the order in which they were sent, as one path delivers them. Whoever calls checks the bytes. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct baseline_udp_client {
  int fd;
  uint32_t segment;              /* payload bytes of a segment; 0: one datagram a chunk */
  int spin;                      /* both sides poll without sleeping, the server for a few milliseconds after each request */
  uint32_t window;               /* chunks asked for and not yet received, at most */
  uint32_t receive_buffer_bytes; /* as read back from the kernel */
  uint32_t tag;                  /* of the requests on the way: answers to older ones are ignored */
  uint64_t retries;              /* times that everything on the way was asked for again */
  uint64_t lost_datagrams;       /* asked for and not there when they were asked for again; a segment counts as one */
  uint64_t late_datagrams;       /* of those, how many came after all: the rest is what the network dropped */
};

/* Sets up `client` over `fd`, a UDP socket connected to a server's: buffers, a window that fits into the receive buffer.
 *
 * segmented: trains of segments that fill the frames of the route, on loopback those of Ethernet: 1472 bytes of UDP payload, 1452 over
 *            IPv6; else 64 KiB datagrams, which a narrower route takes in fragments
 * returns:   0, or errno; ENOPROTOOPT or EINVAL when this kernel has no UDP_SEGMENT or UDP_GRO */
int baseline_udp_open(struct baseline_udp_client *client, int fd, int segmented, int spin);

/* Answers the requests that reach `fd`, a bound UDP socket, from any number of clients, until it is shut down or fails.
 * Requests beyond region_size and what is no request are ignored, as is whatever goes wrong with one client.
 * returns: 0 when the socket was shut down, else errno of the call that failed */
int baseline_udp_serve(int fd, const void *region, uint64_t region_size);

/* Reads `size` bytes at `offset` of the server's region into `target`.
 *
 * timeout_ms: for the whole of it
 * returns:    0; ETIMEDOUT when the time was over, or retries brought nothing new for seconds; ECONNREFUSED when nobody listens there; errno
 *             of another call that failed */
int baseline_udp_fetch(struct baseline_udp_client *client, uint64_t offset, void *target, uint64_t size, uint32_t timeout_ms);

#ifdef __cplusplus
}
#endif
