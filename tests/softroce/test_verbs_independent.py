"""A client with no code of paramwire reads a published block by RDMA, and sees what is wrong."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import paramwire as pw
import programs
import pytest

READER = Path(__file__).with_name("independent_reader.py")


def read(server, device: str, gid_index: int) -> tuple[int, str, str]:
    words = ["/usr/bin/python3", str(READER), server.address, device, str(gid_index), "w"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def flip_bit(pid: int, pattern: bytes) -> None:
    """In the first arena of process `pid` that holds `pattern`, through proc(5)."""
    with open(f"/proc/{pid}/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:" in line and "rw" in line.split()[1]]
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for begin, end in ((int(a, 16), int(b, 16)) for a, b in ranges):
            memory.seek(begin)
            with contextlib.suppress(OSError):
                found = memory.read(min(end - begin, 16 << 20)).find(pattern)
                if found >= 0:
                    memory.seek(begin + found)
                    memory.write(bytes([pattern[0] ^ 1]))
                    return
    pytest.fail("the tensor's bytes are in no arena")


@pytest.mark.parametrize("nbytes", [1000, 70_000], ids=["one extent", "with an extent table"])
def test_a_program_without_our_code_reads_a_block_by_rdma_and_verifies_it(server, connect, near, nbytes):
    server.publish(other=(5000, 9))
    version = server.publish(w=(nbytes, 1), other=(5000, 8))
    wanted = programs.content(nbytes, 1)
    index = connect(server).stats()["verbs_gid_index"]
    status, out, errors = read(server, near.device, index)
    assert (status, errors) == (0, "")
    facts = json.loads(out)
    assert facts == {
        "version": list(version),
        "size": nbytes,
        "crc64": pw.crc64(wanted),
        "hex": wanted[:64].tobytes().hex(),
    }
    assert server.stats()["udp_sessions"] == 0


def test_a_flipped_bit_of_the_servers_memory_is_seen_by_it_and_by_us(server, connect, near):
    server.publish(w=(1000, 1))
    client = connect(server)
    flip_bit(server.pid, programs.content(1000, 1)[500:600].tobytes())
    with pytest.raises(pw.CorruptError, match="w"):
        client.fetch("w")
    status, _, errors = read(server, near.device, client.stats()["verbs_gid_index"])
    assert status == 1
    assert "payload's CRC-64" in errors
