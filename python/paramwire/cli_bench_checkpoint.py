"""`paramwire bench checkpoint`: saves and restores beside a plain copy of the same bytes, in the same run."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paramwire import checkpoint
from paramwire.cli_bench_common import machine
from paramwire.cli_common import CliError, console, in_bytes, json_line, steps_progress, table

TENSORS = 16
COLUMNS = 4096
# Of one read or write of the plain copy, as cp(1) and the library take some MiB.
PIECE_BYTES = 8 << 20
# Values that a step of training changes, and by how much: a tenth, by one unit in the last place, about what AdamW does
# to bf16 weights at small learning rates.
CHANGED = 0.1

Arrays = dict[str, npt.NDArray[np.uint16]]


def weights(nbytes: int, rng: np.random.Generator) -> Arrays:
    """bf16 weights as normal values of 0.02, cut to 16 bits."""
    rows = max(1, nbytes // 2 // TENSORS // COLUMNS)
    arrays = {}
    for index in range(TENSORS):
        values = rng.standard_normal((rows, COLUMNS), dtype=np.float32) * np.float32(0.02)
        arrays[f"layer.{index}"] = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return arrays


def step(arrays: Arrays, rng: np.random.Generator) -> Arrays:
    out = {name: array.copy() for name, array in arrays.items()}
    for array in out.values():
        array[rng.random(array.shape, dtype=np.float32) < CHANGED] += np.uint16(1)
    return out


def plain_copy(source: Path, target: Path) -> None:
    """What cp would do, and what makes it durable: read, write, fsync, rename, fsync of the folder."""
    temporary = target.with_suffix(".tmp")
    buffer = bytearray(PIECE_BYTES)
    with source.open("rb", buffering=0) as reading, temporary.open("wb", buffering=0) as writing:
        while count := reading.readinto(buffer):
            written = 0
            while written < count:
                written += writing.write(memoryview(buffer)[written:count])
        os.fsync(writing.fileno())
    temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def plain_read(source: Path, arrays: Arrays) -> None:
    """The same bytes into fresh arrays, by as few calls as it takes."""
    with source.open("rb", buffering=0) as reading:
        for array in arrays.values():
            target = np.empty(array.nbytes, np.uint8).data
            done = 0
            while done < len(target):
                done += reading.readinto(target[done : done + PIECE_BYTES]) or 0


class Rounds:
    """Durations of each kind, round by round: neighbours' load hits all of them alike."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._spent: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        self._spent.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def gb_per_s(self, name: str) -> float:
        return self._nbytes / statistics.median(self._spent[name]) / 1e9

    def ratio(self, name: str, baseline: str) -> float:
        pairs = zip(self._spent[name], self._spent[baseline], strict=True)
        return statistics.median(base / mine for mine, base in pairs)


def bench_checkpoint(options: argparse.Namespace) -> int:
    rng = np.random.default_rng(1)
    before = weights(options.bytes, rng)
    after = step(before, rng)
    nbytes = sum(array.nbytes for array in before.values())
    rounds = Rounds(nbytes)
    stored: dict[str, int] = {}
    correct = True
    with tempfile.TemporaryDirectory(prefix="paramwire-", dir=options.directory) as name, steps_progress() as bar:
        folder = Path(name)
        source = folder / "source"
        with source.open("wb") as file:
            for array in before.values():
                array.tofile(file)
            file.flush()
            os.fsync(file.fileno())
        for _ in bar.track(range(options.rounds), description="rounds"):
            correct &= one_round(folder, source, rounds, stored, before, after, options.workers)
    records = [
        {
            "bench": f"checkpoint_{what}",
            "codec": codec,
            "bytes": nbytes,
            "stored_bytes": stored[codec],
            "stored_part": stored[codec] / nbytes,
            "workers": options.workers,
            "rounds": options.rounds,
            "gb_per_s": rounds.gb_per_s(f"{what} {codec}"),
            "baseline": baseline,
            "baseline_gb_per_s": rounds.gb_per_s(baseline),
            "ratio": rounds.ratio(f"{what} {codec}", baseline),
            "correct": correct,
            "machine": machine(),
        }
        for what, baseline in (("save", "copy and fsync"), ("restore", "plain read"))
        for codec in ("raw", "planes", "delta")
    ]
    show(options, records)
    if not correct:
        raise CliError("a checkpoint came back with other bytes")
    return 0


def one_round(
    folder: Path, source: Path, rounds: Rounds, stored: dict[str, int], before: Arrays, after: Arrays, workers: int
) -> bool:
    """returns: whether all that was restored is right"""
    labels = dict.fromkeys(before, "bf16")
    for codec in ("raw", "planes"):
        shutil.rmtree(folder / codec, ignore_errors=True)
    (folder / "copy").unlink(missing_ok=True)

    def save(codec: str, arrays: Arrays) -> checkpoint.Saved:
        return checkpoint.save(folder / codec, arrays, dtypes=labels, codec=codec, workers=workers)

    def restored(codec: str, version: tuple[int, int], expected: Arrays, name: str) -> bool:
        arrays = rounds.time(
            f"restore {name}",
            lambda: checkpoint.restore_arrays(folder / codec, version=version, workers=workers),
        )
        return all(np.array_equal(arrays[key].view(np.uint16), array) for key, array in expected.items())

    rounds.time("copy and fsync", lambda: plain_copy(source, folder / "copy"))
    for codec in ("raw", "planes"):
        stored[codec] = rounds.time(f"save {codec}", functools.partial(save, codec, before)).written_bytes
    stored["delta"] = rounds.time("save delta", lambda: save("planes", after)).written_bytes
    rounds.time("plain read", lambda: plain_read(source, before))
    right = [restored(codec, (1, 1), before, codec) for codec in ("raw", "planes")]
    return all([*right, restored("planes", (1, 2), after, "delta")])


def show(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    if options.json:
        for record in records:
            json_line(record)
        return
    rows = [
        (
            record["bench"].removeprefix("checkpoint_"),
            record["codec"],
            f"{record['stored_part']:.3f}",
            f"{record['gb_per_s']:.2f}",
            record["baseline"],
            f"{record['baseline_gb_per_s']:.2f}",
            f"{record['ratio']:.2f}",
        )
        for record in records
    ]
    columns = ("what", "form", "stored / raw", "GB/s", "beside", "its GB/s", "ratio")
    out = console()
    out.print(table("", columns, rows, left=("what", "form", "beside")))
    first = records[0]
    out.print(f"{in_bytes(first['bytes'])} of bf16, {first['workers']} workers, medians of {first['rounds']} rounds")
