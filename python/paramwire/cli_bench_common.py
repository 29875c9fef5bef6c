"""Measuring: interleaved rounds of a call and its baseline, process clocks, and the pattern that blocks are made of."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from paramwire.cli_common import CliError

# Each figure's time is cut in this many rounds of both sides, so that a neighbour's load hits both, and the spread
# shows.
ROUNDS = 8
# Most calls whose times are kept, per side: beyond, the percentiles no longer move.
SAMPLES_MAX = 400_000
# How long a server process may take until it says that it is ready.
START_SECONDS = 120.0

Call = Callable[[int], object]


@dataclass
class Side:
    """What was measured of one side, over all rounds."""

    call: Call
    times_ns: list[int] = field(default_factory=list)
    rounds_gb_per_s: list[float] = field(default_factory=list)
    at: int = 0
    calls: int = 0
    spent_ns: int = 0

    def round(self, count: int, size: int, duration_ns: int) -> None:
        """Calls with block after block, going on where the last round stopped, until `duration_ns` are over."""
        call, at, clock = self.call, self.at, time.perf_counter_ns
        times: list[int] = []
        begin = now = clock()
        end = begin + duration_ns
        while now < end:
            call(at)
            after = clock()
            times.append(after - now)
            now = after
            at = at + 1 if at + 1 < count else 0
        self.at = at
        self.calls += len(times)
        self.spent_ns += now - begin
        self.rounds_gb_per_s.append(len(times) * size / (now - begin))
        self.times_ns += times[: max(0, SAMPLES_MAX - len(self.times_ns))]

    def percentile_us(self, percent: float) -> float:
        return float(np.percentile(self.times_ns, percent)) / 1000

    def gb_per_s(self, size: int) -> float:
        return self.calls * size / self.spent_ns


def measure(
    ours: Call, baseline: Call | None, *, count: int, size: int, seconds: float, server_pid: int | None
) -> dict[str, Any]:
    """Times `ours` and `baseline` in interleaved rounds, each called with the block indices below `count` in turn.

    returns: p50_us, p99_us, gb_per_s (1e9 bytes), the baseline's, ratio (median over rounds of our speed over the
             baseline's in the same round), its least and greatest, cpu_s_per_gb (both processes, our calls only), calls
    """
    one, other = Side(ours), Side(baseline) if baseline else None
    cpu = 0.0
    duration_ns = int(seconds * 1e9 / ROUNDS / (2 if other else 1))
    for _ in range(ROUNDS):
        if other:
            other.round(count, size, duration_ns)
        before = cpu_seconds(server_pid)
        one.round(count, size, duration_ns)
        cpu += cpu_seconds(server_pid) - before
    ratios = [a / b for a, b in zip(one.rounds_gb_per_s, other.rounds_gb_per_s, strict=True)] if other else []
    return {
        "p50_us": one.percentile_us(50),
        "p99_us": one.percentile_us(99),
        "gb_per_s": one.gb_per_s(size),
        "gb_per_s_best_round": max(one.rounds_gb_per_s),
        "baseline_p50_us": other.percentile_us(50) if other else None,
        "baseline_p99_us": other.percentile_us(99) if other else None,
        "baseline_gb_per_s": other.gb_per_s(size) if other else None,
        "ratio": statistics.median(ratios) if other else None,
        "ratio_min": min(ratios) if other else None,
        "ratio_max": max(ratios) if other else None,
        "cpu_s_per_gb": cpu / (one.calls * size / 1e9),
        "calls": one.calls,
    }


def cpu_seconds(other_pid: int | None) -> float:
    """CPU time, user and system, of this process and of another. source: clock_getcpuclockid(3), for the clock's id."""
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID] + ([((~other_pid) << 3) | 2] if other_pid is not None else [])
    return sum(time.clock_gettime(clock) for clock in clocks)


def pattern(offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Bytes [offset, offset + size) of the region that all blocks are cut from: multiples of an odd 64-bit constant."""
    first, end = offset // 8, -(-(offset + size) // 8)
    with np.errstate(over="ignore"):
        words = np.arange(first + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[offset - first * 8 :][:size]


def plain_memory(size: int) -> npt.NDArray[np.uint8]:
    """Private memory in ordinary pages, all of them present.

    numpy's large arrays ask for huge pages, in which copies are up to a third faster: a baseline between two of them
    would be another one than the copy out of a server's memory that it stands beside.
    """
    region = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    region[:] = 1
    return region


def is_pattern(data: npt.NDArray[np.uint8]) -> bool:
    """Whether `data` equals the region's beginning, looked at in steps that stay in the cache."""
    step = 1 << 20
    return all(
        np.array_equal(data[at : at + step], pattern(at, min(step, data.size - at))) for at in range(0, data.size, step)
    )


def available_memory() -> int:
    """Bytes that can be had without swapping. source: proc(5), MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CliError("this kernel does not tell MemAvailable in /proc/meminfo")


class Child:
    """A process `python -m MODULE ARGUMENTS...` of this package, which ends when its stdin does: when this one dies.

    Each line of its stdout is a JSON object; its stderr is ours, so that its errors are seen.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, quiet: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )
        self.name = " ".join([module, *arguments[:1]])

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def record(self) -> dict[str, Any]:
        """The next line. errors: CliError with its exit status when it ended instead."""
        line = self.stdout.readline()
        if not line:
            status = self.process.wait(START_SECONDS)
            raise CliError(f"process {self.name} ended with status {status}; its reason is above")
        record: dict[str, Any] = json.loads(line)
        return record

    def close(self) -> int:
        """Closes its stdin and waits; past 10 seconds it is killed. returns: its exit status"""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def machine() -> dict[str, Any]:
    """What a reader of figures wants to know first."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "kernel": os.uname().release}
