"""The server process of the ZeroMQ peer of `paramwire bench`: answers an index with that block of the pattern.

Prints one JSON line when it serves, and ends when its stdin does.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from paramwire.cli_bench_common import fill_pattern
from paramwire.cli_common import json_line


def main() -> int:
    import zmq

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    region = np.empty(options.size * options.count, np.uint8)
    fill_pattern(region)
    with zmq.Context() as made, made.socket(zmq.REP) as link:
        link.setsockopt(zmq.LINGER, 0)
        port = link.bind_to_random_port("tcp://127.0.0.1")
        json_line({"address": f"tcp://127.0.0.1:{port}"})
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if sys.stdin.fileno() in ready:
                return 0
            index = int(link.recv())
            link.send(region[index * options.size : (index + 1) * options.size], copy=False)


if __name__ == "__main__":
    sys.exit(main())
