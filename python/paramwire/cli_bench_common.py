"""Measuring: interleaved rounds of a call and its baseline, process clocks, and the pattern that blocks are made of."""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire.cli_common import CliError

# Each figure's time is cut in this many rounds of all sides, so that a neighbour's load hits all, and the spread shows.
ROUNDS = 8
# The same where two sides of nearly the same speed are set against each other: a part in twenty shows in the median of
# many short rounds only.
CLOSE_ROUNDS = 64
# Most calls whose times are kept, per side: beyond, the percentiles no longer move.
SAMPLES_MAX = 400_000
# How long a server process may take until it says that it is ready.
START_SECONDS = 120.0
# How long a process may take to end after its stdin did, before it is killed.
END_SECONDS = 10.0
# The same after an error, when it may be what hangs.
END_AFTER_ERROR_SECONDS = 0.5
# Percentiles of a record, by the name of their field.
PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p99_9_us": 99.9}
# Steps between two powers of two in a histogram: its times are wrong by 1/32 at most.
HISTOGRAM_STEPS = 32

# How processes of this package are started.
PYTHON_MODULE = (sys.executable, "-m")

Call = Callable[[int], object]
# Is told whose round begins: the name of a baseline, or None for what is measured.
Switch = Callable[[str | None], None]


def nothing_to_switch(_: str | None) -> None:
    """For sides that need nothing changed between them."""


@dataclass
class Side:
    """What was measured of one side, over all rounds."""

    call: Call
    times_ns: list[int] = field(default_factory=list)
    rounds_gb_per_s: list[float] = field(default_factory=list)
    at: int = 0
    calls: int = 0
    spent_ns: int = 0
    longest_ns: int = 0

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
        self.longest_ns = max(self.longest_ns, *times)
        self.rounds_gb_per_s.append(len(times) * size / (now - begin))
        self.times_ns += times[: max(0, SAMPLES_MAX - len(self.times_ns))]

    def percentiles(self) -> dict[str, float]:
        return percentiles(self.times_ns) | {"max_us": self.longest_ns / 1000}

    def gb_per_s(self, size: int) -> float:
        return self.calls * size / self.spent_ns


def percentiles(times_ns: Sequence[int]) -> dict[str, float]:
    """p50_us and its like."""
    values = np.percentile(times_ns, list(PERCENTILES.values())) / 1000
    return dict(zip(PERCENTILES, values.tolist(), strict=True))


def histogram(times_ns: Sequence[int]) -> list[list[float]]:
    """[microseconds, calls] pairs: so many took at most so long, and longer than the pair before says.

    Bounds as in G. Tene's HdrHistogram: HISTOGRAM_STEPS equal steps between two powers of two; empty ones are left out.
    """
    times = np.maximum(np.asarray(times_ns, np.int64), 1)
    # frexp gives times = part * 2**exponent with part in [0.5, 1).
    exponents = np.frexp((times - 1).clip(1).astype(np.float64))[1]
    widths = 1 << np.maximum(exponents - int(math.log2(HISTOGRAM_STEPS)) - 1, 0).astype(np.int64)
    bounds, calls = np.unique(-(-times // widths) * widths, return_counts=True)
    return [[bound / 1000, int(number)] for bound, number in zip(bounds.tolist(), calls, strict=True)]


def measure(
    ours: Call,
    baselines: Mapping[str, Call],
    *,
    count: int,
    size: int,
    seconds: float,
    server_pid: int | None,
    beside: Sequence[str] = (),
    with_histogram: bool = False,
    rounds: int = ROUNDS,
    switch: Switch = nothing_to_switch,
) -> dict[str, Any]:
    """Times `ours` and the baselines in interleaved rounds, each called with the block indices below `count` in turn.

    beside:   names of baselines that are measured and recorded, but are never "the" baseline
    switch:   called before each round
    returns:  p50_us and so on, gb_per_s (1e9 bytes), cpu_s_per_gb and cpu_us_per_call (both processes, our calls only),
              calls; "baseline", the name of the fastest, and its figures; ratio (median over rounds of our speed over
              the baseline's in the same round), its least and greatest; "baselines", figures of each
    """
    one = Side(ours)
    others = {name: Side(call) for name, call in baselines.items()}
    cpu = 0.0
    duration_ns = int(seconds * 1e9 / rounds / (1 + len(others)))
    for _ in range(rounds):
        for name, other in others.items():
            switch(name)
            other.round(count, size, duration_ns)
        switch(None)
        before = cpu_seconds(server_pid)
        one.round(count, size, duration_ns)
        cpu += cpu_seconds(server_pid) - before
    rivals = [name for name in others if name not in beside]
    best = max(rivals, key=lambda name: others[name].gb_per_s(size)) if rivals else None
    base = others[best] if best else None
    ratios = ratios_of_rounds(one, base) if base else []
    return {
        **one.percentiles(),
        "gb_per_s": one.gb_per_s(size),
        "gb_per_s_best_round": max(one.rounds_gb_per_s),
        "baseline": best,
        "baseline_p50_us": base.percentiles()["p50_us"] if base else None,
        "baseline_p99_us": base.percentiles()["p99_us"] if base else None,
        "baseline_gb_per_s": base.gb_per_s(size) if base else None,
        "ratio": statistics.median(ratios) if base else None,
        "ratio_min": min(ratios) if base else None,
        "ratio_max": max(ratios) if base else None,
        "p50_ratio": one.percentiles()["p50_us"] / base.percentiles()["p50_us"] if base else None,
        "cpu_s_per_gb": cpu / (one.calls * size / 1e9),
        "cpu_us_per_call": cpu / one.calls * 1e6,
        "calls": one.calls,
        "baselines": {
            name: {
                **{key: other.percentiles()[key] for key in ("p50_us", "p99_us")},
                "gb_per_s": other.gb_per_s(size),
                "ratio": statistics.median(ratios_of_rounds(one, other)),
            }
            for name, other in others.items()
        },
        **({"histogram_us_calls": histogram(one.times_ns)} if with_histogram else {}),
    }


def ratios_of_rounds(one: Side, other: Side) -> list[float]:
    return [a / b for a, b in zip(one.rounds_gb_per_s, other.rounds_gb_per_s, strict=True)]


def cpu_seconds(other_pid: int | None) -> float:
    """CPU time, user and system, of this process and of another. source: clock_getcpuclockid(3), for the clock's id.

    errors: CliError when the other is gone
    """
    spent = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    if other_pid is None:
        return spent
    try:
        return spent + time.clock_gettime(((~other_pid) << 3) | 2)
    except OSError:
        raise CliError(f"the server process (pid {other_pid}) is gone; its reason is above") from None


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


def fill_pattern(target: npt.NDArray[np.uint8], offset: int = 0) -> None:
    """Fills `target` with the region's bytes from `offset`, in steps that bound the memory beside it."""
    step = 1 << 24
    for at in range(0, target.size, step):
        target[at : at + step] = pattern(offset + at, min(step, target.size - at))


def is_pattern(data: npt.NDArray[np.uint8], offset: int = 0) -> bool:
    """Whether `data` equals the region's bytes from `offset`, looked at in steps that stay in the cache."""
    step = 1 << 20
    return all(
        np.array_equal(data[at : at + step], pattern(offset + at, min(step, data.size - at)))
        for at in range(0, data.size, step)
    )


def available_memory() -> int:
    """Bytes that can be had without swapping. source: proc(5), MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CliError("this kernel does not tell MemAvailable in /proc/meminfo")


def run_as_child(main: Callable[[], int]) -> NoReturn:
    """The end of a module that Child runs: errors are one line, and that nobody asks any more is none."""
    try:
        sys.exit(main())
    except BrokenPipeError:
        os._exit(1)  # without the interpreter's last flush, which would complain
    except paramwire.Error as error:
        sys.exit(f"paramwire: {error}")


class Child:
    """A process `python -m MODULE ARGUMENTS...` of this package, which ends when its stdin does: when this one dies.

    Each line of its stdout is a JSON object; its stderr is ours, so that its errors are seen.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], *, quiet: bool = False, before: Sequence[str] = ()
    ) -> None:
        """before: words of a command that runs the process in its own place, with the same id"""
        self.process = subprocess.Popen(
            [*before, *PYTHON_MODULE, module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            bufsize=0,
            process_group=0,  # a terminal's Ctrl-C is for us: it ends with its stdin
        )
        self.name = " ".join([module, *arguments[:1]])
        self._read = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def record(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The next line. errors: CliError with its exit status when it ended instead, or when no line came in time."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CliError(f"process {self.name} (pid {self.pid}) said nothing for {timeout:g} s")
            part = self.stdout.read(1 << 16)
            if not part:
                status = self.process.wait(END_SECONDS)
                raise CliError(f"process {self.name} ended with status {status}; its reason is above")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        record: dict[str, Any] = json.loads(line)
        return record

    def ask(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Writes `order` as a line into its stdin. returns: the record that it answers; errors as for record()"""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise CliError(f"process {self.name} (pid {self.pid}) is gone; its reason is above") from None
        return self.record(timeout)

    def close(self, patience: float = END_SECONDS) -> int:
        """Closes its stdin and waits; past `patience` seconds it is killed. returns: its exit status"""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(patience)
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
        self.close(END_SECONDS if error is None else END_AFTER_ERROR_SECONDS)


def machine() -> dict[str, Any]:
    """What a reader of figures wants to know first."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "rmem_max_bytes": int(Path("/proc/sys/net/core/rmem_max").read_text()),
    }
