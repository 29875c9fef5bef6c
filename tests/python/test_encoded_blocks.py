"""Tensors published with a codec: what is fetched is bit for bit what was put, or its cast, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import paramwire as pw
import pytest

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
# verbs has the same reader as these, and its rows in tests/softroce.
TRANSPORTS = ("shm", "tcp", "udp")
rng = np.random.default_rng(5)


def weights(count: int, dtype: Any = np.float32) -> np.ndarray:
    """As trained ones: few exponents, mantissas of noise."""
    return (rng.standard_normal(count) * 0.02).astype(dtype)


@pytest.fixture
def server() -> Iterator[pw.Server]:
    with pw.Server(listen=["tcp://127.0.0.1:0", "unix:auto"]) as server:
        yield server


@pytest.fixture(params=TRANSPORTS)
def client(request: pytest.FixtureRequest, server: pw.Server) -> Iterator[pw.Client]:
    with pw.connect(server.address, transport=request.param) as client:
        yield client


def publish(server: pw.Server, codec: str, **arrays: Any) -> pw.Publish:
    with server.publish(codec=codec) as publish:
        publish.put_all(arrays)
    return publish


@pytest.mark.parametrize("codec", ["planes", "lz4"])
def test_a_lossless_codec_gives_every_bit_back(server, client, codec):
    arrays = {
        "w": weights(700_000),
        "half": weights(333_333, np.float16),
        "brain": weights(100_001, ml_dtypes.bfloat16),
        "zeros": np.zeros(300_000, np.float32),
        "nan": np.full(70_000, np.nan, np.float32),
        "ids": np.arange(100_000, dtype=np.int64),
        "noise": rng.integers(0, 256, 100_000, np.uint8),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 7), np.float32),
        "few": weights(3),
    }
    publish(server, codec, **arrays)
    fetched = client.snapshot().fetch_many(list(arrays))
    for name, array in arrays.items():
        assert fetched[name].dtype == array.dtype
        assert fetched[name].tobytes() == np.asarray(array).tobytes(), name


def test_what_travels_is_what_is_stored_and_fewer_bytes_than_raw(server, client):
    w = weights(4 * MIB)
    made = publish(server, "bf16+planes", w=w)
    assert made.given_bytes == w.nbytes
    assert made.stored_bytes < 0.70 * w.nbytes / 2
    got = client.fetch("w")
    assert got.dtype == ml_dtypes.bfloat16
    assert got.tobytes() == w.astype(ml_dtypes.bfloat16).tobytes()
    stats = client.stats()
    assert stats["decoded_bytes"] == got.nbytes
    assert stats["encoded_bytes"] == pytest.approx(made.stored_bytes, rel=1e-6)
    # The index once more, whole extents, and their table.
    assert made.stored_bytes <= stats["wire_bytes"] <= 1.01 * made.stored_bytes + 4 * CHUNK


def test_rows_of_an_encoded_tensor_cost_their_chunks_alone(server, client):
    w = weights(8_000_000).reshape(1000, 8000)
    publish(server, "planes", w=w)
    snapshot = client.snapshot()
    for begin, end in [(0, 1), (1, 2), (999, 1000), (300, 333), (0, 1000)]:
        before = client.stats()["wire_bytes"]
        got = snapshot.fetch("w", rows=(begin, end))
        assert got.tobytes() == w[begin:end].tobytes(), (begin, end)
        moved = client.stats()["wire_bytes"] - before
        # Partial chunks and extents at both ends, the index, and tables.
        assert moved <= (end - begin) * 8000 * 4 + 4 * CHUNK + 3 * 8 * KIB, (begin, end)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_the_number_of_decoding_threads_changes_no_byte(server, threads):
    arrays = {f"t{i}": weights(1 + i * 77_777) for i in range(12)}
    publish(server, "planes", **arrays)
    with pw.connect(server.address, transport="tcp", decode_threads=threads) as client:
        for name, got in client.snapshot().fetch_many(list(arrays)).items():
            assert got.tobytes() == arrays[name].tobytes()


def test_encoded_and_raw_tensors_come_together_in_one_fetch(server, client):
    a, b, c = weights(300_000), weights(300_000), weights(50)
    with server.publish() as publish:
        publish.put("a", a, codec="planes")
        publish.put("b", b)
        publish.put("c", c, codec="planes")
    got = client.snapshot().fetch_many(["a", "b", "c"])
    assert [got[k].tobytes() for k in "abc"] == [a.tobytes(), b.tobytes(), c.tobytes()]


def test_a_publish_of_another_process_encodes_before_it_sends(server, client):
    w = weights(2 * MIB)
    with client.publish(codec="fp16+planes", encode_threads=2) as made:
        made.put_rows("w", w.reshape(512, -1), block_bytes=MIB)
    assert made.stored_bytes < w.nbytes * 0.46
    assert client.fetch("w").tobytes() == w.astype(np.float16).tobytes()
    assert (
        client.snapshot().fetch("w", rows=(100, 300)).tobytes()
        == w.reshape(512, -1)[100:300].astype(np.float16).tobytes()
    )


def test_a_view_of_an_encoded_block_says_that_fetch_decodes(server):
    publish(server, "planes", w=weights(100_000))
    with (
        pw.connect(server.address, transport="shm") as client,
        pytest.raises(pw.UnavailableError, match=r"stored as planes.*fetch"),
    ):
        client.snapshot().view("w")


def test_values_that_a_cast_makes_infinite_are_counted(server):
    w = np.array([1e30, -1e30, 1.0, np.inf], np.float32)
    assert publish(server, "fp16", w=w).overflowed == 2


@pytest.mark.parametrize("codec", ["zip", "planes+bf16", "", "bf16+", "fp8"])
def test_an_unknown_codec_names_the_known_ones(server, codec):
    with pytest.raises(pw.InvalidError, match="planes"):
        server.publish(codec=codec)


def test_tensors_that_do_not_get_smaller_are_stored_raw(server, client):
    noise = rng.integers(0, 256, 200_000, np.uint8)
    assert publish(server, "planes", noise=noise).stored_bytes == noise.nbytes
    assert client.fetch("noise").tobytes() == noise.tobytes()
    assert client.stats()["decoded_bytes"] == 0
