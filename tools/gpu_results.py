"""Reads what the steps of `make gpu-check` left: counts of tests, figures, counters; judges figures by targets."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_plan import Target


class ResultError(Exception):
    """A step's file is not there or not what it should be, or it tells of something wrong: the step has failed."""


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ResultError(f"it left no {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ResultError(f"{path.name} is not JSON: {error}") from error


def counted(passed: int, failed: int, skipped: int) -> dict[str, Any]:
    if failed:
        raise ResultError(f"{failed} of {passed + failed} tests failed")
    if not passed:
        raise ResultError(f"no test passed, {skipped} were skipped")
    return {"passed": passed, "skipped": skipped}


def read_gtest(path: Path, _: str) -> dict[str, Any]:
    """GoogleTest's JSON report. No test at all is a failure: it would pass with all removed, or by a wrong filter."""
    content = _load(path)
    try:
        cases = [case for suite in content["testsuites"] for case in suite["testsuite"]]
        failed = sum(1 for case in cases if case.get("failures"))
        skipped = sum(1 for case in cases if case.get("result") == "SKIPPED" or case.get("status") == "NOTRUN")
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{path.name} is no report of GoogleTest: {error!r}") from error
    return counted(len(cases) - failed - skipped, failed, skipped)


def read_junit(path: Path, _: str) -> dict[str, Any]:
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise ResultError(f"{path.name} is no JUnit file: {error}") from error
    failed = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return counted(len(cases) - failed - skipped, failed, skipped)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What gpu_bench measured: in `unit`, and `ratio` to what `baseline` names, where there is one."""

    name: str
    value: float
    unit: str
    baseline: str
    ratio: float | None
    correct: bool


def figure_of(record: Any) -> Figure:
    """errors: ResultError naming the field"""
    if not isinstance(record, dict):
        raise ResultError(f"a figure is {record!r}, expected an object")
    wanted: dict[str, tuple[type, ...]] = {
        "name": (str,),
        "value": (int, float),
        "unit": (str,),
        "baseline": (str,),
        "ratio": (int, float, type(None)),
        "correct": (bool,),
    }
    for name, kinds in wanted.items():
        value = record.get(name, ...)
        right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            raise ResultError(f"figure {record.get('name')!r}: {name} is {value!r}")
    return Figure(**{name: record[name] for name in wanted})


def read_figures(path: Path, _: str) -> dict[str, Any]:
    """The figures of gpu_bench. One whose answer was wrong makes the step fail, whatever its speed."""
    content = _load(path)
    records = content.get("figures") if isinstance(content, dict) else None
    if not isinstance(records, list) or not records:
        raise ResultError(f"{path.name} has no figures")
    figures = [figure_of(record) for record in records]
    wrong = [figure.name for figure in figures if not figure.correct]
    if wrong:
        raise ResultError(f"wrong answers: {', '.join(wrong)}")
    return {"figures": [dataclasses.asdict(figure) for figure in figures]}


def read_records(_: Path, output: str) -> dict[str, Any]:
    """JSON lines of `paramwire bench generate`: tokens/s for each way that bytes came, and the ratio to local ones."""
    records = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ResultError(f"a record is not JSON: {error}") from error
    if not records:
        raise ResultError("it printed no record")
    figures = [
        Figure(
            "_".join(["python_generation", record.get("transport", "?"), *filter(None, [record.get("view_pages")])]),
            record.get("tokens_per_s", 0.0),
            "tokens/s",
            record.get("baseline", ""),
            record.get("ratio"),
            record.get("correct", False),
        )
        for record in records
    ]
    if not all(figure.correct for figure in figures):
        raise ResultError("remote and local weights did not make the same tokens")
    return {"figures": [dataclasses.asdict(figure) for figure in figures]}


def read_counters(_: Path, output: str) -> dict[str, Any]:
    """ncu's CSV, which stands behind what the program itself prints."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get("Metric Name")]
    if not rows:
        raise ResultError("ncu printed no counters")
    return {
        "counters": [
            {
                "kernel": row["Kernel Name"],
                "metric": row["Metric Name"],
                "unit": row["Metric Unit"],
                "value": row["Metric Value"],
            }
            for row in rows
        ]
    }


READERS: Mapping[str, Callable[[Path, str], dict[str, Any]]] = {
    "gtest": read_gtest,
    "junit": read_junit,
    "figures": read_figures,
    "records": read_records,
    "counters": read_counters,
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """A target beside what was measured; number None: it was not."""

    target: Target
    number: float | None
    met: bool


def judge(targets: Iterable[Target], figures: Sequence[Mapping[str, Any]]) -> list[Judged]:
    by_name = {figure["name"]: figure for figure in figures}
    out = []
    for target in targets:
        number = by_name.get(target.figure, {}).get(target.field)
        out.append(Judged(target, number, number is not None and target.holds(number)))
    return out
