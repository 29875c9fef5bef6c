"""Other systems that move the same bytes, measured in the same run where they are installed: `paramwire bench --peers`.

Each is started by us, listens on loopback only, on a port that was free, and is ended by its process id. What is not
installed is named, with the package that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from paramwire import _bench
from paramwire.cli_bench_common import Call, Child, fill_pattern, is_pattern, measure, plain_memory
from paramwire.cli_bench_output import Record, yes
from paramwire.cli_bench_setting import context, start_seconds
from paramwire.cli_common import CliError, console, in_micros, notes, number, size_name, table

# Bytes of blocks that a peer holds, and most blocks: what the peers' servers keep in memory is far above their bytes.
ROTATE_BYTES = 256 << 20
COUNT_MAX = 64
# iperf3 writes at most 1 MiB at once (its manual page, -l), and a stream of tiny writes measures system calls.
IPERF_BYTES_MIN = 64 << 10
IPERF_BYTES_MAX = 1 << 20
# Gets of ucx_perftest that tell how many fit into the time of a figure.
UCX_TRIAL_GETS = 50
UCX_GETS_MAX = 100_000
# Of an answer of Redis, read together with its head.
REDIS_FIRST_BYTES = 4096
LOOPBACK = "127.0.0.1"


class Absent(Exception):
    """A peer is not installed, or can't run here; the text says what to do."""


@dataclass
class Blocks:
    """What a peer serves, and where it goes."""

    size: int
    count: int
    target: npt.NDArray[np.uint8]
    seconds: float
    timeout: float

    @property
    def targets(self) -> list[npt.NDArray[np.uint8]]:
        return np.split(self.target, self.count)


def measure_peers(options: argparse.Namespace, progress: Progress, rotate: int) -> Iterator[Record]:
    """A record for each peer that was asked for and each size; a peer that is absent has one, without figures."""
    for name in options.peers:
        task = progress.add_task(f"peer {name}", total=None)
        try:
            for size in options.sizes:
                count = max(1, min(COUNT_MAX, min(rotate, ROTATE_BYTES) // size))
                blocks = Blocks(size, count, plain_memory(size * count), options.seconds, options.timeout)
                for record in PEERS[name](blocks):
                    yield peer_record(name, **record) | context(options) | {"key": False}
        except Absent as absent:
            notes().print(f"peer {name} is absent: {absent}")
            yield peer_record(name, reason=str(absent)) | context(options) | {"key": False}
        finally:
            progress.remove_task(task)


def peer_record(name: str, **known: Any) -> Record:
    """Figures that a peer does not give stay empty. "correct" is None where the peer does not show its bytes."""
    empty = dict.fromkeys(("bytes", "p50_us", "p99_us", "gb_per_s", "cpu_s_per_gb", "calls", "correct", "reason"))
    return {"bench": "peer", "peer": name, "path": None, "transport": name, **empty, **known}


def timed(call: Call, blocks: Blocks, pid: int, path: str) -> Record:
    """One record of a peer that we fetch from ourselves: warmed up, timed, checked."""
    for index in range(blocks.count):
        call(index)
    figures = measure(call, {}, count=blocks.count, size=blocks.size, seconds=blocks.seconds, server_pid=pid)
    blocks.target[:] = 0
    for index in range(blocks.count):
        call(index)
    kept = ("p50_us", "p90_us", "p99_us", "p99_9_us", "max_us", "gb_per_s", "cpu_s_per_gb", "calls")
    return {
        "path": path,
        "bytes": blocks.size,
        **{name: figures[name] for name in kept},
        "correct": is_pattern(blocks.target),
    }


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Absent(f"{name} is not installed: apt-get install {package}")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(words: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of the block; ended by its id, and by the kernel when this process is killed."""
    if shutil.which("setpriv"):
        words = ["setpriv", "--pdeathsig", "TERM", *words]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def connection(port: int, process: subprocess.Popen[bytes], name: str, timeout: float) -> socket.socket:
    """To a server that is starting.  errors: CliError when it ended, or when nobody listens in time"""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while True:
        try:
            made = socket.create_connection((LOOPBACK, port), timeout)
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise CliError(f"{name} ended at once with status {process.returncode}") from None
            if time.monotonic() > deadline:
                raise CliError(f"{name} does not listen on port {port} after {timeout:g} s") from None
            pause.wait(0.02)
        else:
            made.settimeout(None)
            _bench.tcp_options(made.fileno(), timeout)
            return made


# ---------------------------------------------------------------- iperf3


def iperf3(blocks: Blocks) -> Iterator[Record]:
    """One TCP stream: what plain sockets give at most, with no request for each block and no look at the bytes."""
    if blocks.size < IPERF_BYTES_MIN:
        return
    tool = program("iperf3", "iperf3")
    port, length = free_port(), min(blocks.size, IPERF_BYTES_MAX)
    seconds = max(1, round(blocks.seconds))
    with running([tool, "-s", "-B", LOOPBACK, "-p", str(port), "-1"]) as server:
        pause, deadline = threading.Event(), time.monotonic() + blocks.timeout
        while True:  # its one connection is for the measurement, so whether it listens yet is found by trying
            words = [tool, "-c", LOOPBACK, "-p", str(port), "-t", str(seconds), "-l", str(length), "-J"]
            done = subprocess.run(words, capture_output=True, timeout=seconds + blocks.timeout, check=False)
            result = json.loads(done.stdout)
            if "error" not in result:
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise CliError(f"iperf3: {result['error']}")
            pause.wait(0.05)
    received = result["end"]["sum_received"]
    cpu = result["end"]["cpu_utilization_percent"]
    spent = (cpu["host_total"] + cpu["remote_total"]) / 100 * received["seconds"]
    yield {
        "path": f"tcp stream, writes of {length} bytes",
        "bytes": blocks.size,
        "gb_per_s": received["bits_per_second"] / 8e9,
        "cpu_s_per_gb": spent / (received["bytes"] / 1e9),
    }


# ---------------------------------------------------------------- UCX


def ucx(blocks: Blocks) -> Iterator[Record]:
    """Gets of ucx_perftest, over shared memory and over TCP; it polls, uses one block, and does not show its bytes.

    It listens on every interface, so it runs in a network namespace that has loopback alone.
    """
    program("ucx_perftest", "ucx-utils")
    isolate = [program("unshare", "util-linux"), "--net", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*isolate, "true"], capture_output=True, timeout=blocks.timeout, check=False).returncode:
        raise Absent("ucx_perftest listens on every interface, and this system allows no network namespace to hold it")
    for transports, path in (("shm,cma,self", "get over shared memory"), ("tcp,self", "get over tcp")):
        words = ["--transports", transports, "--size", str(blocks.size), "--seconds", str(blocks.seconds)]
        with Child("paramwire.cli_bench_ucx", [*words, "--timeout", str(blocks.timeout)], before=isolate) as child:
            figures = child.record(6 * blocks.timeout)
        yield {"path": path, "bytes": blocks.size, **figures}


# ---------------------------------------------------------------- Redis


class Redis:
    """As much of a Redis client as GET and SET need. source: RESP, redis.io/docs/reference/protocol-spec"""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def send(self, *words: bytes | memoryview) -> None:
        self.link.sendall(b"*%d\r\n" % len(words))
        for word in words:
            self.link.sendall(b"$%d\r\n" % len(word))
            self.link.sendall(word)
            self.link.sendall(b"\r\n")

    def set(self, key: bytes, value: memoryview) -> None:
        self.send(b"SET", key, value)
        answer = self.link.recv(256)
        if answer != b"+OK\r\n":
            raise CliError(
                f"redis-server refused a block of {len(value)} bytes: {answer.decode(errors='replace').strip()}"
            )

    def get(self, request: bytes, target: memoryview) -> None:
        """`request` is get_words() of the key. Fills `target`.  errors: CliError when the block has another size"""
        self.link.sendall(request)
        head, size = b"$%d\r\n" % len(target), len(target)
        # A small answer comes in one call, end of line included; of a large one the body goes where it belongs.
        begun = self.link.recv(len(head) + min(size + 2, REDIS_FIRST_BYTES))
        while len(begun) < len(head):
            begun += self.link.recv(len(head) - len(begun)) or self.gone()
        if not begun.startswith(head):
            raise CliError(f"redis-server answered {begun[:32]!r}, not a block of {size} bytes")
        at = len(begun) - len(head)
        target[: min(at, size)] = begun[len(head) : len(head) + size]
        while at < size:
            at += self.link.recv_into(target[at:]) or len(self.gone())
        while at < size + 2:
            at += len(self.link.recv(size + 2 - at) or self.gone())

    def gone(self) -> bytes:
        raise CliError("redis-server closed the connection")


def get_words(key: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)


def redis(blocks: Blocks) -> Iterator[Record]:
    """GET of blocks over TCP, read straight into the target."""
    tool = program("redis-server", "redis-server")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        words = [tool, "--bind", LOOPBACK, "--port", str(port), "--dir", folder, "--save", "", "--appendonly", "no"]
        with running(words) as server, connection(port, server, "redis-server", blocks.timeout) as link:
            client = Redis(link)
            fill_pattern(blocks.target)
            targets = [target.data for target in blocks.targets]
            for index, target in enumerate(targets):
                client.set(b"block.%d" % index, target)
            requests = [get_words(b"block.%d" % index) for index in range(blocks.count)]
            yield timed(lambda index: client.get(requests[index], targets[index]), blocks, server.pid, "tcp, GET")


# ---------------------------------------------------------------- ZeroMQ


def zeromq(blocks: Blocks) -> Iterator[Record]:
    """Request and reply over TCP; the reply is copied out of the library's frame into the target."""
    if importlib.util.find_spec("zmq") is None:
        raise Absent("pyzmq is not installed: pip install pyzmq")
    import zmq

    words = ["--size", str(blocks.size), "--count", str(blocks.count)]
    with Child("paramwire.cli_bench_zmq", words) as server, zmq.Context() as made, made.socket(zmq.REQ) as link:
        limit = int(blocks.timeout * 1000)
        link.setsockopt(zmq.RCVTIMEO, limit)
        link.setsockopt(zmq.SNDTIMEO, limit)
        link.setsockopt(zmq.LINGER, 0)
        link.connect(server.record(start_seconds(blocks.target.size))["address"])
        targets = blocks.targets

        def get(index: int) -> None:
            try:
                link.send(b"%d" % index)
                frame = link.recv(copy=False)
            except zmq.Again:
                raise CliError(f"the ZeroMQ server did not answer within {blocks.timeout:g} s") from None
            _bench.copy(targets[index], np.frombuffer(frame.buffer, np.uint8))

        yield timed(get, blocks, server.pid, "tcp, REQ and REP")


# By the name that --peers takes.
PEERS: dict[str, Callable[[Blocks], Iterator[Record]]] = {
    "iperf3": iperf3,
    "ucx": ucx,
    "redis": redis,
    "zeromq": zeromq,
}


def show_peers(records: Sequence[Record]) -> None:
    if not records:
        return
    rows = [
        (
            record["peer"],
            record["path"] or f"absent: {record['reason']}",
            size_name(record["bytes"]) if record["bytes"] else "-",
            in_micros(record["p50_us"]),
            in_micros(record["p99_us"]),
            number(record["gb_per_s"]),
            number(record["cpu_s_per_gb"]),
            "-" if record["correct"] is None else yes(record["correct"]),
        )
        for record in records
    ]
    columns = ("peer", "path", "block", "p50", "p99", "GB/s", "CPU s/GB", "right")
    console().print(table("other systems, in the same run", columns, rows, left=("peer", "path")))
