"""Arrays as codecs store them: fewer bytes, every bit accounted for.

    from paramwire import codec

    stored = codec.encode(weights, "bf16+planes")  # loses what the cast loses, and nothing else
    stored.ratio, stored.data, stored.chunks
    again = codec.decode(stored)

"planes" is for weights, "lz4" for sparse arrays and deltas; "fp16" and "bf16" are casts of float32. `paramwire codec
advise FILE` measures which of them suits a model and a link. The bytes are in cpp/paramwire/wire/FORMAT.md, "Codecs".
"""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike, NDArray

from paramwire import _core
from paramwire._core import Encoded, decode, encode

__all__ = ["Encoded", "cast", "cast_counted", "decode", "encode"]


def cast_counted(
    array: Any, to: str, *, dtype: DTypeLike | None = None, saturate: bool = False
) -> tuple[NDArray[Any], int]:
    """As cast(), with the number of finite values that `to` can't hold."""
    return _core.cast(array, to, dtype=dtype, saturate=saturate)


def cast(array: Any, to: str, *, dtype: DTypeLike | None = None, saturate: bool = False) -> NDArray[Any]:
    """float32 to "f16" or "bf16", to nearest with ties to even, or back to "f32".

    array:     of any library; NaN stays NaN, infinities and signed zeros stay
    dtype:     label of the array's bytes where numpy has no type for it: "bf16" for a uint16 array
    saturate:  finite values beyond the largest finite one become that, not infinite
    returns:   bf16 as the type of ml_dtypes if that can be imported, else as uint16
    errors:    InvalidError: any other cast
    """
    return cast_counted(array, to, dtype=dtype, saturate=saturate)[0]
