"""Where a build takes nvcc from: an installed toolkit, else PyPI's wheels in the virtual environment, else nowhere."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = "/usr/bin:/bin"

NVCC = """#!/bin/sh
case "$1" in
  --dryrun) echo "#\\$ TOP={top}" >&2 ;;
  --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
esac
"""
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(nvcc_here C ASM)
set(CMAKE_FIND_ROOT_PATH {only})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(PARAMWIRE_CUDA AUTO CACHE STRING "")
include({root}/cmake/cuda.cmake)
message(STATUS "found '${{PARAMWIRE_CUDA_FOUND}}' nvcc '${{PARAMWIRE_NVCC}}' cuda.h '${{CUDA_INCLUDE_DIR}}'")
"""


def add_toolkit(folder: Path, version: str = "13.0", header: bool = True) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text(NVCC.format(top=folder, version=version))
    (folder / "bin" / "nvcc").chmod(0o755)
    if header:
        (folder / "include").mkdir()
        (folder / "include" / "cuda.h").touch()
    return folder


# ---------------------------------------------------------------- CMake


@pytest.fixture
def configure(tmp_path):
    """Runs cmake/cuda.cmake in a project of its own, which searches below tmp_path alone: machines have toolkits."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT, only=tmp_path))
    venv = tmp_path / "venv"
    wheels = venv / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"

    def run(*options, status=0):
        words = ["cmake", "-S", tmp_path / "project", "-B", tmp_path / "build"]
        environment = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CUDA_PATH")}
        environment |= {"VIRTUAL_ENV": str(venv)}
        done = subprocess.run([*words, *options], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    return run, wheels, tmp_path


def test_nvcc_of_the_wheels_is_found_where_no_toolkit_is_installed(configure):
    run, wheels, _ = configure
    add_toolkit(wheels)
    assert f"found 'nvcc 13.0' nvcc '{wheels}/bin/nvcc' cuda.h '{wheels}/include'" in run()


def test_an_installed_toolkit_comes_before_the_wheels(configure):
    run, wheels, root = configure
    add_toolkit(wheels)
    toolkit = add_toolkit(root / "usr" / "local" / "cuda")
    assert f"nvcc '{toolkit}/bin/nvcc' cuda.h '{toolkit}/include'" in run()


def test_without_any_the_build_is_for_the_cpu_and_one_line_says_what_is_missing(configure):
    run, _, _ = configure
    shown = run()
    assert "no CUDA backend: needs nvcc, in PATH, CUDA_HOME/bin or the virtual environment" in shown
    assert "the extra cuda-build" in shown
    assert "found 'OFF'" in shown
    assert "PARAMWIRE_CUDA=ON needs, and cannot find: nvcc" in run("-DPARAMWIRE_CUDA=ON", status=1)


@pytest.mark.parametrize(
    ("toolkit", "said"),
    [({"version": "12.8"}, "needs nvcc 13.0 or newer"), ({"header": False}, "needs cuda.h beside")],
)
def test_wheels_that_do_not_do_are_named_with_the_reason(configure, toolkit, said):
    run, wheels, _ = configure
    add_toolkit(wheels, **toolkit)
    assert said in run()


# ---------------------------------------------------------------- set-up


def setup_functions(tmp_path, *lines, **environment):
    """Runs bash lines after tools/setup.sh's functions around nvcc; what would change the machine is echoed instead."""
    text = (ROOT / "tools" / "setup.sh").read_text()
    begin, end = text.index("installed_nvcc() {"), text.index("pip_install() {")
    before = """set -euo pipefail
say() { echo "$*"; }
pip_install() { echo "pip install $*"; return "${PIP_STATUS:-0}"; }
requirements() { echo "nvidia-cuda-nvcc==13.0.*"; }
done_before() { [ "${DONE:-}" = "$2" ]; }
mark_done() { echo "done $1"; }
venv_python=python
mkdir -p build
"""
    script = before + text[begin:end] + "\n".join(lines)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": PATH, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


NONE_INSTALLED = "installed_nvcc() { return 1; }"


def test_setup_takes_the_nvcc_that_is_installed(tmp_path):
    toolkit = add_toolkit(tmp_path / "toolkit")
    nvcc = f"venv: nvcc is {toolkit}/bin/nvcc"
    assert setup_functions(tmp_path, "add_nvcc", PATH=f"{toolkit}/bin:{PATH}") == [nvcc]
    assert setup_functions(tmp_path, "command() { return 1; }", "add_nvcc", CUDA_HOME=str(toolkit)) == [nvcc]


def test_setup_gets_the_wheels_where_none_is_installed_and_only_once(tmp_path):
    shown = setup_functions(tmp_path, NONE_INSTALLED, "add_nvcc")
    assert shown[0].startswith("venv: no nvcc is installed; getting it from PyPI's wheels")
    assert shown[1:] == ["pip install --no-deps -r build/nvcc.txt", "done nvcc"]
    add_toolkit(tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13")
    again = setup_functions(tmp_path, NONE_INSTALLED, "add_nvcc", DONE="nvidia-cuda-nvcc==13.0.*")
    assert again == ["venv: no nvcc is installed; that of PyPI's wheels is in .venv"]


def test_setup_goes_on_for_the_cpu_where_the_wheels_cannot_be_had(tmp_path):
    shown = setup_functions(tmp_path, NONE_INSTALLED, "add_nvcc", PIP_STATUS="1")
    assert shown[-1] == "venv: no nvcc: the build has no CUDA backend, and CPU work is as ever"
    assert "done nvcc" not in shown


def test_the_wheels_are_of_one_release():
    """pip would take the newest crt and nvvm for an older nvcc, which does not compile."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name.partition("==")[2] for name in extras["cuda-build"]} == {"13.0.*"}
