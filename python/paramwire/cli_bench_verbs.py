"""`paramwire bench fetch --transport verbs`: RDMA reads beside perftest on the same device, in alternating rounds.

perftest's programs are processes of their own, so a round of theirs is a whole run with as many reads as fit into its
time; their start and connection are not in their figures, nor are ours. What an emulated or software device gives says
nothing of hardware: only ratios of one run count, and every record says whether the device is software.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire._core import rdma_ports, time_fetches
from paramwire.cli_bench_common import percentiles
from paramwire.cli_bench_output import Record, yes
from paramwire.cli_bench_setting import Setting, counters
from paramwire.cli_common import CliError, console, in_micros, number, size_name, table

# Up to here a block is one packet of any MTU, and its time is a round trip: perftest's latency program is its baseline.
LATENCY_BYTES_MAX = 4096
# Names of the figures, and whether bytes are checked.
VERBS_FIGURES = {"fetch unverified": False, "fetch verified": True}
ROUNDS = 5
# perftest refuses fewer, and this many seconds are more than any of its runs here takes.
READS_MIN = 5
RUN_SECONDS = 120.0
# Reads of the first run, which tells how many fit into a round.
TRIAL_READS = 20
START_SECONDS = 20.0
MEGABYTE = 1 << 20  # perftest's "MB"


@dataclass
class Side:
    """Of one side, over all rounds."""

    rounds_gb_per_s: list[float]
    rounds_us: list[float]
    cpu_s: float = 0.0
    moved: int = 0

    def cpu_s_per_mib(self) -> float | None:
        return self.cpu_s / (self.moved / MEGABYTE) if self.moved else None


@dataclass(frozen=True)
class Device:
    name: str
    port: int
    gid_index: int
    software: bool

    @classmethod
    def of(cls, client: paramwire.Client) -> Device:
        """The one that the client reads with."""
        path, index = client.stats()["verbs_path"], client.stats()["verbs_gid_index"]
        name, port = path.split(" ")[0], int(path.split(" ")[2])
        software = any(row["software"] for row in rdma_ports() if row["device"] == name)
        return cls(name, port, index, software)


def processor_seconds() -> float:
    """Of the whole machine since its start: user, nice, system, irq and softirq. source: proc(5), /proc/stat.

    A software device works in softirqs and kernel threads, which no process is charged for.
    """
    user, nice, system, _, _, irq, softirq, *_ = (int(word) for word in Path("/proc/stat").read_text().split()[1:11])
    return float(user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Perftest:
    """Runs of ib_read_bw or ib_read_lat, both ends here, on one device."""

    def __init__(self, program: str, device: Device, size: int) -> None:
        found = shutil.which(program)
        if found is None:
            raise CliError(f"{program} is the baseline of verbs and is not installed: apt-get install perftest")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.port, self.size = port, str(size)
        self.words = [found, "-d", device.name, "-i", str(device.port), "-x", str(device.gid_index), "-s", str(size),
                      "-p", str(port), "-F"]  # fmt: skip

    def run(self, reads: int) -> list[str]:
        """The last line of figures. errors: CliError with what the program said."""
        words = [*self.words, "-n", str(max(READS_MIN, reads))]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                done = self.ask(words, server)
                server.wait(RUN_SECONDS)
            except subprocess.TimeoutExpired:
                raise CliError(f"{' '.join(words)} did not end within {RUN_SECONDS:g} s") from None
            finally:
                server.kill()
        lines = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == [self.size]]
        if done.returncode != 0 or not lines:
            said = (done.stderr or done.stdout).strip()[-400:]
            raise CliError(f"{' '.join(words)} failed ({done.returncode}): {said}")
        return lines[-1]

    def ask(self, words: list[str], server: subprocess.Popen[bytes]) -> subprocess.CompletedProcess[str]:
        """The client's end. It is sent again until the server listens: a trial connection would be taken for it."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            done = subprocess.run([*words, "127.0.0.1"], capture_output=True, text=True, timeout=RUN_SECONDS)
            early = "connect" in done.stderr.lower() and server.poll() is None and time.monotonic() < deadline
            if done.returncode == 0 or not early:
                return done


def one_verbs_figure(setting: Setting, bench: str) -> Record:
    """One of VERBS_FIGURES: into registered memory, one block after another, the manifest and its locators known."""
    verify = VERBS_FIGURES[bench]
    with (
        setting.connect("verbs", verify=verify) as client,
        client.register(setting.target),
        client.snapshot() as snapshot,
    ):
        names, targets, fetch = setting.names, setting.targets, snapshot.fetch
        # One block over and over, as perftest reads one buffer.
        native = partial(time_fetches, snapshot, names[:1], targets[:1])
        device = Device.of(client)
        small = setting.size <= LATENCY_BYTES_MAX
        for index in range(setting.count):
            fetch(names[index], out=targets[index])
        before = client.stats()
        ours, theirs = Side([], []), Side([], [])
        times: list[int] = []
        perftest = Perftest("ib_read_lat" if small else "ib_read_bw", device, setting.size)
        round_seconds = setting.seconds / ROUNDS / 2
        reads = reads_that_fit(perftest, small, round_seconds, setting.size)
        for _ in range(ROUNDS):
            their_round(theirs, perftest, reads, small, setting.size)
            times += our_round(ours, native, setting.size, round_seconds)
        after = client.stats()
        correct = setting.right(lambda index: fetch(names[index], out=targets[index]), setting.count)
    ratios = [a / b for a, b in zip(ours.rounds_gb_per_s, theirs.rounds_gb_per_s, strict=True)] if not small else None
    check = check_gb_per_s(setting) if verify and not small else None
    together = 1 / (1 / statistics.median(theirs.rounds_gb_per_s) + 1 / check) if check else None
    return {
        "bench": bench.replace(" ", "_"),
        "language": "c++",
        "transport": "verbs",
        "bytes": setting.size,
        "memory": "warm",
        "rotate_bytes": setting.size,
        "device": device.name,
        "software_device": device.software,
        **percentiles(times),
        "gb_per_s": statistics.median(ours.rounds_gb_per_s),
        "baseline": "ib_read_lat" if small else "ib_read_bw",
        "baseline_p50_us": statistics.median(theirs.rounds_us) if small else None,
        "baseline_gb_per_s": None if small else statistics.median(theirs.rounds_gb_per_s),
        "ratio": None if ratios is None else statistics.median(ratios),
        "ratio_min": None if ratios is None else min(ratios),
        "ratio_max": None if ratios is None else max(ratios),
        "p50_ratio": statistics.median(ours.rounds_us) / statistics.median(theirs.rounds_us) if small else None,
        # One pass of CRC-64 over as many bytes in this process, and what reading and then checking would give.
        "check_gb_per_s": check,
        "baseline_and_check_gb_per_s": together,
        "ratio_with_check": statistics.median(ours.rounds_gb_per_s) / together if together else None,
        "cpu_s_per_mib": ours.cpu_s_per_mib(),
        "baseline_cpu_s_per_mib": theirs.cpu_s_per_mib(),
        "calls": len(times),
        "verified": after["blocks_verified"] - before["blocks_verified"],
        "retries": after["retries"] - before["retries"],
        "transport_used": after["transport"],
        "path": after["verbs_path"],
        "counters": counters(after, before),
        "correct": correct,
    }


def reads_that_fit(perftest: Perftest, small: bool, seconds: float, size: int) -> int:
    line = perftest.run(1000 if small else TRIAL_READS)
    each = float(line[4]) * 1e-6 if small else size / (float(line[3]) * MEGABYTE or 1.0)
    return int(seconds / each)


def their_round(side: Side, perftest: Perftest, reads: int, small: bool, size: int) -> None:
    begin = processor_seconds()
    line = perftest.run(reads)
    side.cpu_s += processor_seconds() - begin
    side.moved += int(line[1]) * size
    if small:  # bytes, iterations, t_min, t_max, t_typical, t_avg, ...
        side.rounds_us.append(float(line[4]))
        side.rounds_gb_per_s.append(size / float(line[5]) / 1000)
    else:  # bytes, iterations, peak, average, messages
        side.rounds_gb_per_s.append(float(line[3]) * MEGABYTE / 1e9)


def our_round(side: Side, fetches: Callable[[float], npt.NDArray[np.int64]], size: int, seconds: float) -> list[int]:
    cpu = processor_seconds()
    times = fetches(seconds)
    side.cpu_s += processor_seconds() - cpu
    side.moved += times.size * size
    side.rounds_gb_per_s.append(times.size * size / int(times.sum()))
    side.rounds_us.append(float(np.median(times)) / 1000)
    return [int(each) for each in times]


def check_gb_per_s(setting: Setting) -> float:
    """Of CRC-64 over the block that was fetched."""
    begin = time.perf_counter_ns()
    moved = 0
    while time.perf_counter_ns() - begin < 1e9:
        paramwire.crc64(setting.targets[0])
        moved += setting.size
    return moved / (time.perf_counter_ns() - begin)


def show_verbs(records: Sequence[Record]) -> None:
    if not records:
        return
    rows = [
        (
            record["bench"].replace("_", " "),
            size_name(record["bytes"]),
            in_micros(record["p50_us"]),
            number(record["gb_per_s"]),
            in_micros(record["baseline_p50_us"]),
            number(record["baseline_gb_per_s"]),
            number(record["p50_ratio"] if record["ratio"] is None else record["ratio"]),
            number(record["ratio_with_check"]),
            number(record["cpu_s_per_mib"]),
            number(record["baseline_cpu_s_per_mib"]),
            yes(record["correct"]),
        )
        for record in records
    ]
    columns = ("what", "block", "p50", "GB/s", "base p50", "GB/s", "ratio", "with check", "CPU s/MiB", "base", "right")
    how = "a software device, which says nothing of hardware" if records[0]["software_device"] else records[0]["device"]
    out = console()
    out.print(table(f"verbs, from C++, over {how}; base: perftest", columns, rows, left=("what",)))
    out.print("ratio: speed over ib_read_bw's, or p50 over ib_read_lat's; with check: over reading, then one CRC pass")
    out.print()
