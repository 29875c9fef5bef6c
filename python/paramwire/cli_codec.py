"""`paramwire codec advise`: what each codec makes of the user's own tensors, and which is best over a link."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paramwire import _core
from paramwire.cli_common import CliError, console, in_bytes, json_line, number, steps_progress, table
from paramwire.cli_model import FileTensor, open_model

# All that there are; the casts of the second group lose bits of float32 tensors.
LOSSLESS = ("raw", "planes", "lz4")
CASTS = ("fp16", "fp16+planes", "bf16", "bf16+planes")
# Links that are shown where none is named, Gb/s.
LINKS = (1.0, 10.0, 25.0, 100.0)


@dataclass
class Measured:
    """Sums over all tensors that were measured."""

    codec: str
    raw_bytes: int = 0  # as the file has them
    stored_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def ready_s(self, link_gb_s: float) -> float:
        """Until the tensors are there, decoded: extents decode while others arrive, so the slower of both counts."""
        return max(self.stored_bytes * 8e-9 / link_gb_s, self.decode_s)


def advise(options: argparse.Namespace) -> int:
    links = [options.link_speed] if options.link_speed else list(LINKS)
    codecs = LOSSLESS if options.lossless else LOSSLESS + CASTS
    with open_model([Path(options.file)]) as model:
        chosen = spread(model.tensors, options.sample)
        if not chosen:
            raise CliError(f"{options.file} has no tensors to measure")
        results = [Measured(codec) for codec in codecs]
        total = sum(tensor.size_bytes("keep") for tensor in model.tensors)
        with steps_progress(not options.json) as progress:
            task = progress.add_task("measuring", total=len(chosen))
            for tensor in chosen:
                measure(tensor, results, options.threads)
                progress.advance(task)
    sampled = results[0].raw_bytes
    records = [as_record(result, links) for result in results]
    best = first_ready(results, links)
    best_lossless = first_ready([result for result in results if result.codec in LOSSLESS], links)
    if options.json:
        facts = {"file": options.file, "file_bytes": total, "measured_bytes": sampled, "threads": options.threads}
        chosen_at = [
            {"link_gb_per_s": link, "codec": best[link], "lossless_codec": best_lossless[link]} for link in links
        ]
        json_line(facts | {"codecs": records, "best": chosen_at})
        return 0
    show(results, links, best, best_lossless, options.threads)
    scale = "" if sampled >= total else f" ({in_bytes(sampled)} of {in_bytes(total)} measured: --sample)"
    console().print(f"time to ready: the longer of transfer and decoding, which run at once{scale}")
    return 0


def first_ready(results: list[Measured], links: list[float]) -> dict[float, str]:
    return {link: min(results, key=lambda result: result.ready_s(link)).codec for link in links}


def spread(tensors: list[FileTensor], limit: int) -> list[FileTensor]:
    """All, or every n-th so that they hold about `limit` bytes: layers are alike, their kinds are not."""
    tensors = [tensor for tensor in tensors if tensor.size_bytes("keep") > 0]
    total = sum(tensor.size_bytes("keep") for tensor in tensors)
    if total <= limit:
        return tensors
    # A step without a common divisor with the usual 7, 9 or 12 tensors a layer meets each kind.
    steps = (5, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 97, 197, 397, 797)
    step = next((n for n in steps if n * limit >= total), len(tensors))
    return tensors[::step]


def measure(tensor: FileTensor, results: list[Measured], threads: int) -> None:
    data = tensor.read("keep")
    array = np.ascontiguousarray(data.data)
    for result in results:
        times = _core.time_codec(array, result.codec, dtype=data.dtype, threads=threads, rounds=2)
        if not times["correct"]:
            raise CliError(f"{result.codec} did not give back the bytes of {tensor.name}")
        result.raw_bytes += array.nbytes
        result.stored_bytes += times["stored_bytes"]
        result.encode_s += min(times["encode_s"])
        result.decode_s += min(times["decode_s"])


def as_record(result: Measured, links: list[float]) -> dict[str, Any]:
    return {
        "codec": result.codec,
        "lossless": result.codec in LOSSLESS,
        "raw_bytes": result.raw_bytes,
        "stored_bytes": result.stored_bytes,
        "ratio": result.stored_bytes / result.raw_bytes,
        "encode_gb_per_s": result.raw_bytes / result.encode_s / 1e9,
        "decode_gb_per_s": result.raw_bytes / result.decode_s / 1e9,
        "ready_s": [{"link_gb_per_s": link, "seconds": result.ready_s(link)} for link in links],
    }


def show(
    results: list[Measured], links: list[float], best: dict[float, str], lossless: dict[float, str], threads: int
) -> None:
    columns = [
        "codec",
        "bytes",
        "of the file",
        "encode GB/s",
        "decode GB/s",
        *(f"ready at {link:g} Gb/s" for link in links),
    ]
    rows = []
    for result in results:
        times = []
        for link in links:
            mark = "*" if best[link] == result.codec else "+" if lossless[link] == result.codec else " "
            times.append(f"{result.ready_s(link) * 1000:.1f} ms{mark}")
        name = result.codec if result.codec in LOSSLESS else f"{result.codec} (rounds float32)"
        speeds = (number(result.raw_bytes / seconds / 1e9) for seconds in (result.encode_s, result.decode_s))
        rows.append(
            (name, in_bytes(result.stored_bytes), f"{result.stored_bytes / result.raw_bytes:.3f}", *speeds, *times)
        )
    heading = f"Codecs on these tensors, {threads} thread{'s' if threads > 1 else ''}"
    title = f"{heading}; * is ready first, + of those that keep every bit"
    console().print(table(title, columns, rows, left=columns[:1]))
