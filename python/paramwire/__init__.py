"""Model parameters away from compute: versioned, verified blocks, served to stateless nodes.

    import numpy as np
    import paramwire as pw

    with pw.Server() as server:
        with server.publish() as p:
            p.put("w", np.ones((2, 3), np.float32))
        with pw.connect(server.address) as client, client.snapshot() as snapshot:
            w = snapshot.fetch("w")

Every call has a deadline; errors are subclasses of paramwire.Error, one for each thing that a caller can do next.
Sizes are bytes, times are seconds. Objects may be used from any thread and end with `close()` or `with`; in the child
of a fork they raise InvalidError.
"""

from __future__ import annotations

import functools
import os
import stat
import warnings
from collections.abc import Sequence

from paramwire._core import (
    BackpressureError,
    Checkpoint,
    CheckpointProgress,
    Client,
    CorruptError,
    DeadlineError,
    DeniedError,
    Engine,
    Error,
    Graph,
    InternalError,
    InvalidError,
    Labelled,
    Mirror,
    NotFoundError,
    Publish,
    Registration,
    Snapshot,
    StaleError,
    Ticket,
    UnavailableError,
    UnreachableError,
    View,
    __version__,
    available,
    crc32c,
    crc64,
    key_id,
    new_key,
)
from paramwire._core import Server as _Server
from paramwire._types import BertConfig, BlockInfo, Durations, FallbackWarning, LlamaConfig, TensorInfo, Version
from paramwire.telemetry import Trace, prometheus_text

__all__ = [
    "BackpressureError",
    "BertConfig",
    "BlockInfo",
    "Checkpoint",
    "CheckpointProgress",
    "Client",
    "CorruptError",
    "DeadlineError",
    "DeniedError",
    "Durations",
    "Engine",
    "Error",
    "FallbackWarning",
    "Graph",
    "InternalError",
    "InvalidError",
    "Labelled",
    "LlamaConfig",
    "Mirror",
    "NotFoundError",
    "Publish",
    "Registration",
    "Server",
    "Snapshot",
    "StaleError",
    "TensorInfo",
    "Ticket",
    "Trace",
    "UnavailableError",
    "UnreachableError",
    "Version",
    "View",
    "__version__",
    "available",
    "connect",
    "crc32c",
    "crc64",
    "key_id",
    "new_key",
    "prometheus_text",
]


def _private_directory() -> str:
    """Where sockets of servers go: the user's run directory if there is one, else a directory of the user's among the
    temporary ones.

    The path only; the server makes it with mode 0700, and refuses one that others can enter.
    """
    run = f"/run/user/{os.getuid()}"
    try:
        found = os.stat(run)
    except OSError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and os.access(run, os.W_OK):
        return f"{run}/paramwire"
    import tempfile

    return f"{tempfile.gettempdir()}/paramwire-{os.getuid()}"


class Server(_Server):
    """A parameter server in this process."""

    def __init__(
        self,
        listen: str | Sequence[str] | None = None,
        *,
        unix_directory: str | os.PathLike[str] | None = None,
        state: str | os.PathLike[str] | None = None,
        memory_limit: int | None = None,
        arena_bytes: int | None = None,
        huge_pages: str = "no",
        tier: str = "memory",
        lease_ttl_max: float = 60.0,
        lease_age_max: float = 600.0,
        retained: int = 3,
        quarantine_limit: int | None = None,
        udp: bool = True,
        busy_poll: bool = False,
        trace: Trace | None = None,
        key: str | os.PathLike[str] | None = None,
        verbs: str = "auto",
        verbs_gid_index: int | None = None,
        delta_limit: int = 1 << 30,
        epoch_after: int = 0,
    ) -> None:
        """Listen and serve, in a thread of its own, until `close()`.

        listen:            addresses "tcp://HOST:PORT" (port 0: any free one) and "unix:PATH"; by default
                           tcp://127.0.0.1:0 and a unix socket in `unix_directory`. Without a key only loopback and
                           unix sockets are served
        unix_directory:    of the default unix socket; by default one that only this user can enter, made with mode 0700
        state:             file that keeps the epoch over restarts; by default the epoch grows with the clock
        memory_limit:      bytes that the store may take; by default what the machine or cgroup has
        arena_bytes:       address space of one arena, default 1 GiB
        huge_pages:        "no", "try" or "require" 2 MiB pages
        tier:              "memory", which readers on this host can map, or "heap", private
        lease_ttl_max:     longest single grant of a lease, seconds
        lease_age_max:     age from which a publish that needs room may revoke a lease, seconds
        retained:          versions that can be read without a lease
        quarantine_limit:  bytes of superseded blocks that views may hold before publishes are refused, default 1 GiB
        udp:               take datagrams at each tcp address, on the same port number where that is free
        busy_poll:         the thread that answers datagrams spins: answers come several times sooner, for a whole core
        trace:             records this server's spans; by default nothing is recorded
        key:               file of the cluster key (`paramwire key new FILE`): with it every TCP connection is
                           encrypted, and only clients with the same key are served
        verbs:             "auto": the arenas can be read by RDMA where there is a device; "off"; or a device, "rx0", or
                           with its port "rx0:1", which must work then. stats()["no_verbs"] says why it is not to be had
        verbs_gid_index:   of that port's GID table; by default chosen for each client by its address
        delta_limit:       bytes of deltas kept for mirrors that hold older versions; none is made before a mirror asks.
                           0: never
        epoch_after:       the epoch is above this one: that of the checkpoint which the server is to hold, so that its
                           versions are above those that readers may have seen
        errors:            InvalidError for options that can't be meant; UnavailableError with the system's reason;
                           NotFoundError and DeniedError for the key's file
        """
        if listen is None:
            addresses: list[str] = []
        else:
            addresses = [listen] if isinstance(listen, str) else list(listen)
        if unix_directory is None:
            unix_directory = "" if addresses else _private_directory()
        super().__init__(
            addresses,
            unix_directory=unix_directory,
            state=state,
            memory_limit=memory_limit,
            arena_bytes=arena_bytes,
            huge_pages=huge_pages,
            tier=tier,
            lease_ttl_max=lease_ttl_max,
            lease_age_max=lease_age_max,
            retained=retained,
            quarantine_limit=quarantine_limit,
            udp=udp,
            busy_poll=busy_poll,
            trace=trace,
            key=key,
            verbs=verbs,
            verbs_gid_index=verbs_gid_index,
            delta_limit=delta_limit,
            epoch_after=epoch_after,
        )


def connect(
    address: str,
    *,
    transport: str = "auto",
    small_transport: str | None = None,
    small_bytes: int = 65536,
    strict: bool = False,
    timeout: float = 30.0,
    lease_ttl: float = 10.0,
    verify: bool = True,
    busy_poll: bool = False,
    drop_view_pages: bool = False,
    trace: Trace | None = None,
    key: str | os.PathLike[str] | None = None,
    verbs_device: str | None = None,
    verbs_gid_index: int | None = None,
    decode_threads: int | None = None,
) -> Client:
    """Connect to the server at `address`.

    address:          "tcp://HOST:PORT", "HOST:PORT" or "unix:PATH", as Server.address gives it
    transport:        "auto" takes the first of shm, verbs, udp, tcp that works (Client.rejected says why not the
                      others; udp needs a receive buffer of 8 MiB for large fetches); any of them pins it
    small_transport:  of fetches whose blocks have at most `small_bytes` together. None: as `transport`, where "auto"
                      takes udp for them beside tcp for the others; "same", or a transport's name, pins it
    strict:           UnavailableError where "auto" would go on without a transport that should work here, such as shm
                      on the server's own host. Otherwise there is one FallbackWarning with the reason
    timeout:          of every call that brings none, this one included, seconds
    lease_ttl:        of leased snapshots, renewed by a thread at a third of it, seconds
    verify:           False only to measure a transport bare: then no bytes are checked
    busy_poll:        over udp and verbs a fetch spins instead of sleeping: several times lower latency, for a whole
                      core while it waits (stats()["udp_busy_poll_us"])
    drop_view_pages:  pages of a released view leave this process's memory at once, for readers under a memory budget
    trace:            records the spans of this client and of engines over its snapshots; by default nothing is
    key:              file of the cluster key that the server has: TCP connections are then encrypted, and the server
                      has to prove the key as well
    verbs_device:     RDMA device to read with, "rx0", or with its port "rx0:1"; by default chosen by the route to the
                      server, as `paramwire doctor` shows the table
    verbs_gid_index:  of that port's GID table
    decode_threads:   beside the caller's, of fetches of encoded blocks from 1 MiB; 0: the caller decodes. None:
                      processors less one, 4 at most
    errors:           InvalidError for a bad address or option; UnreachableError, DeadlineError; DeniedError when one
                      side has no key or another one, or others can use the file; UnavailableError when the pinned
                      transport can't be had, with every candidate's reason
    warns:            RuntimeWarning, once in a process, when UDP sockets get less receive buffer than they asked for
    """
    client = Client(
        address,
        transport=transport,
        small_transport=small_transport,
        small_bytes=small_bytes,
        strict=strict,
        timeout=timeout,
        lease_ttl=lease_ttl,
        verify=verify,
        busy_poll=busy_poll,
        drop_view_pages=drop_view_pages,
        trace=trace,
        key=key,
        verbs_device=verbs_device,
        verbs_gid_index=verbs_gid_index,
        decode_threads=decode_threads,
    )
    reasons = dict(client.rejected)
    if failed := [f"{name} should work and does not: {reasons[name]}" for name in client.fallbacks]:
        warnings.warn(
            f"{address}: {client.transport} is used, {'; '.join(failed)} "
            f'(transport="{client.transport}" says that this is meant)',
            FallbackWarning,
            stacklevel=2,
        )
    stats = client.stats()
    if stats["udp_receive_buffer_bytes"] < stats["udp_receive_buffer_asked_bytes"]:
        _warn_of_small_buffer(stats["udp_receive_buffer_asked_bytes"], stats["udp_receive_buffer_bytes"])
    return client


@functools.cache
def _warn_of_small_buffer(wanted: int, got: int) -> None:
    """Says it once in a process: the kernel itself clamps without a word."""
    warnings.warn(
        f"UDP sockets asked for a receive buffer of {wanted} bytes and got {got}: what does not fit is dropped, "
        f'counted in stats()["udp_socket_drops"], asked for again; as root: sysctl -w net.core.rmem_max={wanted // 2}',
        RuntimeWarning,
        stacklevel=3,
    )
