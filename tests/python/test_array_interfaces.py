"""__array_interface__, __cuda_array_interface__ and torch: read, filled, or refused with what is missing."""

from __future__ import annotations

import numpy as np
import paramwire as pw
import pytest

BASE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


def published(server, client, array, **options):
    with server.publish() as p:
        p.put("w", array, **options)
    return client.fetch("w")


class Interface:
    """A producer that owns host memory and says about it what it is told to."""

    def __init__(self, array, kind, **fields):
        self.array = array
        self._description = array.__array_interface__ | {"version": 3} | fields
        self._kind = kind

    def __getattr__(self, name):
        if name == f"__{self.__dict__.get('_kind')}__":
            return self._description
        raise AttributeError(name)


def test_array_interfaces_are_read_and_filled(server, client):
    for array in (BASE, BASE.T, BASE[::-1, :, ::2]):
        np.testing.assert_array_equal(published(server, client, Interface(array, "array_interface")), array)
        for out in (np.zeros(array.shape, np.float32), np.zeros(array.shape[::-1], np.float32).T):
            client.fetch("w", out=Interface(out, "array_interface"))
            np.testing.assert_array_equal(out, array)


def test_a_cuda_array_that_is_not_to_be_had_is_refused_and_its_pointer_never_read(server, client):
    unmapped = 0xDEAD0000
    producer = Interface(BASE, "cuda_array_interface", data=(unmapped, False))
    text = "libcuda|without CUDA|no device|no memory of a CUDA device"  # by what this machine has
    with server.publish() as p:
        p.put("w", BASE)
        for put in (lambda: p.put("x", producer), lambda: p.put_all({"x": producer})):
            with pytest.raises((pw.UnavailableError, pw.InvalidError), match=f'tensor "x".*({text})'):
                put()
    for _ in range(2):
        with pytest.raises((pw.UnavailableError, pw.InvalidError), match=f"out.*({text})"):
            client.fetch("w", out=producer)
    with pytest.raises(
        pw.UnavailableError, match=r"CUDA.*f4 \(4, 6, 8\) at 0x00000000dead0000.*copy it to the host first"
    ):
        client.register(producer)


def test_an_empty_cuda_array_has_nothing_to_read(server, client):
    producer = Interface(np.zeros((0, 4), np.int16), "cuda_array_interface", data=(0, False))
    got = published(server, client, producer)
    assert (got.shape, got.dtype) == ((0, 4), np.int16)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"version": 1}, "version 1"),
        ({"version": "new"}, '"version"'),
        ({"typestr": "potato"}, "potato"),
        ({"typestr": 4}, '"typestr"'),
        ({"shape": (4, -1)}, "-1"),
        ({"shape": "no"}, '"shape"'),
        ({"data": None}, '"data"'),
        ({"mask": BASE}, "mask"),
    ],
)
def test_a_cuda_array_that_describes_itself_wrongly_is_named(server, fields, text):
    with server.publish() as p, pytest.raises(pw.InvalidError, match=text):
        p.put("w", Interface(BASE, "cuda_array_interface", **fields))


def test_a_cuda_array_without_a_field_is_named(server):
    for missing in ("shape", "typestr", "data", "version"):
        producer = Interface(BASE, "cuda_array_interface")
        del producer._description[missing]
        with server.publish() as p, pytest.raises(pw.InvalidError, match=missing):
            p.put("w", producer)


def test_what_is_no_array_is_a_type_error(server):
    with server.publish() as p:
        for nothing in (3, None, "text", object(), [1, 2]):
            with pytest.raises(TypeError, match='tensor "w" must be an array'):
                p.put("w", nothing)


def test_torch_tensors_go_both_ways(server, client):
    torch = pytest.importorskip("torch", reason="optional: the protocols above are what torch speaks")
    weights = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    with server.publish() as p:
        p.put("w", weights.T)
    out = torch.empty(4, 3, dtype=torch.bfloat16)
    with client.snapshot() as snapshot:
        assert snapshot.info("w").dtype == "bf16"
        snapshot.fetch("w", out=out)
    assert torch.equal(out, weights.T)
    with server.publish() as p, pytest.raises(pw.InvalidError, match=r"requires? grad"):
        p.put("w", torch.ones(3, requires_grad=True))
