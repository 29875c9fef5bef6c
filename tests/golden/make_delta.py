"""Make delta.txt: deltas and one-bit deltas as the library writes them, with their bases and results.

Results are what the independent decoder (tests/python/delta_decoder.py) makes of them, which must be what went in (or,
one-bit, what the library makes, too). Run it where paramwire is installed, after a change of the format:

    python tests/golden/make_delta.py > delta.txt && mv delta.txt tests/golden/
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from paramwire import delta

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from delta_decoder import apply_delta, apply_onebit

VERSION = (3, 17)


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def weights(count: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    before = random.normal(0, 0.04, count)
    return before, before + rate * random.normal(0, 1, count)


def one_delta(
    name: str, dtype: str, base: np.ndarray, result: np.ndarray, only: str | None = None, classes: int = 16
) -> None:
    made = delta.encode(base, result, version=VERSION, dtype=dtype, form=only, classes=classes)
    assert apply_delta(made, base.tobytes()) == result.tobytes(), name
    print(
        f"delta name={name} dtype={dtype} version=3.17 only={only or 'any'} classes={classes} "
        f"form={delta.info(made).form} base={base.tobytes().hex()} result={result.tobytes().hex()} hex={made.hex()}"
    )


def one_bit(name: str, dtype: str, base: np.ndarray, tuned: np.ndarray, scale: str) -> None:
    made = delta.encode_onebit(base, tuned, version=VERSION, dtype=dtype, scale=scale)
    result = apply_onebit(made, base.tobytes())
    assert delta.apply_onebit(made, base, version=VERSION, dtype=dtype).tobytes() == result, name
    print(
        f"onebit name={name} dtype={dtype} version=3.17 shape={','.join(map(str, base.shape))} scale={scale} "
        f"base={base.tobytes().hex()} tuned={tuned.tobytes().hex()} result={result.hex()} hex={made.hex()}"
    )


def main() -> None:
    print(
        '# Golden vectors of deltas (cpp/paramwire/wire/FORMAT.md, "Deltas", "One-bit deltas"), by make_delta.py, read'
    )
    print("# by tests/cpp/delta_golden_test.cpp and tests/python/test_delta_golden.py. One a line:")
    print("# `kind key=value ... hex=BYTES`.")
    before, after = weights(300, 2e-4)
    odd = bf16(before)
    odd[:8] = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x0001, 0x8001]  # zeros, infinities, NaNs, subnormals
    odd_after = bf16(after)
    odd_after[:8] = [0x8000, 0x0000, 0xFF80, 0x7F81, 0x7FC0, 0x0002, 0x8001, 0x7FFF]
    one_delta("bf16_same", "bf16", odd, odd)
    one_delta("bf16_full", "bf16", odd, odd_after, "full")
    one_delta("bf16_xor", "bf16", odd, odd_after, "xor")
    one_delta("bf16_steps", "bf16", odd, odd_after, "steps")
    one_delta("bf16_sparse_one_class", "bf16", odd, odd_after, "sparse", 1)
    one_delta("bf16_sparse_by_class", "bf16", odd, odd_after, "sparse")
    before, after = weights(400, 1e-5)
    one_delta("bf16_few_changes", "bf16", bf16(before), bf16(after))
    before, after = weights(150, 1e-6)
    one_delta("f32_dense_classes", "f32", before.astype(np.float32), after.astype(np.float32), "sparse")
    words = np.arange(2000, dtype=np.int32) * 7
    more = words.copy()
    more[[3, 40, 41, 1999]] += [1, -1, 2**30, -(2**31)]
    one_delta("i32_far_between", "i32", words[:120], more[:120])
    one_delta("f8_e4m3", "f8_e4m3", np.arange(64, dtype=np.uint8), np.arange(64, dtype=np.uint8)[::-1].copy())
    one_delta("i4_odd_bytes", "i4", np.arange(33, dtype=np.uint8), np.arange(33, dtype=np.uint8) ^ 5)
    one_delta("f64_one", "f64", np.array([1.0]), np.array([1.0 + 2**-52]))
    one_delta("empty", "f32", np.zeros(0, np.float32), np.zeros(0, np.float32))
    random = np.random.default_rng(2)
    base = random.normal(0, 0.04, (3, 11)).astype(np.float32)
    tuned = (base + random.normal(0, 0.01, (3, 11))).astype(np.float32)
    tuned[1] = base[1]  # a zero scale
    base[1, 0] = tuned[1, 0] = -0.0
    for scale in ("matrix", "row"):
        one_bit(f"f32_{scale}", "f32", base, tuned, scale)
        one_bit(f"f16_{scale}", "f16", base.astype(np.float16), tuned.astype(np.float16), scale)
        one_bit(f"bf16_{scale}", "bf16", bf16(base), bf16(tuned), scale)
    one_bit("scalar", "f32", np.array(1.5, np.float32), np.array(-2.25, np.float32), "row")
    one_bit("empty", "bf16", np.zeros((0, 4), np.uint16), np.zeros((0, 4), np.uint16), "row")


if __name__ == "__main__":
    main()
