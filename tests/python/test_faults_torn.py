"""The optimistic mode under a writer at full speed: no torn block is accepted, every reader gets on.

The server process publishes one block again and again, in turn one of two patterns that each describe themselves, and
keeps no version but the newest, so that slots are reused as fast as they can be. Readers take no lease.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time

import numpy as np
import paramwire as pw
import pytest

# Each word is its index times an odd number, exclusive-or the pattern's own mark: a word of the other pattern, or of
# another place, is seen.
MULTIPLIER, MARKS = 0x9E3779B97F4A7C15, (0x0123456789ABCDEF, 0xFEDCBA9876543210)
WRITER = f"""
import sys
import numpy as np
import paramwire as pw

words = int(sys.argv[2]) // 8
base = np.arange(words, dtype=np.uint64) * np.uint64({MULTIPLIER})
patterns = [base ^ np.uint64(mark) for mark in {MARKS}]
with pw.Server(unix_directory=sys.argv[1], retained=1) as server:
    turn = 0
    while True:
        with server.publish() as p:
            p.put("w", patterns[turn % 2])
        turn += 1
        if turn == 2:
            print(server.address, flush=True)
"""


@contextlib.contextmanager
def flipping(tmp_path, nbytes: int):
    words = [sys.executable, "-c", WRITER, str(tmp_path / "s"), str(nbytes)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        try:
            yield writer, writer.stdout.readline().strip()
        finally:
            writer.kill()


def patterns(nbytes: int) -> list[np.ndarray]:
    base = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(MULTIPLIER)
    return [base ^ np.uint64(mark) for mark in MARKS]


class Reader(threading.Thread):
    """Fetches for ever; counts what it got, and notes when."""

    def __init__(self, address: str, transport: str, nbytes: int, optimistic_snapshot: bool) -> None:
        super().__init__()
        self.client = pw.connect(address, transport=transport, timeout=10.0)
        self.patterns = patterns(nbytes)
        self.optimistic_snapshot = optimistic_snapshot
        self.out = np.zeros(nbytes // 8, dtype=np.uint64)
        self.got: list[float] = []
        self.seen: set[int] = set()
        self.stale = self.torn = 0
        self.error: pw.Error | None = None
        self.failure: BaseException | None = None
        self.over = threading.Event()

    def _read(self) -> None:
        if self.optimistic_snapshot:
            self.client.snapshot(lease=False).fetch("w", out=self.out)
        else:
            self.client.fetch("w", out=self.out)

    def run(self) -> None:
        try:
            while not self.over.is_set():
                try:
                    self._read()
                except pw.StaleError:
                    assert self.optimistic_snapshot, "a fetch of the newest ends, however fast somebody publishes"
                    self.stale += 1
                    continue
                except (pw.UnreachableError, pw.DeadlineError) as error:
                    self.error = error
                    return
                turn = int(self.out[0] == self.patterns[1][0])
                self.torn += not np.array_equal(self.out, self.patterns[turn])
                self.seen.add(turn)
                self.got.append(time.monotonic())
        except BaseException as failure:
            self.failure = failure


def report(readers: list[Reader]) -> str:
    return json.dumps([{"got": len(r.got), "stale": r.stale, "retries": r.client.stats()["retries"]} for r in readers])


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, 8 << 20], ids=["64KiB", "1MiB", "8MiB"])
def test_no_torn_block_is_accepted_while_a_writer_flips_it(tmp_path, transport, nbytes, soak, until):
    seconds = 60.0 if soak else 0.7
    with flipping(tmp_path, nbytes) as (writer, address):
        readers = [Reader(address, transport, nbytes, i % 2 == 1) for i in range(4)]
        begun = time.monotonic()
        for reader in readers:
            reader.start()
        newest = [reader for reader in readers if not reader.optimistic_snapshot]

        def enough() -> bool:
            if any(reader.failure or reader.error for reader in readers):
                return True
            changed = sum(reader.stale + reader.client.stats()["retries"] for reader in readers)
            got_on = all(len(reader.got) >= 3 for reader in newest)
            return time.monotonic() - begun >= seconds and changed > 0 and got_on

        ended = until(enough, seconds + 60)
        assert writer.poll() is None
        for reader in readers:
            reader.over.set()
        for reader in readers:
            reader.join(60)
        assert not any(reader.is_alive() for reader in readers)
        assert [reader.failure or reader.error for reader in readers if reader.failure or reader.error] == []
        assert ended, f"no reader met a change, or one starved: {report(readers)}"
        assert sum(reader.torn for reader in readers) == 0
        assert sum(reader.client.stats()["corrupt"] for reader in readers) == 0
        assert set().union(*(reader.seen for reader in readers)) == {0, 1}
        if soak:  # no second without a fetch, for those that fetch the newest
            for reader in newest:
                gaps = np.diff([begun, *reader.got])
                assert gaps.max() < 1.0, f"{gaps.max():.2f} s without a fetch"
        for reader in readers:
            reader.client.close()


def test_readers_of_a_writer_killed_in_the_middle_are_told_and_do_not_spin(tmp_path, transport, until):
    nbytes = 8 << 20
    with flipping(tmp_path, nbytes) as (writer, address):
        readers = [Reader(address, transport, nbytes, False) for _ in range(2)]
        for reader in readers:
            reader.start()
        assert until(lambda: all(reader.got for reader in readers))
        writer.kill()  # it writes all the time
        writer.wait()
        for reader in readers:
            reader.join(30)
            assert not reader.is_alive()
            assert reader.failure is None
            assert isinstance(reader.error, pw.UnreachableError), reader.error
            assert reader.torn == 0
            reader.client.close()
