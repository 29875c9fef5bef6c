"""SmolLM2-135M, served and computed, against the reference values of tests/golden (its README says what is asked)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "generate.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def model(tmp_path_factory, real_model):
    """A server with version 1 as float32 and version 2 as bf16, and the graph of both."""
    graph = pw.Graph.llama(real_model.llama_config())
    with pw.Server(unix_directory=str(tmp_path_factory.mktemp("server"))) as server:
        with server.publish() as p:
            for tensor in real_model.tensors(dtype="f32"):
                p.put_rows(tensor.name, tensor.data)
        full = server.newest
        with server.publish() as p:
            for tensor in real_model.tensors(dtype="bf16"):
                p.put_rows(tensor.name, tensor.data, dtype=tensor.dtype)
        yield server, graph, full, server.newest


def greedy(engine: pw.Engine, prompt: list[int], count: int) -> list[int]:
    engine.rewind(0)
    tokens = [int(engine.step(prompt).argmax())]
    while len(tokens) < count:
        tokens.append(int(engine.step(tokens[-1:]).argmax()))
    return tokens


def test_float32_gives_every_greedy_token_over_shm(model):
    server, graph, full, _ = model
    with (
        pw.connect(server.address, transport="shm") as client,
        client.snapshot(full) as snapshot,
        pw.Engine(snapshot, graph) as engine,
    ):
        assert engine.stats()["source"] == "view"
        for case in CASES:
            assert greedy(engine, case["prompt_ids"], 32) == case["tokens"], case["name"]


def test_float32_gives_the_greedy_tokens_over_tcp_under_a_budget(model):
    """The budget holds a fifth of the model: most of it streams by in every step."""
    server, graph, full, _ = model
    budget = 110 << 20
    with (
        pw.connect(server.address, transport="tcp") as client,
        client.snapshot(full) as snapshot,
        pw.Engine(snapshot, graph, budget=budget) as engine,
    ):
        case = CASES[1]
        assert greedy(engine, case["prompt_ids"], 6) == case["tokens"][:6]
        stats = engine.stats()
        assert stats["source"] == "copy"
        assert stats["held_bytes_max"] <= budget < stats["walk_bytes"] / 4


def test_bf16_logits_are_close(model):
    server, graph, _, half = model
    with (
        np.load(GOLDEN / "generate_logits.npz") as logits,
        pw.connect(server.address, transport="shm") as client,
        client.snapshot(half) as snapshot,
        pw.Engine(snapshot, graph) as engine,
    ):
        for case in CASES:
            engine.rewind(0)
            wanted = logits[case["logits"]].astype(np.float64)
            got = engine.step(case["prompt_ids"])
            assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted), case["name"]
