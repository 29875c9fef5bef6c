"""A system that gives no more threads, descriptors or addresses: typed errors, and all is well once it does again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest

VALUES = np.arange(100_000)

START = """
import contextlib, json, os, resource, signal, sys
import numpy as np
import paramwire as pw

address = sys.argv[1]
def kind(call):
    try:
        result = call()
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return ["ok", type(result).__name__]
def blocked():
    return sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def run(program: str, *arguments: str) -> dict[str, list[str]]:
    words = [sys.executable, "-c", START + program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture
def published(server) -> pw.Server:
    with server.publish() as p:
        p.put("w", VALUES)
    return server


@pytest.fixture
def task_limit() -> Iterator[Path]:
    """A cgroup that limits tasks; the test's process goes in by itself."""
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    reasons = []
    for _, controllers, path in lines:
        if "pids" not in controllers.split(",") and controllers:
            continue
        folder = Path(f"/sys/fs/cgroup/{'pids' if controllers else ''}{path}") / f"paramwire-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            if (folder / "pids.max").exists():
                yield folder
                return
            reasons.append(f"{folder}: no pids controller")
        finally:
            folder.rmdir()
    pytest.skip(f"no cgroup that limits tasks can be made here: {'; '.join(reasons) or 'no pids controller'}")


NO_THREADS = """
folder = sys.argv[2]
with open(folder + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
def limit(to):
    with open(folder + "/pids.max", "w") as file:
        file.write(to)

client = pw.connect(address)
other = pw.connect(address)
unleased = other.snapshot(lease=False)
before = blocked()
with open(folder + "/pids.current") as file:
    limit(file.read())
out = {
    "snapshot": kind(client.snapshot),
    "ticket": kind(lambda: unleased.fetch_async("w")),
    "server": kind(lambda: pw.Server("tcp://127.0.0.1:0")),
    "fetch": kind(lambda: unleased.fetch("w")),
    "leases": kind(lambda: client.server_stats()["leases"] == 0 or 1 / 0),
    "signals": ["ok" if blocked() == before else f"blocked {blocked()}"],
}
limit("max")
out["snapshot after"] = kind(client.snapshot)
out["ticket after"] = kind(lambda: unleased.fetch_async("w").wait())
print(json.dumps(out))
"""


def test_without_threads_calls_that_need_one_say_so_and_signals_stay(published, task_limit):
    out = run(NO_THREADS, published.address, str(task_limit))
    for name in ("snapshot", "ticket", "server"):
        assert out[name][0] == "UnavailableError", out[name]
        assert "thread" in out[name][1]
    assert [out[name][0] for name in ("fetch", "signals", "snapshot after", "ticket after")] == ["ok"] * 4, out


NO_DESCRIPTORS = """
client = pw.connect(address, transport=sys.argv[2])
snapshot = client.snapshot()
def limit(soft):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, 4096))
limit(3)
out = {
    "fetch": kind(lambda: snapshot.fetch("w")),
    "publish": kind(client.publish),
    "connect": kind(lambda: pw.connect(address)),
    "server": kind(lambda: pw.Server("tcp://127.0.0.1:0")),
}
if client.transport == "shm":
    out["view"] = kind(lambda: snapshot.view("w"))
limit(4096)
out["fetch after"] = kind(lambda: snapshot.fetch("w"))
out["view after"] = kind(lambda: client.transport != "shm" or snapshot.view("w"))
print(json.dumps(out))
"""


def test_without_descriptors_the_limit_is_named_and_nothing_is_called_corrupt(published, transport):
    out = run(NO_DESCRIPTORS, published.address, transport)
    assert (out.pop("fetch after")[0], out.pop("view after")[0]) == ("ok", "ok")
    if transport != "tcp":  # connecting tried the path: the link of the first fetch is there
        assert out.pop("fetch")[0] == "ok"
    for name, (error, text) in out.items():
        assert error in ("UnavailableError", "BackpressureError"), f"{name}: {error}: {text}"
        assert "Too many open files" in text or "ulimit -n" in text, text


NO_ADDRESSES = """
with open("/proc/self/status") as status:
    size = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), resource.RLIM_INFINITY))
import warnings
with warnings.catch_warnings(record=True) as told:
    client = pw.connect(address)
assert [w.category for w in told] == [pw.FallbackWarning]
print(json.dumps({"client": [client.transport, str(client.rejected)], "fetch": kind(lambda: client.fetch("w")),
       "pinned": kind(lambda: pw.connect(address, transport="shm"))}))
"""


def test_an_arena_that_does_not_fit_into_the_address_space_is_read_by_another_way(published):
    out = run(NO_ADDRESSES, published.address)
    transport, rejected = out["client"]
    assert transport in ("udp", "tcp")
    assert "Cannot allocate memory" in rejected
    assert out["fetch"] == ["ok", "ndarray"]
    assert out["pinned"][0] == "UnavailableError"


FROZEN_VIEWER = """
snapshot = pw.connect(address, transport="shm", lease_ttl=0.1).snapshot()
view = snapshot.view("w")
array = view.array
print("ready", flush=True)
sys.stdin.readline()
print(int(array.sum()), flush=True)
"""


def test_a_frozen_reader_keeps_its_view_and_holds_up_nobody(published, until):
    words = [sys.executable, "-c", START + FROZEN_VIEWER, published.address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout.readline() == "ready\n"
            assert published.stats()["leases"] == 1
            viewer.send_signal(signal.SIGSTOP)
            os.waitpid(viewer.pid, os.WUNTRACED)
            assert until(lambda: published.stats()["leases"] == 0), "a lease ends though its holder can't say so"
            for i in range(8):
                with published.publish() as p:
                    p.put("w", VALUES + i + 1)
            assert published.stats()["quarantined_slots"] == 1
            with pw.connect(published.address) as client:
                np.testing.assert_array_equal(client.fetch("w"), VALUES + 8)
            viewer.send_signal(signal.SIGCONT)
            out, _ = viewer.communicate("\n", timeout=30)
            assert int(out) == VALUES.sum()
        finally:
            viewer.kill()
    assert until(lambda: published.stats()["quarantined_slots"] == 0)


FEW_DESCRIPTORS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
with pw.Server(unix_directory=address) as server:
    with server.publish() as p:
        p.put("w", np.arange(100_000))
    print(server.address, flush=True)
    sys.stdin.readline()
"""


def test_a_server_without_descriptors_serves_who_is_connected_and_others_later(tmp_path):
    words = [sys.executable, "-c", START + FEW_DESCRIPTORS, str(tmp_path / "s")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            with pw.connect(address, transport="tcp") as first:
                np.testing.assert_array_equal(first.fetch("w"), VALUES)
                clients, refused = [], (pw.DeadlineError, pw.UnreachableError, pw.BackpressureError)
                with contextlib.suppress(refused):
                    for _ in range(60):
                        clients.append(pw.connect(address, transport="tcp", timeout=0.5))
                assert 10 < len(clients) < 50
                np.testing.assert_array_equal(first.fetch("w"), VALUES)
                for client in clients:
                    client.close()
                with pw.connect(address, transport="shm") as later:
                    np.testing.assert_array_equal(later.fetch("w"), VALUES)
            assert server.poll() is None
        finally:
            server.kill()
