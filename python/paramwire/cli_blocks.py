"""`put`, `get`, `ls` and `stat`: single tensors of a running server, and what is on it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import paramwire
from paramwire.cli_common import (
    CliError,
    bytes_progress,
    console,
    counted,
    facts,
    in_bytes,
    json_line,
    key_file,
    table,
)
from paramwire.cli_model import as_served, open_model, publish_model

# Values shown of a tensor that is not written to a file.
SHOWN_VALUES = 8


def connect(options: argparse.Namespace) -> paramwire.Client:
    return paramwire.connect(
        options.address, transport=options.transport, timeout=options.timeout, key=key_file(options)
    )


def put(options: argparse.Namespace) -> int:
    path = Path(options.file)
    with connect(options) as client, client.publish(codec=options.codec, timeout=options.timeout) as publish:
        if path.suffix == ".npy":
            names = [options.name or path.stem]
            nbytes = put_array(publish, names[0], path, options)
        elif options.name is not None:
            raise CliError(f"{path}: --name is for .npy files; the tensors of a model file keep their names")
        else:
            with open_model([path]) as model:
                names = [tensor.name for tensor in model.tensors]
                with bytes_progress() as progress:
                    nbytes = publish_model(publish, model, options.dtype, options.block_bytes, progress)
        stored = publish.stored_bytes
        version = publish.finish()
    if options.json:
        facts_of = {"version": str(version), "tensors": names, "bytes": nbytes, "stored_bytes": stored}
        json_line(facts_of | {"address": options.address})
    else:
        what = f"{names[0]!r}" if len(names) == 1 else counted(len(names), "tensor")
        encoded = f", stored as {in_bytes(stored)}" if stored != nbytes else ""
        console().print(f"put {what}, {in_bytes(nbytes)}{encoded}: version {version}")
    return 0


def put_array(publish: paramwire.Publish, name: str, path: Path, options: argparse.Namespace) -> int:
    """One .npy file. errors: CliError for what numpy does not take."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise CliError(f"{path}: {error}") from error
    served, label = as_served(np.asarray(array), None, options.dtype)
    if served.ndim > 0 and served.nbytes > options.block_bytes:
        publish.put_rows(name, served, block_bytes=options.block_bytes, dtype=label)
    else:
        publish.put(name, served, dtype=label)
    return served.nbytes


def get(options: argparse.Namespace) -> int:
    with connect(options) as client, client.snapshot() as snapshot:
        info = snapshot.info(options.name)
        begin = time.perf_counter()
        array = snapshot.fetch(options.name, rows=options.rows)
        spent = time.perf_counter() - begin
        record: dict[str, Any] = {
            "name": info.name,
            "dtype": info.dtype,
            "shape": list(array.shape),
            "bytes": array.nbytes,
            "rows": list(options.rows) if options.rows else None,
            "version": str(snapshot.version),
            "transport": client.transport,
            "seconds": spent,
            "gb_per_s": array.nbytes / spent / 1e9,
            "crc64": f"{paramwire.crc64(array.tobytes()):016x}",
            "file": options.output,
        }
    if options.output:
        record["file_dtype"] = save(Path(options.output), array)
    if options.json:
        json_line(record)
        return 0
    pairs = [
        ("dtype", info.dtype),
        ("shape", shape_text(array.shape)),
        ("bytes", f"{array.nbytes:,}"),
        ("version", record["version"]),
        ("transport", client.transport),
        ("fetched in", f"{spent * 1e3:.2f} ms, {record['gb_per_s']:.2f} GB/s, verified"),
        ("CRC-64/XZ", record["crc64"]),
    ]
    if options.output:
        kept = "" if record["file_dtype"] == info.dtype else f" as {record['file_dtype']}: .npy has no {info.dtype}"
        pairs.append(("written to", f"{options.output}{kept}"))
    else:
        first = array.reshape(-1)[:SHOWN_VALUES]
        more = " ..." if array.size > SHOWN_VALUES else ""
        pairs.append(("first values", " ".join(str(value) for value in first) + more))
    console().print(facts(info.name, pairs))
    return 0


def save(path: Path, array: npt.NDArray[Any]) -> str:
    """Writes `array` as .npy, dtypes that the format lacks (bf16, fp8) as unsigned words. returns: the dtype written"""
    if array.dtype.kind not in "biufc":
        array = array.view({1: np.uint8, 2: np.uint16}[array.dtype.itemsize])
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    return {"float32": "f32", "float16": "f16", "float64": "f64"}.get(array.dtype.name, array.dtype.name)


def shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape) if shape else "scalar"


def list_tensors(options: argparse.Namespace) -> int:
    with connect(options) as client, client.snapshot() as snapshot:
        tensors = snapshot.tensors()
        version = str(snapshot.version)
    if options.json:
        for tensor in tensors:
            json_line(
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": tensor.nbytes,
                    "blocks": tensor.blocks,
                    "version": str(tensor.version),
                    "alias_of": tensor.alias_of,
                    "codec": tensor.codec,
                    "stored_bytes": tensor.stored_nbytes,
                    "snapshot": version,
                }
            )
        return 0
    rows = [
        (
            tensor.name + (f" = {tensor.alias_of}" if tensor.alias_of else ""),
            tensor.dtype,
            shape_text(tensor.shape),
            f"{tensor.nbytes:,}",
            tensor.codec if tensor.codec == "raw" else f"{tensor.codec} {tensor.stored_nbytes / tensor.nbytes:.3f}",
            "-" if tensor.alias_of else str(tensor.blocks),
            str(tensor.version),
        )
        for tensor in tensors
    ]
    out = console()
    heads = ("name", "dtype", "shape", "bytes", "codec", "blocks", "version")
    out.print(table("", heads, rows, left=("name", "dtype")))
    stored = [tensor for tensor in tensors if not tensor.alias_of]
    blocks, nbytes = sum(tensor.blocks for tensor in stored), sum(tensor.nbytes for tensor in stored)
    held = sum(tensor.stored_nbytes for tensor in stored)
    encoded = f", stored as {in_bytes(held)}" if held != nbytes else ""
    out.print(
        f"version {version}: {counted(len(tensors), 'tensor')}, {counted(blocks, 'block')}, {in_bytes(nbytes)}{encoded}"
    )
    return 0


def stat(options: argparse.Namespace) -> int:
    with connect(options) as client:
        server = client.server_stats()
        mine = client.stats()
        newest = client.newest
        record: dict[str, Any] = {
            "address": options.address,
            "transport": client.transport,
            "rejected": [{"transport": name, "reason": reason} for name, reason in client.rejected],
            "incarnation": client.incarnation,
            "newest": str(newest) if newest is not None else None,
            "server": server,
            "client": {key: plain(value) for key, value in mine.items()},
        }
    if options.json:
        json_line(record)
        return 0
    out = console()
    pairs = [
        ("address", options.address),
        ("newest version", record["newest"] or "none published"),
        ("incarnation", record["incarnation"]),
        ("transport", client.transport),
    ]
    pairs += [("not " + item["transport"], item["reason"]) for item in record["rejected"]]
    out.print(facts("this client", pairs))
    out.print()
    out.print(facts("server", [(name.replace("_", " "), counter(name, value)) for name, value in server.items()]))
    return 0


def counter(name: str, value: int | str) -> str:
    """A counter as people read it: bytes with their size beside them."""
    if isinstance(value, str):
        return value
    return f"{value:,} ({in_bytes(value)})" if "bytes" in name and value >= 1024 else f"{value:,}"


def plain(value: Any) -> Any:
    """What JSON can hold: versions and the like as their text."""
    if isinstance(value, paramwire.Version):
        return str(value)
    return value if isinstance(value, int | float | str | list | dict | type(None)) else str(value)
