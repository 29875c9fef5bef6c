"""What the benchmarks share: the transports, the server with its blocks, the plain programs to compare with."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire import _bench
from paramwire.cli_bench_common import (
    CLOSE_ROUNDS,
    ROUNDS,
    START_SECONDS,
    Call,
    Child,
    Switch,
    available_memory,
    fill_pattern,
    is_pattern,
    machine,
    nothing_to_switch,
    plain_memory,
)
from paramwire.cli_bench_net import Network
from paramwire.cli_common import CliError, notes

# Bytes that each side moves on through in cold figures: several times the largest last-level cache that guests report
# (300 MiB).
ROTATE_BYTES = 1 << 30
# Most blocks of a size: small ones are then cold in the inner caches only, which `rotate_bytes` of their records shows.
COUNT_MAX = 16384
# The server's source and arena, the client's source and target: memory needed is this many times the rotation.
REGIONS = 4

# How a client waits for a server: asleep in the kernel, or polling, which costs a core.
WAITS = ("blocking", "busy_poll")

# A key's price is measured over these: shm comes over the unix socket, which has none.
KEYED = ("udp", "tcp")
# Memory of a second server, as REGIONS.
KEYLESS_REGIONS = 2
# Cores that a client and two servers need when all poll: with fewer, they would take each other's.
POLLING_CORES = 3

# Bytes of a plain program's blocks that are looked at; all of ours are. A program that brought other bytes would be no
# baseline, and would do so from the first block on.
CHECK_BYTES = 64 << 20
# Transports whose clients can poll.
BUSY_POLLING = ("udp",)
# Ends of the names of client statistics that are not counted up.
GAUGES = ("regions", "mtu_bytes", "slice_bytes", "reads_on_wire", "gid_index", "staging_bytes", "failed_status",
          "receive_buffer_bytes", "receive_buffer_asked_bytes", "segment_bytes", "window_bytes", "round_trip_us")

UDP_SEGMENTS = "plain udp, segments"
UDP_DATAGRAMS = "plain udp, 64 KiB datagrams"
TCP = "plain tcp"
WITHOUT_KEY = "without a key"


def wanted_transports(options: argparse.Namespace) -> list[str]:
    """What --transport asks for. errors: CliError with the reason when it can't be had."""
    known = {entry["name"]: entry for entry in paramwire.available()["transports"]}
    if keyed(options):
        if options.transport != "all" and options.transport not in KEYED:
            raise CliError(f"a key costs nothing over {options.transport}: --key goes with --transport udp, tcp or all")
        known = {name: entry for name, entry in known.items() if name in KEYED}
    if options.transport == "auto":
        return ["auto"]
    if getattr(options, "net", None) and options.transport == "all":
        known.pop("shm", None)  # of the same host only
    if options.transport != "all":
        if not known[options.transport]["usable"]:
            raise CliError(f"transport {options.transport} can't be used here: {known[options.transport]['reason']}")
        return [options.transport]
    for entry in known.values():
        if not entry["usable"]:
            notes().print(f"transport {entry['name']} is left out: {entry['reason']}")
    return [name for name, entry in known.items() if entry["usable"]]


def keyed(options: argparse.Namespace) -> bool:
    return getattr(options, "key", None) is not None


def context(options: argparse.Namespace) -> dict[str, Any]:
    """What each record says of where it comes from, so that a line alone can be read a year later."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["paramwire", *options.words]),
        "paramwire": paramwire.__version__,
        "key": keyed(options),
        "load_1_minute": os.getloadavg()[0],
        "machine": machine(),
    }


def rotation(options: argparse.Namespace, servers: int = 1, wanted: int = ROTATE_BYTES) -> int:
    """Bytes to rotate through at each server. errors: CliError when the largest block does not fit into memory."""
    regions = REGIONS * servers + (KEYLESS_REGIONS if keyed(options) else 0)
    room = available_memory() // (2 * regions)
    largest = max(options.sizes)
    if largest > room:
        needed = f"blocks of {largest} bytes need {2 * regions * largest} bytes of free memory"
        raise CliError(f"{needed}, {room * 2 * regions} are there: give smaller --sizes")
    if options.rotate is None:
        return min(wanted, room)
    if options.rotate > room:
        raise CliError(
            f"--rotate {options.rotate} needs {2 * regions * options.rotate} bytes of free memory: at most {room} fit"
        )
    rotate: int = options.rotate
    return rotate


def start_seconds(size: int) -> float:
    """How long a server may take until it has published so many bytes: far longer than any machine needs."""
    return START_SECONDS + size / 1e8


def serving(size: int, count: int, options: argparse.Namespace, *more: str) -> Child:
    """A server process with `count` blocks of `size` bytes, on the far host where there is one."""
    net = network_of(options)
    words = ["--size", str(size), "--count", str(count), "--host", net.host if net else options.host, *more]
    if net is None:
        return Child("paramwire.cli_bench_server", words)
    return Child("paramwire.cli_bench_server", [*words, "--key", net.key], before=net.lab.far.words)


def network_of(options: argparse.Namespace) -> Network | None:
    """That of --net, while network() has it."""
    found: Network | None = getattr(options, "network", None)
    return found


def address_for(transport: str, ready: dict[str, Any]) -> str:
    """shm needs the unix socket; others are given the TCP address, so that the control link is no better than them."""
    if transport == "auto":
        best: str = ready["address"]
        return best
    kind = "unix:" if transport == "shm" else "tcp:"
    found: list[str] = [endpoint for endpoint in ready["endpoints"] if endpoint.startswith(kind)]
    if not found:
        raise CliError(f"the server has no {kind} address for transport {transport}: {', '.join(ready['endpoints'])}")
    return found[0]


def connected(
    address: str,
    transport: str,
    timeout: float,
    wait: str = "blocking",
    key: str | None = None,
    *,
    verify: bool = True,
) -> paramwire.Client:
    """A client that waits in the way asked for, one of waits_of()."""
    more: dict[str, Any] = {"verify": verify, "busy_poll": wait == "busy_poll"}
    return paramwire.connect(address, transport=transport, timeout=timeout, key=key, **more)


def waits_of(transport: str, with_key: bool = False) -> list[str]:
    """Of WAITS, those that the transport offers; shm reads by itself and waits for nobody, which counts as blocking."""
    if with_key and len(os.sched_getaffinity(0)) < POLLING_CORES:
        return ["blocking"]
    return [*WAITS] if transport in BUSY_POLLING else ["blocking"]


def counters(stats: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, int]:
    """All numbers of a client's stats, by dotted name; since `before`, but for gauges. Whatever the transport counts is
    in the record, so that a new counter needs nothing here.
    """
    out: dict[str, int] = {}
    for name, value in stats.items():
        old = before.get(name) if before else None
        if isinstance(value, dict):
            out |= {f"{name}.{inner}": number for inner, number in counters(value, old).items()}
        elif isinstance(value, int) and not isinstance(value, bool):
            out[name] = value - (old if isinstance(old, int) and not name.endswith(GAUGES) else 0)
    return out


@dataclass
class Setting:
    """One block size: the server's blocks, and the client's memory."""

    size: int
    count: int
    seconds: float
    timeout: float
    server: Child
    ready: dict[str, Any]
    source: npt.NDArray[np.uint8]  # what the memcpy baseline reads; the pattern
    target: npt.NDArray[np.uint8]
    key: str | None = None  # file of the server's cluster key
    keyless: dict[str, Any] = field(default_factory=dict)  # facts of a server without one, where this one has one
    network: Network | None = None

    def __post_init__(self) -> None:
        self.names = [f"block.{index}" for index in range(self.count)]
        cuts = [slice(index * self.size, (index + 1) * self.size) for index in range(self.count)]
        self.targets = [self.target[cut] for cut in cuts]
        self.sources = [self.source[cut] for cut in cuts]

    @property
    def rounds(self) -> int:
        return CLOSE_ROUNDS if self.key else ROUNDS

    def connect(self, transport: str, wait: str = "blocking", *, verify: bool = True) -> paramwire.Client:
        key = self.network.key if self.network else self.key
        return connected(address_for(transport, self.ready), transport, self.timeout, wait, key, verify=verify)

    def connect_keyless(self, transport: str, wait: str) -> paramwire.Client:
        return connected(address_for(transport, self.keyless), transport, self.timeout, wait)

    def copy(self, index: int) -> None:
        _bench.copy(self.targets[index], self.sources[index])

    def copy_and_read(self, index: int) -> None:
        _bench.copy(self.targets[index], self.sources[index])
        _bench.read(self.targets[index])

    def right(self, call: Call, count: int) -> bool:
        """Whether `call` brings the right bytes of the first `count` blocks into memory that has none of them."""
        used = self.target[: self.size * count]
        used[:] = 0
        for index in range(count):
            call(index)
        return is_pattern(used)


@contextlib.contextmanager
def setting_of(
    size: int, rotate: int, options: argparse.Namespace, wait: str = "blocking", key: str | None = None
) -> Iterator[Setting]:
    """Starts the server process of one block size, for the time of the block; with a key, one without beside it.

    wait:  in which the server waits for requests; one that polls has a core for itself, whoever asks
    """
    count = max(1, min(COUNT_MAX, rotate // size))
    more = ["--busy-poll"] if wait == "busy_poll" else []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(size, count, options, *more, *(["--key", key] if key else [])))
        keyless = stack.enter_context(serving(size, count, options, *more)) if key else None
        source = plain_memory(size * count)
        fill_pattern(source)
        target = plain_memory(size * count)
        ready = server.record(start_seconds(size * count))
        other = keyless.record(start_seconds(size * count)) if keyless else {}
        net = network_of(options)
        yield Setting(size, count, options.seconds, options.timeout, server, ready, source, target, key, other, net)


@dataclass
class Plain:
    """Plain programs that fetch the same blocks."""

    calls: dict[str, Call]
    beside: tuple[str, ...] = ()  # of them, those that are shown and are no baseline
    missing: dict[str, str] = field(default_factory=dict)  # name: why it can't run here
    clients: dict[str, _bench.UdpClient] = field(default_factory=dict)
    switch: Switch = nothing_to_switch
    more: Callable[[], dict[str, Any]] = dict  # other fields of the record

    def facts(self, figures: dict[str, Any], setting: Setting, count: int) -> dict[str, Any]:
        """Fields of the record: whether each brought the right bytes, what the UDP programs lost, what is missing."""
        more = self.more()
        for name, client in self.clients.items():
            figures["baselines"][name] |= client.stats()
        for name, call in self.calls.items():
            figures["baselines"][name]["correct"] = setting.right(call, min(count, max(1, CHECK_BYTES // setting.size)))
        correct = all(entry["correct"] for entry in figures["baselines"].values())
        return {"baselines_correct": correct, "baselines_missing": self.missing, **more}


@contextlib.contextmanager
def plain_programs(setting: Setting, transport: str, *, spin: bool = False, read: bool = False) -> Iterator[Plain]:
    """What `transport` is measured against: memcpy for shm; for udp the plain UDP programs, the faster of which is the
    baseline, with plain TCP beside; else plain TCP. With a key it is the same fetch without one, and nothing else.
    """
    if setting.key:
        with setting.connect_keyless(transport, "busy_poll" if spin else "blocking") as keyless:
            yield Plain({WITHOUT_KEY: keyless_call(keyless, setting)})
        return
    if transport == "shm":
        yield Plain({"memcpy and read": setting.copy_and_read} if read else {"memcpy": setting.copy})
        return
    with contextlib.ExitStack() as stack:
        calls: dict[str, Call] = {}
        plain = Plain(calls)
        if transport == "udp":
            for kind in (UDP_SEGMENTS, UDP_DATAGRAMS):
                name = f"{kind}, spinning" if spin else kind
                try:
                    plain.clients[name] = udp_client(stack, setting, kind == UDP_SEGMENTS, spin)
                except OSError as error:
                    plain.missing[name] = str(error)
            for name, client in plain.clients.items():
                calls[name] = udp_call(client, setting)
            if setting.network and UDP_DATAGRAMS in calls:
                plain.beside = (UDP_DATAGRAMS,)  # in fragments, which no path of a real network takes for long
            plain.beside += (TCP,) if calls else ()
        calls[TCP] = tcp_call(stack, setting)
        yield plain


def keyless_call(client: paramwire.Client, setting: Setting) -> Call:
    """Connected and asked once, as the calls are that it stands beside. Its snapshot ends with the client."""
    names, targets, fetch = setting.names, setting.targets, client.snapshot().fetch
    fetch(names[0], out=targets[0])
    return lambda index: fetch(names[index], out=targets[index])


def udp_client(stack: contextlib.ExitStack, setting: Setting, segmented: bool, spin: bool) -> _bench.UdpClient:
    host, port = setting.ready["host"], setting.ready["baseline_udp"]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
    made.connect((host, port))
    return _bench.UdpClient(made.fileno(), segmented=segmented, spin=spin, timeout=setting.timeout)


def udp_call(client: _bench.UdpClient, setting: Setting) -> Call:
    size, targets = setting.size, setting.targets
    return lambda index: client.fetch(index * size, targets[index])


def tcp_call(stack: contextlib.ExitStack, setting: Setting) -> Call:
    address = (setting.ready["host"], setting.ready["baseline"])
    connection = stack.enter_context(socket.create_connection(address, setting.timeout))
    connection.settimeout(None)  # the C side reads; the kernel keeps its time
    fd, size, targets = connection.fileno(), setting.size, setting.targets
    _bench.tcp_options(fd, setting.timeout)
    return lambda index: _bench.tcp_fetch(fd, index * size, targets[index])
