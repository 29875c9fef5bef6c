"""The guest's kernel and modules: made once from Debian's kernel package, kept in a cache folder.

The package is downloaded and unpacked, never installed. An entry of the cache is a folder that holds `kernel` (as ELF,
which QEMU starts without the seconds that unpacking takes an emulated processor), `modules.cpio` and `image.json`, and
appears whole, by a rename. What changes with paramwire's own scripts is not in it but in an archive made for each run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paramwire.softroce.common import SoftRoceError, find_program, program
from paramwire.softroce.cpio import Archive

# Of an entry: goes up when what is made from the same package changes.
FORMAT = 1

# The package that depends on the newest kernel image of the flavour that has rxe; the cloud flavour has none.
META_PACKAGE = "linux-image-amd64"

# What the guest loads, with all that these depend on. Without a CRC-32, rxe says only "failed to add".
MODULES = (
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "crc32_pclmul", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
    *("veth", "sch_netem", "dummy"),
)

# Download 70 MB, unpack 400 MB: minutes on a slow line. For a command that hangs.
COMMAND_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Package:
    name: str  # linux-image-6.1.0-57-amd64
    version: str  # of the package


@dataclasses.dataclass(frozen=True)
class Image:
    folder: Path
    release: str  # of the kernel, as uname -r
    package: str
    version: str

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel"

    @property
    def modules(self) -> Path:
        return self.folder / "modules.cpio"


def recipe() -> str:
    """What an entry is made of beside the package."""
    return hashlib.sha256(json.dumps([FORMAT, MODULES]).encode()).hexdigest()[:12]


def key(package: Package) -> str:
    """Name of the entry: another kernel or another recipe is another entry."""
    digest = hashlib.sha256(json.dumps([package.name, package.version, recipe()]).encode()).hexdigest()[:16]
    return f"{package.name}-{digest}"


def load(folder: Path) -> Image | None:
    """The entry in that folder; None: none, or not whole, or made by another recipe."""
    try:
        facts = json.loads((folder / "image.json").read_text())
        whole = all((folder / name).stat().st_size == size for name, size in facts["sizes"].items())
        if not whole or facts["recipe"] != recipe() or set(facts["sizes"]) != {"kernel", "modules.cpio"}:
            return None
        return Image(folder, facts["release"], facts["package"], facts["version"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def newest(cache: Path) -> Image | None:
    """The entry that was made last. One that the machine's package lists have a successor for serves as well."""
    found = []
    with contextlib.suppress(OSError):
        for folder in cache.iterdir():
            image = None if folder.name.startswith(".") else load(folder)
            if image is not None:
                found.append((folder.stat().st_mtime, image))
    return max(found, key=lambda entry: entry[0])[1] if found else None


# ---------------------------------------------------------------- the package


def output_of(*words: str, cwd: Path | None = None) -> str:
    """errors: SoftRoceError with the end of what it said"""
    # In this environment, which may name a proxy, but in English.
    command = ["env", "LC_ALL=C", program(words[0]), *words[1:]]
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SoftRoceError(f"{' '.join(words)}: not done after {COMMAND_SECONDS / 60:.0f} minutes") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise SoftRoceError(f"{' '.join(words)}: {' '.join(said[-3:]) or f'status {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def candidate() -> Package:
    """The kernel image of the machine's own package lists. errors: SoftRoceError"""
    if find_program("apt-cache") is None or find_program("dpkg") is None:
        raise SoftRoceError(
            "the guest's kernel comes from Debian's package lists, and there is no apt here: fetch a package "
            "linux-image-*-amd64 (not -cloud-) elsewhere and give it to `paramwire softroce build --deb FILE`"
        )
    architecture = output_of("dpkg", "--print-architecture").strip()
    if architecture != "amd64":
        raise SoftRoceError(f"the guest is an amd64 machine, and this host is {architecture}: not supported")
    names = [
        line.split(":", 1)[1].strip()
        for line in output_of("apt-cache", "depends", META_PACKAGE).splitlines()
        if line.strip().startswith("Depends:")
    ]
    images = [name for name in names if name.startswith("linux-image-")]
    if not images:
        raise SoftRoceError(
            f"the package lists have no {META_PACKAGE} with a kernel: as root, apt-get update; on a system that is not "
            "Debian, fetch a package linux-image-*-amd64 elsewhere and give it to `paramwire softroce build --deb FILE`"
        )
    for line in output_of("apt-cache", "policy", images[0]).splitlines():
        if line.strip().startswith("Candidate:"):
            return Package(images[0], line.split(":", 1)[1].strip())
    raise SoftRoceError(f"no candidate for {images[0]} in the package lists: as root, apt-get update")


def of_file(deb: Path) -> Package:
    """The package in a file."""
    fields = output_of("dpkg-deb", "--field", str(deb), "Package", "Version")
    values = dict(line.split(": ", 1) for line in fields.splitlines() if ": " in line)
    if not values.get("Package", "").startswith("linux-image-"):
        raise SoftRoceError(f"{deb}: not a package linux-image-*, but {values.get('Package', 'something else')}")
    return Package(values["Package"], values["Version"])


def download(package: Package, folder: Path) -> Path:
    try:
        output_of("apt-get", "download", "-q", f"{package.name}={package.version}", cwd=folder)
    except SoftRoceError as error:
        raise SoftRoceError(f"{error}; if the package lists are old: as root, apt-get update, then again") from None
    files = list(folder.glob("*.deb"))
    if len(files) != 1:
        raise SoftRoceError(f"apt-get download {package.name} left {len(files)} files")
    return files[0]


# ---------------------------------------------------------------- what is made of it


def unpacked(data: bytes, name: str) -> bytes | None:
    """By the file's first bytes. None: packed in a way that this machine can't undo. errors: SoftRoceError"""
    if data.startswith(b"\x7fELF"):
        return data
    try:
        if data.startswith(b"\xfd7zXZ\0"):
            return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(data)
        if data.startswith(b"\x1f\x8b"):
            return gzip.decompress(data)
    except (lzma.LZMAError, OSError, EOFError) as error:
        raise SoftRoceError(f"{name}: {error}") from None
    tool = find_program("zstd")
    if data.startswith(b"\x28\xb5\x2f\xfd") and tool is not None:
        done = subprocess.run([tool, "-dcq"], input=data, capture_output=True, timeout=COMMAND_SECONDS, check=False)
        return done.stdout if done.returncode == 0 else None
    return None


def elf_kernel(boot_image: bytes) -> bytes | None:
    """The kernel inside an x86 boot image (Linux's Documentation/arch/x86/boot.rst: setup_sects, payload_offset and
    payload_length, protocol 2.08). None: none that this machine can unpack; the boot image itself works too, slower.
    """
    if boot_image[0x202:0x206] != b"HdrS" or struct.unpack_from("<H", boot_image, 0x206)[0] < 0x0208:
        return None
    sectors = boot_image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", boot_image, 0x248)
    start = (sectors + 1) * 512 + offset
    # The payload ends with its unpacked size, four bytes that are no part of the stream.
    found = unpacked(boot_image[start : start + length - 4], "kernel")
    return found if found is not None and found.startswith(b"\x7fELF") else None


def load_order(dependencies: str, builtin: str) -> list[str]:
    """Files of MODULES and all they need, each after what it needs. From modules.dep and modules.builtin (depmod(8)).

    errors: SoftRoceError that names a module that the kernel has not
    """
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in dependencies.splitlines():
        path, _, words = line.partition(":")
        needs[module_name(path)] = (path, [module_name(word) for word in words.split()])
    built_in = {module_name(path) for path in builtin.split()}
    order: list[str] = []

    def add(name: str) -> None:
        if name not in needs:
            if name in built_in:
                return
            raise SoftRoceError(f"the kernel has no module {name}: a cloud flavour? It must be the generic one")
        path, wanted = needs[name]
        for other in reversed(wanted):
            add(other)
        if path not in order:
            order.append(path)

    for name in MODULES:
        add(name)
    return order


def module_name(path: str) -> str:
    return Path(path).name.split(".", 1)[0].replace("-", "_")


def modules_archive(folder: Path, order: list[str]) -> bytes:
    """`folder`: lib/modules/RELEASE of the unpacked package."""
    archive = Archive()
    archive.folder("modules")
    names = []
    for path in order:
        data = unpacked((folder / path).read_bytes(), path)
        if data is None:
            raise SoftRoceError(f"{path} is packed in a way that can't be undone here: apt-get install zstd")
        names.append(f"{module_name(path)}.ko")
        archive.file(f"modules/{names[-1]}", data)
    archive.file("modules/order", "".join(f"{name}\n" for name in names).encode())
    return archive.data()


def fill(entry: Path, deb: Path, package: Package, work: Path) -> None:
    """Makes the files of an entry from the package's file."""
    tree = work / "tree"
    output_of("dpkg-deb", "--extract", str(deb), str(tree))
    roots = [folder for folder in (tree / "lib/modules", tree / "usr/lib/modules") if folder.is_dir()]
    releases = [folder for root in roots for folder in root.iterdir()]
    if len(releases) != 1:
        raise SoftRoceError(f"{package.name} has modules of {len(releases)} kernels, expected one")
    release = releases[0].name
    output_of("depmod", "-b", str(releases[0].parents[2]), release)
    builtin = releases[0] / "modules.builtin"
    order = load_order(
        (releases[0] / "modules.dep").read_text(), builtin.read_text() if builtin.exists() else ""
    )
    boot_image = (tree / "boot" / f"vmlinuz-{release}").read_bytes()
    files = {"kernel": elf_kernel(boot_image) or boot_image, "modules.cpio": modules_archive(releases[0], order)}
    for name, data in files.items():
        (entry / name).write_bytes(data)
    facts: dict[str, Any] = {
        "recipe": recipe(),
        "package": package.name,
        "version": package.version,
        "release": release,
        "sizes": {name: len(data) for name, data in files.items()},
    }
    (entry / "image.json").write_text(json.dumps(facts))


@contextlib.contextmanager
def locked(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One builder at a time; the lock goes with the process that holds it."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        text = f"the cache folder can't be written ({error}): set XDG_CACHE_HOME to one that can"
        raise SoftRoceError(text) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making the guest's kernel: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def build(cache: Path, say: Callable[[str], None], deb: Path | None = None) -> Image:
    """The entry of the newest kernel that the package lists have (or of `deb`), made if it is not there.

    Entries of other kernels and what a killed builder left are removed. errors: SoftRoceError
    """
    package = candidate() if deb is None else of_file(deb)
    with locked(cache, say):
        folder = cache / key(package)
        image = load(folder)
        if image is not None:
            return image
        for old in cache.iterdir():
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=cache) as work:
            how = "a download of about 70 MB, once" if deb is None else f"from {deb}"
            say(f"making the guest's kernel of {package.name} {package.version} ({how})")
            entry = Path(work) / "entry"
            entry.mkdir()
            fill(entry, deb.absolute() if deb else download(package, Path(work)), package, Path(work))
            entry.rename(folder)
        image = load(folder)
        if image is None:
            raise SoftRoceError(f"{folder} was made and can't be read back")
        return image


def find_or_build(cache: Path, say: Callable[[str], None]) -> Image:
    return newest(cache) or build(cache, say)
