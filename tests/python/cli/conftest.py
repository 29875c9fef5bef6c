"""A tiny Llama-shaped model in both file formats, and the command line as a user runs it: in processes of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from paramwire.safetensors_file import write_safetensors

# Far more than any command here takes: only a hang reaches it.
TIMEOUT = 120.0

# 4 MiB as float32: a part of it as budget leaves room beside the 256 KiB that an engine keeps for embedding rows.
WIDTH, FFN, HEADS, KV_HEADS, LAYERS = 128, 512, 4, 2, 4
HEAD = WIDTH // HEADS


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + index) for index, byte in enumerate(hidden)})
    return [table[byte] for byte in range(256)]


CONTROL = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*byte_characters(), "th", "the", *CONTROL]
MERGES = ["t h", "th e"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def weights() -> dict[str, np.ndarray]:
    """Names as in GGUF files; the head is tied to the embedding. Seed 7: any numbers will do."""
    random = np.random.default_rng(7)
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (WIDTH,),
            block + "attn_q.weight": (WIDTH, WIDTH),
            block + "attn_k.weight": (KV_HEADS * HEAD, WIDTH),
            block + "attn_v.weight": (KV_HEADS * HEAD, WIDTH),
            block + "attn_output.weight": (WIDTH, WIDTH),
            block + "ffn_norm.weight": (WIDTH,),
            block + "ffn_gate.weight": (FFN, WIDTH),
            block + "ffn_up.weight": (FFN, WIDTH),
            block + "ffn_down.weight": (WIDTH, FFN),
        }
    return {name: random.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in shapes.items()}


@dataclass(frozen=True)
class TinyModel:
    path: Path
    tensors: dict[str, np.ndarray]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    tensors = weights()
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path, tensors)


HF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def half_split(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as Hugging Face orders them: the even rotary positions of a head, then the odd ones."""
    return matrix.reshape(heads, HEAD // 2, 2, -1).swapaxes(1, 2).reshape(matrix.shape)


@pytest.fixture(scope="session")
def tiny_safetensors(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same model as a folder of Hugging Face files; the head is stored a second time, although it is tied."""
    folder = tmp_path_factory.mktemp("tiny-hf")
    tensors = {}
    for name, array in weights().items():
        if name.startswith("blk."):
            _, layer, kind, _ = name.split(".")
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind)
            renamed = f"model.layers.{layer}.{HF_NAMES[kind]}.weight"
            tensors[renamed] = half_split(array, heads) if heads else array
        else:
            tensors[{"token_embd.weight": "model.embed_tokens.weight"}.get(name, "model.norm.weight")] = array
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    path = folder / "model.safetensors"
    write_safetensors(path, tensors)
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": FFN,
        "vocab_size": len(TOKENS), "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    added = [{"id": TOKENS.index(token), "content": token, "special": True} for token in CONTROL]
    tokenizer = {
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(TOKENS)}, "merges": MERGES},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
        "added_tokens": added,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TinyModel(path, tensors)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "paramwire", *map(str, arguments)]


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its exit status must be `status`."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def json_lines(*arguments: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments).stdout.splitlines()]


@contextlib.contextmanager
def serving(*arguments: str | Path) -> Iterator[dict[str, Any]]:
    """A server process for the time of the block. gives: its facts"""
    words = command("serve", "--json", "--stop-on-eof", *arguments)
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def tcp_of(facts: dict[str, Any]) -> str:
    endpoints: Sequence[str] = facts["endpoints"]
    return next(endpoint for endpoint in endpoints if endpoint.startswith("tcp:"))


@pytest.fixture(scope="session")
def cli() -> Any:
    """The functions above, for tests in other files: helpers of a conftest can't be imported."""

    class Helpers:
        pass

    helpers = Helpers()
    for function in (command, run, json_lines, serving, tcp_of):
        setattr(helpers, function.__name__, function)
    return helpers
