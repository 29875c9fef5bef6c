"""`paramwire bench incast`: one client that fetches from many servers at once, beside one server alone."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire.cli_bench_common import ROUNDS, is_pattern, percentiles, plain_memory
from paramwire.cli_bench_net import network
from paramwire.cli_bench_output import Record, Recorder, yes
from paramwire.cli_bench_setting import (
    GAUGES,
    address_for,
    connected,
    context,
    counters,
    network_of,
    rotation,
    serving,
    start_seconds,
    wanted_transports,
)
from paramwire.cli_common import CliError, console, in_micros, number, size_name, steps_progress, table

# Bytes that the client rotates through at each server.
ROTATE_BYTES = 64 << 20
# A thread that has not started by then never will.
BARRIER_SECONDS = 60.0
# Names of client counters: of segments that were asked for again, and of those that came. Streams over tcp
# have none: there the kernel sends again, and counts it.
RESENT = "udp_lost"
RECEIVED = "udp_received"


@dataclass
class Stream:
    """The client's side of one server."""

    snapshot: paramwire.Snapshot
    names: list[str]
    targets: list[npt.NDArray[np.uint8]]
    at: int = 0

    def fetch_next(self) -> None:
        self.snapshot.fetch(self.names[self.at], out=self.targets[self.at])
        self.at = (self.at + 1) % len(self.names)

    def fetch_until(self, start: threading.Barrier, seconds: float) -> list[int]:
        """Block after block, one on the way at a time, for `seconds`.  returns: how long each took, nanoseconds"""
        clock = time.perf_counter_ns
        times: list[int] = []
        start.wait(BARRIER_SECONDS)
        now = clock()
        end = now + int(seconds * 1e9)
        while now < end:
            self.fetch_next()
            after = clock()
            times.append(after - now)
            now = after
        return times


def bench_incast(options: argparse.Namespace) -> int:
    if options.net and options.net.loss:
        raise CliError("bench incast has its own losses, at full buffers: give --net an mtu only")
    with network(options):
        return bench_sizes(options)


def bench_sizes(options: argparse.Namespace) -> int:
    transports = wanted_transports(options)
    rotate = rotation(options, options.servers, ROTATE_BYTES)
    with Recorder(options, show) as recorder:
        with steps_progress() as progress:
            task = progress.add_task("bench incast", total=len(options.sizes) * len(transports))
            for size in options.sizes:
                progress.update(task, description=f"{size_name(size)}: {options.servers} servers start")
                for record in one_size(size, max(1, rotate // size), transports, options):
                    recorder.add(record | context(options))
                    progress.advance(task)
        return recorder.finish()


def one_size(size: int, count: int, transports: Sequence[str], options: argparse.Namespace) -> list[Record]:
    """Servers whose blocks all differ, so that bytes of the wrong server are wrong bytes."""
    records = []
    net = network_of(options)
    key = net.key if net else None
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(size, count, options, "--offset", str(index * size * count)))
            for index in range(options.servers)
        ]
        ready = [server.record(start_seconds(size * count)) for server in servers]
        target = plain_memory(size * count * options.servers)
        for transport in transports:
            with contextlib.ExitStack() as clients:
                links = [
                    clients.enter_context(connected(address_for(transport, facts), transport, options.timeout, key=key))
                    for facts in ready
                ]
                parts = np.split(target, options.servers)
                streams = [
                    Stream(clients.enter_context(link.snapshot()), [f"block.{index}" for index in range(count)],
                           np.split(part, count))
                    for link, part in zip(links, parts, strict=True)
                ]  # fmt: skip
                record = one_transport(transport, size, streams, links, target, options.seconds)
                records.append(record | (net.record() if net else {}))
    return records


def one_transport(
    transport: str,
    size: int,
    streams: Sequence[Stream],
    links: Sequence[paramwire.Client],
    target: npt.NDArray[np.uint8],
    seconds: float,
) -> Record:
    """Interleaved rounds of one server, another each time, and of all; then the bytes of all, checked."""
    one_pass(streams)
    before, kernel = [link.stats() for link in links], kernel_counters()
    alone = Phase(size, 1)
    all_at_once = Phase(size, len(streams))
    for turn in range(ROUNDS):
        alone.add(together([streams[turn % len(streams)]], seconds / ROUNDS / 2))
        all_at_once.add(together(streams, seconds / ROUNDS / 2))
    after, kernel_after = [link.stats() for link in links], kernel_counters()
    target[:] = 0
    one_pass(streams)

    counts: dict[str, int] = {}
    for new, old in zip(after, before, strict=True):
        for name, value in counters(new, old).items():
            # Of a gauge the largest is told.
            counts[name] = max(counts.get(name, 0), value) if name.endswith(GAUGES) else counts.get(name, 0) + value
    received = counts[RECEIVED]
    shares = all_at_once.shares_gb_per_s()
    moved = {name: kernel_after[name] - kernel[name] for name in kernel_after}
    tcp, udp = (after[0]["transport"] == name for name in ("tcp", "udp"))
    return {
        "bench": "incast",
        "language": "python",
        "transport": transport,
        "bytes": size,
        "servers": len(streams),
        "rotate_bytes": target.size,
        "one_server_gb_per_s": alone.gb_per_s(),
        "one_server_p50_us": percentiles(alone.times_ns)["p50_us"],
        "one_server_p99_us": percentiles(alone.times_ns)["p99_us"],
        "gb_per_s": all_at_once.gb_per_s(),
        **percentiles(all_at_once.times_ns),
        "max_us": max(all_at_once.times_ns) / 1000,
        "baseline": "one server",
        "ratio": statistics.median(a / b for a, b in zip(all_at_once.rounds, alone.rounds, strict=True)),
        "servers_gb_per_s": shares,
        # R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness (DEC-TR-301, 1984): 1 is equal shares, 1/n one
        # server that gets all.
        "fairness": sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)),
        "calls": len(all_at_once.times_ns),
        "resent": counts[RESENT] if received else None,
        "resent_ratio": counts[RESENT] / received if received else None,
        # Of the whole network namespace: other traffic of this machine is in them.
        "kernel_tcp_segments_sent": moved["Tcp.OutSegs"] if tcp else None,
        "kernel_tcp_segments_resent": moved["Tcp.RetransSegs"] if tcp else None,
        "kernel_udp_dropped_for_full_buffers": moved["Udp.RcvbufErrors"] if udp else None,
        "verified": counts["blocks_verified"],
        "retries": counts["retries"],
        "transport_used": after[0]["transport"],
        "counters": counts,
        "correct": is_pattern(target),
    }


@dataclass
class Phase:
    """Rounds with the same servers."""

    size: int
    servers: int
    rounds: list[float] = field(default_factory=list)  # GB/s of all servers together
    times_ns: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # of each server
    spent_s: float = 0.0

    def add(self, round_ns: Sequence[Sequence[int]]) -> None:
        calls = [len(times) for times in round_ns]
        spent = max(sum(times) for times in round_ns) / 1e9
        self.rounds.append(sum(calls) * self.size / spent / 1e9)
        self.calls = [old + new for old, new in zip(self.calls or [0] * self.servers, calls, strict=True)]
        self.spent_s += spent
        for times in round_ns:
            self.times_ns += times

    def gb_per_s(self) -> float:
        return sum(self.shares_gb_per_s())

    def shares_gb_per_s(self) -> list[float]:
        return [calls * self.size / self.spent_s / 1e9 for calls in self.calls]


def together(streams: Sequence[Stream], seconds: float) -> list[list[int]]:
    """All at once, a thread each.  returns: the times of each one's calls; errors: the first that a call raised"""
    start = threading.Barrier(len(streams))
    with ThreadPoolExecutor(len(streams), thread_name_prefix="incast") as pool:
        running = [pool.submit(stream.fetch_until, start, seconds) for stream in streams]
        return [each.result() for each in running]


def one_pass(streams: Sequence[Stream]) -> None:
    for stream in streams:
        for _ in stream.names:
            stream.fetch_next()


def kernel_counters() -> dict[str, int]:
    """Of this network namespace. source: proc(5), /proc/net/snmp; /proc/net/snmp6 counts datagrams over IPv6."""
    counters: dict[str, int] = {"Tcp.OutSegs": 0, "Tcp.RetransSegs": 0, "Udp.RcvbufErrors": 0}
    lines = Path("/proc/net/snmp").read_text().splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        kind = names.split(":")[0]
        for name, value in zip(names.split()[1:], values.split()[1:], strict=True):
            if f"{kind}.{name}" in counters:
                counters[f"{kind}.{name}"] += int(value)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/snmp6").read_text().splitlines():
            name, value = line.split()
            if name == "Udp6RcvbufErrors":
                counters["Udp.RcvbufErrors"] += int(value)
    return counters


def show(records: Sequence[Record]) -> None:
    rows = [
        (
            record["transport"],
            size_name(record["bytes"]),
            number(record["one_server_gb_per_s"]),
            number(record["gb_per_s"]),
            number(record["ratio"]),
            f"{record['fairness']:.3f}",
            in_micros(record["p50_us"]),
            in_micros(record["p99_us"]),
            number(record["kernel_tcp_segments_resent"] if record["resent"] is None else record["resent"]),
            yes(record["correct"]),
        )
        for record in records
    ]
    columns = ("over", "block", "one GB/s", "all GB/s", "ratio", "fairness", "p50", "p99", "resent", "right")
    out = console()
    servers = records[0]["servers"]
    out.print(table(f"one client, {servers} servers at once beside one of them", columns, rows, left=("over",)))
    out.print("fairness: Jain's index, 1 is equal shares; resent: by the client's counters, over tcp by the kernel's")
