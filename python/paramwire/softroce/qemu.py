"""The machine that a guest runs on: what it gets to see and to do, KVM or not, and QEMU's process.

Nothing is written on the host: what is made for a run lies in a memory file, and QEMU dies with the process that
started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from paramwire.softroce import image
from paramwire.softroce.common import SoftRoceError, die_with_parent, program, script
from paramwire.softroce.cpio import Archive

# From power on to the command. An emulated processor takes 5 s, a busy machine several times that.
BOOT_SECONDS = 120.0

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


# ---------------------------------------------------------------- KVM


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


def machine_words(guest: Guest, accelerator: str, *, quiet: bool) -> list[str]:
    kvm = accelerator == "kvm"
    words = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "pc"]
    # Without erms, programs and the kernel copy by whole registers: emulation takes `rep movsb` a byte at a time, and
    # rxe's READs then take about twice as long.
    words += ["-accel", "kvm" if kvm else "tcg,thread=multi", "-cpu", "host" if kvm else "max,erms=off,fsrm=off"]
    words += ["-smp", str(guest.cpus), "-m", str(guest.memory_mib)]
    # rcu_expedited: loading modules and making devices waits for all processors many times. init_on_alloc: Debian's
    # kernel clears every page that it hands out.
    quick = "mitigations=off init_on_alloc=0 no_timer_check rcupdate.rcu_expedited=1 8250.nr_uarts=1"
    quick += " i8042.nokbd i8042.noaux"
    if not kvm:
        # QEMU's processors share one counter. Left alone, Linux takes the HPET: 2 us a look, and 10 for every timer.
        quick += " clocksource=tsc tsc=reliable"
    return [*words, "-append", f"console=ttyS0 panic=-1 {quick}{' quiet' if quiet else ''}"]


def share_words(guest: Guest) -> list[str]:
    common = "local,security_model=none,multidevs=remap"
    words = ["-fsdev", f"{common},id=root,path=/,readonly=on", "-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]
    if guest.out is not None:
        # A comma in a value of QEMU's is written twice.
        path = guest.out.replace(",", ",,")
        words += ["-fsdev", f"{common},id=out,path={path}", "-device", "virtio-9p-pci,fsdev=out,mount_tag=out"]
    return words


@dataclasses.dataclass(frozen=True)
class OpenImage:
    """Kernel and modules, whatever becomes of the cache's entry."""

    release: str
    kernel: int  # descriptor
    modules: bytes

    def __enter__(self) -> OpenImage:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.kernel)


def open_image(cache: Path, say: Callable[[str], None]) -> OpenImage:
    """An entry of the cache, held open: what removes it afterwards does not matter."""
    for _ in range(3):
        found = image.find_or_build(cache, say)
        with contextlib.suppress(FileNotFoundError):
            modules = found.modules.read_bytes()
            return OpenImage(found.release, os.open(found.kernel, os.O_RDONLY | os.O_CLOEXEC), modules)
    raise SoftRoceError(f"{cache}: entries appear and go again: is something else writing there?")


class Machine:
    """QEMU while it runs, and our ends of its ports."""

    def __init__(self, guest: Guest, kernel: OpenImage, accelerator: str, mark: bytes, *, quiet: bool) -> None:
        qemu = program("qemu-system-x86_64")
        with contextlib.ExitStack() as theirs:
            initramfs = memory_file("initramfs", kernel.modules, archive(guest, mark))
            theirs.callback(os.close, initramfs)
            words = ["-kernel", f"/proc/self/fd/{kernel.kernel}", "-initrd", f"/proc/self/fd/{initramfs}"]
            passed = [kernel.kernel, initramfs]
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
                [qemu, *machine_words(guest, accelerator, quiet=quiet), *words, *share_words(guest)],
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
