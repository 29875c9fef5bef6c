"""`paramwire bench codec`: every codec on real weights, beside memcpy and ZipNN in the same rounds."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramwire import _core
from paramwire.cli_bench_setting import context
from paramwire.cli_bench_weights import MODELS, float32_weights
from paramwire.cli_common import CliError, console, json_line, notes, number, steps_progress, table

Record = dict[str, Any]
Array = npt.NDArray[Any]

# ZipNN is given blocks of this size, as paramwire's servers cut tensors, and takes what it likes inside them.
ZIPNN_BLOCK = 1 << 20
# Codec, and the dtype of the array that it is given. Casts are part of what is measured where the codec names one.
CASES = (
    ("planes", "bf16"),
    ("planes", "f16"),
    ("planes", "f32"),
    ("bf16+planes", "f32"),
    ("fp16+planes", "f32"),
    ("lz4", "bf16"),
    ("lz4", "f16"),
    ("lz4", "f32"),
)
ZIPNN_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def bench_codec(options: argparse.Namespace) -> int:
    zipnn = zipnn_module()
    if zipnn is None:
        notes().print("without ZipNN, which is not installed: pip install zipnn adds it as a baseline")
    records = []
    models = [model for model in MODELS if not options.models or model.name in options.models]
    with steps_progress(not options.json) as progress:
        task = progress.add_task("codecs", total=len(models) * (len(CASES) + 2))
        for model in models:
            weights = float32_weights(model)
            for record in measured(weights, options.rounds, zipnn):
                records.append(common(options) | {"file": f"{model.package}/{model.member}"} | record)
                progress.advance(task)
                if options.json:
                    json_line(records[-1])
    if not options.json:
        show(records)
    if wrong := [record for record in records if not record["correct"]]:
        raise CliError(f"{wrong[0]['codec']} did not give back the bytes of {wrong[0]['file']}")
    return 0


def common(options: argparse.Namespace) -> Record:
    return {"bench": "codec", "language": "c++", "kernels": _core.cast_implementation()} | context(options)


def measured(weights: npt.NDArray[np.float32], rounds: int, zipnn: Any) -> Iterator[Record]:
    arrays: dict[str, Array] = {"f32": weights}
    for label in ("bf16", "f16"):
        arrays[label] = _core.cast(weights, label)[0]
    for codec, label in CASES:
        yield codec_record(codec, label, arrays[label], weights.nbytes, rounds, zipnn)
    for label in ("bf16", "f16"):
        yield cast_record(label, weights, rounds)


# ---------------------------------------------------------------- codecs


def codec_record(codec: str, label: str, array: Array, float32_bytes: int, rounds: int, zipnn: Any) -> Record:
    """Rounds of one thread, two threads and the baseline, one after the other: a neighbour's load hits all."""
    seconds: dict[str, list[float]] = {}
    correct = True
    baseline = Baseline(zipnn, label, array) if zipnn is not None and codec == "planes" else None
    for _ in range(rounds):
        for threads in (1, 2):
            times = _core.time_codec(array, codec, dtype=label, threads=threads, rounds=1)
            correct = correct and times["correct"]
            for what in ("encode", "decode", "memcpy"):
                seconds.setdefault(f"{what}_{threads}", []).append(times[f"{what}_s"][0])  # type: ignore[literal-required]
        if baseline is not None:
            for what, spent in baseline.round().items():
                seconds.setdefault(what, []).append(spent)
    raw = times["raw_bytes"]

    def speed(what: str) -> dict[str, float]:
        return {what: raw / statistics.median(seconds[what]) / 1e9, f"{what}_best": raw / min(seconds[what]) / 1e9}

    def against(ours: str, theirs: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))

    encode, decode = speed("encode_1"), speed("decode_1")
    record: Record = {
        "codec": codec,
        "dtype": label,
        "bytes": array.nbytes,
        "raw_bytes": raw,
        "stored_bytes": times["stored_bytes"],
        "stored_as": times["codec"],
        "ratio": times["stored_bytes"] / raw,
        "saving_vs_fp32": 1 - times["stored_bytes"] / float32_bytes,
        "size_vs_order0_bound": times["stored_bytes"] / order0_bytes(array) if codec == "planes" else None,
        "encode_gb_per_s": encode["encode_1"],
        "encode_gb_per_s_best": encode["encode_1_best"],
        "decode_gb_per_s": decode["decode_1"],
        "decode_gb_per_s_best": decode["decode_1_best"],
        "memcpy_gb_per_s": array.nbytes / statistics.median(seconds["memcpy_1"]) / 1e9,
        "two_threads_encode": against("encode_2", "encode_1"),
        "two_threads_decode": against("decode_2", "decode_1"),
        "rounds": rounds,
        "correct": correct,
        "baseline": None,
    }
    if baseline is not None:
        zipnn_encode, zipnn_decode = speed("baseline_encode"), speed("baseline_decode")
        record |= {
            "baseline": f"zipnn {baseline.version}",
            "baseline_ratio": baseline.stored_bytes / raw,
            "size_vs_baseline": times["stored_bytes"] / baseline.stored_bytes,
            "baseline_encode_gb_per_s": zipnn_encode["baseline_encode"],
            "baseline_decode_gb_per_s": zipnn_decode["baseline_decode"],
            "encode_vs_baseline": against("encode_1", "baseline_encode"),
            "decode_vs_baseline": against("decode_1", "baseline_decode"),
            "baseline_correct": baseline.correct,
        }
    return record


def order0_bytes(array: Array) -> float:
    """Bytes that no code of single bytes can be below: the entropy of each byte plane, over the whole array.

    The sign goes to the lowest bit, as in the codec. Codes made anew for every 64 KiB may still be below it.
    """
    words = array.reshape(-1).view(f"u{array.itemsize}")
    words = (words << 1) | (words >> (8 * array.itemsize - 1))
    bits = 0.0
    for plane in words.view(np.uint8).reshape(-1, array.itemsize).T:
        counts = np.bincount(plane, minlength=256)
        counts = counts[counts > 0]
        bits -= float(counts @ np.log2(counts / plane.size))
    return bits / 8


def zipnn_module() -> Any:
    """None where it is not installed."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports
            import zipnn
    except ImportError:
        return None
    return zipnn


class Baseline:
    """ZipNN, one thread, block after block."""

    def __init__(self, module: Any, label: str, array: Array) -> None:
        from importlib.metadata import version

        kind = ZIPNN_TYPES[label]
        self._codec = module.ZipNN(bytearray_dtype=kind, input_format="byte", threads=1)
        raw = array.reshape(-1).view(np.uint8)
        self._blocks = [bytearray(raw[at : at + ZIPNN_BLOCK]) for at in range(0, raw.size, ZIPNN_BLOCK)]
        self.version = version("zipnn")
        self.stored_bytes = 0
        self.correct = True

    def round(self) -> dict[str, float]:
        # It may change what it is given.
        given = [bytearray(block) for block in self._blocks]
        spent: dict[str, float] = {}
        stored = self._timed(spent, "baseline_encode", lambda: [self._codec.compress(block) for block in given])
        self.stored_bytes = sum(map(len, stored))
        kept = [bytearray(block) for block in stored]
        back = self._timed(spent, "baseline_decode", lambda: [self._codec.decompress(block) for block in kept])
        self.correct = self.correct and all(a == b for a, b in zip(back, self._blocks, strict=True))
        return spent

    @staticmethod
    def _timed(spent: dict[str, float], name: str, work: Callable[[], list[Any]]) -> list[Any]:
        begin = time.perf_counter()
        out = work()
        spent[name] = time.perf_counter() - begin
        return out


# ---------------------------------------------------------------- casts


def cast_record(label: str, weights: npt.NDArray[np.float32], rounds: int) -> Record:
    """The cast alone, and cast, plane split and CRC in one pass; GB/s count float32 bytes."""
    times = _core.time_casts(weights, label, rounds=rounds * 2)
    check = _core.cast(weights, label)[0]
    wide = _core.cast(check, "f32", dtype=label)[0]
    again = _core.cast(wide, label)[0]
    parts = ("cast_s", "split_s", "crc_s")

    def speed(name: str) -> float:
        return weights.nbytes / statistics.median(times[name]) / 1e9

    def against(ours: str, theirs: str) -> float:
        return statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))

    slowest = max(parts, key=lambda name: statistics.median(times[name]))
    return {
        "codec": "fp16" if label == "f16" else label,
        "dtype": "f32",
        "bytes": weights.nbytes,
        "raw_bytes": weights.nbytes // 2,
        "stored_bytes": weights.nbytes // 2,
        "ratio": 1.0,
        "saving_vs_fp32": 0.5,
        "encode_gb_per_s": speed("cast_s"),
        "decode_gb_per_s": speed("widen_s"),
        "memcpy_gb_per_s": speed("memcpy_s"),
        "cast_vs_memcpy": against("cast_s", "memcpy_s"),
        "widen_vs_memcpy": against("widen_s", "memcpy_s"),
        "fused_gb_per_s": speed("fused_s"),
        "slowest_part": slowest.removesuffix("_s"),
        "fused_time_vs_slowest_part": 1 / against("fused_s", slowest),
        "rounds": rounds * 2,
        "correct": bool(np.array_equal(check.view(np.uint16), again.view(np.uint16))),
        "baseline": "memcpy",
    }


def show(records: Sequence[Record]) -> None:
    columns = (
        "file",
        "codec",
        "of",
        "ratio",
        "saves of fp32",
        "order-0 bound",
        "encode GB/s",
        "decode GB/s",
        "2 threads",
        "ZipNN: size",
        "encode",
        "decode",
    )
    rows = []
    for r in records:
        zipnn = r.get("baseline_ratio") is not None
        rows.append(
            (
                r["file"].rsplit("/", 1)[1],
                r["codec"],
                r["dtype"],
                f"{r['ratio']:.4f}",
                f"{100 * r['saving_vs_fp32']:.1f} %",
                f"{r['size_vs_order0_bound']:.4f}x" if r.get("size_vs_order0_bound") else "-",
                number(r["encode_gb_per_s"]),
                number(r["decode_gb_per_s"]),
                f"{r['two_threads_encode']:.2f}x {r['two_threads_decode']:.2f}x" if "two_threads_encode" in r else "-",
                f"{r['size_vs_baseline']:.4f}x" if zipnn else "-",
                f"{r['encode_vs_baseline']:.2f}x" if zipnn else "-",
                f"{r['decode_vs_baseline']:.2f}x" if zipnn else "-",
            )
        )
    console().print(table("Codecs on real weights; GB/s of bytes before encoding", columns, rows, left=columns[:3]))
    for r in records:
        if "cast_vs_memcpy" in r:
            console().print(
                f"{r['file'].rsplit('/', 1)[1]}, {r['codec']}: cast at {r['cast_vs_memcpy']:.2f} of memcpy's bytes a "
                f"second, back at {r['widen_vs_memcpy']:.2f}; cast, planes and CRC together take "
                f"{r['fused_time_vs_slowest_part']:.2f} times the {r['slowest_part']} alone"
            )
