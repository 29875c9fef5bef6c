"""What `paramwire softroce` needs, what of it is there, and what to type for the rest.

examine() looks; everything else is a function of the Facts that it returns, so that other machines can be told about
in tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import subprocess
from pathlib import Path

from paramwire.softroce import guest, image
from paramwire.softroce.common import PACKAGES, SoftRoceError, find_program

# socket(7) does not have it; asm-generic/socket.h, Linux 5.14. The first namespace has the first cookie.
SO_NETNS_COOKIE = 71
FIRST_COOKIE = 1

HOST_PROGRAMS = ("ip", "rdma", "modprobe")
GUEST_PROGRAMS = ("qemu-system-x86_64", "busybox", "ip", "rdma")
BUILD_PROGRAMS = ("apt-get", "apt-cache", "dpkg", "depmod")

COMMAND_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Facts:
    release: str  # of the running kernel
    system: dict[str, str]  # of os-release(5)
    architecture: str  # x86_64
    module: str  # of rdma_rxe: "loaded" (or built in), "loadable", "" when there is none
    root: bool
    first_namespace: bool | None  # of the network; None: can't be told
    interface: str | None  # that the default route goes by
    programs: dict[str, str | None]  # where each is
    kvm_obstacle: str | None
    cached: str | None  # package and version of the guest's kernel in the cache
    candidate: str | None  # what a build would take
    candidate_obstacle: str | None


def examine(cache: Path, *, thorough: bool = False) -> Facts:
    """thorough: ask the package lists too, which takes a second"""
    cached = image.newest(cache)
    candidate, obstacle = None, None
    if thorough:
        try:
            package = image.candidate()
            candidate = f"{package.name} {package.version}"
        except SoftRoceError as error:
            obstacle = str(error)
    return Facts(
        release=os.uname().release,
        system=os_release(),
        architecture=os.uname().machine,
        module=module_state(),
        root=os.geteuid() == 0,
        first_namespace=in_first_namespace(),
        interface=default_interface(),
        programs={name: find_program(name) for name in PACKAGES},
        kvm_obstacle=guest.kvm_obstacle(),
        cached=None if cached is None else f"{cached.package} {cached.version}",
        candidate=candidate,
        candidate_obstacle=obstacle,
    )


def os_release() -> dict[str, str]:
    values = {}
    with contextlib.suppress(OSError):
        for line in Path("/etc/os-release").read_text().splitlines():
            name, _, value = line.partition("=")
            values[name] = value.strip("'\"")
    return values


def module_state(root: Path = Path("/")) -> str:
    if (root / "sys/module/rdma_rxe").exists():
        return "loaded"
    modprobe = find_program("modprobe")
    if modprobe is None:
        return ""
    done = subprocess.run(
        [modprobe, "-n", "-q", "rdma_rxe"], capture_output=True, timeout=COMMAND_SECONDS, check=False
    )
    return "loadable" if done.returncode == 0 else ""


def in_first_namespace() -> bool | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        cookie: int = struct.unpack("=Q", probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0]
        return cookie == FIRST_COOKIE
    return None


def default_interface(root: Path = Path("/")) -> str | None:
    """The interface of the default route, else the first that is no loopback."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/net/route").read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and fields[1] == fields[7] == "00000000":
                return fields[0]
    with contextlib.suppress(OSError):
        for name in sorted(path.name for path in (root / "sys/class/net").iterdir()):
            if name != "lo":
                return name
    return None


def default_memory_mib() -> int:
    """Half of what is available, between 1 and 4 GiB."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return max(1024, min(4096, int(line.split()[1]) // 2048))
    return 1024


# ---------------------------------------------------------------- what follows from them


def host_obstacle(facts: Facts) -> str | None:
    """Why this kernel is not used, as far as can be told without trying; None: worth a try.

    That it is another network namespace than the first is no obstacle for every kernel: devices.sh finds out.
    """
    if not facts.module:
        return f"this kernel ({facts.release}) has no module rdma_rxe"
    if not facts.root:
        return "making devices on this kernel needs root"
    missing = [name for name in ("ip", "rdma") if facts.programs[name] is None]
    if missing:
        return f"{', '.join(missing)} not installed here (package iproute2)"
    return None
