"""Runs the fuzz targets of build/fuzz, each for a while from its corpus, and the canary, which must be caught.

usage: run_fuzz.py [--seconds S] [--junit FILE] [--update] [TARGET...]
       --update: afterwards, the corpora hold the smallest set of inputs that reaches what was reached

A corpus is tests/fuzz/corpus/TARGET.hex, one input a line. A target that fails leaves its input in build/fuzz-found/.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "build" / "fuzz" / "tests" / "fuzz"
CORPORA = ROOT / "tests" / "fuzz" / "corpus"
FOUND = ROOT / "build" / "fuzz-found"
CANARY = "canary"
# Of one input, in seconds: far above what the largest takes, so that only something endless gets there.
INPUT_SECONDS = 20
MEMORY_MIB = 2048
# The canary's bug is four known bytes deep.
CANARY_SECONDS = 60


@dataclass
class Outcome:
    target: str
    seconds: float
    runs: int
    failure: str  # empty: none


def targets() -> list[str]:
    return sorted(path.name.removeprefix("fuzz_") for path in PROGRAMS.glob("fuzz_*") if os.access(path, os.X_OK))


def unpack(target: str, folder: Path) -> None:
    file = CORPORA / f"{target}.hex"
    for number, line in enumerate(file.read_text().split() if file.exists() else []):
        (folder / f"{number:05}").write_bytes(b"" if line == "-" else bytes.fromhex(line))


def pack(target: str, folder: Path) -> None:
    inputs = sorted({path.read_bytes() for path in folder.iterdir()}, key=lambda data: (len(data), data))
    CORPORA.mkdir(exist_ok=True)
    (CORPORA / f"{target}.hex").write_text("".join((data.hex() or "-") + "\n" for data in inputs))


def fuzz(target: str, seconds: int, update: bool) -> Outcome:
    begin = time.monotonic()
    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder, merged = Path(name) / "corpus", Path(name) / "merged"
        folder.mkdir()
        merged.mkdir()
        unpack(target, folder)
        if target != CANARY and not any(folder.iterdir()) and not update:
            return Outcome(target, 0.0, 0, f"no corpus: {CORPORA / target}.hex")
        common = [f"-timeout={INPUT_SECONDS}", f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={FOUND}/{target}-"]
        words = [str(PROGRAMS / f"fuzz_{target}"), *common, "-print_final_stats=1", "-use_value_profile=1"]
        limit = CANARY_SECONDS if target == CANARY else seconds
        done = subprocess.run(
            [*words, f"-max_total_time={limit}", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit + 120,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        counted = re.search(r"number_of_executed_units:\s*(\d+)", output)
        runs = int(counted[1]) if counted else 0
        if target == CANARY:
            caught = done.returncode != 0 and "heap-buffer-overflow" in output
            failure = "" if caught else f"the bug of the canary was not found in {limit} s\n{output[-2000:]}"
        else:
            failure = "" if done.returncode == 0 and runs > 0 else f"status {done.returncode}\n{output[-6000:]}"
        if update and not failure and target != CANARY:
            subprocess.run([words[0], *common, "-merge=1", str(merged), str(folder)], check=True, capture_output=True)
            pack(target, merged)
    return Outcome(target, time.monotonic() - begin, runs, failure)


def write_junit(path: str, outcomes: list[Outcome]) -> None:
    suite = ElementTree.Element("testsuite", name="fuzz", tests=str(len(outcomes)))
    for outcome in outcomes:
        case = ElementTree.SubElement(suite, "testcase", name=outcome.target, time=f"{outcome.seconds:.1f}")
        if outcome.failure:
            ElementTree.SubElement(case, "failure").text = outcome.failure
    ElementTree.ElementTree(suite).write(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=3, help="for each target (default 3)")
    parser.add_argument("--junit", metavar="FILE")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    known = targets()
    wanted = options.targets or known
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"no program for {', '.join(unknown)} in {PROGRAMS}: build them with the preset fuzz")
    if not wanted:
        parser.error(f"no fuzz target in {PROGRAMS}: build them with the preset fuzz")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        outcomes = list(pool.map(lambda target: fuzz(target, options.seconds, options.update), wanted))
    for outcome in outcomes:
        word = "FAILED" if outcome.failure else "caught" if outcome.target == CANARY else "ok"
        print(f"{outcome.target:24} {word:7} {outcome.runs:10,} inputs in {outcome.seconds:5.1f} s")
    for outcome in outcomes:
        if outcome.failure:
            print(f"\n== {outcome.target}\n{outcome.failure}")
    if options.junit:
        write_junit(options.junit, outcomes)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
