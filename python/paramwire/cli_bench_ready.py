"""`paramwire bench ready`: how long until weights are there, decoded, over a link of a given speed.

The link is a veth pair between two network namespaces with a token bucket (tc-tbf(8)) on the server's side, so that
only what travels is held up. Each codec has a server of its own behind the same bucket; rounds alternate, one fetch of
the whole model at a time. The baseline is the same weights stored raw after the same cast.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import paramwire
import paramwire.codec
from paramwire.cli_bench_common import Child
from paramwire.cli_bench_setting import context
from paramwire.cli_bench_weights import MODELS, float32_weights
from paramwire.cli_common import CliError, console, json_line, steps_progress, table
from paramwire.net_lab import Lab, LabError, obstacle
from paramwire.safetensors_file import write_safetensors

BASELINE = "bf16"
# Weights are served in tensors of this many values, as those of a model's layers are.
TENSOR_VALUES = 1 << 20
MTU = 1500
TIMEOUT_SECONDS = 120.0


@dataclass
class Side:
    """One codec's server, and what its fetches took."""

    codec: str
    client: paramwire.Client
    stored: int
    seconds: list[float] = field(default_factory=list)
    wire: int = 0
    correct: bool = True


def bench_ready(options: argparse.Namespace) -> int:
    why = obstacle("tc")
    if why is not None:
        raise CliError(f"bench ready: {why}")
    model = next(model for model in MODELS if model.name == options.model)
    weights = float32_weights(model)
    expected = cut(paramwire.codec.cast(weights, "bf16"))
    records = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramwire-")))
        file, key = folder / "weights.safetensors", folder / "key"
        write_safetensors(file, cut(weights))
        paramwire.new_key(str(key))
        try:
            lab = stack.enter_context(Lab(MTU))
            lab.near.enter()
        except LabError as error:
            raise CliError(f"bench ready: {error}") from None
        sides = [
            stack.enter_context(serving(lab, file, key, codec, options.transport))
            for codec in dict.fromkeys((BASELINE, *options.codecs))
        ]
        with steps_progress(not options.json) as progress:
            task = progress.add_task("fetching", total=len(options.rates) * options.rounds * len(sides))
            for rate in options.rates:
                lab.far.limit(rate)
                for side in sides:
                    side.seconds.clear()
                for _ in range(options.rounds):
                    for side in sides:
                        fetch(side, expected)
                        progress.advance(task)
                common = {"bench": "ready", "file": f"{model.package}/{model.member}", "link_bits_per_s": rate}
                for record in records_of(sides):
                    records.append(common | context(options) | record)
                    if options.json:
                        json_line(records[-1])
    if not options.json:
        show(records)
    if wrong := [record for record in records if not record["correct"]]:
        raise CliError(f"{wrong[0]['codec']} did not bring the weights' bytes")
    return 0


def cut(values: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    begins = range(0, values.size, TENSOR_VALUES)
    return {f"w{begin // TENSOR_VALUES:04}": values[begin : begin + TENSOR_VALUES] for begin in begins}


@contextlib.contextmanager
def serving(lab: Lab, file: Path, key: Path, codec: str, transport: str) -> Iterator[Side]:
    words = ["serve", str(file), "--codec", codec, "--json", "--stop-on-eof", "--key", str(key)]
    words += ["--listen", f"tcp://{lab.far.ipv4}:0"]
    with Child("paramwire", words, before=lab.far.words) as server:
        ready = server.record()
        with paramwire.connect(
            ready["address"], transport=transport, timeout=TIMEOUT_SECONDS, key=str(key)
        ) as client:
            yield Side(codec, client, ready["stored_bytes"])


def fetch(side: Side, expected: dict[str, npt.NDArray[Any]]) -> None:
    with side.client.snapshot() as snapshot:
        before = side.client.stats()["wire_bytes"]
        begin = time.perf_counter()
        found = snapshot.fetch_many(list(expected))
        side.seconds.append(time.perf_counter() - begin)
        side.wire = side.client.stats()["wire_bytes"] - before
    side.correct = side.correct and all(
        np.array_equal(found[name].view(np.uint16), array.view(np.uint16)) for name, array in expected.items()
    )


def records_of(sides: list[Side]) -> Iterator[dict[str, Any]]:
    base = next(side for side in sides if side.codec == BASELINE)
    raw = base.wire
    for side in sides:
        ratios = [ours / theirs for ours, theirs in zip(side.seconds, base.seconds, strict=True)]
        yield {
            "codec": side.codec,
            "transport": side.client.transport,
            "raw_bytes": raw,
            "stored_bytes": side.stored,
            "wire_bytes": side.wire,
            "seconds": statistics.median(side.seconds),
            "baseline": f"{BASELINE}, raw",
            "baseline_seconds": statistics.median(base.seconds),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "rounds": len(ratios),
            "correct": side.correct,
        }


def show(records: list[dict[str, Any]]) -> None:
    rows = [
        (
            f"{record['link_bits_per_s'] / 1e9:g} Gb/s",
            record["codec"],
            f"{record['wire_bytes']:,}",
            f"{record['seconds']:.3f} s",
            f"{record['ratio']:.2f} ({record['ratio_min']:.2f} to {record['ratio_max']:.2f})",
            "yes" if record["correct"] else "NO",
        )
        for record in records
    ]
    heads = ("link", "codec", "bytes on it", "time to ready", f"of {BASELINE} raw", "right bytes")
    console().print(table("", heads, rows, left=("link", "codec")))
