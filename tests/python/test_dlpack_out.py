"""DLPack out: views and labelled arrays for other libraries, kept until the consumer is done, in whatever thread."""

from __future__ import annotations

import gc
import sys
import threading

import dlpack_abi as abi
import numpy as np
import paramwire as pw
import pytest
from dlpack_abi import Consumer

BASE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


@pytest.fixture
def shm(server):
    with server.publish() as p:
        p.put("w", BASE)
        p.put("bf16", np.arange(6, dtype=np.uint16).reshape(2, 3), dtype="bf16")
        p.put("f8", np.arange(6, dtype=np.uint8), dtype="f8_e5m2")
        p.put("i4", np.arange(3, dtype=np.uint8), dtype="i4", shape=5)
        p.put("empty", np.zeros((0, 4), np.float32))
        p.put("scalar", np.float64(2.5))
        p.put("bool", np.array([True, False]))
    with pw.connect(server.address, transport="shm") as client, client.snapshot() as made:
        yield made


EXPORTED = {
    "w": (abi.FLOAT, 32, (4, 6, 8), (48, 8, 1)),
    "bf16": (abi.BFLOAT, 16, (2, 3), (3, 1)),
    "f8": (abi.F8_E5M2, 8, (6,), (1,)),
    "i4": (abi.INT, 4, (5,), (1,)),
    "empty": (abi.FLOAT, 32, (0, 4), (4, 1)),
    "scalar": (abi.FLOAT, 64, (), ()),
    "bool": (abi.BOOL, 8, (2,), (1,)),
}


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("copy", [None, False, True])
def test_a_view_is_exported_with_its_type_and_as_read_only(shm, name, copy):
    view = shm.view(name)
    assert view.__dlpack_device__() == (abi.CPU, 0)
    taken = Consumer(view.__dlpack__(max_version=(1, 0), copy=copy))
    tensor = taken.tensor
    code, bits, shape, strides = EXPORTED[name]
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (code, bits, 1)
    assert (taken.shape, taken.strides) == (shape, strides)
    assert (tensor.device.type, tensor.device.id) == (abi.CPU, 0)
    assert taken.managed.major == 1
    assert taken.managed.flags == (abi.IS_COPIED if copy else abi.READ_ONLY)
    assert taken.bytes(view.nbytes) == bytes(memoryview(view).cast("B") if name != "empty" else b"")
    taken.delete()
    view.release()


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="numpy takes read-only tensors from 2.1 on")
def test_numpy_takes_a_view_without_a_copy(shm):
    view = shm.view("w")
    array = np.from_dlpack(view)
    np.testing.assert_array_equal(array, BASE)
    assert not array.flags.writeable
    assert np.shares_memory(array, view.array)
    copied = np.from_dlpack(view, copy=True)
    copied[:] = 0
    np.testing.assert_array_equal(array, BASE)


def test_what_is_exported_stays_until_the_consumer_is_done(server, shm):
    view = shm.view("w")
    taken = [Consumer(view.__dlpack__(max_version=(1, 0))) for _ in range(2)]
    with pytest.raises(BufferError, match="2 exported"):
        view.release()
    client = shm.client
    del view
    gc.collect()
    for i in range(6):
        with server.publish() as p:
            p.put("w", BASE + i)
    shm.close()
    client.close()
    assert server.stats()["quarantined_slots"] == 1
    assert all(one.bytes(BASE.nbytes) == BASE.tobytes() for one in taken)
    # The deleters run in threads that hold no GIL while they do.
    threads = [threading.Thread(target=one.delete) for one in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with server.publish() as p:
        p.put("w", BASE)
    assert server.stats()["quarantined_slots"] == 0


def test_leaving_the_block_releases_when_the_last_tensor_is_gone(shm):
    with shm.view("w") as view:
        taken = Consumer(view.__dlpack__(max_version=(1, 0)))
    assert not view.released
    with pytest.raises(BufferError, match="released"):
        view.__dlpack__(max_version=(1, 0))
    taken.delete()
    assert view.released


def test_a_capsule_that_nobody_takes_lets_go(shm):
    view = shm.view("w")
    for copy in (False, True):
        capsule = view.__dlpack__(max_version=(1, 0), copy=copy)
        del capsule
    view.release()
    with pytest.raises(BufferError, match="released"):
        view.__dlpack__(max_version=(1, 0))


def test_what_can_not_be_exported_is_a_buffer_error(shm):
    view = shm.view("w")
    for old in (None, (0, 8)):
        with pytest.raises(BufferError, match=r"max_version=\(1, 0\)"):
            view.__dlpack__(max_version=old)
        taken = Consumer(view.__dlpack__(max_version=old, copy=True))
        assert not taken.versioned
        assert taken.bytes(BASE.nbytes) == BASE.tobytes()
        taken.delete()
    with pytest.raises(BufferError, match="CUDA device 0"):
        view.__dlpack__(max_version=(1, 0), dl_device=(abi.CUDA, 0))
    with pytest.raises(BufferError, match="stream"):
        view.__dlpack__(max_version=(1, 0), stream=1)
    with pytest.raises(TypeError):
        view.__dlpack__((1, 0))
    Consumer(view.__dlpack__(max_version=(1, 3), dl_device=(abi.CPU, 0))).delete()
    view.release()


def test_a_view_is_published_as_it_is(server, shm):
    with server.publish() as p:
        for name in EXPORTED:
            p.put("copy of " + name, shm.view(name))
    with shm.client.snapshot() as snapshot:
        for name in EXPORTED:
            ours, copied = snapshot.info(name), snapshot.info("copy of " + name)
            assert (ours.dtype, ours.shape) == (copied.dtype, copied.shape)
            assert snapshot[name].tobytes() == snapshot["copy of " + name].tobytes()


def test_labelled_arrays_carry_what_numpy_can_not_say(client, server):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes gives numpy bf16")
    typed = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    with pytest.raises((BufferError, TypeError)):
        np.from_dlpack(typed)
    for array, options in [
        (typed, {}),
        (typed.T, {}),
        (typed.view(np.uint16), {"dtype": "bf16"}),
        (typed.view(np.uint8), {"dtype": "bf16", "shape": (2, 3)}),
    ]:
        taken = Consumer(pw.Labelled(array, **options).__dlpack__(max_version=(1, 0)))
        assert (taken.tensor.dtype.code, taken.tensor.dtype.bits) == (abi.BFLOAT, 16)
        assert taken.shape == ((3, 2) if array.shape == (3, 2) else (2, 3))
        assert taken.strides == ((1, 3) if array.shape == (3, 2) else (3, 1))
        assert taken.managed.flags == 0
        taken.delete()
    with server.publish() as p:
        p.put("w", pw.Labelled(typed[:, ::-1]))
    got = client.fetch("w")
    assert got.tobytes() == typed[:, ::-1].tobytes()


def test_labelled_arrays_keep_and_share_their_memory():
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    references = sys.getrefcount(array)
    seen = np.from_dlpack(pw.Labelled(array))
    array[1, 1] = 77
    assert seen[1, 1] == 77
    if seen.flags.writeable:  # numpy before 2.1 takes every tensor as read-only
        seen[0, 0] = 5
        assert array[0, 0] == 5
    taken = [Consumer(pw.Labelled(array).__dlpack__(max_version=version)) for version in (None, (1, 0))]
    assert sys.getrefcount(array) > references
    for one in taken:
        thread = threading.Thread(target=one.delete)
        thread.start()
        thread.join()
    del seen
    gc.collect()
    assert sys.getrefcount(array) == references
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        pw.Labelled(array).__dlpack__()
    copied = Consumer(pw.Labelled(array.T).__dlpack__(max_version=(1, 0), copy=True))
    assert (copied.shape, copied.strides, copied.managed.flags) == ((4, 3), (3, 1), abi.IS_COPIED)
    assert copied.bytes(48) == array.T.tobytes()
    copied.delete()


def test_labels_that_can_not_be_are_refused():
    for array, options, text in [
        (np.arange(3.0), {"dtype": "f32"}, "nothing is ever cast"),
        (np.zeros(4, "u1"), {"dtype": "bf16"}, "need shape="),
        (np.zeros(5, "u1"), {"dtype": "bf16", "shape": 2}, "has 5 bytes"),
        (np.zeros(8, "u1")[::2], {"dtype": "bf16", "shape": 2}, "C-contiguous"),
        (np.zeros(4, ">f4"), {}, "big-endian"),
        (np.zeros(4, "f4"), {"shape": 4}, "reshape"),
        (np.zeros(3, "U4"), {}, "no type"),
    ]:
        with pytest.raises(pw.InvalidError, match=text):
            pw.Labelled(array, **options)
    with pytest.raises(TypeError):
        pw.Labelled([1, 2])
