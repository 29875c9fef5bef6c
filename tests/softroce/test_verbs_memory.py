"""Memory that may not be locked, can't be registered, or is shared by a fork."""

from __future__ import annotations

import mmap
import re

import numpy as np
import paramwire as pw
import programs
import pytest

MIB = 1 << 20
MEMLOCK = 65536  # bytes; the staging buffer of a link alone is 4 MiB


def test_a_client_that_may_not_lock_memory_is_told_need_limit_and_remedy(server, start_peer, over_verbs):
    server.publish(w=(MIB, 1))
    peer = start_peer(programs.without_locked_memory, MEMLOCK, server.address, over_verbs)
    name, text = peer.answer()
    assert name in ("BackpressureError", "UnavailableError")
    assert "ibv_reg_mr" in text
    assert str(4 * MIB) in text, "the need"
    assert re.search(r"64(\.0)? KiB", text), "the limit"
    assert "ulimit -l" in text
    assert "--ulimit memlock=-1" in text, "for a container"
    transport, rejected, told, mark = peer.answer()
    assert transport in ("udp", "tcp")
    assert "ulimit -l" in rejected["verbs"]
    assert len(told) == 1, told
    assert "verbs should work and does not" in told[0]
    assert mark, "the bytes are right"


def test_a_server_that_may_not_lock_memory_says_so_to_its_clients(start_peer, over_verbs, far):
    options = {"listen": ["tcp://127.0.0.1:0"], "verbs": far.device}
    address = start_peer(programs.serve_without_locked_memory, MEMLOCK, options).answer()
    with pytest.raises((pw.BackpressureError, pw.UnavailableError, pw.UnreachableError), match="ulimit -l"):
        pw.connect(address, **over_verbs)


def test_fetches_into_registered_memory_are_not_staged(server, connect, check):
    server.publish(w=(3 * MIB + 5, 1))
    client = connect(server)
    out = np.zeros(3 * MIB + 5, dtype=np.uint8)
    check(client.fetch("w", out=out), 1)
    assert client.stats()["verbs_direct_bytes"] == 0
    with client.register(out) as registration:
        assert registration.nbytes == out.nbytes
        out[:] = 0
        check(client.fetch("w", out=out), 1)
        assert client.stats()["verbs_direct_bytes"] == out.nbytes
    out[:] = 0
    check(client.fetch("w", out=out), 1)
    assert client.stats()["verbs_direct_bytes"] == out.nbytes, "not after the registration"


def test_memory_that_can_not_be_filled_is_not_registered(server, connect, tmp_path):
    client = connect(server)
    read_only = np.zeros(1000, dtype=np.uint8)
    read_only.flags.writeable = False
    with pytest.raises((pw.InvalidError, TypeError)):
        client.register(read_only)
    with pytest.raises((pw.InvalidError, TypeError)):
        client.register(bytes(1000))
    (tmp_path / "file").write_bytes(bytes(8192))
    with (
        open(tmp_path / "file", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        pytest.raises((pw.InvalidError, TypeError)),
    ):
        client.register(mapped)
    with pytest.raises(pw.InvalidError):
        client.register(np.zeros(0, dtype=np.uint8))
    with pytest.raises((pw.InvalidError, TypeError)):
        client.register(np.zeros((10, 10), dtype=np.uint8)[:, ::2])


def test_memory_without_pages_is_refused_by_the_device_with_a_typed_error(server, connect, check):
    server.publish(w=(4096, 1))
    client = connect(server)
    with mmap.mmap(-1, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        out = np.frombuffer(mapped, dtype=np.uint8)
        programs.protect(out, mmap.PROT_READ)
        with pytest.raises(pw.UnavailableError, match=r"ibv_reg_mr of 8192 bytes.*\(errno 14\)"):
            client.register(out)
        programs.protect(out, mmap.PROT_READ | mmap.PROT_WRITE)
        client.register(out).release()
        check(client.fetch("w", out=out[:4096]), 1)
        del out


def test_what_is_published_from_a_read_only_file_is_read_by_rdma(far, over_verbs, tmp_path, check):
    (tmp_path / "file").write_bytes(programs.content(MIB, 7).tobytes())
    mapped = np.memmap(tmp_path / "file", dtype=np.uint8, mode="r")
    with pw.Server("tcp://127.0.0.1:0", verbs=far.device) as server:
        with server.publish() as p:
            p.put("w", mapped)
        with pw.connect(server.address, **over_verbs) as client:
            check(client.fetch("w"), 7)


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing fork", "multiprocessing spawn"])
def test_a_fork_leaves_the_parents_reads_as_they_were_and_its_handles_to_the_parent(
    server, start_peer, over_verbs, how
):
    server.publish(**{f"t{i}": (4096 + i, i + 1) for i in range(100)})
    peer = start_peer(programs.fork_and_fetch, how, server.address, over_verbs, 100)
    child, parent = peer.answer(120.0)
    if how == "multiprocessing spawn":
        assert child == ["ok", ""], "a new process with a connection of its own"
    else:
        assert child[0] == "InvalidError"
        assert "fork" in child[1]
    assert parent == 1000, "fetches with the right bytes"
