"""Deltas between two versions of one tensor: lossless ones, and lossy ones of one bit an element.

    from paramwire import delta

    step = delta.encode(held, newer, version=(3, 17))         # bytes
    newer = delta.apply(step, held, version=(3, 17)).array     # bit for bit, or an error
    delta.apply(step, held, out=held)                          # in place: held is either version, never a part of each

    small = delta.encode_onebit(base, tuned, version=(3, 17))  # lossy: a sixteenth of fp16
    near = delta.apply_onebit(small, base)

Arrays are what `Publish.put` takes: NumPy, DLPack (torch, JAX), buffers; device memory is refused. Other layouts than
C-contiguous are copied first. `dtype` says what bytes are where the array can't (`dtype="bf16"` for uint16 or uint8).
A delta names its base by version and CRC-64, and is refused on another one with StaleError: then fetch the tensor in
full. Damage is CorruptError. The GIL is released. Layout: wire/FORMAT.md, "Deltas" and "One-bit deltas"; sizes on real
weights: docs/codecs.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from paramwire import _core
from paramwire._types import DeltaInfo, OnebitInfo

__all__ = [
    "Applied",
    "DeltaInfo",
    "OnebitInfo",
    "apply",
    "apply_onebit",
    "encode",
    "encode_onebit",
    "info",
    "onebit_info",
]

Form = Literal["full", "xor", "steps", "sparse"]
Scale = Literal["matrix", "row"]


class Applied(NamedTuple):
    """What `apply` gives back."""

    array: Any
    """`out`, or a new numpy array."""
    applied: bool
    """False when the base was the result already: a delta that came twice, or changes nothing."""


def encode(
    base: Any,
    next: Any,
    *,
    version: tuple[int, int],
    dtype: Any = None,
    form: Form | None = None,
    classes: int = 16,
    threads: int = 1,
) -> bytes:
    """The delta that brings `base`, which is `version`, to `next`; the same bytes for any number of threads.

    form, classes: for measurements; by itself each MiB of the tensor takes its smallest form
    errors: InvalidError when dtype or shape differ, or `version` is none
    """
    return _core.encode_delta(base, next, version=version, dtype=dtype, form=form, classes=classes, threads=threads)


def info(delta: Any) -> DeltaInfo:
    """What `delta`, a buffer, says of itself. errors: CorruptError"""
    return _core.delta_info(delta)


def apply(
    delta: Any,
    base: Any,
    *,
    out: Any = None,
    version: tuple[int, int] | None = None,
    dtype: Any = None,
    threads: int = 1,
) -> Applied:
    """What `delta` makes of `base`, in a new array or in `out`, which may be `base` itself.

    version: which version `base` is, if that is known; None leaves it to the CRC
    errors:  StaleError for another base, InvalidError for another dtype or size, CorruptError for damage. After each of
             them `base` is as it was, also when it is `out`. An `out` beside it is undefined after CorruptError
    """
    return Applied(*_core.apply_delta(delta, base, out=out, version=version, dtype=dtype, threads=threads))


def encode_onebit(base: Any, tuned: Any, *, version: tuple[int, int], dtype: Any = None, scale: Scale = "row") -> bytes:
    """LOSSY: the sign of each change from `base`, which is `version`, to `tuned`, and the mean size of the changes.

    scale:  one mean for the "matrix", or for each "row" (index of the first axis): 4 bytes a row, nearer in most cases
    errors: InvalidError for dtypes other than f32, f16 and bf16, other shapes, and values that are not finite, by index
    """
    return _core.encode_onebit(base, tuned, version=version, dtype=dtype, scale=scale)


def onebit_info(delta: Any) -> OnebitInfo:
    """What a one-bit delta, a buffer, says of itself. errors: CorruptError"""
    return _core.onebit_info(delta)


def apply_onebit(
    delta: Any,
    base: Any,
    *,
    out: Any = None,
    version: tuple[int, int] | None = None,
    dtype: Any = None,
    threads: int = 1,
) -> Any:
    """LOSSY: base + scale * sign, rounded to nearest even, in a new array or in `out`, which may be `base` itself.

    errors: as `apply`; nothing is written after any of them
    """
    return _core.apply_onebit(delta, base, out=out, version=version, dtype=dtype, threads=threads)
