"""What comes out of the guest: streams with an end mark, and the last lines of a console."""

from __future__ import annotations

from collections import deque


class MarkedStream:
    """Bytes up to a mark. The port of a guest has no end of its own that its bytes would be ordered with."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.ended = False
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now: all but what could be the beginning of the mark, nothing after the mark."""
        if self.ended:
            return b""
        data = self._held + data
        at = data.find(self.mark)
        if at >= 0:
            self.ended = True
            self._held = b""
            return data[:at]
        keep = next((n for n in range(min(len(self.mark) - 1, len(data)), 0, -1) if self.mark.startswith(data[-n:])), 0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What was held back, when no more comes."""
        held, self._held = self._held, b""
        return held


class Lines:
    """Whole lines of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._part = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._part = (self._part + data).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in whole]

    def rest(self) -> list[str]:
        part, self._part = self._part, b""
        return [part.decode(errors="replace")] if part else []


class Tail:
    """The last lines of a console."""

    def __init__(self, count: int) -> None:
        self._lines: deque[str] = deque(maxlen=count)

    def add(self, lines: list[str]) -> None:
        self._lines.extend(line for line in lines if line.strip())

    def text(self) -> str:
        return "\n".join(f"  | {line}" for line in self._lines)
