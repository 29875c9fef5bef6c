"""The wheel in dist/, in a clean virtual environment: it needs nothing of this tree and little of the machine.

Built by `tools/setup.sh wheel`; run by `make test` as the suite "wheel".
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a wheel may take from the machine: the C and C++ run-time, by the manylinux policy. Everything else is inside.
ALLOWED_LIBRARIES = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}


def output_of(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel() -> Path:
    wheels = list((ROOT / "dist").glob("paramwire-*.whl"))
    assert len(wheels) == 1, f"expected one wheel in dist/, found {wheels}: run `make wheel`"
    return wheels[0]


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment that holds the wheel and its declared dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    output_of(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    output_of(*pip, wheel, cwd=folder.parent)
    return folder / "bin"


def test_a_clean_environment_imports_the_wheel_and_checks_bytes(environment: Path, tmp_path: Path) -> None:
    program = "import paramwire; print(hex(paramwire.crc64(b'123456789')), hex(paramwire.crc32c(b'123456789')))"
    printed = output_of(environment / "python", "-c", program, cwd=tmp_path)
    # Check values of CRC-64/XZ and CRC-32C: reveng.sourceforge.io/crc-catalogue.
    assert printed.split() == ["0x995dc9bbdf1939fa", "0xe3069283"]


def test_the_command_is_installed_and_tells_the_version_of_the_build(environment: Path, tmp_path: Path) -> None:
    match = re.search(r"project\(paramwire VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert match is not None
    assert f"paramwire {match[1]} " in output_of(environment / "paramwire", "--version", cwd=tmp_path)


def test_the_scripts_of_softroce_come_with_the_wheel(environment: Path, tmp_path: Path) -> None:
    program = "from paramwire.softroce.common import script; print(sum(len(script(n)) for n in %r))"
    names = sorted(path.name for path in (ROOT / "python" / "paramwire" / "softroce").glob("*.sh"))
    size = sum((ROOT / "python" / "paramwire" / "softroce" / name).stat().st_size for name in names)
    assert len(names) == 3
    assert output_of(environment / "python", "-c", program % names, cwd=tmp_path) == f"{size}\n"
    assert "--where" in output_of(environment / "paramwire", "softroce", "run", "--help", cwd=tmp_path)


def test_the_wheel_says_which_glibc_it_needs(wheel: Path) -> None:
    match = re.search(r"-manylinux_2_(\d+)_x86_64\.whl$", wheel.name)
    assert match is not None, wheel.name
    assert int(match[1]) <= 36, "Debian 12 has glibc 2.36"


def test_every_shared_library_comes_with_the_wheel_or_is_the_run_time(unpacked: Path) -> None:
    objects = list(unpacked.rglob("*.so*"))
    assert objects
    inside = {path.name for path in objects}
    for path in objects:
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-dW", path, cwd=unpacked)))
        assert needed <= ALLOWED_LIBRARIES | inside, f"{path.name} needs {needed - ALLOWED_LIBRARIES - inside}"


def test_libibverbs_is_neither_needed_nor_inside(unpacked: Path) -> None:
    """It is opened at run time: its providers must be of one build with it, and with the kernel's side."""
    for path in unpacked.rglob("*"):
        assert "ibverbs" not in path.name
        if ".so" in path.name:
            assert "libibverbs" not in output_of("readelf", "-dW", path, cwd=unpacked)


def test_the_module_exports_its_init_function_only(unpacked: Path) -> None:
    (module,) = unpacked.glob("paramwire/_core.*.so")
    symbols = output_of("nm", "-D", "--defined-only", module, cwd=unpacked).split()[2::3]
    assert symbols == ["PyInit__core"]


def test_no_file_of_the_wheel_names_a_folder_of_the_machine_that_built_it(unpacked: Path) -> None:
    for path in unpacked.rglob("*"):
        if path.is_file():
            assert str(ROOT).encode() not in path.read_bytes(), path
