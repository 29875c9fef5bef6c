"""Fetches into the caller's memory, several at once, in the background; strict names; errors."""

from __future__ import annotations

import gc
import pickle
import threading

import numpy as np
import paramwire as pw
import pytest


@pytest.fixture
def model(server):
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5, dtype=np.int32),
        "c": np.ones((), np.float64),
    }
    with server.publish() as p:
        p.put_all(arrays)
    return arrays


@pytest.fixture
def snapshot(client, model):
    with client.snapshot() as made:
        yield made


def test_out_is_filled_and_returned(snapshot, model):
    for out in (np.empty((3, 4), np.float32), bytearray(48), memoryview(bytearray(48)), np.empty(48, np.uint8)):
        for _ in range(3):  # the first fetch takes another way than the following ones
            assert snapshot.fetch("a", out=out) is out
            assert bytes(out) == model["a"].tobytes()


def test_out_of_another_size_or_kind_is_refused_naming_both(snapshot):
    for _ in range(2):
        with pytest.raises(pw.InvalidError, match=r"48.*44|44.*48"):
            snapshot.fetch("a", out=bytearray(44))
        with pytest.raises(pw.InvalidError, match=r"C-contiguous.*type and shape"):
            snapshot.fetch("a", out=np.empty((4, 6), np.float32)[:, ::2])
        with pytest.raises(pw.InvalidError, match="writable"):
            snapshot.fetch("a", out=bytes(48))
        with pytest.raises(TypeError, match="writable buffer"):
            snapshot.fetch("a", out=[0] * 48)
        snapshot.fetch("a")


def test_one_error_lists_every_name_shape_and_type_that_is_wrong(snapshot, model):
    good = np.full(5, -1, np.int32)
    with pytest.raises(pw.InvalidError) as caught:
        snapshot.fetch_many(
            {"b": good, "missing": None, "a": np.empty((4, 3), np.float32), "c": np.empty((), np.float32)}
        )
    text = str(caught.value)
    assert "missing" in text
    assert '"a" is f32 (3, 4), its target float32 (4, 3)' in text
    assert '"c" is f64 ()' in text
    assert "3 tensors" in text
    assert (good == -1).all(), "nothing is applied"
    with pytest.raises(pw.NotFoundError, match="missing"):
        snapshot.fetch_many(["a", "missing"])
    got = snapshot.fetch_many(["a", "miss.1", "b"], allow_missing=["miss.*"])
    assert list(got) == ["a", "b"]
    np.testing.assert_array_equal(got["a"], model["a"])
    with pytest.raises(pw.InvalidError, match="20 bytes"):
        snapshot.fetch_many({"b": bytearray(16)})


def test_a_wrong_name_comes_with_the_nearest_one(server, client):
    with server.publish() as p:
        p.put("blk.0.attn_q.weight", np.zeros(1, np.float32))
    with client.snapshot() as snapshot:
        with pytest.raises(pw.NotFoundError, match=r"near: blk\.0\.attn_q\.weight"):
            snapshot["model.attn_q.weight"]
        assert "model.attn_q.weight" not in snapshot
        assert 3 not in snapshot


def test_tickets_give_what_fetches_give(snapshot, model):
    one = snapshot.fetch_async("a", rows=(1, 3))
    many = snapshot.fetch_async(["a", "b"])
    out = np.empty(5, np.int32)
    into = snapshot.fetch_async({"b": out})
    np.testing.assert_array_equal(one.wait(), model["a"][1:3])
    np.testing.assert_array_equal(many.wait(timeout=10.0)["b"], model["b"])
    assert into.wait()["b"] is out
    np.testing.assert_array_equal(out, model["b"])
    assert one.done
    assert one.seconds > 0
    np.testing.assert_array_equal(one.wait(timeout=0), model["a"][1:3])
    with pytest.raises(pw.NotFoundError):
        snapshot.fetch_async("nobody")
    with pytest.raises(pw.InvalidError):
        snapshot.fetch_async(["a"], rows=(0, 1))


def test_tickets_may_be_dropped_before_they_are_done(snapshot):
    for _ in range(200):
        snapshot.fetch_async("a")
    gc.collect()
    assert snapshot.fetch_async("b").wait().shape == (5,)


def test_a_deadline_of_zero_is_over_at_once(client, snapshot):
    snapshot.fetch("a")
    with pytest.raises(pw.DeadlineError):
        snapshot.fetch("a", timeout=0)
    with pytest.raises(TypeError, match="timeout"):
        snapshot.fetch("a", timeout="soon")
    with pytest.raises(pw.InvalidError, match="NaN"):
        snapshot.fetch("a", timeout=float("nan"))
    np.testing.assert_array_equal(snapshot.fetch("b", timeout=float("inf")), np.arange(5, dtype=np.int32))


def test_closed_handles_say_so_and_close_twice(client, snapshot):
    assert snapshot.leased
    assert snapshot.client is client
    snapshot.close()
    snapshot.close()
    with pytest.raises(pw.InvalidError, match="closed"):
        snapshot.fetch("a")
    with pytest.raises(pw.InvalidError, match="closed"):
        snapshot.fetch_async("a")
    other = client.snapshot()
    client.close()
    client.close()
    for call in (lambda: other.fetch("a"), client.snapshot, lambda: client.fetch("a"), client.publish):
        with pytest.raises(pw.InvalidError, match="closed"):
            call()


def test_a_snapshot_holds_its_client_open(server, model, transport):
    snapshot = pw.connect(server.address, transport=transport).snapshot()
    gc.collect()
    np.testing.assert_array_equal(snapshot["a"], model["a"])


def test_fetch_of_the_newest_version(server, client, model):
    np.testing.assert_array_equal(client.fetch("a", rows=(0, 2)), model["a"][:2])
    with server.publish() as p:
        p.put("b", np.zeros(7, np.int64))
    out = np.empty(7, np.int64)
    assert client.fetch("b", out=out) is out
    assert not out.any()
    assert set(client.fetch_many(["a", "b"])) == {"a", "b"}
    assert client.newest == server.newest


def test_many_threads_fetch_at_once(client, model, snapshot):
    failures = []

    def work():
        try:
            for _ in range(50):
                np.testing.assert_array_equal(snapshot["a"], model["a"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_another_thread_counts_while_a_fetch_waits(server_process):
    """A fetch from a frozen server holds the GIL for none of its time."""
    server_process.publish({"w": ("f4", (4,))})
    counter = 0
    stop = threading.Event()

    def count():
        nonlocal counter
        while not stop.is_set():
            counter += 1

    with pw.connect(server_process.address, transport="tcp") as client, client.snapshot() as snapshot:
        snapshot["w"]
        server_process.freeze()
        thread = threading.Thread(target=count)
        thread.start()
        before = counter
        with pytest.raises(pw.DeadlineError):
            snapshot.fetch("w", timeout=0.5)
        after = counter
        stop.set()
        thread.join()
        server_process.thaw()
    assert after - before > 10_000


ERRORS = {
    "InvalidError": ("invalid", ValueError),
    "NotFoundError": ("not_found", LookupError),
    "StaleError": ("stale", pw.Error),
    "CorruptError": ("corrupt", pw.Error),
    "BackpressureError": ("backpressure", pw.Error),
    "DeadlineError": ("timeout", TimeoutError),
    "UnreachableError": ("unreachable", ConnectionError),
    "UnavailableError": ("unavailable", pw.Error),
    "InternalError": ("internal", pw.Error),
    "DeniedError": ("denied", PermissionError),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_typed_and_travel(name):
    code, also = ERRORS[name]
    kind = getattr(pw, name)
    assert issubclass(kind, pw.Error)
    assert issubclass(kind, also)
    assert kind.code.replace(" ", "_") == code
    again = pickle.loads(pickle.dumps(kind("text")))
    assert type(again) is kind
    assert str(again) == "text"


def test_versions_order_and_read():
    assert pw.Version(1, 9) < pw.Version(2, 1) < pw.Version(2, 2)
    assert str(pw.Version(3, 17)) == "3.17"


def test_a_pinned_transport_that_can_not_be_had_is_refused_with_the_reason(tmp_path):
    with pw.Server("tcp://127.0.0.1:0") as server:
        assert server.address.startswith("tcp://")
        with pytest.raises(pw.UnavailableError, match="unix socket"):
            pw.connect(server.address, transport="shm")
        with pytest.warns(pw.FallbackWarning):
            client = pw.connect(server.address)
        with client:
            assert client.transport in ("udp", "tcp")
            assert client.rejected[0][0] == "shm"
            assert "unix socket" in client.rejected[0][1]
    with pytest.raises(pw.UnreachableError):
        pw.connect(server.address, timeout=5.0)
    with pytest.raises(pw.InvalidError):
        pw.connect(server.address, transport="pigeon")
    with pytest.raises(pw.InvalidError):
        pw.connect("tcp://:bad:")


def test_available_names_every_seam():
    seams = pw.available()
    assert set(seams) == {"transports", "tiers", "codecs", "backends", "coordinators"}
    assert {"shm", "udp", "tcp", "verbs"} <= {row["name"] for row in seams["transports"]}
    for rows in seams.values():
        for row in rows:
            assert set(row) == {"name", "usable", "reason", "next"}
            assert row["usable"] or row["reason"]
