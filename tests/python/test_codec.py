"""paramwire.codec: what comes back is the cast of what went in, bit for bit, for any array; and what is refused."""

from __future__ import annotations

import gc
import itertools

import ml_dtypes
import numpy as np
import paramwire
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from paramwire import codec

CODECS = ("raw", "planes", "lz4", "fp16", "bf16", "fp16+planes", "bf16+planes", "fp16+lz4", "bf16+lz4")
NUMPY = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "?", "<c8", "<c16")
FOREIGN = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
CAST = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(bits(one), bits(other))


def wanted(array, name):
    """The cast by numpy and ml_dtypes, which round as we do; NaNs by the rule, as those keep less of them."""
    kind = CAST.get(name.split("+")[0])
    if kind is None or array.dtype != np.float32:
        return np.asarray(array, order="C")
    with np.errstate(over="ignore", invalid="ignore"):
        out = np.asarray(array, order="C").astype(kind)
    u = np.asarray(array, order="C").view(np.uint32)
    u16 = out.view(np.uint16)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    quiet = {np.float16: (u >> 16 & 0x8000) | 0x7E00 | (u >> 13 & 0x3FF), ml_dtypes.bfloat16: u >> 16 | 0x40}[kind]
    u16[nan] = quiet[nan].astype(np.uint16)
    return out


def arrays():
    """Of all types, shapes and bit patterns, NaNs of every kind among them."""
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)
    plain = st.sampled_from(NUMPY).flatmap(
        lambda kind: shapes.flatmap(
            lambda shape: st.binary(
                min_size=int(np.prod(shape)) * np.dtype(kind).itemsize,
                max_size=int(np.prod(shape)) * np.dtype(kind).itemsize,
            ).map(lambda data: (np.frombuffer(data, np.uint8) & (1 if kind == "?" else 255)).view(kind).reshape(shape))
        )
    )
    foreign = st.tuples(st.sampled_from(FOREIGN), shapes, st.integers(0, 2**32 - 1)).map(
        lambda t: (
            np.random.default_rng(t[2])
            .integers(0, 256, (*t[1], np.dtype(t[0]).itemsize), np.uint8)
            .view(t[0])
            .reshape(t[1])
        )
    )
    weights = st.tuples(st.sampled_from(("<f4", "<f2")), st.integers(0, 90_000), st.integers(0, 2**32 - 1)).map(
        lambda t: np.random.default_rng(t[2]).normal(0, 0.05, t[1]).astype(t[0])
    )
    return plain | foreign | weights


@given(array=arrays(), name=st.sampled_from(CODECS), threads=st.sampled_from((1, 2, 3)))
@settings(max_examples=300, deadline=None)
def test_what_comes_back_is_the_cast_bit_for_bit(array, name, threads):
    stored = codec.encode(array, name, threads=threads)
    expected = wanted(array, name)
    assert same(codec.decode(stored, threads=threads), expected)
    assert stored.raw_nbytes == expected.nbytes
    assert stored.nbytes == stored.data.nbytes == stored.extents[:, 0].sum() <= expected.nbytes
    assert stored.crc64 == paramwire.crc64(stored.data)


@given(array=npst.arrays(np.float32, npst.array_shapes(max_dims=2, max_side=50), elements=st.floats(width=32)))
@settings(max_examples=200, deadline=None)
def test_casts_are_numpys_and_saturate_only_where_asked(array):
    for name, kind, largest in (
        ("f16", np.float16, 65504.0),
        ("bf16", ml_dtypes.bfloat16, float(ml_dtypes.finfo("bfloat16").max)),
    ):
        out, overflowed = codec.cast_counted(array, name)
        assert same(out, wanted(array, "fp16" if name == "f16" else name))
        assert same(codec.cast(array, name), out)
        lost = np.isinf(out.astype(np.float32)) & np.isfinite(array)
        assert overflowed == np.count_nonzero(lost)
        kept = codec.cast(array, name, saturate=True)
        assert not np.any(np.isinf(kept.astype(np.float32)) & np.isfinite(array))
        assert np.array_equal(kept[lost].astype(np.float64), np.copysign(largest, array[lost]).astype(np.float64))
        assert same(kept[~lost], out[~lost])
        assert same(codec.cast(out, "f32"), out.astype(np.float32)) or np.isnan(array).any()
        assert kept.dtype == kind


@pytest.mark.parametrize("name", ["planes", "lz4"])
def test_a_flipped_bit_is_an_error_that_names_its_extent(name):
    rng = np.random.default_rng(5)
    array = np.where(rng.random(100_000) < 0.1, rng.normal(0, 0.1, 100_000), 0).astype(np.float16)
    stored = codec.encode(array, name)
    assert stored.codec == name
    for bit in rng.integers(0, stored.nbytes * 8, 300):
        data = stored.data.copy()
        data[bit // 8] ^= 1 << (bit % 8)
        broken = codec.Encoded(data, stored.extents, codec=name, dtype=stored.dtype, shape=stored.shape)
        extent = int(np.searchsorted(np.cumsum(stored.extents[:, 0]), bit // 8, side="right"))
        with pytest.raises(paramwire.CorruptError, match=rf"extent {extent} "):
            codec.decode(broken)


def test_parts_that_were_kept_decode_again():
    array = np.linspace(-1, 1, 70_000, dtype=np.float32)
    stored = codec.encode(array, "planes")
    data, extents = stored.data.tobytes(), stored.extents.tolist()
    again = codec.Encoded(
        data, np.array(extents, np.uint32), codec=stored.codec, dtype=stored.dtype, shape=stored.shape
    )
    assert same(codec.decode(again), array)
    assert (again.nbytes, again.crc64, again.ratio) == (stored.nbytes, stored.crc64, stored.ratio)
    with pytest.raises(paramwire.InvalidError, match="extents: 1 rows"):
        codec.Encoded(data, np.array(extents[:1], np.uint32), codec="planes", dtype="f32", shape=70_000)
    with pytest.raises(paramwire.InvalidError, match="unknown codec"):
        codec.Encoded(data, np.array(extents, np.uint32), codec="zstd", dtype="f32", shape=70_000)


def test_bits_with_a_label_and_other_layouts():
    values = np.random.default_rng(1).normal(0, 0.02, (300, 200)).astype(np.float32)
    rounded = codec.cast(values, "bf16")
    as_bits = rounded.view(np.uint16)
    labelled = codec.encode(as_bits, "planes", dtype="bf16")
    assert labelled.dtype == "bf16"
    assert same(codec.decode(labelled), rounded)
    assert same(codec.cast(as_bits, "f32", dtype="bf16"), rounded.astype(np.float32))
    for view in (values.T, values[::2, 1::3], values.astype(">f4")):
        assert same(codec.decode(codec.encode(view, "planes")), np.ascontiguousarray(view, "<f4"))


def test_views_of_the_stored_bytes_keep_them_and_are_read_only():
    stored = codec.encode(np.zeros(100_000, np.float32), "planes")
    data, extents, sizes = stored.data, stored.extents, stored.extents[:, 0].copy()
    copy = data.copy()
    del stored
    gc.collect()
    assert np.array_equal(data, copy)
    assert np.array_equal(extents[:, 0], sizes)
    for view in (data, extents):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0


def test_the_same_bytes_for_any_number_of_threads():
    array = np.random.default_rng(2).normal(0, 0.05, 3_000_000).astype(np.float32)
    first = codec.encode(array, "bf16+planes")
    assert first.ratio < 0.72
    for threads in (2, 5):
        other = codec.encode(array, "bf16+planes", threads=threads)
        assert np.array_equal(other.data, first.data)
        assert np.array_equal(other.extents, first.extents)


def test_what_can_not_be_meant_is_refused():
    array = np.ones(10, np.float32)
    for name in ("", "zstd", "planes+bf16", "bf16+"):
        with pytest.raises(paramwire.InvalidError, match="known: raw, planes, lz4"):
            codec.encode(array, name)
    with pytest.raises(paramwire.InvalidError, match="0 threads"):
        codec.encode(array, "planes", threads=0)
    with pytest.raises(paramwire.InvalidError, match="no cast from i32 to f16"):
        codec.cast(np.ones(3, np.int32), "f16")
    with pytest.raises(TypeError):
        codec.encode(object(), "planes")


def test_blocks_of_nothing_and_of_one():
    for name, shape in itertools.product(CODECS, ((), (0,), (3, 0, 2), (1,))):
        array = np.full(shape, 1.5, np.float32)
        stored = codec.encode(array, name)
        assert stored.codec == "raw"
        assert stored.shape == shape
        assert same(codec.decode(stored), wanted(array, name))
