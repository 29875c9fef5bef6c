"""Checkpoint files read by a second implementation, written from wire/FORMAT.md ("Checkpoints") alone.

Goal: the page is complete and exact. Method: tests/golden/checkpoint.txt holds a directory in hex, which
tests/cpp/checkpoint_golden_test.cpp makes again byte by byte; here it is read, every field and CRC compared. What is
too long for a golden file, blocks of several extents, is saved by the library and read here.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paramwire import checkpoint
from test_wire_golden import Cursor, crc32c, crc64, decode_entry, encode_delta, encode_entry, raw_size, root

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "checkpoint.txt"


def read_record(data: bytes, offset: int) -> dict[str, Any]:
    fixed = struct.unpack("<IBBHIIQQIQQII", data[offset : offset + 60])
    (magic, form, reserved, codec, entry_size, row_count, stored_size, stored_crc, *base, table_crc, header_crc) = fixed
    assert (magic, reserved) == (0x42435750, 0)
    at = offset + 60
    encoded = data[at : at + entry_size]
    assert header_crc == crc32c(data[offset : offset + 56] + encoded)
    cursor = Cursor(encoded)
    entry = decode_entry(cursor)
    cursor.end()
    assert encode_entry(entry) == encoded
    at += entry_size
    table = data[at : at + 8 * row_count]
    assert table_crc == crc32c(table)
    rows = list(struct.iter_unpack("<II", table))
    at += 8 * row_count
    payload = data[at : at + stored_size]
    assert len(payload) == stored_size
    assert stored_crc == crc64(payload)
    begin = 0
    for size, crc in rows:
        assert crc == crc32c(payload[begin : begin + size])
        begin += size
    if rows:
        assert begin == stored_size
    if form == 0:
        assert base == [0, 0, 0]
    if (form, codec) == (0, 0):
        assert stored_size == raw_size(entry)
        assert len(rows) == (0 if stored_size <= 65536 else -(-stored_size // 65536))
        assert int(entry["crc64"], 16) == stored_crc
        if rows:
            assert int(entry["extent_table_crc"], 16) == table_crc
    size = 60 + entry_size + 8 * row_count + stored_size
    return {"form": form, "codec": codec, "entry": entry, "payload": payload, "size": size, "header_crc": header_crc}


def read_data_file(name: str, data: bytes) -> dict[int, dict[str, Any]]:
    """Records by their offset."""
    magic, form, reserved, epoch, counter = struct.unpack("<IHHIQ", data[:20])
    number, reserved_too, crc = struct.unpack("<III", data[52:64])
    assert (magic, form, reserved, reserved_too) == (0x44435750, 1, 0, 0)
    assert crc == crc32c(data[:60])
    assert name == f"data-{epoch:010}-{counter:020}-{number:06}.blocks"
    records, at = {}, 64
    while at < len(data):
        records[at] = read_record(data, at)
        at += records[at]["size"]
    assert at == len(data)
    return records


def read_manifest_file(name: str, data: bytes) -> dict[str, Any]:
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    cursor = Cursor(data[:-32])
    assert cursor.take(8) == b"PWCK\x01\0\0\0"
    out: dict[str, Any] = {"created": cursor.unpack("Q"), "root": cursor.take(32), "chain": cursor.varint()}
    out["files"] = [(cursor.take(cursor.varint()).decode(), cursor.unpack("Q")) for _ in range(cursor.varint())]
    assert out["files"] == sorted(out["files"])
    stream = Cursor(cursor.take(cursor.varint()))
    assert stream.take(2) == b"\x01\0"
    epoch, counter, count = stream.varint(), stream.varint(), stream.varint()
    assert name == f"checkpoint-{epoch:010}-{counter:020}.manifest"
    given_root = stream.take(32)
    assert stream.varint() == 0
    assert stream.varint() == count
    entries = [decode_entry(stream) for _ in range(count)]
    stream.end()
    encoded = [encode_entry(entry) for entry in entries]
    assert given_root == root(f"{epoch}.{counter}", encoded)
    assert stream.data == encode_delta(None, (f"{epoch}.{counter}", encoded))
    out["blocks"] = []
    for entry in entries:
        links = [
            (cursor.varint(), cursor.varint(), cursor.varint(), cursor.unpack("I")) for _ in range(cursor.varint())
        ]
        assert len(links) <= out["chain"] + 1
        assert bool(links) == (entry["kind"] == "0")
        out["blocks"].append((entry, links))
    cursor.end()
    assert {link[0] for _, links in out["blocks"] for link in links} == set(range(len(out["files"])))
    return out


def read_directory(files: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    """Raw bytes of every block by name and range, for each version, by its manifest's name."""
    out = {}
    data = {name: read_data_file(name, content) for name, content in files.items() if name.startswith("data-")}
    for name, content in files.items():
        if not name.startswith("checkpoint-"):
            continue
        manifest = read_manifest_file(name, content)
        blocks = {}
        for entry, links in manifest["blocks"]:
            if entry["kind"] == "1":
                blocks[f"{entry['tensor']} = {entry['target']}"] = b""
                continue
            assert len(links) == 1
            file, offset, size, header_crc = links[0]
            file_name, file_size = manifest["files"][file]
            assert file_size == len(files[file_name])
            record = data[file_name][offset]
            assert (record["size"], record["header_crc"]) == (size, header_crc)
            for field in ("tensor", "shard_kind", "begin", "end", "dtype", "shape", "crc64"):
                assert record["entry"][field] == entry[field]
            assert (record["form"], record["codec"]) == (0, 0)
            blocks[f"{entry['tensor']} {entry['begin']}:{entry['end']}"] = record["payload"]
        out[name] = blocks
    return out


def golden() -> dict[str, bytes]:
    lines = (line.split() for line in GOLDEN.read_text().splitlines())
    return {name: bytes.fromhex(content) for name, content in lines}


def test_the_golden_directory_reads_by_the_page_alone():
    files = golden()
    versions = read_directory(files)
    first, second = (f"checkpoint-{7:010}-{counter:020}.manifest" for counter in (1, 2))
    assert set(versions) == {first, second}
    assert set(versions[first]) == {"w 0:0", "cut 0:3", "cut 3:5", "none 0:0", "one 0:0", "tied = w"}
    assert {name for name in versions[first] if versions[first][name] != versions[second][name]} == {"one 0:0"}
    assert len(versions[first]["w 0:0"]) == 24
    assert versions[first]["none 0:0"] == b""
    manifests = [read_manifest_file(name, files[name]) for name in (first, second)]
    assert [manifest["chain"] for manifest in manifests] == [0, 1]
    assert manifests[0]["created"] == 1700000000000001


def test_the_library_reads_the_golden_directory(tmp_path: Path):
    for name, content in golden().items():
        (tmp_path / name).write_bytes(content)
    summaries = checkpoint.ls(tmp_path)
    found = [(str(item.version), item.full, item.whole) for item in summaries]
    assert found == [("7.2", False, True), ("7.1", True, True)]
    arrays = checkpoint.restore_arrays(tmp_path)
    assert sorted(arrays) == ["cut", "none", "one", "tied", "w"]
    assert arrays["w"] is arrays["tied"]
    blocks = read_directory(golden())[summaries[0].file]
    assert arrays["w"].tobytes() == blocks["w 0:0"]
    assert arrays["cut"].tobytes() == blocks["cut 0:3"] + blocks["cut 3:5"]
    assert checkpoint.verify(tmp_path, decode=True).problems == ()


@pytest.mark.parametrize("rows", [1, 40_000])
def test_what_the_library_writes_reads_by_the_page_alone(tmp_path: Path, rows: int):
    """40,000 rows of 16 bytes: ten extents; in blocks of 100,000 bytes, two each."""
    array = np.arange(rows * 4, dtype=np.uint32).reshape(rows, 4)
    checkpoint.save(tmp_path / "d", {"x": array}, codec="raw", block_bytes=100_000, version=(4, 9))
    files = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    (blocks,) = read_directory(files).values()
    ordered = sorted(blocks, key=lambda name: int(name.split()[1].split(":")[0]))
    assert b"".join(blocks[name] for name in ordered) == array.tobytes()
