"""Packs what a build on a fresh, offline CUDA machine lacks into one folder of the checkout, which git ignores.

usage: gpu_bundle.py [--out DIR]     the folder is made anew; status 1 with what is missing, or when it got too large

In it: include/ and lib/, a prefix as CMake searches it (the preset "gpu" does), of the Debian packages in PACKAGES;
wheels/ with Python packages for CPython 3.12; manifest.json with the SHA-256 of every file, which `make gpu-check`
compares.

The target is an x86-64 GNU system with glibc 2.36 or newer, the one that these libraries were linked for. Archives go
where Debian has them, without their debug sections; ISA-L and Highway, which it has as shared libraries alone, go as
those.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# It travels with the checkout: more than this is not carried everywhere.
BYTES_MAX = 60 << 20
MANIFEST = "manifest.json"
PLATFORM = "x86_64-linux-gnu"
INCLUDE, LIB = Path("/usr/include"), Path("/usr/lib")


@dataclasses.dataclass(frozen=True)
class Package:
    """A Debian package, and what of it a build reads: names or patterns below the include and the library folder."""

    name: str
    headers: tuple[str, ...]
    libraries: tuple[str, ...] = ()


PACKAGES = (
    Package("libisal-dev", ("isa-l",), ("libisal.so", "libisal.so.2")),
    Package("liblz4-dev", ("lz4*.h",), ("liblz4.a",)),
    Package("libhwy-dev", ("hwy",), ("libhwy.so", "libhwy.so.1")),
    Package("libssl-dev", ("openssl", f"{PLATFORM}/openssl"), ("libcrypto.a", "libssl.a")),
    Package("libblis-serial-dev", (f"{PLATFORM}/blis-serial",), ("blis-serial/libblis.a",)),
    Package("libibverbs-dev", ("infiniband/verbs*.h", "infiniband/ib_user_ioctl_verbs.h")),
    Package("libgtest-dev", ("gtest",), ("libgtest.a", "libgtest_main.a")),
)

# For CPython 3.12; without what they depend on, which the machine has (docs/gpu-check.md lists it). gguf is not among
# them: the model that is computed there is made there, and is no GGUF file.
WHEELS = ("ml_dtypes>=0.4",)
PYTHON = (
    "--python-version",
    "3.12",
    "--implementation",
    "cp",
    "--only-binary=:all:",
    "--platform",
    "manylinux_2_28_x86_64",
    "--platform",
    "manylinux2014_x86_64",
)


class BundleError(Exception):
    """Ends the program with its text and status 1."""


def copies(package: Package, include: Path, lib: Path) -> Iterator[tuple[Path, str]]:
    """Every file of a package with its place in the bundle; folders of the platform's name are left out on the way.

    errors: BundleError naming what the package should have and has not
    """
    for folder, patterns, place in ((include, package.headers, "include"), (lib, package.libraries, "lib")):
        for pattern in patterns:
            found = sorted((folder if place == "include" else lib / PLATFORM).glob(pattern))
            if not found:
                raise BundleError(
                    f"{folder}: no {pattern} (Debian: {package.name}); `make gpu-bundle` installs it as root"
                )
            base = (
                include / PLATFORM if pattern.startswith(PLATFORM) else folder if place == "include" else lib / PLATFORM
            )
            for path in found:
                for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                    if file.is_file():
                        yield file, f"{place}/{file.relative_to(base)}"


def pack(out: Path, include: Path = INCLUDE, lib: Path = LIB) -> None:
    """Copies headers and libraries. A link to a library is followed: what travels may not keep links."""
    for package in PACKAGES:
        for source, place in copies(package, include, lib):
            target = out / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if target.suffix == ".a" and shutil.which("objcopy"):
                subprocess.run(["objcopy", "--strip-debug", str(target)], check=True)


def add_wheels(out: Path) -> None:
    """errors: BundleError with pip's last line"""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *PYTHON]
    done = subprocess.run([*words, "--dest", str(out / "wheels"), *WHEELS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"pip could not get {', '.join(WHEELS)}: {(done.stderr.strip() or '?').splitlines()[-1]}")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def manifest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its place."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files(folder)
    }


def differences(folder: Path) -> list[str]:
    """Files that are not as they were packed: none in a whole bundle. errors: OSError, ValueError for the manifest"""
    packed = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
    found = manifest(folder)
    return sorted(name for name in packed.keys() | found.keys() if packed.get(name) != found.get(name))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def versions() -> dict[str, str]:
    """Of the packages, where dpkg tells."""
    names = [package.name for package in PACKAGES]
    words = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *names]
    if shutil.which(words[0]) is None:
        return {}
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def check_size(folder: Path) -> int:
    """returns: bytes of the folder. errors: BundleError naming the largest files of one that is too large"""
    size = size_of(folder)
    if size >= BYTES_MAX:
        largest = sorted(files(folder), key=lambda path: -path.stat().st_size)[:5]
        told = ", ".join(f"{path.relative_to(folder)} {path.stat().st_size / 2**20:.1f} MiB" for path in largest)
        raise BundleError(f"{size / 2**20:.1f} MiB, expected less than {BYTES_MAX >> 20} MiB; the largest: {told}")
    return size


def make(out: Path) -> int:
    """returns: bytes. The folder appears whole or not at all."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        pack(fresh)
        add_wheels(fresh)
        content = {"packages": versions(), "files": manifest(fresh)}
        (fresh / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        size = check_size(fresh)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-bundle", help="folder to make (default gpu-bundle)")
    options = parser.parse_args()
    try:
        size = make(options.out)
    except BundleError as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    print(f"gpu-bundle: {size / 2**20:.1f} MiB in {options.out.name}/, of less than {BYTES_MAX >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
