"""What the commands share: sizes as people write them, tables, progress bars, JSON lines, errors that end a command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from paramwire._core import key_id, new_key

# Columns of a table that goes into a file or a pipe: wide enough for tensor names, so that nothing is cut.
PIPE_COLUMNS = 200

UNITS = {"": 1, "B": 1}
UNITS |= {prefix + "iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", 1)}
UNITS |= {prefix: 1024**power for power, prefix in enumerate("KMGT", 1)}


class CliError(Exception):
    """Ends the command with its text as the one line on stderr, and with status 1."""


def key_file(options: argparse.Namespace) -> str | None:
    """File of the cluster key: --key, else the environment's PARAMWIRE_KEY; None: no key."""
    given: str | None = options.key
    return given if given is not None else os.environ.get("PARAMWIRE_KEY") or None


@contextlib.contextmanager
def key_of_run(given: str | None) -> Iterator[str | None]:
    """File of the key of a benchmark or demo. "": a fresh key, gone with the run; None: none."""
    if given is None:
        yield None
    elif given:
        key_id(given)  # one that can't be used is told before any process starts
        yield os.path.abspath(given)
    else:
        with tempfile.TemporaryDirectory(prefix="paramwire-") as folder:
            new_key(f"{folder}/key")
            yield f"{folder}/key"


def byte_size(text: str) -> int:
    """Bytes of "4MiB", "1.5GB", "64K" (1024-based) or "4096". errors: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): value for unit, value in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it like 4096, 64KiB, 4MiB or 1.5GB")
    return int(float(match[1]) * units[match[2].lower()])


def byte_sizes(text: str) -> list[int]:
    """A list of sizes between commas, none of them 0."""
    sizes = [byte_size(part) for part in text.split(",")]
    if 0 in sizes:
        raise argparse.ArgumentTypeError(f"{text!r} holds a size of 0 bytes: the least is 1")
    return sizes


def budget(text: str) -> int | float:
    """Bytes as `byte_size`, or a part of the model: "25%" gives 0.25."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        return byte_size(text)
    part = float(match[1]) / 100
    if not 0 < part <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} of the model: give more than 0 % and at most 100 %")
    return part


def row_range(text: str) -> tuple[int, int]:
    """Rows of "10:20". errors: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of rows: write FIRST:END, for example 0:128, END not included"
        )
    return int(match[1]), int(match[2])


def backend(text: str) -> str:
    """A backend's name: "cpu", "cuda" or "cuda:1". Whether it is there is for the engine to say.

    errors: argparse.ArgumentTypeError
    """
    if re.fullmatch(r"cpu|cuda(:\d{1,4})?", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no backend: write cpu, cuda or cuda:N")
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 up")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, above 0 and at most a day")
    return value


def link_speed(text: str) -> float:
    """Gb/s of "10Gb/s", "100Mb/s", or of bytes: "1.2GB/s", "800MB/s". errors: argparse.ArgumentTypeError"""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GM])([bB])(?:it)?/s\s*", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed: write it like 10Gb/s (bits) or 1.2GB/s (bytes)")
    return float(match[1]) * (1.0 if match[2] == "G" else 1e-3) * (8 if match[3] == "B" else 1)


def in_bytes(count: float) -> str:
    """A size for people: "256.6 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def size_name(size: int) -> str:
    """A block size in full units where it is one: "16 MiB"; else in bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"


def in_micros(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1000:.1f} ms"
    return f"{value:.2f} us" if value < 100 else f"{value:.0f} us"


def number(value: float | None) -> str:
    """For a table: three digits, or "-" for what was not measured."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def console() -> Console:
    """For facts. A terminal gets its own width, a pipe enough columns that no cell is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def notes() -> Console:
    """For what is said beside the facts, on stderr: a pipe of the facts stays clean."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> Table:
    """A table of texts, numbers to the right; columns named in `left` to the left."""
    made = Table(
        title=title or None, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def facts(title: str, pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one a line. Plain texts are shown as they are: an address may hold brackets."""
    made = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
    )
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, Text(value) if isinstance(value, str) else value)
    return made


def bytes_progress(shown: bool = True) -> Progress:
    """A bar over bytes on stderr, gone when done; nothing where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=notes(),
        transient=True,
        disable=not shown or not sys.stderr.isatty(),
    )


def steps_progress(shown: bool = True) -> Progress:
    """The same over countable steps."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=notes(),
        transient=True,
        disable=not shown or not sys.stderr.isatty(),
    )


def json_line(record: dict[str, Any]) -> None:
    """One JSON object a line, flushed: a reader of the pipe sees it when it happens."""
    print(json.dumps(rounded(record), ensure_ascii=False, allow_nan=False), flush=True)


def rounded(value: Any) -> Any:
    """Floats to six digits: more is noise of the clock."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
