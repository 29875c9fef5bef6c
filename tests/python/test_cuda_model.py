"""The demo's model on the CUDA backend, with a simulated device in the place of the silicon: the golden tokens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import paramwire as pw
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build" / "dev" / "tests" / "cuda_model"
CASE = json.loads((ROOT / "tests" / "golden" / "generate.json").read_text("utf-8"))["cases"][1]
CONFIG = (
    "layers",
    "width",
    "ffn_width",
    "vocabulary",
    "heads",
    "kv_heads",
    "rotary_size",
    "rotary_base",
    "norm_epsilon",
)
TOKENS = 3


@pytest.fixture(scope="module")
def address(real_model):
    with pw.Server(listen=["tcp://127.0.0.1:0"]) as server:
        with server.publish() as p:
            for tensor in real_model.tensors(dtype="bf16"):
                p.put_rows(tensor.name, tensor.data, dtype=tensor.dtype)
        yield server.address


@pytest.mark.skipif(not PROGRAM.exists(), reason="build/dev has no cuda_model: no nvcc, or nothing built")
def test_the_cuda_backend_streams_the_model_through_a_quarter_of_its_size_and_gives_the_golden_tokens(
    address, real_model
):
    config = real_model.llama_config()
    budget = 64 << 20
    words = [str(config[name]) for name in CONFIG] + [str(int(config["tied_head"]))]
    prompt = ",".join(map(str, CASE["prompt_ids"]))
    run = subprocess.run(
        [PROGRAM, address, str(budget), str(TOKENS), prompt, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    tokens, figures = run.stdout.splitlines()
    assert list(map(int, tokens.split())) == CASE["tokens"][:TOKENS]
    told = dict(zip(figures.split()[::2], map(int, figures.split()[1::2]), strict=True))
    assert told["held_bytes"] <= budget
    assert told["extents_deferred"] > 3000, "checked on the device"
    assert told["graph_launches"] > 10, "several windows a step"
