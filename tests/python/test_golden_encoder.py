"""BERT-shaped encoders, served and computed, against reference values (tests/golden/README.md says what is asked)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest
from paramwire.safetensors_file import SafetensorsFile

GOLDEN = Path(__file__).parents[1] / "golden"
FACTS = json.loads((GOLDEN / "encoder.json").read_text("utf-8"))
# Two float32 computations of the same sums; README.md beside the values says what was measured.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "encoder_rows.npz") as arrays:
        yield dict(arrays)


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    wanted = wanted.astype(np.float64)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def encode(engine: pw.Engine, ids: list[int]) -> np.ndarray:
    engine.rewind()
    return engine.step(ids)


@pytest.fixture
def small(server, golden):
    """The small model's weights, published; the order of names is of no matter."""
    with server.publish() as p:
        for name, array in golden.items():
            if name.startswith("small/weights/"):
                p.put(name.removeprefix("small/weights/"), array)
    return server


@pytest.mark.parametrize("form", ["gelu", "gelu_pytorch_tanh"])
def test_a_small_encoder_gives_the_rows_that_transformers_gives(client, small, golden, form):
    graph = pw.Graph.bert(FACTS["small"]["config"] | {"hidden_act": form, "model_type": "bert"})
    with client.snapshot() as snapshot, pw.Engine(snapshot, graph) as engine:
        for name, ids in FACTS["small"]["cases"].items():
            assert distance(encode(engine, ids), golden[f"small/{form}/{name}"]) <= CLOSE, name
        # The values tell the forms apart.
        other = "gelu" if form != "gelu" else "gelu_pytorch_tanh"
        assert distance(encode(engine, ids), golden[f"small/{other}/{name}"]) > 10 * CLOSE


def test_a_budget_that_streams_the_layers_gives_the_same_rows(client, small, golden):
    graph = pw.Graph.bert(FACTS["small"]["config"], normalise=True)
    with client.snapshot() as snapshot, pw.Engine(snapshot, graph, budget=6000, threads=1) as engine:
        for name, ids in FACTS["small"]["cases"].items():
            wanted = golden[f"small/gelu/{name}"].astype(np.float64)
            assert distance(encode(engine, ids), wanted / np.linalg.norm(wanted)) <= CLOSE, name
        stats = engine.stats()
        assert stats["held_bytes_max"] <= 6000 < stats["walk_bytes"] / 4


def test_a_text_is_one_step_and_no_longer_than_the_table(client, small):
    with client.snapshot() as snapshot, pw.Engine(snapshot, pw.Graph.bert(FACTS["small"]["config"])) as engine:
        with pytest.raises(pw.InvalidError, match="16 positions"):
            engine.step([1] * 17)
        first = engine.step([1, 2, 3])
        with pytest.raises(pw.InvalidError, match=r"rewind\(0\)"):
            engine.step([4])
        np.testing.assert_array_equal(encode(engine, [1, 2, 3]), first)


@pytest.mark.parametrize(("dtype", "limit"), [("f32", CLOSE), ("bf16", 2e-2)])
def test_minilm_gives_the_embeddings_that_transformers_gives(server, encoder_folder, golden, dtype, limit):
    """Over shm from views and over tcp under a budget; bf16 weights are served as they are rounded."""
    config = json.loads((encoder_folder / "config.json").read_text("utf-8"))
    codec = None if dtype == "f32" else dtype
    with SafetensorsFile(encoder_folder / "model.safetensors") as file, server.publish(codec=codec) as p:
        for tensor in file.tensors():
            if tensor.dtype == "f32":
                p.put_rows(tensor.name, tensor.data)
    graph = pw.Graph.bert(config, normalise=True)
    for transport, budget in (("shm", 0), ("tcp", 24 << 20)):
        with (
            pw.connect(server.address, transport=transport) as client,
            client.snapshot() as snapshot,
            pw.Engine(snapshot, graph, step=512, budget=budget) as engine,
        ):
            for case in FACTS["minilm"]["cases"]:
                wanted = golden[f"minilm/{case['name']}"].astype(np.float64)
                assert distance(encode(engine, case["ids"]), wanted / np.linalg.norm(wanted)) <= limit, case["name"]
            assert budget == 0 or engine.stats()["held_bytes_max"] <= budget
