"""`paramwire bench report`: one page with plots, tables and facts of the machine, from runs or from their records."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paramwire.cli_bench_common import PYTHON_MODULE, machine
from paramwire.cli_bench_output import Record, must_be_writable, refuse_wrong
from paramwire.cli_bench_page import BENCHES, Failure, page
from paramwire.cli_common import CliError, console, json_line, notes, steps_progress

# Runs of a set: the words after `paramwire bench`. "quick" is for a look, about half a minute a transport; "full" is
# for a page that is kept.
SETS = {
    "quick": (
        ("fetch", "--sizes", "64,64KiB,1MiB,16MiB", "--seconds", "0.5", "--rotate", "256MiB"),
        ("latency", "--sizes", "64,4KiB", "--seconds", "1"),
        ("incast", "--sizes", "1MiB", "--servers", "4", "--seconds", "2"),
        ("mixed", "--sizes", "64", "--seconds", "2"),
    ),
    "full": (
        ("fetch", "--seconds", "2", "--peers", "all"),
        ("latency", "--sizes", "64,1KiB,4KiB,64KiB", "--seconds", "4"),
        ("incast", "--sizes", "64KiB,1MiB,16MiB", "--servers", "8", "--seconds", "4"),
        ("mixed", "--sizes", "64,4KiB", "--seconds", "8"),
    ),
}
# Beside its figures' own deadlines, what a whole run may take: only a hang gets there.
RUN_SECONDS = 3600.0


def bench_report(options: argparse.Namespace) -> int:
    """errors: CliError when a run failed, or bytes were wrong; the page is written first, and says so"""
    must_be_writable(options.out, options.keep)
    if options.records:
        records = [record for path in options.records for record in read_records(path)]
        failures: list[Failure] = []
    else:
        records, failures = run_set(options)
    if not records and not failures:
        raise CliError("there is no record to report: " + ", ".join(options.records))
    text = page(records, failures, machine(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    try:
        Path(options.out).write_text(text)
    except OSError as error:
        raise CliError(f"{options.out} can't be written: {error.strerror}") from None
    facts = {"page": options.out, "records": len(records), "failed_runs": len(failures)}
    if options.json:
        json_line(facts)
    else:
        console().print(f"{options.out}: {len(records)} records")
    refuse_wrong(records)
    if failures:
        raise CliError(f"{len(failures)} of the runs failed, first {failures[0].command}: {failures[0].reason}")
    return 0


def read_records(path: str) -> list[Record]:
    """Of a file of JSON lines. errors: CliError that names file and line; records of other commands are left out"""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{path} can't be read: {getattr(error, 'strerror', error)}") from None
    records = []
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise CliError(f"{path}, line {at}: no JSON: {error}") from None
        if not isinstance(record, dict) or "bench" not in record:
            raise CliError(f'{path}, line {at}: no record of `paramwire bench`: it has no "bench"')
        if record["bench"] in BENCHES:
            absent = [name for name in ("transport", "bytes", "correct") if name not in record]
            if absent:
                raise CliError(f"{path}, line {at}: the record has no {', '.join(absent)}")
            records.append(record)
        else:
            notes().print(f"{path}, line {at}: records of bench {record['bench']} are not reported")
    return records


def run_set(options: argparse.Namespace) -> tuple[list[Record], list[Failure]]:
    """Each run is a process of its own, as if typed; one that fails leaves its records and a note on the page."""
    records: list[Record] = []
    failures: list[Failure] = []
    runs = [run for run in SETS[options.set] if options.only is None or run[0] in options.only]
    with steps_progress() as progress:
        task = progress.add_task("bench report", total=len(runs))
        for run in runs:
            everywhere = ("--transport", options.transport, "--timeout", f"{options.timeout:g}", "--json")
            words = ["bench", *changed(run, options), *everywhere]
            progress.update(task, description=f"bench {run[0]}")
            found, reason = run_one(words)
            records += found
            if reason:
                failures.append(Failure("paramwire " + " ".join(words), reason))
            progress.advance(task)
    if options.keep:
        Path(options.keep).write_text("".join(json.dumps(record) + "\n" for record in records))
    return records, failures


def changed(run: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The words of a run, with the user's sizes and seconds in place of the set's."""
    words = list(run)
    sizes = ",".join(map(str, options.sizes)) if options.sizes else None
    for name, value in (("--sizes", sizes), ("--seconds", options.seconds)):
        if value is None:
            continue
        if name in words:
            words[words.index(name) + 1] = str(value)
        else:
            words += [name, str(value)]
    return words


def run_one(words: Sequence[str]) -> tuple[list[Record], str]:
    """returns: its records, and why it failed, or nothing"""
    process = subprocess.Popen(
        [*PYTHON_MODULE, "paramwire", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err = f"not done after {RUN_SECONDS:g} s\n{err}"
    except BaseException:
        process.kill()
        process.communicate()
        raise
    sys.stderr.write(err)
    reason = err.strip().splitlines()[-1] if err.strip() else f"status {process.returncode}"
    return [json.loads(line) for line in out.splitlines()], reason if process.returncode else ""
