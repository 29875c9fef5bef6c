"""What `make gpu-check` runs, and what is expected of it: steps and targets as data. tools/gpu_check.py runs them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Step:
    """One command. {names} in it, and in `result`, are filled in from `places`."""

    name: str
    about: str
    command: str
    timeout_s: float
    tools: tuple[
        str, ...
    ] = ()  # commands on the PATH, or "module:" and a Python module, that it needs beside the required ones
    needs: tuple[str, ...] = ()  # steps that must have passed, when they are part of the run
    optional: bool = False  # left out where a tool is missing, or when the run's time is over: named, and no failure
    tolerate: tuple[str, ...] = ()  # a failure whose output holds one of these is the machine's: named, and no failure
    reads: str = ""  # how its figures are read: a reader of tools/gpu_results.py
    result: str = ""  # the file that this reader reads; without one, the step's output


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure's value, or its ratio to its baseline, and what it must reach."""

    figure: str
    field: str  # "value" or "ratio"
    at_least: float | None = None
    at_most: float | None = None
    about: str = ""

    def holds(self, number: float) -> bool:
        return (self.at_least is None or number >= self.at_least) and (self.at_most is None or number <= self.at_most)

    def text(self) -> str:
        limit = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{self.field} {limit}"


TARGETS = (
    Target("crc32c", "value", at_least=60.0, about="GB/s of CRC-32C over bytes in device memory"),
    Target(
        "crc32c", "ratio", at_least=0.5, about="of the bytes that a copy on the device reads and writes in that time"
    ),
    Target(
        "swap_launch",
        "value",
        at_most=5.0,
        about="microseconds of CPU a step: swap of the weights and launch of the graph",
    ),
    Target(
        "streamed_generation_on_this_link",
        "ratio",
        at_least=0.9,
        about="tokens/s at a budget of 25 %, over those with all weights on the device, or what the link allows",
    ),
    Target(
        "verified_host_to_device",
        "ratio",
        at_least=0.9,
        about="copy and check on the device, over a plain copy from pinned memory",
    ),
)

# Tests of few and small launches: under compute-sanitizer a launch takes some hundred times longer.
SANITIZED = "*Sanitizer*"
# One kernel of each kind: bytes summed, weights read once, attention over the cache.
PROFILED = ("crc", "gemv", "attention")
METRICS = ",".join(
    (
        "gpu__time_duration.sum",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    )
)

BUILD = (
    Step("configure", "CMake, preset gpu", "cmake --preset gpu", 120),
    Step(
        "build",
        "the programs of tests/gpu and bench/gpu",
        "cmake --build --preset gpu -j {jobs}",
        400,
        needs=("configure",),
    ),
    Step(
        "package",
        "paramwire for Python, built by pip without network, into {packages}",
        "{python} -m pip install --quiet --disable-pip-version-check --target {packages} --upgrade "
        "--no-build-isolation --no-index --no-deps -C build-dir={build}/wheel -C cmake.define.PARAMWIRE_CUDA=ON "
        "{root} {wheels}",
        400,
    ),
    Step(
        "import",
        "what the package finds here",
        "{python} -m paramwire doctor --need backends/cuda",
        60,
        needs=("package",),
    ),
)

CHECKS = (
    Step(
        "test",
        "kernels against their CPU twins, graphs, capture, damage",
        "{gpu_test} --gtest_output=json:{out}/test.json",
        300,
        needs=("build",),
        reads="gtest",
        result="{out}/test.json",
    ),
    Step(
        "bench",
        "figures, each beside its baseline",
        "{gpu_bench} --json {out}/bench.json {quick}",
        240,
        needs=("build",),
        reads="figures",
        result="{out}/bench.json",
    ),
    Step("cases", "inputs and outputs of kernels", "{gpu_cases} --out {out}/cases", 120, needs=("build",)),
    Step(
        "parity",
        "the same by numpy, and by torch where it is",
        # Warnings of torch and of plugins that a machine has are no failures there.
        "{python} -m pytest tests/gpu -q -p no:cacheprovider -W default --junitxml={out}/parity.xml",
        180,
        needs=("cases",),
        reads="junit",
        result="{out}/parity.xml",
    ),
    Step(
        "model",
        "generated weights of the demo's model",
        "{python} tools/gpu_model.py make {out}/model --size {size}",
        120,
        needs=("import",),
    ),
    Step(
        "agree",
        "logits of {backend} beside the CPU backend's",
        "{python} tools/gpu_model.py compare {out}/model --backend {backend}",
        180,
        tools=("module:tokenizers",),
        needs=("model",),
        optional=True,
    ),
    Step(
        "generate",
        "tokens/s through Python: streamed under a budget beside local",
        "{python} -m paramwire bench generate --json --backend {backend} --model {out}/model/model.safetensors "
        "--tokens {tokens} --budget {budget}",
        180,
        tools=("module:tokenizers",),
        needs=("model",),
        optional=True,
        reads="records",
    ),
)


def sanitizer(tool: str, about: str) -> Step:
    return Step(
        tool,
        about,
        f"compute-sanitizer --tool {tool} --error-exitcode 9 {{gpu_test}} --gtest_filter={SANITIZED} "
        f"--gtest_output=json:{{out}}/{tool}.json",
        120,
        tools=("compute-sanitizer",),
        needs=("test",),
        optional=True,
        reads="gtest",
        result=f"{{out}}/{tool}.json",
    )


def profile(name: str) -> Step:
    return Step(
        f"ncu {name}",
        f"counters of kernels named {name}",
        # Clocks stay as they are: to lock them changes the machine for others, and needs rights.
        f"ncu --clock-control none --csv --metrics {METRICS} --kernel-name regex:{name} --launch-count 3 "
        f"{{gpu_bench}} --quick --filter {name} --json {{out}}/ncu-{name}.json",
        90,
        tools=("ncu",),
        needs=("bench",),
        optional=True,
        tolerate=("ERR_NVGPUCTRPERM", "No kernels were profiled"),
        reads="counters",
    )


DEVICE = (
    Step(
        "eager torch",
        "tokens/s of the same shapes by torch, operation by operation",
        "{python} bench/gpu/eager_torch.py --json {out}/eager.json",
        120,
        tools=("module:torch",),
        optional=True,
        reads="figures",
        result="{out}/eager.json",
    ),
    sanitizer("memcheck", "no access outside of what was allocated"),
    sanitizer("racecheck", "no race in shared memory"),
    sanitizer("synccheck", "no barrier that some threads never reach"),
    sanitizer("initcheck", "no read of device memory that nobody wrote"),
    *(profile(name) for name in PROFILED),
)


def plan(simulated: bool) -> tuple[Step, ...]:
    """The steps, in order. Simulated: those that need neither GPU nor build, and the tests that sanitizers run."""
    if not simulated:
        return BUILD + CHECKS + DEVICE
    small = Step(
        "sanitized tests",
        "what compute-sanitizer would run",
        f"{{gpu_test}} --gtest_filter={SANITIZED} --gtest_output=json:{{out}}/small.json",
        120,
        needs=("test",),
        reads="gtest",
        result="{out}/small.json",
    )
    return (*CHECKS, small)


Places = Mapping[str, str | tuple[str, ...]]


def places(root: Path, out: Path, python: str, jobs: int, simulated: bool, programs: Path | None = None) -> Places:
    """What the {names} of steps stand for. programs: a folder that holds all of them, in the place of the build's."""
    build = root / "build" / ("dev" if simulated else "gpu")
    twin = "gpu_sim_" if simulated else "gpu_"
    bundle = root / "gpu-bundle"
    return {
        "root": str(root),
        "build": str(build),
        "out": str(out),
        "packages": str(build / "python"),
        "bundle": str(bundle),
        "wheels": tuple(str(path) for path in sorted(bundle.glob("wheels/*.whl")) if is_for_this_python(path.name)),
        "python": python,
        "jobs": str(jobs),
        "gpu_test": str((programs or build / "tests" / "gpu") / f"{twin}test"),
        "gpu_cases": str((programs or build / "tests" / "gpu") / f"{twin}cases"),
        "gpu_bench": str((programs or build / "bench" / "gpu") / f"{twin}bench"),
        "quick": ("--quick",) if simulated else (),
        # The simulated device is part of the tests and never of the package: there, Python's steps run on the CPU.
        "backend": "cpu" if simulated else "cuda:0",
        "size": "tiny" if simulated else "smollm2-135m",
        "tokens": "16" if simulated else "96",
        "budget": "75%" if simulated else "25%",
    }


def is_for_this_python(wheel: str) -> bool:
    """By a wheel's name. pip refuses to install anything beside one for another Python."""
    return f"-cp{sys.version_info.major}{sys.version_info.minor}-" in wheel or "-py3-none-" in wheel


def environment(where: Mapping[str, Any], simulated: bool, given: Mapping[str, str], libraries: str) -> dict[str, str]:
    """What every step gets beside the environment `given`. libraries: one more folder of shared libraries, or "".

    CMAKE_PREFIX_PATH is for pip's build: as a CMake variable it would displace the one by which pybind11 is found.
    """

    def before(name: str, *folders: str) -> str:
        return ":".join(filter(None, [*folders, given.get(name, "")]))

    out = {
        "CMAKE_PREFIX_PATH": before("CMAKE_PREFIX_PATH", where["bundle"]),
        "OPENSSL_ROOT_DIR": where["bundle"],
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", f"{where['bundle']}/lib", libraries),
        "PARAMWIRE_GPU_CASES": f"{where['out']}/cases",
    }
    return out if simulated else out | {"PYTHONPATH": before("PYTHONPATH", where["packages"])}


def filled(command: str, where: Places) -> list[str]:
    """The command's words. A name whose place is a tuple stands for so many words."""
    out: list[str] = []
    for word in command.split():
        place = where.get(word[1:-1])
        out += place if isinstance(place, tuple) else [word.format_map(where)]
    return out
