"""paramwire.delta: what comes back is bit for bit what was encoded, for any dtype, shape and pattern, or nothing."""

from __future__ import annotations

import threading

import numpy as np
import paramwire as pw
import pytest
from delta_decoder import apply_delta, apply_onebit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from paramwire import delta

VERSION = (3, 17)
# What numpy says, and what paramwire is told where numpy has no word for it.
KINDS = [
    *(
        (np.dtype(name), None)
        for name in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16", "?")
    ),
    (np.dtype("u2"), "bf16"),
    (np.dtype("u1"), "f8_e4m3"),
    (np.dtype("u1"), "f8_e5m2"),
    (np.dtype("u1"), "f8_e8m0"),
    (np.dtype("u1"), "i4"),
    (np.dtype("u1"), "u4"),
]


@st.composite
def pairs(draw):
    """Base and result of one kind and shape, of random bits: NaNs with payloads, infinities, subnormals, both zeros."""
    dtype, label = draw(st.sampled_from(KINDS))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    size = int(np.prod(shape)) * dtype.itemsize
    base = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    change = draw(st.sampled_from(["none", "few", "steps", "all"]))
    result = base.copy()
    if change == "all":
        result = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    elif change != "none" and size:
        for at in draw(st.lists(st.integers(0, size - 1), max_size=20)):
            result[at] ^= draw(st.integers(1, 255)) if change == "few" else 1
    if dtype.kind == "b":
        base, result = base & 1, result & 1
    return base.view(dtype).reshape(shape), result.view(dtype).reshape(shape), label


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(deadline=None, max_examples=300)
@given(pairs(), st.sampled_from([None, "full", "xor", "steps", "sparse"]), st.sampled_from([1, 16]))
def test_every_delta_comes_back_bit_for_bit(pair, form, classes):
    base, result, label = pair
    made = delta.encode(base, result, version=VERSION, dtype=label, form=form, classes=classes)
    done = delta.apply(made, base, version=VERSION, dtype=label)
    assert same_bits(done.array, result)
    assert done.applied == (base.tobytes() != result.tobytes())
    # The decoder that was written from FORMAT.md reads it, too.
    assert apply_delta(made, base.tobytes()) == result.tobytes()
    block = base.copy()
    assert delta.apply(made, block, out=block, dtype=label).array is block
    assert same_bits(block, result)


@settings(deadline=None, max_examples=100)
@given(pairs(), st.data())
def test_no_flipped_bit_gives_another_result(pair, data):
    base, result, label = pair
    made = bytearray(delta.encode(base, result, version=VERSION, dtype=label))
    bit = data.draw(st.integers(0, 8 * len(made) - 1))
    made[bit // 8] ^= 1 << bit % 8
    block = base.copy()
    with pytest.raises(pw.CorruptError):
        delta.apply(bytes(made), block, out=block, dtype=label)
    assert same_bits(block, base)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([(np.dtype("f4"), None), (np.dtype("f2"), None), (np.dtype("u2"), "bf16")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
    st.sampled_from(["matrix", "row"]),
    st.data(),
)
def test_the_independent_decoder_makes_the_same_of_one_bit_deltas(kind, shape, scale, data):
    dtype, label = kind
    ours = np.dtype("u4") if dtype.itemsize == 4 else np.dtype("u2")
    # Exponents all ones are NaNs and infinities, which are refused.
    top = {None: 0x7C00, "bf16": 0x7F80}[label] if dtype.itemsize == 2 else 0x7F800000
    finite = st.integers(0, 2 ** (8 * ours.itemsize) - 1).filter(lambda bits: bits & top != top)
    base = data.draw(hnp.arrays(ours, shape, elements=finite)).view(dtype)
    tuned = data.draw(hnp.arrays(ours, shape, elements=finite)).view(dtype)
    try:
        made = delta.encode_onebit(base, tuned, version=VERSION, dtype=label, scale=scale)
    except pw.InvalidError as error:
        assert "beyond f32" in str(error)  # noqa: PT017  # rare: two huge values of f32
        return
    near = delta.apply_onebit(made, base, dtype=label)
    assert near.tobytes() == apply_onebit(made, base.tobytes())
    assert delta.onebit_info(made).lossy


def test_info_says_what_a_delta_is():
    base = np.arange(1000, dtype=np.float32)
    result = base + 1
    made = delta.encode(base, result, version=VERSION)
    info = delta.info(made)
    assert info.dtype == "f32"
    assert (info.raw_size, info.delta_size) == (4000, len(made))
    assert info.base_version == pw.Version(3, 17)
    assert (info.base_crc64, info.result_crc64) == (pw.crc64(base), pw.crc64(result))
    assert info.form in ("full", "xor", "steps", "sparse")
    small = delta.onebit_info(delta.encode_onebit(base.reshape(10, 100), result.reshape(10, 100), version=VERSION))
    assert (small.dtype, small.scale, small.rows, small.columns, small.lossy) == ("f32", "row", 10, 100, True)


def test_a_wrong_base_is_stale_and_names_both():
    base = np.arange(1000, dtype=np.float32)
    made = delta.encode(base, base + 1, version=VERSION)
    with pytest.raises(pw.StaleError, match=r"3\.17.*3\.16"):
        delta.apply(made, base, version=(3, 16))
    other = base.copy()
    other[7] = 0.5
    with pytest.raises(pw.StaleError, match=f"{pw.crc64(base):016x}.*{pw.crc64(other):016x}"):
        delta.apply(made, other)
    with pytest.raises(pw.InvalidError):
        delta.apply(made, base.astype(np.float64))
    with pytest.raises(pw.InvalidError):
        delta.apply(made, base[:-1])
    small = delta.encode_onebit(base, base + 1, version=VERSION)
    with pytest.raises(pw.StaleError):
        delta.apply_onebit(small, other)


def test_twice_is_once():
    base = np.arange(1000, dtype=np.float32)
    result = base + 1
    made = delta.encode(base, result, version=VERSION)
    block = base.copy()
    assert delta.apply(made, block, out=block).applied
    assert not delta.apply(made, block, out=block).applied
    assert same_bits(block, result)


@pytest.mark.parametrize("call", [delta.info, delta.onebit_info])
def test_what_is_no_delta_is_corrupt(call):
    for junk in (b"", b"PWRD", bytes(64), bytes(1000), b"\xff" * 100):
        with pytest.raises(pw.CorruptError):
            call(junk)
    with pytest.raises(TypeError):
        call(3)


def test_a_delta_of_the_other_kind_is_told_apart():
    base = np.ones((3, 4), np.float32)
    with pytest.raises(pw.CorruptError, match="a one-bit delta's: apply_onebit takes it"):
        delta.apply(delta.encode_onebit(base, base + 1, version=VERSION), base)
    with pytest.raises(pw.CorruptError, match="a lossless delta's: apply_onebit is not for it"):
        delta.apply_onebit(delta.encode(base, base + 1, version=VERSION), base)


def test_arguments_that_cannot_be_meant_are_refused():
    base = np.arange(12, dtype=np.float32)
    for arguments in ({"version": (0, 0)}, {"version": VERSION, "form": "zip"}, {"version": VERSION, "classes": 17}):
        with pytest.raises(pw.InvalidError):
            delta.encode(base, base, **arguments)
    with pytest.raises(pw.InvalidError):
        delta.encode(base, base.astype(np.float16), version=VERSION)
    with pytest.raises(pw.InvalidError, match=r"\(3, 4\).*\(4, 3\).*publish it in full"):
        delta.encode(base.reshape(3, 4), base.reshape(4, 3), version=VERSION)
    with pytest.raises(pw.InvalidError):
        delta.encode_onebit(base.astype(np.float64), base.astype(np.float64), version=VERSION)
    with pytest.raises(pw.InvalidError):
        delta.encode_onebit(base.reshape(3, 4), base.reshape(4, 3), version=VERSION)
    with pytest.raises(pw.InvalidError, match="element 5"):
        delta.encode_onebit(base, np.where(base == 5, np.nan, base).astype(np.float32), version=VERSION)
    made = delta.encode(base, base + 1, version=VERSION)
    for out in (np.zeros(24, np.float32)[::2], np.zeros(11, np.float32), np.broadcast_to(np.float32(0), 12)):
        with pytest.raises(pw.InvalidError):
            delta.apply(made, base, out=out)


def test_other_layouts_and_dlpack_are_taken():
    class OnlyDLPack:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    result = base * 1.5
    made = delta.encode(base.T, np.asfortranarray(result.T), version=VERSION)
    assert same_bits(delta.apply(made, base.T).array, np.ascontiguousarray(result.T))
    made = delta.encode(OnlyDLPack(base), OnlyDLPack(result), version=VERSION)
    out = np.empty_like(base)
    assert delta.apply(made, OnlyDLPack(base), out=OnlyDLPack(out)).applied
    assert same_bits(out, result)
    with pytest.raises(pw.InvalidError):
        delta.encode(base.astype(">f4"), result.astype(">f4"), version=VERSION)


def test_threads_make_the_same_bytes_and_the_gil_is_released():
    random = np.random.default_rng(1)
    base = random.normal(0, 0.04, 1 << 21).astype(np.float32)
    result = base + random.normal(0, 1e-5, base.size).astype(np.float32)
    one = delta.encode(base, result, version=VERSION)
    assert delta.encode(base, result, version=VERSION, threads=3) == one
    assert same_bits(delta.apply(one, base, threads=3).array, result)
    # While one thread encodes, this one goes on: it sees the other unfinished at least once.
    worker = threading.Thread(target=delta.encode, args=(base, result), kwargs={"version": VERSION})
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    assert turns > 100


def test_one_bit_is_a_sixteenth_of_fp16():
    random = np.random.default_rng(1)
    base = random.normal(0, 0.04, (1024, 1024)).astype(np.float16)
    tuned = (base + random.normal(0, 0.002, base.shape)).astype(np.float16)
    for scale in ("matrix", "row"):
        made = delta.encode_onebit(base, tuned, version=VERSION, scale=scale)
        assert base.nbytes / len(made) > 15
        near = delta.apply_onebit(made, base).astype(np.float64)
        # Signs and a mean keep 2/pi of the energy of a normal change: what is left is at most 0.4 of it.
        left = np.square(near - tuned).sum() / np.square(base.astype(np.float64) - tuned).sum()
        assert left < 0.4
