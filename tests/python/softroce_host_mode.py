"""For test_softroce_guest.py, in a guest: `paramwire softroce run --where host` several times; prints what was seen.

One process for all: an emulated processor takes seconds to import the package.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from paramwire.cli import main

PATIENCE_MS = 120_000
CLONE_NEWNET = 0x40000000


def around() -> dict[str, list[str]]:
    """Devices, their links, and the processes of commands that should be gone."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True, timeout=60).stdout
    names = [line.split(": ")[1].partition("@")[0] for line in links.splitlines()]
    left = []
    for folder in Path("/proc").iterdir():
        try:
            if (folder / "cmdline").read_bytes().startswith(b"sleep\x001234\0"):
                left.append(folder.name)
        except OSError:
            continue
    devices = sorted(path.name for path in Path("/sys/class/infiniband").iterdir())
    return {"devices": devices, "links": sorted(name for name in names if name.startswith("rx")), "left": left}


def run(*words: str) -> int:
    return main(["softroce", "run", "--where", "host", *words])


def inside() -> dict[str, object]:
    script = 'exec >inside; echo "$PARAMWIRE_SOFTROCE_DEVICES"; ls /sys/class/infiniband; sleep 1234 & exit 3'
    status = run("--", "sh", "-c", script)
    devices, *listed = Path("inside").read_text().splitlines()
    return {"status": status, "devices": devices, "listed": listed}


def ended(pidfd: int) -> None:
    """Waits until that process has."""
    assert select.select([pidfd], [], [], PATIENCE_MS / 1000)[0]
    os.close(pidfd)


def kill() -> None:
    """SIGKILL for the process that has made devices, while its command runs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.set_inheritable(write, True)
        os.dup2(write, 1)
        run("--", "sh", "-c", "echo runs; exec sleep 1234")
        os._exit(99)
    os.close(write)
    assert os.read(read, 16) == b"runs\n"
    pidfds = [os.pidfd_open(int(pid)) for pid in Path(f"/proc/{child}/task/{child}/children").read_text().split()]
    assert len(pidfds) == 2  # the command, and what takes its devices down
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for pidfd in pidfds:
        ended(pidfd)


def in_another_namespace() -> dict[str, object]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
        with open("namespace", "w") as sys.stderr:
            status = run("--", "true")
        os.write(write, json.dumps({"status": status, "after": around()}).encode())
        os._exit(0)
    os.close(write)
    found: dict[str, object] = json.loads(os.read(read, 65536))
    os.waitpid(child, 0)
    return found | {"said": Path("namespace").read_text()}


def main_program() -> None:
    found: dict[str, object] = {"inside": inside()}
    found["after inside"] = around()
    found["signal"] = run("--", "sh", "-c", "sleep 1234 & kill -9 $$")
    found["after signal"] = around()
    found["timeout"] = run("--timeout", "0.5", "--", "sh", "-c", "sleep 1234 & sleep 1234")
    found["after timeout"] = around()
    found["missing"] = run("--", "no-such-program")
    found["after missing"] = around()
    kill()
    found["after a kill"] = around()
    found["namespace"] = in_another_namespace()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main_program()
