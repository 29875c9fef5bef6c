"""The two network devices under the RDMA devices, and what the kernel counts of RDMA: by ip(8), tc(8) and rdma(8)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# Of the pair as it is made, and the RDMA payload that goes with it.
MTU, RDMA_MTU = 4200, 4096


@dataclasses.dataclass(frozen=True)
class Side:
    """One RDMA device, its network device, and that one's IPv4 address."""

    device: str
    netdev: str
    ipv4: str


def sides() -> tuple[Side, Side]:
    """As `paramwire softroce run` made them.  errors: LookupError that says how to get them"""
    try:
        parts = [os.environ[f"PARAMWIRE_SOFTROCE_{name}"].split() for name in ("DEVICES", "NETDEVS", "IPV4")]
    except KeyError as missing:
        raise LookupError(f"{missing} is not set: these tests need two RoCE devices: make softroce") from None
    for device in parts[0]:
        if not Path("/sys/class/infiniband", device).is_dir():
            raise LookupError(f"RDMA device {device} is not there: make softroce")
    one, two = zip(*parts, strict=True)
    return Side(*one), Side(*two)


def run(*words: str) -> str:
    """errors: AssertionError with what the command said"""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PATH": SYSTEM_PATH}
    )
    assert done.returncode == 0, f"{' '.join(words)}: status {done.returncode}: {done.stderr}{done.stdout}"
    return done.stdout


def resources(kind: str, pid: int) -> list[dict[str, Any]]:
    """Of process `pid` as the kernel has them; kind: qp, mr, cq, pd. It notes the thread that made each."""
    threads = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
    found = json.loads(run("rdma", "-j", "resource", "show", kind) or "[]")
    return [row for row in found if row.get("pid") in threads]


def packets_received(device: str) -> int:
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts").read_text())


@contextlib.contextmanager
def queue_discipline(side: Side, *words: str) -> Iterator[None]:
    """netem on what leaves `side`, for example "loss", "2%"."""
    run("tc", "qdisc", "add", "dev", side.netdev, "root", "netem", *words)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", side.netdev, "root")


@contextlib.contextmanager
def mtu(side: Side, nbytes: int) -> Iterator[None]:
    run("ip", "link", "set", side.netdev, "mtu", str(nbytes))
    try:
        yield
    finally:
        run("ip", "link", "set", side.netdev, "mtu", str(MTU))


@contextlib.contextmanager
def down(side: Side) -> Iterator[None]:
    run("ip", "link", "set", side.netdev, "down")
    try:
        yield
    finally:
        run("ip", "link", "set", side.netdev, "up")


@contextlib.contextmanager
def moved(side: Side) -> Iterator[None]:
    """Its address goes, another one takes its place in the table, and it comes back behind that one."""
    stranger = "192.0.2.1/24"  # RFC 5737
    address = f"{side.ipv4}/24"
    run("ip", "address", "del", address, "dev", side.netdev)
    try:
        run("ip", "address", "add", stranger, "dev", side.netdev)
        try:
            # The kernel's table follows by a worker of its own, in order.
            run("ip", "address", "add", address, "dev", side.netdev)
            yield
        finally:
            for each in (stranger, address):
                run("ip", "address", "del", each, "dev", side.netdev)
    finally:
        run("ip", "address", "add", address, "dev", side.netdev)
