"""Blocks that are stored encoded, by RDMA READs: fewer bytes, the same values, and deltas for a mirror."""

from __future__ import annotations

import numpy as np
import paramwire as pw
import pytest
from paramwire import codec

SHAPE = (1000, 521)  # about 1 MiB as bf16: several chunks, the last one short


@pytest.fixture
def weights() -> np.ndarray:
    return (np.random.default_rng(20).standard_normal(SHAPE) * 0.04).astype(np.float32)


@pytest.fixture
def wanted(weights: np.ndarray) -> np.ndarray:
    return bits(codec.cast(weights, "bf16"))


def bits(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def publish(client: pw.Client, array: np.ndarray, dtype: str) -> None:
    with client.publish(codec="bf16+planes") as p:
        p.put("w", array, dtype=dtype)


def test_encoded_blocks_are_read_in_fewer_bytes_and_give_the_cast_bit_for_bit(server, connect, weights, wanted):
    client = connect(server)
    publish(client, weights, "f32")
    with client.snapshot() as snapshot:
        assert np.array_equal(bits(snapshot.fetch("w")), wanted)
        stats = client.stats()
        assert list(stats["by_transport"]) == ["verbs"]
        assert stats["by_transport"]["verbs"]["bytes"] < 0.75 * wanted.nbytes
        assert np.array_equal(bits(snapshot.fetch("w", rows=(500, 507))), wanted[500:507])
        assert client.stats()["corrupt"] == 0


def test_a_mirror_follows_encoded_blocks_by_deltas(server, connect, weights, wanted):
    client = connect(server)
    publish(client, weights, "f32")
    mirror = pw.Mirror(client, delta_wait=60.0)
    assert np.array_equal(bits(mirror["w"]), wanted)
    before = mirror.stats()
    for step in range(1, 3):
        wanted[step :: 100] += 1
        publish(client, wanted, "bf16")
        mirror.update(timeout=120.0)
        assert np.array_equal(bits(mirror["w"]), wanted)
    stats = mirror.stats()
    assert stats["fetched"] == before["fetched"]
    assert stats["deltas"] > 0
    assert stats["saved_bytes"] > stats["delta_bytes"]
