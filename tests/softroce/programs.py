"""What the other processes of these tests do: each function runs in one, with a pipe to the test."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import subprocess
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import paramwire as pw

# Of the content below; odd, so that no two words are the same.
MULTIPLIER = 0x9E3779B97F4A7C15


def content(nbytes: int, mark: int) -> np.ndarray:
    """Bytes that describe themselves: each word of 8 is of its place and of `mark`, so that a word of another place or
    another mark is seen."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(MULTIPLIER) ^ np.uint64(
        mark * MULTIPLIER % (1 << 64)
    )
    return words.view(np.uint8)[:nbytes]


def main(pipe: Connection, function: Callable[..., None], *arguments: Any) -> None:
    """Any error goes to the test, as text; the test's end of the pipe gone is the end."""
    try:
        function(pipe, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(Failed(traceback.format_exc()))


class Failed(Exception):
    """Of another process, with its traceback."""


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """ "ok" or the error's name, and its text."""
    try:
        call()
    except pw.Error as error:
        return type(error).__name__, str(error)
    return "ok", ""


# ---------------------------------------------------------------- a server


class Rewriter:
    """Publishes one tensor again and again, as fast as it can, each time with the next mark."""

    def __init__(self, server: pw.Server, name: str, nbytes: int, marks: list[int]) -> None:
        self.arrays = [content(nbytes, mark) for mark in marks]
        self.server, self.name = server, name
        self.over = threading.Event()
        self.published = 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.over.is_set():
            with self.server.publish() as p:
                p.put(self.name, self.arrays[self.published % len(self.arrays)])
            self.published += 1

    def stop(self) -> int:
        self.over.set()
        self.thread.join()
        return self.published


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Tells its addresses, then does what comes: ("publish", {name: (nbytes, mark)}), ("stats",), ("rewrite", name,
    nbytes, marks), ("stop",)."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(pw.Server(**options))
        pipe.send((server.address, server.endpoints, server.incarnation))
        rewriter: Rewriter | None = None
        while True:
            what, *rest = pipe.recv()
            if what == "publish":
                with server.publish() as p:
                    for name, (nbytes, mark) in rest[0].items():
                        p.put(name, content(nbytes, mark))
                pipe.send(tuple(p.version))
            elif what == "rewrite":
                rewriter = Rewriter(server, *rest)
                stack.callback(rewriter.stop)
                pipe.send(None)
            elif what == "stop":
                pipe.send(rewriter.stop() if rewriter else 0)
            else:
                pipe.send(server.stats())


def serve_model(pipe: Connection, folder: str, options: dict[str, Any]) -> None:
    """That make_model.py made: tells the address once all of it is published, and how many bytes it is."""
    with open(f"{folder}/index.json") as file:
        index = json.load(file)
    weights = np.memmap(f"{folder}/weights.bin", dtype=np.uint8, mode="r")
    with pw.Server(**options) as server:
        with server.publish() as p:
            for name, dtype, shape, begin, end in index["tensors"]:
                p.put_rows(name, weights[begin:end], dtype=dtype, shape=shape)
        pipe.send((server.address, len(weights)))
        pipe.recv()


# ---------------------------------------------------------------- clients


def read_for_ever(pipe: Connection, address: str, options: dict[str, Any], name: str, nbytes: int) -> None:
    """Says so once a fetch is under way."""
    with pw.connect(address, **options) as client, client.snapshot() as snapshot:
        out = np.empty(nbytes, dtype=np.uint8)
        snapshot.fetch(name, out=out)
        pipe.send("reading")
        while True:
            snapshot.fetch(name, out=out)


def connect_often(pipe: Connection, address: str, options: dict[str, Any], name: str, times: int) -> None:
    failures = []
    for _ in range(times):
        try:
            with pw.connect(address, **options) as client:
                client.fetch(name)
        except pw.Error as error:
            failures.append(repr(error))
    pipe.send(failures)


def publish_for_ever(pipe: Connection, address: str, name: str, nbytes: int, marks: list[int]) -> None:
    """From here, over a connection to the server; says so after every publish."""
    arrays = [content(nbytes, mark) for mark in marks]
    with pw.connect(address, transport="tcp", timeout=60.0) as client:
        turn = 0
        while True:
            with client.publish() as p:
                p.put(name, arrays[turn % len(arrays)])
            turn += 1
            pipe.send(turn)


def start_fetch(client: pw.Client, until: Callable[..., bool], packets: Callable[[], int]) -> pw.Ticket:
    """A fetch of "large" that is under way: packets have come for it, and it is not done."""
    snapshot = client.snapshot()
    snapshot.fetch("small")  # makes a link
    before = packets()
    ticket = snapshot.fetch_async("large")
    assert until(lambda: packets() > before + 100)
    assert not ticket.done
    return ticket


# ---------------------------------------------------------------- other places and rights

CLONE_NEWNET = 0x40000000  # linux/sched.h


def leave_network_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def look(pipe: Connection, memlock: int | None, namespace: bool, interfaces: list[int]) -> None:
    """Sends the line of verbs in available(), and the ports, as they look to nobody with that limit on locked memory;
    or from another network namespace with dummy interfaces of these numbers."""
    if namespace:
        leave_network_namespace()
        for number in interfaces:
            for words in (f"add d{number} index {number} type dummy", f"set d{number} up"):
                subprocess.run(["ip", "link", *words.split()], check=True, timeout=60)
    if memlock is not None:
        become_nobody(memlock)
    (row,) = [row for row in pw.available()["transports"] if row["name"] == "verbs"]
    pipe.send({"verbs": row, "ports": pw._core.rdma_ports()})


def in_another_namespace(pipe: Connection, address: str, options: dict[str, Any]) -> None:
    """Sends what connecting over verbs gives; transport, rejected and whether the bytes are right of any way."""
    leave_network_namespace()
    pipe.send(outcome(lambda: pw.connect(address, **options)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pw.connect(address, verbs_device=options["verbs_device"]) as client:
            got = client.fetch("w")
            pipe.send((client.transport, dict(client.rejected), bool((got == content(len(got), 1)).all())))


def become_nobody(memlock: int) -> None:
    """As `setpriv --reuid=65534 --clear-groups --inh-caps=-all prlimit --memlock=N:N` would have it: root may lock all
    that it likes."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)


def without_locked_memory(pipe: Connection, memlock: int, address: str, options: dict[str, Any]) -> None:
    """Sends what connecting over verbs gives; then transport, rejected, warnings, and whether the bytes are right, of
    any way."""
    become_nobody(memlock)
    pipe.send(outcome(lambda: pw.connect(address, **options)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = pw.connect(address, verbs_device=options["verbs_device"])
    told = [str(each.message) for each in caught if issubclass(each.category, pw.FallbackWarning)]
    with client:
        got = client.fetch("w")
        pipe.send((client.transport, dict(client.rejected), told, bool((got == content(len(got), 1)).all())))


def serve_without_locked_memory(pipe: Connection, memlock: int, options: dict[str, Any]) -> None:
    become_nobody(memlock)
    with pw.Server(**options) as server:
        with server.publish() as p:
            p.put("w", content(1 << 20, 1))
        pipe.send(server.address)
        pipe.recv()


def protect(array: np.ndarray, protection: int) -> None:
    """mprotect(2) of whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


# ---------------------------------------------------------------- forks


def in_the_child(answers: int, heap: bytearray, fetch: Callable[[], Any]) -> None:
    """Writes over the parent's heap, then uses the parent's handle."""
    heap[:] = b"\xa5" * len(heap)
    os.write(answers, json.dumps(outcome(fetch)).encode())


def in_a_spawned_child(answers: Connection, address: str, options: dict[str, Any]) -> None:
    def fetch() -> None:
        with pw.connect(address, **options) as client:
            got = client.fetch("t0")
            assert (got == content(len(got), 1)).all()

    answers.send(outcome(fetch))


def fork_and_fetch(pipe: Connection, how: str, address: str, options: dict[str, Any], count: int) -> None:
    """Sends what the child said, and how many fetches of this process brought the right bytes meanwhile and after."""
    heap = bytearray(64 << 20)
    wanted = {f"t{i}": content(4096 + i, i + 1) for i in range(count)}
    right = 0

    def fetch(snapshot: pw.Snapshot, rounds: int) -> int:
        return sum(
            bool((array == wanted[name]).all())
            for _ in range(rounds)
            for name, array in snapshot.fetch_many(list(wanted)).items()
        )

    with pw.connect(address, **options) as client, client.snapshot() as snapshot:
        snapshot.fetch("t0")
        reading, writing = os.pipe()
        if how == "os.fork":
            child = os.fork()
            if child == 0:
                in_the_child(writing, heap, lambda: snapshot.fetch("t1"))
                os._exit(0)
            right += fetch(snapshot, 5)
            os.waitpid(child, 0)
            said = json.loads(os.read(reading, 1 << 16))
        elif how == "multiprocessing fork":
            process = multiprocessing.get_context("fork").Process(
                target=in_the_child, args=(writing, heap, lambda: snapshot.fetch("t1"))
            )
            process.start()
            right += fetch(snapshot, 5)
            process.join()
            said = json.loads(os.read(reading, 1 << 16))
        else:
            spawn = multiprocessing.get_context("spawn")
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=in_a_spawned_child, args=(theirs, address, options))
            process.start()
            right += fetch(snapshot, 5)
            said = list(ours.recv())
            process.join()
        right += fetch(snapshot, 5)
        pipe.send((said, right))
