"""`paramwire bench mixed`: small reads while a publisher writes and while bulk reads run, and while neither does.

Every word of every block of a version holds that version's number, so that one look at the bytes tells a torn block,
and one of another version than the snapshot that it was read from.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire.cli_bench_common import Child, histogram, percentiles
from paramwire.cli_bench_output import Record, Recorder, yes
from paramwire.cli_bench_setting import address_for, connected, context, start_seconds, wanted_transports
from paramwire.cli_common import CliError, console, in_micros, number, size_name, steps_progress, table

# Phase: (publisher writes, bulk reads run).
PHASES = {
    "alone": (False, False),
    "writer": (True, False),
    "bulk": (False, True),
    "writer and bulk": (True, True),
}
# Rounds of each phase, interleaved.
ROUNDS = 4
# Reads from one snapshot before the reader moves on to the newest one.
READS_OF_A_SNAPSHOT = 64
WORD = 8


@dataclass
class Reads:
    """What one kind of reads came to, in one phase."""

    times_ns: list[int] = field(default_factory=list)
    snapshots_ns: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    torn: int = 0
    wrong_version: int = 0

    def look(self, words: npt.NDArray[np.uint64], version: int) -> None:
        """Counts what is wrong about one block that was accepted."""
        first = int(words[0])
        if not bool((words == first).all()):
            self.torn += 1
        elif first != version:
            self.wrong_version += 1
        self.versions.add(version)


@dataclass
class Reader:
    """Reads blocks of one size in turn through a client, from a snapshot that is renewed."""

    client: paramwire.Client
    names: Sequence[str]
    size: int
    reads_of_a_snapshot: int

    def read_until(self, reads: Reads, over: threading.Event, seconds: float) -> None:
        target = np.empty(self.size // WORD, np.uint64)
        clock = time.perf_counter_ns
        end = clock() + int(seconds * 1e9)
        while clock() < end and not over.is_set():
            asked = clock()
            with self.client.snapshot() as snapshot:
                reads.snapshots_ns.append(clock() - asked)
                version = snapshot.version.counter
                for at in range(self.reads_of_a_snapshot):
                    name = self.names[at % len(self.names)]
                    target[:] = 0
                    before = clock()
                    snapshot.fetch(name, out=target)
                    after = clock()
                    reads.times_ns.append(after - before)
                    reads.look(target, version)
                    if after > end or over.is_set():
                        break


def bench_mixed(options: argparse.Namespace) -> int:
    transports = wanted_transports(options)
    if any(size % WORD for size in [*options.sizes, options.bulk]):
        raise CliError(f"--sizes and --bulk of bench mixed must be whole multiples of {WORD} bytes")
    with Recorder(options, show) as recorder:
        with steps_progress() as progress:
            task = progress.add_task("bench mixed", total=len(options.sizes) * len(transports))
            for size in options.sizes:
                for transport in transports:
                    progress.update(task, description=f"{size_name(size)} {transport}")
                    for record in one_transport(size, transport, options):
                        recorder.add(record | context(options))
                    progress.advance(task)
        return recorder.finish()


def one_transport(size: int, transport: str, options: argparse.Namespace) -> Iterator[Record]:
    small = {phase: Reads() for phase in PHASES}
    bulk = {phase: Reads() for phase in PHASES}
    published = dict.fromkeys(PHASES, 0)
    spent = dict.fromkeys(PHASES, 0.0)
    words = ["--size", str(size), "--bulk", str(options.bulk), "--host", options.host]
    with Child("paramwire.cli_bench_writer", words) as server:
        ready = server.record(start_seconds(options.bulk))
        with connected(address_for(transport, ready), transport, options.timeout) as client:
            reader = Reader(client, ready["small"], size, READS_OF_A_SNAPSHOT)
            wholesale = Reader(client, ready["bulk"], options.bulk, len(ready["bulk"]))
            for _ in range(ROUNDS):
                for phase, (writes, reads_bulk) in PHASES.items():
                    begin = time.perf_counter()
                    server.ask({"publish_per_s": options.publish_rate if writes else 0}, options.timeout)
                    seconds = options.seconds / ROUNDS
                    one_round(reader, small[phase], wholesale if reads_bulk else None, bulk[phase], seconds)
                    published[phase] += int(server.ask({"publish_per_s": 0}, options.timeout)["published"])
                    spent[phase] += time.perf_counter() - begin
            stats = client.stats()
    for phase, (writes, _) in PHASES.items():
        if writes and not published[phase]:
            raise CliError(
                f"the publisher wrote nothing in {options.seconds:g} s: give more --seconds or --publish-rate"
            )
    quiet = percentiles(small["alone"].times_ns)
    for phase, (writes, reads_bulk) in PHASES.items():
        mine, theirs = small[phase], bulk[phase]
        torn, wrong = mine.torn + theirs.torn, mine.wrong_version + theirs.wrong_version
        figures: dict[str, Any] = percentiles(mine.times_ns)
        yield {
            "bench": "mixed",
            "language": "python",
            "transport": transport,
            "bytes": size,
            "phase": phase,
            "writer": writes,
            "bulk_bytes": options.bulk if reads_bulk else None,
            **figures,
            "max_us": max(mine.times_ns) / 1000,
            "snapshot_p50_us": percentiles(mine.snapshots_ns)["p50_us"],
            "snapshot_p99_us": percentiles(mine.snapshots_ns)["p99_us"],
            "baseline": "alone",
            "p50_ratio": figures["p50_us"] / quiet["p50_us"],
            "p99_ratio": figures["p99_us"] / quiet["p99_us"],
            "publish_per_s_wanted": options.publish_rate if writes else None,
            "publish_per_s": published[phase] / spent[phase] if writes else None,
            "published_bytes_each": ready["version_bytes"] if writes else None,
            "versions_seen": len(mine.versions | theirs.versions),
            "calls": len(mine.times_ns),
            "bulk_gb_per_s": len(theirs.times_ns) * options.bulk / sum(theirs.times_ns) if theirs.times_ns else None,
            "bulk_calls": len(theirs.times_ns) if reads_bulk else None,
            "torn_accepted": torn,
            "wrong_version_accepted": wrong,
            "transport_used": stats["transport"],
            "histogram_us_calls": histogram(mine.times_ns),
            "correct": torn == 0 and wrong == 0,
        }


def one_round(reader: Reader, small: Reads, wholesale: Reader | None, bulk: Reads, seconds: float) -> None:
    """Small reads in this thread, bulk reads in another.  errors: the first of either"""
    over = threading.Event()
    failed: list[BaseException] = []

    def read_bulk(wholesale: Reader) -> None:
        try:
            wholesale.read_until(bulk, over, seconds)
        except BaseException as error:
            failed.append(error)

    with contextlib.ExitStack() as stack:
        if wholesale is not None:
            thread = threading.Thread(target=read_bulk, args=(wholesale,), name="bulk")
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        reader.read_until(small, over, seconds)
    if failed:
        raise failed[0]


def show(records: Sequence[Record]) -> None:
    rows = [
        (
            f"{record['transport']}, {record['phase']}",
            size_name(record["bytes"]),
            in_micros(record["p50_us"]),
            in_micros(record["p99_us"]),
            in_micros(record["max_us"]),
            number(record["p99_ratio"]),
            number(record["publish_per_s"]),
            number(record["bulk_gb_per_s"]),
            str(record["torn_accepted"] + record["wrong_version_accepted"]),
            yes(record["correct"]),
        )
        for record in records
    ]
    columns = ("what", "block", "p50", "p99", "max", "p99 ratio", "writes/s", "bulk GB/s", "torn", "right")
    out = console()
    out.print(table("small reads beside a publisher and bulk reads, from Python", columns, rows, left=("what",)))
    out.print("p99 ratio: over the same reads alone; torn: blocks that were accepted and should not have been")
