"""Runs ucx_perftest, server and client, in the network namespace that this process was started in; for the UCX peer of
`paramwire bench`. Prints one JSON line with its figures.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time

from paramwire.cli_bench_peers import LOOPBACK, UCX_GETS_MAX, UCX_TRIAL_GETS, free_port, running
from paramwire.cli_common import CliError, json_line

# source: netdevice(7), linux/sockios.h and linux/if.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def loopback_up() -> None:
    """A new network namespace has its loopback down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def gets(size: int, count: int, transports: str, timeout: float) -> dict[str, float]:
    """Figures of so many gets, the median of which is p50. The server leaves after one test."""
    port = str(free_port())
    environment = os.environ | {"UCX_TLS": transports, "UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    words = [
        "ucx_perftest",
        LOOPBACK,
        "-p",
        port,
        "-t",
        "ucp_get",
        "-s",
        str(size),
        "-n",
        str(count),
        "-w",
        "10",
        "-f",
        "-v",
    ]
    if "tcp" not in transports:
        del environment["UCX_NET_DEVICES"]
    with running(["ucx_perftest", "-p", port], env=environment) as server:
        deadline, pause = time.monotonic() + timeout, threading.Event()
        while True:  # until it listens
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
            if done.returncode == 0:
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise CliError(f"ucx_perftest: {done.stderr.strip() or done.stdout.strip()}")
            pause.wait(0.05)
    names, values = (line.split(",") for line in done.stdout.strip().splitlines()[-2:])
    return dict(zip(names, map(float, values), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args()
    loopback_up()
    trial = gets(options.size, UCX_TRIAL_GETS, options.transports, options.timeout)
    count = int(options.seconds * 1e6 / max(trial["overall_lat"], 0.01))
    count = max(UCX_TRIAL_GETS, min(UCX_GETS_MAX, count))
    figures = gets(options.size, count, options.transports, options.timeout + options.seconds)
    # Its MB are 2**20 bytes.
    json_line(
        {"p50_us": figures["50.0_percentile_lat"], "gb_per_s": figures["overall_bw"] * 2**20 / 1e9, "calls": count}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
