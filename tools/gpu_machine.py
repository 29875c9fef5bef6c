"""What a machine has of what `make gpu-check` needs: facts for its report, and what is missing, with the next step."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Commands with the option that makes them tell their version, and Python modules with the name of their package.
REQUIRED_TOOLS = {"cmake": "--version", "ninja": "--version", "c++": "--version", "nvcc": "--version"}
OPTIONAL_TOOLS = {"nvidia-smi": "--version", "compute-sanitizer": "--version", "ncu": "--version"}
REQUIRED_MODULES = {
    "pip": "pip",
    "numpy": "numpy",
    "rich": "rich",
    "pybind11": "pybind11",
    "scikit_build_core": "scikit-build-core",
    "pytest": "pytest",
}
OPTIONAL_MODULES = {"torch": "torch", "cupy": "cupy-cuda13x", "tokenizers": "tokenizers"}
SMI_FIELDS = (
    "name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.memory,pcie.link.gen.max,pcie.link.width.max"
)

# The first driver that runs what nvcc 13.0 made: CUDA 13.0, as cuDriverGetVersion tells it.
DRIVER_MIN = 13000
CUBLASLT = "libcublasLt.so.13"


@dataclasses.dataclass(frozen=True)
class Missing:
    """required: nothing can be run without it."""

    what: str
    next: str
    required: bool


@dataclasses.dataclass
class Machine:
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: list[Missing] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)  # for every step
    without: set[str] = dataclasses.field(default_factory=set)  # optional tools and "module:" names that are not there

    @property
    def lacks(self) -> list[Missing]:
        return [one for one in self.missing if one.required]


def first_line(*words: str) -> str:
    """Of a command's output; what went wrong where it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    lines = (done.stdout.strip() or done.stderr.strip() or "?").splitlines()
    told = next((line for line in lines if re.search(r"\d+\.\d+", line)), lines[0]).strip()
    return told if done.returncode == 0 else f"status {done.returncode}: {told}"


def driver(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[dict[str, Any], Missing | None]:
    """Driver version and number of devices, by the driver itself. No context is made."""
    try:
        cuda = load("libcuda.so.1")
    except OSError as error:
        return {}, Missing(
            f"the CUDA driver: {error}", "install the NVIDIA driver, or start the container with --gpus all", True
        )
    status = cuda.cuInit(0)
    if status:
        return {}, Missing(
            f"a CUDA device that works: cuInit gives error {status}", "look at nvidia-smi and at /dev/nvidia*", True
        )
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    facts = {"driver_cuda": version.value, "devices": count.value}
    if version.value < DRIVER_MIN:
        told = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return facts, Missing(
            f"a driver for CUDA 13.0: this one is for {told}", "install the driver 580 or a newer one", True
        )
    if count.value == 0:
        return facts, Missing(
            "a CUDA device: the driver has none", "give the container a GPU, or look at CUDA_VISIBLE_DEVICES", True
        )
    return facts, None


def find_cublaslt(
    load: Callable[[str], Any] = ctypes.CDLL, folders: list[str] | None = None
) -> tuple[str | None, Missing | None]:
    """The folder of cuBLASLt, in Python packages or the toolkit, for LD_LIBRARY_PATH; None: it is found as it is."""
    try:
        load(CUBLASLT)
    except OSError:
        pass
    else:
        return None, None
    if folders is None:
        spec = importlib.util.find_spec("nvidia")
        folders = (
            [str(path) for base in (spec.submodule_search_locations or []) for path in Path(base).glob("*/lib")]
            if spec
            else []
        )
        folders += [f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}/lib64"]
    for folder in folders:
        if os.path.exists(f"{folder}/{CUBLASLT}"):
            return folder, None
    return None, Missing(
        f"{CUBLASLT}, so prompts cannot be computed", "pip install nvidia-cublas, or install the CUDA toolkit's", False
    )


def base_facts() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.M)
    release = Path("/etc/os-release").read_text("utf-8", "replace") if os.path.exists("/etc/os-release") else ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.M)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": name[1] if name else "?",
        "kernel": platform.release(),
        "c_library": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }


def tools_and_modules(machine: Machine, tools: Mapping[str, str], modules: Mapping[str, str], required: bool) -> None:
    for name, option in tools.items():
        if shutil.which(name) is None:
            machine.missing.append(Missing(f"{name} on the PATH", f"install {name}", required))
            machine.without.add(name)
        else:
            machine.facts[name] = first_line(name, option)
    for module, package in modules.items():
        if importlib.util.find_spec(module) is None:
            machine.missing.append(Missing(f"the Python module {module}", f"pip install {package}", required))
            machine.without.add(f"module:{module}")
            continue
        try:
            machine.facts[module] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            machine.facts[module] = "there"


def with_cuda_home(environment: Mapping[str, str]) -> str:
    """PATH with the toolkit's folder behind it: cmake looks there, too."""
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    return os.pathsep.join([environment.get("PATH", ""), *(f"{home}/bin" for home in [*homes, "/usr/local/cuda"])])


def look(simulated: bool) -> Machine:
    """Looks at this machine. Simulated: at what runs without a GPU alone."""
    machine = Machine(facts=base_facts())
    os.environ["PATH"] = with_cuda_home(os.environ)
    if simulated:
        tools_and_modules(machine, {}, {"pytest": "pytest", "numpy": "numpy"}, True)
        tools_and_modules(machine, {}, {name: OPTIONAL_MODULES[name] for name in ("torch", "tokenizers")}, False)
        return machine
    tools_and_modules(machine, REQUIRED_TOOLS, REQUIRED_MODULES, True)
    tools_and_modules(machine, OPTIONAL_TOOLS, OPTIONAL_MODULES, False)
    facts, lack = driver()
    machine.facts |= facts
    if lack:
        machine.missing.append(lack)
    if "nvidia-smi" not in machine.without:
        machine.facts["gpu"] = first_line("nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader")
    folder, lack = find_cublaslt()
    if lack:
        machine.missing.append(lack)
    if folder:
        machine.environment["LD_LIBRARY_PATH"] = folder
    return machine
