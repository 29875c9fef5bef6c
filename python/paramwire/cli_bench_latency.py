"""`paramwire bench latency`: round trips of small blocks, each timed alone; percentiles, and the histogram itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from paramwire.cli_bench_common import measure
from paramwire.cli_bench_output import Record, Recorder, yes
from paramwire.cli_bench_setting import (
    WAITS,
    Setting,
    context,
    counters,
    plain_programs,
    rotation,
    setting_of,
    waits_of,
    wanted_transports,
)
from paramwire.cli_common import console, in_micros, key_of_run, number, size_name, steps_progress, table

# Calls before the clock counts, beside one pass over cold blocks: sockets, caches and clocks of the processor settle.
WARM_UP_CALLS = 200


def bench_latency(options: argparse.Namespace) -> int:
    transports = wanted_transports(options)
    rotate = rotation(options)
    with Recorder(options, show) as recorder, key_of_run(options.key) as key:
        with steps_progress() as progress:
            task = progress.add_task("bench latency", total=len(options.sizes))
            for size in options.sizes:
                progress.update(task, description=f"{size_name(size)}: server starts")
                for wait in WAITS:
                    measured = [transport for transport in transports if wait in waits_of(transport, bool(key))]
                    if not measured:
                        continue
                    with setting_of(size, rotate, options, wait, key) as setting:
                        for transport in measured:
                            progress.update(task, description=f"{size_name(size)} {transport}, {wait}")
                            # Cold moves on through all blocks, warm stays at one.
                            for memory in ("cold", "warm"):
                                recorder.add(one_figure(setting, transport, wait, memory) | context(options))
                progress.advance(task)
        return recorder.finish()


def one_figure(setting: Setting, transport: str, wait: str, memory: str) -> Record:
    count = setting.count if memory == "cold" else 1
    clock = time.perf_counter_ns
    begin = clock()
    with setting.connect(transport, wait) as client, client.snapshot() as snapshot:
        connected = clock()
        names, targets, fetch = setting.names, setting.targets, snapshot.fetch

        def ours(index: int) -> None:
            fetch(names[index], out=targets[index])

        ours(0)
        first = clock()
        warm_up = max(count, WARM_UP_CALLS)
        for index in range(warm_up):
            ours(index % count)
        before = client.stats()
        with plain_programs(setting, client.transport, spin=wait == "busy_poll") as plain:
            for call in plain.calls.values():
                for index in range(WARM_UP_CALLS):
                    call(index % count)
            figures = measure(
                ours, plain.calls, count=count, size=setting.size, seconds=setting.seconds,
                server_pid=setting.server.pid, beside=plain.beside, with_histogram=True,
                rounds=setting.rounds,
            )  # fmt: skip
            after = client.stats()
            facts = plain.facts(figures, setting, count)
        correct = setting.right(ours, count)
    apart: dict[str, Any] = {
        "connect_us": (connected - begin) / 1000,
        "first_us": (first - connected) / 1000,
        "warm_up_calls": warm_up,
    }
    return {
        "bench": "latency",
        "language": "python",
        "transport": transport,
        "wait": wait,
        "bytes": setting.size,
        "memory": memory,
        "rotate_bytes": setting.size * count,
        **apart,
        **figures,
        **facts,
        "verified": after["blocks_verified"] - before["blocks_verified"],
        "retries": after["retries"] - before["retries"],
        "transport_used": after["transport"],
        "counters": counters(after, before),
        "correct": correct,
    }


def show(records: Sequence[Record]) -> None:
    rows = [
        (
            f"{record['transport']}, {record['wait'].replace('_', '-')}, {record['memory']}",
            size_name(record["bytes"]),
            *(in_micros(record[name]) for name in ("p50_us", "p90_us", "p99_us", "p99_9_us", "max_us")),
            in_micros(record["baseline_p50_us"]),
            number(record["p50_ratio"]),
            number(record["cpu_us_per_call"]),
            yes(record["correct"]),
        )
        for record in records
    ]
    columns = ("what", "block", "p50", "p90", "p99", "p99.9", "max", "base p50", "ratio", "CPU us", "right")
    bases = ", ".join(dict.fromkeys(record["baseline"] for record in records if record["baseline"]))
    out = console()
    how = " with a key" if any(record["key"] for record in records) else ""
    out.print(table(f"one verified fetch{how}, from Python; base: {bases}", columns, rows, left=("what",)))
    out.print("ratio: p50 over the baseline's; CPU: of both processes, for each call")
