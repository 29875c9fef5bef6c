"""The server process of `paramwire bench fetch`: blocks cut from the pattern, over paramwire and over plain TCP.

Prints one JSON line when it serves, and ends when its stdin does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire import _bench
from paramwire.cli_bench_common import pattern
from paramwire.cli_common import json_line
from paramwire.cli_memory import memory_now


def answer(listener: socket.socket, region: npt.NDArray[np.uint8]) -> None:
    """Serves one client of the baseline after another until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        # A client that is killed resets its connection: the next one is served.
        with connection, contextlib.suppress(OSError):
            _bench.tcp_options(connection.fileno())
            _bench.tcp_serve(connection.fileno(), region)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    region = np.empty(options.size * options.count, np.uint8)
    step = 1 << 24
    for at in range(0, region.size, step):
        region[at : at + step] = pattern(at, min(step, region.size - at))
    with paramwire.Server() as server, socket.create_server(("127.0.0.1", 0)) as listener:
        before, begin = shared_and_anonymous(), time.perf_counter()
        with server.publish(base=None) as publish:
            for index in range(options.count):
                publish.put(f"block.{index}", region[index * options.size : (index + 1) * options.size])
        threading.Thread(target=answer, args=(listener, region), name="baseline", daemon=True).start()
        json_line(
            {
                "endpoints": list(server.endpoints),
                "address": server.address,
                "baseline": listener.getsockname()[1],
                "pid": os.getpid(),
                "publish_seconds": time.perf_counter() - begin,
                "memory_bytes": shared_and_anonymous() - before,
                "last": region[-options.size :].tobytes()[:64].hex(),
            }
        )
        sys.stdin.read()
    return 0


def shared_and_anonymous() -> int:
    """Bytes that this process has touched of memory that is no file."""
    now = memory_now()
    return now["RssAnon"] + now["RssShmem"]


if __name__ == "__main__":
    sys.exit(main())
