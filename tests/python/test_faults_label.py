"""What is read is what was published, and the version that stands on it is the one that the bytes are of."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import paramwire as pw
import pytest

SEED = 20240611


def test_random_bytes_come_back_with_their_hashes(server, client, transport):
    random = np.random.default_rng(SEED)
    sizes = (1, 63, 64, 4096, 65_535, 65_536, 65_537, 1 << 20, (1 << 22) + 1)
    published = {f"t{size}": random.integers(0, 256, size, dtype=np.uint8) for size in sizes}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in published.items()}
    with client.publish() as p:
        p.put_all(published)
    for data in published.values():
        data[:] = 0  # the bytes must come from the server
    outs = {name: np.full(len(data), 0xA5, np.uint8) for name, data in published.items()}
    with pw.connect(server.address, transport=transport) as other, other.snapshot() as snapshot:
        assert {n: hashlib.sha256(d).hexdigest() for n, d in snapshot.fetch_many(list(hashes)).items()} == hashes
        snapshot.fetch_many(outs)
        assert {n: hashlib.sha256(d).hexdigest() for n, d in outs.items()} == hashes, f"seed {SEED}"


def test_before_the_first_publish_there_is_no_version(server, client):
    assert server.newest is None
    assert client.newest is None
    with pytest.raises(pw.NotFoundError):
        client.snapshot()
    with pytest.raises(pw.NotFoundError):
        client.fetch("w")
    with client.publish() as p:
        p.put("w", np.zeros(3))
        assert client.stats()["newest"] is None
        with pytest.raises(pw.NotFoundError):
            client.snapshot()
    assert client.snapshot().version == p.version == server.newest


def test_the_label_is_the_version_of_the_bytes_while_somebody_publishes(server, client):
    """Every tensor holds the counter of its version; a label read after the work would be newer than the bytes."""
    names = ["a", "b", "c"]
    over = threading.Event()

    def publish_once() -> None:
        with server.publish() as p:
            p.put_all({name: np.full(40_000, p.version.counter, dtype=np.uint64) for name in names})

    def publish_often() -> None:
        while not over.is_set():
            publish_once()

    publish_once()
    publisher = threading.Thread(target=publish_often)
    publisher.start()
    try:
        seen = set()
        for _ in range(40):
            with client.snapshot() as snapshot:
                got = snapshot.fetch_many(names)
                counter = snapshot.version.counter
                assert all((array == counter).all() for array in got.values())
                assert {snapshot.info(name).version.counter for name in names} == {counter}
                assert snapshot.version.epoch == server.epoch
                seen.add(counter)
            mixed = client.fetch_many(names)
            assert len({int(value) for array in mixed.values() for value in (array.min(), array.max())}) == 1
        assert len(seen) > 5, "nothing was published meanwhile: nothing was tested"
    finally:
        over.set()
        publisher.join()


@pytest.mark.parametrize("how", ["raises", "refused put", "alias", "stale base", "aborted"])
def test_a_publish_that_failed_leaves_label_and_bytes(server, client, how):
    with client.publish() as p:
        p.put("w", np.arange(1000))
    before = p.version
    snapshot = client.snapshot()

    def fail() -> None:
        if how == "stale base":
            client.publish(base=(before.epoch, before.counter - 1))
        with client.publish() as failing:
            failing.put("w", np.zeros(1000, dtype=np.int64))
            if how == "raises":
                raise KeyError("of the caller")
            if how == "refused put":
                failing.put("w", np.zeros(1000, dtype=np.int64), rows=(0, 1000), shape=(10,))
            if how == "alias":
                failing.alias("v", "nothing")
            if how == "aborted":
                failing.abort()
                raise KeyError("so that both ways raise")

    with pytest.raises((KeyError, pw.Error)):
        fail()
    assert server.newest == before == client.snapshot().version
    for source in (client.snapshot(), snapshot):
        np.testing.assert_array_equal(source["w"], np.arange(1000))
    with client.publish() as p:
        p.put("w", np.ones(3))
    assert p.version.counter == before.counter + 1, "the failed one used up no number"
