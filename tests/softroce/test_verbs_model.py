"""The demo's job over RDMA: a real model is served, and computed from what is fetched."""

from __future__ import annotations

import json

import make_model
import numpy as np
import paramwire as pw
import programs
import pytest

GOLDEN = "tests/golden"
CASE = 1  # of generate.json: the short sentence


@pytest.fixture
def folder():
    if not (make_model.FOLDER / "index.json").exists():
        pytest.fail("the model is not there: .venv/bin/python tests/softroce/make_model.py, outside of the guest")
    return make_model.FOLDER


def test_a_model_fetched_by_rdma_gives_the_reference_tokens(folder, root, start_peer, connect, far):
    reference = json.loads((root / GOLDEN / "generate.json").read_text("utf-8"))["cases"][CASE]
    server = start_peer(programs.serve_model, str(folder), {"listen": ["tcp://127.0.0.1:0"], "verbs": far.device})
    address, nbytes = server.answer(120.0)
    graph = pw.Graph.llama(json.loads((folder / "index.json").read_text())["config"])
    with (
        connect(address) as client,
        client.snapshot() as snapshot,
        pw.Engine(snapshot, graph, fetch_timeout=120.0) as engine,
        np.load(root / GOLDEN / "generate_logits.npz") as logits,
    ):
        got = engine.step(reference["prompt_ids"])
        wanted = logits[reference["logits"]].astype(np.float64)
        assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted)
        tokens = [int(got.argmax())]
        tokens.append(int(engine.step(tokens).argmax()))
        assert tokens == reference["tokens"][:2]
        stats = client.stats()
        assert list(stats["by_transport"]) == ["verbs"]
        assert stats["by_transport"]["verbs"]["bytes"] >= nbytes
        assert stats["blocks_verified"] == stats["reads"]
        assert stats["corrupt"] == 0
