"""The server process of `paramwire bench`: blocks cut from the pattern, over paramwire and over plain TCP and UDP.

Prints one JSON line when it serves, and ends when its stdin does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire import _bench
from paramwire.cli_bench_common import fill_pattern, run_as_child
from paramwire.cli_common import json_line
from paramwire.cli_memory import memory_now


class PlainServers:
    """Answers the plain TCP and UDP clients of bench/baseline_*.h, each in a thread, until `close()`.

    Their threads end before the interpreter does: one that comes back from C while it ends would end the process badly.
    """

    def __init__(self, host: str, region: npt.NDArray[np.uint8]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.region = region
        self.listener = socket.create_server((host, 0), family=family)
        self.datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self.datagrams.bind((host, 0))
        self.connection: socket.socket | None = None
        self.threads = [threading.Thread(target=run, name="baseline") for run in (self.answer_tcp, self.answer_udp)]
        for thread in self.threads:
            thread.start()

    def answer_tcp(self) -> None:
        """One client after another."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            # A client that is killed resets its connection: the next one is served.
            with connection, contextlib.suppress(OSError):
                self.connection = connection
                _bench.tcp_options(connection.fileno())
                _bench.tcp_serve(connection.fileno(), self.region)

    def answer_udp(self) -> None:
        _bench.udp_serve(self.datagrams.fileno(), self.region)

    def close(self) -> None:
        """Shutting a socket down wakes who waits for it, which closing it does not."""
        for each in (self.listener, self.connection, self.datagrams):
            with contextlib.suppress(OSError):  # unconnected sockets say so, and are shut down all the same
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self.listener.close()
        self.datagrams.close()


@contextlib.contextmanager
def server_at(host: str, busy_poll: bool = False, key: str | None = None) -> Iterator[paramwire.Server]:
    """On a free port of `host`, and on a unix socket, for the time of the block.

    busy_poll:  poll for requests
    key:        file of the cluster key
    """
    more: dict[str, Any] = {"key": key, "busy_poll": busy_poll}
    name = f"[{host}]" if ":" in host else host
    with contextlib.ExitStack() as stack:
        if host != "127.0.0.1":
            # Whoever names an address has no unix socket by default.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paramwire-"))
            more["listen"] = [f"tcp://{name}:0", f"unix:{folder}/bench"]
        yield stack.enter_context(paramwire.Server(**more))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--busy-poll", action="store_true")
    parser.add_argument("--key", help="file of the cluster key")
    parser.add_argument("--offset", type=int, default=0, help="of the first block in the pattern")
    options = parser.parse_args()
    region = np.empty(options.size * options.count, np.uint8)
    fill_pattern(region, options.offset)
    with (
        server_at(options.host, options.busy_poll, options.key) as server,
        contextlib.closing(PlainServers(options.host, region)) as plain,
    ):
        before, begin = shared_and_anonymous(), time.perf_counter()
        with server.publish(base=None) as publish:
            for index in range(options.count):
                publish.put(f"block.{index}", region[index * options.size : (index + 1) * options.size])
        json_line(
            {
                "endpoints": list(server.endpoints),
                "address": server.address,
                "host": options.host,
                "baseline": plain.listener.getsockname()[1],
                "baseline_udp": plain.datagrams.getsockname()[1],
                "pid": os.getpid(),
                "publish_seconds": time.perf_counter() - begin,
                "memory_bytes": shared_and_anonymous() - before,
                "last": region[-options.size :].tobytes()[:64].hex(),
            }
        )
        # Each line is a question about the counters.
        for _ in sys.stdin:
            json_line(server.stats())
    return 0


def shared_and_anonymous() -> int:
    """Bytes that this process has touched of memory that is no file."""
    now = memory_now()
    return now["RssAnon"] + now["RssShmem"]


if __name__ == "__main__":
    run_as_child(main)
