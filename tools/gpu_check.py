"""Builds paramwire on a machine with a GPU, offline, tests it there, measures it, and says what it found.

usage: gpu_check.py [--dry-run] [--simulated] [--only STEP,...] [--skip STEP,...]

Writes gpu-check.json after every step, and prints one table at the end. Exit status: 0 all is as it should be, and
every target is met; 1 a step failed or a target was missed; 2 wrong usage; 3 the machine lacks something, which is
named, and nothing was run. `docs/gpu-check.md` is the manual.

Standard library only: it runs before anything is built.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_bundle
import gpu_machine
from gpu_plan import TARGETS, Places, Step, environment, filled, places, plan
from gpu_results import READERS, ResultError, judge
from gpu_show import dry_run, results_text, table

ROOT = Path(__file__).resolve().parent.parent
# Of the whole run. Past it, optional steps are left out; those that are not go on, each within its own time.
RUN_SECONDS = 600.0
# Lines of a failed step's output that are shown.
SHOWN_LINES = 40
FAILED, USAGE, UNAVAILABLE = 1, 2, 3


@dataclasses.dataclass
class Outcome:
    name: str
    status: str  # "ok", "failed", "skipped" (a tool is missing, the time is over, or the machine forbids it), "not run"
    seconds: float = 0.0
    reason: str = ""
    results: dict[str, Any] = dataclasses.field(default_factory=dict)


def execute(
    words: Sequence[str], timeout_s: float, environment: Mapping[str, str], log: Path
) -> tuple[int | None, str]:
    """Runs a command with its output in `log`. returns: exit status, and the output

    status: None when it was stopped for its time, with everything that it started
    """
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{words[0]}: {error.strerror}\n".encode())
            return 127, f"{words[0]}: {error.strerror}"
        try:
            status: int | None = process.wait(timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
    return status, log.read_text("utf-8", "replace")


def ended(status: int | None, timeout_s: float) -> str:
    """How a command ended that did not end well; "" for one that did."""
    if status is None:
        return f"stopped after {timeout_s:.0f} s"
    return "" if status == 0 else f"status {status}" if status > 0 else f"signal {-status}"


class Run:
    """Runs steps one after another, and keeps what they left."""

    def __init__(
        self, machine: gpu_machine.Machine, where: Places, out: Path, *, simulated: bool, run_seconds: float
    ) -> None:
        self.machine = machine
        self.where = where
        self.out = out
        self.simulated = simulated
        self.run_seconds = run_seconds
        self.outcomes: list[Outcome] = []
        self.begin = time.monotonic()
        libraries = machine.environment.get("LD_LIBRARY_PATH", "")
        self.environment = environment(where, simulated, os.environ, libraries)

    def why_not(self, step: Step, in_run: set[str]) -> tuple[str, str] | None:
        """Status and reason of a step that is not to be run."""
        status = {outcome.name: outcome.status for outcome in self.outcomes}
        broken = [need for need in step.needs if need in in_run and status.get(need) != "ok"]
        if broken:
            return "not run", f"needs {', '.join(broken)}"
        lacking = [tool.removeprefix("module:") for tool in step.tools if tool in self.machine.without]
        if lacking:
            return ("skipped" if step.optional else "failed"), f"no {', '.join(lacking)}"
        if step.optional and time.monotonic() - self.begin > self.run_seconds:
            return "skipped", f"the run's {self.run_seconds:.0f} s are over"
        return None

    def step(self, step: Step, in_run: set[str]) -> Outcome:
        outcome = Outcome(step.name, "ok")
        self.outcomes.append(outcome)
        no = self.why_not(step, in_run - {step.name})
        if no:
            outcome.status, outcome.reason = no
            return outcome
        begin = time.monotonic()
        log = self.out / f"{step.name.replace(' ', '-')}.log"
        result = Path(step.result.format_map(self.where)) if step.result else log
        if step.result:
            result.unlink(missing_ok=True)  # what an earlier run left is not this one's
        status, output = execute(filled(step.command, self.where), step.timeout_s, self.environment, log)
        outcome.seconds = time.monotonic() - begin
        forbidden = [text for text in step.tolerate if text in output]
        if forbidden:
            outcome.status, outcome.reason = "skipped", f"the machine says {forbidden[0]}"
            return outcome
        told = ended(status, step.timeout_s)
        try:
            # Of a program that failed, its file may say what.
            if step.reads and (status == 0 or (step.result and result.exists())):
                outcome.results = READERS[step.reads](result, output)
        except ResultError as error:
            told = f"{error} ({told})" if told else str(error)
        if told:
            outcome.status, outcome.reason = "failed", told
            print("\n".join(f"  | {line}" for line in output.splitlines()[-SHOWN_LINES:]), flush=True)
        return outcome

    def report(self) -> dict[str, Any]:
        """What gpu-check.json holds."""
        figures = [figure for outcome in self.outcomes for figure in outcome.results.get("figures", [])]
        judged = [] if self.simulated else judge(TARGETS, figures)
        return {
            "simulated": self.simulated,
            "machine": self.machine.facts,
            "missing": [dataclasses.asdict(one) for one in self.machine.missing],
            "steps": [dataclasses.asdict(outcome) for outcome in self.outcomes],
            "figures": figures,
            "targets": [
                {
                    "figure": one.target.figure,
                    "wanted": one.target.text(),
                    "about": one.target.about,
                    "number": one.number,
                    "met": one.met,
                }
                for one in judged
            ],
            "seconds": time.monotonic() - self.begin,
        }

    def write(self) -> dict[str, Any]:
        """The file appears whole, after every step: a run that is stopped has told what it found until then."""
        content = self.report()
        fresh = self.out / "gpu-check.json.new"
        fresh.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        os.replace(fresh, self.out / "gpu-check.json")
        return content


def bundle_problem(folder: Path) -> gpu_machine.Missing | None:
    """No bundle is no problem by itself: the machine may have the packages; CMake names what it cannot find."""
    if not folder.exists():
        return gpu_machine.Missing(
            "gpu-bundle/, so the build takes what the machine has", "make gpu-bundle, where the network is", False
        )
    try:
        changed = gpu_bundle.differences(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last ones: JSON of another shape
        return gpu_machine.Missing(f"a whole gpu-bundle/: {error}", "make gpu-bundle again, where the network is", True)
    if changed:
        return gpu_machine.Missing(
            f"a whole gpu-bundle/: {len(changed)} files differ, {changed[0]} is the first",
            "make gpu-bundle again",
            True,
        )
    return None


def names(text: str) -> list[str]:
    out = [name.strip() for name in text.split(",") if name.strip()]
    if not out:
        raise argparse.ArgumentTypeError("names no step")
    return out


def at_least(least: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not (value >= least and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least} up")
        return value

    return number


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Step]:
    steps = plan(options.simulated)
    known = [step.name for step in steps]
    unknown = [name for name in options.only + options.skip if name not in known]
    if unknown:
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [step for step in steps if (not options.only or step.name in options.only) and step.name not in options.skip]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the steps, and run nothing")
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="no GPU, no build: the twins' programs of build/dev, small; shows that this program works, no speed",
    )
    parser.add_argument(
        "--only", type=names, default=[], metavar="STEP,...", help="these steps alone: what they need must be there"
    )
    parser.add_argument("--skip", type=names, default=[], metavar="STEP,...", help="all but these")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of gpu-check.json and of the steps' logs (default build/gpu)"
    )
    parser.add_argument("--programs", type=Path, metavar="DIR", help="take the programs from here, not from the build")
    parser.add_argument(
        "--seconds",
        type=at_least(0, float),
        default=RUN_SECONDS,
        metavar="S",
        help="past these, optional steps are left out (default 600)",
    )
    parser.add_argument(
        "--jobs",
        type=at_least(1, int),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="of the build (default: all cores)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    steps = chosen(parser, options)
    out = (options.out or ROOT / "build" / ("gpu-simulated" if options.simulated else "gpu")).resolve()
    where = places(
        ROOT, out, sys.executable, options.jobs, options.simulated, options.programs and options.programs.resolve()
    )
    if options.dry_run:
        print(dry_run(ROOT, steps, where))
        return 0

    machine = gpu_machine.look(options.simulated)
    problem = None if options.simulated else bundle_problem(ROOT / "gpu-bundle")
    if problem:
        machine.missing.append(problem)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}")
    run = Run(machine, where, out, simulated=options.simulated, run_seconds=options.seconds)
    for name, value in machine.facts.items():
        print(f"  {name:<18} {value}")
    for one in machine.missing:
        kind = "UnavailableError" if one.required else "missing, and gone on without"
        print(f"gpu-check: {kind}: {one.what}; next: {one.next}", file=sys.stderr if one.required else sys.stdout)
    content = run.write()
    if machine.lacks:
        print(
            f"gpu-check: nothing was run: {len(machine.lacks)} of the things that it needs are missing here",
            file=sys.stderr,
        )
        return UNAVAILABLE
    in_run = {step.name for step in steps}
    for step in steps:
        print(f"== {step.name}: {step.about.format_map(where)}", flush=True)
        outcome = run.step(step, in_run)
        content = run.write()
        told = outcome.reason or results_text(outcome.results)
        print(f"   {outcome.status}{': ' + told if told else ''} ({outcome.seconds:.1f} s)", flush=True)
    print(f"\n{table(content)}\n\n{out.name}/gpu-check.json has it all, and {out.name}/ the steps' logs")
    wrong = [outcome.name for outcome in run.outcomes if outcome.status in ("failed", "not run")]
    wrong += [
        f"target {one['figure']} {one['wanted']}" for one in content["targets"] if not one["met"] and not options.only
    ]
    if wrong:
        print(f"gpu-check: not as it should be: {', '.join(wrong)}", file=sys.stderr)
    return FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
