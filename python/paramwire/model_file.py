"""What every kind of model file shares: element types by label, arrays that carry them, and the error for bad files."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DTYPE_BITS", "ModelFileError", "ModelTensor", "label_of", "storage_dtype", "to_bf16", "view_as"]


class ModelFileError(ValueError):
    """A model file that isn't what it should be. The text names file, byte offset, tensor, expected and actual."""


# Labels are the core's dtype names (base/types.hpp). Bits of one element.
DTYPE_BITS: dict[str, int] = {
    "u8": 8, "i8": 8, "u16": 16, "i16": 16, "u32": 32, "i32": 32, "u64": 64, "i64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "f8_e4m3": 8, "f8_e5m2": 8, "f8_e8m0": 8,
    "bool": 8, "c64": 64, "c128": 128,
}  # fmt: skip

_NUMPY: dict[str, str] = {
    "u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4", "u64": "<u8", "i64": "<i8",
    "f16": "<f2", "f32": "<f4", "f64": "<f8", "bool": "?", "c64": "<c8", "c128": "<c16",
}  # fmt: skip
# Types that numpy lacks: the name in ml_dtypes, and the unsigned type that holds the bytes where ml_dtypes is absent.
_FOREIGN: dict[str, tuple[str, str]] = {
    "bf16": ("bfloat16", "<u2"),
    "f8_e4m3": ("float8_e4m3fn", "<u1"),
    "f8_e5m2": ("float8_e5m2", "<u1"),
    "f8_e8m0": ("float8_e8m0fnu", "<u1"),
}


@dataclasses.dataclass(frozen=True)
class ModelTensor:
    """One tensor in memory.

    name:  as in the file
    dtype: label, a key of DTYPE_BITS
    shape: row-major, outermost axis first; () is a scalar
    data:  array of `shape`; bf16 and fp8 in ml_dtypes' type where that is installed, else unsigned of their size
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


def storage_dtype(label: str) -> np.dtype[Any]:
    """The little-endian numpy type that holds elements of `label`: unsigned integers for bf16 and fp8.

    errors: ModelFileError for an unknown label
    """
    if label in _NUMPY:
        return np.dtype(_NUMPY[label])
    if label in _FOREIGN:
        return np.dtype(_FOREIGN[label][1])
    raise ModelFileError(f"unknown dtype {label!r}; known: {', '.join(DTYPE_BITS)}")


def view_as(storage: npt.NDArray[Any], label: str) -> npt.NDArray[Any]:
    """`storage` (of storage_dtype) seen as `label`: ml_dtypes' type if it is installed and has it, else unchanged."""
    if label not in _FOREIGN:
        return storage
    try:
        import ml_dtypes
    except ImportError:
        return storage
    kind = getattr(ml_dtypes, _FOREIGN[label][0], None)
    return storage if kind is None else storage.view(kind)


def label_of(dtype: np.dtype[Any]) -> str:
    """The label of a numpy or ml_dtypes type, of either byte order. errors: ModelFileError for one without a label."""
    for label, (name, _) in _FOREIGN.items():
        if dtype.name == name:
            return label
    for label, code in _NUMPY.items():
        if dtype.newbyteorder("<") == np.dtype(code):
            return label
    raise ModelFileError(f"numpy dtype {dtype!r} has no label; known: {', '.join(DTYPE_BITS)}")


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 rounded to bf16 (to nearest, ties to even), as uint16 of the same shape. NaN stays NaN with its sign."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    upper = bits >> np.uint32(16)
    # Never wraps: the largest bit pattern that isn't a NaN is 0xff800000.
    rounded = np.where(
        nan, upper | np.uint32(0x40), (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    )
    return rounded.astype("<u2").reshape(values.shape)
