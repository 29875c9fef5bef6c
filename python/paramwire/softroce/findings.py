"""What `paramwire softroce` needs, what of it is there, and what to type for the rest.

examine() looks; everything else is a function of the Facts that it returns, so that other machines can be told about
in tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import struct
import subprocess
from pathlib import Path

from paramwire.softroce import image, qemu
from paramwire.softroce.common import PACKAGES, SoftRoceError, find_program

# asm-generic/socket.h, Linux 5.14. The first namespace has the first cookie; kernels that number them in another way
# have an inode number for it that never changes (linux/nsfs.h).
SO_NETNS_COOKIE = 71
FIRST_COOKIE = 1
NET_NS_INIT_INO = 0xEFFFFFF9

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
        kvm_obstacle=qemu.kvm_obstacle(),
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
        if os.stat("/proc/self/ns/net").st_ino == NET_NS_INIT_INO:
            return True
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


@dataclasses.dataclass(frozen=True)
class Row:
    part: str  # host: devices on this kernel; guest
    name: str
    usable: bool
    text: str  # what is there
    next: str = ""  # commands that mend it, one a line


def family(system: dict[str, str]) -> str:
    """debian, ubuntu, redhat, or "" for others. Derived systems are told by what they say they are like."""
    words = [system.get("ID", ""), *system.get("ID_LIKE", "").split()]
    for word in words:
        if word in ("ubuntu", "debian"):
            return word
        if word in ("rhel", "fedora", "centos", "rocky", "almalinux", "ol", "amzn"):
            return "redhat"
    return ""


def distribution_kernel(release: str, kind: str) -> bool:
    """Whether the release looks like one of that family's own kernels: only for those is there a package."""
    patterns = {
        "debian": r"-\d+(?:-[a-z0-9]+)*-(?:amd64|arm64)$|\+deb\d+.*-(?:amd64|arm64)$",
        "ubuntu": r"^\d+\.\d+\.\d+-\d+-[a-z0-9-]+$",
        "redhat": r"\.(?:el|fc|amzn)\d+",
    }
    return kind in patterns and re.search(patterns[kind], release) is not None


# Packages that bring a kernel with the module (Ubuntu's has it in linux-modules-extra, which this one takes along).
KERNEL_PACKAGES = {
    "debian": ("linux-image-amd64", "apt-get install linux-image-amd64"),
    "ubuntu": ("linux-image-generic", "apt-get install linux-image-generic"),
    "redhat": ("kernel-modules-extra", "dnf install kernel kernel-modules-extra"),
}


def module_package(facts: Facts) -> tuple[str, str]:
    """Where the running kernel's module would come from: what is likely, and the commands, for root."""
    kind, release = family(facts.system), facts.release
    if not distribution_kernel(release, kind):
        if kind not in KERNEL_PACKAGES:
            return "it comes from where the kernel came from, if that was built with CONFIG_RDMA_RXE=m", ""
        package, command = KERNEL_PACKAGES[kind]
        text = f"this kernel is not the distribution's own, which has it in the package {package}"
        return text, f"{command}\nreboot   # into that kernel"
    if kind == "ubuntu":
        package = f"linux-modules-extra-{release}"
        return f"likely in the package {package}", f"apt-get install {package}"
    if kind == "redhat":
        package = f"kernel-modules-extra-{release}"
        return f"likely in the package {package}", f"dnf install {package}"
    if "-cloud-" in release:
        package = f"linux-image-{release.rsplit('-', 1)[1]}"
        text = f"Debian's cloud flavour is built without it, the generic one (package {package}) with it"
        return text, f"apt-get install {package}\nreboot   # into the kernel without -cloud-"
    return f"likely in the package linux-image-{release}", f"apt-get install --reinstall linux-image-{release}"


def add_lines(facts: Facts) -> str:
    """How one's own device is made by hand, with an interface that this machine has."""
    interface = facts.interface or "INTERFACE"
    return f"modprobe rdma_rxe\nrdma link add rxe0 type rxe netdev {interface}"


def host_rows(facts: Facts) -> list[Row]:
    where = f"running kernel {facts.release}"
    if facts.module:
        module = Row("host", "rdma_rxe", True, f"{facts.module}, {where}", add_lines(facts))
    else:
        reason, command = module_package(facts)
        steps = "\n".join(filter(None, (command, add_lines(facts))))
        module = Row("host", "rdma_rxe", False, f"module rdma_rxe not found, {where}; {reason}", steps)
    rows = [module]
    rows.append(
        Row("host", "root", True, "yes")
        if facts.root
        else Row("host", "root", False, "making devices needs CAP_NET_ADMIN", "sudo paramwire softroce run -- CMD...")
    )
    if facts.first_namespace is False:
        text = "not the first, the only one that most kernels' rxe serves: one made here is listed and reaches nobody"
        step = "outside of the container, or with the host's network (docker run --network=host)"
        rows.append(Row("host", "network namespace", False, text, step))
    else:
        text = "the first" if facts.first_namespace else "can't be told on kernels before 5.14; `run` finds out"
        rows.append(Row("host", "network namespace", True, text))
    return rows + program_rows("host", HOST_PROGRAMS, facts)


def program_rows(part: str, names: tuple[str, ...], facts: Facts) -> list[Row]:
    installer = {"redhat": "dnf install"}.get(family(facts.system), "apt-get install")
    return [
        Row(part, name, True, facts.programs[name] or "")
        if facts.programs[name]
        else Row(part, name, False, "not installed", f"{installer} {PACKAGES[name]}")
        for name in names
    ]


def guest_rows(facts: Facts) -> list[Row]:
    rows = []
    usable = facts.architecture == "x86_64"
    also = "" if usable else ": the guest is an x86_64, and would run this host's programs"
    rows.append(Row("guest", "processor", usable, facts.architecture + also))
    rows += program_rows("guest", GUEST_PROGRAMS, facts)
    if facts.cached is not None:
        newer = facts.candidate is not None and facts.candidate != facts.cached
        also = f"; the package lists have {facts.candidate}: paramwire softroce build --update" if newer else ""
        rows.append(Row("guest", "kernel", True, f"{facts.cached}, in the cache{also}"))
    else:
        missing = [row for row in program_rows("guest", BUILD_PROGRAMS, facts) if not row.usable]
        if facts.candidate is not None and not missing:
            text = f"not made yet; {facts.candidate} can be downloaded"
            rows.append(Row("guest", "kernel", True, text, "paramwire softroce build"))
        elif missing:
            names = ", ".join(row.name for row in missing)
            rows.append(Row("guest", "kernel", False, f"not made yet, and {names} not installed", missing[0].next))
        else:
            text = facts.candidate_obstacle or "not made yet"
            rows.append(Row("guest", "kernel", False, text, "apt-get update\nparamwire softroce build"))
    if facts.kvm_obstacle is None:
        rows.append(Row("guest", "kvm", True, "/dev/kvm"))
    else:
        # Slow is not missing.
        rows.append(Row("guest", "kvm", True, f"{facts.kvm_obstacle}: the processor is emulated, ten times slower"))
    return rows


def verdict(rows: list[Row]) -> str | None:
    """Where `run` would go; None: nowhere."""
    for part in ("host", "guest"):
        if all(row.usable for row in rows if row.part == part):
            return part
    return None
