"""What a process can tell of itself: traces for Perfetto, and counters and histograms for Prometheus."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from paramwire._core import Trace as _Trace

if TYPE_CHECKING:
    from paramwire._core import Client, Server

# Stats that can fall; all others only grow while the process lives.
_GAUGES = frozenset(
    {
        "blocks", "raw_bytes", "versions_readable", "leases", "publishes_open", "slots_in_use", "used_bytes",
        "committed_bytes", "limit_bytes", "superseded_slots", "quarantined_slots", "quarantined_bytes", "connections",
        "pin_tables", "fallbacks", "udp_sessions", "udp_receive_buffer_bytes", "udp_receive_buffer_asked_bytes",
        "udp_segment_bytes", "udp_window_bytes", "udp_round_trip_us", "verbs_devices", "verbs_queue_pairs",
        "verbs_regions", "verbs_region_bytes", "verbs_failed_status", "verbs_mtu_bytes", "verbs_slice_bytes",
        "verbs_reads_on_wire", "verbs_gid_index", "verbs_staging_bytes", "deltas_kept", "deltas_kept_bytes",
        "deltas_waiting", "decode_memory_bytes",
    }
)  # fmt: skip
# Upper ends of the buckets shown, in seconds: 1 us to 34 s by powers of two, whatever the histogram holds, because
# every scrape must name the same ones.
_BOUNDS = tuple(2.0**k * 1e-6 for k in range(26))


class Trace(_Trace):
    """Spans of the clients and servers that are given it, for https://ui.perfetto.dev or chrome://tracing.

        with pw.Trace("fetch.json") as trace, pw.connect(address, trace=trace) as client:
            ...

    Times are those of CLOCK_MONOTONIC: the files of several processes of one host fit together. Nothing is recorded by
    clients and servers that were given none.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, events: int = 1 << 18) -> None:
        """Room for `events` spans of 40 bytes each; more are counted and dropped.

        path:    written when the `with` block ends, whether well or not
        errors:  InvalidError for 0 events or more than 2**27; BackpressureError when there is no memory
        """
        super().__init__(events)
        self._path = Path(path) if path is not None else None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the spans so far as JSON. errors: OSError."""
        Path(path).write_text(self.json(), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._path is not None:
            self.write(self._path)


def prometheus_text(source: Server | Client, labels: Mapping[str, str] | None = None) -> str:
    """Counters and histograms of a server or client in Prometheus' text format 0.0.4.

    labels:  on every sample
    returns: names begin with paramwire_server_ or paramwire_client_; durations are in seconds
    """
    kind = "server" if hasattr(source, "publish") and hasattr(source, "endpoints") else "client"
    fixed = dict(labels or {})
    lines: list[str] = []

    def sample(name: str, value: float | int, **more: str) -> None:
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in (fixed | more).items())
        lines.append(f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}")

    stats: dict[str, Any] = {**source.stats()}
    for stat, value in stats.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        gauge = stat in _GAUGES
        name = f"paramwire_{kind}_{stat}" + ("" if gauge else "_total")
        lines.append(f"# TYPE {name} {'gauge' if gauge else 'counter'}")
        sample(name, value)
    ways: dict[str, dict[str, int]] = stats.get("by_transport", {})
    for stat in ("reads", "bytes", "wire_bytes") if ways else ():
        name = f"paramwire_{kind}_transport_{stat}_total"
        lines.append(f"# TYPE {name} counter")
        for transport, way in ways.items():
            sample(name, way[stat], transport=transport)
    for call, durations in source.durations().items():
        name = f"paramwire_{kind}_{call}_seconds"
        lines.append(f"# TYPE {name} histogram")
        for bound in _BOUNDS:
            sample(f"{name}_bucket", sum(n for upper, n in durations.buckets if upper <= bound), le=f"{bound:g}")
        sample(f"{name}_bucket", durations.count, le="+Inf")
        sample(f"{name}_sum", durations.sum)
        sample(f"{name}_count", durations.count)
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return re.sub(r'[\\"\n]', lambda found: {"\\": r"\\", '"': r"\"", "\n": r"\n"}[found[0]], text)
