"""GETs that come as IP fragments: the kernel joins them, or nobody hears of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct

import numpy as np
import paramwire as pw
import pytest
from test_independent_client import SEGMENT, SIZE, Control, entry_of, siphash128

PROTOCOL_UDP, MORE_FRAGMENTS = 17, 0x2000


@pytest.fixture
def raw():
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    except PermissionError:
        pytest.skip("raw sockets need CAP_NET_RAW")
    with made:
        yield made


def fragments(datagram: bytes, source: int, target: int, cut: int) -> list[bytes]:
    """The UDP datagram in two IPv4 packets (RFC 791), cut after `cut` bytes, a multiple of 8."""
    whole = struct.pack(">HHHH", source, target, 8 + len(datagram), 0) + datagram
    number, local = secrets.randbits(16), socket.inet_aton("127.0.0.1")

    def packet(at: int, part: bytes, more: int) -> bytes:
        place = more | at // 8
        return struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(part), number, place, 64, PROTOCOL_UDP, 0) + local * 2 + part

    return [packet(0, whole[:cut], MORE_FRAGMENTS), packet(cut, whole[cut:], 0)]


def test_a_question_in_fragments_is_one_like_any_other_and_half_of_one_is_nothing(rng, raw):
    data = rng.integers(0, 256, SIZE, dtype=np.uint8)
    with pw.Server("tcp://127.0.0.1:0") as server, contextlib.ExitStack() as stack:
        with server.publish() as publish:
            publish.put("w", data)
        control = stack.enter_context(contextlib.closing(Control(int(server.endpoints[0].rsplit(":", 1)[1]), None)))
        _, welcome, _ = control.ask(1, secrets.token_bytes(16) + struct.pack("<I", os.getpid()))
        _, _, body = control.ask(10, bytes(12 + 12 + 32 + 4 + 4 + 1))
        block, epoch, counter, _ = entry_of(body)
        port, session, key, _ = struct.unpack("<HQ16sH", control.ask(60, b"")[1])
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(10)

        def question(sequence: int, token: bytes) -> bytes:
            fixed = struct.pack("<QQQ", session, sequence, 1) + welcome[:16]
            fixed += struct.pack("<QIBBHQ", block, epoch, 0, 0, SEGMENT, counter) + token
            fixed += struct.pack("<IHH", 0, 1, 0) + b"\1"
            get = struct.pack("<IBBH", 0x31555750, 1, 1, 8 + len(fixed) + 16) + fixed
            return get + siphash128(key, get)

        udp.sendto(question(1, bytes(16)), ("127.0.0.1", port))
        token = udp.recv(65536)[24:40]
        source = udp.getsockname()[1]
        half, _ = fragments(question(2, token), source, port, 64)
        raw.sendto(half, ("127.0.0.1", 0))
        for part in fragments(question(3, token), source, port, 64):
            raw.sendto(part, ("127.0.0.1", 0))
        answer = udp.recv(65536)
        assert (answer[5], answer[24:]) == (2, data.tobytes()[:SEGMENT])
        udp.settimeout(0.05)
        with pytest.raises(TimeoutError):
            udp.recv(65536)
        stats = server.stats()
        assert (stats["udp_received"], stats["udp_malformed"], stats["udp_answered"]) == (2, 0, 1), stats
