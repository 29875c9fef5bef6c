"""`paramwire checkpoint`: a server's model into a directory and back, what is there, and whether every bit still is."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import paramwire
from paramwire import checkpoint
from paramwire.cli_common import bytes_progress, console, counted, facts, in_bytes, json_line, key_file, notes, table

Result = TypeVar("Result")
# Between two looks at a worker thread, in seconds: a progress bar that moves, and nothing that waits.
LOOK_SECONDS = 0.1
# Problems that are shown to people; all are in --json.
SHOWN_PROBLEMS = 50


def at_work(
    what: str,
    shown: bool,
    drain: float,
    work: Callable[[paramwire.CheckpointProgress], Result],
) -> tuple[Result, bool]:
    """Runs `work` in a thread, under a bar. SIGTERM gives it `drain` seconds more, Ctrl-C none; a second one ends the
    process at once.

    returns: its result, and whether SIGTERM came
    """
    progress = paramwire.CheckpointProgress()
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work(progress))
        except BaseException as error:  # raised again below, in the thread of the command
            failed.append(error)

    with stop_signals(progress, drain) as stopped, bytes_progress(shown) as bar:
        thread = threading.Thread(target=run, name="paramwire-checkpoint")
        thread.start()
        task = bar.add_task(what, total=None)
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            bar.update(task, total=progress.bytes or None, completed=progress.bytes_done)
    if failed:
        if stopped == [signal.SIGINT] and isinstance(failed[0], paramwire.DeadlineError):
            raise KeyboardInterrupt
        raise failed[0]
    return done[0], bool(stopped)


@contextlib.contextmanager
def stop_signals(progress: paramwire.CheckpointProgress, drain: float) -> Iterator[list[int]]:
    """Inside, the first SIGTERM or SIGINT stops the work under way. gives: the signal that came"""
    stopped: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped.append(number)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        progress.stop(drain if number == signal.SIGTERM else 0.0)

    former = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield stopped
    finally:
        for number, handler in former:
            signal.signal(number, handler)


def save(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    with paramwire.connect(
        options.address, transport=options.transport, timeout=options.timeout, key=key_file(options)
    ) as client:
        saved, stopped = at_work(
            "saving",
            not options.json,
            options.drain,
            lambda progress: checkpoint.save(
                options.directory,
                client,
                version=options.version,
                workers=options.workers,
                full_every=options.full_every,
                keep=options.keep,
                codec=options.codec,
                delta=not options.no_delta,
                verify=options.verify,
                memory_limit=options.memory_limit,
                progress=progress,
            ),
        )
    spent = time.perf_counter() - begin
    record: dict[str, Any] = {
        **dataclasses.asdict(saved),
        "version": str(saved.version),
        "removed": [str(version) for version in saved.removed],
        "directory": options.directory,
        "address": options.address,
        "seconds": spent,
        "finished_after_sigterm": stopped,
    }
    for note in saved.notes:
        notes().print(f"paramwire: {note}")
    if options.json:
        json_line(record)
        return 0
    if saved.existed:
        console().print(f"version {saved.version} is in {options.directory} already")
        return 0
    kinds = [(saved.blocks_full, "in full"), (saved.blocks_delta, "as deltas"), (saved.blocks_unchanged, "unchanged")]
    kinds.append((saved.blocks_resumed, "from an earlier save that was ended"))
    pairs = [
        ("directory", options.directory),
        ("form", "full" if saved.full else "on top of earlier ones"),
        ("blocks", f"{saved.blocks:,}: " + ", ".join(f"{count:,} {how}" for count, how in kinds if count)),
        ("bytes", f"{in_bytes(saved.raw_bytes)}, written {in_bytes(saved.written_bytes)} in {spent:.1f} s"),
    ]
    if saved.removed:
        pairs.append(("removed", ", ".join(record["removed"])))
    if stopped:
        pairs.append(("SIGTERM", "came meanwhile; the save was finished"))
    console().print(facts(f"saved version {saved.version}", pairs))
    return 0


def restore(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    if options.safetensors is not None:
        left_out = checkpoint.export_safetensors(
            options.directory, options.safetensors, version=options.version, workers=options.workers
        )
        record: dict[str, Any] = {"file": options.safetensors, "left_out": left_out}
        said = f"written to {options.safetensors}"
        if left_out:
            notes().print(f"paramwire: left out, for `paramwire serve` only: {', '.join(left_out)}")
    else:
        with paramwire.connect(options.to, timeout=options.timeout, key=key_file(options)) as client:
            version, _ = at_work(
                "restoring",
                not options.json,
                0.0,
                lambda progress: checkpoint.restore(
                    options.directory,
                    client,
                    version=options.version,
                    workers=options.workers,
                    memory_limit=options.memory_limit,
                    timeout=options.timeout,
                    progress=progress,
                ),
            )
        record = {"address": options.to, "version": str(version)}
        said = f"published on {options.to} as version {version}"
    spent = time.perf_counter() - begin
    if options.json:
        json_line({"directory": options.directory, **record, "seconds": spent})
    else:
        console().print(f"{options.directory}: {said}, in {spent:.1f} s")
    return 0


def verify(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    found, _ = at_work(
        "verifying",
        not options.json,
        0.0,
        lambda progress: checkpoint.verify(
            options.directory,
            version=options.version,
            decode=options.decode,
            workers=options.workers,
            memory_limit=options.memory_limit,
            progress=progress,
        ),
    )
    spent = time.perf_counter() - begin
    problems = [
        {**dataclasses.asdict(problem), "versions": [str(version) for version in problem.versions]}
        for problem in found.problems
    ]
    if options.json:
        json_line({**dataclasses.asdict(found), "problems": problems, "seconds": spent})
        return 1 if problems else 0
    out = console()
    if problems:
        rows = [
            (
                problem["file"],
                f"{problem['offset']:,}",
                problem["block"] or "-",
                "-" if problem["extent"] is None else str(problem["extent"]),
                ", ".join(problem["versions"]) or "none",
                problem["text"],
            )
            for problem in problems[:SHOWN_PROBLEMS]
        ]
        columns = ("file", "byte", "block", "extent", "needed by", "what is wrong")
        out.print(table("", columns, rows, left=("file", "block", "needed by", "what is wrong")))
        if len(problems) > SHOWN_PROBLEMS:
            out.print(f"and {len(problems) - SHOWN_PROBLEMS:,} more (--json has all)")
    read = f"{counted(found.checkpoints, 'checkpoint')}, {counted(found.files, 'data file')}"
    rate = found.bytes / spent / 1e9 if spent else 0.0
    out.print(
        f"{read}, {counted(found.records, 'record')}, {in_bytes(found.bytes)} in {spent:.1f} s ({rate:.2f} GB/s): "
        + (f"{counted(len(problems), 'problem')}" if problems else "every bit is as it was written")
    )
    return 1 if problems else 0


def list_checkpoints(options: argparse.Namespace) -> int:
    found = checkpoint.ls(options.directory)
    if options.json:
        for item in found:
            json_line({**dataclasses.asdict(item), "version": str(item.version), "created": item.created})
        return 0
    rows = [
        (
            str(item.version),
            local_time(item.created),
            form(item),
            f"{item.blocks:,}",
            in_bytes(item.raw_bytes),
            in_bytes(item.stored_bytes),
            in_bytes(item.written_bytes),
            "yes" if item.whole else f"no: {item.problem}",
        )
        for item in found
    ]
    out = console()
    if not rows:
        out.print(f"no checkpoint in {options.directory}")
        return 0
    columns = ("version", "saved", "form", "blocks", "raw", "stored", "written", "whole")
    out.print(table("", columns, rows, left=("version", "saved", "form", "whole")))
    return 0


def form(item: checkpoint.Summary) -> str:
    """Whether it is full, or how many saves the last full one is back."""
    if not item.blocks and item.problem:
        return "-"
    return "full" if item.full else f"delta {item.chain}"


def local_time(created: float | None) -> str:
    if created is None:
        return "-"
    return datetime.datetime.fromtimestamp(created).astimezone().isoformat(" ", "seconds")
