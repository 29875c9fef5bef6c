"""What torch computes for a case, on the GPU where it has one: float32 with the weights' own values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Tensors = dict[str, torch.Tensor]

# Products of float32 in float32, on the tensor cores of no format with fewer bits.
torch.set_float32_matmul_precision("highest")


def tensor(case: Any, name: str) -> torch.Tensor:
    """As it lies in the file; bf16 as bf16."""
    buffer = case.buffers[name]
    raw = np.ascontiguousarray(buffer.before)
    if buffer.type == "bf16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    if raw.dtype in (np.uint16, np.uint32, np.uint64):
        raw = raw.astype(np.int64)
    return torch.from_numpy(raw.copy()).to(DEVICE)


def wide(case: Any, name: str) -> torch.Tensor:
    return tensor(case, name).float()


def with_halves(case: Any, out: torch.Tensor) -> Tensors:
    if "out16" not in case:
        return {"out": out}
    half = torch.bfloat16 if case.buffers["out16"].type == "bf16" else torch.float16
    return {"out": out, "out16": out.to(half)}


def embedding(case: Any) -> Tensors:
    return {"out": functional.embedding(tensor(case, "row_of"), wide(case, "rows"))}


def norm_input(case: Any) -> tuple[torch.Tensor, Tensors]:
    if "add" not in case:
        return wide(case, "x"), {}
    s = wide(case, "x") + wide(case, "add")
    return s, {"sum": s}


def rms_norm(case: Any) -> Tensors:
    s, outputs = norm_input(case)
    scale = torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + case.numbers["epsilon"])
    return outputs | with_halves(case, s * scale * wide(case, "weight"))


def layer_norm(case: Any) -> Tensors:
    s, outputs = norm_input(case)
    bias = wide(case, "bias") if "bias" in case else None
    return outputs | with_halves(
        case, functional.layer_norm(s, s.shape[-1:], wide(case, "weight"), bias, case.numbers["epsilon"])
    )


def softmax(case: Any) -> Tensors:
    return {"out": wide(case, "x").softmax(-1)}


def mean(case: Any) -> Tensors:
    return {"out": wide(case, "x").mean(0)}


def normalise(case: Any) -> Tensors:
    return {"out": functional.normalize(wide(case, "x"), dim=-1, eps=case.numbers["epsilon"])}


def add(case: Any) -> Tensors:
    return with_halves(case, wide(case, "left") + wide(case, "right"))


def swiglu(case: Any) -> Tensors:
    return with_halves(case, functional.silu(wide(case, "left")) * wide(case, "right"))


def gelu(case: Any) -> Tensors:
    # torch's vector code for processors makes NaN of infinity.
    x = wide(case, "left")
    return with_halves(case, torch.where(x == torch.inf, x, functional.gelu(x)))


def gelu_tanh(case: Any) -> Tensors:
    return with_halves(case, functional.gelu(wide(case, "left"), approximate="tanh"))


def narrow(case: Any) -> Tensors | None:
    """Payloads of NaN are not torch's; values are."""
    if case.numbers["saturate"]:
        return None
    half = torch.bfloat16 if case.buffers["out"].type == "bf16" else torch.float16
    return {"out": tensor(case, "x").to(half)}


def widen(case: Any) -> Tensors:
    return {"out": wide(case, "x")}


def rotary(case: Any) -> Tensors:
    pairs = int(case.numbers["pairs"])
    x, cosines, sines = wide(case, "x"), wide(case, "cosines")[:, None], wide(case, "sines")[:, None]
    turned, kept = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if case.numbers["interleaved"]:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cosines - b * sines, a * sines + b * cosines], -1).flatten(-2)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat([a * cosines - b * sines, a * sines + b * cosines], -1)
    return {"out": torch.cat([turned, kept], -1)}


def attention(case: Any) -> Tensors:
    query, keys, values = wide(case, "query"), wide(case, "keys"), wide(case, "values")
    tokens, heads, _ = query.shape
    position, causal = int(case.numbers["position"]), bool(case.numbers["causal"])
    if causal:
        keys, values = keys[:, : position + tokens], values[:, : position + tokens]
    else:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    share = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(share, 0), values.repeat_interleave(share, 0)
    mask = None
    if causal:
        at = torch.arange(position + tokens, device=DEVICE)
        mask = at[None] <= at[position:, None]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        query, keys, values = query.transpose(0, 1)[None], keys[None], values[None]
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return with_halves(case, out[0].transpose(0, 1))


def gemv(case: Any) -> Tensors:
    rows, columns = int(case.numbers["rows"]), int(case.numbers["columns"])
    out = wide(case, "out")
    bias = wide(case, "bias") if "bias" in case else None
    product = functional.linear(wide(case, "x")[:, :columns], wide(case, "weight"), bias)
    out[:, :rows] = product + (out[:, :rows] if case.numbers["accumulate"] else 0)
    return {"out": out}


REFERENCES: dict[str, Callable[[Any], Tensors | None]] = {
    function.__name__: function
    for function in (
        embedding, rms_norm, layer_norm, softmax, mean, normalise, add, swiglu, gelu, gelu_tanh, narrow, widen, rotary,
        attention, gemv,
    )
}  # fmt: skip


def values_of(result: torch.Tensor) -> np.ndarray:
    return result.detach().double().cpu().numpy()
