"""What `make gpu-check` shows: the table of a run, and the list of what a run would do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_plan import TARGETS, Places, Step, filled


def shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def results_text(results: Mapping[str, Any]) -> str:
    if "passed" in results:
        return f"{results['passed']} tests" + (f", {results['skipped']} skipped" if results["skipped"] else "")
    if "figures" in results:
        return f"{len(results['figures'])} figures"
    return f"{len(results['counters'])} counters" if "counters" in results else ""


def columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def verdict(target: Mapping[str, Any]) -> str:
    return "met" if target["met"] else "NOT MEASURED" if target["number"] is None else "MISSED"


def table(content: Mapping[str, Any]) -> str:
    """Steps, figures and targets of what gpu-check.json holds."""
    steps = [
        (one["name"], one["status"], f"{one['seconds']:.1f}", one["reason"] or results_text(one["results"]))
        for one in content["steps"]
    ]
    figures = [
        (one["name"], shown(one["value"]), one["unit"], shown(one["ratio"]), one["baseline"])
        for one in content["figures"]
    ]
    targets = [
        (one["figure"], one["wanted"], shown(one["number"]), verdict(one), one["about"]) for one in content["targets"]
    ]
    parts = [
        (("step", "status", "s", ""), steps),
        (("figure", "value", "unit", "ratio", "to"), figures),
        (("target", "wanted", "measured", "", ""), targets),
    ]
    return "\n\n".join(columns([head, *rows]) for head, rows in parts if rows)


def dry_run(root: Path, steps: Sequence[Step], where: Places) -> str:
    """What would be run, as a shell takes it, with the limits of each step."""
    prefix = f"{root}/"
    lines = [
        "gpu-check would look at this machine (driver, device, nvcc, cmake, ninja, compiler, Python modules),",
        "compare gpu-bundle/ with its manifest, and then run:",
    ]
    for number, step in enumerate(steps, 1):
        limits = [f"at most {step.timeout_s:.0f} s"]
        if step.optional:
            needed = ", ".join(tool.removeprefix("module:") for tool in step.tools)
            limits.append(f"left out where there is no {needed}" if needed else "optional")
        about = step.about.format_map(where).replace(prefix, "")
        words = [word.replace(prefix, "").replace(str(root), ".") for word in filled(step.command, where)]
        lines += ["", f"{number:2}. {step.name}: {about} ({'; '.join(limits)})", f"    {shlex.join(words)}"]
    lines += ["", "targets:"] + [f"    {target.figure}: {target.text()}: {target.about}" for target in TARGETS]
    return "\n".join(lines)
