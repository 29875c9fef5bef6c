"""A client with no code of paramwire, only FORMAT.md's facts: authenticates, asks for a block by UDP, verifies it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess

import numpy as np
import paramwire as pw  # for the server alone
import pytest

MASK = (1 << 64) - 1
SEGMENT, SIZE = 1448, 200_000  # 139 segments: the last bitmap ends within a byte


def crc_table(polynomial):
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (polynomial if value & 1 else 0) for value in table]
    return table


CRC32C, CRC64 = crc_table(0x82F63B78), crc_table(0xC96C5795D7870F42)


def crc(data, table, ones):
    value = ones
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value ^ ones


def crc32c(data):
    return crc(data, CRC32C, 0xFFFFFFFF)


def siphash128(key, data):
    """SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012, and the reference repository)."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotate(x, n):
        return (x << n | x >> (64 - n)) & MASK

    def rounds(count):
        for a, b, n in ((0, 1, 13), (2, 3, 16), (0, 3, 21), (2, 1, 17)) * count:
            v[a] = (v[a] + v[b]) & MASK
            v[b] = rotate(v[b], n) ^ v[a]
            if n in (13, 17):
                v[a] = rotate(v[a], 32)

    padded = data + b"\0" * (7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return struct.pack("<QQ", low, v[0] ^ v[1] ^ v[2] ^ v[3])


class Control:
    """Frames over a TCP connection, or over `openssl s_client`, which speaks the TLS of a keyed server."""

    def __init__(self, port, key_file):
        self.exported = self.process = None
        if key_file is None:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                self.reader = self.writer = connection.makefile("rwb")  # keeps it open
            return
        words = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_3", "-ign_eof"]
        words += ["-psk_identity", "paramwire", "-psk", key_file.read_text().strip()]
        words += ["-keymatexport", "EXPORTER-paramwire-udp", "-keymatexportlen", "32"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.reader, self.writer = self.process.stdout, self.process.stdin
        while not (found := re.match(rb" *Keying material: ([0-9A-F]{64})", line := self.reader.readline())):
            assert line, "openssl did not connect"
        self.exported = bytes.fromhex(found[1].decode())
        assert self.reader.readline() == b"---\n"

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()
        self.reader.close()
        self.writer.close()

    def ask(self, kind, meta):
        head = struct.pack("<IBBHQIIQI", 0x31525750, 1, kind, 0, 1, len(meta), 0, 0, crc32c(meta))
        self.writer.write(head + struct.pack("<I", crc32c(head)) + meta)
        self.writer.flush()
        head = self.reader.read(40)
        assert struct.unpack_from("<I", head, 36)[0] == crc32c(head[:36])
        meta = self.reader.read(struct.unpack_from("<I", head, 16)[0])
        return head[5], meta, self.reader.read(struct.unpack_from("<Q", head, 24)[0])


def varint(data, at):
    value = shift = 0
    while data[at] >= 0x80:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1


def entry_of(delta):
    """Id, version and CRC-64 of the one entry of a manifest from nothing: a whole u8 tensor of one axis."""
    assert delta[:2] == b"\x01\x00"
    at = 2
    for _ in range(3):  # epoch, counter, count
        _, at = varint(delta, at)
    at += 32  # root
    for wanted in (0, 1):  # removed, added
        count, at = varint(delta, at)
        assert count == wanted
    block, kind = struct.unpack_from("<QB", delta, at)
    name, at = varint(delta, at + 9)
    at += name
    epoch, at = varint(delta, at)
    counter, at = varint(delta, at)
    assert (kind, delta[at : at + 3]) == (0, b"\x00\x01\x01")  # a block, whole, u8, one axis
    size, at = varint(delta, at + 3)
    assert (size, delta[at]) == (SIZE, 0)  # raw
    return block, epoch, counter, *struct.unpack_from("<Q", delta, at + 1)


@pytest.mark.parametrize("keyed", [False, True])
def test_plain_python_reads_a_block_by_udp_and_verifies_it(tmp_path, rng, keyed):
    if keyed and shutil.which("openssl") is None:
        pytest.skip("there is no openssl command here")
    key_file = None
    if keyed:
        pw.new_key(str(key_file := tmp_path / "cluster.key"))
    data = rng.integers(0, 256, SIZE, dtype=np.uint8)
    with pw.Server("tcp://127.0.0.1:0", key=key_file) as server:
        with server.publish() as publish:
            publish.put("w", data)
        with contextlib.closing(Control(int(server.endpoints[0].rsplit(":", 1)[1]), key_file)) as control:
            kind, welcome, _ = control.ask(1, secrets.token_bytes(16) + struct.pack("<I", os.getpid()))
            assert kind == 2
            incarnation = welcome[:16]
            # SNAPSHOT: the newest, nothing held, no lease, no wait, no locators
            kind, meta, body = control.ask(10, bytes(12 + 12 + 32 + 4 + 4 + 1))
            assert (kind, meta[:16]) == (11, incarnation)
            block, epoch, counter, crc64 = entry_of(body)
            kind, meta, _ = control.ask(60, b"")
            assert kind == 61
            port, session, key, segment_max = struct.unpack("<HQ16sH", meta)
            assert keyed == (key == bytes(16))
            assert segment_max >= SEGMENT
            got = fetch(port, session, control.exported[:16] if keyed else key, incarnation, block, epoch, counter)
            assert crc(got, CRC64, MASK) == crc64
            assert got == data.tobytes()


def fetch(port, session, key, incarnation, block, epoch, counter):
    count, request, token = -(-SIZE // SEGMENT), secrets.randbits(64), bytes(16)
    pseudo = incarnation + struct.pack("<QIQB", block, epoch, counter, 0)
    here: dict[int, bytes] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(("127.0.0.1", port))
        udp.settimeout(0.5)
        for sequence in range(1, 50):
            missing = [i for i in range(count) if i not in here]
            if not missing:
                break
            first, last = missing[0], min(missing[-1], missing[0] + 63)  # what a small receive buffer holds
            bits = sum(1 << (i - first) for i in missing if i <= last)
            bitmap = bits.to_bytes((last - first) // 8 + 1, "little")
            fixed = struct.pack("<QQQ", session, sequence, request) + incarnation
            fixed += struct.pack("<QIBBHQ", block, epoch, 0, 0, SEGMENT, counter) + token
            fixed += struct.pack("<IHH", first, last - first + 1, 0) + bitmap
            get = struct.pack("<IBBH", 0x31555750, 1, 1, 8 + len(fixed) + 16) + fixed
            udp.send(get + siphash128(key, get))
            while any(i not in here for i in missing if i <= last):
                try:
                    datagram = udp.recv(65536)
                except TimeoutError:
                    break
                assert datagram[:5] == b"PWU1\x01"
                assert struct.unpack_from("<Q", datagram, 8)[0] == request
                if datagram[5] == 3:  # STATUS token
                    assert siphash128(key, datagram[:40]) == datagram[40:]
                    assert struct.unpack_from("<H", datagram, 6)[0] == 0
                    token = datagram[24:40]
                    break
                segment, header_crc = struct.unpack_from("<II", datagram, 16)
                assert crc32c(datagram[:20] + pseudo) == header_crc
                here[segment] = datagram[24:]
    return b"".join(here[i] for i in range(count))
