"""Readers without a lease under a writer at full speed: no torn block is accepted, and every reader gets on.

The server keeps no version but the newest, so that slots are written again as fast as they can be.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import paramwire as pw
import peers
import programs
import pytest

MARKS = [1, 2, 3]


class Reader(threading.Thread):
    """Fetches for ever, and looks at every byte."""

    def __init__(self, client: pw.Client, nbytes: int) -> None:
        super().__init__()
        self.client = client
        self.wanted = [programs.content(nbytes, mark) for mark in MARKS]
        self.out = np.zeros(nbytes, dtype=np.uint8)
        self.seconds: list[float] = []  # of each fetch
        self.seen: set[int] = set()
        self.torn = 0
        self.error: pw.Error | None = None
        self.failure: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                begun = time.monotonic()
                self.client.fetch("w", out=self.out)
                self.seconds.append(time.monotonic() - begun)
                right = [i for i, content in enumerate(self.wanted) if np.array_equal(self.out, content)]
                self.torn += not right
                self.seen.update(right)
        except pw.Error as error:
            self.error = error
        except BaseException as failure:
            self.failure = failure

    def ended(self) -> bool:
        return not self.is_alive()

    def stop(self) -> None:
        self.over.set()
        self.join(peers.PATIENCE)
        assert not self.is_alive()


@pytest.fixture
def start_readers(connect):
    started: list[Reader] = []

    def start(server, nbytes: int, count: int) -> list[Reader]:
        new = [Reader(connect(server), nbytes) for _ in range(count)]
        started.extend(new)
        for reader in new:
            reader.start()
        return new

    yield start
    for reader in started:
        reader.stop()


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, 8 << 20], ids=["64KiB", "1MiB", "8MiB"])
def test_no_torn_block_is_accepted_and_no_reader_starves_while_a_writer_rewrites_it(
    start_server, start_readers, until, nbytes
):
    server = start_server(retained=1)
    server.publish(w=(nbytes, MARKS[0]))
    readers = start_readers(server, nbytes, 2)

    def each_has(count: int) -> bool:
        return all(len(reader.seconds) >= count or reader.ended() for reader in readers)

    assert until(lambda: each_has(4))
    alone = [float(np.median(reader.seconds)) for reader in readers]
    for reader in readers:
        reader.seconds = []
    server.ask("rewrite", "w", nbytes, MARKS)
    assert until(lambda: each_has(6) and sum(reader.client.stats()["retries"] for reader in readers) > 0, 120.0)
    for reader in readers:
        reader.stop()
    published = server.ask("stop")
    assert [reader.failure or reader.error for reader in readers if reader.failure or reader.error] == []
    assert sum(reader.torn for reader in readers) == 0
    assert sum(reader.client.stats()["corrupt"] for reader in readers) == 0
    assert len(set().union(*(reader.seen for reader in readers))) > 1
    assert published > 6
    for reader, before in zip(readers, alone, strict=True):
        contended = float(np.median(reader.seconds))
        assert contended <= 10 * before, f"{contended:.3f} s a fetch, {before:.3f} s without a writer"


def test_readers_of_a_server_killed_in_the_middle_of_its_writing_are_told_and_do_not_spin(
    start_server, start_readers, until
):
    nbytes = 1 << 20
    server = start_server(retained=1)
    server.publish(w=(nbytes, MARKS[0]))
    server.ask("rewrite", "w", nbytes, MARKS)
    readers = start_readers(server, nbytes, 2)
    assert until(lambda: all(reader.seconds for reader in readers))
    server.kill()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
        assert reader.failure is None
        assert isinstance(reader.error, pw.UnreachableError), reader.error
        assert reader.torn == 0


def test_a_publisher_killed_in_the_middle_of_its_writing_leaves_readers_the_last_version(
    start_server, start_readers, start_peer, until
):
    nbytes = 1 << 20
    server = start_server(retained=1)
    server.publish(w=(nbytes, MARKS[0]))
    publisher = start_peer(programs.publish_for_ever, server.address, "w", nbytes, MARKS)
    readers = start_readers(server, nbytes, 2)
    for _ in range(3):
        publisher.answer()
    assert until(lambda: all(reader.seconds for reader in readers))
    publisher.kill()
    done = [len(reader.seconds) for reader in readers]
    assert until(lambda: all(len(reader.seconds) > before + 3 for reader, before in zip(readers, done, strict=True)))
    for reader in readers:
        reader.stop()
        assert reader.failure is None
        assert reader.error is None
        assert reader.torn == 0
    last = readers[0].client.fetch("w")
    assert any(np.array_equal(last, programs.content(nbytes, mark)) for mark in MARKS)
