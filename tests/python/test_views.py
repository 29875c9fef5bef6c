"""Zero-copy views: read-only buffers that keep what they show."""

from __future__ import annotations

import gc

import numpy as np
import paramwire as pw
import pytest

VALUES = np.arange(30_000, dtype=np.float32).reshape(100, 300)


@pytest.fixture
def shm(server):
    with server.publish() as p:
        p.put("w", VALUES)
        p.put_rows("rows", VALUES, 12_000)
        p.put("bf16", np.arange(6, dtype=np.uint16).reshape(2, 3), dtype="bf16")
        p.put("i4", np.arange(3, dtype=np.uint8), dtype="i4", shape=5)
        p.put("empty", np.zeros((0, 4), np.float32))
        p.put("scalar", np.float64(2.5))
    with pw.connect(server.address, transport="shm") as client:
        yield client


def test_a_view_is_a_read_only_buffer_of_the_tensor(shm):
    with shm.snapshot() as snapshot, snapshot.view("w") as view:
        assert (view.dtype, view.shape, view.nbytes) == ("f32", (100, 300), VALUES.nbytes)
        np.testing.assert_array_equal(view.array, VALUES)
        np.testing.assert_array_equal(np.asarray(view), VALUES)
        memory = memoryview(view)
        assert (memory.format, memory.shape, memory.readonly, memory.c_contiguous) == ("f", (100, 300), True, True)
        array = view.array
        assert not array.flags.writeable
        with pytest.raises(ValueError, match=r"(?i)writeable"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_check_runs_once(shm):
    with shm.snapshot() as snapshot:
        first = snapshot.view("w")
        again = snapshot.view("w", rows=(3, 5))
        assert first.verified_now
        assert not again.verified_now
        np.testing.assert_array_equal(again.array, VALUES[3:5])


def test_a_view_lies_in_one_block(shm):
    with shm.snapshot() as snapshot:
        np.testing.assert_array_equal(snapshot.view("rows", rows=(0, 10)).array, VALUES[:10])
        np.testing.assert_array_equal(snapshot.view("rows", rows=(12, 13)).array, VALUES[12:13])
        with pytest.raises(pw.InvalidError, match="spans"):
            snapshot.view("rows")


def test_types_and_shapes_that_buffers_lack(shm):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes gives numpy bf16")
    with shm.snapshot() as snapshot:
        view = snapshot.view("bf16")
        assert view.array.dtype == ml_dtypes.bfloat16
        assert memoryview(view).format == "H"
        assert memoryview(view).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert memoryview(snapshot.view("i4")).tolist() == [0, 1, 2]
        assert snapshot.view("empty").array.shape == (0, 4)
        assert memoryview(snapshot.view("empty")).nbytes == 0
        assert snapshot.view("scalar").array[()] == 2.5


def test_release_refuses_while_arrays_live_and_frees_afterwards(shm):
    with shm.snapshot() as snapshot:
        view = snapshot.view("w")
        array = view.array
        part = array[3:7]
        del array
        with pytest.raises(BufferError, match="1 exported"):
            view.release()
        np.testing.assert_array_equal(part, VALUES[3:7])
        del part
        view.release()
        view.release()
        assert view.released
        with pytest.raises((BufferError, ValueError)):
            view.array  # noqa: B018
        with pytest.raises(BufferError):
            memoryview(view)


def test_leaving_the_block_releases_when_the_last_array_is_gone(shm):
    with shm.snapshot() as snapshot:
        with snapshot.view("w") as view:
            array = view.array
        assert not view.released
        np.testing.assert_array_equal(array, VALUES)
        del array
        gc.collect()
        assert view.released


def test_arrays_keep_their_view_alive(shm):
    array = shm.snapshot().view("w").array
    gc.collect()
    np.testing.assert_array_equal(array, VALUES)


def test_a_view_stays_when_everything_else_is_closed(server, shm):
    snapshot = shm.snapshot()
    view = snapshot.view("w")
    for i in range(6):
        with server.publish() as p:
            p.put("w", VALUES + i)
    snapshot.close()
    shm.close()
    np.testing.assert_array_equal(view.array, VALUES)
    server.close()
    np.testing.assert_array_equal(view.array, VALUES)
    view.release()


def test_tcp_has_no_views_and_says_what_to_do(server, shm):
    with (
        pw.connect(server.address, transport="tcp") as client,
        client.snapshot() as snapshot,
        pytest.raises(pw.UnavailableError, match="fetch"),
    ):
        snapshot.view("w")
