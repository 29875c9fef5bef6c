"""Bytes that no client sends, at a server's port: the server lives, nobody else notices, memory stays.

Frames are built by the second implementation of the format, test_wire_golden.py, which shares no code with the library.
"""

from __future__ import annotations

import importlib.util
import random
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest
from paramwire import checkpoint

SEED = 20240613
VALUES = np.arange(1000, dtype=np.float32)
# What a server may grow by while it is told nonsense: far below what is declared, and far above what its buffers need.
GROWTH = 32 << 20
# Codes of wire/FORMAT.md.
U8, F32 = 1, 11
RAW, PLANES, LZ4 = 0, 1, 2


def load_golden():
    path = Path(__file__).with_name("test_wire_golden.py")
    spec = importlib.util.spec_from_file_location("wire_golden", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOLDEN = load_golden()
ERROR = GOLDEN.MESSAGES["ERROR"][0]
PUT_DONE = GOLDEN.MESSAGES["PUT_DONE"][0]
PUBLISHED = GOLDEN.MESSAGES["PUBLISHED"][0]
HELLO = GOLDEN.frame(1, 1, struct.pack("<QQI", 1, 2, 3), 0)
REQUESTS = [
    (kind, bytes.fromhex(fields["hex"]))
    for kind, fields in GOLDEN.LINES
    if kind in GOLDEN.MESSAGES and len(fields["hex"]) < 4000
]


def address_of(endpoint: str) -> tuple[int, object]:
    if endpoint.startswith("unix:"):
        return socket.AF_UNIX, endpoint.removeprefix("unix:")
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.AF_INET, (host, int(port))


def say(endpoint: str, *pieces: bytes) -> bytes:
    """Sends and hangs up the sending half; what the server says until it hangs up too."""
    family, address = address_of(endpoint)
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(20)
        peer.connect(address)
        heard = b""
        try:
            for piece in pieces:
                peer.sendall(piece)
            peer.shutdown(socket.SHUT_WR)
            while piece := peer.recv(65536):
                heard += piece
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server may have closed already
        return heard


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


class Others:
    """A client that fetches all the time; everything it gets must be right."""

    def __init__(self, address: str, transport: str) -> None:
        self.client = pw.connect(address, transport=transport, timeout=20.0)
        self.over = threading.Event()
        self.count = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        try:
            snapshot = self.client.snapshot()
            while not self.over.is_set():
                np.testing.assert_array_equal(snapshot.fetch("w"), VALUES)
                np.testing.assert_array_equal(self.client.fetch("w"), VALUES)
                self.count += 1
        except BaseException as failure:
            self.failure = failure

    def __enter__(self) -> Others:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.client.close()


def garbage(source: random.Random) -> list[bytes]:
    return [source.randbytes(source.choice([1, 39, 40, 41, 4096, 200_000])) for _ in range(40)]


def truncated(source: random.Random) -> list[bytes]:
    return [HELLO + frame[: source.randrange(1, len(frame))] for _, frame in REQUESTS for _ in range(3)]


def flipped(source: random.Random) -> list[bytes]:
    out = []
    for _ in range(150):
        frame = bytearray(HELLO + source.choice(REQUESTS)[1])
        bit = source.randrange(len(frame) * 8)
        frame[bit // 8] ^= 1 << (bit % 8)
        out.append(bytes(frame))
    return out


def wrong_metas(source: random.Random) -> list[bytes]:
    """Frames with right checksums around metas that are cut, too long or random: the decoders' own work."""
    out = []
    for code, _ in GOLDEN.MESSAGES.values():
        for size in (0, 1, 7, 300):
            out.append(HELLO + GOLDEN.frame(code, 2, source.randbytes(size), 0))
    out += [HELLO + GOLDEN.frame(code, 2, b"", 0) for code in range(256)]
    return out


def huge_sizes(_: random.Random) -> list[bytes]:
    out = []
    for huge in (1 << 60, (1 << 64) - 1, 1 << 40):
        body = {"name": b"\x01w"}
        for code in (1, 10, 20, 42, 46, 50, 200):
            out.append(HELLO + GOLDEN.frame(code, 2, b"", huge))
        # A put of 2^60 bytes, under a publish that is not there, and its first bytes.
        shape = b"\x01" + struct.pack("<Q", huge)
        put = struct.pack("<QQ", 1, 2) + body["name"] + struct.pack("<H", 1) + shape
        put += struct.pack("<BIQQH", 0, 0, 0, 0, 0)
        out.append(HELLO + GOLDEN.frame(42, 3, put, huge) + bytes(1000))
    for meta in (1 << 31, (1 << 32) - 1):
        head = struct.pack("<4sBBHQIIQI", b"PWR1", 1, 1, 0, 1, meta, 0, 0, 0)
        out.append(head + struct.pack("<I", GOLDEN.crc32c(head)) + bytes(1000))
    return out


@pytest.mark.parametrize("kind", [garbage, truncated, flipped, wrong_metas, huge_sizes], ids=lambda kind: kind.__name__)
def test_a_server_told_nonsense_lives_and_nobody_else_notices(server_process, transport, kind, until):
    server_process.publish({"w": ("f4", (1000,))})
    source = random.Random(SEED)
    messages = kind(source)
    with Others(server_process.address, transport) as others:
        assert until(lambda: others.count > 0 or others.failure)
        say(server_process.address, HELLO)
        before = resident(server_process.pid)
        for i, message in enumerate(messages):
            endpoint = server_process.endpoints[i % len(server_process.endpoints)]
            cut = source.randrange(len(message) + 1)
            say(endpoint, message[:cut], message[cut:])
        done = others.count
        assert until(lambda: others.count > done or others.failure)
        assert server_process.process.poll() is None
        grown = resident(server_process.pid) - before
    assert others.failure is None
    assert grown < GROWTH, f"grew by {grown} bytes; seed {SEED}"
    server_process.publish({"w": ("f4", (1000,))}, add=1)


class RawPublisher:
    """A publish by frames of the second implementation, on the newest version; a context manager."""

    def __init__(self, address: str) -> None:
        family, at = address_of(address)
        self.peer = socket.socket(family, socket.SOCK_STREAM)
        self.peer.settimeout(20)
        self.peer.connect(at)
        self.stream = self.peer.makefile("rwb")
        self.ask(HELLO)
        _, self.publish = self.ask(GOLDEN.frame(40, 2, struct.pack("<BIQ", 1, 0, 0), 0))

    def __enter__(self) -> RawPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.peer.close()

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Type and meta of the answer."""
        self.stream.write(request)
        self.stream.flush()
        head = self.stream.read(40)
        return head[5], self.stream.read(struct.unpack("<I", head[16:20])[0])

    def put(self, name: bytes, dtype: int, shape: tuple[int, ...], codec: int, stored_size: int) -> bytes:
        """The frame of a whole tensor, without its body."""
        meta = self.publish[:16] + bytes([len(name)]) + name + struct.pack("<HB", dtype, len(shape))
        meta += b"".join(struct.pack("<Q", axis) for axis in shape) + struct.pack("<BIQQH", 0, 0, 0, 0, codec)
        return GOLDEN.frame(42, 3, meta, stored_size)


def test_a_put_that_declares_more_than_the_store_may_hold_takes_nothing(start_server, tmp_path):
    """A publish that is really open, and a put of 2^39 bytes that agrees with itself: they are read and dropped."""
    server = start_server(unix_directory=str(tmp_path / "s"), memory_limit=64 << 20)
    server.publish({"w": ("f4", (1000,))})
    before = resident(server.pid)
    with pw.connect(server.address) as client:
        with RawPublisher(server.address) as publisher:
            assert client.server_stats()["publishes_open"] == 1
            slots = client.server_stats()["slots_in_use"]
            size = 1 << 39
            publisher.stream.write(publisher.put(b"v", U8, (size,), RAW, size))
            for _ in range(64):
                publisher.stream.write(bytes(1 << 20))
            publisher.stream.flush()
            np.testing.assert_array_equal(client.fetch("w"), VALUES)
            stats = client.server_stats()
            assert (stats["slots_in_use"], stats["committed_bytes"] <= 64 << 20) == (slots, True)
            assert resident(server.pid) - before < GROWTH
        np.testing.assert_array_equal(client.fetch("w"), VALUES)


def test_encoded_puts_of_sizes_that_cannot_be_are_refused_by_name(server_process):
    server_process.publish({"w": ("f4", (1000,))})
    with RawPublisher(server_process.address) as publisher:
        for shape, codec, size, said in (
            ((100,), PLANES, 400, b"has 400 bytes, which codec 1 can't store as 400"),
            ((100,), PLANES, 1000, b"can't store as 1000"),
            ((0,), PLANES, 0, b"has 0 bytes, which codec 1 can't store as 0"),
            ((), LZ4, 4, b"has 4 bytes, which codec 2 can't store as 4"),
            ((100,), RAW, 40, b"has 400 bytes, 40 were announced"),
        ):
            kind, answer = publisher.ask(publisher.put(b"v", F32, shape, codec, size) + bytes(size))
            assert (kind, said in answer) == (ERROR, True), answer
        # The connection and the publish go on.
        kind, _ = publisher.ask(publisher.put(b"v", F32, (2,), RAW, 8) + struct.pack("<2f", 1, 2))
        assert kind == PUT_DONE
        assert publisher.ask(GOLDEN.frame(46, 4, publisher.publish, 0))[0] == PUBLISHED
    with RawPublisher(server_process.address) as publisher:  # a message that can't be one ends the connection
        kind, answer = publisher.ask(publisher.put(b"v", F32, (100,), 9, 40) + bytes(40))
        assert (kind, b"bad codec" in answer) == (ERROR, True), answer
    with pw.connect(server_process.address) as client:
        assert client.fetch("v").tolist() == [1, 2]


@pytest.mark.parametrize("codec", ["planes", "lz4"])
def test_an_encoded_put_that_does_not_decode_is_corrupt_for_everybody_who_reads_it(
    server_process, transport, codec, tmp_path
):
    """Whoever has the key may publish anything; what is no block is never handed out, whatever it claims to become."""
    code = {"planes": PLANES, "lz4": LZ4}[codec]
    server_process.publish({"w": ("f4", (1000,))})
    source = random.Random(SEED)
    # Rows of nonsense, of zeros, and 1000 bytes that claim to be 64 GiB.
    bodies = [((5000,), source.randbytes(1000)), ((5000,), bytes(1000)), ((1 << 34,), bytes(1000))]
    for shape, body in bodies:
        with RawPublisher(server_process.address) as publisher:
            kind, _ = publisher.ask(publisher.put(b"v", F32, shape, code, len(body)) + body)
            assert kind == PUT_DONE
            assert publisher.ask(GOLDEN.frame(46, 4, publisher.publish, 0))[0] == PUBLISHED
        with pw.connect(server_process.address, transport=transport, timeout=20.0) as client:
            with pytest.raises(pw.CorruptError, match=rf"block v at version .*{codec}"):
                client.fetch("v", rows=(0, 1))
            if shape == (5000,):
                with pytest.raises(pw.CorruptError, match="block v"):
                    client.fetch("v")
                with pytest.raises(pw.CorruptError, match="block v"):
                    pw.Mirror(client, ["v"])
            with pytest.raises(pw.Error, match="block v"):
                checkpoint.save(tmp_path / "d", client)
            with pytest.raises(pw.NotFoundError):
                checkpoint.restore_arrays(tmp_path / "d")
            np.testing.assert_array_equal(client.fetch("w"), VALUES)
        assert server_process.process.poll() is None


class Proxy:
    """Hands bytes between a client and a server; the first answers of type `drop` cut the connection instead."""

    def __init__(self, endpoint: str, drop: int, times: int) -> None:
        self.server = address_of(endpoint)
        self.drop, self.times = drop, times
        self.dropped = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            family, address = self.server
            server = socket.socket(family, socket.SOCK_STREAM)
            server.connect(address)
            self.open += [client, server]
            for work in (self.forward, self.answers):
                self.threads.append(threading.Thread(target=work, args=(client, server), daemon=True))
                self.threads[-1].start()

    def forward(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def answers(self, client: socket.socket, server: socket.socket) -> None:
        stream = server.makefile("rb")
        try:
            while len(head := stream.read(40)) == 40:
                kind, meta_size, body_size = head[5], *struct.unpack("<I4xQ", head[16:32])
                if kind == self.drop and self.dropped < self.times:
                    self.dropped += 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(head + stream.read(meta_size + body_size))
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for one in self.open:
            one.close()


@pytest.mark.parametrize("times", [1, 2])
def test_finish_repeated_after_a_lost_answer_publishes_once(server, times):
    tcp = next(endpoint for endpoint in server.endpoints if endpoint.startswith("tcp:"))
    proxy = Proxy(tcp, PUBLISHED, times)
    try:
        with pw.connect(proxy.address, transport="tcp", timeout=10.0) as client:
            publish = client.publish()
            publish.put("w", VALUES)
            if times == 1:  # finish asks once more by itself
                version = publish.finish()
            else:
                with pytest.raises(pw.UnreachableError):
                    publish.finish()
                version = publish.finish()
            assert proxy.dropped == times
            assert version == server.newest == pw.Version(server.epoch, 1)
            assert server.stats()["publishes"] == 1
            assert publish.finish() == version
            np.testing.assert_array_equal(client.fetch("w"), VALUES)
    finally:
        proxy.close()
