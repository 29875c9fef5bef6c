"""A model with the demo's shapes and generated weights, and what backends make of it: two steps of `make gpu-check`.

usage: gpu_model.py make FOLDER [--size tiny]          Hugging Face files: weights, config, tokenizer
       gpu_model.py compare FOLDER --backend cuda:0    logits of a backend beside the CPU's; status 1 where they differ

The demo's own file is larger than what may travel to an offline machine. Speed does not depend on the values of
weights, and answers are compared with the CPU backend's on the same weights. The tokenizer has a token for each byte,
and names without meaning up to the vocabulary's size.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

# Of SmolLM2-135M-Instruct's config.json, and small ones for tests.
SIZES = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "rope_theta": 10000.0,
    },
}
SEED = 20
PROMPT_TOKENS, STEPS = 24, 16
# Largest difference of a logit, in standard deviations of the logits. A backend may round the inputs of its products
# to bf16: 2^-9 each at most, some 2^-10 in the mean; errors of the 7 products of 30 layers add up like a random walk,
# sqrt(210) * 2^-10 = 0.014 of a deviation, and the largest of 49152 logits lies 4.3 deviations of the error out: 0.06.
# Another model, layer or position is some deviations off.
DIFFERENCE_MAX = 0.15


def tensors(config: dict[str, float | int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-shaped model with a tied head, as Hugging Face names them."""
    width, ffn, vocabulary = int(config["hidden_size"]), int(config["intermediate_size"]), int(config["vocab_size"])
    kv = width // int(config["num_attention_heads"]) * int(config["num_key_value_heads"])
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(int(config["num_hidden_layers"])):
        at = f"model.layers.{layer}."
        out |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (width, width),
            f"{at}self_attn.k_proj.weight": (kv, width),
            f"{at}self_attn.v_proj.weight": (kv, width),
            f"{at}self_attn.o_proj.weight": (width, width),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}mlp.gate_proj.weight": (ffn, width),
            f"{at}mlp.up_proj.weight": (ffn, width),
            f"{at}mlp.down_proj.weight": (width, ffn),
        }
    return out | {"model.norm.weight": (width,)}


def weights(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """bf16's bits: of matrices that keep the size of what they multiply, and of norms around 1."""
    from paramwire.model_file import to_bf16

    values = random.standard_normal(shape, np.float32)
    values = 1 + values / 16 if len(shape) == 1 else values / np.sqrt(np.float32(shape[1]))
    return to_bf16(values.astype(np.float32))


def byte_characters() -> list[str]:
    """The printable character of each byte in byte-level BPE: itself, or those from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def make(folder: Path, size: str) -> int:
    from paramwire.model_file import view_as
    from paramwire.safetensors_file import write_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    config = SIZES[size] | {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    random = np.random.default_rng(SEED)
    made = {name: view_as(weights(shape, random), "bf16") for name, shape in tensors(SIZES[size]).items()}
    write_safetensors(folder / "model.safetensors", made)
    count = int(config["vocab_size"])
    tokens = [*byte_characters(), *(f"w{index}" for index in range(256, count))]
    tokenizer = {
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel"},
        "added_tokens": [],
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    total = sum(array.nbytes for array in made.values())
    print(f"{size}: {len(made)} tensors, {total / 1e6:.0f} MB")
    return 0


def compare(folder: Path, backend: str) -> int:
    """Gives the same tokens to both backends, so that one near tie does not end the comparison."""
    import paramwire
    from paramwire.cli_demo import serving
    from paramwire.cli_model import read_served_model

    with serving(folder / "model.safetensors", str(folder)) as server:
        address = server.record()["address"]
        with paramwire.connect(address) as client, client.snapshot() as snapshot:
            graph = read_served_model(snapshot).graph()
            tokens = np.random.default_rng(SEED).integers(0, graph.vocabulary, PROMPT_TOKENS + STEPS)
            with (
                paramwire.Engine(snapshot, graph, source="copy", context=256) as expected,
                paramwire.Engine(snapshot, graph, backend=backend, context=256) as given,
            ):
                worst, same = 0.0, 0
                for begin, end in [
                    (0, PROMPT_TOKENS),
                    *((at, at + 1) for at in range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS)),
                ]:
                    want, have = expected.step(tokens[begin:end]), given.step(tokens[begin:end])
                    difference = float(np.abs(want - have).max() / want.std())
                    worst = max(worst, difference if np.isfinite(have).all() else float("inf"))
                    same += int(np.argmax(want) == np.argmax(have))
                described = given.description
    print(f"{described}: logits differ by {worst:.4f} deviations at most")
    print(f"{same} of {STEPS + 1} most likely tokens are the same")
    if worst > DIFFERENCE_MAX:
        print(f"expected at most {DIFFERENCE_MAX} deviations", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    acts = parser.add_subparsers(dest="act", required=True, metavar="ACT")
    maker = acts.add_parser("make", help="write the files")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--size", choices=sorted(SIZES), default="smollm2-135m")
    comparer = acts.add_parser("compare", help="compare a backend with the CPU's")
    comparer.add_argument("folder", type=Path)
    comparer.add_argument("--backend", required=True)
    options = parser.parse_args()
    return make(options.folder, options.size) if options.act == "make" else compare(options.folder, options.backend)


if __name__ == "__main__":
    sys.exit(main())
