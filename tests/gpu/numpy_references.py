"""What each kernel must compute, in numpy and float64: written from the contracts in kernels/*_args.hpp alone.

Each function takes a case of gpu_case_files.py and gives its outputs by name. Outputs whose bits are promised are given
as they lie in the file; others as float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Outputs = dict[str, np.ndarray]


def embedding(case: Any) -> Outputs:
    return {"out": case["rows"][case["row_of"]]}


def bias(case: Any) -> Outputs:
    out = case["out"].copy()
    out[:, : case["bias"].size] = case["bias"]
    return {"out": out}


def with_halves(case: Any, out: np.ndarray) -> Outputs:
    """The second output is the first one, narrowed."""
    return {"out": out, "out16": out} if "out16" in case else {"out": out}


def norm_input(case: Any) -> tuple[np.ndarray, Outputs]:
    """x, or x + add as float32 has it, which is an output too."""
    if "add" not in case:
        return case["x"], {}
    s = (case["x"].astype(np.float32) + case["add"].astype(np.float32)).astype(np.float64)
    return s, {"sum": s}


def rms_norm(case: Any) -> Outputs:
    s, outputs = norm_input(case)
    scale = 1 / np.sqrt((s * s).mean(axis=1, keepdims=True) + case.numbers["epsilon"])
    return outputs | with_halves(case, s * scale * case["weight"])


def layer_norm(case: Any) -> Outputs:
    s, outputs = norm_input(case)
    centred = s - s.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + case.numbers["epsilon"])
    out = centred * scale * case["weight"]
    return outputs | with_halves(case, out + case["bias"] if "bias" in case else out)


def softmax(case: Any) -> Outputs:
    weights = np.exp(case["x"] - case["x"].max(axis=1, keepdims=True))
    return {"out": weights / weights.sum(axis=1, keepdims=True)}


def mean(case: Any) -> Outputs:
    return {"out": case["x"].mean(axis=0)}


def normalise(case: Any) -> Outputs:
    length = np.sqrt((case["x"] ** 2).sum(axis=1, keepdims=True))
    return {"out": case["x"] / np.maximum(length, case.numbers["epsilon"])}


def top_k(case: Any) -> Outputs:
    scores, k = case["scores"], int(case.numbers["k"])
    out = []
    for row in scores:
        order = sorted(range(row.size), key=lambda i: (math.isnan(row[i]), -row[i] if not math.isnan(row[i]) else 0, i))
        weights = np.exp(row[order] - row[order[0]])
        chosen = weights[:k] / (weights[:k].sum() if case.numbers["normalise"] else weights.sum())
        out.append(np.concatenate([order[:k], chosen]))
    return {"routing": np.array(out)}


def add(case: Any) -> Outputs:
    return with_halves(case, (case["left"].astype(np.float32) + case["right"].astype(np.float32)).astype(np.float64))


def swiglu(case: Any) -> Outputs:
    return with_halves(case, case["left"] / (1 + np.exp(-case["left"])) * case["right"])


def gelu(case: Any) -> Outputs:
    return with_halves(case, 0.5 * case["left"] * (1 + np.vectorize(math.erf)(case["left"] / math.sqrt(2))))


def gelu_tanh(case: Any) -> Outputs:
    x = case["left"]
    return with_halves(case, 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def narrow(case: Any) -> Outputs:
    """To nearest, ties to even; a NaN keeps the top of its payload and is quiet."""
    bits = case.buffers["x"].before.view(np.uint32).astype(np.uint64)
    size, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    half = case.buffers["out"].type == "f16"
    over = (size >= (0x477FF000 if half else 0x7F7F8000)) & (size < 0x7F800000)
    if case.numbers["saturate"]:
        bits = np.where(over, sign | (0x477FE000 if half else 0x7F7F0000), bits)
    nan = size > 0x7F800000
    if half:
        out = bits.astype(np.uint32).view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint64)
        quiet = sign >> 16 | 0x7E00 | (size >> 13 & 0x3FF)
    else:
        out = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        quiet = bits >> 16 | 0x40
    overflowed = np.uint32(int(case["overflowed"][0]) + int(over.sum()))
    out = np.where(nan, quiet, out).astype(np.uint16)
    return {"out": out.view(np.float16) if half else out, "overflowed": np.array([overflowed])}


def widen(case: Any) -> Outputs:
    bits = case.buffers["x"].before.view(np.uint16).astype(np.uint32)
    if case.buffers["x"].type == "bf16":
        wide = bits << 16
        quiet = wide
    else:
        wide = bits.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        quiet = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    nan = np.isnan(wide.view(np.float32))
    return {"out": np.where(nan, quiet | 0x00400000, wide).astype(np.uint32).view(np.float32)}


def rotary_table(case: Any) -> Outputs:
    position, tokens = (int(each) for each in case["state"][:2])
    angles = (position + np.arange(tokens))[:, None] * case["turns"]
    return {"cosines": np.cos(angles), "sines": np.sin(angles)}


def rotary(case: Any) -> Outputs:
    pairs = int(case.numbers["pairs"])
    out = case["x"].copy()
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    if not case.numbers["interleaved"]:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    cosines, sines = case["cosines"][:, None], case["sines"][:, None]
    a, b = case["x"][..., first], case["x"][..., second]
    out[..., first], out[..., second] = a * cosines - b * sines, a * sines + b * cosines
    return {"out": out}


def cache_write(case: Any) -> Outputs:
    position = int(case["state"][0])
    out = {}
    for name, step in (("keys", case["key"]), ("values", case["value"])):
        cache = case.buffers[name].before.copy()
        there = max(0, min(step.shape[0], cache.shape[1] - position))
        cache[:, position : position + there] = step[:there].transpose(1, 0, 2).astype(np.float32)
        out[name] = cache
    return out


def attention(case: Any) -> Outputs:
    query, keys, values = case["query"], case["keys"], case["values"]
    tokens, heads, size = query.shape
    position, causal = int(case.numbers["position"]), bool(case.numbers["causal"])
    if not causal:
        keys, values = keys.transpose(1, 0, 2), values.transpose(1, 0, 2)
    share = heads // keys.shape[0]
    out = np.empty_like(query)
    for token in range(tokens):
        seen = position + token + 1 if causal else tokens
        for head in range(heads):
            scores = keys[head // share, :seen] @ query[token, head] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[head // share, :seen] / weights.sum()
    return with_halves(case, out)


def gemv(case: Any) -> Outputs:
    rows, columns = int(case.numbers["rows"]), int(case.numbers["columns"])
    out = case["out"].copy()
    product = case["x"][:, :columns] @ case["weight"].T
    if "bias" in case:
        product = product + case["bias"]
    out[:, :rows] = product + (out[:, :rows] if case.numbers["accumulate"] else 0)
    return {"out": out}


def expert_gemv(case: Any) -> Outputs:
    begin, picks, share = case["begin"], case["picks"], int(case.numbers["share"])
    out = np.empty(case["out"].shape)
    for expert, weights in enumerate(case["weights"]):
        for pick in picks[begin[expert] : begin[expert + 1]]:
            out[pick] = weights @ case["x"][pick // share]
    return {"out": out}


def expert_sum(case: Any) -> Outputs:
    tokens, k = case["routing"].shape[0], case["routing"].shape[1] // 2
    products = case["products"].reshape(tokens, k, -1)
    return {"out": (case["routing"][:, k:, None] * products).sum(axis=1)}


# Reflected polynomials of base/crc.hpp.
CRC32C, CRC64 = 0x82F63B78, 0xC96C5795D7870F42


def crc_table(polynomial: int) -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (polynomial if byte & 1 else 0)
        table.append(byte)
    return table


def crc(data: bytes, table: list[int], ones: int) -> int:
    value = ones
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ ones


def verdict(bad: list[int], before: np.ndarray) -> np.ndarray:
    return np.array([len(bad) - 1 & 0xFFFFFFFF, min(bad)], np.uint32) if bad else before


def crc32c_extents(case: Any) -> Outputs:
    data, size, first = case["data"].tobytes(), int(case.numbers["extent_bytes"]), int(case.numbers["first"])
    table = crc_table(CRC32C)
    bad = [
        first + i
        for i, expected in enumerate(case["expected"])
        if crc(data[i * size : (i + 1) * size], table, 0xFFFFFFFF) != expected
    ]
    return {"verdict": verdict(bad, case["verdict"])}


def crc64(case: Any) -> Outputs:
    value = crc(case["data"].tobytes(), crc_table(CRC64), 0xFFFFFFFFFFFFFFFF)
    bad = [int(case.numbers["index"])] if value != int(case["expected"][0]) else []
    return {"crc": np.array([value], np.uint64), "verdict": verdict(bad, case["verdict"])}


def generation(case: Any) -> Outputs:
    """state: position, tokens, the generation that is wanted, another that was met."""
    state, there = case["state"].copy(), case["number"][0]
    if there != state[2]:
        state[3] = there
    return {"state": state}


def merged(planes: list[np.ndarray], rotate: bool) -> np.ndarray:
    """Plane p holds byte p, lowest first; rotated elements are turned right by one bit."""
    words = np.stack(planes, axis=1).astype(np.uint8).view(f"<u{len(planes)}").reshape(-1)
    if rotate:
        words = words >> 1 | words << (8 * len(planes) - 1)
    return words


def merge(case: Any) -> Outputs:
    width, rotate = int(case.numbers["width"]), bool(case.numbers["rotate"])
    few = [case["few"]] + [np.full(3, 37 * p + 11 & 0xFF, np.uint8) for p in range(1, width)]
    return {
        "out": merged([case[f"plane{p}"] for p in range(width)], rotate),
        "few_out": merged(few, rotate),
    }


def xor(case: Any) -> Outputs:
    return {"out": case["base"] ^ case["change"]}


def after_steps(base: np.ndarray, steps: np.ndarray, floating: bool) -> np.ndarray:
    """Steps 0, 1, 2, 3, ... are 0, -1, 1, -2, ... units; of floats, in the order of their values."""
    word, bits = base.dtype.type, 8 * base.dtype.itemsize

    def ordered(words: np.ndarray) -> np.ndarray:
        return np.where(words >> word(bits - 1) == 1, words ^ word((1 << bits - 1) - 1), words)

    units = np.where(steps & word(1) == 1, ~(steps >> word(1)), steps >> word(1))
    return ordered(ordered(base) + units) if floating else base + units


def steps(case: Any) -> Outputs:
    return {"out": after_steps(case["base"], case["steps"], bool(case.numbers["floating"]))}


def sparse(case: Any) -> Outputs:
    out, index, values = case["target"].copy(), case["index"], case["values"]
    there = index < out.size
    index, values = index[there], values[there]
    floating = bool(case.numbers["floating"])
    out[index] = after_steps(out[index], values, floating) if case.numbers["is_steps"] else values
    return {"target": out}


REFERENCES: dict[str, Callable[[Any], Outputs]] = {
    function.__name__: function
    for function in (
        embedding, bias, rms_norm, layer_norm, softmax, mean, normalise, top_k, add, swiglu, gelu, gelu_tanh, narrow,
        widen, rotary_table, rotary, cache_write, attention, gemv, expert_gemv, expert_sum, crc32c_extents, crc64,
        generation, merge, xor, steps, sparse,
    )
}  # fmt: skip
