"""Archives that Linux unpacks as its first file system (initramfs buffer format: cpio "newc", not compressed)."""

from __future__ import annotations

import stat

HEADER_FIELDS = 13  # of eight hexadecimal digits each, after the magic


class Archive:
    """Folders and files, all root's. Several archives one after the other, each with its end, are unpacked as one."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def folder(self, name: str, mode: int = 0o755) -> None:
        self._entry(name, stat.S_IFDIR | mode, b"")

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        self._entry(name, stat.S_IFREG | mode, data)

    def _entry(self, name: str, mode: int, data: bytes) -> None:
        self._count += 1
        encoded = name.encode() + b"\0"
        fields = [0] * HEADER_FIELDS
        fields[0], fields[1], fields[4] = self._count, mode, 1  # inode, mode, links
        fields[6], fields[11] = len(data), len(encoded)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._parts += [head, b"\0" * (-len(head) % 4), data, b"\0" * (-len(data) % 4)]

    def data(self) -> bytes:
        """With the end; nothing may be added after."""
        self._entry("TRAILER!!!", 0, b"")
        return b"".join(self._parts)
