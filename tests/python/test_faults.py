"""Servers and clients that die, freeze, restart or hold wrong bytes: typed errors, each within its deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import paramwire as pw
import pytest

TENSOR = {"w": ("f4", (1000, 16))}
VALUES = np.arange(16_000, dtype=np.float32).reshape(1000, 16)


def test_a_killed_server_is_unreachable(server_process, transport):
    server_process.publish(TENSOR)
    with pw.connect(server_process.address, transport=transport, timeout=5.0) as client:
        snapshot = client.snapshot()
        snapshot["w"]
        server_process.kill()
        if transport != "shm":
            with pytest.raises((pw.UnreachableError, pw.StaleError)):
                snapshot["w"]
        else:  # memory that is mapped stays, and is checked as ever
            with contextlib.suppress(pw.UnreachableError, pw.StaleError):
                np.testing.assert_array_equal(snapshot["w"], VALUES)
        for call in (client.snapshot, client.server_stats, client.publish):
            with pytest.raises(pw.UnreachableError):
                call()


def test_a_frozen_server_costs_the_deadline_and_no_more(server_process, transport):
    server_process.publish(TENSOR)
    with pw.connect(server_process.address, transport=transport) as client, client.snapshot() as snapshot:
        snapshot["w"]
        server_process.freeze()
        begun = time.monotonic()
        if transport != "shm":
            with pytest.raises(pw.DeadlineError):
                snapshot.fetch("w", timeout=0.3)
        else:
            np.testing.assert_array_equal(snapshot.fetch("w", timeout=5.0), VALUES)
        with pytest.raises(pw.DeadlineError):
            client.snapshot(timeout=0.3)
        with pytest.raises(pw.DeadlineError):
            client.publish(timeout=0.3)
        with pytest.raises(pw.DeadlineError):
            pw.connect(server_process.address, timeout=0.3)
        assert time.monotonic() - begun < 15, "four calls of 0.3 s; their default would be 30 s each"
        server_process.thaw()
        np.testing.assert_array_equal(client.fetch("w", timeout=20.0), VALUES)


def test_a_restarted_server_is_another_incarnation(start_server, tmp_path, transport):
    # With a state file the epochs grow even when both start within a second.
    state = str(tmp_path / "state")
    first = start_server(listen=[f"unix:{tmp_path}/s.sock", "tcp://127.0.0.1:0"], state=state)
    first.publish(TENSOR)
    with pw.connect(first.address, transport=transport, timeout=10.0) as client:
        old = client.snapshot()
        before = client.incarnation
        old["w"]
        first.kill()
        second = start_server(listen=first.endpoints, state=state)
        second.publish(TENSOR, add=1)
        new = client.snapshot()
        assert client.incarnation != before
        np.testing.assert_array_equal(new["w"], VALUES + 1)
        if transport != "shm":
            with pytest.raises(pw.StaleError):
                old.fetch("w")
        else:  # memory that is mapped stays; what is read from it is the old version or nothing
            with contextlib.suppress(pw.StaleError):
                np.testing.assert_array_equal(old["w"], VALUES)
        with pytest.raises(pw.StaleError):
            client.snapshot(old.version)
        assert client.stats()["restarts_seen"] == 1


def test_a_snapshot_of_another_incarnation_is_stale_though_the_numbers_are_equal(start_server, tmp_path, transport):
    """Both servers get the epoch 1, from state files of their own: only the incarnation tells them apart."""
    first = start_server(listen=[f"unix:{tmp_path}/s.sock", "tcp://127.0.0.1:0"], state=str(tmp_path / "one"))
    version = first.publish(TENSOR)
    with pw.connect(first.address, transport=transport, timeout=10.0) as client:
        old = client.snapshot()
        first.kill()
        second = start_server(listen=first.endpoints, state=str(tmp_path / "two"))
        assert second.publish(TENSOR, add=1) == version
        np.testing.assert_array_equal(client.snapshot()["w"], VALUES + 1)
        with pytest.raises(pw.StaleError, match="restarted"):
            old.fetch("w")


def test_a_child_forked_meanwhile_does_not_keep_a_servers_state_file(tmp_path):
    script = (
        "import os, sys, paramwire as pw\n"
        "server = pw.Server(state=sys.argv[1])\n"
        "epoch = server.epoch\n"
        "end, hold = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(hold)\n"
        "    os.read(end, 1)\n"
        "    os._exit(0)\n"
        "server.close()\n"
        "del server\n"
        "print(pw.Server(state=sys.argv[1]).epoch - epoch)\n"
    )
    words = [sys.executable, "-c", script, tmp_path / "state"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


def flip_byte(pid: int, pattern: bytes) -> None:
    """Flips one bit in the first arena of process `pid` that holds `pattern`, through /proc/PID/mem."""
    with open(f"/proc/{pid}/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:" in line and "rw" in line.split()[1]]
    with contextlib.ExitStack() as stack:
        try:
            memory = stack.enter_context(open(f"/proc/{pid}/mem", "r+b", buffering=0))
        except PermissionError as refused:
            pytest.skip(f"the memory of another process can't be written here: {refused}")
        for begin, end in ((int(a, 16), int(b, 16)) for a, b in ranges):
            at = begin
            while at < end:
                memory.seek(at)
                try:
                    data = memory.read(min(1 << 24, end - at))
                except OSError as refused:
                    pytest.skip(f"the memory of another process can't be read here: {refused}")
                found = data.find(pattern)
                if found >= 0:
                    place = at + found + len(pattern) // 2
                    memory.seek(place)
                    byte = memory.read(1)[0]
                    memory.seek(place)
                    memory.write(bytes([byte ^ 0x10]))
                    return
                if not data:
                    break
                at += len(data)
    pytest.fail("the tensor's bytes are in no arena")


@pytest.mark.parametrize("how", ["fetch", "view", "rows"])
def test_a_flipped_bit_in_the_store_is_never_handed_out(server_process, transport, how):
    server_process.publish(TENSOR)
    with pw.connect(server_process.address, transport=transport, timeout=10.0) as client, client.snapshot() as snapshot:
        if how == "view" and transport != "shm":
            pytest.skip(f"{transport} has no views")
        flip_byte(server_process.pid, VALUES.tobytes()[:4096])
        read = {
            "fetch": lambda: snapshot.fetch("w"),
            "view": lambda: snapshot.view("w"),
            "rows": lambda: snapshot.fetch("w", rows=(0, 100)),
        }
        with pytest.raises(pw.CorruptError, match="w"):
            read[how]()
        assert client.stats()["corrupt"] >= 1 or how == "view"


VIEWER = """
import sys
import paramwire as pw

client = pw.connect(sys.argv[1], transport="shm")
view = client.snapshot(lease=False).view("w")
print(view.array[0, 1], flush=True)
sys.stdin.read()
"""


def test_views_of_a_killed_client_are_given_back(tmp_path, until):
    with pw.Server(unix_directory=str(tmp_path / "s"), retained=1) as server:
        with server.publish() as p:
            p.put("w", VALUES)
        viewer = subprocess.Popen(
            [sys.executable, "-c", VIEWER, server.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert viewer.stdout.readline().strip() == "1.0"
            for i in range(3):
                with server.publish() as p:
                    p.put("w", VALUES + i)
            assert server.stats()["quarantined_slots"] == 1
            os.kill(viewer.pid, signal.SIGKILL)
            viewer.wait()

            def given_back():
                with server.publish() as p:
                    p.put("other", VALUES[:1])
                return server.stats()["quarantined_slots"] == 0

            assert until(given_back)
        finally:
            viewer.kill()
            viewer.wait()
            viewer.stdin.close()
            viewer.stdout.close()


def test_views_count_against_the_quarantine_limit(tmp_path):
    with pw.Server(unix_directory=str(tmp_path / "s"), retained=1, quarantine_limit=1000) as server:
        with server.publish() as p:
            p.put("w", VALUES)
        with pw.connect(server.address, transport="shm") as client:
            view = client.snapshot(lease=False).view("w")

            def publish_often():
                for i in range(4):
                    with server.publish() as p:
                        p.put("w", VALUES + i)

            with pytest.raises(pw.BackpressureError, match=str(os.getpid())):
                publish_often()
            view.release()
            with server.publish() as p:
                p.put("w", VALUES)


def interrupt_soon(seconds: float) -> list[float]:
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(seconds, send).start()
    return sent


@pytest.mark.parametrize(
    ("call", "transport", "busy_poll"),
    [
        *[(c, "tcp", False) for c in ("fetch", "fetch_many", "ticket", "snapshot", "connect")],
        *[(c, "tcp", False) for c in ("publish", "server_stats")],
        ("fetch", "udp", False),
        ("fetch", "udp", True),
    ],
)
def test_control_c_ends_the_waiting(server_process, call, transport, busy_poll):
    """Each call waits for a frozen server, for up to 60 s. 200 ms are promised; a loaded machine gets a second."""
    server_process.publish(TENSOR)
    client = pw.connect(server_process.address, transport=transport, timeout=60.0, busy_poll=busy_poll)
    snapshot = client.snapshot(lease=False)
    snapshot["w"]
    server_process.freeze()
    calls = {
        "fetch": lambda: snapshot.fetch("w"),
        "fetch_many": lambda: snapshot.fetch_many(["w"]),
        "ticket": lambda: snapshot.fetch_async("w").wait(),
        "snapshot": client.snapshot,
        "connect": lambda: pw.connect(server_process.address, timeout=60.0),
        "publish": client.publish,
        "server_stats": client.server_stats,
    }
    sent = interrupt_soon(0.2)
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert time.monotonic() - sent[0] < 1.0
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun < 5.0, "closing waits for no frozen server"
