"""`paramwire bench fetch`: blocks of another process, fetched and viewed, beside memcpy and plain TCP in one run."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress, TaskID

import paramwire
from paramwire import _bench
from paramwire.cli_bench_common import (
    Call,
    Child,
    available_memory,
    is_pattern,
    machine,
    measure,
    pattern,
    plain_memory,
)
from paramwire.cli_common import (
    CliError,
    console,
    counted,
    in_micros,
    json_line,
    notes,
    size_name,
    steps_progress,
    table,
)

# Bytes that each side moves on through in cold figures: several times the largest last-level cache that guests report
# (300 MiB).
ROTATE_BYTES = 1 << 30
# Most blocks of a size: small ones are then cold in the inner caches only, which `rotate_bytes` of their records shows.
COUNT_MAX = 16384
# The server's source and arena, the client's source and target: memory needed is this many times the rotation.
REGIONS = 4

SHM_FIGURES = ("fetch cold", "fetch warm", "fetch_read cold", "first_view cold", "view warm")
TCP_FIGURES = ("fetch cold", "fetch warm")


@dataclass
class Setting:
    """One block size: the server's blocks, and the client's memory."""

    size: int
    count: int
    seconds: float
    server: Child
    ready: dict[str, Any]
    source: npt.NDArray[np.uint8]  # what the memcpy baseline reads; the pattern
    target: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        self.names = [f"block.{index}" for index in range(self.count)]
        cuts = [slice(index * self.size, (index + 1) * self.size) for index in range(self.count)]
        self.targets = [self.target[cut] for cut in cuts]
        self.sources = [self.source[cut] for cut in cuts]

    def address(self, transport: str) -> str:
        """shm needs the unix socket; tcp is given its own address, so that the control link is tcp too."""
        found: list[str] = [
            endpoint for endpoint in self.ready["endpoints"] if endpoint.startswith("tcp:") == (transport == "tcp")
        ]
        return found[0] if found else self.ready["address"]

    def copy(self, index: int) -> None:
        _bench.copy(self.targets[index], self.sources[index])

    def copy_and_read(self, index: int) -> None:
        _bench.copy(self.targets[index], self.sources[index])
        _bench.read(self.targets[index])


def bench_fetch(options: argparse.Namespace) -> int:
    transports = ("shm", "tcp") if options.transport == "all" else (options.transport,)
    rotate = rotation(options)
    if not options.json:
        about = machine()
        notes().print(f"{about['cpu']}, {counted(about['cores'], 'core')}, Linux {about['kernel']}; "
                      f"cold figures move on through {size_name(rotate)} on each side")  # fmt: skip
    figures = sum(len(SHM_FIGURES if transport == "shm" else TCP_FIGURES) for transport in transports)
    records = []
    with steps_progress() as progress:
        task = progress.add_task("bench fetch", total=figures * len(options.sizes))
        for size in options.sizes:
            for record in bench_size(size, rotate, transports, options.seconds, progress, task):
                records.append(record)
                if options.json:
                    json_line(record)
    if not options.json:
        show(records)
    wrong = [record for record in records if not record["correct"]]
    if wrong:
        first = f"{wrong[0]['bench']} of {wrong[0]['bytes']} bytes over {wrong[0]['transport']}"
        raise CliError(f"{counted(len(wrong), 'figure')} fetched wrong bytes: {first} first")
    return 0


def rotation(options: argparse.Namespace) -> int:
    """Bytes to rotate through. errors: CliError when the largest block does not fit into memory often enough."""
    room = available_memory() // (2 * REGIONS)
    largest = max(options.sizes)
    if largest > room:
        needed = f"blocks of {largest} bytes need {2 * REGIONS * largest} bytes of free memory"
        raise CliError(f"{needed}, {room * 2 * REGIONS} are there: give smaller --sizes")
    wanted: int = min(ROTATE_BYTES, room) if options.rotate is None else options.rotate
    if options.rotate is not None and options.rotate > room:
        raise CliError(
            f"--rotate {options.rotate} needs {2 * REGIONS * options.rotate} bytes of free memory: at most {room} fit"
        )
    return wanted


def bench_size(
    size: int, rotate: int, transports: tuple[str, ...], seconds: float, progress: Progress, task: TaskID
) -> Iterator[dict[str, Any]]:
    """The records of one block size, each transport against the same server process."""
    count = max(1, min(COUNT_MAX, rotate // size))
    progress.update(task, description=f"{size_name(size)}: server starts")
    with Child("paramwire.cli_bench_server", ["--size", str(size), "--count", str(count)]) as server:
        source = plain_memory(size * count)
        for at in range(0, source.size, 1 << 24):
            source[at : at + (1 << 24)] = pattern(at, min(1 << 24, source.size - at))
        target = plain_memory(size * count)
        setting = Setting(size, count, seconds, server, server.record(), source, target)
        for transport in transports:
            for figure in SHM_FIGURES if transport == "shm" else TCP_FIGURES:
                progress.update(task, description=f"{size_name(size)} {transport}: {figure}")
                yield one_figure(setting, transport, *figure.split())
                progress.advance(task)


def one_figure(setting: Setting, transport: str, bench: str, memory: str) -> dict[str, Any]:
    """One record: a fresh client, one untimed pass, timed rounds, then the bytes checked in a pass of their own."""
    with paramwire.connect(setting.address(transport), transport=transport) as client:
        before = client.stats()
        if bench == "first_view":
            figures, correct = first_views(setting)
        elif bench == "view":
            figures, correct = later_views(setting, client)
        else:
            figures, correct = fetches(setting, client, read=bench == "fetch_read", cold=memory == "cold")
        after = client.stats()
    rotated = setting.size * (setting.count if memory == "cold" else 1)
    return {
        "bench": bench,
        "language": "python",
        "transport": transport,
        "bytes": setting.size,
        "memory": memory,
        "rotate_bytes": rotated,
        **figures,
        "verified": figures.get("verified", after["blocks_verified"] - before["blocks_verified"]),
        "retries": after["retries"] - before["retries"],
        "correct": correct,
    }


def fetches(setting: Setting, client: paramwire.Client, *, read: bool, cold: bool) -> tuple[dict[str, Any], bool]:
    """Verified copies into the caller's buffers; with `read` also the time in which the consumer first reads them."""
    count = setting.count if cold else 1
    with client.snapshot() as snapshot:
        names, targets, fetch = setting.names, setting.targets, snapshot.fetch

        def ours(index: int) -> None:
            fetch(names[index], out=targets[index])

        def ours_and_read(index: int) -> None:
            fetch(names[index], out=targets[index])
            _bench.read(targets[index])

        with_read: Call = ours_and_read if read else ours
        for index in range(count):
            ours(index)
        started = client.stats()["blocks_verified"]
        if client.transport == "tcp":
            with socket.create_connection(("127.0.0.1", setting.ready["baseline"])) as connection:
                fd, size = connection.fileno(), setting.size
                _bench.tcp_options(fd)

                def plain(index: int) -> None:
                    _bench.tcp_fetch(fd, index * size, targets[index])

                figures = run(setting, with_read, plain, count)
            figures["baseline"] = "plain tcp"
        else:
            figures = run(setting, with_read, setting.copy_and_read if read else setting.copy, count)
            figures["baseline"] = "memcpy and read" if read else "memcpy"
        figures["verified"] = client.stats()["blocks_verified"] - started
        used = setting.target[: setting.size * count]
        used[:] = 0
        for index in range(count):
            ours(index)
        return figures, is_pattern(used)


def run(setting: Setting, ours: Call, baseline: Call | None, count: int) -> dict[str, Any]:
    return measure(
        ours, baseline, count=count, size=setting.size, seconds=setting.seconds, server_pid=setting.server.pid
    )


def later_views(setting: Setting, client: paramwire.Client) -> tuple[dict[str, Any], bool]:
    """Views of a block that this process verified before: nothing is moved and nothing read, at any size."""
    with client.snapshot() as snapshot:
        view = snapshot.view

        def ours(_: int) -> None:
            view("block.0").release()

        with view("block.0") as first:
            correct = is_pattern(first.array)
        figures = run(setting, ours, None, 1)
        figures["baseline"] = None
        figures["cpu_s_per_gb"] = None  # no byte moves
        figures["gb_per_s"] = None
        return figures, correct


def first_views(setting: Setting) -> tuple[dict[str, Any], bool]:
    """First views, whose CRC runs in this process; beside memcpy of the same bytes, which reads and writes them.

    What was verified is known to a client for good, so each pass over the blocks takes a fresh one.
    """
    views: list[int] = []
    copies: list[int] = []
    cpu = 0.0
    verified = 0
    correct = True
    clock = time.perf_counter_ns
    end = clock() + int(setting.seconds * 1e9)
    while clock() < end or not views:
        with paramwire.connect(setting.address("shm"), transport="shm") as client, client.snapshot() as snapshot:
            for index, name in enumerate(setting.names):
                begin = clock()
                setting.copy(index)
                copies.append(clock() - begin)
                cpu_before = time.process_time()
                begin = clock()
                view = snapshot.view(name)
                views.append(clock() - begin)
                cpu += time.process_time() - cpu_before
                verified += view.verified_now
                if index == 0:
                    correct = correct and is_pattern(view.array)
                view.release()
                if clock() > end:
                    break
    size, calls = setting.size, len(views)
    p50, p99, copy50, copy99 = (
        float(value) / 1000 for times in (views, copies) for value in np.percentile(times, (50, 99))
    )
    return {
        "p50_us": p50,
        "p99_us": p99,
        "gb_per_s": calls * size / sum(views),
        "baseline": "memcpy",
        "baseline_p50_us": copy50,
        "baseline_p99_us": copy99,
        "baseline_gb_per_s": calls * size / sum(copies),
        "ratio": sum(copies) / sum(views),
        "cpu_s_per_gb": cpu / (calls * size / 1e9),
        "calls": calls,
        "verified": verified,
    }, correct and verified == calls


def show(records: list[dict[str, Any]]) -> None:
    """A table for each transport, narrow enough for 100 columns."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"

    out = console()
    for transport in dict.fromkeys(record["transport"] for record in records):
        rows = [
            (
                f"{record['bench'].replace('_', ' ')}, {record['memory']}",
                size_name(record["bytes"]),
                in_micros(record["p50_us"]),
                in_micros(record["p99_us"]),
                number(record["gb_per_s"]),
                in_micros(record["baseline_p50_us"]),
                number(record["baseline_gb_per_s"]),
                number(record["ratio"]),
                number(record["cpu_s_per_gb"]),
                "yes" if record["correct"] else "NO",
            )
            for record in records
            if record["transport"] == transport
        ]
        columns = ("what", "block", "p50", "p99", "GB/s", "base p50", "GB/s", "ratio", "CPU s/GB", "right")
        base = "memcpy (and reading, for fetch read)" if transport == "shm" else "plain TCP"
        out.print(table(f"{transport}, from Python; base: {base}", columns, rows, left=("what",)))
        out.print()
