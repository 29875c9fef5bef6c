"""out= of any layout and library: filled where it is when that is one run of bytes, else through a counted copy."""

from __future__ import annotations

import gc

import dlpack_abi as abi
import numpy as np
import paramwire as pw
import pytest
from dlpack_abi import Producer

BASE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


@pytest.fixture
def snapshot(server, client):
    with server.publish() as p:
        p.put("w", BASE)
        p.put("v", np.arange(6, dtype=np.uint16), dtype="bf16")
    with client.snapshot() as made:
        yield made


def strided_targets():
    return {
        "F order": np.zeros(BASE.shape, np.float32, order="F"),
        "reversed": np.zeros(BASE.shape, np.float32)[::-1],
        "columns": np.zeros((4, 6, 16), np.float32)[:, :, ::2],
        "transposed": np.zeros((8, 6, 4), np.float32).T,
    }


@pytest.mark.parametrize("name", strided_targets())
@pytest.mark.parametrize("through", ["array", "memoryview", "legacy", "versioned"])
def test_a_strided_out_is_filled_and_nothing_beside_it(snapshot, name, through):
    out = strided_targets()[name]
    whole = out if out.base is None else out.base
    target = {
        "array": lambda: out,
        "memoryview": lambda: memoryview(out),
        "legacy": lambda: Producer(out, versioned=False),
        "versioned": lambda: Producer(out),
    }[through]()
    for count, call in enumerate(
        [
            lambda: snapshot.fetch("w", out=target),
            lambda: snapshot.fetch_many({"w": target})["w"],
            lambda: snapshot.fetch_async("w", out=target).wait(),
            lambda: snapshot.fetch_async({"w": target}).wait()["w"],
            lambda: snapshot.client.fetch("w", out=target),
        ],
        start=1,
    ):
        whole[...] = -1
        assert call() is target
        np.testing.assert_array_equal(out, BASE)
        assert np.count_nonzero(whole == -1) == whole.size - BASE.size
        assert snapshot.client.stats()["copies"] == count


def test_a_strided_out_takes_a_part(snapshot):
    out = np.zeros((2, 6, 16), np.float32)[:, :, ::2]
    snapshot.fetch("w", rows=(1, 3), out=out)
    np.testing.assert_array_equal(out, BASE[1:3])


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (np.zeros((8, 6, 4), np.float32).transpose(1, 2, 0), r"float32 \(6, 4, 8\).*f32 \(4, 6, 8\)"),
        (np.zeros((4, 6, 16), np.int32)[:, :, ::2], "int32"),
        (np.zeros((4, 6, 8), ">f4")[::-1], "big-endian"),
        (np.broadcast_to(np.zeros((6, 8), np.float32), (4, 6, 8)), "read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros((6, 8), np.float32), (4, 6, 8), (0, 32, 4)), "share memory"),
    ],
)
def test_a_strided_out_that_can_not_be_filled_is_refused_and_untouched(snapshot, out, text):
    before = out.copy()
    for _ in range(2):
        with pytest.raises(pw.InvalidError, match=text):
            snapshot.fetch("w", out=out)
    np.testing.assert_array_equal(out, before)


def test_a_read_only_target_is_refused(snapshot):
    target = Producer(np.zeros_like(BASE), flags=abi.READ_ONLY)
    with pytest.raises(pw.InvalidError, match="read-only"):
        snapshot.fetch("w", out=target)
    gc.collect()
    assert target.settled
    with pytest.raises(TypeError, match="writable"):
        snapshot.fetch("w", out=Producer(np.zeros_like(BASE)).capsule())


def test_bf16_fills_what_calls_itself_bf16(snapshot):
    words = np.zeros(6, np.uint16)
    snapshot.fetch_many({"v": Producer(words, code=abi.BFLOAT)})
    assert words.tolist() == list(range(6))
    with pytest.raises(pw.InvalidError, match=r"v.* is bf16 .*its target float16"):
        snapshot.fetch_many({"v": Producer(words, code=abi.FLOAT)})
