"""A server is killed and another takes its address, with other offsets and lower versions."""

from __future__ import annotations

import threading

import paramwire as pw
import programs
import pytest

# Marks of the contents: of the first server's x and y, and of the second's.
FIRST, SECOND = {"x": 11, "y": 12}, {"x": 21, "y": 22}
SIZE_FIRST, SIZE_SECOND = 300_000, 200_000


def of_second(name, array) -> bool:
    """errors: AssertionError when it is of neither server, or half of each"""
    marks, size = (SECOND, SIZE_SECOND) if len(array) == SIZE_SECOND else (FIRST, SIZE_FIRST)
    assert len(array) == size
    assert (array == programs.content(size, marks[name])).all()
    return marks is SECOND


def test_after_a_swap_of_servers_threads_get_the_new_ones_bytes_or_an_error(start_server, connect, until, tmp_path):
    first = start_server()
    for _ in range(5):
        first.publish(x=(SIZE_FIRST, FIRST["x"]), y=(SIZE_FIRST, FIRST["y"]))
    swapped, over = threading.Event(), threading.Event()
    before, after, failures = [0] * 4, [0] * 4, []

    def work(i: int, client: pw.Client, snapshot: pw.Snapshot) -> None:
        try:
            while not over.is_set():
                killed = swapped.is_set()
                try:
                    got = (client if i % 2 else snapshot).fetch_many(["x", "y"])
                except (pw.StaleError, pw.UnreachableError):
                    assert swapped.is_set()
                    second = False
                except pw.NotFoundError:  # the second server before its publish
                    assert swapped.is_set()
                    second = False
                else:
                    second = of_second("x", got["x"])
                    assert of_second("y", got["y"]) == second, "x and y are of one version"
                    assert second or not killed
                    (after if second else before)[i] += 1
                if swapped.is_set() and not second:
                    try:
                        snapshot = client.snapshot()
                    except (pw.UnreachableError, pw.NotFoundError):
                        continue
        except BaseException as error:
            failures.append(repr(error))

    clients = [connect(first) for _ in range(2)]
    old = clients[0].snapshot()
    threads = [threading.Thread(target=work, args=(i, clients[i // 2], clients[i // 2].snapshot())) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert until(lambda: failures or min(before) > 1)
        swapped.set()
        first.kill()
        second = start_server(listen=first.endpoints, state=str(tmp_path / "epoch"))
        second.publish(y=(SIZE_SECOND, SECOND["y"]), x=(SIZE_SECOND, SECOND["x"]))
        assert until(lambda: failures or min(after) > 1), (before, after)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    for client in clients:
        assert client.stats()["restarts_seen"] == 1
        assert client.stats()["corrupt"] == 0
        with client.snapshot() as snapshot:
            assert snapshot.version == pw.Version(1, 1), "lower than the first server's, and right"
            assert of_second("x", snapshot.fetch("x"))
    with pytest.raises(pw.StaleError):
        old.fetch("x")
