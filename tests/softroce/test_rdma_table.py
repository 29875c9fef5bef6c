"""The table of RDMA ports where there are some: usable is what this network namespace, this user and its limit can use.

Each test puts back what it changes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import paramwire as pw
import programs
import pytest
from paramwire._core import rdma_ports

DEVICES = os.environ.get("PARAMWIRE_SOFTROCE_DEVICES", "").split()
NETDEVS = os.environ.get("PARAMWIRE_SOFTROCE_NETDEVS", "").split()
IPV4 = os.environ.get("PARAMWIRE_SOFTROCE_IPV4", "").split()
IPV6 = os.environ.get("PARAMWIRE_SOFTROCE_IPV6", "").split()

# What the kernel does after a change of an address is done by a worker of its own.
KERNEL_SECONDS = 20.0


@pytest.fixture
def look(start_peer):
    """The table as another process sees it."""

    def ask(memlock=None, namespace=False, interfaces=()):
        return start_peer(programs.look, memlock, namespace, list(interfaces)).answer()

    return ask


def ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=60)


def of_netdev(netdev, name):
    return int(Path(f"/sys/class/net/{netdev}/{name}").read_text())


def verbs():
    (row,) = [row for row in pw.available()["transports"] if row["name"] == "verbs"]
    return row


def port(device):
    (found,) = [found for found in rdma_ports() if found["device"] == device]
    return found


def usable(device):
    """{address: index} of the GIDs that can be used now."""
    return {row["gid"]: row["index"] for row in port(device)["gids"] if not row["problem"]}


def until(condition):
    end = time.monotonic() + KERNEL_SECONDS
    while not condition():
        assert time.monotonic() < end, rdma_ports()


def test_both_devices_are_there_with_their_addresses_and_the_first_is_what_doctor_names():
    for device, netdev, address in zip(DEVICES, NETDEVS, IPV4, strict=True):
        found = port(device)
        assert (found["state"], found["software"], found["link"], found["problem"]) == ("ACTIVE", True, "Ethernet", "")
        (row,) = [row for row in found["gids"] if row["gid"] == address]
        assert row["interface"] == netdev
        assert row["type"] == "RoCE v2"
        assert row["problem"] == ""
    row = verbs()
    assert row["usable"], row
    index, mtu = usable(DEVICES[0])[IPV4[0]], port(DEVICES[0])["mtu"]
    expected = f"{DEVICES[0]} port 1 GID {index} (RoCE v2, {IPV4[0]}, {NETDEVS[0]}), MTU {mtu}; software RDMA (rxe)"
    assert row["reason"] == expected


def test_a_namespace_without_the_interface_sees_the_devices_and_uses_none(look):
    """In the second try the numbers of its interfaces are those that the devices name, without their addresses."""
    numbers = [of_netdev(netdev, "ifindex") for netdev in NETDEVS]
    for interfaces in ((), numbers):
        found = look(namespace=True, interfaces=interfaces)
        assert not found["verbs"]["usable"]
        assert f"{DEVICES[0]} port 1 GID" in found["verbs"]["reason"]
        assert "no interface of this network namespace has that address" in found["verbs"]["reason"]
        assert {port["device"] for port in found["ports"]} >= set(DEVICES)
        assert all(row["problem"] for port in found["ports"] for row in port["gids"])


def test_an_address_that_goes_and_comes_back_behind_another_has_another_index():
    address, netdev = f"{IPV4[0]}/24", NETDEVS[0]
    index = usable(DEVICES[0])[IPV4[0]]
    try:
        ip("address", "delete", address, "dev", netdev)
        until(lambda: IPV4[0] not in usable(DEVICES[0]))
        ip("address", "add", "192.0.2.1/24", "dev", netdev, "label", f"{netdev}:x")
        until(lambda: usable(DEVICES[0]).get("192.0.2.1") == index)  # a label is no other interface
        ip("address", "add", address, "dev", netdev)
        until(lambda: usable(DEVICES[0]).get(IPV4[0], index) != index)
    finally:
        for one in ("192.0.2.1/24", address):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("address", "delete", one, "dev", netdev)
        until(lambda: IPV4[0] not in usable(DEVICES[0]))
        ip("address", "add", address, "dev", netdev)
        until(lambda: usable(DEVICES[0]).get(IPV4[0]) == index)


def test_a_port_that_is_down_is_said_with_the_command_that_raises_it():
    try:
        ip("link", "set", NETDEVS[0], "down")  # a pair of veth goes down together
        until(lambda: port(DEVICES[0])["state"] == port(DEVICES[1])["state"] == "DOWN")
        row = verbs()
        assert not row["usable"]
        assert "the port is DOWN" in row["reason"]
        assert f"ip link set {NETDEVS[0]} up" in row["next"].splitlines()
    finally:
        ip("link", "set", NETDEVS[0], "up")
        # Lowering the link took its IPv6 address.
        ip("address", "add", f"{IPV6[0]}/64", "dev", NETDEVS[0], "nodad")
        until(lambda: port(DEVICES[1])["state"] == "ACTIVE" and {IPV4[0], IPV6[0]} <= usable(DEVICES[0]).keys())


def test_the_mtu_is_what_the_network_allows_now():
    before, rdma_before = of_netdev(NETDEVS[0], "mtu"), port(DEVICES[0])["mtu"]
    try:
        ip("link", "set", NETDEVS[0], "mtu", "1500")
        until(lambda: port(DEVICES[0])["mtu"] == 1024)
        assert port(DEVICES[0])["mtu_max"] == 4096
    finally:
        ip("link", "set", NETDEVS[0], "mtu", str(before))
        until(lambda: port(DEVICES[0])["mtu"] == rdma_before)


def test_a_limit_on_locked_memory_is_told_with_need_limit_and_remedy(look):
    row = look(65536)["verbs"]
    assert not row["usable"]
    for part in ("4 MiB (4194304 bytes)", "errno 12", "64 KiB (65536 bytes)", "`ulimit -l unlimited`", "memlock=-1"):
        assert part in row["reason"]
    assert row["next"] == "ulimit -l unlimited"
    assert look(8388608)["verbs"]["usable"]


def test_a_user_who_may_not_use_the_device_files_is_told_of_them(look):
    files = [f"/dev/infiniband/{name}" for name in os.listdir("/dev/infiniband") if name.startswith("uverbs")]
    modes = {file: os.stat(file).st_mode & 0o777 for file in files}
    try:
        for file in files:
            os.chmod(file, 0o600)
        row = look(8388608)["verbs"]
        assert not row["usable"]
        assert "ls -l /dev/infiniband" in row["reason"]
    finally:
        for file, mode in modes.items():
            os.chmod(file, mode)
