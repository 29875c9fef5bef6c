"""Two RoCE devices for a command, without RDMA hardware: on this kernel where it has rxe, else in a QEMU guest.

    from paramwire import softroce
    status = softroce.run(softroce.Options(["ibv_devices"], dict(os.environ)), cache, say=print)

For `paramwire softroce` and for tests. docs/softroce.md is the manual. One thread; a process may run several, one
after the other or at once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paramwire.softroce import findings, guest, host, qemu
from paramwire.softroce.common import CommandTimeout, NoHostDevices, SoftRoceError

__all__ = ["CommandTimeout", "NoHostDevices", "Options", "SoftRoceError", "cache_folder", "guest_environment", "run"]

# Variables that mean the same in the guest: names, and beginnings of names.
KEPT_VARIABLES = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER", "VIRTUAL_ENV")
KEPT_PREFIXES = ("ASAN_", "GTEST_", "IBV_", "LC_", "PARAMWIRE", "PYTEST_", "PYTHON", "RDMAV_", "TSAN_", "UBSAN_")

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one run."""

    command: Sequence[str]
    environment: Mapping[str, str]  # of the caller; a guest gets guest_environment() of it
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)  # set in any case
    where: str = "auto"  # host, guest
    accelerator: str = "auto"  # of the guest: kvm, tcg
    folder: str = ""  # the command's working folder; "": this process's
    out: str | None = None  # folder that a guest shares for writing
    keep: Sequence[str] = ()  # files and folders below /tmp, /run, /dev/shm that a guest should see
    mtu: int = 4200
    memory_mib: int = 0  # 0: half of what is available, at least 1 GiB and at most 4
    cpus: int = 0  # 0: as many as this process may use, at least 2 and at most 4
    seconds: float = 600.0
    stdout: int = 1  # descriptors that the command's output goes to
    stderr: int = 2
    console: int | None = None  # one for the kernel's messages


def cache_folder(environment: Mapping[str, str]) -> Path:
    """As the XDG base directory specification has it."""
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(environment.get("HOME") or "/", ".cache")
    return Path(base) / "paramwire" / "softroce"


def guest_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)
    }


def write_all(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    return write


def run(options: Options, cache: Path, say: Callable[[str], None]) -> int:
    """Runs the command with two devices up; its output goes to options.stdout and .stderr as it comes.

    say:      takes a line: where it runs and why, and what takes long
    returns:  the command's exit status, 128 + n for signal n; 126 and 127 as a shell has them
    errors:   CommandTimeout; SoftRoceError: no devices, or no status. Nothing is left running then, or after any other
    """
    if options.where not in ("auto", "host", "guest"):
        raise SoftRoceError(f"where: {options.where!r} is none of auto, host, guest")
    folder = options.folder or os.getcwd()
    reason = "asked for"
    if options.where != "guest":
        facts = findings.examine(cache)
        obstacle = findings.host_obstacle(facts)
        if obstacle is None or options.where == "host":
            try:
                if obstacle is not None:
                    raise NoHostDevices(obstacle)
                return run_on_host(options, folder, say)
            except NoHostDevices as error:
                if options.where == "host":
                    raise SoftRoceError(f"this kernel gives no RoCE devices: {error}") from None
                obstacle = str(error)
        reason = obstacle
    return run_in_guest(options, folder, cache, reason, say)


def run_on_host(options: Options, folder: str, say: Callable[[str], None]) -> int:
    say(f"on this kernel ({os.uname().release})")
    environment = {**options.environment, **options.extra, "PARAMWIRE_SOFTROCE": "host"}
    return host.run(
        options.command, environment, folder,
        mtu=options.mtu, seconds=options.seconds, stdout=options.stdout, stderr=options.stderr,
    )  # fmt: skip


def run_in_guest(options: Options, folder: str, cache: Path, reason: str, say: Callable[[str], None]) -> int:
    out = options.out
    if out is not None:
        out = os.path.realpath(out)
        if not os.path.isdir(out) or out == "/":
            raise SoftRoceError(f"--out {options.out}: not a folder that can be shared: mkdir it first")
    for path in options.keep:
        if not os.path.exists(path):
            raise SoftRoceError(f"--see {path}: not there")
    # What runs this is wanted there too: a virtual environment may lie anywhere.
    keep = [folder, sys.prefix, *map(os.path.abspath, options.keep)]
    program = options.command[0]
    if "/" in program:
        keep.append(os.path.join(folder, program))
    made = qemu.Guest(
        command=options.command,
        environment={**guest_environment(options.environment), **options.extra, "PARAMWIRE_SOFTROCE": "guest"},
        folder=folder,
        keep=[path for path in keep if os.path.exists(path)],
        out=out,
        mtu=options.mtu,
        memory_mib=options.memory_mib or findings.default_memory_mib(),
        cpus=options.cpus or max(2, min(4, len(os.sched_getaffinity(0)))),
        seconds=options.seconds,
    )
    sinks = {"stdout": write_all(options.stdout), "stderr": write_all(options.stderr)}
    if options.console is not None:
        sinks["console"] = write_all(options.console)
    return guest.run(made, cache, sinks, say, reason, options.accelerator).status
