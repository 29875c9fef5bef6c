"""Mirrors: what they hold is the server's newest version, bit for bit, whichever way the bytes came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import paramwire as pw
import pytest

rng = np.random.default_rng(11)


@pytest.fixture
def server() -> Iterator[pw.Server]:
    with pw.Server(listen=["tcp://127.0.0.1:0"]) as server:
        yield server


@pytest.fixture
def client(server: pw.Server) -> Iterator[pw.Client]:
    with pw.connect(server.address, transport="tcp") as client:
        yield client


class Model:
    """Weights under training: each step moves few of them by little."""

    def __init__(self, server: pw.Server, codec: str = "raw") -> None:
        self.server, self.codec = server, codec
        self.arrays: dict[str, Any] = {
            "a": (rng.standard_normal((512, 400)) * 0.02).astype(ml_dtypes.bfloat16),
            "b": (rng.standard_normal(100_000) * 0.02).astype(np.float32),
            "ids": np.arange(50_000, dtype=np.int32),
            "scale": np.float32(1.0),
            "empty": np.zeros((0, 3), np.float32),
        }
        self.publish(*self.arrays)

    def publish(self, *names: str) -> pw.Version:
        with self.server.publish(codec=self.codec) as publish:
            for name in names:
                if name == "a":
                    publish.put_rows("a", self.arrays["a"], block_bytes=100_000)
                else:
                    publish.put(name, self.arrays[name])
            return publish.finish()

    def step(self, *names: str) -> pw.Version:
        for name in names:
            words = self.arrays[name] = self.arrays[name].copy()
            words = words.reshape(-1).view({2: np.uint16, 4: np.uint32}[words.itemsize])
            words[rng.integers(0, words.size, words.size // 50)] += 1
        return self.publish(*names)


def expect_equal(mirror: pw.Mirror, model: Model, version: pw.Version) -> None:
    assert mirror.version == version
    assert set(mirror.names()) == set(model.arrays)
    for name, array in model.arrays.items():
        held = mirror[name]
        assert held.dtype == np.asarray(array).dtype
        assert held.shape == np.shape(array)
        assert held.tobytes() == np.asarray(array).tobytes(), name


def updated(mirror: pw.Mirror) -> pw.Version:
    """Gives the server all the time that it wants for its deltas."""
    return mirror.update(timeout=60.0)


def follow(client: pw.Client, **options: Any) -> pw.Mirror:
    return pw.Mirror(client, delta_wait=30.0, **options)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_an_update_brings_what_changed_as_deltas_and_every_bit_is_the_servers(server, client, codec):
    model = Model(server, codec)
    mirror = follow(client)
    first = mirror.stats()
    for _ in range(5):
        version = model.step("a", "b")
        assert updated(mirror) == version
        expect_equal(mirror, model, version)
    stats = mirror.stats()
    assert stats["updates"] == 6
    assert (stats["refused"], stats["fetched"], stats["fetched_bytes"]) == (0, first["fetched"], first["fetched_bytes"])
    assert stats["deltas"] == 5 * (len(client.snapshot().blocks("a")) + 1)
    assert stats["saved_bytes"] > 5 * stats["delta_bytes"]
    assert server.stats()["deltas_sent"] == stats["deltas"]


def test_a_client_two_versions_behind_gets_the_difference_to_the_newest(server, client):
    model = Model(server)
    mirror = follow(client)
    model.step("b")
    updated(mirror)
    fetched = mirror.stats()["fetched"]
    model.step("a", "b")
    version = model.step("b")
    assert updated(mirror) == version
    expect_equal(mirror, model, version)
    assert mirror.stats()["fetched"] == fetched


def test_a_version_that_the_server_no_longer_has_costs_a_fetch_and_no_error(server, client):
    model = Model(server)
    mirror = follow(client)
    for _ in range(4):
        version = model.step("b")
    fetched = mirror.stats()["fetched"]
    assert updated(mirror) == version
    expect_equal(mirror, model, version)
    assert mirror.stats()["fetched"] == fetched + 1


def test_what_did_not_change_stays_where_it_is(server, client):
    model = Model(server)
    mirror = follow(client)
    before = mirror["ids"]
    old = mirror["b"]
    was = old.tobytes()
    model.step("b")
    updated(mirror)
    assert mirror["ids"].ctypes.data == before.ctypes.data
    assert old.tobytes() == was, "an array of the version before is left alone"
    assert mirror["b"].tobytes() != was
    assert not mirror["b"].flags.writeable
    assert mirror.tensor_version("ids") < mirror.tensor_version("b") == mirror.version


def test_without_news_an_update_is_one_question(server, client):
    model = Model(server)
    mirror = follow(client)
    before = mirror.stats()
    frames = client.server_stats()["frames"]
    assert mirror.update() == mirror.version
    assert mirror.stats() == before
    # SNAPSHOT, RELEASE of its lease, and the two looks themselves.
    assert client.server_stats()["frames"] <= frames + 4
    expect_equal(mirror, model, mirror.version)


def test_named_tensors_alone_are_followed_under_their_aliases_too(server, client):
    with server.publish() as publish:
        publish.put("w", np.arange(10_000, dtype=np.float32))
        publish.put("other", np.zeros(10, np.float32))
        publish.alias("tied", "w")
    mirror = pw.Mirror(client, ["tied"])
    assert mirror.names() == ["tied"]
    with server.publish() as publish:
        publish.put("w", np.arange(10_000, dtype=np.float32) + 1)
    mirror.update()
    assert mirror["tied"][5] == 6.0
    assert "w" not in mirror
    both = pw.Mirror(client)
    assert both["w"].ctypes.data == both["tied"].ctypes.data
    with pytest.raises(pw.NotFoundError, match="tie"):
        pw.Mirror(client, ["tie"])
    with pytest.raises(pw.NotFoundError, match="other"):
        mirror["other"]
    with pytest.raises(pw.InvalidError, match="empty"):
        pw.Mirror(client, [])


def test_tensors_come_go_and_change_their_shape_between_versions(server, client):
    model = Model(server)
    mirror = follow(client)
    model.arrays["b"] = (rng.standard_normal((3, 7))).astype(np.float16)
    model.arrays["new"] = np.ones(5, np.float32)
    del model.arrays["ids"]
    with server.publish() as publish:
        publish.put("b", model.arrays["b"])
        publish.put("new", model.arrays["new"])
        publish.remove("ids")
        version = publish.finish()
    assert updated(mirror) == version
    expect_equal(mirror, model, version)


def test_a_server_that_makes_no_deltas_is_fetched_from():
    with (
        pw.Server(listen=["tcp://127.0.0.1:0"], delta_limit=0) as server,
        pw.connect(server.address, transport="tcp") as client,
    ):
        model = Model(server)
        mirror = follow(client)
        version = model.step("a")
        assert updated(mirror) == version
        expect_equal(mirror, model, version)
        assert mirror.stats()["deltas"] == 0
        assert "deltas_made" in server.stats()


def test_deltas_past_the_servers_limit_are_not_kept_and_blocks_are_fetched():
    with (
        pw.Server(listen=["tcp://127.0.0.1:0"], delta_limit=1) as server,
        pw.connect(server.address, transport="tcp") as client,
    ):
        model = Model(server)
        mirror = follow(client)
        for _ in range(3):
            version = model.step("a", "b")
            assert updated(mirror) == version
            expect_equal(mirror, model, version)
        assert mirror.stats()["fetched"] > 5


def test_nothing_is_made_before_a_mirror_asks(server, client):
    model = Model(server)
    for _ in range(3):
        model.step("a", "b")
    assert server.stats()["deltas_made"] == server.stats()["deltas_waiting"] == 0


def test_an_update_that_fails_leaves_the_version_before(server, client):
    model = Model(server)
    mirror = follow(client)
    before, held = mirror.version, mirror["b"].tobytes()
    model.step("b")
    with pytest.raises(pw.DeadlineError):
        mirror.update(timeout=0.0)
    assert mirror.version == before
    assert mirror["b"].tobytes() == held
    server.close()
    with pytest.raises(pw.UnreachableError):
        mirror.update(timeout=5.0)
    assert mirror["b"].tobytes() == held


def test_four_threads_read_one_version_each_time_while_another_updates(server, client):
    with server.publish() as publish:
        publish.put("x", np.zeros(50_000, np.int32))
    mirror = follow(client)
    stop = threading.Event()
    torn: list[np.ndarray] = []

    def read() -> None:
        while not stop.is_set():
            array = mirror["x"]
            if array.min() != array.max():
                torn.append(array)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for value in range(1, 20):
            with server.publish() as publish:
                publish.put("x", np.full(50_000, value, np.int32))
            mirror.update()
            assert mirror["x"][0] == value
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not torn


def test_a_restarted_server_is_followed_to_its_own_versions():
    first = pw.Server(listen=["tcp://127.0.0.1:0"])
    address = first.address
    client = pw.connect(address, transport="tcp")
    model = Model(first)
    mirror = follow(client)
    first.close()
    with pw.Server(listen=[address]) as second:
        model.server = second
        model.publish(*model.arrays)
        version = model.step("b")
        assert updated(mirror) == version
        expect_equal(mirror, model, version)
    client.close()
