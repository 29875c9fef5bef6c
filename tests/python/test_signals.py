"""Signal handlers that run inside calls: they may call again, fork, or raise."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import paramwire as pw
import pytest

START = """
import os, signal, sys
import numpy as np, paramwire as pw

server = pw.Server("tcp://127.0.0.1:0")
with server.publish() as p:
    p.put("w", np.arange(1000))
ours, other = (pw.connect(server.address, transport=sys.argv[1]) for _ in range(2))
said = []
def on_alarm(action):
    def handler(*_):
        try:
            said.append(action())
        except pw.Error as error:
            said.append(error)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
def wait_long():
    try:
        ours.snapshot((1 << 31, 1), wait=0.5)
    except pw.Error as error:
        return error
"""


def run(body: str, transport: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + body, transport], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("wire", ["tcp", "udp"])
@pytest.mark.parametrize(
    "call",
    ["other.fetch('w')", "other.server_stats()", "other.snapshot()", "pw.connect(server.address, transport='tcp')"],
)
def test_a_handler_may_call_another_client_and_the_wait_goes_on(wire, call):
    body = f"on_alarm(lambda: {call})\nassert isinstance(wait_long(), pw.StaleError)\nprint(type(said[0]).__name__)"
    assert not run(body, wire).strip().endswith("Error")


def test_a_handler_that_calls_inside_a_call_of_the_same_client_is_refused_at_once():
    body = "on_alarm(lambda: ours.server_stats())\nassert isinstance(wait_long(), pw.StaleError)\nprint(repr(said[0]))"
    out = run(body, "tcp")
    assert "InvalidError" in out
    assert "use a client of its own" in out


def test_the_child_of_a_fork_in_a_handler_leaves_the_parents_answer_alone():
    body = """
def fork():
    global child
    child = os.fork()
child = None
on_alarm(fork)
error = wait_long()
if child == 0:
    os._exit(0 if isinstance(error, pw.DeadlineError | pw.InvalidError) else 9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert isinstance(error, pw.StaleError), error
assert ours.server_stats()["leases"] == 0
"""
    assert run(body, "tcp") == ""


def test_an_interrupted_call_leaves_the_calls_of_other_threads_whole(server_process):
    """The connection that they wait for their turn on is dropped: they ask on the next one."""
    server_process.publish({"w": ("f4", (10,))})
    errors = []
    with pw.connect(server_process.address, transport="tcp", timeout=20.0) as client:
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                try:
                    client.server_stats()
                except pw.Error as error:
                    errors.append(error)

        def raise_it(*_: object) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, raise_it)
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                with pytest.raises(TimeoutError):
                    client.snapshot((1 << 31, 1), wait=5.0)
        finally:
            signal.signal(signal.SIGALRM, before)
            stop.set()
            for thread in threads:
                thread.join()
    assert errors == []
