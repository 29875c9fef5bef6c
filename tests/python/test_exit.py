"""Short programs that end in every way: each ends soon, with its own status, without a message of a dying thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import gc, os, signal, sys, threading
import numpy as np
import paramwire as pw

address = sys.argv[1]
transport = sys.argv[2]
ready = threading.Event()
def loop(work):
    def run():
        while True:
            work()
            ready.set()
    return run
"""
CONNECT = "client = pw.connect(address, transport=transport, timeout=60.0)\nsnapshot = client.snapshot()\n"
VIEW = "snapshot = pw.connect(address, transport='shm').snapshot(); v = snapshot.view('w')\n"
FETCH = "loop(lambda: snapshot.fetch('w'))"
DAEMON = "threading.Thread(target={}, daemon=True).start(); ready.wait()\n"
FORK = """
pid = os.fork()
if pid == 0:
    {child}
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
REFUSED = """
    try:
        {call}
    except pw.InvalidError as error:
        assert "fork" in str(error), error
    else:
        sys.exit(3)
    sys.exit(5)
"""

# name: (program, exit status)
PROGRAMS = {
    "nothing closed": (CONNECT + "snapshot['w']", 0),
    "only imported": ("", 0),
    "async in flight": (CONNECT + "t = [snapshot.fetch_async('w') for _ in range(50)]", 0),
    "async dropped": (CONNECT + "for _ in range(50): snapshot.fetch_async('w')", 0),
    "async in flight, exception": (CONNECT + "t = snapshot.fetch_async('w')\nraise RuntimeError('expected')", 1),
    "async in flight, os._exit": (CONNECT + "t = snapshot.fetch_async('w')\nos._exit(7)", 7),
    "async in flight, sys.exit": (CONNECT + "t = snapshot.fetch_async('w')\nsys.exit(9)", 9),
    "daemon thread fetches": (CONNECT + DAEMON.format(FETCH), 0),
    "ten daemon threads fetch": (CONNECT + DAEMON.format(FETCH) * 10, 0),
    "daemon thread fetches, exception": (CONNECT + DAEMON.format(FETCH) + "raise RuntimeError('expected')", 1),
    "daemon thread opens snapshots": (CONNECT + DAEMON.format("loop(lambda: client.snapshot().close())"), 0),
    "daemon thread connects": (DAEMON.format("loop(lambda: pw.connect(address, transport=transport))"), 0),
    "daemon thread publishes": (CONNECT + DAEMON.format("loop(lambda: client.publish().abort())"), 0),
    "daemon thread checks sums": ("data = bytes(1 << 20)\n" + DAEMON.format("loop(lambda: pw.crc64(data))"), 0),
    "thread that ends": (CONNECT + "t = threading.Thread(target=lambda: snapshot['w']); t.start()", 0),
    "in a reference cycle": (CONNECT + "a = [client, snapshot]; a.append(a); del client, snapshot, a", 0),
    "in a reference cycle, collected": (
        CONNECT + "a = [client, snapshot]; a.append(a); del client, snapshot, a; gc.collect()",
        0,
    ),
    "closed in the wrong order": (CONNECT + "client.close(); snapshot.close(); del client", 0),
    "open publish": (CONNECT + "p = client.publish(); p.put('x', np.zeros(3))", 0),
    "own server": (
        "s = pw.Server('tcp://127.0.0.1:0'); c = pw.connect(s.address, transport='tcp')\n"
        "p = s.publish(); p.put('x', np.zeros(3))",
        0,
    ),
    "own server, daemon thread": (
        "s = pw.Server('tcp://127.0.0.1:0')\nwith s.publish() as p: p.put('w', np.zeros(3))\n"
        "snapshot = pw.connect(s.address, transport='tcp').snapshot()\n" + DAEMON.format(FETCH),
        0,
    ),
    "at exit": (CONNECT + "import atexit; atexit.register(lambda: snapshot['w'])", 0),
    "weak finalizer": (CONNECT + "import weakref\nclass A: pass\na = A(); weakref.finalize(a, client.close)", 0),
    "frozen, async in flight": (
        CONNECT + "os.kill(int(sys.argv[3]), signal.SIGSTOP)\nt = snapshot.fetch_async('w')",
        0,
    ),
    "frozen, daemon thread": (
        CONNECT
        + "os.kill(int(sys.argv[3]), signal.SIGSTOP)\n"
        + "threading.Thread(target=client.server_stats, daemon=True).start()",
        0,
    ),
    "a tensor of a view": (VIEW + "a = np.from_dlpack(v); del v", 0),
    "a tensor of a view, os._exit": (VIEW + "a = np.from_dlpack(v); os._exit(7)", 7),
    "a tensor of a view in a reference cycle": (VIEW + "a = [np.from_dlpack(v), v]; a.append(a); del a, v", 0),
    "a capsule that nobody took": (VIEW + "c = v.__dlpack__(max_version=(1, 0)); del v", 0),
    "daemon thread takes tensors of views": (
        VIEW + DAEMON.format("loop(lambda: np.from_dlpack(snapshot.view('w')).sum())"),
        0,
    ),
    "a labelled array": ("a = np.from_dlpack(pw.Labelled(np.zeros(1000)))", 0),
    "ten daemon threads label arrays": (
        DAEMON.format("loop(lambda: np.from_dlpack(pw.Labelled(np.zeros(1000), dtype='f64')))") * 10,
        0,
    ),
    "fork, child drops a tensor of a view": (
        VIEW + "a = np.from_dlpack(v)" + FORK.format(child="del a, v; gc.collect(); sys.exit(5)"),
        5,
    ),
    "fork, child ends": (CONNECT + "t = snapshot.fetch_async('w')" + FORK.format(child="sys.exit(5)"), 5),
    "fork, child _exits": (CONNECT + "t = snapshot.fetch_async('w')" + FORK.format(child="os._exit(5)"), 5),
    "fork, child fetches": (CONNECT + "snapshot['w']" + FORK.format(child=REFUSED.format(call="snapshot['w']")), 5),
    "fork, child opens": (CONNECT + FORK.format(child=REFUSED.format(call="client.snapshot()")), 5),
    "fork, child serves": (
        "s = pw.Server('tcp://127.0.0.1:0')" + FORK.format(child=REFUSED.format(call="s.publish()")),
        5,
    ),
    "fork, child connects anew": (
        CONNECT
        + FORK.format(child="c = pw.connect(address, transport=transport); c.fetch('w'); c.close(); sys.exit(5)"),
        5,
    ),
}


# Programs that ask for no transport run once.
RUNS = [
    (transport, name)
    for transport in ("shm", "udp", "tcp")
    for name, (text, _) in PROGRAMS.items()
    if transport == "shm" or "transport=transport" in text
]


@pytest.fixture(scope="module")
def serving(shared_server_process):
    """How a program ends is between it and the system: what it leaves at the server is other tests' matter."""
    shared_server_process.publish({"w": ("f4", (200_000,))})
    return shared_server_process


@pytest.mark.parametrize(("transport", "name"), RUNS)
def test_programs_end(request, transport, name):
    text, status = PROGRAMS[name]
    if "SIGSTOP" in text:
        server = request.getfixturevalue("server_process")
        server.publish({"w": ("f4", (200_000,))})
    else:
        server = request.getfixturevalue("serving")
    done = subprocess.run(
        [sys.executable, "-c", START + text, server.address, transport, str(server.pid)],
        capture_output=True,
        text=True,
        timeout=20,  # a hang; two seconds are what it may take on a free machine
        check=False,
    )
    assert done.returncode == status, done.stderr
    expected = "RuntimeError: expected\n" if status == 1 else ""
    assert done.stderr.endswith(expected) if expected else done.stderr == "", done.stderr


def test_a_view_of_the_parent_outlives_a_child_that_ends(serving):
    program = (
        CONNECT
        + "v = snapshot.view('w'); a = v.array"
        + FORK.format(child="del a, v; gc.collect(); sys.exit(5)").replace(
            "_, status", "\nassert a[7] == 7 and a[:1000].sum() == 499500\n_, status"
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", START + program, serving.address, "shm"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (5, "")


def test_import_loads_nothing_heavy():
    program = """
import sys
before = set(sys.modules)
import paramwire
heavy = {"numpy", "torch", "ml_dtypes", "rich", "gguf", "tokenizers", "safetensors", "asyncio"}
print(sorted(heavy & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
