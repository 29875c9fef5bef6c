#!/usr/bin/python3
"""Reads a published block by RDMA with nothing of paramwire: the facts of cpp/paramwire/wire/FORMAT.md, and pyverbs.

usage: independent_reader.py HOST:PORT DEVICE GID_INDEX TENSOR

Prints one line of JSON about the block that it read and verified; status 1 and the reason when anything is not as
FORMAT.md has it. The server must be without a cluster key. pyverbs: Debian's python3-pyverbs (rdma-core 44).

  1. control connection (TCP): HELLO, then SNAPSHOT with locators: where the block's slot lies, and what it must be
  2. queue pair: VERBS_OPEN tells our end and brings the server's; VERBS_REGIONS brings the registered memory
  3. READ of the payload; only when it has completed, READ of the slot header, which vouches for it
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
from typing import NamedTuple

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

HELLO, WELCOME, ERROR, SNAPSHOT, MANIFEST = 1, 2, 3, 10, 11
VERBS_OPEN, VERBS_READY, VERBS_REGIONS, VERBS_REGION_LIST = 70, 71, 72, 73
ROCE_V2 = 2
SLOT_HEADER_BYTES = 64
MASK64 = (1 << 64) - 1


class Unexpected(Exception):
    """The server does not do as FORMAT.md says; or we do not."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Unexpected(what)


# ---------------------------------------------------------------- checksums ("Checksums")


def crc_table(polynomial: int) -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (polynomial if value & 1 else 0) for value in table]
    return table


CRC32C, CRC64 = crc_table(0x82F63B78), crc_table(0xC96C5795D7870F42)


def crc(data: bytes, table: list[int], ones: int) -> int:
    value = ones
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value ^ ones


def crc32c(data: bytes) -> int:
    return crc(data, CRC32C, 0xFFFFFFFF)


def crc64(data: bytes) -> int:
    return crc(data, CRC64, MASK64)


# ---------------------------------------------------------------- control connection ("Frame", "Messages")


class Control:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.connection = socket.create_connection((host, int(port)), timeout=60)
        self.stream = self.connection.makefile("rb")
        self.requests = 0

    def ask(self, kind: int, meta: bytes, wanted: int) -> tuple[bytes, bytes]:
        """Meta and body of the answer."""
        self.requests += 1
        head = struct.pack("<IBBHQIIQI", 0x31525750, 1, kind, 0, self.requests, len(meta), 0, 0, crc32c(meta))
        self.connection.sendall(head + struct.pack("<I", crc32c(head)) + meta)
        head = self.stream.read(40)
        expect(len(head) == 40, "the server closed the connection")
        magic, protocol, kind, _, request, meta_size, _, body_size, meta_crc, header_crc = struct.unpack(
            "<IBBHQIIQII", head
        )
        expect((magic, protocol) == (0x31525750, 1) and header_crc == crc32c(head[:36]), "a frame's header")
        meta, body = self.stream.read(meta_size), self.stream.read(body_size)
        expect(meta_crc == crc32c(meta) and request == self.requests, "a frame's meta")
        if kind == ERROR:
            length, at = varint(meta, 1)
            raise Unexpected(f"the server says: {meta[at : at + length].decode()}")
        expect(kind == wanted, f"frame type {kind} in place of {wanted}")
        return meta, body


# ---------------------------------------------------------------- manifest and locators


class Entry(NamedTuple):
    """What the manifest says of a block: what it must be."""

    block: int
    tensor: str
    epoch: int
    counter: int
    size: int
    crc64: int


class Locator(NamedTuple):
    """Where the block's slot lies: a hint."""

    arena: int
    header_arena: int
    header_offset: int
    payload_offset: int
    seq: int


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1


def read_entry(data: bytes, at: int) -> tuple[Entry | None, int]:
    """A manifest entry; None for an alias. Whole tensors of u8 with one axis are all that this client is for."""
    block, kind = struct.unpack_from("<QB", data, at)
    length, at = varint(data, at + 9)
    tensor, at = data[at : at + length].decode(), at + length
    epoch, at = varint(data, at)
    counter, at = varint(data, at)
    if kind == 1:
        length, at = varint(data, at)
        return None, at + length
    expect(data[at : at + 3] == b"\x00\x01\x01", f"{tensor}: not a whole tensor, u8, of one axis")
    size, at = varint(data, at + 3)
    codec, at = varint(data, at)
    expect(codec == 0, f"{tensor}: codec {codec}")
    (checksum,) = struct.unpack_from("<Q", data, at)
    at += 8 + (4 if size > 65536 else 0)  # extent_table_crc of larger blocks
    return Entry(block, tensor, epoch, counter, size, checksum), at


def read_manifest(meta: bytes, body: bytes, wanted: str) -> tuple[Entry, Locator]:
    stream_size, locator_count = struct.unpack_from("<QQ", meta, 28)
    expect(body[:2] == b"\x01\x00", "not a manifest from nothing")
    at = 2
    for _ in range(3):  # epoch, counter and count of the version
        _, at = varint(body, at)
    removed, at = varint(body, at + 32)  # after its root
    added, at = varint(body, at)
    expect(removed == 0 and added == locator_count, "as many locators as entries")
    for i in range(added):
        entry, at = read_entry(body, at)
        if entry is not None and entry.tensor == wanted:
            return entry, Locator(*struct.unpack_from("<HHQQQ", body, stream_size + 28 * i))
    raise Unexpected(f"no tensor {wanted}")


# ---------------------------------------------------------------- RDMA


class Device:
    def __init__(self, name: str, gid_index: int) -> None:
        self.gid_index = gid_index
        self.context = Context(name=name)
        self.gid = self.context.query_gid(1, gid_index)
        self.mtu = 128 << self.context.query_port(1).active_mtu  # 1: 256, ... 5: 4096
        self.domain = PD(self.context)
        self.completions = CQ(self.context, 16)
        capabilities = QPCap(max_send_wr=16, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=capabilities)
        self.pair = QP(self.domain, wanted)
        self.packet = secrets.randbits(24)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = 0  # nobody reads or writes here
        self.pair.to_init(attributes)

    def connect(self, remote_gid: bytes, remote_pair: int, remote_packet: int, mtu: int, reads: int) -> None:
        route = GlobalRoute(
            # pyverbs knows no shortened addresses.
            dgid=GID(":".join(remote_gid.hex()[at : at + 4] for at in range(0, 32, 4))),
            sgid_index=self.gid_index,
            hop_limit=64,
        )
        attributes = QPAttr(port_num=1)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attributes.path_mtu = (mtu // 256).bit_length()
        attributes.dest_qp_num = remote_pair
        attributes.rq_psn = remote_packet
        attributes.max_dest_rd_atomic = reads
        attributes.min_rnr_timer = 12
        attributes.sq_psn = self.packet
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 16, 6, 6
        attributes.max_rd_atomic = reads
        self.pair.to_rts(attributes)  # by way of RTR

    def read(self, address: int, key: int, size: int) -> bytes:
        """One READ, to its completion."""
        landing = MR(self.domain, max(size, 1), e.IBV_ACCESS_LOCAL_WRITE)
        request = SendWR(
            opcode=e.IBV_WR_RDMA_READ,
            num_sge=1,
            sg=[SGE(landing.buf, size, landing.lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(key, address)
        self.pair.post_send(request)
        count, completions = 0, []
        while count == 0:
            count, completions = self.completions.poll()
        status = completions[0].status
        expect(status == e.IBV_WC_SUCCESS, f"a READ of {size} bytes ended with status {status}")
        data = landing.read(size, 0)
        landing.close()
        return data


class Region(NamedTuple):
    arena: int
    offset: int
    size: int
    address: int
    key: int


def ask_region(control: Control, arena: int, offset: int) -> Region:
    """Memory of the server that holds that byte."""
    meta, _ = control.ask(VERBS_REGIONS, struct.pack("<IBHQ", 0, 1, arena, offset), VERBS_REGION_LIST)
    count, at = varint(meta, 1)
    regions = [Region(*struct.unpack_from("<HQIQI", meta, at + 26 * i)) for i in range(count)]
    for region in regions:
        if region.arena == arena and region.offset <= offset < region.offset + region.size:
            return region
    raise Unexpected(f"no region holds byte {offset} of arena {arena}")


def fetch(control: Control, device: Device, arena: int, offset: int, size: int) -> bytes:
    """Arena bytes, region by region."""
    data = b""
    while len(data) < size:
        region = ask_region(control, arena, offset)
        skip = offset - region.offset
        part = min(size - len(data), region.size - skip)
        data += device.read(region.address + skip, region.key, part)
        offset += part
    return data


# ---------------------------------------------------------------- all of it


def read_block(address: str, device: Device, tensor: str) -> tuple[Entry, bytes]:
    control = Control(address)
    welcome, _ = control.ask(HELLO, secrets.token_bytes(16) + struct.pack("<I", os.getpid()), WELCOME)
    # The newest version; nothing held; no lease; no wait; with locators.
    meta, body = control.ask(SNAPSHOT, bytes(12 + 12 + 32 + 4 + 4) + b"\x01", MANIFEST)
    expect(meta[:16] == welcome[:16], "one incarnation throughout")
    entry, locator = read_manifest(meta, body, tensor)

    gid = socket.inet_pton(socket.AF_INET6, str(device.gid))
    ours = gid + struct.pack("<IIHHBB", device.pair.qp_num, device.packet, device.mtu, 0, 16, ROCE_V2)
    meta, _ = control.ask(VERBS_OPEN, ours + b"\x00", VERBS_READY)
    remote_pair, remote_packet, mtu, _, reads, kind = struct.unpack_from("<IIHHBB", meta, 16)
    probe_address, probe_key, probe_size = struct.unpack_from("<QII", meta, 30)
    expect(kind == ROCE_V2 and mtu <= device.mtu and reads <= 16, "what was agreed on")
    device.connect(meta[:16], remote_pair, remote_packet, mtu, reads)
    probe = device.read(probe_address, probe_key, probe_size)
    expect(probe == bytes((i * 7 + i // 256) % 256 for i in range(probe_size)), "the probe's bytes")

    payload = fetch(control, device, locator.arena, locator.payload_offset, entry.size)
    # Complete: only now is the header asked for.
    header = fetch(control, device, locator.header_arena, locator.header_offset, SLOT_HEADER_BYTES)
    seq, counter, _, _, _, block, epoch, _, _, _, header_crc = struct.unpack("<QQQQQQIIHHI", header)
    expect(seq == locator.seq, f"seq {seq}, the locator says {locator.seq}: the slot was written anew")
    expect(header_crc == crc32c(header[:60]), "the header's CRC")
    expect((block, epoch, counter) == (entry.block, entry.epoch, entry.counter), "block and version of the header")
    expect(crc64(payload) == entry.crc64, "the payload's CRC-64 is the manifest's")
    return entry, payload


def main() -> int:
    address, device, gid_index, tensor = sys.argv[1:]
    try:
        entry, payload = read_block(address.removeprefix("tcp://"), Device(device, int(gid_index)), tensor)
    except Unexpected as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    facts = {
        "version": [entry.epoch, entry.counter],
        "size": len(payload),
        "crc64": entry.crc64,
        "hex": payload[:64].hex(),
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
