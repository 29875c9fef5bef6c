"""Golden vectors of the wire formats against a second implementation, written from wire/FORMAT.md alone.

Goal: two implementations that share no code read and write the same bytes, so that FORMAT.md is complete and exact.
Method: tests/golden/wire.txt holds one object a line, `kind key=value ... hex=BYTES`. Every line is encoded from its
fields and decoded from its bytes here, and in tests/cpp/golden_test.cpp by the library. Nothing of paramwire is
imported.

`python tests/python/test_wire_golden.py` prints the file with its bytes made anew from the fields, for new lines.
"""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "wire.txt"
Fields = dict[str, str]


M64 = 2**64 - 1

# ---------------------------------------------------------------- CRC (FORMAT.md, "Checksums")


def crc_table(polynomial: int) -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (polynomial if byte & 1 else 0)
        table.append(byte)
    return table


CRC32C = crc_table(0x82F63B78)
CRC64 = crc_table(0xC96C5795D7870F42)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ CRC32C[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc64(data: bytes) -> int:
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ CRC64[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFFFFFFFFFF


# ---------------------------------------------------------------- SipHash-2-4-128 (FORMAT.md, "Message authentication")


def siphash128(key: bytes, data: bytes) -> bytes:
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotl(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & M64

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, c, d, left, right in ((0, 1, 2, 3, 13, 16), (2, 1, 0, 3, 17, 21)):
                v[a] = (v[a] + v[b]) & M64
                v[c] = (v[c] + v[d]) & M64
                v[b], v[d] = rotl(v[b], left) ^ v[a], rotl(v[d], right) ^ v[c]
                v[a] = rotl(v[a], 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    out = b""
    for index, constant in ((2, 0xEE), (1, 0xDD)):
        v[index] ^= constant
        rounds(4)
        out += struct.pack("<Q", v[0] ^ v[1] ^ v[2] ^ v[3])
    return out


# ---------------------------------------------------------------- block id (FORMAT.md, "Block id")

WHOLE, ROWS, HEADS = 0, 1, 2


def block_id(tensor: bytes, kind: int, heads: int, begin: int, end: int) -> int:
    key = tensor + b"\0" + bytes([kind])
    if kind != WHOLE:
        key += struct.pack("<IQQ", heads, begin, end)
    h = 0xCBF29CE484222325
    for byte in key:
        h = ((h ^ byte) * 0x100000001B3) & M64
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = ((h ^ (h >> 33)) * multiplier) & M64
    h ^= h >> 33
    return h or 1


# ---------------------------------------------------------------- a cursor and the field kinds


class Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        assert self.at + size <= len(self.data), "short"
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, code: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                assert byte or not shift, "overlong"
                return value
            shift += 7

    def end(self) -> None:
        assert self.at == len(self.data), "bytes left over"


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def text(value: str) -> bytes:
    return varint(len(value.encode())) + value.encode()


def version_of(value: str) -> tuple[int, int]:
    epoch, counter = value.split(".")
    return int(epoch), int(counter)


# A layout is a list of (field, kind). Fixed kinds are struct codes; x is an integer written in hex in the golden file.
def put(kind: str, value: str) -> bytes:
    if kind in ("B", "H", "I", "Q"):
        return struct.pack("<" + kind, int(value, 0))
    if kind in ("xI", "xQ"):
        return struct.pack("<" + kind[1], int(value, 16))
    if kind == "id128":
        return struct.pack("<QQ", int(value[:16], 16), int(value[16:], 16))
    if kind == "version":
        return struct.pack("<IQ", *version_of(value))
    if kind == "text":
        return text(value)
    if kind in ("digest", "b16"):
        return bytes.fromhex(value)
    if kind == "blob":
        return varint(len(value) // 2) + bytes.fromhex(value)
    if kind == "shape":
        dims = [int(d) for d in value.split(",") if d]
        return bytes([len(dims)]) + b"".join(struct.pack("<Q", d) for d in dims)
    if kind == "regions":  # arena:offset:size:address:key, the last two in hex
        rows = [row.split(":") for row in value.split(",") if row]
        packed = (struct.pack("<HQIQI", *map(int, row[:3]), int(row[3], 16), int(row[4], 16)) for row in rows)
        return varint(len(rows)) + b"".join(packed)
    if kind == "asks":  # block:version:base
        rows = [row.split(":") for row in value.split(",") if row]
        return varint(len(rows)) + b"".join(put("xQ", b) + put("version", v) + put("version", w) for b, v, w in rows)
    if kind == "sizes":
        sizes = [int(size) for size in value.split(",") if size]
        return varint(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    assert kind == "stats"
    pairs = [pair.split(":") for pair in value.split(",") if pair]
    return varint(len(pairs)) + b"".join(text(name) + struct.pack("<Q", int(number)) for name, number in pairs)


def get(kind: str, cursor: Cursor) -> str:
    if kind in ("B", "H", "I", "Q"):
        return str(cursor.unpack(kind))
    if kind in ("xI", "xQ"):
        return f"{cursor.unpack(kind[1]):0{8 if kind == 'xI' else 16}x}"
    if kind == "id128":
        return f"{cursor.unpack('Q'):016x}{cursor.unpack('Q'):016x}"
    if kind == "version":
        return f"{cursor.unpack('I')}.{cursor.unpack('Q')}"
    if kind == "text":
        return cursor.take(cursor.varint()).decode()
    if kind in ("digest", "b16"):
        return cursor.take(32 if kind == "digest" else 16).hex()
    if kind == "blob":
        return cursor.take(cursor.varint()).hex()
    if kind == "shape":
        return ",".join(str(cursor.unpack("Q")) for _ in range(cursor.take(1)[0]))
    if kind == "regions":
        found = [struct.unpack("<HQIQI", cursor.take(26)) for _ in range(cursor.varint())]
        return ",".join(f"{arena}:{offset}:{size}:{at:016x}:{key:08x}" for arena, offset, size, at, key in found)
    if kind == "asks":
        return ",".join(":".join(get(k, cursor) for k in ("xQ", "version", "version")) for _ in range(cursor.varint()))
    if kind == "sizes":
        return ",".join(get("Q", cursor) for _ in range(cursor.varint()))
    assert kind == "stats"
    return ",".join(f"{get('text', cursor)}:{cursor.unpack('Q')}" for _ in range(cursor.varint()))


Layout = list[tuple[str, str]]
STRUCTS: dict[str, Layout] = {
    "slot_header": [
        ("seq", "Q"), ("version_counter", "Q"), ("raw_size", "Q"), ("stored_size", "Q"), ("crc64", "xQ"),
        ("block", "xQ"), ("epoch", "I"), ("extent_table", "I"), ("codec", "H"), ("dtype", "H"),
    ],
    "extent_row": [("stored_size", "I"), ("crc32c", "xI")],
    "locator": [("arena", "H"), ("header_arena", "H"), ("header_offset", "Q"), ("payload_offset", "Q"), ("seq", "Q")],
}  # fmt: skip
PUBLISH_ID: Layout = [("publish", "id128"), ("version", "version")]
NAMES: Layout = [("publish", "id128"), ("tensor", "text"), ("target", "text")]
VERBS_END: Layout = [("gid", "b16"), ("queue_pair", "I"), ("packet", "I"), ("mtu", "H"), ("lid", "H"), ("reads", "B"),
                     ("type", "B")]  # fmt: skip
MESSAGES: dict[str, tuple[int, Layout]] = {
    "HELLO": (1, [("client", "id128"), ("pid", "I")]),
    "WELCOME": (2, [("incarnation", "id128"), ("epoch", "I"), ("newest", "version"), ("lease_ttl_ms_max", "I"),
                    ("host_id", "text"), ("unix_path", "text")]),
    "ERROR": (3, [("code", "B"), ("text", "text")]),
    "OK": (4, []),
    "SNAPSHOT": (10, [("want", "version"), ("held", "version"), ("held_root", "digest"), ("lease_ttl_ms", "I"),
                      ("wait_ms", "I"), ("locators", "B")]),
    "MANIFEST": (11, [("incarnation", "id128"), ("lease", "Q"), ("lease_ttl_ms", "I"), ("stream_size", "Q"),
                      ("locator_count", "Q")]),
    "RENEW": (12, [("lease", "Q"), ("ttl_ms", "I")]),
    "RELEASE": (13, [("lease", "Q"), ("ttl_ms", "I")]),
    "GET": (20, [("block", "xQ"), ("version", "version"), ("incarnation", "id128"), ("range_offset", "Q"),
                 ("range_size", "Q"), ("extent_table", "B")]),
    "DATA": (21, [("block", "xQ"), ("version", "version"), ("incarnation", "id128"), ("stored_size", "Q"),
                  ("range_offset", "Q"), ("range_size", "Q"), ("extent_table", "blob")]),
    "DELTAS": (22, [("incarnation", "id128"), ("asks", "asks")]),
    "DELTA_LIST": (23, [("sizes", "sizes")]),
    "ARENA": (30, [("arena", "I"), ("size", "Q")]),
    "ARENA_FD": (31, [("arena", "I"), ("size", "Q")]),
    "PINS": (32, []),
    "PINS_FD": (33, [("capacity", "I")]),
    "PUBLISH_START": (40, [("any_base", "B"), ("base", "version")]),
    "PUBLISH_ID": (41, PUBLISH_ID),
    "PUT": (42, [("publish", "id128"), ("tensor", "text"), ("dtype", "H"), ("shape", "shape"), ("shard_kind", "B"),
                 ("heads", "I"), ("begin", "Q"), ("end", "Q"), ("codec", "H")]),
    "PUT_DONE": (43, [("block", "xQ"), ("crc64", "xQ")]),
    "REMOVE": (44, NAMES),
    "ALIAS": (45, NAMES),
    "FINISH": (46, PUBLISH_ID),
    "PUBLISHED": (47, [("version", "version")]),
    "ABORT": (48, PUBLISH_ID),
    "STAT": (50, []),
    "STATS": (51, [("values", "stats")]),
    "UDP_OPEN": (60, []),
    "UDP_KEY": (61, [("port", "H"), ("session", "xQ"), ("key", "b16"), ("segment_max", "H")]),
    "VERBS_OPEN": (70, [*VERBS_END, ("choice", "B")]),
    "VERBS_READY": (71, [*VERBS_END, ("probe_address", "xQ"), ("probe_key", "xI"), ("probe_size", "I")]),
    "VERBS_REGIONS": (72, [("known", "I"), ("wanted", "B"), ("arena", "H"), ("offset", "Q")]),
    "VERBS_REGION_LIST": (73, [("complete", "B"), ("regions", "regions")]),
}  # fmt: skip


def encode_layout(layout: Layout, fields: Fields) -> bytes:
    return b"".join(put(kind, fields[name]) for name, kind in layout)


def decode_layout(layout: Layout, data: bytes) -> Fields:
    cursor = Cursor(data)
    fields = {name: get(kind, cursor) for name, kind in layout}
    cursor.end()
    return fields


# ---------------------------------------------------------------- frames


def frame(kind: int, request: int, meta: bytes, body_size: int) -> bytes:
    head = struct.pack("<4sBBHQIIQI", b"PWR1", 1, kind, 0, request, len(meta), 0, body_size, crc32c(meta))
    return head + struct.pack("<I", crc32c(head)) + meta


def parse_frame(data: bytes) -> tuple[int, int, bytes, int]:
    magic, protocol, kind, flags, request, meta_size, reserved, body_size, meta_crc, header_crc = struct.unpack(
        "<4sBBHQIIQII", data[:40]
    )
    assert (magic, protocol, flags, reserved) == (b"PWR1", 1, 0, 0)
    meta = data[40:]
    assert header_crc == crc32c(data[:36])
    assert meta_crc == crc32c(meta)
    assert meta_size == len(meta)
    return kind, request, meta, body_size


def body_size(message: str, fields: Fields) -> int:
    if message == "MANIFEST":
        return int(fields["stream_size"]) + 28 * int(fields["locator_count"])
    if message == "DELTA_LIST":
        return sum(int(size) for size in fields["sizes"].split(",") if size and int(size) < M64)
    if message == "DATA":
        return int(fields["range_size"])
    return int(fields.get("body_size", "0"))


# ---------------------------------------------------------------- datagrams (FORMAT.md, "Datagrams")

DATAGRAMS = ("udp_get", "udp_data", "udp_status")
ASKED: Layout = [("incarnation", "id128"), ("block", "xQ")]


def asked(f: Fields) -> bytes:
    epoch, counter = version_of(f["version"])
    return encode_layout(ASKED, f) + struct.pack("<IQB", epoch, counter, int(f["part"]))


def encode_datagram(kind: str, f: Fields) -> bytes:
    request = struct.pack("<Q", int(f["request"], 16))
    if kind == "udp_data":
        payload = bytes.fromhex(f["payload"])
        head = struct.pack("<4sBBH", b"PWU1", 1, 2, len(payload)) + request + struct.pack("<I", int(f["segment"]))
        return head + struct.pack("<I", crc32c(head + asked(f))) + payload
    key, token = bytes.fromhex(f["key"]), bytes.fromhex(f["token"])
    if kind == "udp_status":
        out = struct.pack("<4sBBH", b"PWU1", 1, 3, int(f["code"])) + request
        out += struct.pack("<II", int(f["retry_us"]), 0) + token
        return out + siphash128(key, out)
    wanted = [int(i) for i in f["wanted"].split(",")]
    count = wanted[-1] + 1
    bitmap = bytearray((count + 7) // 8)
    for i in wanted:
        bitmap[i // 8] |= 1 << i % 8
    epoch, counter = version_of(f["version"])
    out = struct.pack("<4sBBH", b"PWU1", 1, 1, 96 + len(bitmap) + 16)
    out += struct.pack("<QQ", int(f["session"], 16), int(f["sequence"])) + request + encode_layout(ASKED, f)
    out += struct.pack("<IBBHQ", epoch, int(f["part"]), 0, int(f["segment_size"]), counter) + token
    out += struct.pack("<IHH", int(f["first_segment"]), count, 0) + bytes(bitmap)
    return out + siphash128(key, out)


# ---------------------------------------------------------------- manifests

DTYPE_BITS = {1: 8, 2: 8, 3: 16, 4: 16, 5: 32, 6: 32, 7: 64, 8: 64, 9: 16, 10: 16, 11: 32, 12: 64, 13: 8, 14: 8, 15: 8,
              16: 8, 17: 64, 18: 128, 19: 4, 20: 4}  # fmt: skip


def raw_size(fields: Fields) -> int:
    dims = [int(d) for d in fields["shape"].split(",") if d]
    kind, heads, begin, end = (int(fields[k]) for k in ("shard_kind", "heads", "begin", "end"))
    if kind == ROWS:
        dims[0] = end - begin
    if kind == HEADS:
        dims[0] = dims[0] // heads * (end - begin)
    elements = 1
    for dim in dims:
        elements *= dim
    return (elements * DTYPE_BITS[int(fields["dtype"])] + 7) // 8


def encode_entry(f: Fields) -> bytes:
    kind, heads, begin, end = (int(f[k]) for k in ("shard_kind", "heads", "begin", "end"))
    out = struct.pack("<Q", block_id(f["tensor"].encode(), kind, heads, begin, end))
    out += bytes([int(f["kind"])]) + text(f["tensor"])
    out += b"".join(map(varint, version_of(f["version"])))
    if f["kind"] == "1":
        return out + text(f["target"])
    out += bytes([kind])
    if kind == HEADS:
        out += varint(heads)
    if kind != WHOLE:
        out += varint(begin) + varint(end)
    dims = [int(d) for d in f["shape"].split(",") if d]
    out += varint(int(f["dtype"])) + bytes([len(dims)]) + b"".join(map(varint, dims)) + varint(int(f["codec"]))
    if f["codec"] == "0":
        assert int(f["stored_size"]) == raw_size(f)
    else:
        out += varint(int(f["stored_size"]))
    out += struct.pack("<Q", int(f["crc64"], 16))
    if int(f["stored_size"]) > 65536:
        out += struct.pack("<I", int(f["extent_table_crc"], 16))
    return out


def decode_entry(c: Cursor) -> Fields:
    ident = c.unpack("Q")
    f = {"kind": str(c.unpack("B")), "tensor": get("text", c), "version": f"{c.varint()}.{c.varint()}"}
    f |= {"target": "", "shard_kind": "0", "heads": "0", "begin": "0", "end": "0", "dtype": "1", "shape": "",
          "codec": "0", "stored_size": "0", "crc64": "0" * 16, "extent_table_crc": "0" * 8}  # fmt: skip
    if f["kind"] == "1":
        f["target"] = get("text", c)
    else:
        f["shard_kind"] = str(c.unpack("B"))
        if f["shard_kind"] == "2":
            f["heads"] = str(c.varint())
        if f["shard_kind"] != "0":
            f |= {"begin": str(c.varint()), "end": str(c.varint())}
        f["dtype"] = str(c.varint())
        f["shape"] = ",".join(str(c.varint()) for _ in range(c.unpack("B")))
        f["codec"] = str(c.varint())
        f["stored_size"] = str(raw_size(f) if f["codec"] == "0" else c.varint())
        f["crc64"] = get("xQ", c)
        if int(f["stored_size"]) > 65536:
            f["extent_table_crc"] = get("xI", c)
    shard = (int(f[k]) for k in ("shard_kind", "heads", "begin", "end"))
    assert ident == block_id(f["tensor"].encode(), *shard)
    return f


def root(version: str, entries: list[bytes]) -> bytes:
    bits = 0
    while len(entries) >> bits > 256:
        bits += 1
    pages: list[list[bytes]] = [[] for _ in range(1 << bits)]
    for entry in sorted(entries, key=ident):
        pages[ident(entry) >> (64 - bits)].append(entry)
    head = text("paramwire manifest 1") + b"".join(map(varint, version_of(version)))
    head += varint(len(entries)) + bytes([bits])
    return hashlib.sha256(head + b"".join(hashlib.sha256(b"".join(page)).digest() for page in pages)).digest()


def ident(entry: bytes) -> int:
    return struct.unpack("<Q", entry[:8])[0]


Manifest = tuple[str, list[bytes]]  # version, encoded entries


def named(manifest: Manifest) -> bytes:
    return b"".join(map(varint, version_of(manifest[0])))


def encode_delta(base: Manifest | None, target: Manifest) -> bytes:
    out = bytes([1, 0])
    if base:
        out = bytes([1, 1]) + named(base) + root(*base)
    out += named(target) + varint(len(target[1])) + root(*target)
    held = {ident(e): e for e in base[1]} if base else {}
    new = {ident(e): e for e in target[1]}
    removed = sorted(held.keys() - new.keys())
    added = [new[i] for i in sorted(new) if held.get(i) != new[i]]
    out += varint(len(removed)) + b"".join(struct.pack("<Q", i) for i in removed)
    return out + varint(len(added)) + b"".join(added)


def apply_delta(base: Manifest | None, stream: bytes) -> Manifest:
    c = Cursor(stream)
    assert c.take(1) == b"\1"
    entries: dict[int, bytes] = {}
    if c.take(1) == b"\1":
        assert base
        assert c.take(len(named(base))) == named(base)
        assert c.take(32) == root(*base)
        entries = {ident(e): e for e in base[1]}
    version, count, wanted = f"{c.varint()}.{c.varint()}", c.varint(), c.take(32)
    for _ in range(c.varint()):
        del entries[c.unpack("Q")]
    for _ in range(c.varint()):
        start = c.at
        decode_entry(c)
        entries[ident(stream[start:])] = stream[start : c.at]
    c.end()
    result = (version, [entries[i] for i in sorted(entries)])
    assert len(entries) == count
    assert root(*result) == wanted
    return result


# ---------------------------------------------------------------- the golden file


def parse_line(line: str) -> tuple[str, Fields]:
    kind, *pairs = line.split(" ")
    return kind, dict(pair.split("=", 1) for pair in pairs)


LINES = [parse_line(line) for line in GOLDEN.read_text("utf-8").splitlines() if line and not line.startswith("#")]


def manifest_named(name: str) -> Manifest | None:
    if name == "none":
        return None
    found = next(f for kind, f in LINES if kind == "manifest" and f["name"] == name)
    entries = {f["name"]: f for kind, f in LINES if kind == "entry"}
    return found["version"], sorted((encode_entry(entries[e]) for e in found["entries"].split(",") if e), key=ident)


def generated(count: int) -> list[bytes]:
    # The rule of `generated_root` lines: tensor t<i>, i8 of shape (i), CRC-64 i, version 1.1, for i below count.
    fields = [parse_line(f"entry kind=0 tensor=t{i} version=1.1 target= shard_kind=0 heads=0 begin=0 end=0 dtype=2 "
                         f"shape={i} codec=0 stored_size={i} crc64={i:016x} extent_table_crc=00000000")[1]
              for i in range(count)]  # fmt: skip
    return [encode_entry(f) for f in fields]


def encode(kind: str, f: Fields) -> bytes:
    if kind == "crc32c":
        return struct.pack("<I", crc32c(f["text"].encode()))
    if kind == "crc64":
        return struct.pack("<Q", crc64(f["text"].encode()))
    if kind == "siphash128":
        return siphash128(bytes.fromhex(f["key"]), bytes.fromhex(f["data"]))
    if kind in DATAGRAMS:
        return encode_datagram(kind, f)
    if kind == "block_id":
        shard = (int(f[k]) for k in ("shard_kind", "heads", "begin", "end"))
        return struct.pack("<Q", block_id(f["tensor"].encode(), *shard))
    if kind == "pin_word":
        return struct.pack("<Q", (int(f["header_arena"]) + 1) << 48 | int(f["header_offset"]) // 64)
    if kind == "slot_header":
        head = encode_layout(STRUCTS[kind], f)
        return head + struct.pack("<I", crc32c(head))
    if kind in STRUCTS:
        return encode_layout(STRUCTS[kind], f)
    if kind in MESSAGES:
        code, layout = MESSAGES[kind]
        return frame(code, int(f["request"]), encode_layout(layout, f), body_size(kind, f))
    if kind == "entry":
        return encode_entry(f)
    if kind == "manifest":
        target = manifest_named(f["name"])
        assert target
        return root(*target)
    if kind == "generated_root":
        return root(f["version"], generated(int(f["count"])))
    assert kind == "delta", f"unknown kind of line: {kind}"
    target = manifest_named(f["target"])
    assert target
    return encode_delta(manifest_named(f["base"]), target)


@pytest.mark.parametrize(("kind", "fields"), LINES, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(LINES)])
def test_fields_give_the_golden_bytes_and_back(kind: str, fields: Fields) -> None:
    golden = bytes.fromhex(fields["hex"])
    assert encode(kind, fields).hex() == golden.hex()
    wanted = {k: v for k, v in fields.items() if k not in ("hex", "name", "request", "body_size")}
    if kind in MESSAGES:
        code, request, meta, size = parse_frame(golden)
        assert (code, request, size) == (MESSAGES[kind][0], int(fields["request"]), body_size(kind, fields))
        assert decode_layout(MESSAGES[kind][1], meta) == wanted
    elif kind == "slot_header":
        assert decode_layout([*STRUCTS[kind], ("header_crc", "xI")], golden) == wanted
    elif kind in STRUCTS:
        assert decode_layout(STRUCTS[kind], golden) == wanted
    elif kind == "entry":
        cursor = Cursor(golden)
        assert decode_entry(cursor) == wanted
        cursor.end()
    elif kind == "delta":
        assert apply_delta(manifest_named(fields["base"]), golden) == manifest_named(fields["target"])


def test_every_message_has_a_golden_line() -> None:
    others = {*DATAGRAMS, "delta", "manifest", "generated_root"}
    assert {kind for kind, _ in LINES} >= MESSAGES.keys() | STRUCTS.keys() | others


def test_the_worked_examples_of_the_format_page_are_golden_lines() -> None:
    page = GOLDEN.parents[2] / "cpp" / "paramwire" / "wire" / "FORMAT.md"
    rows = re.findall(r"^\| (\d+) \| `([0-9a-f ]+)` \|", page.read_text("utf-8").split("## Worked examples")[1], re.M)
    examples: list[bytes] = []
    for offset, text_hex in rows:
        if offset == "0":
            examples.append(b"")
        assert len(examples[-1]) == int(offset)
        examples[-1] += bytes.fromhex(text_hex)
    golden = {f["hex"] for _, f in LINES}
    assert len(examples) == 2
    assert all(example.hex() in golden for example in examples)


if __name__ == "__main__":
    for line in GOLDEN.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            kind, fields = parse_line(line)
            made = encode(kind, fields)
            crc = made[-4:][::-1].hex() if kind == "slot_header" else None
            fields |= {"header_crc": crc} if crc else {}
            line = " ".join([kind, *(f"{k}={v}" for k, v in (fields | {"hex": made.hex()}).items())])
        print(line)  # noqa: T201
