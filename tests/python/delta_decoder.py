"""A decoder of deltas that was written from wire/FORMAT.md alone, "Deltas" and "One-bit deltas", without anything of
paramwire.

What FORMAT.md forbids is an AssertionError. Bit by bit, so slow: for blocks of a few thousand elements.
"""

from __future__ import annotations

import struct

from test_wire_golden import Cursor, crc32c, crc64

PIECE = 1 << 20
SAME, FULL, XOR, STEPS, SPARSE, MIXED = range(6)
DENSE, NEW_DISTANCES, NEW_STEPS = 1, 2, 4
# code -> bytes of a word, bits of its exponent
WORDS = {9: (2, 5), 10: (2, 8), 11: (4, 8), 17: (4, 8), 12: (8, 11), 18: (8, 11), 13: (1, 4), 14: (1, 5)}
WIDTHS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 4, 7: 8, 8: 8, 15: 1, 16: 1, 19: 1, 20: 1}


class Bits:
    """From the lowest bit of each byte up."""

    def __init__(self, data: bytes) -> None:
        self.value, self.size, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def take(self, count: int) -> int:
        assert self.at + count <= self.size, "bits end early"
        self.at += count
        return (self.value >> (self.at - count)) & ((1 << count) - 1)

    def end(self) -> None:
        assert self.size - self.at < 8, "bytes left over"
        assert self.value >> self.at == 0, "bits left over"


def stream(cursor: Cursor, count: int) -> bytes:
    if count == 0:
        return b""
    form = cursor.unpack("B")
    if form == 0:
        return cursor.take(count)
    if form == 1:
        return cursor.take(1) * count
    assert form == 2
    first, last = cursor.unpack("B"), cursor.unpack("B")
    assert first < last
    nibbles = last - first + 1
    packed = cursor.take((nibbles + 1) // 2)
    lengths = {first + i: packed[i // 2] >> (4 * (i % 2)) & 15 for i in range(nibbles)}
    assert lengths[first]
    assert lengths[last]
    assert max(lengths.values()) <= 11
    codes, code, before = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in lengths.items() if length):
        code <<= length - before
        codes[length, code] = symbol
        code, before = code + 1, length
    assert code == 1 << before, "the sum of 2^-length is 1"
    sizes = [cursor.varint() for _ in range(8)]
    out, part = bytearray(), -(-count // 8)
    for index, size in enumerate(sizes):
        bits = Bits(cursor.take(size))
        for _ in range(max(0, min(part, count - index * part))):
            code = length = 0
            while (length, code) not in codes:
                code, length = code << 1 | bits.take(1), length + 1
            out.append(codes[length, code])
        bits.end()
    return bytes(out)


class Word:
    """Elements of one dtype."""

    def __init__(self, dtype: int) -> None:
        self.bytes, self.exponent_bits = WORDS.get(dtype) or (WIDTHS[dtype], 0)
        self.bits = 8 * self.bytes
        self.mask = (1 << self.bits) - 1
        self.floating = self.exponent_bits > 0

    def ordered(self, x: int) -> int:
        return x ^ (self.mask >> 1) if self.floating and x >> (self.bits - 1) else x

    def moved(self, base: int, step: int) -> int:
        difference = -(step + 1) // 2 if step % 2 else step // 2
        return self.ordered((self.ordered(base) + difference) & self.mask)

    def exponent(self, x: int) -> int:
        mantissa = self.bits - 1 - self.exponent_bits
        return (x >> mantissa) & ((1 << self.exponent_bits) - 1) if self.floating else 0


def planes(word: Word, form: int, cursor: Cursor, base: list[int]) -> list[int]:
    parts = [stream(cursor, len(base)) for _ in range(word.bytes)]
    made = [sum(parts[p][i] << (8 * p) for p in range(word.bytes)) for i in range(len(base))]
    if form == XOR:
        return [a ^ b for a, b in zip(base, made, strict=True)]
    if form == STEPS:
        return [word.moved(a, b) for a, b in zip(base, made, strict=True)]
    return [(x >> 1 | x << (word.bits - 1)) & word.mask for x in made] if word.floating else made


class Numbers:
    """Numbers of several classes, each from its class's table; raw bits come one after the other."""

    def __init__(self, tables: list[list[int]], of_class: list[int]) -> None:
        self.tables, self.of_class, self.bits = tables, of_class, Bits(b"")

    def take(self, kind: int) -> int:
        symbol = self.tables[self.of_class[kind]].pop(0)
        assert symbol < 252
        if symbol < 8:
            return symbol
        extra = symbol // 4 - 1
        return (4 + symbol % 4) << extra | self.bits.take(extra)

    def end(self) -> None:
        assert not any(self.tables), "symbols left over"
        self.bits.end()


def sparse(word: Word, cursor: Cursor, base: list[int]) -> list[int]:
    count, top = cursor.unpack("B"), cursor.unpack("H")
    flags = list(cursor.take(count))
    assert 1 <= count <= 16
    assert count > 1 or top == 0
    assert flags[0] | DENSE == DENSE | NEW_DISTANCES | NEW_STEPS

    def tables(flag: int) -> Numbers:
        of_class, at = [], -1
        for value in flags:
            at += bool(value & flag)
            of_class.append(at)
        made = []
        for _ in range(at + 1):
            size = cursor.varint()
            made.append(list(stream(cursor, size)))
        return Numbers(made, of_class)

    distances, steps = tables(NEW_DISTANCES), tables(NEW_STEPS)
    for numbers in (distances, steps):
        size = cursor.varint()
        numbers.bits = Bits(cursor.take(size))
    left = [0 if flags[c] & DENSE else distances.take(c) for c in range(count)]
    out = []
    for x in base:
        c = min(max(top - word.exponent(x), 0), count - 1)
        if left[c]:
            left[c] -= 1
            out.append(x)
            continue
        step = steps.take(c)
        out.append(word.moved(x, step))
        if not flags[c] & DENSE:
            assert step
            left[c] = distances.take(c)
    assert not any(left)
    distances.end()
    steps.end()
    return out


def apply_delta(delta: bytes, base: bytes) -> bytes:
    cursor = Cursor(delta)
    assert cursor.take(4) == b"PWRD"
    assert cursor.unpack("B") == 1
    form, dtype, raw_size = cursor.unpack("B"), cursor.unpack("H"), cursor.unpack("Q")
    counter, epoch, table_crc = cursor.unpack("Q"), cursor.unpack("I"), cursor.unpack("I")
    base_crc, result_crc, payload_size = cursor.unpack("Q"), cursor.unpack("Q"), cursor.unpack("Q")
    assert cursor.unpack("I") == 0
    assert cursor.unpack("I") == crc32c(delta[:60])
    assert counter
    assert epoch
    assert (len(base), crc64(base)) == (raw_size, base_crc)
    pieces = 0 if form == SAME else -(-raw_size // PIECE)
    assert len(delta) == 64 + 12 * pieces + payload_size
    assert crc32c(delta[64 : 64 + 12 * pieces]) == table_crc
    rows = [struct.unpack("<III", cursor.take(12)) for _ in range(pieces)]
    forms = {row[0] for row in rows} - {SAME}
    assert form == (MIXED if len(forms) > 1 else next(iter(forms), SAME))
    word, out = Word(dtype), b""
    for index, (kind, size, crc) in enumerate(rows):
        stored = cursor.take(size)
        assert crc32c(stored) == crc
        part = base[index * PIECE : (index + 1) * PIECE]
        elements = [int.from_bytes(part[at : at + word.bytes], "little") for at in range(0, len(part), word.bytes)]
        inside = Cursor(stored)
        if kind == SPARSE:
            elements = sparse(word, inside, elements)
        elif kind != SAME:
            elements = planes(word, kind, inside, elements)
        inside.end()
        out += b"".join(x.to_bytes(word.bytes, "little") for x in elements)
    cursor.end()
    out = out if pieces else base
    assert crc64(out) == result_crc
    return out


# ---------------------------------------------------------------- one-bit deltas


def f32(value: float) -> float:
    """Rounded to f32; infinite beyond it."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def load(dtype: int, data: bytes) -> float:
    if dtype == 10:
        return struct.unpack("<f", b"\0\0" + data)[0]
    return struct.unpack("<e" if dtype == 9 else "<f", data)[0]


def store(dtype: int, value: float) -> bytes:
    if dtype == 10:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return struct.pack("<e" if dtype == 9 else "<f", value)


def apply_onebit(delta: bytes, base: bytes) -> bytes:
    cursor = Cursor(delta)
    assert cursor.take(4) == b"PWRB"
    assert cursor.unpack("B") == 1
    kind, dtype = cursor.unpack("B"), cursor.unpack("H")
    assert cursor.unpack("I") == 1, "lossy"
    epoch, counter, rows, columns = cursor.unpack("I"), cursor.unpack("Q"), cursor.unpack("Q"), cursor.unpack("Q")
    base_crc, payload_crc = cursor.unpack("Q"), cursor.unpack("Q")
    assert cursor.unpack("I") == 0
    assert cursor.unpack("I") == crc32c(delta[:60])
    assert epoch
    assert counter
    assert dtype in (9, 10, 11)
    assert crc64(base) == base_crc
    assert crc64(delta[64:]) == payload_crc
    assert (rows == 1) if kind == 0 else (rows and columns)
    scales = [load(11, cursor.take(4)) for _ in range(rows)]
    width, out = 4 if dtype == 11 else 2, b""
    assert len(base) == rows * columns * width
    for row, scale in enumerate(scales):
        signs = Bits(cursor.take(-(-columns // 8)))
        for column in range(columns):
            at = (row * columns + column) * width
            element = base[at : at + width]
            sign = signs.take(1)
            if scale:
                out += store(dtype, f32(load(dtype, element) + (scale if sign else -scale)))
            else:
                out += element
        signs.end()
    cursor.end()
    return out
