"""Where the records of a benchmark go: JSON lines, a CSV file, a table, a plot; and whether all of them are right."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paramwire.cli_bench_plot import need_matplotlib, write_png
from paramwire.cli_common import CliError, console, counted, json_line, rounded

Record = dict[str, Any]


class Recorder:
    """Takes the records of one run as they come.

    What was measured before an error is kept: JSON lines go out at once, the CSV file is written at the end in any
    case.
    """

    def __init__(self, options: argparse.Namespace, show: Callable[[Sequence[Record]], None]) -> None:
        """errors: CliError when a file is asked for and can't be made: before anything is measured"""
        must_be_writable(options.csv, options.plot)
        if options.plot:
            need_matplotlib()
        self.options = options
        self.show = show
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        self.records.append(rounded(record))
        if self.options.json:
            json_line(record)

    def finish(self) -> int:
        """Shows the table, draws the plot.  errors: CliError when a record says that bytes were wrong."""
        if not self.options.json:
            self.show(self.records)
        if self.options.plot:
            write_png(self.records, self.options.plot)
            if not self.options.json:
                console().print(f"plot: {self.options.plot}")
        refuse_wrong(self.records)
        return 0

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.options.csv:
            write_csv(self.records, self.options.csv)


def must_be_writable(*paths: str | None) -> None:
    """Whether files can be written is known before hours of measuring, not after. None: not asked for."""
    for path in paths:
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise CliError(f"{path} can't be written: its folder is not there, or it is a folder itself")


def refuse_wrong(records: Sequence[Record]) -> None:
    """None is a peer that does not show its bytes."""
    wrong = [r for r in records if r["correct"] is False or r.get("baselines_correct") is False]
    if wrong:
        first = f"{wrong[0]['bench']} of {wrong[0]['bytes']} bytes over {wrong[0]['transport']}"
        whose = "" if wrong[0]["correct"] is False else " by a baseline"
        raise CliError(f"{counted(len(wrong), 'figure')} with wrong bytes: {first}{whose} first")


def flat(record: Record) -> dict[str, Any]:
    """One level: {"a": {"b": 1}} gives {"a.b": 1}. Lists are JSON text; None stays None, an empty cell."""
    out: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            out |= {f"{name}.{inner}": item for inner, item in flat(value).items()}
        elif isinstance(value, list | tuple | bool):
            out[name] = json.dumps(value)
        else:
            out[name] = value
    return out


def write_csv(records: Iterable[Record], path: str) -> None:
    """A row for each record, a column for each field that any of them has, in the order in which they appear."""
    rows = [flat(record) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise CliError(f"{path} can't be written: {error.strerror}") from None


def yes(value: bool) -> str:
    return "yes" if value else "NO"
