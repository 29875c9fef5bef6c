"""Tokens a second of eager torch with the shapes of gpu_bench's generation: what the figures there are beside.

usage: eager_torch.py --json FILE [--quick] [--tokens N]

A decoder of 30 layers as torch users write it: bf16 weights from a seed, a cache of keys and values, greedy. The JSON
has the form of gpu_bench's. Its answer is checked: the tokens are those of the same decoder without a cache, on the
same device. status: 0; 1 the answer was wrong; 77 no torch, or no GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# SmolLM2-135M's, of its config.json.
LAYERS, WIDTH, FFN, VOCABULARY, HEADS, KV_HEADS = 30, 576, 1536, 49152, 9, 3
BASE, EPSILON = 100_000.0, 1e-5
HEAD = WIDTH // HEADS
PROMPT = [1, 17, 300, 41]
SKIPPED = 77


class Decoder:
    """Llama with a tied head; `tiny` for a processor that only has to show that the program works."""

    def __init__(self, device: str, *, tiny: bool) -> None:
        import torch

        self.torch, self.device = torch, device
        self.layers, self.vocabulary = (2, 512) if tiny else (LAYERS, VOCABULARY)
        generator = torch.Generator("cpu").manual_seed(300)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            values = (torch.rand(rows, columns, generator=generator) * 2 - 1) * (3.0 / columns) ** 0.5
            return values.to(device, torch.bfloat16)

        self.table = matrix(self.vocabulary, WIDTH)
        kv = KV_HEADS * HEAD
        self.weights = [
            {
                "q": matrix(WIDTH, WIDTH),
                "k": matrix(kv, WIDTH),
                "v": matrix(kv, WIDTH),
                "o": matrix(WIDTH, WIDTH),
                "gate": matrix(FFN, WIDTH),
                "up": matrix(FFN, WIDTH),
                "down": matrix(WIDTH, FFN),
                "norm": torch.ones(WIDTH, device=device, dtype=torch.bfloat16),
                "ffn_norm": torch.ones(WIDTH, device=device, dtype=torch.bfloat16),
            }
            for _ in range(self.layers)
        ]
        self.norm = torch.ones(WIDTH, device=device, dtype=torch.bfloat16)
        self.turns = (BASE ** -(torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)).to(device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * self.torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        torch = self.torch
        angles = torch.arange(position, position + x.shape[1], device=self.device, dtype=torch.float64)[:, None]
        angles = angles * self.turns
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosines - b * sines, a * sines + b * cosines], -1)

    def step(self, tokens: torch.Tensor, position: int, cache: list[Any]) -> torch.Tensor:
        """Logits of the last of `tokens`, [tokens]; the cache grows by them."""
        functional = self.torch.nn.functional
        x = functional.embedding(tokens, self.table)
        count = tokens.shape[0]
        for layer, w in enumerate(self.weights):
            normed = self.rms_norm(x, w["norm"])
            q, k, v = (
                functional.linear(normed, w[name]).view(count, -1, HEAD).transpose(0, 1) for name in ("q", "k", "v")
            )
            q, k = self.turn(q, position), self.turn(k, position)
            if cache[layer] is not None:
                k, v = self.torch.cat([cache[layer][0], k], 1), self.torch.cat([cache[layer][1], v], 1)
            cache[layer] = (k, v)
            share = HEADS // KV_HEADS
            mixed = functional.scaled_dot_product_attention(
                q[None],
                k.repeat_interleave(share, 0)[None],
                v.repeat_interleave(share, 0)[None],
                is_causal=position == 0 and count > 1,
            )[0]
            x = x + functional.linear(mixed.transpose(0, 1).reshape(count, WIDTH), w["o"])
            normed = self.rms_norm(x, w["ffn_norm"])
            gated = functional.silu(functional.linear(normed, w["gate"])) * functional.linear(normed, w["up"])
            x = x + functional.linear(gated, w["down"])
        return functional.linear(self.rms_norm(x[-1:], self.norm), self.table)[0].float()

    def tensor(self, tokens: list[int]) -> torch.Tensor:
        return self.torch.tensor(tokens, device=self.device)


def generate(decoder: Decoder, count: int) -> tuple[list[int], float]:
    """The tokens behind the prompt, and seconds for each but the first."""
    cache: list[Any] = [None] * decoder.layers
    out = [int(decoder.step(decoder.tensor(PROMPT), 0, cache).argmax())]
    begin = time.perf_counter()
    for i in range(count):
        # int() waits for the device: a token is needed before the next step, as in gpu_bench.
        out.append(int(decoder.step(decoder.tensor(out[-1:]), len(PROMPT) + i, cache).argmax()))
    return out, (time.perf_counter() - begin) / count


def right(decoder: Decoder, tokens: list[int]) -> bool:
    """Each token's logit is the largest, or as good as, when all before it are computed at once.

    bf16 has 8 bits, and sums in another order differ in the last of them; a wrong token is some deviations off.
    """
    for count in (1, len(tokens) // 2, len(tokens) - 1):
        logits = decoder.step(decoder.tensor(PROMPT + tokens[:count]), 0, [None] * decoder.layers)
        if float(logits.max() - logits[tokens[count]]) > 0.25 * float(logits.std()):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, on a processor if there is no GPU")
    parser.add_argument("--tokens", type=int, default=192)
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("eager_torch: torch is not installed", file=sys.stderr)
        return SKIPPED
    import torch

    there = torch.cuda.is_available()
    if not there and not options.quick:
        print("eager_torch: torch finds no GPU", file=sys.stderr)
        return SKIPPED
    count = 8 if options.quick else options.tokens
    with torch.inference_mode():
        decoder = Decoder("cuda" if there else "cpu", tiny=options.quick)
        generate(decoder, 8)
        runs = [generate(decoder, count) for _ in range(1 if options.quick else 4)]
        correct = right(decoder, runs[0][0]) and all(tokens == runs[0][0] for tokens, _ in runs)
    figure = {
        "name": "eager_torch_generation",
        "value": 1 / statistics.median(seconds for _, seconds in runs) if there and not options.quick else 0.0,
        "unit": "tokens/s",
        "baseline": "",
        "baseline_value": None,
        "ratio": None,
        "target": None,
        "correct": correct,
    }
    content = {
        "device": torch.cuda.get_device_name() if there else "cpu",
        "driver": f"torch {torch.__version__}",
        "simulated": not there or options.quick,
        "figures": [figure],
    }
    options.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"{figure['name']}: {figure['value']:.1f} tokens/s{'' if correct else '  WRONG ANSWER'}")
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
