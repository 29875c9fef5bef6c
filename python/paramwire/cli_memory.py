"""How much memory this process touched at most: anonymous pages, and shared ones (views of a server's blocks)."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# Between two looks. A ring of a budget is full within the first step, so looks are for the split, not for short peaks,
# which the kernel's own mark catches.
LOOK_SECONDS = 0.004

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """Bytes, each at its own most."""

    anonymous: int  # sampled: heap, buffers, stacks
    shared: int  # sampled: pages of shared memory mapped and touched
    together: int  # sampled: both at the same time
    resident: int  # kernel's high-water mark, which misses nothing: those, and pages of files (code, libraries)
    exact: bool  # whether the mark could be reset; else it covers the process's whole life

    @property
    def method(self) -> str:
        mark = "reset through /proc/self/clear_refs" if self.exact else "of the whole life of the process"
        return f"anonymous and shared: /proc/self/status every {LOOK_SECONDS * 1000:g} ms; resident: VmHWM, {mark}"


class PeakMemory:
    """Watches between entering and `peak()`. source: proc_pid_status(5) and proc_pid_clear_refs(5): 5 resets VmHWM."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._anonymous = self._shared = self._together = 0
        self._exact = False

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")
            self._exact = True
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def peak(self) -> Peak:
        resident = self._look()
        return Peak(self._anonymous, self._shared, self._together, resident, self._exact)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> int:
        now = memory_now()
        anonymous, shared = now["RssAnon"], now["RssShmem"]
        self._anonymous = max(self._anonymous, anonymous)
        self._shared = max(self._shared, shared)
        self._together = max(self._together, anonymous + shared)
        return now["VmHWM"]


def memory_now(status: Path = STATUS) -> dict[str, int]:
    """Bytes of the memory lines of a status file, by name."""
    values = {}
    for line in status.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            values[name] = int(words[0]) * 1024
    return values
