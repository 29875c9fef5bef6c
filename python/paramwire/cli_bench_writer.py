"""The server process of `paramwire bench mixed`: it publishes new versions at the rate that it is told to.

Prints one JSON line when it serves. Each line {"publish_per_s": RATE} of its stdin sets the rate (0: none), and is
answered by a line that says how many versions were published since the last. Ends when its stdin does.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import numpy as np

import paramwire
from paramwire.cli_bench_common import run_as_child
from paramwire.cli_bench_server import server_at
from paramwire.cli_common import json_line

# Small blocks of a version: readers take one after the other.
SMALL_COUNT = 64
BULK_COUNT = 2


class Publisher:
    """Publishes in a thread of its own while the rate is not 0."""

    def __init__(self, server: paramwire.Server, size: int, bulk: int) -> None:
        self.server = server
        self.blocks = {f"small.{index}": np.empty(size // 8, np.uint64) for index in range(SMALL_COUNT)}
        self.blocks |= {f"bulk.{index}": np.empty(bulk // 8, np.uint64) for index in range(BULK_COUNT)}
        self.published = 0
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def publish_one(self) -> None:
        with self.server.publish() as publish:
            number = publish.version.counter
            for name, words in self.blocks.items():
                words[:] = number
                publish.put(name, words)

    def set_rate(self, per_second: float) -> int:
        """Waits for the publish that is under way.  returns: versions since the last call"""
        if self.thread is not None:
            self.over.set()
            self.thread.join()
            self.thread = None
        done, self.published = self.published, 0
        if per_second > 0:
            self.over.clear()
            self.thread = threading.Thread(target=self.run, args=(1 / per_second,), name="publisher")
            self.thread.start()
        return done

    def run(self, period: float) -> None:
        due = time.monotonic()
        while not self.over.is_set():
            self.publish_one()
            self.published += 1
            # A publisher that can't keep up writes without pause, and the record shows the rate that it had.
            due = max(due + period, time.monotonic() - period)
            self.over.wait(max(0.0, due - time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--bulk", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    with server_at(options.host) as server:
        publisher = Publisher(server, options.size, options.bulk)
        publisher.publish_one()
        json_line(
            {
                "endpoints": list(server.endpoints),
                "address": server.address,
                "small": [name for name in publisher.blocks if name.startswith("small.")],
                "bulk": [name for name in publisher.blocks if name.startswith("bulk.")],
                "version_bytes": sum(words.nbytes for words in publisher.blocks.values()),
            }
        )
        try:
            for line in sys.stdin:
                json_line({"published": publisher.set_rate(json.loads(line)["publish_per_s"])})
        finally:
            publisher.set_rate(0)
    return 0


if __name__ == "__main__":
    run_as_child(main)
