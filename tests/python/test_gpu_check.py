"""`make gpu-check` runs its steps, reads what they leave, judges by the targets, and tells what a machine lacks.

Programs of tests/gpu and bench/gpu are small scripts here; the last test runs the real ones on the simulated device.
"""

from __future__ import annotations

import ctypes
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gpu_check
import gpu_machine
import gpu_plan
import gpu_results
import gpu_show
import pytest

ROOT = Path(__file__).resolve().parents[2]
TWIN = ROOT / "build" / "dev" / "tests" / "gpu" / "gpu_sim_test"

# Each takes its arguments as gpu_check.py gives them. GoogleTest's report as 1.12 writes it, shortened.
TEST_PROGRAM = """#!{python}
import json, sys
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
case = {{"name": "A", "status": "RUN", "result": "COMPLETED", **{extra}}}
report = {{"testsuites": [{{"name": "S", "testsuite": [case, {{"name": "B", "status": "RUN", "result": "SKIPPED"}}]}}]}}
open(options["gtest_output"].removeprefix("json:"), "w").write(json.dumps(report))
sys.exit({status})
"""
BENCH_PROGRAM = """#!{python}
import json, sys
figures = json.loads({figures!r})
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({{"figures": figures}}))
"""
FIGURES = [
    dict(zip(("name", "value", "unit", "baseline", "ratio", "correct"), row, strict=True))
    for row in (
        ("crc32c", 900.0, "GB/s", "device read", 0.6, True),
        ("swap_launch", 4, "us", "eager launches", None, True),
        ("streamed_generation_on_this_link", 700.0, "tokens/s", "local", 0.95, True),
        ("verified_host_to_device", 50.0, "GB/s", "pinned", 0.93, True),
    )
]


@pytest.fixture
def programs(tmp_path):
    """Makes the programs, also as twins. extra: of the first test in the report"""

    def make(figures=FIGURES, extra=None, status=0):
        folder = tmp_path / "programs"
        folder.mkdir(exist_ok=True)
        texts = {
            "test": TEST_PROGRAM.format(python=sys.executable, extra=extra or {}, status=status),
            "bench": BENCH_PROGRAM.format(python=sys.executable, figures=json.dumps(figures)),
            "cases": '#!/bin/sh\nmkdir -p "$2"\n',
        }
        for name, text in texts.items():
            for prefix in ("gpu_", "gpu_sim_"):
                (folder / f"{prefix}{name}").write_text(text)
                (folder / f"{prefix}{name}").chmod(0o755)
        return folder

    return make


@pytest.fixture
def whole_machine(monkeypatch):
    """Nothing is missing, and the checkout has no bundle to compare."""
    machine = gpu_machine.Machine(facts={"gpu": "some GPU"})
    monkeypatch.setattr(gpu_machine, "look", lambda simulated: machine)
    monkeypatch.setattr(gpu_check, "bundle_problem", lambda folder: None)
    return machine


def run(tmp_path, folder, *words):
    """returns: exit status, gpu-check.json"""
    out = tmp_path / "out"
    status = gpu_check.main(["--programs", str(folder), "--out", str(out), *words])
    return status, json.loads((out / "gpu-check.json").read_text())


BUILD = ",".join(step.name for step in gpu_plan.BUILD)
PYTHON = "parity,model,agree,generate"
DEVICE = ",".join(step.name for step in gpu_plan.DEVICE)


def test_a_run_that_meets_its_targets_ends_well_with_a_file_and_a_table(tmp_path, programs, whole_machine, capsys):
    status, content = run(tmp_path, programs(), "--skip", f"{BUILD},{PYTHON},{DEVICE}")
    assert status == 0
    assert [(step["name"], step["status"]) for step in content["steps"]] == [
        ("test", "ok"), ("bench", "ok"), ("cases", "ok")]  # fmt: skip
    assert content["steps"][0]["results"] == {"passed": 1, "skipped": 1}
    assert content["figures"] == FIGURES
    assert [target["met"] for target in content["targets"]] == [True] * len(gpu_plan.TARGETS)
    shown = capsys.readouterr().out
    assert re.search(r"^crc32c +value >= 60 +900 +met", shown, re.M)
    assert re.search(r"^swap_launch +4 +us +- +eager launches$", shown, re.M)


@pytest.mark.parametrize(
    ("at", "change", "said"),
    [
        (0, {"value": 59.0}, "MISSED"),
        (0, {"ratio": 0.49}, "MISSED"),
        (1, {"value": 5.1}, "MISSED"),
        (2, {"ratio": 0.89}, "MISSED"),
        (3, {"ratio": None}, "NOT MEASURED"),
        (3, {"name": "other"}, "NOT MEASURED"),
    ],
)
def test_a_target_that_is_missed_or_was_not_measured_fails_the_run(
    tmp_path, programs, whole_machine, capsys, at, change, said
):
    figures = [one | (change if at == index else {}) for index, one in enumerate(FIGURES)]
    status, content = run(tmp_path, programs(figures), "--skip", f"{BUILD},{PYTHON},{DEVICE}")
    assert status == 1
    assert [target["met"] for target in content["targets"]].count(False) == 1
    shown = capsys.readouterr()
    assert said in shown.out
    assert f"target {FIGURES[at]['name']}" in shown.err


def test_a_wrong_answer_fails_the_run_whatever_its_speed(tmp_path, programs, whole_machine):
    status, content = run(tmp_path, programs([FIGURES[0] | {"correct": False}]), "--only", "bench")
    assert status == 1
    assert content["steps"][0]["reason"] == "wrong answers: crc32c"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"extra": {"failures": [{"failure": "x"}]}, "status": 1}, "1 of 1 tests failed (status 1)"),
        ({"status": 134}, "status 134"),
        ({"extra": {"result": "SKIPPED"}}, "no test passed, 2 were skipped"),
    ],
)
def test_tests_that_fail_die_or_do_not_run_fail_their_step_and_what_needs_it(
    tmp_path, programs, whole_machine, options, reason
):
    whole_machine.without.add("ncu")
    status, content = run(tmp_path, programs(**options), "--only", "test,memcheck")
    assert status == 1
    assert [(step["status"], step["reason"]) for step in content["steps"]] == [
        ("failed", reason), ("not run", "needs test")]  # fmt: skip


def test_a_program_that_is_not_there_or_leaves_no_file_fails_its_step(tmp_path, programs, whole_machine):
    folder = programs()
    (folder / "gpu_test").unlink()
    (folder / "gpu_bench").write_text("#!/bin/sh\n")
    assert run(tmp_path, folder, "--only", "test,bench")[0] == 1
    content = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert content["steps"][0]["reason"] == "status 127"
    assert "left no bench.json" in content["steps"][1]["reason"]


def test_a_step_over_its_time_is_ended_with_its_children(tmp_path):
    log = tmp_path / "log"
    status, output = gpu_check.execute(["sh", "-c", "echo began; sleep 600 & wait"], 0.3, {}, log)
    assert (status, output) == (None, "began\n")


def test_optional_steps_without_their_tool_or_past_the_time_are_skipped_and_named(tmp_path, programs, whole_machine):
    whole_machine.without |= {"compute-sanitizer", "module:torch"}
    status, content = run(tmp_path, programs(), "--only", "test,eager torch,memcheck,ncu crc", "--seconds", "0")
    steps = {step["name"]: (step["status"], step["reason"]) for step in content["steps"]}
    assert steps == {
        "test": ("ok", ""),
        "eager torch": ("skipped", "no torch"),
        "memcheck": ("skipped", "no compute-sanitizer"),
        "ncu crc": ("skipped", "the run's 0 s are over"),
    }
    assert status == 0


NCU = """==PROF== Connected to process 1
{"figures": []}
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","pw_crc","gpu__time_duration.sum","ns","1,234"
"""


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        (NCU, 0, ("ok", "")),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", 1, ("skipped", "the machine says ERR_NVGPUCTRPERM")),
        ("==ERROR== something else", 1, ("failed", "status 1")),
    ],
)
def test_counters_are_read_and_a_machine_that_forbids_them_is_no_failure(
    tmp_path, programs, whole_machine, monkeypatch, text, status, expected
):
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '%s' {shlex.quote(text)}\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    _, content = run(tmp_path, programs(), "--only", "ncu crc")
    step = content["steps"][0]
    assert (step["status"], step["reason"]) == expected
    if status == 0:
        assert step["results"]["counters"] == [
            {"kernel": "pw_crc", "metric": "gpu__time_duration.sum", "unit": "ns", "value": "1,234"}
        ]


@pytest.mark.parametrize(
    "change",
    [{"value": "fast"}, {"value": float("nan")}, {"value": True}, {"ratio": "1"}, {"correct": 1}, {"name": None}],
)
def test_a_figure_of_another_form_is_refused_by_the_name_of_its_field(change):
    with pytest.raises(gpu_results.ResultError, match=next(iter(change))):
        gpu_results.figure_of(FIGURES[0] | change)


def test_records_of_the_command_become_figures():
    record = {
        "transport": "shm",
        "view_pages": "kept",
        "tokens_per_s": 3.0,
        "baseline": "b",
        "ratio": 0.9,
        "correct": True,
    }
    assert gpu_results.read_records(Path(), json.dumps(record))["figures"][0]["name"] == "python_generation_shm_kept"
    with pytest.raises(gpu_results.ResultError, match="same tokens"):
        gpu_results.read_records(Path(), json.dumps(record | {"correct": False}))


# ---------------------------------------------------------------- what a machine lacks


def test_a_machine_that_lacks_something_is_told_what_with_the_next_step(tmp_path, whole_machine, capsys):
    whole_machine.missing = [
        gpu_machine.Missing("the CUDA driver", "install it", True),
        gpu_machine.Missing("ncu on the PATH", "install ncu", False),
    ]
    status, content = run(tmp_path, tmp_path)
    assert status == gpu_check.UNAVAILABLE
    assert content["steps"] == []
    assert content["missing"][0] == {"what": "the CUDA driver", "next": "install it", "required": True}
    shown = capsys.readouterr()
    assert "gpu-check: UnavailableError: the CUDA driver; next: install it" in shown.err
    assert "ncu on the PATH" in shown.out
    assert "Traceback" not in shown.err


class Driver:
    """libcuda as ctypes gives it."""

    def __init__(self, status=0, version=13000, count=1):
        self.cuInit = lambda flags: status
        self.cuDriverGetVersion = lambda at: self._set(at, version)
        self.cuDeviceGetCount = lambda at: self._set(at, count)

    @staticmethod
    def _set(at, value):
        ctypes.cast(at, ctypes.POINTER(ctypes.c_int))[0] = value


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(status=100), "cuInit gives error 100"),
        (Driver(version=12080), "this one is for 12.8"),
        (Driver(count=0), "the driver has none"),
    ],
)
def test_a_driver_that_does_not_do_is_named_with_the_reason(driver, said):
    _, lack = gpu_machine.driver(lambda name: driver)
    assert lack.required
    assert said in lack.what


def test_a_driver_that_does_is_a_fact():
    assert gpu_machine.driver(lambda name: Driver(count=2)) == ({"driver_cuda": 13000, "devices": 2}, None)


def test_cublaslt_of_the_python_packages_is_found(tmp_path):
    def nothing(name):
        raise OSError("not found")

    folder, lack = gpu_machine.find_cublaslt(nothing, [str(tmp_path)])
    assert folder is None
    assert not lack.required
    (tmp_path / gpu_machine.CUBLASLT).touch()
    assert gpu_machine.find_cublaslt(nothing, [str(tmp_path)]) == (str(tmp_path), None)


# ---------------------------------------------------------------- the plan


def test_every_step_has_its_places_a_name_of_its_own_and_needs_that_come_before():
    for simulated in (False, True):
        steps = gpu_plan.plan(simulated)
        where = gpu_plan.places(ROOT, ROOT / "build" / "x", "python3", 2, simulated)
        seen = set()
        for step in steps:
            words = gpu_plan.filled(step.command, where)
            assert not any("{" in word for word in words)
            assert step.name not in seen
            assert set(step.needs) <= seen | {one.name for one in gpu_plan.BUILD}
            assert step.reads in ("", *gpu_results.READERS)
            seen.add(step.name)


def test_wheels_for_another_python_are_left_out(tmp_path):
    (tmp_path / "gpu-bundle" / "wheels").mkdir(parents=True)
    mine = f"x-1-cp{sys.version_info.major}{sys.version_info.minor}-cp3-manylinux_2_28_x86_64.whl"
    for name in (mine, "y-1-py3-none-any.whl", "x-1-cp27-cp27-manylinux_2_28_x86_64.whl"):
        (tmp_path / "gpu-bundle" / "wheels" / name).touch()
    where = gpu_plan.places(tmp_path, tmp_path, "python3", 2, False)
    assert [Path(wheel).name for wheel in gpu_plan.filled("{wheels}", where)] == [mine, "y-1-py3-none-any.whl"]


def test_a_path_with_blanks_stays_one_word():
    where = gpu_plan.places(Path("a b"), Path("o"), "python3", 2, True)
    assert gpu_plan.filled("{gpu_test} {quick} {wheels} -x", where) == [
        "a b/build/dev/tests/gpu/gpu_sim_test",
        "--quick",
        "-x",
    ]


@pytest.mark.parametrize("words", [["--dry-run"], ["GPU_CHECK_ARGS=--dry-run"], ["-n"]])
def test_make_lists_what_it_would_run_and_runs_nothing(words):
    done = subprocess.run(
        ["make", "gpu-check", f"GPU_PYTHON={sys.executable}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for step in gpu_plan.plan(False):
        assert f". {step.name}: " in done.stdout
    assert "    cmake --preset gpu" in done.stdout
    assert "compute-sanitizer --tool racecheck" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--only", ","), "names no step"),
        (("--seconds", "nan"), "is not a number from 0 up"),
        (("--jobs", "0"), "is not a number from 1 up"),
        (("--simulate",), "unrecognized arguments"),
        (("--simulated", "--only", "model", "--out", "/dev/null/x"), "--out /dev/null/x"),
    ],
)
def test_words_that_cannot_be_meant_are_wrong_usage(capsys, words, told):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(words)
    assert ended.value.code == gpu_check.USAGE
    assert told in capsys.readouterr().err


def test_an_unknown_step_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--only", "nonsense"])
    assert ended.value.code == gpu_check.USAGE
    assert "there are configure, build" in capsys.readouterr().err


def test_the_table_has_a_line_for_every_step_and_figure():
    content = {
        "steps": [
            {"name": "test", "status": "ok", "seconds": 1.25, "reason": "", "results": {"passed": 3, "skipped": 0}}
        ],
        "figures": FIGURES,
        "targets": [],
    }
    lines = gpu_show.table(content).splitlines()
    assert lines[1].split() == ["test", "ok", "1.2", "3", "tests"]
    assert len(lines) == 2 + 1 + 1 + len(FIGURES)


@pytest.mark.skipif(not TWIN.exists(), reason="build/dev has no gpu_sim_test: no nvcc, or nothing built")
def test_the_whole_run_on_the_simulated_device(tmp_path):
    words = [sys.executable, "tools/gpu_check.py", "--simulated", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "gpu-check.json").read_text())
    steps = {step["name"]: step["status"] for step in content["steps"]}
    assert set(steps) == {step.name for step in gpu_plan.plan(True)}
    assert set(steps.values()) == {"ok"}
    assert {target.figure for target in gpu_plan.TARGETS} <= {figure["name"] for figure in content["figures"]}
