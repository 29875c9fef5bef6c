/* The plain TCP fetch that paramwire's tcp transport is measured against: request and response over one connection between two
 * processes, blocking sockets with TCP_NODELAY, no check of the bytes. Whoever calls opens the sockets. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Turns Nagle's algorithm off, as paramwire's sockets do; no other option that moves bytes differs from the system's defaults.
 *
 * timeout_ms: silence after which a call on `fd` ends with ETIMEDOUT; 0: never
 * returns:    0, or errno */
int baseline_tcp_options(int fd, uint32_t timeout_ms);

/* Answers requests on `fd` with bytes of `region` until the peer closes.
 * returns: 0, errno of the call that failed, or ERANGE for a request beyond region_size */
int baseline_tcp_serve(int fd, const void *region, uint64_t region_size);

/* Reads `size` bytes at `offset` of the server's region into `target`.
 * returns: 0, errno of the call that failed, ETIMEDOUT (see baseline_tcp_options), or ECONNRESET when the server closed early */
int baseline_tcp_fetch(int fd, uint64_t offset, void *target, uint64_t size);

#ifdef __cplusplus
}
#endif
