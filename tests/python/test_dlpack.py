"""DLPack in: what any producer may legally hand over is published and filled, what is not is refused; every
capsule is taken once and every deleter called once, also on the way to an error."""

from __future__ import annotations

import datetime
import gc

import dlpack_abi as abi
import numpy as np
import paramwire as pw
import pytest
from dlpack_abi import Producer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

BASE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
LAYOUTS = {
    "C order": BASE,
    "F order": np.asfortranarray(BASE[0]),
    "transposed": BASE.transpose(2, 0, 1),
    "step 2": BASE[::2],
    "column": BASE[:, :, 3],
    "reversed": BASE[::-1],
    "reversed twice": BASE[::-1, :, ::-3],
    "broadcast": np.broadcast_to(np.float32(3), (2, 5)),
    "scalar": np.array(2.5),
    "one": np.ones((1, 1)),
    "empty": np.zeros((0,), np.int16),
    "empty in the middle": np.zeros((3, 0, 2), np.float64),
}


def published(server, client, array, **options):
    with server.publish() as p:
        p.put("w", array, **options)
    return client.fetch("w")


@pytest.mark.parametrize("versioned", [False, True], ids=["legacy", "versioned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_published_as_its_logical_values(server, client, layout, versioned):
    array = LAYOUTS[layout]
    producer = Producer(array, versioned=versioned)
    got = published(server, client, producer)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)
    gc.collect()
    assert len(producer.given) == 1
    assert producer.settled
    assert server.stats()["copies"] == (0 if array.flags.c_contiguous else 1)


@pytest.mark.parametrize("versioned", [False, True], ids=["legacy", "versioned"])
@pytest.mark.parametrize(
    "array", [np.arange(7.0), np.arange(6.0).reshape(2, 3), np.array(1.5)], ids=["1-D", "2-D", "0-D"]
)
def test_null_strides_mean_row_major(server, client, array, versioned):
    producer = Producer(array, versioned=versioned, null_strides=True)
    np.testing.assert_array_equal(published(server, client, producer), array)
    assert server.stats()["copies"] == 0


def test_a_byte_offset_is_added_to_the_pointer(server, client):
    words = np.arange(32, dtype=np.int32)
    np.testing.assert_array_equal(published(server, client, Producer(words[5:9], offset=20)), words[5:9])


def test_strides_of_axes_that_are_never_walked_are_not_looked_at(server, client):
    huge = 2**62
    one = Producer(np.arange(3.0).reshape(3, 1), strides=(1, huge))
    np.testing.assert_array_equal(published(server, client, one), [[0], [1], [2]])
    empty = Producer(np.zeros((0, 4)), strides=(huge, -huge))
    assert published(server, client, empty).shape == (0, 4)


TYPED = [
    (abi.BOOL, "?", "bool"),
    (abi.FLOAT, "f2", "f16"),
    (abi.COMPLEX, "c8", "c64"),
    (abi.BFLOAT, "u2", "bf16"),
    (abi.F8_E4M3FN, "u1", "f8_e4m3"),
    (abi.F8_E5M2, "u1", "f8_e5m2"),
    (abi.F8_E8M0, "u1", "f8_e8m0"),
]


@pytest.mark.parametrize(("code", "dtype", "label"), TYPED)
@pytest.mark.parametrize("versioned", [False, True], ids=["legacy", "versioned"])
def test_types_keep_their_label(server, client, code, dtype, label, versioned):
    words = np.array([[0, 1], [1, 0]], dtype)
    with server.publish() as p:
        p.put("plain", Producer(words, code=code, versioned=versioned))
        p.put("strided", Producer(words.T, code=code, versioned=versioned))
    with client.snapshot() as snapshot:
        assert snapshot.info("plain").dtype == snapshot.info("strided").dtype == label
        assert snapshot["plain"].tobytes() == words.tobytes()
        assert snapshot["strided"].tobytes() == words.T.tobytes()
        again = np.empty_like(words)
        target = Producer(again, code=code, versioned=versioned)
        assert snapshot.fetch_many({"plain": target})["plain"] is target
        assert again.tobytes() == words.tobytes()
        other = abi.F8_E5M2 if code != abi.F8_E5M2 else abi.F8_E4M3FN
        if words.itemsize == 1 and label != "bool":
            with pytest.raises(pw.InvalidError, match="its target"):
                snapshot.fetch_many({"plain": Producer(again, code=other)})
    with server.publish() as p, pytest.raises(pw.InvalidError, match="nothing is ever cast"):
        p.put("w", Producer(words, code=code), dtype="i8" if label != "i8" else "u8")


def test_packed_4_bit_types_keep_their_shape(server, client):
    packed = np.array([0x21, 0x43, 0x05], np.uint8)
    four = {"code": abi.INT, "bits": 4, "shape": (5,), "strides": (1,)}
    with server.publish() as p:
        p.put("w", Producer(packed, **four))
    with client.snapshot() as snapshot:
        assert (snapshot.info("w").dtype, snapshot.info("w").shape) == ("i4", (5,))
        np.testing.assert_array_equal(snapshot["w"], packed)
    with server.publish() as p:
        with pytest.raises(pw.InvalidError, match="padded"):
            p.put("w", Producer(packed, **four, flags=abi.PADDED))
        with pytest.raises(pw.InvalidError, match="row-major"):
            p.put("w", Producer(packed, **(four | {"strides": (2,)})))


REFUSED = {
    "of a type without a name here": ({"code": abi.F8_E4M3}, pw.InvalidError, "float8_e4m3 .code 8, 32 bits, 1 lane"),
    "of an unknown type": ({"code": 99}, pw.InvalidError, "unknown .code 99"),
    "of vectors": ({"lanes": 4}, pw.InvalidError, "4 lanes"),
    "of odd width": ({"bits": 24}, pw.InvalidError, "24 bits"),
    "with a negative axis": ({"shape": (3, -1)}, pw.InvalidError, "axis 1 .* size -1"),
    "with too many axes": ({"shape": (1,) * 9, "strides": (1,) * 9}, pw.InvalidError, "9 axes"),
    "with a negative count of axes": ({"ndim": -1}, pw.InvalidError, "-1 axes"),
    "without a shape": ({"shape": (2, 2), "null_shape": True}, pw.InvalidError, "no shape"),
    "without data": ({"data": None}, pw.InvalidError, "null pointer"),
    "with strides out of this world": ({"strides": (2**61, 1)}, pw.InvalidError, "stride"),
    "with strides that add up to too much": ({"strides": (2**60, 2**60)}, pw.InvalidError, "address space"),
    "of a later major version": ({"version": (2, 0)}, pw.InvalidError, "DLPack 2.0"),
    "on a GPU that only the tensor names": ({"tensor_device": (abi.CUDA, 1)}, pw.UnavailableError, "CUDA device 1"),
}


@pytest.mark.parametrize("versioned", [False, True], ids=["legacy", "versioned"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_is_refused_once_it_was_taken_and_its_deleter_runs(server, name, versioned):
    options, error, text = REFUSED[name]
    if "version" in options and not versioned:
        pytest.skip("legacy capsules have no version")
    options = dict(options)
    null_shape = options.pop("null_shape", False)
    producer = Producer(np.ones((3, 2), np.float32), versioned=versioned, **options)
    if null_shape:
        producer.tensor.shape = None
    with server.publish() as p:
        with pytest.raises(error, match=text) as caught:
            p.put("layer.7", producer)
        assert 'tensor "layer.7"' in str(caught.value) or "axis" in text
        p.put("fine", np.zeros(1))
    del caught
    gc.collect()
    assert len(producer.given) == 1
    assert producer.settled


def test_a_capsule_is_taken_once(server, client):
    producer = Producer(np.arange(3))
    capsule = producer.capsule()
    with server.publish() as p:
        p.put("w", capsule)
        assert abi.capsule_name(capsule) == "used_dltensor_versioned"
        with pytest.raises(pw.InvalidError, match="taken before"):
            p.put("again", capsule)
    legacy = Producer(np.arange(3), versioned=False)
    capsule = legacy.capsule()
    with server.publish() as p:
        p.put("w", capsule)
    assert abi.capsule_name(capsule) == "used_dltensor"
    np.testing.assert_array_equal(client.fetch("w"), np.arange(3))
    gc.collect()
    assert producer.settled
    assert legacy.settled
    with server.publish() as p, pytest.raises(TypeError, match="datetime"):
        p.put("w", datetime.datetime_CAPI)


def test_a_missing_deleter_is_nothing_to_delete(server, client):
    producer = Producer(np.arange(3), null_deleter=True)
    np.testing.assert_array_equal(published(server, client, producer), np.arange(3))


def test_producers_are_asked_for_what_they_know(server):
    new, old = Producer(np.arange(3)), Producer(np.arange(3), versioned=False)
    with server.publish() as p:
        p.put("new", new)
        p.put("old", old)
    assert new.asked == [{"max_version": (1, 1)}]
    assert old.asked == [{"max_version": (1, 1)}, {}]


def test_a_producer_that_refuses_is_quoted(server):
    with server.publish() as p:
        with pytest.raises(pw.InvalidError, match=r'tensor "w".*BufferError: it requires grad') as caught:
            p.put("w", Producer(np.arange(3), raises=BufferError("it requires grad")))
        assert isinstance(caught.value.__cause__, BufferError)
        with pytest.raises(KeyboardInterrupt):
            p.put("w", Producer(np.arange(3), raises=KeyboardInterrupt()))


@pytest.mark.parametrize("device", [(abi.EXT, 0), (10, 0)])
def test_memory_of_other_devices_is_refused_before_a_capsule_is_made(server, client, device):
    with server.publish() as p:
        p.put("w", np.arange(3.0))
        producer = Producer(np.arange(3.0), device=device)
        with pytest.raises(pw.UnavailableError, match=r"in host memory and in CUDA's only.*copy it to the host first"):
            p.put("x", producer)
    for _ in range(2):  # the first fetch takes another way than the following ones
        with pytest.raises(pw.UnavailableError, match="out is in the memory of"):
            client.fetch("w", out=producer)
    assert producer.given == []


@pytest.mark.parametrize("device", [(abi.CUDA, 99), (abi.CUDA_MANAGED, 99)])
def test_cuda_memory_that_is_not_to_be_had_is_refused_before_a_capsule_is_made(server, client, device):
    text = "libcuda|without CUDA|cuda:99: no such device|no device"  # by what this machine has
    with server.publish() as p:
        p.put("w", np.arange(3.0))
        producer = Producer(np.arange(3.0), device=device)
        with pytest.raises((pw.UnavailableError, pw.InvalidError), match=text):
            p.put("x", producer)
    with pytest.raises((pw.UnavailableError, pw.InvalidError), match=text):
        client.fetch("w", out=producer)
    assert producer.given == []


def test_pinned_host_memory_is_host_memory(server, client):
    producer = Producer(np.arange(3.0), device=(abi.CUDA_HOST, 0))
    np.testing.assert_array_equal(published(server, client, producer), np.arange(3.0))


def test_tied_tensors_are_found_through_dlpack(server, client):
    words = np.arange(6, dtype=np.uint16)
    with server.publish() as p:
        p.put_all(
            {
                "a": Producer(words, code=abi.BFLOAT),
                "b": Producer(words, code=abi.BFLOAT),
                "not the same": Producer(words, code=abi.UINT),
            }
        )
    with client.snapshot() as snapshot:
        assert snapshot.info("b").alias_of == "a"
        assert snapshot.info("not the same").alias_of is None
        assert snapshot.info("not the same").dtype == "u16"


@st.composite
def layouts(draw):
    """A base array and a view of it: permuted, sliced with any step, broadcast."""
    dtype = draw(st.sampled_from(["u1", "i2", "f4", "f8", "c16", "?", "f2", "u8"]))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    count = int(np.prod(shape, dtype=int))
    array = (np.arange(count) % 251).astype(dtype).reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, 2, -1, -2]))
        array = array[(slice(None),) * axis + (slice(None, None, step),)]
    if draw(st.booleans()) and array.ndim < 4:
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=layouts(), versioned=st.booleans())
def test_every_legal_layout_comes_back_and_fills_one(server, client, array, versioned):
    producer = Producer(array, versioned=versioned)
    got = published(server, client, producer)
    assert (got.shape, got.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(got, array)
    if all(step != 0 or size < 2 for step, size in zip(array.strides, array.shape, strict=True)):
        out = np.zeros_like(array, subok=False)[...]
        target = Producer(out, versioned=versioned)
        before = client.stats()["copies"]
        assert client.fetch("w", out=target) is target
        np.testing.assert_array_equal(out, array)
        assert client.stats()["copies"] - before == (0 if out.flags.c_contiguous else 1)
        gc.collect()
        assert target.settled
    gc.collect()
    assert producer.settled
