"""Golden vectors of the codecs against a second implementation, written from wire/FORMAT.md, "Codecs", alone.

Goal: frames that the library writes are what the page says, to the bit, so that the page is complete.
Method: tests/golden/codec.txt holds one extent a line, `planes dtype=... index=N raw=BYTES hex=FRAME`. The frames are
decoded here, in plain Python, and in tests/cpp/codec_golden_test.cpp by the library, which also has to write the same
bytes (and prints those that it writes where they are others, for new lines). Nothing of paramwire is imported.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "codec.txt"

# From code 1 on.
DTYPES = [
    "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64",
    "f8_e4m3", "f8_e5m2", "f8_e8m0", "bool", "c64", "c128", "i4", "u4",
]  # fmt: skip
WIDTHS = {
    **dict.fromkeys(("f16", "bf16", "u16", "i16"), 2),
    **dict.fromkeys(("f32", "c64", "u32", "i32"), 4),
    **dict.fromkeys(("f64", "c128", "u64", "i64"), 8),
}
TURNED = {"f16", "bf16", "f32", "c64", "f64", "c128"}
CODECS = {"planes": 1, "lz4": 2}


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def canonical(lengths: dict[int, int]) -> dict[tuple[int, int], int]:
    """(length, code): symbol."""
    codes, code, before = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in lengths.items() if length):
        code <<= length - before
        codes[length, code] = symbol
        code, before = code + 1, length
    assert code == 1 << before, "the code is complete"
    return codes


def stream(data: bytes, codes: dict[tuple[int, int], int], count: int) -> bytes:
    bits = [byte >> i & 1 for byte in data for i in range(8)]
    out, at = bytearray(), 0
    while len(out) < count:
        length, code = 0, 0
        while (length, code) not in codes or length == 0:
            code = code << 1 | bits[at]
            length, at = length + 1, at + 1
        out.append(codes[length, code])
    assert len(data) == (at + 7) // 8, "the stream ends in the byte of its last code"
    assert not any(bits[at:]), "the rest of that byte is zero"
    return bytes(out)


def planes(body: bytes, dtype: str, raw_size: int) -> bytes:
    width = WIDTHS.get(dtype, 1)
    n = raw_size // width
    at, found = 0, []
    for _ in range(width):
        mode, at = body[at], at + 1
        if mode == 0:
            found.append(body[at : at + n])
            at += n
        elif mode == 1:
            found.append(body[at : at + 1] * n)
            at += 1
        else:
            assert mode == 2
            first, last = body[at], body[at + 1]
            nibbles = [
                byte >> shift & 15 for byte in body[at + 2 : at + 2 + (last - first + 2) // 2] for shift in (0, 4)
            ]
            at += 2 + (last - first + 2) // 2
            assert (last - first + 1) % 2 == 0 or nibbles.pop() == 0
            codes = canonical(dict(zip(range(first, last + 1), nibbles, strict=True)))
            sizes = struct.unpack_from("<8H", body, at)
            at += 16
            plane, q = b"", -(-n // 8)
            for s, size in enumerate(sizes):
                plane += stream(body[at : at + size], codes, min(n, (s + 1) * q) - min(n, s * q))
                at += size
            found.append(plane)
    assert at == len(body), "nothing after the last plane"
    out = bytearray()
    for i in range(n):
        element = int.from_bytes(bytes(plane[i] for plane in found), "little")
        if dtype in TURNED:
            element = element >> 1 | (element & 1) << (8 * width - 1)
        out += element.to_bytes(width, "little")
    return bytes(out)


def lz4(body: bytes) -> bytes:
    """lz4 1.9, doc/lz4_Block_format.md."""
    at, out = 0, bytearray()

    def length(of: int) -> int:
        nonlocal at
        if of == 15:
            while True:
                of, at = of + body[at], at + 1
                if body[at - 1] != 255:
                    break
        return of

    while True:
        token, at = body[at], at + 1
        literals = length(token >> 4)
        out += body[at : at + literals]
        at += literals
        if at == len(body):
            return bytes(out)
        offset = body[at] | body[at + 1] << 8
        at += 2
        assert 0 < offset <= len(out)
        for _ in range(length(token & 15) + 4):
            out.append(out[-offset])


def decode(frame: bytes, codec: str, dtype: str, index: int, raw_size: int) -> bytes:
    check, form = struct.unpack_from("<IB", frame)
    body = frame[5:]
    assert form in (0, 1)
    raw = body if form == 0 else planes(body, dtype, raw_size) if codec == "planes" else lz4(body)
    assert len(raw) == raw_size
    place = struct.pack("<QIHH", index, raw_size, CODECS[codec], DTYPES.index(dtype) + 1)
    assert crc32c(place + raw) == check
    return raw


def lines() -> list[tuple[str, dict[str, str]]]:
    out = []
    for line in GOLDEN.read_text().splitlines():
        if line and not line.startswith("#"):
            kind, *pairs = line.split()
            out.append((kind, dict(pair.split("=") for pair in pairs)))
    return out


@pytest.mark.parametrize(
    ("codec", "fields"), lines(), ids=lambda value: value if isinstance(value, str) else value["of"]
)
def test_a_golden_frame_decodes_by_the_page_to_its_raw_bytes(codec, fields):
    raw = bytes.fromhex(fields["raw"])
    frame = bytes.fromhex(fields["hex"])
    assert decode(frame, codec, fields["dtype"], int(fields["index"]), len(raw)) == raw


def test_every_plane_mode_form_and_codec_has_a_golden_line():
    seen = set()
    for codec, fields in lines():
        frame = bytes.fromhex(fields["hex"])
        seen.add((codec, frame[4]))
        if codec == "planes" and frame[4] == 1:
            seen.add(frame[5])
    assert seen >= {("planes", 0), ("planes", 1), ("lz4", 0), ("lz4", 1), 0, 1, 2}


def test_the_example_of_the_page_decodes():
    plane = bytes.fromhex("02 41432102 0100 0100 0100 0100 0000 0000 0000 0000 00 00 01 03")
    assert planes(plane, "u8", 4) == b"\x41\x41\x42\x43"
