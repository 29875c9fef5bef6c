"""A command in a QEMU guest with two RoCE devices, in the host's file system, which it sees and can't change.

The guest runs the kernel of image.py. Host and guest talk over virtio ports, which are socket pairs here: the command's
two output streams, apart from each other and from the kernel's messages, and a port for control (guest-main.sh has its
words). Nothing is written on the host but what the command puts into the shared folder: what is made for a run lies in
a memory file, and QEMU dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from paramwire.softroce import image
from paramwire.softroce.common import CommandTimeout, SoftRoceError, die_with_parent, program, script
from paramwire.softroce.cpio import Archive
from paramwire.softroce.streams import Lines, MarkedStream, Tail

# From power on to the command. An emulated processor takes 5 s, a busy machine several times that.
BOOT_SECONDS = 120.0
# A KVM that works says hello within 2 s. One that does not (a kernel that needs more than it emulates) may hang.
KVM_HELLO_SECONDS = 15.0
# From the command's end to that of its streams: they are read as fast as whoever reads ours does, so this is only for a
# guest that died.
DRAIN_SECONDS = 30.0
CONSOLE_LINES = 40

# Folders that the guest has empty ones of, in memory.
HIDDEN = ("/tmp", "/run", "/dev/shm")

PORTS = ("control", "stdout", "stderr")


@dataclasses.dataclass(frozen=True)
class Guest:
    """Of one run."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str  # the command's working folder, absolute
    keep: Sequence[str] = ()  # folders that it needs even where they lie below a HIDDEN one
    out: str | None = None  # folder that is the host's own for reading and writing, absolute
    mtu: int = 4200  # of the veth pair; 4096 for RDMA and its headers
    memory_mib: int = 2048
    cpus: int = 2
    seconds: float = 600.0  # most that the command may take
    boot_seconds: float = BOOT_SECONDS


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    release: str  # of the guest's kernel
    accelerator: str
    boot_seconds: float
    command_seconds: float


class NoHello(SoftRoceError):
    """The guest's kernel did not come up."""


def archive(guest: Guest, mark: bytes) -> bytes:
    """What the guest gets beside kernel and modules: busybox, the scripts, and what to do."""
    made = Archive()
    made.folder("bin")
    made.folder("softroce")
    made.folder("softroce/keep")
    made.file("bin/busybox", Path(program("busybox")).read_bytes(), 0o755)
    made.file("init", script("guest-init.sh"), 0o755)
    for name in ("guest-main.sh", "devices.sh"):
        made.file(f"softroce/{name}", script(name), 0o755)
    made.file("softroce/settings", f"MTU={guest.mtu}\n".encode())
    for index, folder in enumerate(hidden(guest.keep)):
        made.file(f"softroce/keep/{index}", os.fsencode(folder))
    if guest.out is not None:
        made.file("softroce/out_folder", os.fsencode(guest.out))
    made.file("softroce/mark", mark)
    made.file("softroce/command", os.fsencode(command_script(guest)), 0o755)
    return made.data()


def hidden(folders: Sequence[str]) -> list[str]:
    """Those that the guest would not see, without those that lie in another of them."""
    below = sorted({folder for folder in folders if any(folder.startswith(f"{place}/") for place in HIDDEN)})
    return [folder for folder in below if not any(folder.startswith(f"{other}/") for other in below if other != folder)]


def command_script(guest: Guest) -> str:
    """For a shell that has the devices' variables set. Words keep every byte: blanks, quotes, newlines, none at all."""
    given = [f"{name}={value}" for name, value in guest.environment.items()]
    devices = [f'"{name}=${name}"' for name in DEVICE_VARIABLES]
    words = " ".join(["/usr/bin/env", "-i", *map(shlex.quote, given), *devices, *map(shlex.quote, guest.command)])
    folder = shlex.quote(guest.folder)
    return f"cd {folder} || exit 125\nexec {words}\n"


DEVICE_VARIABLES = (
    "PARAMWIRE_SOFTROCE_DEVICES",
    "PARAMWIRE_SOFTROCE_NETDEVS",
    "PARAMWIRE_SOFTROCE_IPV4",
    "PARAMWIRE_SOFTROCE_IPV6",
)


# ---------------------------------------------------------------- the accelerator


def kvm_obstacle(root: Path = Path("/")) -> str | None:
    """Why KVM can't run the guest, from what can be seen without trying; None: it is worth a try."""
    if not (root / "dev/kvm").exists():
        return "no /dev/kvm"
    if not os.access(root / "dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is not for this user"
    # Others emulate less than a stock kernel needs.
    if not any((root / "sys/module" / name).exists() for name in ("kvm_intel", "kvm_amd")):
        return "/dev/kvm has no processor's virtualisation behind it"
    return None


def boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def kvm_failed_before(cache: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((cache / "kvm.json").read_text()).get("failed_in_boot") == boot_id())
    return False


def remember_kvm_failed(cache: Path) -> None:
    with contextlib.suppress(OSError):
        (cache / "kvm.json").write_text(json.dumps({"failed_in_boot": boot_id()}))


# ---------------------------------------------------------------- QEMU


def memory_file(name: str, *parts: bytes) -> int:
    descriptor = os.memfd_create(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for part in parts:
            file.write(part)
    return descriptor


def machine_words(guest: Guest, accelerator: str) -> list[str]:
    kvm = accelerator == "kvm"
    words = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "pc"]
    words += ["-accel", "kvm" if kvm else "tcg,thread=multi", "-cpu", "host" if kvm else "max"]
    words += ["-smp", str(guest.cpus), "-m", str(guest.memory_mib)]
    # rcu_expedited: loading modules and making devices waits for all processors many times.
    quick = "mitigations=off no_timer_check rcupdate.rcu_expedited=1 8250.nr_uarts=1 i8042.nokbd i8042.noaux"
    return [*words, "-append", f"console=ttyS0 quiet panic=-1 {quick}"]


def share_words(guest: Guest) -> list[str]:
    common = "local,security_model=none,multidevs=remap"
    words = ["-fsdev", f"{common},id=root,path=/,readonly=on", "-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]
    if guest.out is not None:
        # A comma in a value of QEMU's is written twice.
        path = guest.out.replace(",", ",,")
        words += ["-fsdev", f"{common},id=out,path={path}", "-device", "virtio-9p-pci,fsdev=out,mount_tag=out"]
    return words


class Machine:
    """QEMU while it runs, and our ends of its ports."""

    def __init__(self, guest: Guest, kernel: image.Image, accelerator: str, mark: bytes) -> None:
        """errors: OSError when the image went away meanwhile"""
        qemu = program("qemu-system-x86_64")
        with contextlib.ExitStack() as theirs:
            descriptor = os.open(kernel.kernel, os.O_RDONLY)
            theirs.callback(os.close, descriptor)
            initramfs = memory_file("initramfs", kernel.modules.read_bytes(), archive(guest, mark))
            theirs.callback(os.close, initramfs)
            # By descriptor: another process may remove the cache's entry.
            words = ["-kernel", f"/proc/self/fd/{descriptor}", "-initrd", f"/proc/self/fd/{initramfs}"]
            passed = [descriptor, initramfs]
            words += ["-device", "virtio-serial-pci"]
            self.sockets: dict[str, socket.socket] = {}
            for number, name in enumerate((*PORTS, "console"), 1):
                ours, other = socket.socketpair()
                self.sockets[name] = ours
                theirs.callback(other.close)
                passed.append(other.fileno())
                words += ["-chardev", f"socket,id={name},fd={other.fileno()}"]
                if name == "console":
                    words += ["-serial", f"chardev:{name}"]
                else:
                    words += ["-device", f"virtserialport,chardev={name},name={name},nr={number}"]
            self.process = subprocess.Popen(
                [qemu, *machine_words(guest, accelerator), *words, *share_words(guest)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                # Ctrl-C is for this process, which then ends the guest.
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def streams(self) -> Iterator[tuple[str, socket.socket | IO[bytes]]]:
        yield from self.sockets.items()
        assert self.process.stderr is not None
        yield "qemu", self.process.stderr

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for _, stream in self.streams():
            stream.close()


class Session:
    """Passes on what the machine says, until the command has ended and all its output is through."""

    def __init__(
        self, guest: Guest, machine: Machine, mark: bytes, sinks: Mapping[str, Callable[[bytes], None]],
        hello_seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.guest = guest
        self.machine = machine
        self.sinks = sinks
        self.hello_seconds = hello_seconds
        self.output = {name: MarkedStream(mark) for name in ("stdout", "stderr")}
        self.lines = {name: Lines() for name in ("control", "console", "qemu")}
        self.tail = Tail(CONSOLE_LINES)
        self.began = time.monotonic()
        self.hello = False
        self.started: float | None = None
        self.ended: float | None = None
        self.status: int | None = None
        self.release = ""

    def run(self) -> None:
        """errors: CommandTimeout, NoHello, SoftRoceError with the console's last lines"""
        with selectors.DefaultSelector() as selector:
            for name, stream in self.machine.streams():
                selector.register(stream, selectors.EVENT_READ, name)
            while not self.finished():
                events = selector.select(self.remaining())
                if not events:
                    self.overdue()
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        self.take(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
                if not selector.get_map():
                    self.gone()

    def finished(self) -> bool:
        return self.status is not None and all(stream.ended for stream in self.output.values())

    def take(self, name: str, data: bytes) -> None:
        if name in self.output:
            passed = self.output[name].feed(data)
            if passed:
                self.sinks[name](passed)
            return
        lines = self.lines[name].feed(data)
        if name == "control":
            for line in lines:
                self.obey(line)
            return
        self.tail.add(lines)
        if "console" in self.sinks:
            self.sinks["console"]("".join(f"{line}\n" for line in lines).encode())

    def obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "hello":
            self.hello = True
        elif word == "start":
            self.started = time.monotonic()
            self.release = rest
        elif word == "exit" and rest.isdecimal():
            self.ended = time.monotonic()
            self.status = int(rest)
        elif word == "failed":
            raise SoftRoceError(f"the guest has no devices: {rest.strip()}")

    def deadline(self) -> float:
        if self.ended is not None:
            return self.ended + DRAIN_SECONDS
        if self.started is not None:
            return self.started + self.guest.seconds
        if not self.hello and self.hello_seconds is not None:
            return self.began + self.hello_seconds
        return self.began + self.guest.boot_seconds

    def remaining(self) -> float:
        return max(0.0, self.deadline() - time.monotonic())

    def overdue(self) -> None:
        if self.ended is not None:
            raise SoftRoceError(
                f"the output did not end within {DRAIN_SECONDS:g} s of the command's; its status: {self.status}"
            )
        if self.started is not None:
            raise CommandTimeout(
                f"the command was still running after {self.guest.seconds:g} s and was ended with its guest (--timeout)"
            )
        text = f"the guest was not up after {time.monotonic() - self.began:.0f} s"
        error = SoftRoceError if self.hello else NoHello
        raise error(f"{text}; its console:\n{self.tail.text() or '  (silent)'}")

    def gone(self) -> None:
        """No stream is left: QEMU has ended."""
        for name in ("console", "qemu"):
            self.tail.add(self.lines[name].rest())
        if self.status is not None:
            raise SoftRoceError(f"the guest ended before its output did; status of the command: {self.status}")
        status = self.machine.process.wait()
        text = f"the guest ended without a status of the command (QEMU's own: {status}); the end of its console:"
        error = SoftRoceError if self.hello else NoHello
        raise error(f"{text}\n{self.tail.text() or '  (silent)'}")


def run_in(
    guest: Guest, kernel: image.Image, accelerator: str, sinks: Mapping[str, Callable[[bytes], None]],
    hello_seconds: float | None = None,
) -> Ended:  # fmt: skip
    # No program writes this by chance.
    mark = b"\0softroce-end-" + secrets.token_hex(16).encode() + b"\0"
    machine = Machine(guest, kernel, accelerator, mark)
    try:
        session = Session(guest, machine, mark, sinks, hello_seconds)
        session.run()
    finally:
        machine.close()
    assert session.status is not None
    assert session.started is not None
    assert session.ended is not None
    return Ended(
        session.status, session.release, accelerator, session.started - session.began, session.ended - session.started
    )


def run(
    guest: Guest, cache: Path, sinks: Mapping[str, Callable[[bytes], None]], say: Callable[[str], None],
    reason: str, accelerator: str = "auto",
) -> Ended:  # fmt: skip
    """Runs the command in a guest.

    sinks:        take the bytes of "stdout", "stderr", and of the kernel's "console" if they have one
    say:          takes a line: the guest with `reason`, and what takes long
    accelerator:  kvm, tcg, or auto: KVM where it works
    errors:       CommandTimeout, SoftRoceError; what `sinks` raise. The guest is gone then, and after any other.
    """
    program("qemu-system-x86_64")  # before a download
    kernel = image.find_or_build(cache, say)
    trial = accelerator == "auto" and kvm_obstacle() is None and not kvm_failed_before(cache)
    if accelerator == "auto":
        accelerator = "kvm" if trial else "tcg"
    with_what = "KVM" if accelerator == "kvm" else "an emulated processor"
    say(f"in a guest (kernel {kernel.release}, {guest.cpus} cores, {guest.memory_mib} MiB, {with_what}): {reason}")
    if trial:
        try:
            return run_in(guest, kernel, "kvm", sinks, KVM_HELLO_SECONDS)
        except NoHello:
            say("KVM is there and starts no guest: emulating instead, and until this machine's next boot")
            remember_kvm_failed(cache)
            accelerator = "tcg"
    return run_in(guest, kernel, accelerator, sinks)
