"""What the other processes of these tests do: each function runs in one, with a pipe to the test."""

from __future__ import annotations

import contextlib
import threading
import traceback
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
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(MULTIPLIER) ^ np.uint64(mark * MULTIPLIER % (1 << 64))
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
    """"ok" or the error's name, and its text."""
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
