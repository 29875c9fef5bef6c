"""A command in a QEMU guest with two RoCE devices, in the host's file system, which it sees and can't change.

The guest runs the kernel of image.py. Host and guest talk over virtio ports, which are socket pairs here: the command's
two output streams, apart from each other and from the kernel's messages, and a port for control (guest-main.sh has its
words). Nothing is written on the host but what the command puts into the shared folder.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import selectors
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paramwire.softroce.common import CommandTimeout, SoftRoceError, program
from paramwire.softroce.qemu import (
    Guest,
    Machine,
    OpenImage,
    kvm_failed_before,
    kvm_obstacle,
    open_image,
    remember_kvm_failed,
)
from paramwire.softroce.streams import Lines, MarkedStream, Tail

# A KVM that works says hello within 2 s. One that does not (a kernel that needs more than it emulates) may hang.
KVM_HELLO_SECONDS = 15.0
# From the command's end, or its last output, to the end of its streams: milliseconds, unless the guest is broken.
DRAIN_SECONDS = 30.0
# A kernel that panics says why, and then 50 lines more.
CONSOLE_LINES = 80

# They take the bytes of "stdout" and "stderr", and of the kernel's "console" if there is one.
Sinks = Mapping[str, Callable[[bytes], None]]


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    release: str  # of the guest's kernel
    accelerator: str
    boot_seconds: float
    command_seconds: float


class NoHello(SoftRoceError):
    """The guest's kernel did not come up."""


class Session:
    """Passes on what the machine says, until the command has ended and all its output is through."""

    def __init__(
        self, guest: Guest, machine: Machine, mark: bytes, sinks: Sinks, hello_seconds: float | None = None
    ) -> None:
        self.guest = guest
        self.machine = machine
        self.sinks = sinks
        self.hello_seconds = hello_seconds
        self.output = {name: MarkedStream(mark) for name in ("stdout", "stderr")}
        self.lines = {name: Lines() for name in ("control", "console", "qemu")}
        self.tail = Tail(CONSOLE_LINES)
        self.began = self.moved = time.monotonic()  # moved: output came, and its reader took it
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
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        self.take(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
                if not selector.get_map():
                    self.gone()
                # Also while output comes without end.
                if not self.finished() and self.remaining() == 0:
                    self.overdue()

    def finished(self) -> bool:
        return self.status is not None and all(stream.ended for stream in self.output.values())

    def take(self, name: str, data: bytes) -> None:
        if name in self.output:
            passed = self.output[name].feed(data)
            if passed:
                self.sinks[name](passed)
            self.moved = time.monotonic()
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
            return max(self.ended, self.moved) + DRAIN_SECONDS
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
                f"the command ended with status {self.status}, and no end of its output came for {DRAIN_SECONDS:g} s"
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
    guest: Guest, kernel: OpenImage, accelerator: str, sinks: Sinks, hello_seconds: float | None = None
) -> Ended:
    # No program writes this by chance.
    mark = b"\0softroce-end-" + secrets.token_hex(16).encode() + b"\0"
    machine = Machine(guest, kernel, accelerator, mark, quiet="console" not in sinks)
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
    guest: Guest, cache: Path, sinks: Sinks, say: Callable[[str], None], reason: str, accelerator: str = "auto"
) -> Ended:
    """Runs the command in a guest.

    say:          takes a line: the guest with `reason`, and what takes long
    accelerator:  kvm, tcg, or auto: KVM where it works
    errors:       CommandTimeout, SoftRoceError; what `sinks` raise. The guest is gone then, and after any other.
    """
    program("qemu-system-x86_64")  # before a download
    with open_image(cache, say) as kernel:
        return run_with(kernel, guest, cache, sinks, say, reason, accelerator)


def run_with(
    kernel: OpenImage, guest: Guest, cache: Path, sinks: Sinks,
    say: Callable[[str], None], reason: str, accelerator: str,
) -> Ended:  # fmt: skip
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
