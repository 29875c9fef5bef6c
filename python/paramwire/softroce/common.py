"""What the parts of paramwire.softroce share: the error, where programs are, and which packages have them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from importlib import resources

# Where each program is, and which package of Debian has it. For distributions with other names these still say what to
# look for.
PACKAGES = {
    "apt-cache": "apt",
    "apt-get": "apt",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "dpkg": "dpkg",
    "ip": "iproute2",
    "modprobe": "kmod",
    "qemu-system-x86_64": "qemu-system-x86",
    "rdma": "iproute2",
    "zstd": "zstd",
}
# What a user's PATH may lack.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# prctl(2), linux/prctl.h
PR_SET_PDEATHSIG = 1


class SoftRoceError(Exception):
    """Why there are no devices, or no status of the command; the text says what to do next."""


class CommandTimeout(SoftRoceError):
    """The command was still running when its time was over, and was ended."""


class NoHostDevices(SoftRoceError):
    """Why this kernel gives no devices here; a guest may."""


def find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SYSTEM_PATH)


def program(name: str) -> str:
    """errors: SoftRoceError that names the package"""
    found = find_program(name)
    if found is None:
        raise SoftRoceError(f"{name} is not installed: apt-get install {PACKAGES.get(name, name)}")
    return found


def script(name: str) -> bytes:
    """A file that lies beside this module, also where the package is not in a folder."""
    return resources.files(__package__).joinpath(name).read_bytes()


_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """For a child, between fork and exec: SIGKILL when the thread that forked it ends, however that ends.

    parent: its process id, taken before the fork: a parent that is gone already sends no signal any more
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
