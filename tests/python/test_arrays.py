"""Layouts, scalars, element types and byte order: what is published comes back, over both transports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import paramwire as pw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BASE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.asfortranarray(BASE[0, :2, :3]), id="F order"),
        pytest.param(BASE.transpose(2, 0, 1), id="transposed"),
        pytest.param(BASE[::2], id="step 2"),
        pytest.param(BASE[:, :, 3], id="column"),
        pytest.param(BASE[1:3, 2:5, 1:7], id="sub-block"),
        pytest.param(BASE[::-1], id="reversed"),
        pytest.param(np.broadcast_to(np.float32(3), (2, 5)), id="broadcast"),
    ],
)
def test_any_layout_is_published_as_its_logical_values(server, client, array):
    with client.publish() as p:
        p.put("remote", array)
        assert p.copies == 1
    with server.publish() as p:
        p.put("local", array)
    for name in ("remote", "local"):
        got = client.fetch(name)
        assert got.flags.c_contiguous
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, np.ascontiguousarray(array))
    assert client.stats()["copies"] == server.stats()["copies"] == 1


def test_c_order_is_read_where_it_is(server, client):
    with server.publish() as p:
        p.put("whole", BASE)
        p.put("first rows", BASE[1:3])
        p.put_rows("rows", BASE, 400)
        assert p.copies == 0
    assert server.stats()["copies"] == 0
    np.testing.assert_array_equal(client.fetch("first rows"), BASE[1:3])
    np.testing.assert_array_equal(client.fetch("rows"), BASE)


def test_scalars_and_empties_keep_shape_and_dtype(server, client):
    shapes = [(), (1,), (0,), (0, 4), (3, 0, 2), (1, 1, 1)]
    arrays = {f"{dtype} {shape}": np.ones(shape, dtype) for shape in shapes for dtype in ("f4", "i8", "?")}
    with server.publish() as p:
        p.put_all(arrays)
    with client.snapshot() as snapshot:
        assert set(snapshot) == set(arrays)
        for name, array in arrays.items():
            got = snapshot[name]
            assert (got.shape, got.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(got, array)
            assert snapshot.info(name).shape == array.shape
            assert snapshot.info(name).alias_of is None


def test_big_endian_arrays_publish_their_values(server, client):
    arrays = {t: np.array([1, 2, 300], t) for t in (">f4", ">f8", ">f2", ">i2", ">u8", ">c8")}
    with server.publish() as p:
        for name, array in arrays.items():
            p.put(name, array)
        assert p.copies == len(arrays)
    for name, array in arrays.items():
        got = client.fetch(name)
        assert got.dtype.isnative
        np.testing.assert_array_equal(got, array)
    with pytest.raises(pw.InvalidError, match="big-endian"):
        client.fetch(">f4", out=np.empty(3, ">f4"))


NUMPY_TYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "?", "c8", "c16"]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_numpy_types_come_back_bit_for_bit(server, client, rng, dtype):
    array = (rng.integers(0, 2, (3, 5)) if dtype == "?" else rng.integers(-1000, 1000, (3, 5))).astype(dtype)
    with server.publish() as p:
        p.put("w", array)
    got = client.fetch("w")
    assert got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()


LABELLED = [
    ("bf16", "bfloat16", 2),
    ("f8_e4m3", "float8_e4m3fn", 1),
    ("f8_e5m2", "float8_e5m2", 1),
    ("f8_e8m0", "float8_e8m0fnu", 1),
]


@pytest.mark.parametrize(("label", "name", "size"), LABELLED)
def test_types_that_numpy_lacks_are_labelled_bytes(server, client, label, name, size):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes gives numpy these types")
    typed = np.arange(1, 13).astype(getattr(ml_dtypes, name)).reshape(3, 4)
    words = typed.view(np.uint16 if size == 2 else np.uint8)
    with server.publish() as p:
        p.put("typed", typed)
        p.put("words", words, dtype=label)
        p.put("bytes", words.view(np.uint8).reshape(-1), dtype=label, shape=(3, 4))
    with client.snapshot() as snapshot:
        for tensor in ("typed", "words", "bytes"):
            assert snapshot.info(tensor).dtype == label
            got = snapshot[tensor]
            assert got.dtype == typed.dtype
            assert got.shape == (3, 4)
            assert got.tobytes() == typed.tobytes()
        outs = {"typed": np.empty_like(typed), "words": np.empty_like(words), "bytes": np.empty(12 * size, np.uint8)}
        snapshot.fetch_many(outs)
        assert all(out.tobytes() == typed.tobytes() for out in outs.values())


def test_packed_4_bit_types_stay_packed(server, client):
    packed = np.array([0x21, 0x43, 0x05], np.uint8)
    with server.publish() as p:
        p.put("w", packed, dtype="i4", shape=(5,))
        p.put_rows("rows", np.arange(9, dtype=np.uint8), 2, dtype="u4", shape=(6, 3))
    with client.snapshot() as snapshot:
        info = snapshot.info("w")
        assert (info.dtype, info.shape, info.nbytes) == ("i4", (5,), 3)
        np.testing.assert_array_equal(snapshot["w"], packed)
        assert snapshot.info("rows").blocks > 1
        np.testing.assert_array_equal(snapshot["rows"], np.arange(9, dtype=np.uint8))


def test_without_ml_dtypes_labelled_types_are_integers(server):
    """In a process where ml_dtypes can't be imported."""
    program = f"""
import sys
sys.modules["ml_dtypes"] = None
import numpy as np, paramwire as pw
with pw.connect({server.address!r}) as client:
    with client.publish() as p:
        p.put("bf16", np.arange(4, dtype=np.uint16), dtype="bf16")
        p.put("f8", np.arange(4, dtype=np.uint8), dtype="f8_e4m3")
    got = client.fetch_many(["bf16", "f8"])
    print(got["bf16"].dtype, got["f8"].dtype, got["bf16"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split(maxsplit=2) == ["uint16", "uint8", "[0, 1, 2, 3]\n"], done.stderr


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranges_equal_numpy_slices_whatever_the_blocks_are(server, client, data):
    heads = data.draw(st.integers(1, 6), label="heads")
    rows = heads * data.draw(st.integers(1, 9), label="rows of a head")
    columns = data.draw(st.integers(1, 20), label="columns")
    block_bytes = data.draw(st.integers(1, 2000), label="block_bytes")
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    with server.publish() as p:
        p.put_rows("w", array, block_bytes)
    begin = data.draw(st.integers(0, rows - 1), label="begin")
    end = data.draw(st.integers(begin + 1, rows), label="end")
    first = data.draw(st.integers(0, heads - 1), label="first head")
    last = data.draw(st.integers(first + 1, heads), label="last head")
    with client.snapshot() as snapshot:
        np.testing.assert_array_equal(snapshot["w"], array)
        np.testing.assert_array_equal(snapshot.fetch("w", rows=(begin, end)), array[begin:end])
        size = rows // heads
        np.testing.assert_array_equal(
            snapshot.fetch("w", heads=(heads, first, last)), array[first * size : last * size]
        )
        assert sum(block.nbytes for block in snapshot.blocks("w")) == array.nbytes


def test_parts_are_put_and_fetched_alone(server, client):
    array = np.arange(9 * 4 * 5, dtype=np.float32).reshape(36, 5)
    with server.publish() as p:
        for head in range(9):
            p.put("q", array[head * 4 : head * 4 + 4], shape=(36, 5), heads=(9, head, head + 1))
    with client.snapshot() as snapshot:
        assert snapshot.info("q").blocks == 9
        np.testing.assert_array_equal(snapshot.fetch("q", heads=(9, 2, 5)), array[8:20])
        block = snapshot.blocks("q")[3]
        np.testing.assert_array_equal(snapshot.fetch_block(block.id), array[12:16])
        for wrong in [
            {"rows": (5, 5)},
            {"rows": (0, 37)},
            {"heads": (7, 0, 1)},
            {"rows": (0, 1), "heads": (9, 0, 1)},
            {"rows": (-1, 2)},
            {"rows": 3},
        ]:
            with pytest.raises((pw.InvalidError, TypeError)):
                snapshot.fetch("q", **wrong)
