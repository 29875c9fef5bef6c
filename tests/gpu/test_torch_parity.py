"""What kernels computed on the device (or on the simulated one) against numpy, and against torch where it is installed.

How far a result may be from another right one is derived where the case is made (tests/gpu/cases_*.cpp).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy_references
import pytest
from gpu_case_files import Buffer, Case, floats_of

# torch computes these; what remains is integers and routing.
TORCH_OPERATIONS = (
    "embedding", "rms_norm", "layer_norm", "softmax", "mean", "normalise", "add", "swiglu", "gelu", "gelu_tanh",
    "narrow", "widen", "rotary", "attention", "gemv",
)  # fmt: skip


def difference(buffer: Buffer, wanted: np.ndarray, *, values_only: bool = False) -> str:
    """Why what came out is not `wanted`; "" when it is. values_only: bits of NaN are not promised."""
    assert buffer.after is not None
    if not buffer.type.startswith(("f", "b")) or (buffer.bits and not values_only):
        right = np.ascontiguousarray(wanted, buffer.after.dtype)
        same = buffer.after.reshape(-1).view(np.uint8) == right.reshape(-1).view(np.uint8)
        return "" if same.all() else f"{np.count_nonzero(~same)} bytes differ, the first is {np.flatnonzero(~same)[0]}"
    actual = floats_of(buffer.after, buffer.type)
    wanted = np.broadcast_to(wanted, actual.shape)
    with np.errstate(invalid="ignore"):  # infinities, and what is not a number
        most = buffer.absolute + buffer.relative * np.maximum(np.abs(actual), np.abs(wanted))
        if buffer.bounds is not None:
            most = buffer.bounds
        off = np.abs(actual - wanted)
        finite = np.isfinite(actual) & np.isfinite(wanted)
        right = (finite & (off <= most)) | (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    if right.all():
        return ""
    at = tuple(int(each) for each in np.argwhere(~right)[0])
    wrong = f"{np.count_nonzero(~right)} of {right.size} are wrong"
    return f"{wrong}, the first at {at}: {actual[at]} instead of {wanted[at]}"


def of(cases: list[Case], operation: str) -> list[Case]:
    found = [case for case in cases if case.operation == operation]
    assert found, f"no case of {operation}"
    return found


@pytest.mark.parametrize("operation", sorted(numpy_references.REFERENCES))
def test_the_device_computes_what_numpy_computes(cases: list[Case], operation: str) -> None:
    wrong = []
    for case in of(cases, operation):
        with np.errstate(all="ignore"):
            wanted = numpy_references.REFERENCES[operation](case)
        assert set(wanted) == set(case.outputs()), case.name
        told = {name: difference(buffer, wanted[name]) for name, buffer in case.outputs().items()}
        wrong += [f"{case.name}: {name}: {text}" for name, text in told.items() if text]
    assert not wrong


@pytest.mark.parametrize("operation", TORCH_OPERATIONS)
def test_the_device_computes_what_torch_computes(cases: list[Case], operation: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import torch_references

    assert sorted(torch_references.REFERENCES) == sorted(TORCH_OPERATIONS)
    wrong = []
    for case in of(cases, operation):
        results = torch_references.REFERENCES[operation](case)
        if results is None:
            continue
        for name, result in results.items():
            text = difference(case.buffers[name], torch_references.values_of(result), values_only=True)
            if text:
                wrong.append(f"{case.name}: {name}: {text}")
    assert not wrong


def test_every_operation_has_a_reference_in_numpy(cases: list[Case]) -> None:
    assert {case.operation for case in cases} == set(numpy_references.REFERENCES)


def damaged(buffer: Buffer) -> Buffer:
    """With its last element further off than it may be."""
    assert buffer.after is not None
    fields: dict[str, Any] = {name: getattr(buffer, name) for name in buffer.__dataclass_fields__}
    fields["after"] = buffer.after.copy()
    last = fields["after"].reshape(-1)[-1:].view(f"u{buffer.after.dtype.itemsize}")
    last ^= last.dtype.type(1 << 8 * buffer.after.dtype.itemsize - 2)  # of a float: the top of its exponent
    return Buffer(**fields)


@pytest.mark.parametrize("operation", sorted(numpy_references.REFERENCES))
def test_a_result_that_is_off_is_seen(cases: list[Case], operation: str) -> None:
    case = of(cases, operation)[-1]
    with np.errstate(all="ignore"):
        wanted = numpy_references.REFERENCES[operation](case)
    for name, buffer in case.outputs().items():
        assert difference(buffer, wanted[name]) == ""
        assert difference(damaged(buffer), wanted[name]) != "", name
