"""Runs the test suites, each against a budget in minutes, and says what each used.

usage: run_tests.py [--soak] [SUITE...]
       no suite named: all that `make test` runs; --soak: those and the long ones

A suite that fails makes the run fail. A budget that is blown is said loudly and is no failure: machines differ. A suite
that exceeds its hard stop (meant for hangs) is ended, with everything it started, and has failed. Output goes to
build/test-logs/SUITE.log; the end of it is shown when the suite fails. The last line is "N passed, M failed".
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test-logs"
PYTHON = str(ROOT / ".venv" / "bin" / "python")
# Lines of a failed suite's log that are shown: enough for one gtest or pytest failure with its context.
SHOWN_LINES = 120
# Of the command in the guest, whose processor is emulated: more than it takes on a machine that is busy otherwise.
SOFTROCE_SECONDS = 900
# Budgets of `make test` may not add up to more than this, in minutes, on two cores from a warm compiler cache.
TOTAL_MINUTES = 30


class SuiteFailed(Exception):
    """A command of a suite failed; the text says which and how."""


@dataclasses.dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def read_junit(path: Path) -> Counts:
    """Counts of a JUnit file as ctest and pytest write it; ctest's "notrun" and "disabled" count as skipped."""
    counts = Counts()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


class Run:
    """What a suite may do: run commands with their output in the suite's log, and collect counts."""

    def __init__(self, name: str, stop_after_s: float) -> None:
        self.counts = Counts()
        self._stop_at = time.monotonic() + stop_after_s
        self._stop_after_s = stop_after_s
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"{name}.log"
        self.log.write_bytes(b"")
        self.junit = LOGS / f"{name}.xml"
        self.notes: list[str] = []  # shown after the result

    def command(self, *words: str, environment: dict[str, str] | None = None, expect_success: bool = True) -> int:
        """Run one command; its exit status. Past the suite's hard stop its whole process group is ended."""
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=os.environ | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=max(0.0, self._stop_at - time.monotonic()))
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    text = f"stopped: over its hard stop of {self._stop_after_s / 60:.0f} min in: {' '.join(words)}"
                    raise SuiteFailed(text) from None
                raise
        if expect_success and status != 0:
            raise SuiteFailed(f"status {status} from: {' '.join(words)}")
        return status

    def counted(self, *words: str, environment: dict[str, str] | None = None) -> None:
        """Run ctest or pytest, add up its JUnit file. No test at all is a failure: it would pass with all removed."""
        self.junit.unlink(missing_ok=True)
        status = self.command(*words, environment=environment, expect_success=False)
        counts = read_junit(self.junit) if self.junit.exists() else Counts()
        self.counts.add(counts)
        if counts.passed + counts.failed == 0:
            raise SuiteFailed(f"no test was run by: {' '.join(words)}")
        if status != 0 or counts.failed:
            raise SuiteFailed(f"{counts.failed} failed, status {status} from: {' '.join(words)}")

    def check(self, *words: str) -> None:
        """Run one command that is itself the test."""
        self.command(*words)
        self.counts.passed += 1

    def pytest(self, *words: str) -> None:
        self.counted(PYTHON, "-m", "pytest", *words, "-q", f"--junitxml={self.junit}")

    def ctest(self, preset: str, label: str | None, prefix: Sequence[str] = (), jobs: int | None = None) -> None:
        words = [*prefix, "ctest", "--preset", preset, "-j", str(jobs or os.cpu_count() or 1)]
        if label:
            words += ["-L", f"^{label}$"]
        self.counted(*words, "--output-junit", str(self.junit), environment=SANITIZER_ENVIRONMENT)


SANITIZER_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def without_address_randomisation() -> list[str]:
    """GCC 12's ThreadSanitizer dies at start, and AddressSanitizer may spin, on hosts with vm.mmap_rnd_bits above 28.

    Containers may forbid personality(2); then the run goes on without, and the hard stop bounds a spin.
    """
    prefix = ["setarch", "-R"]
    if shutil.which("setarch") is None:
        return []
    return prefix if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0 else []


def setup(*steps: str) -> tuple[str, ...]:
    return ("bash", "tools/setup.sh", *steps)


def lint(run: Run) -> None:
    """All three, also after a failure: one run shows everything there is to mend."""
    commands = ((PYTHON, "-m", "ruff", "check", "."), (PYTHON, "-m", "mypy"), (PYTHON, "tests/tidy.py"))
    failed = [words[-1] for words in commands if run.command(*words, expect_success=False) != 0]
    run.counts.add(Counts(passed=len(commands) - len(failed), failed=len(failed)))
    if failed:
        raise SuiteFailed(f"{len(failed)} of {len(commands)} linters found something, see {run.log.relative_to(ROOT)}")


def wheel(run: Run) -> None:
    run.command(*setup("wheel"))
    run.pytest("tests/wheel")


def softroce(run: Run) -> None:
    """What needs RDMA devices, in one guest (or on this kernel where it has soft-RoCE); then the command's own tests.

    A guest without devices, and a test that skips itself, are failures here: nothing else runs these.
    """
    run.command(*setup("model", "softroce"))
    run.command(PYTHON, "tests/softroce/make_model.py")
    out = LOGS / "softroce"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    words = (PYTHON, "-m", "paramwire", "softroce", "run", "--timeout", str(SOFTROCE_SECONDS), "--out", str(out))
    status = run.command(*words, "--", "sh", "tests/softroce/suite.sh", str(out), expect_success=False)
    for name in ("conformance", "pytest"):
        if not (out / f"{name}.xml").exists():
            raise SuiteFailed(f"status {status}, and no {name}.xml came back from: {' '.join(words)}")
        run.counts.add(read_junit(out / f"{name}.xml"))
        run.notes += results(out / f"{name}.xml")
    run.notes += (out / "machine.txt").read_text().splitlines()
    if status != 0 or run.counts.failed or run.counts.skipped:
        counts = f"{run.counts.failed} failed, {run.counts.skipped} skipped"
        raise SuiteFailed(f"status {status}, {counts}: {' '.join(words)}")
    run.pytest("tests/python", "-m", "guest")


def results(junit: Path) -> list[str]:
    """A line for each test of a JUnit file."""
    out = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        name = f"{(case.get('classname') or '').removeprefix('tests.softroce.')}.{case.get('name')}"
        out.append(f"{bad[0] if bad else 'ok':<8} {name} ({float(case.get('time') or 0):.1f} s)")
    return out


def long_faults(run: Run) -> None:
    """Fault tests take what they need for a figure: a minute under a writer at full speed, a model of 1 GiB."""
    files = sorted((ROOT / "tests" / "python").glob("test_faults*.py"))
    run.pytest("--soak", *(str(path.relative_to(ROOT)) for path in files))


def long_torn_reads(run: Run) -> None:
    """Other seeds than those of `make test`, and fifteen times as many reads."""
    run.command(*setup("build:dev"))
    for mode in ("seq", "crc", "both"):
        run.check("build/dev/tests/torn_reads_test", f"--mode={mode}", "--reads=50000000", "--seed=1000001")


def killed_saves(run: Run) -> None:
    """Another seed than that of `make test`, and five times as many saves that are killed."""
    run.command(*setup("build:dev"))
    run.check("build/dev/tests/checkpoint_kill_test", "--points=1000", "--seed=1000001")


def sanitized(preset: str, label: str | None) -> Callable[[Run], None]:
    def run_sanitized(run: Run) -> None:
        prefix = without_address_randomisation()
        # The build runs the tests' own listing, so it needs the prefix as much as they do.
        run.command(*prefix, *setup(f"build:{preset}"))
        run.ctest(preset, label, prefix)

    return run_sanitized


def isolated_install(run: Run) -> None:
    """`pip install .` as a stranger types it: an empty virtual environment, pip's own isolated build."""
    folder = ROOT / "build" / "isolated-venv"
    run.command(sys.executable, "-m", "venv", "--clear", str(folder))
    run.command(str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", ".")
    run.check(str(folder / "bin" / "paramwire"), "--version")


def fuzz(seconds: int) -> Callable[[Run], None]:
    def run_fuzz(run: Run) -> None:
        prefix = without_address_randomisation()
        run.command(*setup("build:fuzz"))
        run.counted(*prefix, PYTHON, "tools/run_fuzz.py", f"--seconds={seconds}", f"--junit={run.junit}")

    return run_fuzz


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    minutes: float
    run: Callable[[Run], None]
    about: str
    needs: tuple[str, ...] = ()  # suites that must have passed, when they are part of the run
    exists: str = "."  # the folder that holds its tests: a suite whose folder no commit has made yet is left out
    soak: bool = False

    @property
    def stop_after_s(self) -> float:
        """For hangs only. A cold compiler cache makes a build some ten times slower than its budget."""
        return 60 * max(10.0, 10 * self.minutes if self.name in ("build", "asan", "tsan", "fuzz") else 4 * self.minutes)


SUITES = (
    Suite("lint", 2, lint, "ruff, mypy --strict, tidy"),
    Suite("build", 3, lambda run: run.check(*setup("build:dev")), "C++ tree, preset dev, warnings are errors"),
    Suite("unit", 2, lambda run: run.ctest("dev", "unit"), "C++ unit tests", ("build",), "tests/cpp"),
    Suite("conformance", 1, lambda run: run.ctest("dev", "conformance"), "one suite for every implementation of a seam",
          ("build",), "tests/conformance"),
    Suite("sim", 1, lambda run: run.ctest("dev", "sim"), "simulated clusters from seeds", ("build",), "tests/sim"),
    Suite("install", 1, lambda run: run.ctest("dev", "install"), "an example outside the tree", ("build",)),
    Suite("package", 3, lambda run: run.check(*setup("install")), "paramwire built by pip into .venv"),
    Suite("python", 6, lambda run: run.pytest("tests/python", "tests/gpu", "-m", "not guest"), "Python tests",
          ("package",)),
    Suite("softroce", 7, softroce, "RDMA over soft-RoCE, in a guest", ("build", "package"), "tests/softroce"),
    Suite("fuzz", 3, fuzz(2), "what a fuzzer makes, for every decoder and machine", exists="tests/fuzz"),
    Suite("wheel", 1, wheel, "the self-contained wheel in a clean virtual environment", ("package",)),
    # Two more builds of the whole tree, 8 minutes each on two cores with a cold compiler cache: not for every change.
    Suite("asan", 2, sanitized("asan", "sanitize"), "tests labelled sanitize, addresses and undefined", soak=True),
    Suite("tsan", 2, sanitized("tsan", "sanitize"), "tests labelled sanitize, data races", soak=True),
    Suite("asan-all", 20, sanitized("asan", None), "every C++ test, address and undefined behaviour", soak=True),
    Suite("tsan-all", 20, sanitized("tsan", None), "every C++ test, data races", soak=True),
    Suite("fuzz-soak", 25, fuzz(120), "the same, two minutes each", exists="tests/fuzz", soak=True),
    Suite("faults-soak", 12, long_faults, "fault tests at full size and length", ("package",), soak=True),
    Suite("torn-soak", 8, long_torn_reads, "one-sided reads under a writer, lines in any order", exists="tests/torn",
          soak=True),
    Suite("kill-soak", 3, killed_saves, "checkpoints whose saves are killed", exists="tests/crash", soak=True),
    Suite("isolated", 5, isolated_install, "pip install . in a clean virtual environment", soak=True),
)


@dataclasses.dataclass
class Outcome:
    suite: Suite
    counts: Counts
    used_s: float
    failure: str | None = None
    notes: Sequence[str] = ()

    @property
    def over_budget(self) -> bool:
        return self.used_s > 60 * self.suite.minutes


def run_suite(suite: Suite, failed: set[str]) -> Outcome:
    start = time.monotonic()
    run = Run(suite.name, suite.stop_after_s)
    failure = None
    broken = [name for name in suite.needs if name in failed]
    try:
        if broken:
            raise SuiteFailed(f"not run: needs {', '.join(broken)}, which failed")
        suite.run(run)
    except SuiteFailed as error:
        failure = str(error)
        # A failure that no test counted (a build, a linter, a crash of the runner) counts as one.
        run.counts.failed = max(run.counts.failed, 1)
        if not broken:
            tail = run.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            print("\n".join(f"  | {line}" for line in tail))
    return Outcome(suite, run.counts, time.monotonic() - start, failure, run.notes)


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{'suite':<12} {'result':<7} {'passed':>6} {'failed':>6} {'skipped':>7} {'used min':>9} {'budget':>6}"]
    for outcome in outcomes:
        counts = outcome.counts
        lines.append(
            f"{outcome.suite.name:<12} {'FAILED' if outcome.failure else 'ok':<7} "
            f"{counts.passed:>6} {counts.failed:>6} {counts.skipped:>7} "
            f"{outcome.used_s / 60:>9.2f} {outcome.suite.minutes:>6g}{'  OVER BUDGET' if outcome.over_budget else ''}"
        )
    used, budget = sum(o.used_s for o in outcomes) / 60, sum(o.suite.minutes for o in outcomes)
    lines.append(f"{'all':<12} {'':<7} {'':>6} {'':>6} {'':>7} {used:>9.2f} {budget:>6g}")
    lines += [f"{outcome.suite.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    over = [outcome.suite.name for outcome in outcomes if outcome.over_budget]
    if over:
        lines.append(f"OVER BUDGET: {', '.join(over)}: make it quicker, or move what is long to `make soak`")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The last line; its two numbers agree with the exit status."""
    return f"{sum(o.counts.passed for o in outcomes)} passed, {sum(o.counts.failed for o in outcomes)} failed"


def choose(names: Sequence[str], soak: bool) -> list[Suite]:
    """The suites of a run, in the order of SUITES: those named, and what they need."""
    known = {suite.name: suite for suite in SUITES if (ROOT / suite.exists).is_dir()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no suite is called {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = set(names) | {need for name in names for need in known[name].needs}
    return [suite for suite in known.values() if (suite.name in wanted if names else soak or not suite.soak)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", action="store_true", help="the long suites too")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(suite.name for suite in SUITES))
    options = parser.parse_args()

    outcomes: list[Outcome] = []
    failed: set[str] = set()
    for suite in choose(options.suites, options.soak):
        print(f"== {suite.name}: {suite.about} (budget {suite.minutes:g} min)", flush=True)
        outcome = run_suite(suite, failed)
        outcomes.append(outcome)
        if outcome.failure:
            failed.add(suite.name)
        result = f"FAILED: {outcome.failure}" if outcome.failure else f"ok, {outcome.counts.passed} passed"
        print(f"   {result} ({outcome.used_s:.1f} s)", flush=True)
        for note in outcome.notes:
            print(f"   {note}", flush=True)
    print()
    print(table(outcomes))
    print(summary(outcomes))
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
