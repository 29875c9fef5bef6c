"""Programs over the simulated device (tests/support/sim_cuda_library.cpp): run by test_device_arrays.py, each in a
process of its own, since who loads that library has it as the driver of the whole process.

usage: device_cases.py LIBRARY CASE
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dlpack_abi as abi
import numpy as np
import paramwire as pw
import pytest
from dlpack_abi import Producer

CASES: dict[str, Callable[[Sim], None]] = {}
LATE, EAGER, GREEDY, RANDOM = range(4)
OUT_OF_MEMORY = 2
EXTENT = 1 << 16
W = np.arange(3 * EXTENT + 7, dtype=np.float32).reshape(1, -1)


def case(function: Callable[[Sim], None]) -> Callable[[Sim], None]:
    CASES[function.__name__] = function
    return function


def refused(kind: type[Exception], pattern: str) -> Any:
    return pytest.raises(kind, match=pattern)


class Sim:
    """The driver as a framework in this process uses it: memory, streams, captures."""

    def __init__(self, path: str) -> None:
        self.cu = ctypes.CDLL(path)
        self.held: list[object] = []

    def begin(self, *, devices: int = 1, order: int = LATE, pinned: int = 64 << 20, polls: int = 2) -> None:
        self.cu.sim_begin(devices, order, ctypes.c_uint64(pinned), polls)
        self.call("cuInit", 0)
        self.contexts = []
        for device in range(devices):
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts.append(context)
        self.use(0)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.cu, name)(*arguments)
        assert status == 0, f"{name}: {status}, {self.failures()}"

    def use(self, device: int) -> None:
        self.call("cuCtxPushCurrent_v2", self.contexts[device])

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        self.use(device)
        yield
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def alloc(self, size: int) -> int:
        out = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(size))
        return out.value

    def pin(self, size: int) -> int:
        out = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(out), ctypes.c_size_t(size), 0)
        return out.value or 0

    def stream(self) -> int:
        out = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(out), 1)
        return out.value or 0

    def event(self) -> int:
        out = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(out), 2)
        return out.value or 0

    def wait(self, stream: int, other: int) -> None:
        """`stream` waits for what `other` holds, as the array API standard has producers do it."""
        event = ctypes.c_void_p(self.event())
        self.call("cuEventRecord", event, ctypes.c_void_p(other))
        self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)

    def fill(self, address: int, value: int, size: int, stream: int) -> None:
        """Later: when somebody waits for it."""
        self.call("cuMemsetD8Async", ctypes.c_uint64(address), value, ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def write(self, address: int, array: np.ndarray) -> None:
        stream = ctypes.c_void_p(self.stream())
        data = np.ascontiguousarray(array)
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), data.ctypes, ctypes.c_size_t(data.nbytes), stream)
        self.call("cuStreamSynchronize", stream)

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        stream = ctypes.c_void_p(self.stream())
        out = np.empty_like(like, order="C", subok=False)
        self.call("cuMemcpyDtoHAsync_v2", out.ctypes, ctypes.c_uint64(address), ctypes.c_size_t(out.nbytes), stream)
        self.call("cuStreamSynchronize", stream)
        return out

    def count(self, name: str) -> int:
        self.cu.sim_calls.restype = ctypes.c_uint64
        return int(self.cu.sim_calls(name.encode()))

    def failures(self) -> str:
        text = ctypes.create_string_buffer(1 << 16)
        self.cu.sim_failures(text, ctypes.c_uint64(len(text)))
        return text.value.decode()

    # ---- arrays

    def dlpack(self, array: np.ndarray, address: int | None = None, **options: object) -> Tensor:
        options.setdefault("device", (abi.CUDA, 0))
        return Tensor(self, array, self.alloc(array.nbytes + 64) if address is None else address, **options)

    def interface(self, array: np.ndarray, address: int | None = None, **fields: object) -> Interface:
        return Interface(self, array, self.alloc(array.nbytes + 64) if address is None else address, **fields)


class Tensor(Producer):
    """A framework's tensor: its library works on `own`, and orders a consumer's stream behind it."""

    def __init__(self, sim: Sim, array: np.ndarray, address: int, **options: object) -> None:
        super().__init__(array, data=address, **options)
        self.sim, self.address, self.own = sim, address, sim.stream()

    def __dlpack__(self, **arguments: object) -> object:
        stream = arguments.get("stream")
        if stream is not None and stream != -1 and stream != self.own:
            with self.sim.on(self.device[1]):
                self.sim.wait(int(stream), self.own)
        return super().__dlpack__(**arguments)

    @property
    def value(self) -> np.ndarray:
        return self.sim.read(self.address, self.array)


class Interface:
    def __init__(self, sim: Sim, array: np.ndarray, address: int, **fields: object) -> None:
        self.sim, self.array, self.address = sim, array, address
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
        } | fields

    @property
    def value(self) -> np.ndarray:
        return self.sim.read(self.address, self.array)


class Served:
    def __init__(self, **options: object) -> None:
        self.server = pw.Server()
        with self.server.publish() as p:
            p.put("w", W)
            p.put("v", np.arange(6, dtype=np.uint16), dtype="bf16")
        self.client = pw.connect(self.server.address, transport="tcp", **options)


# ---------------------------------------------------------------- fetch


@case
def fetches_land_through_either_protocol(sim: Sim) -> None:
    sim.begin()
    served = Served()
    with served.client.snapshot() as snapshot:
        for versioned in (False, True):
            for device in ((abi.CUDA, 0), (abi.CUDA_MANAGED, 0)):
                out = sim.dlpack(W, versioned=versioned, device=device)
                for fetch in (snapshot.fetch, served.client.fetch):
                    assert fetch("w", out=out) is out
                    np.testing.assert_array_equal(out.value, W)
                gc.collect()
                assert out.settled
        out = sim.interface(W)
        assert snapshot.fetch("w", out=out) is out
        np.testing.assert_array_equal(out.value, W)
        part = sim.dlpack(W[:, :0].reshape(0), shape=(0,), strides=(1,))
        with refused(pw.InvalidError, "its target has 0"):
            snapshot.fetch("w", out=part)
        block = snapshot.blocks("w")[0].id
        out = sim.dlpack(W)
        assert snapshot.fetch_block(block, out=out) is out
        np.testing.assert_array_equal(out.value, W)
    assert sim.count("cuLaunchKernel") >= 8, "extents are compared on the device"


@case
def fetch_many_fills_host_and_device_together(sim: Sim) -> None:
    sim.begin(devices=2)
    served = Served()
    with sim.on(1):
        far = sim.dlpack(W, device=(abi.CUDA, 1))
    words = np.zeros(6, np.uint16)
    with served.client.snapshot() as snapshot:
        got = snapshot.fetch_many({"w": far, "v": words})
        assert got["w"] is far
        assert words.tolist() == list(range(6))
        near = sim.dlpack(words, code=abi.BFLOAT)
        snapshot.fetch_many({"w": np.zeros_like(W), "v": near})
        np.testing.assert_array_equal(near.value, words)
        with refused(pw.InvalidError, r"is bf16 .*its target float16 \(6,\) of cuda:0"):
            snapshot.fetch_many({"v": sim.dlpack(words, code=abi.FLOAT)})
        with refused(pw.InvalidError, "fetch_async fills host memory"):
            snapshot.fetch_async({"v": near})
        with refused(pw.InvalidError, "fetch_async fills host memory"):
            snapshot.fetch_async("v", out=near)
    with sim.on(1):
        np.testing.assert_array_equal(far.value, W)


@case
def whatever_stream_is_named_its_work_comes_first(sim: Sim) -> None:
    sim.begin()
    served = Served()

    class Torch:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    class CuPy:
        def __init__(self, handle: int) -> None:
            self.ptr = handle

    class Protocol:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.handle

    mine = sim.stream()
    given = [None, mine, Torch(mine), CuPy(mine), Protocol(mine), 1, 2, Torch(0), CuPy(0)]
    with served.client.snapshot() as snapshot:
        for stream in given:
            handle = {int: lambda s=stream: s, type(None): lambda: 0}.get(type(stream), lambda: mine)()
            if isinstance(stream, (Torch, CuPy)) and 0 in vars(stream).values():
                handle = 1
            out = sim.dlpack(W)
            # Late: it would overwrite what landed, if nothing waited for it.
            sim.fill(out.address, 9, W.nbytes, handle or out.own)
            snapshot.fetch("w", out=out, stream=stream)
            sim.cu.sim_run_all()
            np.testing.assert_array_equal(out.value, W)
            asked = out.asked[0]["stream"]
            assert asked == handle if handle else asked > 2, (stream, out.asked)
            out = sim.dlpack(W)
            sim.fill(out.address, 9, W.nbytes, out.own)
            snapshot.fetch("w", out=out, stream=stream)
            sim.cu.sim_run_all()
            np.testing.assert_array_equal(out.value, W)
        out = sim.dlpack(W)
        snapshot.fetch("w", out=out, stream=-1)
        assert out.asked[0]["stream"] == -1
        for named in (None, 1, 2, mine):
            out = sim.interface(W, stream=named)
            if named:
                sim.fill(out.address, 9, W.nbytes, named)
            snapshot.fetch("w", out=out)
            sim.cu.sim_run_all()
            np.testing.assert_array_equal(out.value, W)
        with refused(pw.InvalidError, "stream is 0"):
            snapshot.fetch("w", out=sim.dlpack(W), stream=0)
        with refused(pw.InvalidError, '"stream" of its __cuda_array_interface__ is 0'):
            snapshot.fetch("w", out=sim.interface(W, stream=0))
        with refused(pw.InvalidError, "stream is -2"):
            snapshot.fetch("w", out=sim.dlpack(W), stream=-2)
        for nothing in ("stream", 1.5, True):
            with refused(TypeError, "stream must be None, an int, or a stream of torch"):
                snapshot.fetch("w", out=sim.dlpack(W), stream=nothing)


@case
def a_stream_that_is_captured_is_refused_and_the_capture_goes_on(sim: Sim) -> None:
    sim.begin()
    served = Served()
    out = sim.dlpack(W)
    mine = sim.stream()
    captured, beside = sim.interface(W, stream=mine), sim.interface(W)
    for mode in (0, 1, 2):
        begin, end = ctypes.c_void_p(mine), ctypes.c_void_p()
        sim.call("cuStreamBeginCapture_v2", begin, mode)
        asked = len(out.asked)
        with refused(pw.InvalidError, "the stream that was given is being captured"):
            served.client.fetch("w", out=out, stream=mine)
        assert len(out.asked) == asked, "the library was not asked for anything"
        with refused(pw.InvalidError, "the stream that was given is being captured"):
            served.client.fetch("w", out=captured)
        served.client.fetch("w", out=out)  # on another stream: nothing of it is illegal meanwhile
        other = threading.Thread(target=served.client.fetch, args=("w",), kwargs={"out": beside})
        other.start()
        other.join()
        sim.fill(out.address, 1, 4, mine)
        sim.call("cuStreamEndCapture", begin, ctypes.byref(end))
        sim.call("cuGraphDestroy", end)
    for filled in (out, beside):
        np.testing.assert_array_equal(filled.value, W)


@case
def work_before_a_fetch_that_does_not_end_is_a_deadline(sim: Sim) -> None:
    sim.begin(polls=1 << 30)
    served = Served()
    out = sim.dlpack(W)
    before = sim.alloc(8)
    mine = sim.stream()
    sim.fill(before, 1, 8, mine)
    with refused(pw.DeadlineError, "nothing was copied"):
        served.client.fetch("w", out=out, stream=mine, timeout=0.2)
    sim.cu.sim_run_all()
    assert (out.value.view(np.uint8) == 0xCB).all(), "as it was"


# ---------------------------------------------------------------- publish


@case
def arrays_are_published_out_of_device_memory(sim: Sim) -> None:
    sim.begin()
    served = Served()
    labels = np.arange(6, dtype=np.uint16).reshape(2, 3)
    mine = sim.stream()
    for versioned in (False, True):
        a, c, d = sim.dlpack(W, versioned=versioned), sim.interface(W), sim.dlpack(W)
        b = sim.dlpack(labels, versioned=versioned, code=abi.BFLOAT)
        sim.write(a.address, W)
        sim.write(b.address, labels)
        sim.write(c.address, W)
        sim.fill(d.address, 3, W.nbytes, mine)
        for publish in (served.server.publish, served.client.publish):
            with publish() as p:
                p.put("a", a)
                p.put("b", b)
                p.put_rows("c", c, 1 << 18)
                p.put("d", d, stream=mine)
                for row in range(2):
                    p.put("e", a, shape=(2, W.size), rows=(row, row + 1))
                p.put("empty", sim.interface(np.zeros((0, 4), np.int16), 0))
            with served.client.snapshot() as snapshot:
                assert snapshot.info("b").dtype == "bf16"
                np.testing.assert_array_equal(snapshot["a"], W)
                assert snapshot["b"].tobytes() == labels.tobytes()
                np.testing.assert_array_equal(snapshot["c"], W)
                assert set(snapshot["d"].tobytes()) == {3}
                assert snapshot["empty"].shape == (0, 4)
                np.testing.assert_array_equal(snapshot["e"], np.vstack([W, W]))
    gc.collect()
    assert a.settled
    assert b.settled


@case
def tied_device_tensors_leave_the_device_once(sim: Sim) -> None:
    sim.begin()
    served = Served()
    a = sim.dlpack(W)
    sim.write(a.address, W)
    tied = sim.dlpack(W, a.address)
    other = sim.dlpack(W.view(np.int32), a.address)
    copied = sim.count("cuMemcpyDtoHAsync")
    with served.server.publish() as p:
        p.put_all({"a": a, "b": tied, "c": other, "d": W[0]})
    assert sim.count("cuMemcpyDtoHAsync") == copied + 2
    with served.client.snapshot() as snapshot:
        assert snapshot.info("b").alias_of == "a"
        assert snapshot.info("c").alias_of is None
        np.testing.assert_array_equal(snapshot["b"], W)


# ---------------------------------------------------------------- what is refused


@case
def arrays_that_do_not_fit_are_refused_with_the_next_step(sim: Sim) -> None:
    sim.begin(devices=2)
    served = Served()
    square = np.zeros((64, 64), np.float32)
    address = sim.alloc(1 << 20)
    with sim.on(1):
        far = sim.alloc(1 << 20)
    pinned = sim.pin(1 << 16)

    def dlpack(at: int = address, **options: object) -> Tensor:
        return sim.dlpack(square, at, **options)

    refusals: list[tuple[object, str]] = [
        (
            dlpack(strides=(1, 64)),
            r"float32 \(64, 64\) of cuda:0 and not C-contiguous.*tensor.contiguous\(\), cupy.asc",
        ),
        (dlpack(strides=(0, 1)), "not C-contiguous"),
        (sim.interface(square, address, strides=(4, 256)), "not C-contiguous"),
        (sim.interface(square, address, strides=(-256, 4)), "not C-contiguous"),
        (sim.interface(square, address, strides=(256,)), "2 axes and 1 strides"),
        (dlpack(address + 2), r"not aligned to its elements of 4 bytes: copy it"),
        (sim.interface(square, address + 1), "not aligned"),
        (dlpack(0), "null pointer"),
        (dlpack(far), "its memory is of cuda:1, and its array says cuda:0"),
        (dlpack(tensor_device=(abi.CUDA, 1)), "says CUDA device 0, its DLPack tensor CUDA device 1"),
        (dlpack(tensor_device=(abi.CPU, 0)), "says CUDA device 0, its DLPack tensor DLPack device type 1"),
        (dlpack(device=(abi.CUDA, 2)), "cuda:2: no such device; there are cuda:0 to cuda:1"),
        (dlpack(address + (1 << 20) - 100), "only 100 are memory of cuda:0"),
        (dlpack(square.ctypes.data), "no memory of a CUDA device of this process"),
        (sim.interface(square, square.ctypes.data), "no memory of a CUDA device of this process"),
        (dlpack(pinned), "page-locked host memory"),
        (dlpack(code=99), "unknown .code 99"),
        (dlpack(version=(2, 0)), "DLPack 2.0"),
        (dlpack(raises=BufferError("it requires grad")), "BufferError: it requires grad"),
    ]
    with served.client.snapshot() as snapshot, served.server.publish() as p:
        for array, text in refusals:
            with refused(pw.InvalidError, text):
                p.put("x", array)
            with refused(pw.InvalidError, text):
                snapshot.fetch("w", out=array)
        for name, array in (
            ("y", dlpack(flags=abi.READ_ONLY)),
            ("z", sim.interface(square, address, data=(address, True))),
        ):
            with refused(pw.InvalidError, "read-only"):
                snapshot.fetch("w", out=array)
            p.put(name, array)
        with refused(pw.InvalidError, "of 786460 bytes, and its target has 16384"):
            snapshot.fetch("w", out=dlpack())
        with refused(pw.InvalidError, "stream belongs to arrays in the memory of a CUDA device"):
            snapshot.fetch("w", out=np.zeros_like(W), stream=1)
        with refused(pw.InvalidError, "stream belongs to arrays"):
            snapshot.fetch("w", stream=1)
        with refused(pw.InvalidError, "stream belongs to arrays"):
            p.put("x", square, stream=1)
        with refused(pw.UnavailableError, "a capsule does not say when its bytes are there"):
            p.put("x", dlpack().capsule())
        with refused(pw.UnavailableError, "only fetch, fetch_block, fetch_many, put, put_rows and put_all"):
            served.client.register(dlpack())
        p.put("fine", square)
    gc.collect()
    for array, _ in refusals:
        assert not isinstance(array, Tensor) or array.settled
    assert sim.count("cuMemcpyHtoDAsync") == 0


@case
def corrupted_bytes_never_pass(sim: Sim) -> None:
    sim.begin()
    served = Served()
    out = sim.dlpack(W)
    sim.cu.sim_skip_call(b"cuMemcpyHtoDAsync", 1)
    with refused(pw.CorruptError, 'cuda:0: 13 of 13 extents .* not what .* sealed; .* byte 0 of whole of tensor "w"'):
        served.client.fetch("w", out=out)
    served.client.fetch("w", out=out)
    np.testing.assert_array_equal(out.value, W)


@case
def without_page_locked_memory_it_is_right(sim: Sim) -> None:
    sim.begin(pinned=0, order=RANDOM)
    served = Served()
    out = sim.dlpack(W)
    served.client.fetch("w", out=out)
    np.testing.assert_array_equal(out.value, W)
    with served.server.publish() as p:
        p.put("again", out)
    np.testing.assert_array_equal(served.client.fetch("again"), W)


@case
def a_failing_driver_is_typed_and_the_host_goes_on(sim: Sim) -> None:
    sim.begin()
    served = Served()
    out = sim.dlpack(W)
    sim.cu.sim_fail_call(b"cuMemHostAlloc", 1, OUT_OF_MEMORY)  # pageable then
    sim.cu.sim_fail_call(b"cuMemAlloc", 1, OUT_OF_MEMORY)
    with refused(pw.BackpressureError, "cuda:0"):
        served.client.fetch("w", out=out)
    served.client.fetch("w", out=out)
    np.testing.assert_array_equal(out.value, W)
    sim.cu.sim_lose_device(0)
    with refused(pw.UnavailableError, "cuda:0"):
        served.client.fetch("w", out=out)
    np.testing.assert_array_equal(served.client.fetch("w"), W)
    sim.failures()


@case
def the_child_of_a_fork_is_refused(sim: Sim) -> None:
    sim.begin()
    served = Served()
    out = sim.dlpack(W)
    served.client.fetch("w", out=out)
    child = os.fork()
    if child == 0:
        try:
            with refused(pw.InvalidError, "fork"):
                pw.connect(served.server.address, transport="tcp").fetch("w", out=out)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    served.client.fetch("w", out=out)


def main() -> None:
    sim = Sim(sys.argv[1])
    CASES[sys.argv[2]](sim)
    assert sim.failures() == ""


if __name__ == "__main__":
    main()
