"""Graphs and engines: a small model against the same arithmetic in numpy, under budgets and over both transports."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paramwire as pw
import pytest

CONFIG = pw.LlamaConfig(layers=2, width=64, ffn_width=96, vocabulary=50, heads=4, kv_heads=2, tied_head=True)


def weights(graph, rng):
    return {name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32) for name, shape in graph.parameters}


def reference(arrays, tokens, config=CONFIG):
    """Logits of the last position, float64, straight from the definition."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    size = config.width // config.heads

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * weight

    def rotate(x):
        angle = np.arange(len(tokens))[:, None] * config.rotary_base ** (-np.arange(0, size, 2) / size)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return out

    x = w["token_embd.weight"][tokens]
    for layer in range(config.layers):
        at = f"blk.{layer}."
        h = norm(x, w[at + "attn_norm.weight"])
        q = rotate((h @ w[at + "attn_q.weight"].T).reshape(len(tokens), config.heads, size))
        k = rotate((h @ w[at + "attn_k.weight"].T).reshape(len(tokens), config.kv_heads, size))
        v = (h @ w[at + "attn_v.weight"].T).reshape(len(tokens), config.kv_heads, size)
        k, v = (np.repeat(t, config.heads // config.kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores[:, np.triu(np.ones((len(tokens), len(tokens)), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(len(tokens), -1) @ w[at + "attn_output.weight"].T
        h = norm(x, w[at + "ffn_norm.weight"])
        gate = h @ w[at + "ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "ffn_up.weight"].T)) @ w[at + "ffn_down.weight"].T
    return norm(x[-1], w["output_norm.weight"]) @ w["token_embd.weight"].T


@pytest.fixture
def graph():
    return pw.Graph.llama(CONFIG)


@pytest.fixture
def published(server, graph, rng):
    arrays = weights(graph, rng)
    with server.publish() as p:
        for name, array in arrays.items():
            p.put_rows(name, array, 4096)
    return arrays


TOKENS = [3, 14, 15, 9, 26]


@pytest.mark.parametrize(("source", "budget"), [("auto", 0), ("copy", 0), ("auto", 400_000), ("copy", 400_000)])
def test_an_engine_computes_what_the_definition_says(client, graph, published, source, budget):
    with client.snapshot() as snapshot, pw.Engine(snapshot, graph, source=source, budget=budget, threads=1) as engine:
        first = engine.step(TOKENS[:2])
        assert first.dtype == np.float32
        assert first.shape == (50,)
        last = engine.step(np.array(TOKENS[2:], np.uint32))
        # Sums of at most some hundred products of order 1 in float32: errors stay far below 1e-4 of the norm.
        for got, count in ((first, 2), (last, 5)):
            wanted = reference(published, TOKENS[:count])
            assert np.linalg.norm(got - wanted) <= 1e-4 * np.linalg.norm(wanted)
        assert engine.position == 5
        engine.rewind(2)
        np.testing.assert_allclose(engine.step(TOKENS[2:]), last, rtol=1e-5, atol=1e-5)
        stats = engine.stats()
        assert stats["steps"] == 3
        assert stats["tokens"] == 8
        assert stats["source"] == ("view" if source == "auto" and client.transport == "shm" else "copy")
        assert budget == 0 or stats["held_bytes_max"] <= budget
        assert engine.description


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("budget", [0, 400_000])
def test_an_engine_goes_on_with_another_version(client, server, graph, published, versions, budget):
    with pw.Engine(client.snapshot(), graph, threads=1, budget=budget, versions=versions) as engine:
        for version in range(3):
            changed = {name: array * np.float32(1 + version / 8) for name, array in published.items() if "ffn" in name}
            with server.publish() as p:
                for name, array in changed.items():
                    p.put_rows(name, array, 4096)
            published.update(changed)
            newest = client.snapshot()
            with ThreadPoolExecutor(1) as beside:
                prepared = beside.submit(engine.prepare, newest)
                engine.step(TOKENS[:1])
                prepared.result()
            engine.adopt(newest)
            engine.rewind()
            wanted = reference(published, TOKENS)
            assert np.linalg.norm(engine.step(TOKENS) - wanted) <= 1e-4 * np.linalg.norm(wanted)
            engine.rewind()
        assert engine.stats()["versions_adopted"] == 3
    with server.publish() as p:
        p.remove("blk.0.attn_norm.weight")
    with pw.Engine(client.snapshot(version=newest.version), graph) as engine:
        with pytest.raises(pw.NotFoundError, match="attn_norm"):
            engine.adopt(client.snapshot())
        assert engine.step([1]).shape == (50,)
    with client.snapshot(version=newest.version) as snapshot, pytest.raises(pw.InvalidError, match="versions is 3"):
        pw.Engine(snapshot, graph, versions=3)


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("end", ["close", "del"])
def test_the_child_of_a_fork_ends_with_its_parents_engine_open(client, graph, published, versions, end):
    engine = pw.Engine(client.snapshot(), graph, threads=2, versions=versions)
    engine.step([1])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(pw.InvalidError, match="fork"):
                engine.step([1])
            if end == "close":
                engine.close()
            del engine
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.step([2]).shape == (50,)
    with pytest.raises(TypeError, match="snapshot must be a Snapshot, not int"):
        engine.adopt(3)
    engine.close()


def test_an_engine_says_what_does_not_fit(client, server, graph, published):
    with client.snapshot() as snapshot:
        with pytest.raises(pw.InvalidError, match="budget"):
            pw.Engine(snapshot, graph, budget=10)
        with pytest.raises(pw.InvalidError, match="source"):
            pw.Engine(snapshot, graph, source="paper")
        with pytest.raises(pw.Error, match="abacus"):
            pw.Engine(snapshot, graph, backend="abacus")
        with pw.Engine(snapshot, graph, context=4) as engine:
            for wrong in ([], [50], [-1], [2**40], [1] * 5):
                with pytest.raises((pw.InvalidError, pw.BackpressureError)):
                    engine.step(wrong)
            with pytest.raises(TypeError):
                engine.step(["a"])
            assert engine.step([1]).shape == (50,)
        with pytest.raises(pw.InvalidError, match="closed"):
            engine.step([1])
        engine.close()
    with server.publish() as p:
        p.remove("output_norm.weight")
        p.remove("blk.0.attn_q.weight")
        p.put("blk.0.attn_q.weight", np.zeros((2, 2), np.float32))
    with client.snapshot() as snapshot, pytest.raises(pw.InvalidError) as caught:
        pw.Engine(snapshot, graph)
    assert "output_norm.weight" in str(caught.value)
    assert "blk.0.attn_q.weight" in str(caught.value)


def test_graphs_are_checked_as_they_are_built():
    graph = pw.Graph()
    graph.embedding("x", "embed", (10, 8))
    graph.rms_norm("n", "x", "norm")
    graph.matmul("q", "n", "wq", (8, 8), bias="bq")
    graph.rotary("r", "q", heads=2, head_size=4)
    graph.attention("a", "r", "r", "q", heads=2, kv_heads=2, head_size=4)
    graph.add("s", "x", "a")
    graph.swiglu("g", "s", "n")
    graph.head("out", "g", "embed", (10, 8))
    graph.softmax("p", "out")
    assert graph.parameters == [("embed", (10, 8)), ("norm", (8,)), ("bq", (8,)), ("wq", (8, 8))]
    assert graph.operations[0] == ("x", "embedding")
    assert graph.vocabulary == 10
    with pytest.raises(pw.InvalidError, match="nobody"):
        graph.add("t", "x", "nobody")
    with pytest.raises(pw.InvalidError):
        graph.matmul("u", "n", "w2", (8, 9))


def test_configurations_are_read_by_both_names():
    theirs = {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert pw.Graph.llama(theirs).parameters == pw.Graph.llama(CONFIG).parameters
    assert "model.embed_tokens.weight" in dict(pw.Graph.llama(theirs, naming="hf").parameters)
    untied = pw.Graph.llama(CONFIG, tied=False)
    assert "output.weight" in dict(untied.parameters)
    for wrong, match in [
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 0}, "width"),
    ]:
        with pytest.raises(pw.InvalidError, match=match):
            pw.Graph.llama(theirs | wrong)
    with pytest.raises(pw.InvalidError, match="naming"):
        pw.Graph.llama(CONFIG, naming="other")
    with pytest.raises(TypeError):
        pw.Graph.llama(3)


def test_configurations_of_encoders_are_read_by_both_names():
    theirs = {
        "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 40, "vocab_size": 50, "num_attention_heads": 3,
        "max_position_embeddings": 16, "type_vocab_size": 4, "layer_norm_eps": 1e-7, "hidden_act": "gelu_new",
        "model_type": "bert", "position_embedding_type": "absolute", "is_decoder": False,
    }  # fmt: skip
    ours = pw.BertConfig(
        layers=1, width=24, ffn_width=40, vocabulary=50, heads=3, positions=16, token_types=4, gelu="tanh"
    )
    assert pw.Graph.bert(theirs).parameters == pw.Graph.bert(ours).parameters
    assert pw.Graph.bert(theirs).operations == pw.Graph.bert(ours).operations
    assert "embeddings.LayerNorm.bias" in dict(pw.Graph.bert(ours).parameters)
    assert "token_embd_norm.bias" in dict(pw.Graph.bert(ours, naming="gguf").parameters)
    assert pw.Graph.bert(ours).operations[-1][1] == "mean"
    assert pw.Graph.bert(ours, normalise=True).operations[-1][1] == "normalise"
    for wrong, match in [
        ({"model_type": "roberta"}, "model_type is 'roberta'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "relu"}, 'gelu is "relu"'),
        ({"num_attention_heads": 5}, "heads is 5"),
    ]:
        with pytest.raises(pw.InvalidError, match=match):
            pw.Graph.bert(theirs | wrong)
    with pytest.raises(TypeError, match="BertConfig"):
        pw.Graph.bert(3)
