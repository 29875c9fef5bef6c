"""Other processes of a test, forked from one that has imported everything.

A Python that starts anew takes seconds on an emulated processor.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import programs

# For an answer that should come soon, seconds: an emulated processor is 20 times slower than a real one.
PATIENCE = 60.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["numpy", "paramwire", "pytest"])


class Peer:
    """A process that runs one function of `programs` (or of another module), with a pipe to it."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=programs.main, args=(theirs, function, *arguments))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def answer(self, seconds: float = PATIENCE) -> Any:
        assert self.pipe.poll(seconds), f"no answer from process {self.pid} in {seconds:g} s"
        answer = self.pipe.recv()
        if isinstance(answer, programs.Failed):
            raise answer
        return answer

    def ask(self, *words: Any) -> Any:
        self.pipe.send(words)
        return self.answer()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        assert wait_until(lambda: states(self.pid) <= {"T"}), states(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)

    def close(self) -> None:
        self.kill()
        self.pipe.close()


class ServerPeer(Peer):
    def __init__(self, **options: Any) -> None:
        super().__init__(programs.serve, options)
        self.address, self.endpoints, self.incarnation = self.answer()

    def publish(self, **tensors: tuple[int, int]) -> tuple[int, int]:
        """Tensors of programs.content(nbytes, mark)."""
        return self.ask("publish", tensors)

    def stats(self) -> dict[str, Any]:
        return self.ask("stats")


def states(pid: int) -> set[str]:
    """Letters of proc(5), one of each thread."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def thread_names(pid: int) -> list[str]:
    return sorted((task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir())


def descriptors(pid: int) -> dict[str, int]:
    """How many of each kind: "socket", "anon_inode:[infinibandevent]", a path."""
    kinds: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        kind = os.readlink(entry).split(":[")[0] if ":[" in os.readlink(entry) else os.readlink(entry)
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Asks again and again, with a bound; for events that have no handle to wait on."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not true():
        if time.monotonic() > end:
            return False
        pause.wait(0.02)
    return True


def close_all(peers: Iterable[Peer]) -> None:
    for peer in peers:
        peer.close()
