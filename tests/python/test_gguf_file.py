"""GGUF files and their tokenizer: on small files written here, and on the real model where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from paramwire.gguf_file import GgufFile
from paramwire.model_file import ModelFileError, to_bf16
from paramwire.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "generate.json"


def small_file(
    path: Path, *, architecture: str = "llama", scaling: str | None = None, skip: str = ""
) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    tensors = {
        "token_embd.weight": rng.normal(size=(10, 64)).astype(np.float32),
        "blk.0.attn_q.weight": rng.normal(size=(32, 64)).astype(np.float32),
        "output_norm.weight": rng.normal(size=(64,)).astype(np.float32),
        "half.weight": rng.normal(size=(3, 2, 32)).astype(np.float16),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 1, "embedding_length": 64, "feed_forward_length": 96}.items():
        if key != skip:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.attention.head_count_kv", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    writer.add_tensor("token_embd.weight", tensors["token_embd.weight"])
    packed = gguf.quantize(tensors["blk.0.attn_q.weight"], gguf.GGMLQuantizationType.Q8_0)
    tensors["blk.0.attn_q.weight"] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", tensors["output_norm.weight"])
    writer.add_tensor("half.weight", tensors["half.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_tensors_come_with_name_shape_and_dequantised_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of one row each, so that the seams between chunks are tested too.
    monkeypatch.setattr("paramwire.gguf_file._CHUNK_VALUES", 1)
    expected = small_file(tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    assert file.names() == list(expected)
    assert file.stored_type("blk.0.attn_q.weight") == "Q8_0"
    for tensor in file.tensors(dtype="f32"):
        assert tensor.shape == expected[tensor.name].shape == file.shape(tensor.name)
        assert np.array_equal(tensor.data, expected[tensor.name].astype(np.float32)), tensor.name
    for tensor in file.tensors(dtype="bf16"):
        assert tensor.dtype == "bf16"
        assert np.array_equal(tensor.data.view(np.uint16), to_bf16(expected[tensor.name].astype(np.float32))), (
            tensor.name
        )


def test_configuration_is_read_and_unsupported_models_are_named(tmp_path: Path) -> None:
    small_file(tmp_path / "a.gguf")
    config = GgufFile(tmp_path / "a.gguf").llama_config()
    assert config == {
        "layers": 1, "width": 64, "ffn_width": 96, "vocabulary": 10, "heads": 4, "kv_heads": 2, "head_size": 0,
        "rotary_size": 0, "rotary_base": 10000.0, "norm_epsilon": pytest.approx(1e-5), "tied_head": True,
        "attention_bias": False,
    }  # fmt: skip
    for options, part in [
        ({"architecture": "bert"}, "'bert', expected 'llama'"),
        ({"scaling": "yarn"}, "'yarn'"),
        ({"skip": "block_count"}, "'llama.block_count' is missing"),
    ]:
        small_file(tmp_path / "b.gguf", **options)
        with pytest.raises(ModelFileError, match=part):
            GgufFile(tmp_path / "b.gguf").llama_config()


def test_bad_files_are_refused_with_their_name(tmp_path: Path) -> None:
    small_file(tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    # The last cut takes more than the padding behind the last tensor.
    for cut in [0, 3, 4, 8, 12, 20, 24, 30, 100, 300, 600, 1000, len(content) - 200]:
        bad.write_bytes(content[:cut])
        with pytest.raises(ModelFileError, match=r"bad\.gguf"):
            GgufFile(bad)
    bad.write_bytes(b"GGML" + content[4:])
    with pytest.raises(ModelFileError, match="expected b'GGUF'"):
        GgufFile(bad)


def test_unknown_names_and_dtypes_are_refused(tmp_path: Path) -> None:
    small_file(tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    with pytest.raises(KeyError, match="no tensor 'x' among 4"):
        file.tensor("x")
    with pytest.raises(ModelFileError, match="'f16', expected 'bf16' or 'f32'"):
        file.tensor("token_embd.weight", dtype="f16")


# ---------------------------------------------------------------- the tokenizer


def vocabulary(**changes: Any) -> dict[str, Any]:
    """Bytes as tokens, three merges, two control tokens."""
    from paramwire.tokenizer import _bytes_of_characters

    tokens = ["<|im_start|>", "<|im_end|>", *_bytes_of_characters(), "he", "ll", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": ["h e", "l l", "1 2"],
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }


def test_text_survives_encoding_and_digits_are_split_for_smollm_alone() -> None:
    for pre, pieces in [("smollm", 2), ("gpt-2", 1)]:
        tokenizer = Tokenizer(vocabulary(**{"tokenizer.ggml.pre": pre}))
        assert len(tokenizer.encode("12")) == pieces
        for text in ["hello 12", "Übermut 日本語 🍎\n\n  x", "<|im_start|>he<|im_end|>", ""]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode("<|im_end|>") == [tokenizer.end_of_text] == [1]
    bos = Tokenizer(vocabulary(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}))
    assert bos.encode("he")[0] == 0


def test_a_stream_never_shows_half_a_character() -> None:
    tokenizer = Tokenizer(vocabulary())
    text = "a🍎é日"
    stream = tokenizer.stream()
    shown = [stream.push(token) for token in tokenizer.encode(text)]
    assert [part for part in shown if part] == list(text)
    assert stream.finish() == ""
    apple = tokenizer.encode("🍎")
    assert [stream.push(token) for token in apple[:2]] == ["", ""]
    assert stream.push(tokenizer.encode("x")[0]) == "\ufffdx"
    stream.push(apple[0])
    assert stream.finish() == "\ufffd"
    with pytest.raises(ValueError, match=f"token {tokenizer.vocabulary} is outside"):
        stream.push(tokenizer.vocabulary)


def test_vocabularies_that_are_not_understood_are_named() -> None:
    for changes, part in [
        ({"tokenizer.ggml.model": "llama"}, "'llama', expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2', expected one of smollm"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries"),
        ({"tokenizer.ggml.merges": ["he"]}, "entry 0 is 'he'"),
    ]:
        with pytest.raises(ModelFileError, match=part):
            Tokenizer(vocabulary(**changes))
    with pytest.raises(ModelFileError, match=r"'tokenizer\.ggml\.model' is missing"):
        Tokenizer({})


def test_chat_prompt_uses_the_templates_own_system_text_unless_one_is_given() -> None:
    template = "{% if x %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}{{'<|im_start|>' + message['role']}}"
    tokenizer = Tokenizer(vocabulary(**{"tokenizer.chat_template": template}))
    assert tokenizer.chat_prompt([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    given = tokenizer.chat_prompt([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}])
    assert given.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user")
    with pytest.raises(ValueError, match="expected at least one"):
        tokenizer.chat_prompt([])
    with pytest.raises(ModelFileError, match="ChatML"):
        Tokenizer(vocabulary(**{"tokenizer.chat_template": "[INST]"})).chat_prompt([{"role": "user", "content": "Hi"}])


def test_the_real_models_ids_prompts_and_text_equal_the_golden_values(real_model: GgufFile) -> None:
    config = real_model.llama_config()
    assert (config["layers"], config["width"], config["heads"], config["kv_heads"]) == (30, 576, 9, 3)
    tokenizer = Tokenizer(real_model.metadata())
    for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]:
        text = case["text"]
        prompt = tokenizer.chat_prompt([{"role": "user", "content": text}]) if case["chat"] else text
        assert prompt == case["prompt"]
        assert tokenizer.encode(prompt) == case["prompt_ids"]
        assert tokenizer.decode(case["tokens"]) == case["decoded"]
