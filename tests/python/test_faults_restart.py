"""A server is killed and another takes its addresses: the offsets of the first one are never used again."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import paramwire as pw

# Publishes x and y, each filled with one number that says which server, tensor and version it is of, at every line of
# stdin; `order` is in which they are stored, so that offsets differ between servers.
SERVER = """
import json, sys
import numpy as np
import paramwire as pw

options = json.loads(sys.argv[1])
with pw.Server(**options["server"]) as server:
    print(json.dumps({"address": server.address, "endpoints": server.endpoints}), flush=True)
    for _ in sys.stdin:
        with server.publish() as p:
            for name in options["order"]:
                number = options["base"] + "xy".index(name) * 1000 + p.version.counter
                p.put(name, np.full(options["size"], number, dtype=np.uint32))
        print(json.dumps(list(server.newest)), flush=True)
"""


class Numbered:
    def __init__(self, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = json.loads(self.process.stdout.readline())

    def publish(self) -> None:
        print(file=self.process.stdin, flush=True)
        assert self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_after_a_swap_of_servers_four_threads_get_the_new_ones_bytes_or_an_error(tmp_path, transport, until):
    """The second server stores the tensors in another order and size, under a lower epoch and lower counters."""
    size_a, size_b = 300_000, 200_000
    listen = [f"unix:{tmp_path}/s.sock", "tcp://127.0.0.1:0"]
    first = Numbered(server={"listen": listen}, order="xy", base=10_000, size=size_a)
    second = None
    try:
        for _ in range(5):
            first.publish()
        swapped, over = threading.Event(), threading.Event()
        done_before, done_after = [0] * 4, [0] * 4
        failures: list[str] = []

        def check(x: np.ndarray, y: np.ndarray, killed: bool) -> bool:
            """True: of the second server."""
            number = int(x[0])
            of_second = number >= 20_000
            assert (x == number).all()
            assert (y == number + 1000).all(), "x and y are of one version"
            assert len(x) == len(y) == (size_b if of_second else size_a)
            assert number % 1000 in range(1, 6)
            assert of_second or not killed or transport == "shm"
            return of_second

        def work(i: int, client: pw.Client, snapshot: pw.Snapshot) -> None:
            try:
                while not over.is_set():
                    killed = swapped.is_set()
                    try:
                        got = (client if i % 2 else snapshot).fetch_many(["x", "y"])
                        of_second = check(got["x"], got["y"], killed)
                    except (pw.StaleError, pw.UnreachableError):
                        of_second = False
                    except pw.NotFoundError:  # the second server, before its first publish
                        assert swapped.is_set()
                        of_second = False
                    else:
                        (done_after if of_second else done_before)[i] += 1
                    if swapped.is_set() and not of_second:
                        try:
                            snapshot = client.snapshot()
                        except (pw.UnreachableError, pw.NotFoundError):
                            continue
            except BaseException as error:
                failures.append(repr(error))

        clients = [pw.connect(first.facts["address"], transport=transport, timeout=20.0) for _ in range(2)]
        threads = [
            threading.Thread(target=work, args=(i, clients[i // 2], clients[i // 2].snapshot())) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        try:
            assert until(lambda: failures or min(done_before) > 2)
            swapped.set()
            first.kill()
            second = Numbered(
                server={"listen": first.facts["endpoints"], "state": f"{tmp_path}/epoch"},
                order="yx",
                base=20_000,
                size=size_b,
            )
            second.publish()
            assert until(lambda: failures or min(done_after) > 2, 60.0), (done_before, done_after)
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
                assert snapshot["x"][0] == 20_001
            client.close()
    finally:
        first.kill()
        if second is not None:
            second.kill()
