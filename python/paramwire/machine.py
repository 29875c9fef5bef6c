"""What this machine is and allows, as `paramwire doctor` tells it: read from /proc, /sys and the C library.

Lines of the library's own seams come from paramwire.available(); nothing here guesses about them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import stat
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from paramwire._core import (
    DeniedError,
    Error,
    __version__,
    build_versions,
    crc_implementation,
    key_id,
    memory_room,
)

# Instructions that the core has bodies for (base/crc.hpp, compute/kernels.hpp), as /proc/cpuinfo spells them.
FEATURES = (
    "sse4_2",
    "pclmulqdq",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "vpclmulqdq",
    "avx512_vnni",
    "avx512_bf16",
)

# A datagram transport holds at least this much between two looks at its socket: 8 MiB are 1.6 ms at 5 GB/s.
WANTED_SOCKET_BUFFER = 8 << 20

# Descriptors that 1024 connections and as many arenas and pin tables need, with room.
WANTED_DESCRIPTORS = 4096

KEY_VARIABLE = "PARAMWIRE_KEY"


def read(path: str, root: Path = Path("/")) -> str | None:
    """The file's text without its end; None where it can't be read."""
    try:
        return (root / path).read_text(errors="replace").strip()
    except OSError:
        return None


def number(path: str, root: Path = Path("/")) -> int | None:
    text = read(path, root)
    return int(text) if text is not None and text.isdecimal() else None


def system() -> str:
    for line in (read("etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


def processor() -> dict[str, Any]:
    fields: dict[str, str] = {}
    for line in (read("proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "model": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "features": {name: name in flags for name in FEATURES},
        "crc": crc_implementation(),
    }


def limits() -> dict[str, dict[str, int | None]]:
    """Soft and hard as they bind this process, None being none."""

    def pair(which: int) -> dict[str, int | None]:
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
        return {"soft": soft, "hard": hard}

    unbound: dict[str, int | None] = {"soft": None, "hard": None}
    memlock = unbound if may_lock_all() else pair(resource.RLIMIT_MEMLOCK)
    return {"memlock_bytes": memlock, "open_files": pair(resource.RLIMIT_NOFILE)}


def may_lock_all() -> bool:
    """Whether CAP_IPC_LOCK (bit 14, capabilities(7)) lifts the limit on locked memory. Containers take it from root."""
    for line in (read("proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def sockets() -> dict[str, int | None]:
    return {
        name: number(f"proc/sys/net/core/{name}") for name in ("rmem_default", "rmem_max", "wmem_default", "wmem_max")
    }


def shared_memory() -> dict[str, Any]:
    """Of /dev/shm, which paramwire does not use: its arenas are memfds, bounded by the control group alone."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return {"dev_shm_bytes": None, "dev_shm_free_bytes": None}
    return {"dev_shm_bytes": found.f_blocks * found.f_frsize, "dev_shm_free_bytes": found.f_bavail * found.f_frsize}


def chosen(path: str) -> str | None:
    """The word in brackets of a sysfs switch: "always [madvise] never"."""
    text = read(path)
    return text[text.index("[") + 1 : text.index("]")] if text is not None and "[" in text and "]" in text else text


def huge_pages() -> dict[str, Any]:
    return {
        "transparent": chosen("sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_shared": chosen("sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "reserved": number("proc/sys/vm/nr_hugepages"),
    }


def key(path: str | None) -> dict[str, Any]:
    """Whether the file at `path` is fit for a cluster key, and which one it holds; never the key."""
    out: dict[str, Any] = {"path": path, "mode": None, "id": None, "usable": False, "state": "", "next": ""}
    if not path:
        state = f"{KEY_VARIABLE} is not set: only loopback and unix sockets are served"
        return out | {"path": None, "state": state}
    with contextlib.suppress(OSError):
        out["mode"] = f"{stat.S_IMODE(os.stat(path).st_mode):04o}"
    try:
        out["id"] = key_id(path)
    except DeniedError as error:
        return out | {"state": str(error), "next": f"chmod 600 {path}" if "chmod" in str(error) else f"ls -l {path}"}
    except Error as error:
        return out | {"state": str(error), "next": f"set {KEY_VARIABLE} to the key's file"}
    return out | {"state": f"key {out['id']}, can be read by this user alone", "usable": True}


def versions() -> dict[str, str]:
    out = {"paramwire": __version__, "python": platform.python_version()}
    for package in ("numpy", "ml_dtypes", "torch", "cupy"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    libc = " ".join(part for part in platform.libc_ver() if part)
    return out | build_versions() | {"libc": libc, "executable": sys.executable}


def facts() -> dict[str, Any]:
    """All of it, as `doctor --json` prints it."""
    return {
        "kernel": platform.release(),
        "system": system(),
        "user": os.geteuid(),
        "processor": processor(),
        "memory": dict(memory_room()),
        "shared_memory": shared_memory(),
        "huge_pages": huge_pages(),
        "limits": limits(),
        "sockets": sockets(),
    }


def advice(machine: dict[str, Any]) -> list[dict[str, str]]:
    """What is worth changing, with what to type. Nothing here stops the library from working."""
    out = []

    def add(about: str, text: str, command: str) -> None:
        out.append({"about": about, "text": text, "next": command})

    memlock = machine["limits"]["memlock_bytes"]["soft"]
    if memlock is not None:
        text = f"{memlock:,} bytes may be locked: RDMA registers whole arenas, and is refused beyond that"
        add("memlock", text, "ulimit -l unlimited  # containers: --ulimit memlock=-1")
    files = machine["limits"]["open_files"]["soft"]
    if files is not None and files < WANTED_DESCRIPTORS:
        add("open files", f"{files} descriptors: a server needs one a client", f"ulimit -n {WANTED_DESCRIPTORS}")
    for name in ("rmem_max", "wmem_max"):
        most = machine["sockets"][name]
        if most is not None and most < WANTED_SOCKET_BUFFER:
            text = f"sockets get {most:,} bytes of buffer at most, and are clamped silently"
            add(name, text, f"sysctl -w net.core.{name}={WANTED_SOCKET_BUFFER}")
    return out
