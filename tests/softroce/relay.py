"""A TCP relay in front of a server without a key, which can change what the server tells of its registered memory.

Source of the layouts: cpp/paramwire/wire/FORMAT.md, "Frame" and VERBS_REGION_LIST.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Callable

import paramwire as pw

HEADER_BYTES = 40
VERBS_REGION_LIST = 73
REGION = struct.Struct("<HQIQI")


@dataclasses.dataclass(frozen=True)
class Region:
    arena: int
    offset: int
    size: int
    address: int
    key: int


class Relay:
    """Threads of its own; `with` ends them and every connection."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.server = (host, int(port))
        self.change: Callable[[list[Region]], list[Region]] | None = None  # to other regions, as many
        self.told: list[Region] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.listener, *self.sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for each in (self.listener, *self.sockets):
            each.close()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
                server = socket.create_connection(self.server)
            except OSError:
                return
            self.sockets += [client, server]
            for target, ends in ((self.pass_on, (client, server)), (self.answer, (server, client))):
                self.threads.append(threading.Thread(target=target, args=ends))
                self.threads[-1].start()

    def pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def answer(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as stream:
            while len(head := stream.read(HEADER_BYTES)) == HEADER_BYTES:
                meta = stream.read(struct.unpack_from("<I", head, 16)[0])
                body = stream.read(struct.unpack_from("<Q", head, 24)[0])
                if head[5] == VERBS_REGION_LIST:
                    meta = self.changed(meta)
                    head = head[:32] + struct.pack("<I", pw.crc32c(meta))
                    head += struct.pack("<I", pw.crc32c(head))
                target.sendall(head + meta + body)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def changed(self, meta: bytes) -> bytes:
        start = 2  # flag, and a count below 128
        assert meta[1] < 128
        regions = [Region(*REGION.unpack_from(meta, start + i * REGION.size)) for i in range(meta[1])]
        self.told += regions
        if self.change is not None:
            regions = self.change(regions)
        return meta[:start] + b"".join(REGION.pack(*dataclasses.astuple(region)) for region in regions)
