"""The JSON files that lie beside Hugging Face safetensors, in the words that this package uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paramwire.model_file import ModelFileError

__all__ = ["llama_config", "tokenizer_metadata"]

# Values of tokenizer.ggml.token_type: see tokenizer.py.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def llama_config(path: Path, *, attention_bias: bool) -> dict[str, Any]:
    """The fields of LlamaConfig (compute/llama.hpp) from a config.json.

    errors: ModelFileError naming the key that is missing, or that asks for what the graph lacks
    """
    config = _read(path)

    def get(key: str) -> Any:
        if config.get(key) is None:
            raise ModelFileError(f"{path}: key {key!r} is missing")
        return config[key]

    if get("model_type") != "llama":
        raise ModelFileError(f"{path}: model_type is {config['model_type']!r}, expected 'llama'")
    if config.get("rope_scaling") not in (None, {}):
        raise ModelFileError(f"{path}: rope_scaling is {config['rope_scaling']!r}, expected none")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"{path}: hidden_act is {config['hidden_act']!r}, expected 'silu'")
    if config.get("mlp_bias"):
        raise ModelFileError(f"{path}: mlp_bias is true, expected false")
    heads = int(get("num_attention_heads"))
    rope = config.get("rope_parameters") or {}
    return {
        "layers": int(get("num_hidden_layers")),
        "width": int(get("hidden_size")),
        "ffn_width": int(get("intermediate_size")),
        "vocabulary": int(get("vocab_size")),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_size": int(config.get("head_dim") or 0),
        "rotary_size": 0,
        "rotary_base": float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "norm_epsilon": float(get("rms_norm_eps")),
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": attention_bias,
    }


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """A GGUF file's "tokenizer." keys, which Tokenizer takes, from tokenizer.json and tokenizer_config.json.

    errors: ModelFileError naming the file when it is no byte-level BPE with a pre-tokenizer that Tokenizer knows
    """
    path = folder / "tokenizer.json"
    content = _read(path)
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelFileError(f"{path}: model.type is {model.get('type')!r}, expected 'BPE'")
    steps = content.get("pre_tokenizer") or {}
    kinds = [step.get("type") for step in steps.get("pretokenizers", [steps])]
    if kinds not in (["ByteLevel"], ["Digits", "ByteLevel"]):
        raise ModelFileError(f"{path}: pre_tokenizer is {kinds}, expected ByteLevel, or Digits and ByteLevel")
    added = {entry["content"]: entry for entry in content.get("added_tokens", [])}
    ids: dict[str, int] = model["vocab"] | {text: entry["id"] for text, entry in added.items()}
    tokens = sorted(ids, key=lambda text: ids[text])
    if [ids[text] for text in tokens] != list(range(len(tokens))):
        raise ModelFileError(f"{path}: the ids of {len(tokens)} tokens are not 0 to {len(tokens) - 1}")
    types = [
        (_CONTROL if added[text].get("special") else _USER_DEFINED) if text in added else _NORMAL for text in tokens
    ]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm" if "Digits" in kinds else "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])
        ],
    }
    other = folder / "tokenizer_config.json"
    settings = _read(other) if other.is_file() else {}
    if isinstance(settings.get("chat_template"), str):
        metadata["tokenizer.chat_template"] = settings["chat_template"]
    end = settings.get("eos_token")
    end_text = end.get("content") if isinstance(end, dict) else end
    if end_text in ids:
        metadata["tokenizer.ggml.eos_token_id"] = ids[end_text]
    return metadata


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: holds {type(content).__name__}, expected an object")
    return content
