"""`paramwire bench fetch`: blocks of another process, fetched and viewed, beside plain programs in one run."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.progress import Progress, TaskID

import paramwire
from paramwire import _bench
from paramwire.cli_bench_common import Call, is_pattern, machine, measure
from paramwire.cli_bench_net import LossyRounds, network
from paramwire.cli_bench_output import Record, Recorder, yes
from paramwire.cli_bench_peers import measure_peers, show_peers
from paramwire.cli_bench_setting import (
    Plain,
    Setting,
    context,
    counters,
    plain_programs,
    rotation,
    setting_of,
    wanted_transports,
)
from paramwire.cli_bench_verbs import VERBS_FIGURES, one_verbs_figure, show_verbs
from paramwire.cli_common import (
    CliError,
    console,
    counted,
    in_micros,
    key_of_run,
    notes,
    number,
    size_name,
    steps_progress,
    table,
)

SHM_FIGURES = ("fetch cold", "fetch warm", "fetch_read cold", "first_view cold", "view warm")
OTHER_FIGURES = ("fetch cold", "fetch warm")


def bench_fetch(options: argparse.Namespace) -> int:
    if options.net and options.peers:
        raise CliError("--peers are on this host's loopback: leave them, or --net, out")
    if options.net and options.key is not None:
        raise CliError("--net has a key of its own, and another baseline than --key: leave one of them out")
    with network(options):
        return bench_sizes(options)


def bench_sizes(options: argparse.Namespace) -> int:
    transports = wanted_transports(options)
    rotate = rotation(options)
    if not options.json:
        about = machine()
        notes().print(f"{about['cpu']}, {counted(about['cores'], 'core')}, Linux {about['kernel']}; "
                      f"cold figures move on through {size_name(rotate)} on each side")  # fmt: skip
    figures = sum(len(figures_of(transport)) for transport in transports)
    with Recorder(options, show) as recorder, key_of_run(options.key) as key:
        with steps_progress() as progress:
            task = progress.add_task("bench fetch", total=figures * len(options.sizes))
            for size in options.sizes:
                for record in bench_size(size, rotate, transports, options, key, progress, task):
                    recorder.add(record)
            for record in measure_peers(options, progress, rotate):
                recorder.add(record)
        return recorder.finish()


def figures_of(transport: str) -> tuple[str, ...]:
    if transport == "verbs":
        return (*VERBS_FIGURES,)
    return SHM_FIGURES if transport == "shm" else OTHER_FIGURES


def bench_size(
    size: int,
    rotate: int,
    transports: Sequence[str],
    options: argparse.Namespace,
    key: str | None,
    progress: Progress,
    task: TaskID,
) -> Iterator[Record]:
    """The records of one block size, each transport against the same server process."""
    progress.update(task, description=f"{size_name(size)}: server starts")
    with setting_of(size, rotate, options, key=key) as setting:
        for transport in transports:
            for figure in figures_of(transport):
                progress.update(task, description=f"{size_name(size)} {transport}: {figure}")
                if transport == "verbs":
                    yield one_verbs_figure(setting, figure) | context(options)
                else:
                    yield one_figure(setting, transport, *figure.split()) | context(options)
                progress.advance(task)


def one_figure(setting: Setting, transport: str, bench: str, memory: str) -> Record:
    """One record: a fresh client, one untimed pass, timed rounds, then the bytes checked in a pass of their own."""
    with setting.connect(transport) as client:
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
        "transport_used": after["transport"],
        "counters": counters(after, before),
        **(setting.network.record() if setting.network else {}),
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
        with lossy_or_plain(setting, client, with_read, read=read) as plain:
            figures = measure(
                with_read, plain.calls, count=count, size=setting.size, seconds=setting.seconds,
                server_pid=setting.server.pid, beside=plain.beside, rounds=setting.rounds, switch=plain.switch,
            )  # fmt: skip
            figures["verified"] = client.stats()["blocks_verified"] - started
            correct = setting.right(ours, count)
            return figures | plain.facts(figures, setting, count), correct


@contextlib.contextmanager
def lossy_or_plain(setting: Setting, client: paramwire.Client, call: Call, *, read: bool) -> Iterator[Plain]:
    """What fetches are measured against. With loss that is `call` itself without it: the plain programs get nowhere."""
    if setting.network is None or not setting.network.options.loss:
        with plain_programs(setting, client.transport, read=read) as plain:
            yield plain
        return
    rounds = LossyRounds(setting.network, client, setting.server, call)
    yield Plain(rounds.calls, switch=rounds.switch, more=rounds.facts)


def later_views(setting: Setting, client: paramwire.Client) -> tuple[dict[str, Any], bool]:
    """Views of a block that this process verified before: nothing is moved and nothing read, at any size."""
    with client.snapshot() as snapshot:
        view = snapshot.view

        def ours(_: int) -> None:
            view("block.0").release()

        with view("block.0") as first:
            correct = is_pattern(first.array)
        figures = measure(ours, {}, count=1, size=setting.size, seconds=setting.seconds, server_pid=setting.server.pid)
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
        with setting.connect("shm") as client, client.snapshot() as snapshot:
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
        "baselines": {},
        "verified": verified,
    }, correct and verified == calls


def show(records: Sequence[Record]) -> None:
    """A table for each transport, narrow enough for 100 columns."""
    ours = [record for record in records if record["bench"] != "peer"]
    out = console()
    show_verbs([record for record in ours if record["transport"] == "verbs"])
    ours = [record for record in ours if record["transport"] != "verbs"]
    for transport in dict.fromkeys(record["transport"] for record in ours):
        mine = [record for record in ours if record["transport"] == transport]
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
                yes(record["correct"]),
            )
            for record in mine
        ]
        columns = ("what", "block", "p50", "p99", "GB/s", "base p50", "GB/s", "ratio", "CPU s/GB", "right")
        bases = ", ".join(dict.fromkeys(record["baseline"] for record in mine if record["baseline"]))
        how = ", with a key" if mine[0]["key"] else ""
        out.print(table(f"{transport}{how}, from Python; base: {bases}", columns, rows, left=("what",)))
        out.print()
    show_peers([record for record in records if record["bench"] == "peer"])
