"""Publishes and snapshots: what is visible when, over both transports."""

from __future__ import annotations

import threading

import numpy as np
import paramwire as pw
import pytest


@pytest.fixture(params=[False, True], ids=["local", "remote"])
def publish(request, server, client):
    return client.publish if request.param else server.publish


def test_a_publish_is_visible_whole_and_only_after_finish(server, client, publish):
    p = publish(base=None)
    p.put("a", np.zeros(4, np.float32))
    p.put("b", np.ones((2, 3), np.int16))
    with pytest.raises(pw.NotFoundError):
        client.snapshot()
    promised = p.version
    assert p.finish() == promised == server.newest
    assert p.finish() == promised, "finish is idempotent"
    with client.snapshot() as snapshot:
        assert snapshot.version == promised
        assert list(snapshot) == ["a", "b"]
        np.testing.assert_array_equal(snapshot["b"], np.ones((2, 3), np.int16))


def test_an_old_snapshot_keeps_its_version_while_newer_ones_come(client, publish):
    values = [np.full(100, i, np.float32) for i in range(6)]
    with publish() as p:
        p.put("w", values[0])
        p.put("same", values[5])
    with client.snapshot() as old:
        for value in values[1:]:
            with publish() as p:
                p.put("w", value)
        np.testing.assert_array_equal(old["w"], values[0])
        with client.snapshot() as new:
            assert new.version > old.version
            np.testing.assert_array_equal(new["w"], values[5])
            np.testing.assert_array_equal(new["same"], values[5])
            assert new.info("same").version == old.version, "what was not put keeps its block"


def test_an_exception_aborts_and_leaves_the_version(server, client, publish):
    with publish() as p:
        p.put("w", np.zeros(2, np.float32))
    before = server.newest

    def fail_half_way():
        with publish() as p:
            p.put("w", np.ones(2, np.float32))
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert server.newest == before
    np.testing.assert_array_equal(client.fetch("w"), np.zeros(2, np.float32))


def test_a_publish_on_another_base_is_refused(server, client, publish):
    with publish(base=None) as p:
        p.put("w", np.zeros(2, np.float32))
    first = server.newest
    with pytest.raises(pw.StaleError):
        publish(base=None)
    with publish(base=first) as p:
        p.put("w", np.ones(2, np.float32))
    with pytest.raises(pw.StaleError):
        publish(base=first)
    one, two = publish(), publish()
    one.put("w", np.full(2, 3, np.float32))
    two.put("w", np.full(2, 4, np.float32))
    one.finish()
    with pytest.raises(pw.StaleError):
        two.finish()
    np.testing.assert_array_equal(client.fetch("w"), np.full(2, 3, np.float32))


def test_removed_tensors_are_gone_from_the_new_version_only(client, publish):
    with publish() as p:
        p.put_all({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)})
    with client.snapshot() as old:
        with publish() as p:
            p.remove("b")
            with pytest.raises(pw.NotFoundError, match="nobody"):
                p.remove("nobody")
        assert list(client.snapshot()) == ["a"]
        assert "b" in old
        np.testing.assert_array_equal(old["b"], np.zeros(3, np.float32))


def test_arrays_that_share_memory_are_stored_once_and_stay_tied(server, client, publish):
    shared = np.arange(1000, dtype=np.float32)
    with publish() as p:
        p.put_all(
            {
                "a": shared,
                "b": shared[:],
                "x.b": shared.copy(),
                "head": shared[:500],
                "empty": shared[:0],
                "nothing": shared[:0],
            }
        )
    with client.snapshot() as snapshot:
        assert snapshot.info("b").alias_of == "a"
        assert {info.name: info.alias_of for info in snapshot.tensors() if info.alias_of} == {"b": "a"}
        assert server.stats()["raw_bytes"] == 4000 + 4000 + 2000
    with publish() as p:
        p.put("a", shared + 1)
    np.testing.assert_array_equal(client.fetch("b"), shared + 1)
    with publish() as p:
        p.put("b", shared + 2)
    with client.snapshot() as snapshot:
        assert snapshot.info("b").alias_of is None
        np.testing.assert_array_equal(snapshot["a"], shared + 1)
        np.testing.assert_array_equal(snapshot["b"], shared + 2)
        np.testing.assert_array_equal(snapshot["x.b"], shared)


def test_an_alias_without_target_refuses_the_publish(publish):
    p = publish()
    p.put("a", np.zeros(1, np.float32))
    p.alias("b", "nowhere")
    with pytest.raises(pw.InvalidError, match="nowhere"):
        p.finish()


def test_wrong_puts_name_tensor_expected_and_given(publish):
    with publish() as p:
        for arguments, options, wanted in [
            ((np.zeros((2, 3), np.float32),), {"shape": (3, 2)}, r"\(2, 3\).*\(3, 2\)"),
            ((np.zeros(3, np.float32),), {"dtype": "bf16"}, "never cast|ever cast"),
            ((np.zeros(3, np.uint8),), {"dtype": "bf16"}, "need shape="),
            ((np.zeros(3, np.uint8),), {"dtype": "bf16", "shape": 4}, "8 bytes"),
            ((np.zeros(3, np.float32),), {"rows": (0, 3)}, "shape="),
            ((np.zeros(3, np.float32),), {"rows": (0, 3), "shape": (2,)}, "rows"),
            ((np.zeros(3, np.float32),), {"rows": (0, 3), "heads": (1, 0, 1), "shape": 3}, "one"),
            ((np.zeros((0, 4), np.float32),), {"heads": (2, 0, 1), "shape": (0, 4)}, "heads"),
            ((np.array(["x"]),), {}, "no type"),
            ((np.zeros(3, np.float32),), {"dtype": "f7"}, "unknown dtype"),
        ]:
            with pytest.raises(pw.InvalidError, match=wanted):
                p.put("w", *arguments, **options)
        for wrong in ([1.0, 2.0], "text", 1.5, None, object()):
            with pytest.raises(TypeError, match="array or a buffer"):
                p.put("w", wrong)
        for arrays in ([np.zeros(3)], None, np.zeros(3)):
            with pytest.raises(TypeError, match="arrays must be a mapping of names"):
                p.put_all(arrays)
        for name in (3, None, "\ud800"):
            with pytest.raises(TypeError, match="tensor's name must be a str"):
                p.put_all({name: np.zeros(3)})
        for codec in (3, object(), ["planes"]):
            with pytest.raises(TypeError, match="codec must be a str"):
                p.put("w", np.zeros(3), codec=codec)
        p.put("w", np.zeros(3, np.float32))


def test_options_of_a_publish_that_cannot_be_meant_say_what_can(publish):
    for threads, error in ((-1, pw.InvalidError), (2**40, pw.InvalidError), ("2", TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="encode_threads must be a number of threads"):
            publish(encode_threads=threads)
    with pytest.raises(TypeError, match="codec must be a str"):
        publish(codec=3)


def test_any_buffer_can_be_published(client, publish):
    with publish() as p:
        p.put("bytes", b"\x01\x02\x03")
        p.put("view", memoryview(bytearray(b"abcd"))[::2])
        p.put("scalar", np.float64(2.5))
        p.put("flat", np.arange(6, dtype=np.float32), shape=(2, 3))
        assert p.copies == 1
    got = client.fetch_many(["bytes", "view", "scalar", "flat"])
    assert got["bytes"].tolist() == [1, 2, 3]
    assert got["view"].tolist() == [ord("a"), ord("c")]
    assert got["scalar"].shape == ()
    assert got["scalar"] == 2.5
    np.testing.assert_array_equal(got["flat"], np.arange(6, dtype=np.float32).reshape(2, 3))


def test_a_closed_server_refuses_and_closing_again_is_fine(tmp_path):
    server = pw.Server(unix_directory=str(tmp_path / "s"))
    p = server.publish()
    server.close()
    server.close(drain=0)
    with pytest.raises(pw.UnreachableError):
        p.put("w", np.zeros(1, np.float32))
    p.abort()
    with pytest.raises(pw.UnreachableError):
        server.publish()


def test_wait_opens_the_version_when_it_comes(server, client):
    with pytest.raises((pw.NotFoundError, pw.StaleError)):
        client.snapshot(wait=0.0)
    with server.publish() as p:
        p.put("w", np.zeros(1, np.float32))
    version = server.newest
    following = pw.Version(version.epoch, version.counter + 1)
    with pytest.raises(pw.StaleError):
        client.snapshot(following)

    def later():
        with server.publish() as p:
            p.put("w", np.ones(1, np.float32))

    thread = threading.Thread(target=later)
    thread.start()
    with client.snapshot(following, wait=10.0) as snapshot:
        assert snapshot.version == following
    thread.join()
