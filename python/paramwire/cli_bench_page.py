"""The page of `paramwire bench report`: HTML with its plots inside, nothing loaded from anywhere."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paramwire
from paramwire.cli_bench_output import yes
from paramwire.cli_bench_plot import svg_text, told_apart
from paramwire.cli_common import CliError, in_bytes, in_micros, number, size_name

Record = dict[str, Any]
# Title of a column, and its cell.
Column = tuple[str, Callable[[Record], str]]


@dataclass(frozen=True)
class Failure:
    command: str
    reason: str


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1100px; margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { font-size: 1.25em; margin-top: 2.2em; }
.when, .note { color: #666; } .wrong { color: #b00020; font-weight: 600; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 0.8em 0; }
th, td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #999; font-weight: 600; vertical-align: bottom; } td { border-bottom: 1px solid #eee; }
th.left, td.left { text-align: left; } td.fold { white-space: normal; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: 0.7em 1em; overflow-x: auto; font-size: 12.5px; }
.glance { display: flex; flex-wrap: wrap; gap: 0.8em; padding: 0; list-style: none; }
.glance li { border: 1px solid #ddd; border-radius: 6px; padding: 0.5em 0.9em; min-width: 9em; }
.glance b { display: block; font-size: 1.25em; } .glance span { color: #666; font-size: 12.5px; display: block; }
"""


def text_of(name: str) -> Callable[[Record], str]:
    return lambda record: "" if record.get(name) is None else str(record[name]).replace("_", " ")


def micros(name: str) -> Callable[[Record], str]:
    return lambda record: "" if record.get(name) is None else in_micros(record[name])


def plain_number(name: str) -> Callable[[Record], str]:
    return lambda record: "" if record.get(name) is None else number(record[name])


def size(record: Record) -> str:
    return size_name(record["bytes"]) if record.get("bytes") else ""


def right(record: Record) -> str:
    if record["correct"] is None:
        return ""
    return yes(record["correct"] and record.get("baselines_correct", True))


def spread(record: Record) -> str:
    low, high = record.get("ratio_min"), record.get("ratio_max")
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def lost(record: Record) -> str:
    """Datagrams that plain UDP programs asked for again."""
    counts = [entry["lost_datagrams"] for entry in record.get("baselines", {}).values() if "lost_datagrams" in entry]
    return str(sum(counts)) if counts else ""


BASELINES: list[Column] = [
    ("baseline", text_of("baseline")),
    ("base p50", micros("baseline_p50_us")),
    ("base GB/s", plain_number("baseline_gb_per_s")),
]
# Bench: heading, what it is, columns.
BENCHES: dict[str, tuple[str, str, list[Column]]] = {
    "fetch": (
        "Fetches and views",
        "Verified reads of another process's blocks into the caller's memory. Cold moves on through more memory than "
        "the caches hold, warm stays at one block. The ratio is our speed over the baseline's in the same round, the "
        "median of the rounds; the spread is its least and greatest.",
        [
            ("what", text_of("bench")), ("over", text_of("transport")), ("memory", text_of("memory")), ("block", size),
            ("p50", micros("p50_us")), ("p99", micros("p99_us")), ("GB/s", plain_number("gb_per_s")), *BASELINES,
            ("ratio", plain_number("ratio")), ("spread", spread), ("CPU s/GB", plain_number("cpu_s_per_gb")),
            ("lost by base", lost), ("right", right),
        ],
    ),
    "latency": (
        "Latency",
        "Each fetch timed alone. The ratio is our p50 over the baseline's: below 1 is faster. Connecting and the first "
        "fetch are not among the calls that are counted.",
        [
            ("over", text_of("transport")), ("waits", text_of("wait")), ("memory", text_of("memory")), ("block", size),
            ("p50", micros("p50_us")), ("p90", micros("p90_us")), ("p99", micros("p99_us")),
            ("p99.9", micros("p99_9_us")), ("max", micros("max_us")), ("baseline", text_of("baseline")),
            ("base p50", micros("baseline_p50_us")),
            ("p50 ratio", plain_number("p50_ratio")), ("CPU us/call", plain_number("cpu_us_per_call")),
            ("connect", micros("connect_us")), ("first", micros("first_us")), ("right", right),
        ],
    ),
    "incast": (
        "Incast",
        "One client, a thread for each server, all at once; beside the same client and one of the servers. Fairness is "
        "Jain's index over the servers' shares: 1 is equal.",
        [
            ("over", text_of("transport")), ("block", size), ("servers", text_of("servers")),
            ("one, GB/s", plain_number("one_server_gb_per_s")), ("all, GB/s", plain_number("gb_per_s")),
            ("ratio", plain_number("ratio")), ("fairness", plain_number("fairness")),
            ("one, p99", micros("one_server_p99_us")), ("all, p50", micros("p50_us")), ("all, p99", micros("p99_us")),
            ("resent", text_of("resent")), ("resent ratio", plain_number("resent_ratio")),
            ("TCP resent (kernel)", text_of("kernel_tcp_segments_resent")),
            ("right", right),
        ],
    ),
    "mixed": (
        "Readers beside a publisher and bulk reads",
        "Small reads from leased snapshots. The ratios are over the same reads alone. Torn counts blocks that were "
        "accepted although they were mixed or of another version: it must be 0.",
        [
            ("over", text_of("transport")), ("block", size), ("phase", text_of("phase")), ("p50", micros("p50_us")),
            ("p99", micros("p99_us")), ("max", micros("max_us")), ("p50 ratio", plain_number("p50_ratio")),
            ("p99 ratio", plain_number("p99_ratio")), ("snapshot p50", micros("snapshot_p50_us")),
            ("versions/s", plain_number("publish_per_s")), ("bulk GB/s", plain_number("bulk_gb_per_s")),
            ("torn", lambda record: str(record["torn_accepted"] + record["wrong_version_accepted"])), ("right", right),
        ],
    ),
    "peer": (
        "Other systems, in the same run",
        "Each serves the same bytes on loopback. iperf3 and ucx_perftest do not show what they moved. Empty cells were "
        "not measured.",
        [
            ("peer", text_of("peer")), ("path", lambda r: r["path"] or f"absent: {r['reason']}"), ("block", size),
            ("p50", micros("p50_us")), ("p99", micros("p99_us")), ("GB/s", plain_number("gb_per_s")),
            ("CPU s/GB", plain_number("cpu_s_per_gb")), ("right", right),
        ],
    ),
}  # fmt: skip
# Views stand in the table of fetches.
SECTION_OF = {"fetch_read": "fetch", "first_view": "fetch", "view": "fetch"}
BENCHES |= {name: BENCHES[section] for name, section in SECTION_OF.items()}
TEXT_COLUMNS = {"what", "over", "memory", "waits", "baseline", "phase", "peer", "path"}


def page(records: Sequence[Record], failures: Sequence[Failure], here: dict[str, Any], when: str) -> str:
    escape = html.escape
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>paramwire bench</title>",
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style></head><body>",
        f"<h1>paramwire bench</h1><p class='when'>{escape(when)}</p>",
    ]
    shown = told_apart(records)
    for failure in failures:
        parts.append(f"<p class='wrong'>failed: {escape(failure.command)}<br>{escape(failure.reason)}</p>")
    if any(right(record) == "NO" for record in records):
        parts.append("<p class='wrong'>Some records have wrong bytes: look for NO below.</p>")
    parts.append("<ul class='glance'>" + "".join(glance(shown)) + "</ul>")
    parts.append(machine_section(records, here))
    for bench in ("fetch", "latency", "incast", "mixed", "peer"):
        mine = [record for record in shown if SECTION_OF.get(record["bench"], record["bench"]) == bench]
        if mine:
            parts.append(section(bench, mine))
    lines = "\n".join(json.dumps(record) for record in records)
    parts.append(
        f"<h2>Records</h2><details><summary>{len(records)} JSON lines</summary><pre>{escape(lines)}</pre></details>"
    )
    parts.append("</body></html>\n")
    return "".join(parts)


def glance(records: Sequence[Record]) -> list[str]:
    """The few figures that most readers look for."""
    cards = []

    def card(figure: str, about: str) -> None:
        cards.append(f"<li><b>{html.escape(figure)}</b><span>{html.escape(about)}</span></li>")

    for transport in dict.fromkeys(record["transport"] for record in records):
        mine = [record for record in records if record["transport"] == transport]
        fetches = [r for r in mine if r["bench"] == "fetch" and r["memory"] == "cold"]
        if fetches:
            r = max(fetches, key=lambda record: float(record["gb_per_s"]))
            card(
                f"{number(r['gb_per_s'])} GB/s",
                f"{transport}, {size(r)} cold, {number(r['ratio'])} times {r['baseline']}",
            )
        for wait in dict.fromkeys(r["wait"] for r in mine if r["bench"] == "latency"):
            r = min((r for r in mine if r.get("wait") == wait), key=lambda record: float(record["p50_us"]))
            about = f"{transport}, {wait.replace('_', '-')}, {size(r)} {r['memory']}, p50; p99 {in_micros(r['p99_us'])}"
            card(in_micros(r["p50_us"]), about)
        for r in [r for r in mine if r["bench"] == "incast"][-1:]:
            card(
                number(r["ratio"]),
                f"{transport}, {r['servers']} servers over one, {size(r)}; fairness {r['fairness']:.2f}",
            )
        mixed = [r for r in mine if r["bench"] == "mixed"]
        if mixed:
            torn = sum(r["torn_accepted"] + r["wrong_version_accepted"] for r in mixed)
            card(f"{torn} torn", f"{transport}, of {sum(r['calls'] for r in mixed):,} small reads beside a publisher")
    return cards


def machine_section(records: Sequence[Record], here: dict[str, Any]) -> str:
    """The machines of the records, what is there on this one, and the commands that made the records."""
    machines = [dict(pairs) for pairs in dict.fromkeys(tuple(r["machine"].items()) for r in records if "machine" in r)]
    rows = []
    for each in machines or [here]:
        for name, value in each.items():
            label = name.removesuffix("_bytes").replace("_", " ")
            rows.append((label, in_bytes(value) if name.endswith("_bytes") else str(value)))
    versions = (
        ", ".join(dict.fromkeys(str(r["paramwire"]) for r in records if "paramwire" in r)) or paramwire.__version__
    )
    rows.append(("paramwire", versions))
    rows.append(("Python", sys.version.split()[0]))
    loads = [r["load_1_minute"] for r in records if "load_1_minute" in r]
    if loads:
        rows.append(("load average", f"{min(loads):.1f} to {max(loads):.1f} while it measured"))
    for entry in paramwire.available()["transports"]:
        state = "usable" if entry["usable"] else "not usable"
        rows.append((f"transport {entry['name']}", f"{state}: {entry['reason']}"))
    cells = "".join(
        f"<tr><td class='left'>{html.escape(a)}</td><td class='left fold'>{html.escape(b)}</td></tr>" for a, b in rows
    )
    commands = "\n".join(dict.fromkeys(r["command"] for r in records if "command" in r))
    made = f"<h2>Made by</h2><pre>{html.escape(commands)}</pre>" if commands else ""
    return f"<h2>Machine</h2><table>{cells}</table>{made}"


def section(bench: str, records: Sequence[Record]) -> str:
    heading, about, columns = BENCHES[bench]
    plot = ""
    if bench != "peer":
        try:
            plot = svg_text(records)
        except CliError as error:
            plot = f"<p class='note'>No plot: {html.escape(str(error))}</p>"
    # A column that no record fills says nothing.
    used = [(title, cell) for title, cell in columns if any(cell(record) for record in records)]
    head = "".join(f"<th{left(title)}>{html.escape(title)}</th>" for title, _ in used)
    rows = "".join(
        "<tr>" + "".join(f"<td{left(title)}>{html.escape(cell(record))}</td>" for title, cell in used) + "</tr>"
        for record in records
    )
    body = f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f"<h2>{html.escape(heading)}</h2><p>{html.escape(about)}</p>{plot}{body}"


def left(title: str) -> str:
    return " class='left'" if title in TEXT_COLUMNS else ""
