"""Reads what gpu_cases wrote: tests/gpu/cases_main.cpp says how."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer of a case. Values of bf16 and f16 are float64; raw ones are what lies in the file."""

    type: str
    role: str
    before: np.ndarray
    after: np.ndarray | None
    bits: bool
    absolute: float
    relative: float
    bounds: np.ndarray | None

    @functools.cached_property
    def values(self) -> np.ndarray:
        return floats_of(self.before, self.type)


def floats_of(raw: np.ndarray, kind: str) -> np.ndarray:
    """float64 of what a file holds; integers as they are."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return raw.astype(np.float64) if kind.startswith("f") else raw


@dataclasses.dataclass(frozen=True)
class Case:
    operation: str
    name: str
    numbers: dict[str, float]
    buffers: dict[str, Buffer]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.buffers[name].values

    def __contains__(self, name: str) -> bool:
        return name in self.buffers

    def outputs(self) -> dict[str, Buffer]:
        return {name: each for name, each in self.buffers.items() if each.role == "output"}


def read_buffer(folder: Path, told: dict[str, Any]) -> Buffer:
    def load(name: str | None) -> np.ndarray | None:
        return None if name is None else np.load(folder / name, allow_pickle=False)

    before = load(told["file"])
    assert before is not None
    return Buffer(
        type=told["type"],
        role=told["role"],
        before=before,
        after=load(told.get("after")),
        bits=told.get("bits", False),
        absolute=told.get("absolute", 0.0),
        relative=told.get("relative", 0.0),
        bounds=load(told.get("bounds")),
    )


def read_cases(folder: Path) -> list[Case]:
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    return [
        Case(
            told["operation"],
            told["name"],
            told["numbers"],
            {name: read_buffer(folder, buffer) for name, buffer in told["buffers"].items()},
        )
        for told in manifest["cases"]
    ]
