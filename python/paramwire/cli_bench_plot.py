"""Plots of benchmark records, for --plot and for the page of `paramwire bench report`. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paramwire.cli_common import CliError, number, size_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]

# One hue for each transport, the same in every plot; from Okabe and Ito's palette, which colour-blind readers can tell
# apart. Baselines are grey.
COLOURS = {"shm": "#0072B2", "udp": "#D55E00", "tcp": "#009E73", "verbs": "#CC79A7", "auto": "#E69F00"}
COLOURS |= {"udp, key": "#F0A070", "tcp, key": "#70C8A8"}  # their transport's, lighter
GREY = "#777777"
GREYS = ("#555555", "#999999", "#bbbbbb")
DPI = 130


def told_apart(records: Sequence[Record]) -> list[Record]:
    """With a key counts as a transport of its own."""
    return [r | {"transport": f"{r['transport']}, key"} if r.get("key") else r for r in records]


def need_matplotlib() -> None:
    """errors: CliError that says how to get it"""
    if importlib.util.find_spec("matplotlib") is None:
        raise CliError("plots need matplotlib, which is not installed: pip install 'paramwire[bench]'")


def write_png(records: Sequence[Record], path: str) -> None:
    figure = draw(records)
    try:
        figure.savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise CliError(f"{path} can't be written: {error.strerror}") from None


def svg_text(records: Sequence[Record]) -> str:
    """One <svg> element, to stand inside a page."""
    file = io.StringIO()
    draw(records).savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def draw(records: Sequence[Record]) -> Figure:
    """The plot of records of one benchmark."""
    need_matplotlib()
    from matplotlib.figure import Figure

    records = told_apart(records)
    bench = records[0]["bench"] if records else "nothing"
    drawers: dict[str, Callable[[Figure, Sequence[Record]], None]] = {
        "latency": draw_latency,
        "incast": draw_incast,
        "mixed": draw_mixed,
    }
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    drawers.get(bench, draw_fetch)(figure, records)
    return figure


def colour(record: Record) -> str:
    return COLOURS.get(record["transport"], GREY)


def size_axis(axes: Axes, records: Sequence[Record]) -> None:
    sizes = sorted({record["bytes"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("block size")
    axes.grid(True, which="major", color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def of(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """Those whose fields have these values, by size."""
    found = [record for record in records if all(record.get(name) == value for name, value in wanted.items())]
    return sorted(found, key=lambda record: int(record["bytes"]))


def draw_fetch(figure: Figure, records: Sequence[Record]) -> None:
    """Rates of verified fetches over size, cold, with each baseline; and their ratio to the best baseline."""
    rates, ratios = figure.subplots(1, 2)
    shown = [r for r in records if r["bench"] == "fetch" and r["gb_per_s"] is not None]
    fetches = [r for r in shown if r["memory"] == "cold"] or shown
    for transport in dict.fromkeys(r["transport"] for r in fetches):
        mine = of(fetches, transport=transport)
        sizes = [r["bytes"] for r in mine]
        rates.plot(sizes, [r["gb_per_s"] for r in mine], "o-", color=colour(mine[0]), label=f"{transport}, verified")
        ratios.plot(sizes, [r["ratio"] for r in mine], "o-", color=colour(mine[0]), label=transport)
        low, high = [r["ratio_min"] for r in mine], [r["ratio_max"] for r in mine]
        ratios.fill_between(sizes, low, high, color=colour(mine[0]), alpha=0.15, linewidth=0)
    names = list(dict.fromkeys(name for r in fetches for name in r["baselines"]))
    for at, name in enumerate(names):
        # A baseline measured beside two transports has two figures of a size: the better one is drawn.
        points: dict[int, float] = {}
        for r in fetches:
            if name in r["baselines"]:
                points[r["bytes"]] = max(points.get(r["bytes"], 0.0), r["baselines"][name]["gb_per_s"])
        line = "--" if at % 2 == 0 else ":"
        pairs = sorted(points.items())
        rates.plot(
            [x for x, _ in pairs], [y for _, y in pairs], line, color=GREYS[at % len(GREYS)], marker=".", label=name
        )
    rates.set_yscale("log")
    rates.set_ylabel("GB/s (1e9 bytes)")
    ratios.axhline(1, color=GREY, linewidth=1)
    ratios.set_ylim(bottom=0)
    ratios.set_ylabel("ratio to the best baseline of the same run")
    for axes, title in ((rates, "Fetch rate"), (ratios, "Speed over baseline; band: least and most of a round")):
        size_axis(axes, fetches)
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(fontsize=8, frameon=False)


def draw_latency(figure: Figure, records: Sequence[Record]) -> None:
    """Percentiles over size, and the tail of the smallest size."""
    sizes_axes, tail = figure.subplots(1, 2)
    colds = of(records, memory="cold") or list(records)
    smallest = min(r["bytes"] for r in colds)
    drawn: list[tuple[str, str]] = []
    for transport, wait in dict.fromkeys((r["transport"], r["wait"]) for r in colds):
        mine = of(colds, transport=transport, wait=wait)
        line = "-" if wait == "blocking" else "--"
        name = transport if wait == "blocking" else f"{transport}, busy-poll"
        sizes = [r["bytes"] for r in mine]
        sizes_axes.plot(sizes, [r["p50_us"] for r in mine], "o" + line, color=colour(mine[0]), label=f"{name}, p50",
                        fillstyle="full" if wait == "blocking" else "none")  # fmt: skip
        sizes_axes.plot(sizes, [r["p99_us"] for r in mine], "^" + line, color=colour(mine[0]), alpha=0.45,
                        label=f"{name}, p99")  # fmt: skip
        base = [r["baseline_p50_us"] for r in mine]
        if (mine[0]["baseline"], wait) not in drawn:
            drawn.append((mine[0]["baseline"], wait))
            style = ("--", ":", "-.")[len(drawn) % 3]
            sizes_axes.plot(sizes, base, style, color=GREY, marker=".", label=f"{mine[0]['baseline']}, p50")
        left, times = 1.0, []
        for record in of(mine, bytes=smallest):
            total = sum(calls for _, calls in record["histogram_us_calls"])
            for bound, calls in record["histogram_us_calls"]:
                left -= calls / total
                times.append((bound, max(left, 0.1 / total)))
        tail.step([x for x, _ in times], [y for _, y in times], line, where="post", color=colour(mine[0]), label=name)
    sizes_axes.set_yscale("log")
    sizes_axes.set_ylabel("microseconds")
    size_axis(sizes_axes, colds)
    sizes_axes.set_title("One fetch, cold", fontsize=10, loc="left")
    tail.set(xscale="log", yscale="log", xlabel="microseconds", ylabel="part of calls that took longer")
    tail.grid(True, which="major", color="#e5e5e5", linewidth=0.8)
    tail.spines[["top", "right"]].set_visible(False)
    tail.set_title(f"Tail at {size_name(smallest)}", fontsize=10, loc="left")
    for axes in (sizes_axes, tail):
        axes.legend(fontsize=8, frameon=False)


def bars(
    axes: Axes, names: Sequence[str], series: Sequence[tuple[str, Sequence[float | None], Sequence[str] | str]]
) -> None:
    """Groups of bars; a value of None leaves its place empty."""
    width = 0.8 / len(series)
    for at, (label, values, colours) in enumerate(series):
        places = [index + (at - (len(series) - 1) / 2) * width for index in range(len(names))]
        drawn = axes.bar(
            places, [0 if value is None else value for value in values], width * 0.92, color=colours, label=label
        )
        axes.bar_label(drawn, ["" if value is None else number(value) for value in values], fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0, fontsize=8)
    axes.grid(True, axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_incast(figure: Figure, records: Sequence[Record]) -> None:
    """One server's rate beside that of all together; and each server's share."""
    rates, shares = figure.subplots(1, 2)
    names = [f"{r['transport']}\n{size_name(r['bytes'])}" for r in records]
    servers = records[0]["servers"]
    bars(rates, names, [
        ("one server", [r["one_server_gb_per_s"] for r in records], "#bbbbbb"),
        (f"{servers} servers together", [r["gb_per_s"] for r in records], [colour(r) for r in records]),
    ])  # fmt: skip
    rates.set_ylabel("GB/s (1e9 bytes)")
    rates.set_title("Incast: one client", fontsize=10, loc="left")
    rates.legend(fontsize=8, frameon=False)
    for index, record in enumerate(records):
        parts = record["servers_gb_per_s"]
        shares.plot([index] * len(parts), parts, "o", color=colour(record), alpha=0.6)
    shares.set_xticks(range(len(names)), names, fontsize=8)
    shares.set_xlim(-0.6, len(names) - 0.4)
    shares.set_ylim(bottom=0)
    shares.set_ylabel("GB/s of each server")
    shares.set_title(
        "Shares; Jain's index: " + ", ".join(f"{r['fairness']:.3f}" for r in records), fontsize=10, loc="left"
    )
    shares.grid(True, axis="y", color="#e5e5e5", linewidth=0.8)
    shares.spines[["top", "right"]].set_visible(False)


def draw_mixed(figure: Figure, records: Sequence[Record]) -> None:
    """Reads of small blocks with and without a writer, with and without bulk reads beside."""
    figure_axes = figure.subplots(1, 2)
    phases = list(dict.fromkeys(r["phase"] for r in records))
    names = list(dict.fromkeys(f"{r['transport']}, {size_name(r['bytes'])}" for r in records))
    tints = ("#bbbbbb", "#D55E00", "#56B4E9", "#0072B2")
    for axes, name, title in (
        (figure_axes[0], "p50_us", "Small reads, p50"),
        (figure_axes[1], "p99_us", "Small reads, p99"),
    ):
        series = []
        for at, phase in enumerate(phases):
            found = {f"{r['transport']}, {size_name(r['bytes'])}": r[name] for r in records if r["phase"] == phase}
            series.append((phase, [found.get(key) for key in names], tints[at % len(tints)]))
        bars(axes, names, series)
        axes.set_yscale("log")  # transports are powers of ten apart
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("microseconds")
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(fontsize=8, frameon=False)
