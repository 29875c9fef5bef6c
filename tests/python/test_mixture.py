"""A Mixtral-shaped mixture of experts against the same arithmetic in numpy, under budgets that hold few experts."""

from __future__ import annotations

import numpy as np
import paramwire as pw
import pytest

LAYERS, WIDTH, FFN, VOCABULARY, HEADS, KV_HEADS, EXPERTS, K = 2, 64, 96, 50, 4, 2, 8, 2
EXPERT_BYTES = 3 * 4 * FFN * WIDTH  # of one expert of one layer: gate, up and down
TOKENS = [3, 14, 15, 9, 26, 5]


def mixture_graph(*, normalise: bool = True) -> pw.Graph:
    """Names and order of Mixtral's operations; the matrices of a layer's experts are one tensor each."""
    graph = pw.Graph()
    size = WIDTH // HEADS
    graph.embedding("x", "embed", (VOCABULARY, WIDTH))
    last = "x"
    for layer in range(LAYERS):
        at = f"{layer}."
        graph.rms_norm(at + "n", last, at + "attention_norm")
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            graph.matmul(at + name, at + "n", at + name, (heads * size, WIDTH))
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            graph.rotary(f"{at}{name}r", at + name, heads=heads, head_size=size)
        graph.attention(at + "a", at + "qr", at + "kr", at + "v", heads=HEADS, kv_heads=KV_HEADS, head_size=size)
        graph.matmul(at + "o", at + "a", at + "o", (WIDTH, WIDTH))
        graph.add(at + "h", last, at + "o")
        graph.rms_norm(at + "m", at + "h", at + "ffn_norm")
        graph.matmul(at + "scores", at + "m", at + "router", (EXPERTS, WIDTH))
        graph.top_k(at + "route", at + "scores", K, normalise=normalise)
        for name in ("gate", "up"):
            graph.expert_matmul(at + name, at + "m", at + "route", at + name, (EXPERTS, FFN, WIDTH))
        graph.swiglu(at + "g", at + "gate", at + "up")
        graph.expert_combine(at + "down", at + "g", at + "route", at + "down", (EXPERTS, WIDTH, FFN))
        graph.add(at + "out", at + "h", at + "down")
        last = at + "out"
    graph.rms_norm("norm", last, "norm")
    graph.head("logits", "norm", "head", (VOCABULARY, WIDTH))
    return graph


def soft_max(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(w, tokens, *, normalise: bool = True):
    """Logits of the last position, float64, and for each layer the experts that each token picked."""
    w = {name: array.astype(np.float64) for name, array in w.items()}
    size, count = WIDTH // HEADS, len(tokens)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x):
        angle = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
        out = np.empty_like(x)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    x, picked = w["embed"][tokens], []
    for layer in range(LAYERS):
        at = f"{layer}."
        h = norm(x, w[at + "attention_norm"])
        q, k, v = ((h @ w[at + name].T).reshape(count, -1, size) for name in "qkv")
        k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(size)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        x = x + np.einsum("hqk,khd->qhd", soft_max(scores), v).reshape(count, -1) @ w[at + "o"].T
        m = norm(x, w[at + "ffn_norm"])
        scores = m @ w[at + "router"].T
        picks = np.argsort(-scores, axis=-1, kind="stable")[:, :K]
        taken = np.take_along_axis(scores, picks, -1)
        weights = soft_max(taken) if normalise else np.take_along_axis(soft_max(scores), picks, -1)
        x = x.copy()
        for token in range(count):
            for expert, weight in zip(picks[token], weights[token], strict=True):
                gate, up = (w[at + name][expert] @ m[token] for name in ("gate", "up"))
                x[token] += weight * (w[at + "down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
        picked.append(picks)
    return norm(x[-1], w["norm"]) @ w["head"].T, picked


@pytest.fixture
def published(server, rng):
    arrays = {
        name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in mixture_graph().parameters
    }
    with server.publish() as p:
        for name, array in arrays.items():
            p.put_rows(name, array, 64 << 10)  # several experts a block
    return arrays


@pytest.mark.parametrize("budget", [400_000, 100_000])
@pytest.mark.parametrize("normalise", [True, False])
def test_only_the_experts_that_the_router_picks_are_fetched(client, published, budget, normalise):
    graph = mixture_graph(normalise=normalise)
    assert budget < LAYERS * EXPERTS * EXPERT_BYTES / 2
    with client.snapshot() as snapshot, pw.Engine(snapshot, graph, budget=budget, threads=1) as engine:
        before = client.stats()["bytes"]
        rows = experts = 0
        for begin, end in ((0, 3), (3, 4), (4, 6)):  # a prompt, a step of one token, another of two
            got = engine.step(TOKENS[begin:end])
            wanted, picked = reference(published, TOKENS[:end], normalise=normalise)
            # Sums of at most some hundred products of order 1 in float32, as in test_engine.
            assert np.linalg.norm(got - wanted) <= 1e-4 * np.linalg.norm(wanted)
            rows += 4 * WIDTH * len(set(TOKENS[begin:end]))
            experts += sum(len(np.unique(picks[begin:end])) for picks in picked)
        stats = engine.stats()
        streamed = stats["walk_bytes"] - stats["resident_bytes"]
        base = stats["resident_bytes"] + rows + experts * EXPERT_BYTES
        assert base + 3 * streamed <= stats["bytes_fetched"] <= base + 4 * streamed  # a walk ahead at most
        assert 3 * LAYERS * K <= experts < 3 * LAYERS * EXPERTS
        assert stats["held_bytes_max"] <= budget
        if client.transport == "tcp":
            arrived = client.stats()["bytes"] - before
            assert arrived <= base + 4 * streamed


def test_a_budget_below_one_expert_names_the_tensor_and_one_that_would_do(client, published):
    with client.snapshot() as snapshot:
        with pytest.raises(pw.InvalidError, match=r'row of 24576 bytes of "0\.gate".* at least (\d+)') as caught:
            pw.Engine(snapshot, mixture_graph(), budget=20_000)
        least = int(str(caught.value).rpartition("at least ")[2].split()[0])
        with pw.Engine(snapshot, mixture_graph(), budget=least, threads=1) as engine:
            wanted, _ = reference(published, TOKENS)
            got = engine.step(TOKENS)
            assert np.linalg.norm(got - wanted) <= 1e-4 * np.linalg.norm(wanted)


def test_expert_operations_are_checked_as_they_are_added():
    graph = pw.Graph()
    graph.embedding("x", "embed", (10, 8))
    graph.embedding("p", "places", (20, 8), rows="position")
    with pytest.raises(pw.InvalidError, match="known are token, position, first"):
        graph.embedding("t", "types", (2, 8), rows="second")
    graph.matmul("s", "x", "router", (4, 8))
    graph.top_k("r", "s", 2)
    with pytest.raises(pw.InvalidError, match="k is 5"):
        graph.top_k("r2", "s", 5)
    with pytest.raises(pw.InvalidError, match="expected a top_k"):
        graph.expert_matmul("e", "x", "s", "w", (4, 6, 8))
    with pytest.raises(pw.InvalidError, match=r"\(4, out, 8\)"):
        graph.expert_matmul("e", "x", "r", "w", (5, 6, 8))
    graph.expert_matmul("e", "x", "r", "w", (4, 6, 8))
    graph.gelu("g", "e", form="tanh")
    with pytest.raises(pw.InvalidError, match="known are exact, tanh"):
        graph.gelu("g2", "e", form="sigmoid")
    graph.expert_combine("c", "g", "r", "v", (4, 8, 6))
    graph.layer_norm("n", "c", "norm", bias="shift", epsilon=1e-12)
    graph.mean("m", "n")
    graph.normalise("out", "m")
    assert graph.parameters[-2:] == [("shift", (8,)), ("norm", (8,))]
    assert [kind for _, kind in graph.operations[-3:]] == ["layer_norm", "mean", "normalise"]
    with pytest.raises(pw.InvalidError, match="one row only"):
        graph.mean("again", "m")
